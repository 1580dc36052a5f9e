//! Reads a guest's machine from its running QEMU, and finds the parts that cannot be moved.
//!
//! It reads the properties that decide whether a state fits, and none that differ between two QEMUs
//! with the same machine: no addresses of the process, no names of objects that QEMU numbers
//! arbitrarily, no CPU properties that are only bookkeeping.

mod cpu;

use crate::balloon::tells_free_pages;
use crate::hardware::tables::{Bus, Model, Serves};
use crate::memory::{is_held_by_ack, is_unnamed};
use crate::process::ProcessId;
use crate::qmp::{QUESTION_TIMEOUT, Qmp, QmpError};
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::limits::DEVICES_MAX;
use longhaul_protocol::machine::{BOARD, Device, Machine, RamBlock, UNNAMED};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The number of queries sent to QEMU without waiting for their answers.
const QUESTIONS_AT_ONCE: usize = 48;

/// Optional devices of a PC without an id, which depend on the machine's options.
const OPTIONAL_DEVICES: [&str; 9] = [
    "hpet",
    "i8042",
    "isa-debugcon",
    "isa-fdc",
    "isa-parallel",
    "isa-serial",
    "pvpanic",
    "vmmouse",
    "vmport",
];

/// A reason why a guest cannot be moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blocker {
    /// The reason, in one sentence.
    pub text: String,
    /// What to do about it.
    pub hint: String,
}

/// Reads the machine of a running QEMU, and the reasons why it cannot be moved; an empty list means
/// that it can. Properties that cannot change while QEMU runs are queried once for each process
/// that the caller knows.
pub async fn examine(
    qmp: &Qmp,
    process: Option<&ProcessId>,
) -> Result<(Machine, Vec<Blocker>), QmpError> {
    let (machine, signs) = tokio::try_join!(machine_of(qmp, process), Signs::read(qmp))?;
    let blockers = signs.blockers(qmp, &machine).await?;
    Ok((machine, blockers))
}

/// Reads the machine of a running QEMU.
pub async fn observe(qmp: &Qmp) -> Result<Machine, QmpError> {
    machine_of(qmp, None).await
}

/// Reads the machine with concurrent queries: a busy QEMU takes long for each query that arrives
/// alone.
async fn machine_of(qmp: &Qmp, process: Option<&ProcessId>) -> Result<Machine, QmpError> {
    let (machine_type, kvm, blocks, devices, cpus) = tokio::try_join!(
        machine_type(qmp),
        qmp.ask("query-kvm", json!({})),
        qmp.hmp("info ramblock", QUESTION_TIMEOUT),
        devices(qmp),
        cpu::cpus(qmp, process),
    )?;
    let (vcpus, cpu_properties) = cpus;
    Ok(Machine {
        qemu: qmp.version().to_string(),
        machine_type,
        accelerator: match kvm["enabled"].as_bool() {
            Some(true) => "kvm",
            _ => "tcg",
        }
        .to_owned(),
        vcpus: u32::try_from(vcpus).unwrap_or(u32::MAX),
        ram_blocks: ram_blocks(&blocks)?,
        devices,
        cpu_properties,
    })
}

/// Returns the machine type under its full name, such as `pc-q35-11.1`.
pub(crate) async fn machine_type(qmp: &Qmp) -> Result<String, QmpError> {
    let question = json!({"path": "/machine", "property": "type"});
    let answer = qmp.ask("qom-get", question).await?;
    let name = answer.as_str().unwrap_or_default();
    Ok(name.trim_end_matches("-machine").to_owned())
}

