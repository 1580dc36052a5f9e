//! Derives a guest's description from its command line and the answers of its QEMU.

use super::found::{Found, Inserted, Medium, Origin, Seen, made};
use super::names::Names;
use super::options::{CommandLine, shown};
use super::words::Words;
use super::{cards, drives, more_options, properties};
use crate::description::{self, Chipset, is_name};
use crate::hardware::families::FSDEV;
use crate::hardware::more::{CDROM, DRIVE};
use crate::hardware::tables::{Bus, Model, Serves, VGAS};
use crate::observe::{Blocker, DETACH, pci_place};
use crate::{tested, tpm};
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Kernel, Nic};
use longhaul_protocol::hardware::{Flash, Hardware, PlacedDevice};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The firmware's flash in QEMU's object tree: its code, and its variables.
const FLASH: [&str; 2] = ["/machine/system.flash0", "/machine/system.flash1"];
const RESTART: &str = "shut the guest down and start it at the destination";

/// Returns the description, and everything that prevents launching the guest from it.
pub(super) fn describe(
    name: &str,
    line: CommandLine,
    found: &Found,
    names: &Names<'_>,
) -> (GuestDescription, Vec<Blocker>) {
    let mut describing = Describing {
        found,
        names,
        refusals: line.refusals.clone(),
        disks: Vec::new(),
        nics: Vec::new(),
        channels: Vec::new(),
        settings: BTreeMap::new(),
    };
    describing.refusals.extend(found.blockers.iter().cloned());
    describing.is_pc();
    let mut devices = describing.devices(&line);
    describing.plugged(&mut devices);
    let hardware = describing.hardware(&line, devices);
    let description = GuestDescription {
        name: name.to_owned(),
        machine: found.machine.machine_type.clone(),
        cpu: line.cpu.clone().unwrap_or_else(|| found.cpu.clone()),
        vcpus: found.machine.vcpus,
        memory_mib: found.memory_bytes >> 20,
        firmware: describing.firmware(&line),
        kernel: describing.kernel(&line),
        disks: describing.disks,
        nics: describing.nics,
        channels: describing.channels,
        hardware: Some(hardware),
    };
    let mut refusals = describing.refusals;
    if refusals.is_empty()
        && let Err(error) = description::check(&description)
    {
        refusals.push(Blocker {
            text: format!("it cannot be described: {error}"),
            hint: RESTART.to_owned(),
        });
    }
    (description, refusals)
}

pub(super) struct Describing<'a> {
    pub(super) found: &'a Found,
    pub(super) names: &'a Names<'a>,
    refusals: Vec<Blocker>,
    pub(super) disks: Vec<Disk>,
    nics: Vec<Nic>,
    channels: Vec<Channel>,
    /// Settings that come from devices.
    pub(super) settings: BTreeMap<String, String>,
}

