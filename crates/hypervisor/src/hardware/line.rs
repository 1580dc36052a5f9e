//! Builds the part of QEMU's command line that an exact machine description determines.

use super::more::{CDROM, DRIVE, FLOPPIES, is_cpu};
use super::tables::{Bus, Model, Serves};
use super::{BACKING_MAX, families, nic, wiring};
use crate::balloon::FREE_PAGE_HINT;
use crate::command_line::{
    Line, ResolveError, Surroundings, Used, backend, disk_nodes, drive_options, nodes, server,
};
use crate::command_line::{image_called, look_up};
use crate::config::{Image, ImageFormat};
use crate::tpm;
use longhaul_protocol::guest::{Disk, GuestDescription};
use longhaul_protocol::hardware::{Hardware, PlacedDevice};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The id of the sound backend.
const AUDIO: &str = "lh-audio";
/// The id of the TPM's backend, and of its connection.
const TPM: &str = "lh-tpm";

/// The inputs of a machine's devices.
pub(crate) struct Around<'a> {
    pub(crate) description: &'a GuestDescription,
    pub(crate) hardware: &'a Hardware,
    pub(crate) host: &'a Surroundings<'a>,
}

/// Returns the options after the machine's type.
pub(crate) fn machine_options(hardware: &Hardware) -> String {
    let mut text = String::new();
    for (name, value) in settings(hardware, "machine.") {
        text.push_str(&format!(",{name}={}", value.replace(',', ",,")));
    }
    if let Some(memory) = &hardware.memory {
        text.push_str(&format!(",memory-backend={}", memory.id));
    }
    if let Some(flash) = &hardware.flash {
        text.push_str(",pflash0=flash0");
        if flash.variables.is_some() {
            text.push_str(",pflash1=flash1");
        }
    }
    text
}

/// Returns the arrangement of the vCPUs.
pub(crate) fn topology(vcpus: u32, hardware: &Hardware) -> String {
    let topology = hardware.topology;
    let plugged = hardware.devices.iter();
    let plugged = plugged.filter(|device| is_cpu(&device.model)).count();
    let booted = vcpus.saturating_sub(u32::try_from(plugged).unwrap_or(u32::MAX));
    let most = hardware.settings.get("smp.maxcpus");
    let most = most
        .cloned()
        .or_else(|| (plugged > 0).then(|| vcpus.to_string()));
    let most = most.map_or(String::new(), |most| format!(",maxcpus={most}"));
    format!(
        "cpus={booted}{most},sockets={},dies={},cores={},threads={}",
        topology.sockets, topology.dies, topology.cores, topology.threads
    )
}

/// Returns the options after the memory's size.
pub(crate) fn memory_options(hardware: &Hardware) -> String {
    let settings = settings(hardware, "memory.").filter(|(name, _)| *name != "named-by");
    settings
        .map(|(name, value)| format!(",{name}={value}"))
        .collect()
}

/// Returns the limits of each disk that has any, by the disk's name, as QEMU is told them.
pub(crate) fn limits(hardware: &Hardware) -> BTreeMap<&str, Map<String, Value>> {
    let mut limits: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for (name, value) in settings(hardware, "limit.") {
        let Some((disk, key)) = name.rsplit_once('.') else {
            continue;
        };
        let value = match value.parse::<u64>() {
            Ok(number) if key != "group" => number.into(),
            _ => value.into(),
        };
        limits
            .entry(disk)
            .or_default()
            .insert(key.to_owned(), value);
    }
    for limits in limits.values_mut() {
        for required in ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"] {
            limits.entry(required).or_insert(0.into());
        }
    }
    limits
}

