//! Derives a guest's description from its command line and the answers of its QEMU.

use super::found::{Found, Inserted, Seen};
use super::names::Names;
use super::options::{CommandLine, shown};
use super::words::Words;
use crate::description::{self, is_name};
use crate::hardware::tables::{Bus, Model, Serves, VGAS};
use crate::observe::{Blocker, pci_place};
use longhaul_protocol::guest::{Channel, Disk, GuestDescription, Kernel, Nic};
use longhaul_protocol::hardware::{Flash, Hardware, MemoryBackend, PlacedDevice};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The maximum length of a disk's name.
const DISK_NAME_BYTES_MAX: usize = 16;
/// Properties of the host's side, which this host's tables answer.
const LOCAL: [&str; 19] = [
    "account-failed",
    "account-invalid",
    "addr",
    "bus",
    "channel",
    "chardev",
    "drive",
    "driver",
    "id",
    "iothread",
    "lun",
    "mac",
    "netdev",
    "nr",
    "port",
    "rng",
    "scsi-id",
    "serial-number",
    "unit",
];
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
    };
    describing.refusals.extend(found.blockers.iter().cloned());
    let devices = describing.devices(&line);
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

struct Describing<'a> {
    found: &'a Found,
    names: &'a Names<'a>,
    refusals: Vec<Blocker>,
    disks: Vec<Disk>,
    nics: Vec<Nic>,
    channels: Vec<Channel>,
}

