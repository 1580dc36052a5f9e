//! Collects what a running QEMU reports of its guest, as far as a destination needs it.

use super::limits::{self, Limits};
use super::memory::{self, Memory};
use crate::observe::{Blocker, children, examine, property};
use crate::process::ProcessId;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_protocol::hardware::Topology;
use longhaul_protocol::machine::Machine;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// All answers of QEMU.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) machine: Machine,
    pub(super) blockers: Vec<Blocker>,
    pub(super) topology: Topology,
    /// The number of vCPUs that could be plugged in.
    pub(super) absent_vcpus: usize,
    pub(super) cpu: String,
    pub(super) memory_bytes: u64,
    pub(super) uuid: Option<String>,
    /// Devices with an id, by id.
    pub(super) named: BTreeMap<String, Seen>,
    /// Devices without an id, in the order of their creation.
    pub(super) unnamed: Vec<Seen>,
    /// Kinds of the devices that come with the machine.
    pub(super) onboard: Vec<String>,
    pub(super) media: Vec<Medium>,
    /// The output of `info network`.
    pub(super) networks: String,
    pub(super) memory: Memory,
    pub(super) limits: Limits,
}

/// A device as QEMU shows it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) path: String,
    pub(super) kind: String,
    pub(super) bus: Option<String>,
    /// The properties that give its place, and a card's address.
    pub(super) values: BTreeMap<&'static str, Value>,
}

/// The medium of a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Medium {
    /// Path or id of the device.
    pub(super) device: String,
    pub(super) inserted: Option<Inserted>,
}

/// An image in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Inserted {
    /// Driver of the upper node.
    pub(super) format: String,
    /// Driver of the node that opens the file.
    pub(super) protocol: String,
    pub(super) file: String,
    pub(super) read_only: bool,
    pub(super) encrypted: bool,
}

/// Properties that give a device's place, and a card's address.
const PLACES: [&str; 8] = [
    "addr", "channel", "lun", "mac", "nr", "port", "scsi-id", "unit",
];

/// Queries everything without changing anything.
pub(super) async fn look(qmp: &Qmp, process: Option<&ProcessId>) -> Result<Found, QmpError> {
    let (objects, limits) = tokio::try_join!(memory::look(qmp), limits::look(qmp))?;
    let (examined, cpus, memory, uuid, named, unnamed, onboard, media, networks) = tokio::try_join!(
        examine(qmp, process),
        cpus(qmp),
        qmp.query("query-memory-size-summary"),
        qmp.query("query-uuid"),
        devices(qmp, "/machine/peripheral"),
        devices(qmp, "/machine/peripheral-anon"),
        children(qmp, "/machine/unattached"),
        media(qmp),
        qmp.hmp("info network", COMMAND_TIMEOUT),
    )?;
    let (machine, blockers) = examined;
    let (topology, absent_vcpus, cpu) = cpus;
    let uuid = uuid["UUID"].as_str().unwrap_or_default();
    let number = |name: &str| {
        let number = name.strip_prefix("device[")?.strip_suffix(']')?;
        number.parse().ok()
    };
    let mut unnamed: Vec<(usize, Seen)> = unnamed
        .into_iter()
        .map(|(name, seen)| (number(&name).unwrap_or(usize::MAX), seen))
        .collect();
    unnamed.sort_by_key(|(number, _)| *number);
    Ok(Found {
        machine,
        blockers,
        topology,
        absent_vcpus,
        cpu,
        memory_bytes: memory["base-memory"].as_u64().unwrap_or_default(),
        uuid: uuid
            .chars()
            .any(|c| !matches!(c, '0' | '-'))
            .then(|| uuid.to_owned()),
        named: named.into_iter().collect(),
        unnamed: unnamed.into_iter().map(|(_, seen)| seen).collect(),
        onboard: onboard.into_iter().map(|(_, kind)| kind).collect(),
        media,
        networks,
        memory: objects,
        limits,
    })
}

/// Returns the devices in a container of the machine.
async fn devices(qmp: &Qmp, container: &str) -> Result<Vec<(String, Seen)>, QmpError> {
    let mut devices = Vec::new();
    for (name, kind) in children(qmp, container).await? {
        let path = format!("{container}/{name}");
        devices.push((name, seen(qmp, path, kind).await?));
    }
    Ok(devices)
}

async fn seen(qmp: &Qmp, path: String, kind: String) -> Result<Seen, QmpError> {
    let bus = property(qmp, &path, "parent_bus").await?;
    let bus = bus
        .as_ref()
        .and_then(Value::as_str)
        .filter(|bus| !bus.is_empty());
    let mut values = BTreeMap::new();
    for name in PLACES {
        if let Some(value) = property(qmp, &path, name).await? {
            values.insert(name, value);
        }
    }
    Ok(Seen {
        bus: bus.map(|bus| bus.rsplit('/').next().unwrap_or(bus).to_owned()),
        path,
        kind,
        values,
    })
}

/// Returns the arrangement of the vCPUs, how many are absent, and their model.
async fn cpus(qmp: &Qmp) -> Result<(Topology, usize, String), QmpError> {
    let answer = qmp.query("query-hotpluggable-cpus").await?;
    let slots = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let count = |name: &str| {
        let ids: BTreeSet<u64> = slots
            .iter()
            .filter_map(|slot| slot["props"][name].as_u64())
            .collect();
        u32::try_from(ids.len().max(1)).unwrap_or(u32::MAX)
    };
    let topology = Topology {
        sockets: count("socket-id"),
        dies: count("die-id"),
        cores: count("core-id"),
        threads: count("thread-id"),
    };
    let absent = slots
        .iter()
        .filter(|slot| slot["qom-path"].is_null())
        .count();
    let kind = slots
        .first()
        .and_then(|slot| slot["type"].as_str())
        .unwrap_or_default();
    Ok((
        topology,
        absent,
        kind.trim_end_matches("-x86_64-cpu").to_owned(),
    ))
}

async fn media(qmp: &Qmp) -> Result<Vec<Medium>, QmpError> {
    let flat = json!({"flat": true});
    let nodes = qmp
        .execute("query-named-block-nodes", flat, COMMAND_TIMEOUT)
        .await?;
    let drives = qmp.query("query-block").await?;
    let protocol = |file: &str| {
        let nodes = nodes.as_array()?;
        let formats = ["raw", "qcow2"];
        let mut opening = nodes.iter().filter(|node| node["file"] == file);
        opening.find_map(|node| {
            node["drv"]
                .as_str()
                .filter(|driver| !formats.contains(driver))
        })
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let medium = |drive: &Value| {
        let device = drive["qdev"].as_str()?.to_owned();
        let inserted = drive.get("inserted").map(|inserted| {
            let file = text(&inserted["file"]);
            Inserted {
                format: text(&inserted["drv"]),
                protocol: protocol(&file).unwrap_or_default().to_owned(),
                read_only: inserted["ro"] == true,
                encrypted: inserted["encrypted"] == true,
                file,
            }
        });
        Some(Medium { device, inserted })
    };
    Ok(drives
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(medium)
        .collect())
}
