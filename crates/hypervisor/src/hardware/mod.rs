//! Checks exact machine descriptions and turns them into QEMU's arguments.

pub(crate) mod content;
pub(crate) mod families;
mod line;
pub(crate) mod more;
pub(crate) mod tables;
pub(crate) mod wiring;

use crate::description::{DescriptionError, is_name};
pub(crate) use line::{Around, arguments, limits, machine_options, memory_options, topology};
use longhaul_protocol::guest::{BACKING, GuestDescription};
use longhaul_protocol::hardware::{Hardware, PlacedDevice};
use more::{FLOPPIES, NO_FLOPPY};
use std::collections::BTreeSet;
use tables::{Bus, Model, Serves, VGAS, is_word, setting};
use wiring::Wiring;

/// The maximum number of devices of a machine.
pub(crate) const DEVICES_MAX: usize = 256;
/// The maximum number of onboard ports of a kind.
const PORTS_MAX: u8 = 4;
/// The maximum number of sockets, dies, cores and threads each.
const TOPOLOGY_MAX: u32 = 255;
/// The maximum number of vCPUs that a machine has room for.
const SLOTS_MAX: u64 = 4096;
/// The maximum number of settings of a machine.
const SETTINGS_MAX: usize = 4096;
/// The maximum number of backing files below a disk.
pub(crate) const BACKING_MAX: usize = 16;
/// The maximum size of a huge page, in MiB.
const HUGE_PAGE_MIB_MAX: u32 = 1024;

/// Checks all properties of a machine's description that do not depend on a host.
pub(crate) fn check(
    description: &GuestDescription,
    hardware: &Hardware,
) -> Result<(), DescriptionError> {
    if let Some(uuid) = &hardware.uuid
        && !is_uuid(uuid)
    {
        return refuse("uuid", "is not a UUID");
    }
    let topology = hardware.topology;
    let parts = [
        topology.sockets,
        topology.dies,
        topology.cores,
        topology.threads,
    ];
    let slots = hardware.settings.get("smp.maxcpus");
    let slots = slots.map_or(Ok(u64::from(description.vcpus)), |text| text.parse());
    let plugged = hardware.devices.iter();
    let plugged = plugged.filter(|device| more::is_cpu(&device.model)).count() as u64;
    // Computed only from checked parts: a peer's could overflow the multiplication.
    let vcpus = || parts.iter().map(|part| u64::from(*part)).product::<u64>();
    if parts.iter().any(|part| *part == 0 || *part > TOPOLOGY_MAX)
        || slots != Ok(vcpus())
        || vcpus() > SLOTS_MAX
        || vcpus() < u64::from(description.vcpus)
        || plugged >= u64::from(description.vcpus)
    {
        return refuse("topology", "does not come to the number of vCPUs");
    }
    if let Some(memory) = &hardware.memory {
        let page = memory.huge_page_mib;
        let sound = page.is_none_or(|page| page.is_power_of_two() && page <= HUGE_PAGE_MIB_MAX);
        if !is_name(&memory.id, 64) || !sound || (page.is_some() && !memory.memfd) {
            return refuse("memory", "has an id or a page size that cannot be");
        }
    }
    if let Some(flash) = &hardware.flash {
        let names = std::iter::once(&flash.code).chain(&flash.variables);
        if !names.into_iter().all(|name| is_name(name, 64)) {
            return refuse("flash", "holds a text that is no name");
        }
    }
    if let Some(vga) = &hardware.vga
        && !VGAS.iter().any(|(_, name)| name == vga)
    {
        return refuse("vga", "is no display adapter that is known");
    }
    if hardware.serial_ports > PORTS_MAX || hardware.parallel_ports > PORTS_MAX {
        return refuse("serial_ports", "is more than 4, or parallel_ports is");
    }
    for (name, value) in &hardware.settings {
        if !setting(name).is_some_and(|kind| kind.takes(value)) {
            return refuse(
                "settings",
                "holds one that is not known, or has no such value",
            );
        }
    }
    if hardware.settings.len() > SETTINGS_MAX || !families::are_sound(hardware) {
        return refuse(
            "settings",
            "has an option that is not complete, or too much",
        );
    }
    devices(description, hardware)
}

