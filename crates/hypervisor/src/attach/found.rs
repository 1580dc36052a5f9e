//! Collects what a running QEMU reports of its guest, as far as a destination needs it.

use super::cards::Wires;
use super::limits::{self, Limits};
use super::memory::{self, Memory};
use super::properties;
use super::words::Words;
use crate::disk;
use crate::hardware::tables::{Bus, Model, Serves};
use crate::observe::{Blocker, at_once, children, examine, is_made_elsewhere, list, property};
use crate::process::ProcessId;
use crate::qmp::{QUESTION_TIMEOUT, Qmp, QmpError};
use futures_util::FutureExt;
use longhaul_protocol::hardware::Topology;
use longhaul_protocol::machine::Machine;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// The maximum number of nodes of a disk.
const NODES_MAX: usize = 16;

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
    /// Devices with and without an id, and those of the board that can be made elsewhere.
    pub(super) devices: Vec<Seen>,
    /// Kinds of the devices that come with the machine.
    pub(super) onboard: Vec<String>,
    pub(super) media: Vec<Medium>,
    pub(super) wires: Wires,
    /// The output of `info network`.
    pub(super) networks: String,
    pub(super) memory: Memory,
    pub(super) limits: Limits,
}

/// Who made a device, in the order in which QEMU makes them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Origin {
    /// The machine, which numbers its devices.
    Board(usize),
    /// `-device` or `device_add` without an id, by number.
    Unnamed(usize),
    /// `-device` or `device_add`, with this id.
    Named(String),
}

/// A device as QEMU shows it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) origin: Origin,
    pub(super) path: String,
    pub(super) kind: String,
    /// The path of its bus, and the last part of it.
    pub(super) bus_path: Option<String>,
    /// The properties that give its place, and those that the tables know.
    pub(super) values: BTreeMap<String, Value>,
    /// The names of those properties that have another value than by default.
    pub(super) changed: BTreeSet<String>,
}

impl Seen {
    pub(super) fn bus(&self) -> Option<&str> {
        let path = self.bus_path.as_deref()?;
        path.rsplit('/').next()
    }

    pub(super) fn text(&self, name: &str) -> &str {
        let value = self.values.get(name);
        value.and_then(Value::as_str).unwrap_or_default()
    }
}

/// The medium of a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Medium {
    /// Path or id of the device.
    pub(super) device: String,
    /// The name of its drive; empty for nodes of `-blockdev`.
    pub(super) drive: String,
    pub(super) inserted: Option<Inserted>,
}

/// An image in use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Inserted {
    /// Driver of the node of its format.
    pub(super) format: String,
    /// Driver of the node that opens the file.
    pub(super) protocol: String,
    pub(super) file: String,
    pub(super) read_only: bool,
    pub(super) encrypted: bool,
    /// The nodes that may limit the guest's requests, each by its group, if QEMU says which.
    pub(super) throttled_by: Vec<Option<String>>,
    /// Whether only a part of its file is the disk.
    pub(super) is_part: bool,
    /// The images that it is an overlay of, from the top down.
    pub(super) backing: Vec<Inserted>,
}