/// Parses the output of `info ramblock`, in which newer QEMUs have more columns at the right.
fn ram_blocks(text: &str) -> Result<BTreeMap<String, RamBlock>, QmpError> {
    let parse = |line: &str| {
        // The name may contain anything; its page size and three long numbers follow it.
        let long = |word: &&str| word.len() == 18 && word.starts_with("0x");
        let first = line.split_ascii_whitespace().find(long)?;
        let (name, page_bytes) = name_and_page_size(line.split(first).next()?)?;
        let mut numbers = line
            .split_ascii_whitespace()
            .filter(long)
            .filter_map(|word| u64::from_str_radix(&word[2..], 16).ok());
        let (_offset, used_bytes, max_bytes) = (numbers.next()?, numbers.next()?, numbers.next()?);
        let block = RamBlock {
            used_bytes,
            max_bytes,
            page_bytes,
        };
        Some((name.to_owned(), block))
    };
    let mut blocks = BTreeMap::new();
    let rows = text.lines().skip(1);
    for line in rows.filter(|line| !line.trim().is_empty() && !is_unnamed(line)) {
        let (name, block) = parse(line).ok_or_else(|| {
            not_understood("info ramblock", &format!("`{}` is no block", line.trim()))
        })?;
        blocks.insert(name, block);
    }
    match blocks.is_empty() {
        true => Err(not_understood("info ramblock", "it lists no block")),
        false => Ok(blocks),
    }
}

/// Parses text such as ` pc.ram 4 KiB `.
fn name_and_page_size(text: &str) -> Option<(&str, u64)> {
    let (rest, unit) = text.trim().rsplit_once(' ')?;
    let (name, number) = rest.trim_end().rsplit_once(' ')?;
    let shift = match unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        _ => return None,
    };
    let number: u64 = number.parse().ok()?;
    Some((name.trim(), number.checked_mul(1 << shift)?))
}

async fn devices(qmp: &Qmp) -> Result<BTreeMap<String, Device>, QmpError> {
    let (networks, named, unnamed, buses, unattached) = tokio::try_join!(
        qmp.hmp("info network", QUESTION_TIMEOUT),
        peripherals(qmp, "peripheral", ""),
        peripherals(qmp, "peripheral-anon", UNNAMED),
        qmp.ask("query-pci", json!({})),
        children(qmp, "/machine/unattached"),
    )?;
    let mut devices = BTreeMap::new();
    let board = board(qmp, &unattached).await?;
    for (label, netdev, mut device) in named.into_iter().chain(unnamed).chain(board) {
        if device.kind.starts_with("virtio-net") && !has_offloads(&networks, &netdev) {
            device.kind.push_str(" without offloads");
        }
        devices.insert(label, device);
    }
    for bus in list(&buses, "query-pci")? {
        // A bridge's bus has a number only after firmware assigned one, and belongs to a named
        // device.
        if bus["bus"].as_u64() == Some(0) {
            devices.extend(built_in(&bus));
        }
    }
    let mut counts: BTreeMap<String, u32> = BTreeMap::new();
    for (_, kind) in unattached {
        if OPTIONAL_DEVICES.contains(&kind.as_str()) {
            let count = counts.entry(kind.clone()).or_default();
            devices.insert(
                format!("{kind} {count}"),
                Device {
                    kind,
                    address: None,
                },
            );
            *count += 1;
        }
    }
    if devices.len() > DEVICES_MAX {
        let why = format!("there are more than {DEVICES_MAX} devices");
        return Err(not_understood("qom-list", &why));
    }
    Ok(devices)
}

/// Returns whether a device of the board can be made by a `-device` elsewhere.
pub(crate) fn is_made_elsewhere(kind: &str) -> bool {
    Model::of(kind).is_some_and(|model| match model.serves {
        // The board's floppy drives are settings of it.
        Serves::Disk | Serves::Medium | Serves::Nic => kind != "floppy",
        Serves::Nothing | Serves::Channel | Serves::Terminal | Serves::Sound | Serves::Tpm => {
            // A hub is what QEMU adds by itself when ports run out.
            model.bus == Bus::Usb && kind != "usb-hub"
        }
    })
}