fn devices(description: &GuestDescription, hardware: &Hardware) -> Result<(), DescriptionError> {
    if hardware.devices.len() > DEVICES_MAX {
        return refuse("devices", "has more than 256 entries");
    }
    let mut ids = BTreeSet::new();
    let mut served = BTreeSet::new();
    let mut has_tpm = false;
    for device in &hardware.devices {
        let Some(model) = Model::of(&device.model) else {
            return refuse("devices.model", "is none that is known");
        };
        if let Some(id) = &device.id
            && (!is_name(id, 64) || !ids.insert(id))
        {
            return refuse("devices.id", "is no name, or is there twice");
        }
        place(model, device)?;
        if model.serves == Serves::Tpm && std::mem::replace(&mut has_tpm, true) {
            return refuse("devices.model", "is a second TPM");
        }
        if model.serves == Serves::Nic && Wiring::read(&device.properties).is_none() {
            return refuse("devices.properties", "plugs a card into what cannot be");
        }
        for (name, value) in &device.properties {
            if model.serves == Serves::Nic && name.starts_with(wiring::PREFIX) {
                continue;
            }
            if !model.property(name).is_some_and(|kind| kind.takes(value)) {
                return refuse(
                    "devices.properties",
                    "holds one that the model does not have",
                );
            }
        }
        let serves = serves(description, model, device)?;
        if let Some(serves) = serves
            && !served.insert(serves)
        {
            return refuse(
                "devices.serves",
                "names something that another device serves",
            );
        }
    }
    floppies(description, hardware, &mut served)?;
    backing_files(description, hardware, &mut served)?;
    let there = description.disks.len() + description.nics.len() + description.channels.len();
    if served.len() != there {
        return refuse("devices.serves", "leaves a disk, card or channel out");
    }
    Ok(())
}

/// Checks the media of the board's floppy drives.
fn floppies(
    description: &GuestDescription,
    hardware: &Hardware,
    served: &mut BTreeSet<(u8, usize)>,
) -> Result<(), DescriptionError> {
    let media = FLOPPIES
        .iter()
        .filter_map(|name| hardware.settings.get(*name));
    for medium in media.filter(|medium| *medium != NO_FLOPPY) {
        let place = description
            .disks
            .iter()
            .position(|disk| disk.name == *medium);
        if !place.is_some_and(|place| served.insert((0, place))) {
            return refuse(
                "settings",
                "has a floppy that is no disk, or is there twice",
            );
        }
    }
    Ok(())
}

/// Checks the backing files of disks: each is a read-only disk that no device has.
fn backing_files(
    description: &GuestDescription,
    hardware: &Hardware,
    served: &mut BTreeSet<(u8, usize)>,
) -> Result<(), DescriptionError> {
    let place = |name: &str| description.disks.iter().position(|disk| disk.name == name);
    let by_devices = served.clone();
    let settings = hardware.settings.iter();
    let backing = settings.filter_map(|(name, below)| Some((name.strip_prefix(BACKING)?, below)));
    for (disk, below) in backing {
        let (Some(_), Some(below)) = (place(disk), place(below)) else {
            return refuse(
                "settings",
                "has a backing file that is no disk of the guest",
            );
        };
        if !description.disks[below].read_only || by_devices.contains(&(0, below)) {
            return refuse(
                "settings",
                "has a backing file that is written, or is a disk too",
            );
        }
        served.insert((0, below));
        let mut level = description.backing(disk);
        for _ in 0..BACKING_MAX {
            level = level.and_then(|disk| description.backing(&disk.name));
        }
        if level.is_some() {
            return refuse("settings", "has a disk on more than 16 backing files");
        }
    }
    Ok(())
}

