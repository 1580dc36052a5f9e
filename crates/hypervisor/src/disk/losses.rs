//! Finds what QEMU was told about a guest's disks while it runs and what a move loses: dirty
//! bitmaps that no image holds, and limits on I/O. Exports of its disks prevent a move.

use super::graph::Graph;
use crate::command_line::format_node;
use crate::hardware;
use crate::manager::Guest;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// A dirty bitmap of a disk that is in QEMU's memory only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostBitmap {
    /// The disk's device, or the node if no device uses it.
    pub of: String,
    /// The name of the bitmap.
    pub name: String,
}

/// Limits on a disk's I/O that were set since the guest started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The disk's device.
    pub of: String,
    /// The limits by QEMU's names, such as `bps` and `iops_wr`.
    pub limits: BTreeMap<String, u64>,
}

/// An export of a disk by QEMU itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskExport {
    /// Its id.
    pub id: String,
    /// Its type, in QEMU's word: `nbd`, `vhost-user-blk`, ...
    pub kind: String,
    /// Its node.
    pub node: String,
}

/// What QEMU was told about a guest's disks, and what a move loses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Losses {
    /// Bitmaps that no image holds.
    pub bitmaps: Vec<LostBitmap>,
    /// Limits on I/O.
    pub limits: Vec<Limits>,
    /// The disks that keep what they read from their backing files.
    pub copy_on_read: Vec<String>,
}

/// Returns what a move of a guest loses of its disks. The limits that its description has move
/// along. That of a guest that was attached to has all of them.
pub async fn losses(qmp: &Qmp, guest: &Guest) -> Result<Losses, QmpError> {
    let flat = json!({"flat": true});
    let (devices, graph, nodes) = tokio::try_join!(
        qmp.query("query-block"),
        Graph::ask(qmp),
        qmp.execute("query-named-block-nodes", flat, COMMAND_TIMEOUT),
    )?;
    let mut disks = BTreeMap::new();
    for device in devices.as_array().into_iter().flatten() {
        let top = device["inserted"]["node-name"].as_str();
        let mut node = top.map(str::to_owned);
        while let Some(next) = node {
            let below = graph.child(&next, "file").cloned();
            disks.entry(next).or_insert_with(|| name_of(device));
            node = below;
        }
    }
    let hardware = guest.description().hardware.as_ref();
    let described = hardware.map(hardware::limits).unwrap_or_default();
    let described = described.into_iter();
    let described = described.map(|(disk, limits)| (format_node(disk), limits));
    Ok(Losses {
        bitmaps: bitmaps(&nodes, &disks),
        limits: match guest.is_attached() {
            true => Vec::new(),
            false => limits(&devices, &described.collect()),
        },
        copy_on_read: copy_on_read(&nodes, &disks),
    })
}

/// Returns the exports of a guest's disks by QEMU itself.
pub async fn exports(qmp: &Qmp) -> Result<Vec<DiskExport>, QmpError> {
    let exports = qmp.query("query-block-exports").await?;
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let exports = exports.as_array().into_iter().flatten();
    let exports = exports.map(|export| DiskExport {
        id: text(&export["id"]),
        kind: text(&export["type"]),
        node: text(&export["node-name"]),
    });
    Ok(exports.collect())
}

/// Returns a device's id, or its name where it has none.
fn name_of(device: &Value) -> String {
    let path = device["qdev"].as_str().unwrap_or_default();
    let path = path.strip_suffix("/virtio-backend").unwrap_or(path);
    let id = path.strip_prefix("/machine/peripheral/").unwrap_or(path);
    let drive = device["device"].as_str().unwrap_or_default();
    match (id, drive) {
        ("", drive) => drive.to_owned(),
        (path, drive) if path.starts_with('/') && !drive.is_empty() => drive.to_owned(),
        (id, _) => id.to_owned(),
    }
}

/// Returns the bitmaps that are not persistent. QEMU stores the others in their images when it
/// closes them.
fn bitmaps(nodes: &Value, disks: &BTreeMap<String, String>) -> Vec<LostBitmap> {
    let mut found = Vec::new();
    for node in nodes.as_array().into_iter().flatten() {
        let name = node["node-name"].as_str().unwrap_or_default();
        for bitmap in node["dirty-bitmaps"].as_array().into_iter().flatten() {
            // Those without a name are QEMU's own, of jobs.
            let Some(called) = bitmap["name"].as_str().filter(|name| !name.is_empty()) else {
                continue;
            };
            if bitmap["persistent"] != true {
                found.push(LostBitmap {
                    of: disks.get(name).cloned().unwrap_or_else(|| name.to_owned()),
                    name: called.to_owned(),
                });
            }
        }
    }
    found
}