/// Returns the disks, cards and tablets that come with the machine. Another host has them as
/// devices at the same places.
async fn board(
    qmp: &Qmp,
    unattached: &[(String, String)],
) -> Result<Vec<(String, String, Device)>, QmpError> {
    // Older agents report no CD drives, which are on every board.
    let is_one = |kind: &str| is_made_elsewhere(kind) && kind != "ide-cd";
    let found = unattached.iter().filter(|(_, kind)| is_one(kind));
    let questions = found.map(|(name, kind)| {
        let ask = async move {
            let path = format!("/machine/unattached/{name}");
            let (address, netdev) =
                tokio::try_join!(address(qmp, &path), netdev(qmp, &path, kind))?;
            let label = format!("{BOARD}{name}");
            let kind = kind.clone();
            Ok((label, netdev, Device { kind, address }))
        };
        ask.boxed()
    });
    at_once(questions.collect()).await
}

/// Returns the name of a card's other end; empty where there is none.
async fn netdev(qmp: &Qmp, path: &str, kind: &str) -> Result<String, QmpError> {
    let netdev = match kind.starts_with("virtio-net") {
        true => property(qmp, path, "netdev").await?,
        false => None,
    };
    let netdev = netdev.as_ref().and_then(Value::as_str);
    Ok(netdev.unwrap_or_default().to_owned())
}

/// Returns the devices in a container of the machine, by their names here, with the name of a
/// card's other end.
async fn peripherals(
    qmp: &Qmp,
    container: &str,
    prefix: &str,
) -> Result<Vec<(String, String, Device)>, QmpError> {
    let path = format!("/machine/{container}");
    let path = path.as_str();
    let questions = children(qmp, path).await?.into_iter().map(|(name, kind)| {
        let ask = async move {
            let path = format!("{path}/{name}");
            let (address, netdev) =
                tokio::try_join!(address(qmp, &path), netdev(qmp, &path, &kind))?;
            Ok((format!("{prefix}{name}"), netdev, Device { kind, address }))
        };
        ask.boxed()
    });
    at_once(questions.collect()).await
}

/// Returns whether a network card's other end is a TAP device, which offers offloads to the guest.
///
/// A guest that negotiated offloads with its card cannot go on with a card without them.
fn has_offloads(networks: &str, other_end: &str) -> bool {
    let start = format!(" \\ {other_end}: index=");
    let mut lines = networks.lines();
    lines.any(|line| line.starts_with(&start) && line.contains("type=tap"))
}

/// Returns the children of an object that are devices, with their types.
pub(crate) async fn children(qmp: &Qmp, path: &str) -> Result<Vec<(String, String)>, QmpError> {
    let properties = qmp.ask("qom-list", json!({"path": path})).await?;
    let child = |property: &Value| {
        let kind = property["type"].as_str()?;
        let kind = kind.strip_prefix("child<")?.strip_suffix('>')?;
        Some((property["name"].as_str()?.to_owned(), kind.to_owned()))
    };
    Ok(list(&properties, "qom-list")?
        .iter()
        .filter_map(child)
        .collect())
}

/// Returns the bus of a device, and its address there.
async fn address(qmp: &Qmp, path: &str) -> Result<Option<String>, QmpError> {
    let (bus, slot, port) = tokio::try_join!(
        property(qmp, path, "parent_bus"),
        property(qmp, path, "addr"),
        property(qmp, path, "nr"),
    )?;
    let Some(bus) = bus
        .as_ref()
        .and_then(Value::as_str)
        .filter(|bus| !bus.is_empty())
    else {
        return Ok(None);
    };
    let bus = bus.rsplit('/').next().unwrap_or(bus);
    let place = match (slot, port) {
        (Some(Value::Number(slot)), _) => slot.as_u64().map(pci_place),
        (Some(Value::String(slot)), _) => Some(slot),
        (None, Some(port)) => Some(port.to_string()),
        _ => None,
    };
    Ok(Some(match place {
        Some(place) => format!("{bus}/{place}"),
        None => bus.to_owned(),
    }))
}