impl Describing<'_> {
    pub(super) fn refuse(&mut self, text: String, hint: &str) {
        self.refusals.push(Blocker {
            text,
            hint: hint.to_owned(),
        });
    }

    pub(super) fn accept<T>(&mut self, result: Result<T, Blocker>) -> Option<T> {
        result.map_err(|blocker| self.refusals.push(blocker)).ok()
    }

    /// Refuses machines that no description has.
    fn is_pc(&mut self) {
        let machine = &self.found.machine.machine_type;
        if Chipset::of(machine).is_none() {
            self.refuse(
                format!(
                    "machine {} cannot be made again: only q35 and pc can",
                    shown(machine)
                ),
                "start the guest with -machine q35",
            );
        }
    }

    /// Returns every device, with the place that QEMU gave it.
    fn devices(&mut self, line: &CommandLine) -> Vec<PlacedDevice> {
        let ordered = ordered(&self.found.devices, &line.devices);
        let mut placed = Vec::new();
        for (seen, words) in ordered {
            if !self.is_usual_cd_drive(seen) {
                placed.extend(self.device(line, words, seen));
            }
        }
        placed
    }

    /// Returns whether this is the empty CD drive that a machine has by default.
    fn is_usual_cd_drive(&self, seen: &Seen) -> bool {
        let bus = match Chipset::of(&self.found.machine.machine_type) {
            Some(Chipset::Q35) => "ide.2",
            _ => "ide.1",
        };
        matches!(seen.origin, Origin::Board(_))
            && seen.kind == "ide-cd"
            && seen.bus() == Some(bus)
            && seen.values.get("unit") == Some(&0.into())
            && self.medium(seen).is_none_or(|it| it.inserted.is_none())
    }

    fn device(
        &mut self,
        line: &CommandLine,
        words: Option<&Words>,
        seen: &Seen,
    ) -> Option<PlacedDevice> {
        let id = match &seen.origin {
            Origin::Named(id) => Some(id.as_str()),
            Origin::Unnamed(_) | Origin::Board(_) => None,
        };
        let called = format!("{} ({})", shown(id.unwrap_or("without an id")), seen.kind);
        let Some(model) = Model::of(&seen.kind) else {
            // Devices that cannot be moved were reported already.
            if !self
                .found
                .blockers
                .iter()
                .any(|blocker| blocker.text.contains(&seen.kind))
            {
                let (why, hint) = unknown_model(&seen.kind);
                self.refuse(format!("device {called}: {why}"), hint);
            }
            return None;
        };
        if let Some((why, hint)) = tested::stays(&seen.kind, &self.found.machine.qemu) {
            self.refuse(format!("device {called}: {why}"), hint);
            return None;
        }
        let mut device = PlacedDevice {
            model: seen.kind.clone(),
            id: id.map(str::to_owned),
            bus: seen
                .bus()
                .filter(|_| model.bus != Bus::Board)
                .map(str::to_owned),
            place: place(model, seen),
            serves: None,
            properties: BTreeMap::new(),
        };
        let unfit = properties::of(model, words, seen, &mut device.properties);
        for (name, value) in unfit {
            self.refuse(
                format!(
                    "device {called}: {}={} cannot be made again elsewhere",
                    shown(&name),
                    shown(&value)
                ),
                "start the guest without it",
            );
        }
        match model.serves {
            Serves::Disk | Serves::Medium => self.disk(line, model, seen, &mut device)?,
            Serves::Nic => self.nic(line, seen, &mut device)?,
            Serves::Channel => self.channel(seen, &mut device),
            Serves::Tpm => self.tpm(line, seen),
            Serves::Nothing | Serves::Terminal | Serves::Sound => {}
        }
        Some(device)
    }

    fn disk(
        &mut self,
        line: &CommandLine,
        model: &Model,
        seen: &Seen,
        device: &mut PlacedDevice,
    ) -> Option<()> {
        let called = device.id.clone().unwrap_or_else(|| match seen.bus() {
            Some(bus) => format!("without an id ({} on {bus})", seen.kind),
            None => format!("without an id ({})", seen.kind),
        });
        let medium = self.medium(seen);
        let inserted = medium.and_then(|medium| medium.inserted.clone());
        let drive = medium.map(|medium| medium.drive.as_str());
        let file = inserted.as_ref().map(|it| it.file.as_str());
        let drive = drives::of(&line.drives, drive.unwrap_or_default(), file);
        for (name, value) in drive.map(drives::properties).into_iter().flatten() {
            let properties = &mut device.properties;
            if model.property(name).is_some() && !properties.contains_key(name) {
                properties.insert(name.to_owned(), value.to_owned());
            }
        }
        let Some(inserted) = inserted else {
            if model.serves == Serves::Disk {
                self.refuse(format!("disk {called} has no image"), RESTART);
            }
            return Some(());
        };
        let limits = &self.found.limits;
        let limits = limits.of(device.id.as_deref(), &seen.path, &inserted.throttled_by);
        let limits = limits.map_err(|unclear| unclear.of(&called));
        let limits = self.accept(limits).unwrap_or_default();
        let image = self.names.image(&format!("disk {called}"), &inserted);
        let image = self.accept(image)?;
        let is_local = self.names.is_local(&image);
        if inserted.is_part {
            self.part(&format!("disk {called}"));
        }
        // A local image is kept open.
        if !is_local && !inserted.read_only && !self.names.opens_again(&inserted.file) {
            self.refuse(
                format!(
                    "disk {called}: its QEMU became a daemon and does not find {} in `/`, where \
                     it would open it again",
                    shown(&inserted.file)
                ),
                "start the guest with the image's whole path",
            );
        }
        let name = drives::name(device.id.as_deref(), model, seen.bus(), &self.disks);
        if is_local {
            self.backing_files(&called, &name, &inserted.backing);
        }
        device.serves = Some(name.clone());
        if seen.kind == "usb-storage" {
            self.usb_storage(&name, drive, seen);
        }
        let limits = limits.into_iter();
        let limits = limits.map(|(key, value)| (format!("limit.{name}.{key}"), value));
        self.settings.extend(limits);
        self.disks.push(Disk {
            name,
            shared: !is_local,
            image,
            read_only: inserted.read_only,
        });
        Some(())
    }

    /// Adds what USB storage shows the guest of its `-drive`.
    fn usb_storage(&mut self, disk: &str, words: Option<&Words>, seen: &Seen) {
        let id = self.medium(seen).map(|medium| medium.drive.clone());
        let Some(id) = id.filter(|id| !id.is_empty()) else {
            return;
        };
        self.settings.insert(format!("{DRIVE}{disk}"), id);
        if words.is_some_and(|words| words.get("media") == Some("cdrom")) {
            self.settings
                .insert(format!("{CDROM}{disk}"), "on".to_owned());
        }
    }

    /// Returns the drive of a device, as QEMU lists it: by the device's id or path, or by that of a
    /// part of it.
    fn medium(&self, seen: &Seen) -> Option<&Medium> {
        let parts = format!("{}/", seen.path);
        let is_its = |medium: &&Medium| {
            let device = medium.device.as_str();
            device == seen.path
                || device.starts_with(&parts)
                || matches!(&seen.origin, Origin::Named(id) if id == device)
        };
        self.found.media.iter().find(is_its)
    }

    fn flash_image(&self, path: &str) -> Option<Inserted> {
        let mut media = self.found.media.iter();
        let medium = media.find(|medium| medium.device == path);
        medium.and_then(|medium| medium.inserted.clone())
    }

    fn nic(&mut self, line: &CommandLine, seen: &Seen, device: &mut PlacedDevice) -> Option<()> {
        let called = device.id.clone().unwrap_or_else(|| seen.kind.clone());
        let wiring = cards::wiring(
            &called,
            seen.text("netdev"),
            &self.found.wires,
            &line.netdevs,
            self.names,
        );
        let (network, wiring) = self.accept(wiring)?;
        wiring.write(&mut device.properties);
        device.serves = Some(self.nics.len().to_string());
        self.nics.push(Nic {
            network,
            mac: seen.text("mac").to_ascii_lowercase(),
            // The port is read when the guest moves.
            port: None,
        });
        Some(())
    }

    fn channel(&mut self, seen: &Seen, device: &mut PlacedDevice) {
        let number = self.channels.len();
        let named = Some(seen.text("name")).filter(|name| !name.is_empty());
        let named = named
            .or(device.id.as_deref())
            .filter(|name| is_name(name, 40));
        let taken = |name: &str| self.channels.iter().any(|channel| channel.name == name);
        let name = named.filter(|name| !taken(name)).map(str::to_owned);
        let name = name.unwrap_or_else(|| format!("port{number}"));
        device.serves = Some(name.clone());
        self.channels.push(Channel { name });
    }

    /// Adds the version of the TPM. QEMU does not know it, so the emulator's command line is read.
    fn tpm(&mut self, line: &CommandLine, seen: &Seen) {
        let version = match line.tpm_version {
            Some(version) => version,
            // There is no other one with this interface.
            None if seen.kind == "tpm-crb" => tpm::VERSIONS[1],
            None => {
                return self.refuse(
                    "the version of its TPM is not known: the `swtpm` at its socket was not found"
                        .to_owned(),
                    "start the guest with tpm-crb in place of tpm-tis, which is of version 2.0",
                );
            }
        };
        self.settings
            .insert(tpm::VERSION.to_owned(), version.to_owned());
    }

    fn hardware(&mut self, line: &CommandLine, devices: Vec<PlacedDevice>) -> Hardware {
        let mut settings = line.settings.clone();
        settings.append(&mut self.settings);
        self.spare(&mut settings);
        self.firmware_files(line, &mut settings);
        self.folders(line, &mut settings);
        let memory = self.memory(line, &mut settings);
        if self.found.memory_bytes & ((1 << 20) - 1) != 0 {
            self.refuse("its memory is no whole number of MiB".to_owned(), RESTART);
        }
        let count = |kind: &str| {
            let count = self
                .found
                .onboard
                .iter()
                .filter(|onboard| *onboard == kind)
                .count();
            u8::try_from(count).unwrap_or(u8::MAX)
        };
        let vga = VGAS.iter().find(|(kind, _)| count(kind) > 0);
        let mut hardware = Hardware {
            uuid: self.found.uuid.clone(),
            topology: self.found.topology,
            memory,
            flash: None,
            vga: vga.map(|(_, name)| (*name).to_owned()),
            serial_ports: count("isa-serial"),
            parallel_ports: count("isa-parallel"),
            cd_drive: self
                .found
                .devices
                .iter()
                .any(|seen| self.is_usual_cd_drive(seen)),
            floppy_drive: count("floppy") > 0,
            settings,
            devices,
        };
        hardware.flash = self.flash();
        self.floppies(&mut hardware.settings);
        hardware
    }

    /// Adds the folders that the guest shares with this host.
    fn folders(&mut self, line: &CommandLine, settings: &mut BTreeMap<String, String>) {
        for words in &line.folders {
            let name = self.names.folder(words.get("path").unwrap_or_default());
            let Some(name) = self.accept(name) else {
                continue;
            };
            let mut words = words.clone();
            words.take("path");
            words.put("folder", &name);
            match more_options::pairs(&FSDEV, &words) {
                Ok(pairs) => FSDEV.add(settings, pairs),
                Err(blockers) => self.refusals.extend(blockers),
            }
        }
    }

    fn flash(&mut self) -> Option<Flash> {
        let code = self.flash_image(FLASH[0]);
        let variables = self.flash_image(FLASH[1]);
        let code = match (code, &variables) {
            (None, None) => return None,
            (None, Some(_)) => {
                self.refuse(
                    "its firmware is in the second flash only".to_owned(),
                    RESTART,
                );
                return None;
            }
            (Some(code), _) => code,
        };
        if !code.read_only {
            self.refuse(
                format!("it can write to its firmware {}", shown(&code.file)),
                "start the guest with the firmware's code read-only (readonly=on), and its \
                 variables in a file of their own",
            );
        }
        for (path, flash) in [(FLASH[0], Some(&code)), (FLASH[1], variables.as_ref())] {
            self.flash_is_plain(path, flash);
        }
        if code.is_part {
            self.part("the firmware's code");
        }
        let code = self.names.firmware(&code.file);
        let code = self.accept(code)?;
        let variables = match variables {
            None => None,
            Some(inserted) => {
                let image = self
                    .names
                    .image("the disk of the firmware's variables", &inserted);
                let image = self.accept(image)?;
                // One that moves along becomes as long as the flash.
                if inserted.is_part && !self.names.is_local(&image) {
                    self.part("the disk of the firmware's variables");
                }
                Some(image)
            }
        };
        Some(Flash { code, variables })
    }

    /// Refuses an image of which only a part is used.
    pub(super) fn part(&mut self, what: &str) {
        self.refuse(
            format!("{what}: only a part of its file is used (`offset`, `size`)"),
            "start the guest with an image of exactly that size",
        );
    }

    /// Refuses what a flash has and would not have elsewhere.
    fn flash_is_plain(&mut self, path: &str, flash: Option<&Inserted>) {
        let Some(flash) = flash else { return };
        let shown = shown(&flash.file);
        let limits = &self.found.limits;
        if limits.has_own(path) || limits.any_of(&flash.throttled_by) {
            self.refuse(
                format!("the firmware's flash {shown} has limits, which cannot be set elsewhere"),
                "start the guest without them",
            );
        }
        if !flash.backing.is_empty() {
            self.refuse(
                format!("the firmware's flash {shown} is an overlay of another image"),
                "start the guest with one plain image: qemu-img convert -O qcow2 OLD NEW",
            );
        }
    }

    fn firmware(&mut self, line: &CommandLine) -> Option<String> {
        let name = self.names.firmware(line.bios.as_ref()?);
        self.accept(name)
    }

    fn kernel(&mut self, line: &CommandLine) -> Option<Kernel> {
        let name = self
            .names
            .kernel(line.kernel.as_ref()?, line.initrd.as_deref());
        Some(Kernel {
            name: self.accept(name)?,
            command_line: line.append.clone().unwrap_or_default(),
        })
    }
}