/// Queries everything without changing anything.
pub(super) async fn look(
    qmp: &Qmp,
    process: Option<&ProcessId>,
    line: &[Words],
) -> Result<Found, QmpError> {
    let (objects, limits) = tokio::try_join!(memory::look(qmp), limits::look(qmp))?;
    let asked = tokio::try_join!(
        examine(qmp, process),
        cpus(qmp),
        qmp.ask("query-memory-size-summary", json!({})),
        qmp.ask("query-uuid", json!({})),
        children(qmp, "/machine/peripheral"),
        children(qmp, "/machine/peripheral-anon"),
        children(qmp, "/machine/unattached"),
        media(qmp),
        qmp.hmp("info network", QUESTION_TIMEOUT),
        qmp.hmp("info usernet", QUESTION_TIMEOUT),
    )?;
    let (examined, cpus, memory, uuid, named, unnamed, onboard, media, networks, usernet) = asked;
    let (machine, blockers) = examined;
    let (topology, absent_vcpus, cpu) = cpus;
    let uuid = uuid["UUID"].as_str().unwrap_or_default();
    let number = |name: &str| {
        let number = name.strip_prefix("device[")?.strip_suffix(']')?;
        number.parse::<usize>().ok()
    };
    let board = onboard.iter().filter(|(_, kind)| is_made_elsewhere(kind));
    let board = board.map(|(name, kind)| {
        let origin = Origin::Board(number(name).unwrap_or(usize::MAX));
        (origin, format!("/machine/unattached/{name}"), kind.clone())
    });
    let unnamed = unnamed.into_iter().map(|(name, kind)| {
        let origin = Origin::Unnamed(number(&name).unwrap_or(usize::MAX));
        (origin, format!("/machine/peripheral-anon/{name}"), kind)
    });
    let named = named.into_iter().map(|(name, kind)| {
        let path = format!("/machine/peripheral/{name}");
        (Origin::Named(name), path, kind)
    });
    let mut devices = devices(qmp, line, board.chain(unnamed).chain(named).collect()).await?;
    devices.sort_by(|one, other| one.origin.cmp(&other.origin));
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
        devices,
        onboard: onboard.into_iter().map(|(_, kind)| kind).collect(),
        media,
        wires: Wires::read(&networks, &usernet),
        networks,
        memory: objects,
        limits,
    })
}

/// Returns the words of devices, with the origin of the device that each made.
pub(super) fn made(line: &[Words]) -> impl Iterator<Item = (Origin, &Words)> {
    let mut unnamed = 0;
    line.iter().map(move |words| match words.get("id") {
        Some(id) => (Origin::Named(id.to_owned()), words),
        None => {
            unnamed += 1;
            (Origin::Unnamed(unnamed - 1), words)
        }
    })
}

/// Returns the properties of devices. A QEMU under load takes long for each question, so these are
/// few where the words of a device say what was set.
async fn devices(
    qmp: &Qmp,
    line: &[Words],
    found: Vec<(Origin, String, String)>,
) -> Result<Vec<Seen>, QmpError> {
    let made: BTreeMap<Origin, &Words> = made(line).collect();
    let is_told = |origin: &Origin| made.contains_key(origin);
    let kinds: BTreeSet<&String> = found
        .iter()
        .filter(|(origin, _, kind)| !is_told(origin) && Model::of(kind).is_some())
        .map(|(_, _, kind)| kind)
        .collect();
    let questions = kinds.iter().map(|kind| defaults(qmp, kind).boxed());
    let defaults = at_once(questions.collect()).await?;
    let defaults: BTreeMap<&String, BTreeMap<String, Value>> =
        kinds.iter().copied().zip(defaults).collect();
    let mut questions = Vec::new();
    for (origin, path, kind) in &found {
        let Some(model) = Model::of(kind) else {
            continue;
        };
        let own: Vec<&'static str> = match made.contains_key(origin) {
            true => properties::CHOSEN.to_vec(),
            false => model.properties().collect(),
        };
        let set = made.get(origin).into_iter().flat_map(|words| words.iter());
        let mut wanted: BTreeSet<&str> = set.map(|(name, _)| name).collect();
        for name in own {
            wanted.insert(name);
        }
        wanted.retain(|name| model.property(name).is_some());
        for name in places(model) {
            wanted.insert(name);
        }
        questions.extend(wanted.into_iter().map(|name| {
            let ask = async move { Ok((path, name, property(qmp, path, name).await?)) };
            ask.boxed()
        }));
    }
    let answers = at_once(questions).await?;
    let seen = |(origin, path, kind): &(Origin, String, String)| {
        let own = answers.iter().filter(|(of, _, _)| *of == path);
        let mut values: BTreeMap<String, Value> = own
            .filter_map(|(_, name, value)| Some(((*name).to_owned(), value.clone()?)))
            .collect();
        let bus = values.remove("parent_bus");
        let bus = bus.as_ref().and_then(Value::as_str);
        let is_changed = |name: &str| {
            let value = values.get(name)?;
            let same = match defaults.get(kind).and_then(|defaults| defaults.get(name)) {
                Some(default) => value == default,
                None => matches!(value.as_str(), Some("")) || *value == json!(-1),
            };
            (!same).then(|| name.to_owned())
        };
        let known = Model::of(kind).filter(|_| !is_told(origin));
        let known = known.into_iter().flat_map(Model::properties);
        Seen {
            origin: origin.clone(),
            path: path.clone(),
            kind: kind.clone(),
            bus_path: bus.filter(|bus| !bus.is_empty()).map(str::to_owned),
            changed: known.filter_map(is_changed).collect(),
            values,
        }
    };
    Ok(found.iter().map(seen).collect())
}