/// Returns `slot.function` of QEMU's `devfn`.
pub(crate) fn pci_place(devfn: u64) -> String {
    format!("{:02x}.{:x}", devfn >> 3, devfn & 7)
}

/// Returns the onboard functions of a PCI bus, which have no id.
fn built_in(bus: &Value) -> Vec<(String, Device)> {
    let nothing = Vec::new();
    let functions = bus["devices"].as_array().unwrap_or(&nothing);
    let entry = |function: &Value| {
        if function["qdev_id"].as_str() != Some("") {
            return None;
        }
        let devfn = function["slot"].as_u64()? << 3 | function["function"].as_u64()?;
        let place = pci_place(devfn);
        let id = &function["id"];
        let (vendor, device) = (id["vendor"].as_u64()?, id["device"].as_u64()?);
        let class = function["class_info"]["desc"]
            .as_str()
            .unwrap_or("PCI function");
        let device = Device {
            kind: format!("{class} {vendor:04x}:{device:04x}"),
            address: Some(place.clone()),
        };
        Some((format!("PCI {place}"), device))
    };
    functions.iter().filter_map(entry).collect()
}

/// Returns the answers to many queries, in their order. Boxed, so that the compiler sees at once
/// that they may move between threads.
pub(crate) async fn at_once<T: Send>(
    questions: Vec<BoxFuture<'_, Result<T, QmpError>>>,
) -> Result<Vec<T>, QmpError> {
    let answers = stream::iter(questions).buffered(QUESTIONS_AT_ONCE);
    answers.try_collect().await
}

/// QEMU's signs of a guest that cannot be moved.
struct Signs {
    reasons: Vec<String>,
    confidential_guest: String,
    networks: String,
}

impl Signs {
    async fn read(qmp: &Qmp) -> Result<Self, QmpError> {
        let (migration, guard, networks) = tokio::try_join!(
            qmp.ask("query-migrate", json!({})),
            property(qmp, "/machine", "confidential-guest-support"),
            qmp.hmp("info network", QUESTION_TIMEOUT),
        )?;
        let reasons = migration["blocked-reasons"].as_array();
        let reasons = reasons.into_iter().flatten().filter_map(Value::as_str);
        let guard = guard.as_ref().and_then(Value::as_str);
        Ok(Self {
            reasons: reasons.map(str::to_owned).collect(),
            confidential_guest: guard.unwrap_or_default().to_owned(),
            networks,
        })
    }

    async fn blockers(&self, qmp: &Qmp, machine: &Machine) -> Result<Vec<Blocker>, QmpError> {
        let mut found = blockers_of(
            machine,
            &self.reasons,
            &self.confidential_guest,
            &self.networks,
        );
        let huge = |block: &RamBlock| block.page_bytes > BLOCK_SIZE as u64;
        if machine.ram_blocks.values().any(huge)
            && tells_free_pages(qmp).await?
            && !is_held_by_ack(qmp).await?
        {
            found.push(Blocker {
                text: "its balloon tells which pages are free (free-page-hint), and its memory \
                           is in huge pages: this QEMU cannot move it with both"
                    .to_owned(),
                hint: "start it without one of them, or with a QEMU from 8.1 on and a machine \
                           type up to 11.0"
                    .to_owned(),
            });
        }
        Ok(found)
    }
}