/// Returns the disks below which a filter copies what is read. It is a node of its own or, with
/// `-drive`, one that QEMU added.
fn copy_on_read(nodes: &Value, disks: &BTreeMap<String, String>) -> Vec<String> {
    let nodes = nodes.as_array().into_iter().flatten();
    let filters = nodes.filter(|node| node["drv"] == "copy-on-read");
    let names = filters.filter_map(|node| disks.get(node["node-name"].as_str()?));
    names.cloned().collect()
}

/// Returns the limits that are not those described, which are by the disk's node.
fn limits(devices: &Value, described: &BTreeMap<String, Map<String, Value>>) -> Vec<Limits> {
    const NAMES: [&str; 12] = [
        "bps",
        "bps_rd",
        "bps_wr",
        "iops",
        "iops_rd",
        "iops_wr",
        "bps_max",
        "bps_rd_max",
        "bps_wr_max",
        "iops_max",
        "iops_rd_max",
        "iops_wr_max",
    ];
    let devices = devices.as_array().into_iter().flatten();
    let of_device = |device: &Value| {
        let inserted = device.get("inserted")?;
        let of = |limit: &dyn Fn(&str) -> Option<u64>| -> BTreeMap<String, u64> {
            let limit = |name: &&str| {
                let limit = limit(name).filter(|limit| *limit > 0)?;
                Some(((*name).to_owned(), limit))
            };
            NAMES.iter().filter_map(limit).collect()
        };
        let limits = of(&|name| inserted[name].as_u64());
        let node = inserted["node-name"].as_str().unwrap_or_default();
        let is_described = described
            .get(node)
            .is_some_and(|it| of(&|name| it.get(name)?.as_u64()) == limits);
        (!limits.is_empty() && !is_described).then(|| Limits {
            of: name_of(device),
            limits,
        })
    };
    devices.filter_map(of_device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bitmaps_in_memory_are_lost() {
        let nodes = json!([
            {"node-name": "d0", "dirty-bitmaps": [
                {"name": "b0", "persistent": false, "busy": false},
                {"name": "b1", "persistent": true},
                {"persistent": false},
            ]},
            {"node-name": "other", "dirty-bitmaps": [{"name": "b2", "persistent": false}]},
            {"node-name": "none"},
        ]);
        let disks = [("d0".to_owned(), "vda".to_owned())].into();
        let lost = |of: &str, name: &str| LostBitmap {
            of: of.to_owned(),
            name: name.to_owned(),
        };
        let expected = [lost("vda", "b0"), lost("other", "b2")];
        assert_eq!(bitmaps(&nodes, &disks), expected);
    }

    #[test]
    fn filters_that_copy_what_is_read_are_found() {
        let nodes = json!([
            {"node-name": "c0", "drv": "copy-on-read"},
            {"node-name": "d0", "drv": "qcow2"},
            {"node-name": "unused", "drv": "copy-on-read"},
        ]);
        let disks = [("c0", "vda"), ("d0", "vda")];
        let disks = disks.map(|(node, disk)| (node.to_owned(), disk.to_owned()));
        assert_eq!(copy_on_read(&nodes, &disks.into()), ["vda"]);
    }

    #[test]
    fn limits_are_those_that_are_set() {
        let devices = json!([
            {"device": "", "qdev": "/machine/peripheral/vda/virtio-backend",
             "inserted": {"node-name": "disk-vda", "bps": 1_000_000, "bps_rd": 0, "iops_wr": 7,
                          "iops_size": 9}},
            {"device": "drive0", "qdev": "/machine/unattached/device[3]",
             "inserted": {"bps": 0, "iops": 0}},
            {"device": "cd0", "qdev": "sr0"},
        ]);
        let described = |bps: u64| {
            let limits = json!({"bps": bps, "iops_wr": 7, "iops": 0, "group": "g"});
            BTreeMap::from([("disk-vda".to_owned(), limits.as_object().unwrap().clone())])
        };
        assert_eq!(limits(&devices, &described(1_000_000)), []);
        let limits = limits(&devices, &described(2_000_000));
        assert_eq!(limits.len(), 1);
        assert_eq!(limits[0].of, "vda");
        let set: Vec<_> = limits[0].limits.iter().collect();
        assert_eq!(
            set,
            [(&"bps".to_owned(), &1_000_000), (&"iops_wr".to_owned(), &7)]
        );
    }

    #[test]
    fn a_disk_is_called_what_its_owner_calls_it() {
        let name = |device: &str, qdev: &str| name_of(&json!({"device": device, "qdev": qdev}));
        assert_eq!(name("", "/machine/peripheral/vda/virtio-backend"), "vda");
        assert_eq!(name("", "/machine/peripheral/sda"), "sda");
        assert_eq!(name("", "sda"), "sda");
        assert_eq!(
            name("drive0", "/machine/peripheral-anon/device[1]"),
            "drive0"
        );
        assert_eq!(name("drive0", ""), "drive0");
    }
}