/// Returns the devices in an order in which they can be made, with the words that made each: those
/// of the board, those of the command line, those that were plugged in later. None precedes the
/// device that its bus belongs to.
fn ordered<'a>(found: &'a [Seen], line: &'a [Words]) -> Vec<(&'a Seen, Option<&'a Words>)> {
    let with = |origin: &Origin| found.iter().find(|seen| seen.origin == *origin);
    let is_board = |seen: &&Seen| matches!(seen.origin, Origin::Board(_));
    let mut waiting: Vec<(&Seen, Option<&Words>)> = found
        .iter()
        .filter(is_board)
        .map(|seen| (seen, None))
        .collect();
    for (origin, words) in made(line) {
        // QEMU has further names for some models: `ahci` for ich9-ahci, `virtio-net`.
        let driver = words.get("driver").unwrap_or_default();
        let is_it = |seen: &&Seen| seen.kind.contains(driver) || driver.contains(&seen.kind);
        waiting.extend(with(&origin).filter(is_it).map(|seen| (seen, Some(words))));
    }
    let known: BTreeSet<&Origin> = waiting.iter().map(|(seen, _)| &seen.origin).collect();
    let others = found.iter().filter(|seen| !known.contains(&seen.origin));
    let others: Vec<_> = others.map(|seen| (seen, None)).collect();
    waiting.extend(others);
    let mut ordered = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let waits = |(seen, _): &(&Seen, Option<&Words>)| {
            let bus = seen.bus_path.as_deref().unwrap_or_default();
            let mut owners = waiting.iter().map(|(seen, _)| seen.path.as_str());
            owners.any(|path| bus.strip_prefix(path).is_some_and(|it| it.starts_with('/')))
        };
        let next = waiting.iter().position(|it| !waits(it)).unwrap_or(0);
        ordered.push(waiting.remove(next));
    }
    ordered
}