fn blockers_of(
    machine: &Machine,
    reasons: &[String],
    confidential_guest: &str,
    networks: &str,
) -> Vec<Blocker> {
    let mut found = Vec::new();
    for (name, device) in &machine.devices {
        if let Some((what, hint)) = immovable(&device.kind) {
            found.push(Blocker {
                text: format!("device {name} ({}) cannot be moved: {what}", device.kind),
                hint: hint.to_owned(),
            });
        }
    }
    if !confidential_guest.is_empty() {
        found.push(Blocker {
            text: "the guest's memory is encrypted by the processor, so no other host can load it"
                .to_owned(),
            hint: "shut it down and start it at the destination".to_owned(),
        });
    }
    if networks
        .lines()
        .any(|line| line.contains("type=vhost-user"))
    {
        found.push(Blocker {
            text: "a network card is served by another process (vhost-user) that writes into the \
                   guest's memory unseen"
                .to_owned(),
            hint: "give the guest a network card on a bridge instead".to_owned(),
        });
    }
    found.extend(reasons.iter().map(|reason| {
        let hint = match reason.contains("VirtFS") {
            true => "unmount the folder in the guest; mount it again after the move",
            false => {
                "remove what QEMU names from the guest, or shut it down and start it at the \
                 destination"
            }
        };
        Blocker {
            text: format!("QEMU refuses to move the guest: {reason}"),
            hint: hint.to_owned(),
        }
    }));
    found
}

pub(crate) const DETACH: &str =
    "detach it from the guest before moving, and attach it again afterwards";
const REPLACE: &str = "give the guest a disk or network card that QEMU serves itself";
const UNMOUNT: &str = "unmount the folder in the guest and detach the device before moving";

/// Kinds of devices whose state is tied to a host, by the beginning of their names: that state, and
/// what to do.
pub(crate) const IMMOVABLE: [(&str, &str, &str); 10] = [
    ("vfio-", "it is a piece of this host's hardware", DETACH),
    (
        "virtio-mem",
        "memory that is plugged in and out is not supported",
        DETACH,
    ),
    ("virtio-pmem", "its content is a file of this host", DETACH),
    ("nvdimm", "its content is a file of this host", DETACH),
    (
        "ivshmem",
        "it is memory shared with other programs of this host",
        DETACH,
    ),
    ("vhost-user-fs", "it is a folder of this host", UNMOUNT),
    (
        "vhost-user-",
        "another process of this host serves it",
        REPLACE,
    ),
    ("vhost-vsock", "its connections end in this host", DETACH),
    ("vhost-scsi", "this host's kernel serves it", REPLACE),
    (
        "vhost-vdpa",
        "it is a piece of this host's hardware",
        DETACH,
    ),
];

/// Returns, for kinds of devices whose state is tied to a host, that state, and what to do.
fn immovable(kind: &str) -> Option<(&'static str, &'static str)> {
    IMMOVABLE
        .into_iter()
        .find_map(|(prefix, what, hint)| kind.starts_with(prefix).then_some((what, hint)))
}