/// Emits everything but the machine itself.
pub(crate) fn arguments(line: &mut Line, around: &Around<'_>) -> Result<(), ResolveError> {
    let hardware = around.hardware;
    if let Some(uuid) = &hardware.uuid {
        line.option("-uuid", uuid.as_str());
    }
    memory(line, around);
    for (option, prefix) in [("-rtc", "rtc."), ("-boot", "boot."), ("-action", "action.")] {
        let splash = families::splash_file(&around.host.folder.run());
        let splash = splash.to_string_lossy().replace(',', ",,");
        let values: Vec<String> = settings(hardware, prefix)
            .map(|(name, value)| match name {
                "splash" => format!("{name}={splash}"),
                name => format!("{name}={value}"),
            })
            .collect();
        if !values.is_empty() {
            line.option(option, values.join(","));
        }
    }
    for (name, value) in settings(hardware, "global.") {
        // The short form has no classes with a dot in their name.
        let (driver, property) = name.rsplit_once('.').unwrap_or((name, ""));
        let value = value.replace(',', ",,");
        line.option(
            "-global",
            format!("driver={driver},property={property},value={value}"),
        );
    }
    families::arguments(line, hardware, &around.host.folder.run());
    families::folder_arguments(line, hardware, |name| {
        let folders = &around.host.config.folders;
        look_up("folder", "[folders]", folders, name).map(|path| path.to_string_lossy().into())
    })?;
    sound(line, hardware);
    flash(line, around)?;
    if let Some(vga) = &hardware.vga {
        line.option("-vga", vga.as_str());
    }
    for number in 0..hardware.serial_ports {
        let id = format!("serial{number}");
        line.option("-chardev", server(&id, &around.host.folder.run().join(&id)));
        line.option("-serial", format!("chardev:{id}"));
    }
    for _ in 0..hardware.parallel_ports {
        line.option("-parallel", "null");
    }
    if hardware.cd_drive {
        line.option("-drive", "if=ide,index=2,media=cdrom");
    }
    backing_files(line, around)?;
    floppies(line, around)?;
    for (number, placed) in hardware.devices.iter().enumerate() {
        device(line, around, number, placed)?;
    }
    Ok(())
}

/// Emits the sound backend of all devices.
fn sound(line: &mut Line, hardware: &Hardware) {
    let model = hardware.settings.get("audio.model");
    let sounds = |device: &PlacedDevice| {
        Model::of(&device.model).is_some_and(|model| model.serves == Serves::Sound)
    };
    if let Some(model) = model {
        line.option("-audio", format!("driver=none,id={AUDIO},model={model}"));
    } else if hardware.devices.iter().any(sounds) {
        line.option("-audiodev", format!("none,id={AUDIO}"));
    }
}

fn settings<'a>(
    hardware: &'a Hardware,
    prefix: &'static str,
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let settings = hardware.settings.iter();
    settings.filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, value.as_str())))
}

fn memory(line: &mut Line, around: &Around<'_>) {
    let Some(memory) = &around.hardware.memory else {
        return;
    };
    let kind = match memory.memfd {
        true => "memory-backend-memfd",
        false => "memory-backend-ram",
    };
    let share = if memory.share { "on" } else { "off" };
    let pages = match memory.huge_page_mib {
        Some(size) => format!(",hugetlb=on,hugetlbsize={size}M"),
        None => String::new(),
    };
    let size = around.description.memory_mib;
    let named = around.hardware.settings.get("memory.named-by");
    let named = named.map_or(String::new(), |by| families::by_path(by == "path"));
    line.option(
        "-object",
        format!(
            "{kind},id={},size={size}M,share={share}{pages}{named}",
            memory.id
        ),
    );
}

fn flash(line: &mut Line, around: &Around<'_>) -> Result<(), ResolveError> {
    let Some(flash) = &around.hardware.flash else {
        return Ok(());
    };
    let config = around.host.config;
    let code = look_up("firmware", "[firmware]", &config.firmware, &flash.code)?;
    let code = Image {
        path: code.clone(),
        format: ImageFormat::Raw,
        direct: Some(false),
        locks: true,
        local: false,
        same_file_as: None,
        volume: None,
    };
    let used = Used {
        read_only: true,
        ..Used::default()
    };
    nodes(line, "file-flash0", "flash0", &code, &used);
    if let Some(variables) = &flash.variables {
        let image = image_called(config, variables)?;
        let used = Used {
            shared: !image.local,
            ..Used::default()
        };
        nodes(line, "file-flash1", "flash1", image, &used);
    }
    Ok(())
}

/// Emits the board's floppy drives. Only a `-drive` puts a medium into one of them.
fn floppies(line: &mut Line, around: &Around<'_>) -> Result<(), ResolveError> {
    let (description, hardware) = (around.description, around.hardware);
    for (index, name) in FLOPPIES.iter().enumerate() {
        let medium = hardware.settings.get(*name).map(String::as_str);
        let drive = format!("if=floppy,index={index}");
        let disk = description.disks.iter();
        let disk = disk.clone().find(|disk| Some(disk.name.as_str()) == medium);
        match (disk, medium) {
            (Some(disk), _) => {
                let backing = description.backing(&disk.name);
                let nodes = drive_options(disk, backing, around.host)?;
                line.option("-drive", format!("{drive}{nodes}"));
            }
            (None, Some(_)) => line.option("-drive", drive),
            (None, None) if index == 0 && hardware.floppy_drive => line.option("-drive", drive),
            (None, None) => {}
        }
    }
    Ok(())
}