impl Describing<'_> {
    fn refuse(&mut self, text: String, hint: &str) {
        self.refusals.push(Blocker {
            text,
            hint: hint.to_owned(),
        });
    }

    fn accept<T>(&mut self, result: Result<T, Blocker>) -> Option<T> {
        result.map_err(|blocker| self.refusals.push(blocker)).ok()
    }

    /// Returns every device of the command line, with the place that QEMU gave it.
    fn devices(&mut self, line: &CommandLine) -> Vec<PlacedDevice> {
        let mut placed = Vec::new();
        let mut unnamed = self.found.unnamed.iter();
        let mut known = BTreeSet::new();
        for words in &line.devices {
            let id = words.get("id");
            let seen = match id {
                Some(id) => self.found.named.get(id),
                None => unnamed.next(),
            };
            known.extend(id);
            let asked = shown(words.get("driver").unwrap_or_default());
            match seen {
                Some(seen) if id.is_some() || seen.kind.starts_with(&asked) => {
                    placed.extend(self.device(line, words, id, seen));
                }
                _ => self.refuse(
                    format!(
                        "device {} of its command line is not in its machine",
                        shown(id.unwrap_or(&asked))
                    ),
                    "it was unplugged while the guest ran: restart the guest, then attach to it",
                ),
            }
        }
        let plugged = self
            .found
            .named
            .iter()
            .filter(|(id, _)| !known.contains(id.as_str()));
        let plugged = plugged.map(|(id, seen)| (id.as_str(), seen));
        let plugged: Vec<_> = plugged
            .chain(unnamed.map(|seen| ("without an id", seen)))
            .collect();
        for (id, seen) in plugged {
            self.refuse(
                format!(
                    "device {} ({}) was plugged in while the guest ran",
                    shown(id),
                    seen.kind
                ),
                "unplug it, or restart the guest with it on its command line",
            );
        }
        placed
    }

    fn device(
        &mut self,
        line: &CommandLine,
        words: &Words,
        id: Option<&str>,
        seen: &Seen,
    ) -> Option<PlacedDevice> {
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
        let mut device = PlacedDevice {
            model: seen.kind.clone(),
            id: id.map(str::to_owned),
            bus: seen.bus.clone().filter(|_| model.bus != Bus::Board),
            place: place(model, seen),
            serves: None,
            properties: BTreeMap::new(),
        };
        for (name, value) in words.iter().filter(|(name, _)| !LOCAL.contains(name)) {
            match model.property(name) {
                Some(kind) if kind.takes(&kind.normal(value)) => {
                    device
                        .properties
                        .insert(name.to_owned(), kind.normal(value));
                }
                _ => self.refuse(
                    format!(
                        "device {called}: {}={} cannot be made again elsewhere",
                        shown(name),
                        shown(value)
                    ),
                    "start the guest without it",
                ),
            }
        }
        if model.bus == Bus::Scsi {
            for name in ["channel", "lun", "scsi-id"] {
                if let Some(value) = seen.values.get(name).and_then(Value::as_u64) {
                    device.properties.insert(name.to_owned(), value.to_string());
                }
            }
        }
        match model.serves {
            Serves::Disk | Serves::Medium => self.disk(line, words, model, seen, &mut device)?,
            Serves::Nic => self.nic(line, words, seen, &mut device)?,
            Serves::Channel => self.channel(words, &mut device),
            Serves::Nothing | Serves::Terminal => {}
        }
        Some(device)
    }

    fn disk(
        &mut self,
        line: &CommandLine,
        words: &Words,
        model: &Model,
        seen: &Seen,
        device: &mut PlacedDevice,
    ) -> Option<()> {
        if let Some(drive) = words.get("drive").and_then(|drive| line.drives.get(drive)) {
            for name in ["werror", "rerror"] {
                if let Some(value) = drive.get(name) {
                    device
                        .properties
                        .entry(name.to_owned())
                        .or_insert_with(|| value.to_owned());
                }
            }
            if matches!(drive.get("cache"), Some("writethrough" | "directsync")) {
                device
                    .properties
                    .entry("write-cache".to_owned())
                    .or_insert_with(|| "off".to_owned());
            }
        }
        let called = device.id.clone().unwrap_or_else(|| seen.kind.clone());
        let inserted = self.inserted(device.id.as_deref(), &seen.path);
        let Some(inserted) = inserted else {
            if model.serves == Serves::Disk {
                self.refuse(format!("disk {called} has no image"), RESTART);
            }
            return Some(());
        };
        let image = self.names.image(&format!("disk {called}"), &inserted);
        let image = self.accept(image)?;
        let name = device
            .id
            .clone()
            .filter(|id| is_name(id, DISK_NAME_BYTES_MAX));
        let name = name.unwrap_or_else(|| format!("disk{}", self.disks.len()));
        device.serves = Some(name.clone());
        self.disks.push(Disk {
            name,
            shared: !self.names.is_local(&image),
            image,
            read_only: inserted.read_only,
        });
        Some(())
    }

    fn inserted(&self, id: Option<&str>, path: &str) -> Option<Inserted> {
        let backend = format!("{path}/virtio-backend");
        let mut media = self.found.media.iter();
        let medium = media.find(|medium| {
            let device = medium.device.as_str();
            Some(device) == id || device == path || device == backend
        });
        medium.and_then(|medium| medium.inserted.clone())
    }

    fn nic(
        &mut self,
        line: &CommandLine,
        words: &Words,
        seen: &Seen,
        device: &mut PlacedDevice,
    ) -> Option<()> {
        let called = device.id.clone().unwrap_or_else(|| seen.kind.clone());
        let cable = words.get("netdev");
        let netdev = cable.map(|cable| line.netdevs.get(cable).cloned().unwrap_or_default());
        let printed = cable.and_then(|cable| {
            let start = format!("\\ {cable}: ");
            let mut lines = self.found.networks.lines().map(str::trim);
            lines.find_map(|line| line.strip_prefix(start.as_str()))
        });
        let network = self
            .names
            .network(&called, netdev.as_ref(), printed.unwrap_or_default());
        let network = self.accept(network)?;
        let mac = seen
            .values
            .get("mac")
            .and_then(Value::as_str)
            .unwrap_or_default();
        device.serves = Some(self.nics.len().to_string());
        self.nics.push(Nic {
            network,
            mac: mac.to_ascii_lowercase(),
            // It is looked at when the guest moves.
            port: None,
        });
        Some(())
    }

    fn channel(&mut self, words: &Words, device: &mut PlacedDevice) {
        let number = self.channels.len();
        let named = words
            .get("name")
            .or(words.get("id"))
            .filter(|name| is_name(name, 40));
        let taken = |name: &str| self.channels.iter().any(|channel| channel.name == name);
        let name = named.filter(|name| !taken(name)).map(str::to_owned);
        let name = name.unwrap_or_else(|| format!("port{number}"));
        device.serves = Some(name.clone());
        self.channels.push(Channel { name });
    }

    fn hardware(&mut self, line: &CommandLine, devices: Vec<PlacedDevice>) -> Hardware {
        if self.found.absent_vcpus > 0 {
            self.refuse(
                "vCPUs that can be plugged in are not supported".to_owned(),
                "start the guest without maxcpus",
            );
        }
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
            memory: None,
            flash: None,
            vga: vga.map(|(_, name)| (*name).to_owned()),
            serial_ports: count("isa-serial"),
            parallel_ports: count("isa-parallel"),
            cd_drive: count("ide-cd") > 0,
            floppy_drive: count("floppy") > 0,
            settings: line.settings.clone(),
            devices,
        };
        hardware.memory = self.memory(line);
        hardware.flash = self.flash();
        self.onboard();
        hardware
    }

    /// Refuses devices that come with the machine and cannot be requested again.
    fn onboard(&mut self) {
        let found = self.found;
        let own = |kind: &str| {
            matches!(
                kind,
                "ide-hd" | "qxl-vga" | "vmware-svga" | "virtio-net-pci"
            ) || kind.starts_with("e1000")
        };
        for kind in found.onboard.iter().filter(|kind| own(kind)) {
            self.refuse(
                format!("QEMU made a device by itself ({kind}), which has no place of its own"),
                "start the guest with -nodefaults, and with `-device` for each device",
            );
        }
        if found
            .onboard
            .iter()
            .filter(|kind| *kind == "ide-cd")
            .count()
            > 1
        {
            self.refuse(
                "it has more than one CD drive that came with the machine".to_owned(),
                "use `-device ide-cd`",
            );
        }
        let media = found.media.iter();
        let media = media.filter(|medium| medium.device.starts_with("/machine/unattached/"));
        for inserted in media.filter_map(|medium| medium.inserted.as_ref()) {
            self.refuse(
                format!(
                    "a drive of the machine holds {}, a file of this host",
                    shown(&inserted.file)
                ),
                "eject it",
            );
        }
    }

    fn memory(&mut self, line: &CommandLine) -> Option<MemoryBackend> {
        const LOCAL: [&str; 11] = [
            "dump",
            "host-nodes",
            "id",
            "merge",
            "policy",
            "prealloc",
            "prealloc-threads",
            "qom-type",
            "reserve",
            "seal",
            "size",
        ];
        let id = line.memory_backend.as_ref()?;
        let Some(words) = line.objects.get(id) else {
            self.refuse(
                format!("memory object {} is not on its command line", shown(id)),
                RESTART,
            );
            return None;
        };
        let memfd = words.get("qom-type") == Some("memory-backend-memfd");
        let is_on = |key: &str, default: bool| {
            words
                .get(key)
                .map_or(default, |value| matches!(value, "on" | "yes" | "true"))
        };
        for (key, _) in words.iter() {
            if !LOCAL.contains(&key) && !matches!(key, "share" | "hugetlb" | "hugetlbsize") {
                self.refuse(
                    format!("memory setting {} cannot be made again", shown(key)),
                    "start the guest without it",
                );
            }
        }
        let page_bytes = self
            .found
            .machine
            .ram_blocks
            .get(id)
            .map(|block| block.page_bytes);
        Some(MemoryBackend {
            id: id.clone(),
            memfd,
            share: is_on("share", memfd),
            huge_page_mib: page_bytes
                .filter(|_| is_on("hugetlb", false))
                .and_then(|bytes| u32::try_from(bytes >> 20).ok()),
        })
    }

    fn flash(&mut self) -> Option<Flash> {
        let code = self.inserted(None, "/machine/system.flash0");
        let variables = self.inserted(None, "/machine/system.flash1");
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
        let code = self.names.firmware(&code.file);
        let code = self.accept(code)?;
        let variables = match variables {
            None => None,
            Some(inserted) => {
                let image = self
                    .names
                    .image("the disk of the firmware's variables", &inserted);
                Some(self.accept(image)?)
            }
        };
        Some(Flash { code, variables })
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
        Bus::Scsi | Bus::Board => None,
    }
}

/// Returns why a device of a model outside the tables cannot be moved, and what to do.
fn unknown_model(kind: &str) -> (&'static str, &'static str) {
    const UNPLUG: &str = "unplug it before moving, and plug it in again afterwards";
    for (prefix, why, hint) in [
        (
            "tpm-",
            "the state of a TPM is kept outside QEMU, on this host",
            RESTART,
        ),
        ("usb-host", "it is a piece of this host's hardware", UNPLUG),
        (
            "usb-redir",
            "its other end is a connection to this host",
            UNPLUG,
        ),
        ("usb-storage", "its model is not supported", UNPLUG),
        (
            "pc-dimm",
            "memory that is plugged in is not supported",
            UNPLUG,
        ),
        (
            "nvme",
            "QEMU cannot move its state",
            "use virtio-blk-pci or virtio-scsi-pci",
        ),
        (
            "qxl",
            "displays for SPICE are not supported",
            "use VGA or virtio-vga",
        ),
    ] {
        if kind.starts_with(prefix) {
            return (why, hint);
        }
    }
    (
        "its model is not supported for guests that something else started",
        "start the guest without it",
    )
}