/// Returns where a device is on its bus.
fn place(model: &Model, seen: &Seen) -> Option<String> {
    let value = |name: &str| seen.values.get(name);
    let number = |name: &str| {
        value(name)
            .and_then(Value::as_u64)
            .map(|number| number.to_string())
    };
    match model.bus {
        Bus::Pci => value("addr").and_then(Value::as_u64).map(pci_place),
        Bus::Ports => number("nr"),
        Bus::Ide => number("unit"),
        Bus::Usb => value("port")
            .and_then(Value::as_str)
            .filter(|port| !port.is_empty())
            .map(str::to_owned),
        Bus::Scsi | Bus::Other | Bus::Board => None,
    }
}

const UNPLUG: &str = "unplug it before moving, and plug it in again afterwards";

/// Models that cannot be made elsewhere, by the beginning of their names: the reason, and what to
/// do.
pub(super) const KEPT_HERE: [(&str, &str, &str); 14] = [
    ("usb-host", "it is a piece of this host's hardware", UNPLUG),
    ("usb-mtp", "it is a folder of this host", UNPLUG),
    ("usb-uas", STAYS, "use usb-bot or virtio-scsi-pci"),
    ("usb-audio", STAYS, UNPLUG),
    ("usb-braille", STAYS, UNPLUG),
    ("usb-net", STAYS, UNPLUG),
    ("usb-serial", STAYS, UNPLUG),
    (
        "amd-iommu",
        STAYS,
        "start the guest with intel-iommu, or without one",
    ),
    (
        "isa-cirrus-vga",
        "QEMU ends when it loads its state",
        "use cirrus-vga",
    ),
    ("isa-vga", "QEMU ends when it loads its state", "use VGA"),
    ("virtio-crypto", STAYS, DETACH),
    ("virtio-vga-gl", GRAPHICS, "use virtio-vga"),
    ("virtio-gpu-gl", GRAPHICS, "use virtio-gpu-pci"),
    ("virtio-vga-rutabaga", GRAPHICS, "use virtio-vga"),
];

const GRAPHICS: &str = "what the guest draws is in this host's graphics card";
const STAYS: &str = "QEMU cannot move its state";

/// Returns why a device of a model outside the tables cannot be moved, and what to do.
fn unknown_model(kind: &str) -> (&'static str, &'static str) {
    for (prefix, why, hint) in KEPT_HERE {
        if kind.starts_with(prefix) {
            return (why, hint);
        }
    }
    (
        "its model is not supported for guests that something else started",
        "start the guest without it",
    )
}