/// Emits the nodes of the backing files of disks, from the bottom up. Several disks may be overlays
/// of one.
fn backing_files(line: &mut Line, around: &Around<'_>) -> Result<(), ResolveError> {
    let description = around.description;
    let disks = description.disks.iter();
    let level = |disk: &&Disk| {
        let below = |disk: &&Disk| description.backing(&disk.name);
        std::iter::successors(Some(*disk), below)
            .take(BACKING_MAX + 1)
            .count()
    };
    let mut files: Vec<&Disk> = disks
        .filter(|disk| description.is_backing(&disk.name))
        .collect();
    files.sort_by_key(level);
    for disk in files {
        disk_nodes(line, disk, description.backing(&disk.name), around.host)?;
    }
    Ok(())
}

/// Emits what is below the device of a disk, and returns its name. USB storage shows the guest what
/// only a `-drive` has.
fn drive(line: &mut Line, around: &Around<'_>, disk: &Disk) -> Result<String, ResolveError> {
    let backing = around.description.backing(&disk.name);
    let setting = |prefix: &str| {
        let settings = &around.hardware.settings;
        settings.get(&format!("{prefix}{}", disk.name))
    };
    let Some(id) = setting(DRIVE) else {
        return disk_nodes(line, disk, backing, around.host);
    };
    let media = match setting(CDROM).is_some_and(|value| value == "on") {
        true => ",media=cdrom",
        false => "",
    };
    let nodes = drive_options(disk, backing, around.host)?;
    line.option("-drive", format!("if=none,id={id}{media}{nodes}"));
    Ok(id.clone())
}

fn device(
    line: &mut Line,
    around: &Around<'_>,
    number: usize,
    placed: &PlacedDevice,
) -> Result<(), ResolveError> {
    let (description, host) = (around.description, around.host);
    let unknown = || ResolveError::Model(placed.model.clone());
    let model = Model::of(&placed.model).ok_or_else(unknown)?;
    let mut text = placed.model.clone();
    let mut add = |name: &str, value: &str| {
        text.push_str(&format!(",{name}={}", value.replace(',', ",,")));
    };
    if let Some(id) = &placed.id {
        add("id", id);
    }
    if let Some(bus) = &placed.bus {
        add("bus", bus);
    }
    if let Some(place) = &placed.place {
        match model.bus {
            Bus::Pci => add("addr", place),
            Bus::Usb => add("port", place),
            Bus::Ports => add("nr", place),
            Bus::Ide => add("unit", place),
            Bus::Scsi | Bus::Other | Bus::Board => {}
        }
    }
    let served = placed.serves.as_deref().unwrap_or_default();
    match model.serves {
        Serves::Disk | Serves::Medium => {
            let disk = description.disks.iter().find(|disk| disk.name == served);
            if let Some(disk) = disk {
                add("drive", &drive(line, around, disk)?);
            }
        }
        Serves::Nic => {
            let index = nic(description, served).ok_or_else(unknown)?;
            if backend(line, description, host, index)? {
                add("netdev", &format!("net{index}"));
            }
            add("mac", &description.nics[index].mac);
        }
        Serves::Channel => {
            let id = format!("channel-{number}");
            line.option("-chardev", server(&id, &host.folder.channel(served)));
            add("chardev", &id);
        }
        Serves::Terminal => {
            let id = format!("terminal-{number}");
            line.option("-chardev", server(&id, &host.folder.run().join(&id)));
            add("chardev", &id);
        }
        Serves::Sound => add("audiodev", AUDIO),
        Serves::Tpm => {
            let socket = tpm::socket(host.folder)
                .to_string_lossy()
                .replace(',', ",,");
            line.option("-chardev", format!("socket,id={TPM},path={socket}"));
            line.option("-tpmdev", format!("emulator,id={TPM},chardev={TPM}"));
            add("tpmdev", TPM);
        }
        Serves::Nothing => {}
    }
    let own = placed.properties.iter();
    for (name, value) in own.filter(|(name, _)| !name.starts_with(wiring::PREFIX)) {
        add(name, value);
        if name == FREE_PAGE_HINT && value == "on" {
            let id = format!("hints-{number}");
            line.option("-object", format!("iothread,id={id}"));
            add("iothread", &id);
        }
    }
    line.option("-device", text);
    Ok(())
}

#[cfg(test)]
#[path = "line_tests.rs"]
mod tests;