/// Returns the properties that give a device's place, and what it is connected to.
fn places(model: &Model) -> impl Iterator<Item = &'static str> + use<> {
    let place: &[&str] = match model.bus {
        Bus::Pci => &["addr"],
        Bus::Usb => &["port"],
        Bus::Ports => &["nr", "name"],
        Bus::Ide => &["unit"],
        Bus::Scsi => &["channel", "lun", "scsi-id"],
        Bus::Other | Bus::Board => &[],
    };
    let connected: &[&str] = match model.serves {
        Serves::Nic => &["mac", "netdev"],
        _ => &[],
    };
    let all = place.iter().chain(connected).chain(&["parent_bus"]);
    all.copied()
}

/// Returns the values of a model's properties by default, of those that have one.
async fn defaults(qmp: &Qmp, kind: &str) -> Result<BTreeMap<String, Value>, QmpError> {
    let command = "device-list-properties";
    let asked = qmp.ask(command, json!({"typename": kind}));
    let answer = match asked.await {
        Err(QmpError::Refused { .. }) => return Ok(BTreeMap::new()),
        answer => answer?,
    };
    let properties = list(&answer, command)?;
    let property = |it: &Value| {
        Some((
            it["name"].as_str()?.to_owned(),
            it.get("default-value")?.clone(),
        ))
    };
    Ok(properties.iter().filter_map(property).collect())
}