fn place(model: &Model, device: &PlacedDevice) -> Result<(), DescriptionError> {
    if let Some(bus) = &device.bus
        && !is_word(bus)
    {
        return refuse("devices.bus", "is no name of a bus");
    }
    let Some(place) = &device.place else {
        return Ok(());
    };
    let number = |text: &str, radix: u32, digits: usize| {
        (1..=digits).contains(&text.len()) && text.chars().all(|c| c.is_digit(radix))
    };
    let sound = match model.bus {
        Bus::Pci => place
            .split_once('.')
            .is_some_and(|(slot, function)| number(slot, 16, 2) && number(function, 8, 1)),
        // A port behind hubs is a sequence of numbers.
        Bus::Usb => place.split('.').all(|part| number(part, 10, 2)) && place.len() < 16,
        Bus::Ports | Bus::Ide => number(place, 10, 4),
        Bus::Scsi | Bus::Other | Bus::Board => false,
    };
    match sound {
        true => Ok(()),
        false => refuse("devices.place", "is none that such a device can have"),
    }
}

/// Returns the resource that a device serves, as kind and number.
fn serves(
    description: &GuestDescription,
    model: &Model,
    device: &PlacedDevice,
) -> Result<Option<(u8, usize)>, DescriptionError> {
    let missing = || refuse("devices.serves", "names nothing that the guest has");
    let name = match (&device.serves, model.serves) {
        (
            None,
            Serves::Nothing | Serves::Medium | Serves::Terminal | Serves::Sound | Serves::Tpm,
        ) => return Ok(None),
        (Some(name), Serves::Disk | Serves::Medium | Serves::Nic | Serves::Channel) => name,
        (Some(_), Serves::Nothing | Serves::Terminal | Serves::Sound | Serves::Tpm) => {
            return missing().map(|()| None);
        }
        (None, Serves::Disk | Serves::Nic | Serves::Channel) => return missing().map(|()| None),
    };
    let found = match model.serves {
        Serves::Disk | Serves::Medium => {
            let place = description.disks.iter().position(|disk| disk.name == *name);
            place.map(|place| (0, place))
        }
        Serves::Nic => nic(description, name).map(|place| (1, place)),
        _ => {
            let mut channels = description.channels.iter();
            let place = channels.position(|channel| channel.name == *name);
            place.map(|place| (2, place))
        }
    };
    match found {
        Some(found) => Ok(Some(found)),
        None => missing().map(|()| None),
    }
}

/// Returns what a network card is plugged into.
pub(crate) fn wiring(description: &GuestDescription, index: usize) -> Wiring {
    let devices = description.hardware.iter().flat_map(|it| &it.devices);
    let card = devices
        .filter(|device| Model::of(&device.model).is_some_and(|it| it.serves == Serves::Nic))
        .find(|device| device.serves.as_deref() == Some(index.to_string().as_str()));
    let wiring = card.and_then(|card| Wiring::read(&card.properties));
    wiring.unwrap_or_default()
}

/// Returns the names of the folders that a guest shares with its host.
pub fn shared_folders(description: &GuestDescription) -> impl Iterator<Item = &str> {
    description.hardware.iter().flat_map(families::folders)
}

/// Returns the number of a network card.
pub(crate) fn nic(description: &GuestDescription, number: &str) -> Option<usize> {
    let number: usize = number.parse().ok()?;
    (number < description.nics.len()).then_some(number)
}

pub(crate) fn is_uuid(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    parts.iter().map(|part| part.len()).eq([8, 4, 4, 4, 12])
        && parts
            .iter()
            .all(|part| part.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn refuse(field: &str, problem: &str) -> Result<(), DescriptionError> {
    Err(DescriptionError {
        field: format!("hardware.{field}"),
        problem: problem.to_owned(),
    })
}
