//! Lists the drives of a running QEMU: its disk and CD devices, by every name that QEMU gives them.

use super::graph::{Graph, Known};
use crate::process_path::seen_from_here;
use crate::qmp::{Qmp, QmpError};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Returns the path in QEMU's object tree of a device that QEMU reports by its id or its path.
pub(crate) fn device_path(reported: &str) -> String {
    match reported.starts_with('/') {
        true => reported.to_owned(),
        false => format!("/machine/peripheral/{reported}"),
    }
}

/// QEMU's answer about its drives.
pub(super) struct Drives(Value);

impl Drives {
    pub(super) async fn ask(qmp: &Qmp) -> Result<Self, QmpError> {
        qmp.query("query-block").await.map(Self)
    }

    #[cfg(test)]
    pub(super) fn of(answer: Value) -> Self {
        Self(answer)
    }

    /// Returns the devices, each by its path, with what QEMU calls it in its block graph.
    pub(super) fn in_graph(&self) -> BTreeMap<String, String> {
        let drives = self.0.as_array().into_iter().flatten();
        let named = drives.filter_map(|drive| {
            let reported = drive["qdev"].as_str().filter(|name| !name.is_empty())?;
            let drive = drive["device"].as_str().filter(|name| !name.is_empty());
            let in_graph = drive.unwrap_or(reported).to_owned();
            Some((device_path(reported), in_graph))
        });
        named.collect()
    }
}

/// What is in a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inserted {
    /// Its file or block device, as QEMU has opened it, without backing files. `None` where it is
    /// not a file of this host.
    pub file: Option<PathBuf>,
    /// Its format, in QEMU's word. A disk without a format node is `raw`.
    pub format: String,
    /// Whether the guest can only read it.
    pub read_only: bool,
}

/// A disk or CD device of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drive {
    /// The device's path in QEMU's object tree.
    pub device: String,
    /// What is in it, if anything is.
    pub inserted: Option<Inserted>,
}

impl Drive {
    /// Returns where its file is, for us. The process is QEMU's.
    pub fn seen_file(&self, pid: i32) -> Option<PathBuf> {
        let file = self.inserted.as_ref()?.file.as_deref()?;
        Some(seen_from_here(pid, file))
    }

    /// Returns whether this image of ours is in it. The process is QEMU's.
    pub fn has(&self, image: &Path, pid: i32) -> bool {
        let theirs = self.seen_file(pid).and_then(|file| identity(&file));
        theirs.is_some() && theirs == identity(image)
    }
}

/// Returns what a file, or a block device, is known by.
fn identity(path: &Path) -> Option<(bool, u64, u64)> {
    let found = fs::metadata(path).ok()?;
    Some(match found.file_type().is_block_device() {
        true => (true, found.rdev(), 0),
        false => (false, found.dev(), found.ino()),
    })
}

/// Returns the drives of a QEMU, however they were given.
pub async fn drives(qmp: &Qmp) -> Result<Vec<Drive>, QmpError> {
    let (drives, graph, known) =
        tokio::try_join!(Drives::ask(qmp), Graph::ask(qmp), Known::ask(qmp))?;
    Ok(list(&drives, &graph, &known))
}

fn list(drives: &Drives, graph: &Graph, known: &Known) -> Vec<Drive> {
    let drives = drives.0.as_array().into_iter().flatten();
    let drive = |drive: &Value| {
        let device = device_path(drive["qdev"].as_str().filter(|name| !name.is_empty())?);
        let inserted = graph.root(&device).map(|top| {
            let format = known.below_filters(graph, top);
            let mut file = format;
            while let Some(below) = graph.child(file, "file") {
                file = below;
            }
            let is_file = matches!(known.driver(file).as_deref(), Some("file" | "host_device"));
            Inserted {
                file: known.file(file).filter(|_| is_file).map(PathBuf::from),
                format: match format == file {
                    true => "raw".to_owned(),
                    false => known.driver(format).unwrap_or_default(),
                },
                read_only: drive["inserted"]["ro"] == true,
            }
        });
        Some(Drive { device, inserted })
    };
    drives.filter_map(drive).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn drives_are_found_by_every_name_that_qemu_uses() {
        let drives = Drives::of(json!([
            {"device": "virtio0", "qdev": "/machine/peripheral-anon/device[0]/virtio-backend",
             "inserted": {"ro": false}},
            {"device": "", "qdev": "sda", "inserted": {"ro": true}},
            {"device": "", "qdev": "/machine/peripheral/vda/virtio-backend"},
            {"device": "drive9"},
        ]));
        let graph = json!({
            "nodes": [
                {"id": 1, "type": "block-backend", "name": "virtio0"},
                {"id": 2, "type": "block-backend", "name": "sda"},
                {"id": 3, "type": "block-backend",
                 "name": "/machine/peripheral/vda/virtio-backend"},
                {"id": 4, "type": "block-driver", "name": "t0"},
                {"id": 5, "type": "block-driver", "name": "#block1"},
                {"id": 6, "type": "block-driver", "name": "#block2"},
                {"id": 7, "type": "block-driver", "name": "sda"},
            ],
            "edges": [
                {"parent": 1, "child": 4, "name": "root"},
                {"parent": 4, "child": 5, "name": "file"},
                {"parent": 5, "child": 6, "name": "file"},
                {"parent": 2, "child": 7, "name": "root"},
            ],
        });
        let known = Known::of(json!([
            {"node-name": "t0", "drv": "throttle", "file": "/a"},
            {"node-name": "#block1", "drv": "qcow2", "file": "/a"},
            {"node-name": "#block2", "drv": "file", "file": "/a"},
            {"node-name": "sda", "drv": "nbd", "file": "nbd://b"},
        ]));
        let graph = Graph::read(&graph, &drives).unwrap();
        let listed = list(&drives, &graph, &known);
        let shown = listed.iter().map(|drive| {
            let inserted = drive.inserted.as_ref();
            let inserted = inserted.map(|one| (one.file.clone(), &*one.format, one.read_only));
            (&*drive.device, inserted)
        });
        let expected = [
            (
                "/machine/peripheral-anon/device[0]/virtio-backend",
                Some((Some("/a".into()), "qcow2", false)),
            ),
            ("/machine/peripheral/sda", Some((None, "raw", true))),
            ("/machine/peripheral/vda/virtio-backend", None),
        ];
        assert_eq!(shown.collect::<Vec<_>>(), expected);
    }
}