/// Returns the arrangement of the vCPUs, how many are absent, and their model.
async fn cpus(qmp: &Qmp) -> Result<(Topology, usize, String), QmpError> {
    let answer = match qmp.ask("query-hotpluggable-cpus", json!({})).await {
        // A machine without slots is refused by its type.
        Err(QmpError::Refused { .. }) => Value::Null,
        answer => answer?,
    };
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

/// QEMU's block nodes, as far as the images of disks need them.
struct Nodes {
    /// Driver and file of each node, by name.
    about: BTreeMap<String, (String, String)>,
    /// The node below each, by its name.
    below: BTreeMap<String, String>,
    /// The node of the backing file of each, by its name.
    backing: BTreeMap<String, String>,
    encrypted: BTreeSet<String>,
    /// The size of each, by its name.
    sizes: BTreeMap<String, u64>,
}

impl Nodes {
    fn read(nodes: &Value, graph: &Value) -> Self {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let all = nodes.as_array().into_iter().flatten();
        let about = all.map(|node| {
            let about = (text(&node["drv"]), text(&node["file"]));
            (text(&node["node-name"]), about)
        });
        let about: BTreeMap<_, _> = about.collect();
        let all = nodes.as_array().into_iter().flatten();
        let sizes = all.clone().filter_map(|node| {
            let size = node["image"]["virtual-size"].as_u64()?;
            Some((text(&node["node-name"]), size))
        });
        let sizes = sizes.collect();
        let encrypted = all.filter(|node| node["encrypted"] == true);
        let encrypted = encrypted.map(|node| text(&node["node-name"])).collect();
        let names: BTreeMap<u64, String> = graph["nodes"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|node| Some((node["id"].as_u64()?, text(&node["name"]))))
            .collect();
        let edges = graph["edges"].as_array().into_iter().flatten();
        let (mut below, mut backing) = (BTreeMap::new(), BTreeMap::new());
        for edge in edges {
            let name = |id: &Value| names.get(&id.as_u64()?).cloned();
            let (Some(parent), Some(child)) = (name(&edge["parent"]), name(&edge["child"])) else {
                continue;
            };
            let driver = about.get(&parent).map(|(driver, _)| driver.as_str());
            // Some of these filters have their node there.
            let is_of_job = driver.is_some_and(disk::is_of_job);
            match edge["name"].as_str() {
                Some("file") => below.insert(parent, child),
                Some("backing") if is_of_job => below.insert(parent, child),
                Some("backing") => backing.insert(parent, child),
                _ => None,
            };
        }
        Self {
            below,
            backing,
            encrypted,
            sizes,
            about,
        }
    }

    /// Returns what is below a device, by its uppermost node, with its backing files.
    fn inserted(&self, top: &str) -> Option<Inserted> {
        let (mut inserted, mut below) = self.image(top)?;
        for _ in 0..NODES_MAX {
            let Some(node) = below else { break };
            let (image, next) = self.image(&node)?;
            inserted.backing.push(Inserted {
                read_only: true,
                ..image
            });
            below = next;
        }
        Some(inserted)
    }

    /// Returns an image by its uppermost node, and the node of its backing file.
    fn image(&self, top: &str) -> Option<(Inserted, Option<String>)> {
        let mut inserted = Inserted::default();
        let mut backing = None;
        let mut name = top;
        for _ in 0..NODES_MAX {
            let (driver, file) = self.about.get(name)?;
            match driver.as_str() {
                "throttle" => inserted.throttled_by.push(limits::group(file)),
                "copy-on-read" => {}
                job if disk::is_of_job(job) => {}
                driver if inserted.format.is_empty() => {
                    driver.clone_into(&mut inserted.format);
                    backing = self.backing.get(name).cloned();
                }
                _ => {}
            }
            inserted.encrypted |= self.encrypted.contains(name);
            driver.clone_into(&mut inserted.protocol);
            file.clone_into(&mut inserted.file);
            match self.below.get(name) {
                Some(below) => {
                    let size = |name: &str| Some(self.sizes.get(name)?.next_multiple_of(512));
                    inserted.is_part |= driver == "raw" && size(name) != size(below);
                    name = below;
                }
                None => return Some((inserted, backing)),
            }
        }
        None
    }
}

async fn media(qmp: &Qmp) -> Result<Vec<Medium>, QmpError> {
    let flat = json!({"flat": true});
    let (nodes, graph, drives) = tokio::try_join!(
        qmp.ask("query-named-block-nodes", flat),
        qmp.ask("x-debug-query-block-graph", json!({})),
        qmp.ask("query-block", json!({})),
    )?;
    let nodes = Nodes::read(&nodes, &graph);
    let drives = list(&drives, "query-block")?;
    Ok(drives
        .iter()
        .filter_map(|drive| medium(drive, &nodes))
        .collect())
}

fn medium(drive: &Value, nodes: &Nodes) -> Option<Medium> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let inserted = drive.get("inserted").map(|inserted| {
        let top = inserted["node-name"].as_str().unwrap_or_default();
        let found = nodes.inserted(top).unwrap_or_else(|| Inserted {
            format: text(&inserted["drv"]),
            file: text(&inserted["file"]),
            ..Inserted::default()
        });
        Inserted {
            read_only: inserted["ro"] == true,
            encrypted: inserted["encrypted"] == true,
            ..found
        }
    });
    Some(Medium {
        device: drive["qdev"].as_str()?.to_owned(),
        drive: text(&drive["device"]),
        inserted,
    })
}