/// Returns an object's property; `None` where it has none of that name.
pub(crate) async fn property(qmp: &Qmp, path: &str, name: &str) -> Result<Option<Value>, QmpError> {
    let question = json!({"path": path, "property": name});
    match qmp.ask("qom-get", question).await {
        Ok(value) => Ok(Some(value)),
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the generation id that a guest sees, if it has one.
pub async fn generation_id(qmp: &Qmp) -> Result<Option<String>, QmpError> {
    match qmp.ask("query-vm-generation-id", json!({})).await {
        Ok(answer) => Ok(answer["guid"].as_str().map(str::to_owned)),
        Err(QmpError::Refused { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(crate) fn list(value: &Value, command: &str) -> Result<Vec<Value>, QmpError> {
    match value.as_array() {
        Some(values) => Ok(values.clone()),
        None => Err(not_understood(command, "it is no list")),
    }
}

fn not_understood(command: &str, why: &str) -> QmpError {
    QmpError::Answer {
        command: command.to_owned(),
        why: why.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = concat!(
        "      Block Name    PSize              Offset               Used              Total\r\n",
        "          pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000\r\n",
        " /rom@etc/tables    4 KiB  0x0000000004080000 0x0000000000020000 0x0000000000200000\r\n",
    );
    const NEW: &str = concat!(
        "   Block Name    PSize              Offset               Used              Total",
        "                HVA  RO\r\n",
        "       pc.ram    2 MiB  0x0000000000000000 0x0000000004000000 0x0000000004000000",
        " 0x00007fbfb7e00000  rw\r\n",
        " a block, 0x1    4 KiB  0x0000000004080000 0x0000000000020000 0x0000000000200000",
        " 0x00007fc009200000  ro\r\n",
    );

    fn machine(kinds: &[&str]) -> Machine {
        let device = |kind: &&str| {
            let device = Device {
                kind: (*kind).to_owned(),
                address: None,
            };
            (format!("d-{kind}"), device)
        };
        Machine {
            qemu: "10.0.2".to_owned(),
            machine_type: "pc-q35-10.0".to_owned(),
            accelerator: "tcg".to_owned(),
            vcpus: 1,
            ram_blocks: BTreeMap::new(),
            devices: kinds.iter().map(device).collect(),
            cpu_properties: BTreeMap::new(),
        }
    }

    #[test]
    fn both_forms_of_the_list_of_blocks_are_read() {
        let old = ram_blocks(OLD).unwrap();
        assert_eq!(old.len(), 2);
        assert_eq!(old["pc.ram"].used_bytes, 64 << 20);
        assert_eq!(old["/rom@etc/tables"].max_bytes, 2 << 20);
        let new = ram_blocks(NEW).unwrap();
        assert_eq!(new["pc.ram"].page_bytes, 2 << 20);
        assert_eq!(new["pc.ram"].max_bytes, 64 << 20);
        assert_eq!(new["a block, 0x1"].page_bytes, 4096);
    }

    #[test]
    fn a_list_that_is_not_understood_is_an_error() {
        let head = OLD.lines().next().unwrap();
        for text in [
            "",
            head,
            &format!("{head}\npc.ram 4 KiB 0x0 0x0 0x0"),
            "a\nb",
        ] {
            assert!(ram_blocks(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_card_has_offloads_on_a_tap_only() {
        let networks = "nic0: index=0,type=nic,model=virtio-net-pci\r\n\
                        \x20\\ net0: index=0,type=tap,ifname=lh0,script=no\r\n\
                        nic1: index=0,type=nic,model=virtio-net-pci\r\n\
                        nic2: index=0,type=nic,model=virtio-net-pci\r\n\
                        \x20\\ net2: index=0,type=user,net=10.0.2.0,restrict=on\r\n";
        let with = ["net0", "", "net2", "nic0"].map(|name| has_offloads(networks, name));
        assert_eq!(with, [true, false, false, false]);
        let on_a_hub = "hub 0\r\n \\ hub0port1: #net150: index=0,type=tap,ifname=t5\r\n \\ \
                        hub0port0: virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci\r\n";
        assert!(!has_offloads(on_a_hub, "hub0port0"));
    }

    #[test]
    fn what_cannot_be_moved_is_named() {
        let fine = machine(&["virtio-net-pci", "virtio-blk-pci", "virtserialport"]);
        assert_eq!(
            blockers_of(&fine, &[], "", "nic0: type=nic\r\n \\ net0: type=tap"),
            []
        );
        let kinds = ["vfio-pci", "virtio-mem-pci", "vhost-user-fs-pci"];
        let reasons = ["it is not migratable".to_owned()];
        let found = blockers_of(
            &machine(&kinds),
            &reasons,
            "/objects/sev0",
            "a: type=vhost-user",
        );
        let texts: Vec<&str> = found.iter().map(|blocker| blocker.text.as_str()).collect();
        assert_eq!(texts.len(), 6);
        for (text, expected) in texts.iter().zip([
            "device d-vfio-pci (vfio-pci) cannot be moved: it is a piece of this host's hardware",
            "device d-vhost-user-fs-pci (vhost-user-fs-pci) cannot be moved: it is a folder",
            "device d-virtio-mem-pci (virtio-mem-pci) cannot be moved: memory that is plugged",
            "the guest's memory is encrypted",
            "a network card is served by another process (vhost-user)",
            "QEMU refuses to move the guest: it is not migratable",
        ]) {
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
