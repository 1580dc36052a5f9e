//! The description of a guest, in terms that are valid on every host.
//!
//! A description never holds a path, a socket or a part of a command line: images, networks,
//! firmware and kernels are names that each host's own configuration resolves. So a peer's
//! description can be launched without trusting the peer with this host's files.

use crate::hardware::Hardware;
use crate::port::Port;
use serde::{Deserialize, Serialize};

/// The beginning of the settings that say what a disk is an overlay of: `backing.vda` is the name
/// of a read-only disk that no device has.
pub const BACKING: &str = "backing.";

/// A guest as its administrator describes it, in TOML, and as a peer receives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestDescription {
    /// The guest's name, unique among the hosts that it may move between.
    pub name: String,
    /// Versioned machine type, such as `pc-q35-7.2` or `pc-i440fx-10.0`.
    pub machine: String,
    /// CPU model, such as `qemu64` or `EPYC-v4`.
    pub cpu: String,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Firmware, by name; the default is QEMU's own.
    #[serde(default)]
    pub firmware: Option<String>,
    /// A kernel to boot directly, if the guest does not boot from a disk.
    #[serde(default)]
    pub kernel: Option<Kernel>,
    /// Disks, in the order of their PCI slots.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// Network cards, in the order of their PCI slots.
    #[serde(default)]
    pub nics: Vec<Nic>,
    /// Channels between guest and host (virtio-serial ports).
    #[serde(default)]
    pub channels: Vec<Channel>,
    /// The discovered machine, if the guest was not launched by Longhaul.
    #[serde(default)]
    pub hardware: Option<Hardware>,
}

/// A kernel that QEMU loads by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kernel {
    /// The kernel and its initramfs, by one name.
    pub name: String,
    /// The kernel's command line.
    #[serde(default)]
    pub command_line: String,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Disk {
    /// The disk's name in this guest, such as `vda`.
    pub name: String,
    /// The image, by name.
    pub image: String,
    /// Whether every host that may run the guest sees the same image under that name.
    #[serde(default)]
    pub shared: bool,
    /// Whether the guest may only read it.
    #[serde(default)]
    pub read_only: bool,
}

impl GuestDescription {
    /// The size of the guest's memory with everything that is plugged in, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let base = self.memory_mib.saturating_mul(1 << 20);
        let Some(hardware) = &self.hardware else {
            return base;
        };
        let settings = hardware.settings.iter();
        let of = |option: &'static str, key: &'static str| {
            let settings = settings.clone();
            settings.filter_map(move |(name, value)| {
                let mut parts = name.split('.');
                let is_it = parts.next() == Some(option) && parts.nth(1) == Some(key);
                is_it.then_some(value)
            })
        };
        let objects = of("ram", "size").fold(0_u64, |sum, size| {
            sum.saturating_add(size.parse().unwrap_or(u64::MAX))
        });
        // The memory of NUMA nodes is the base memory.
        match of("numa", "memdev").next() {
            Some(_) => base.max(objects),
            None => base.saturating_add(objects),
        }
    }

    /// The image of UEFI's variables, by name, if the guest has one. The guest writes it.
    pub fn variables(&self) -> Option<&String> {
        let flash = self.hardware.as_ref()?.flash.as_ref()?;
        flash.variables.as_ref()
    }

    /// The disk that another disk is an overlay of, if it is one.
    pub fn backing(&self, disk: &str) -> Option<&Disk> {
        let below = self
            .hardware
            .as_ref()?
            .settings
            .get(&format!("{BACKING}{disk}"))?;
        self.disks.iter().find(|disk| disk.name == *below)
    }

    /// Whether a disk is only there as the backing file of others: no device has it.
    pub fn is_backing(&self, disk: &str) -> bool {
        let settings = self.hardware.iter().flat_map(|hardware| &hardware.settings);
        let mut backing = settings.filter(|(name, _)| name.starts_with(BACKING));
        backing.any(|(_, below)| below == disk)
    }

    /// The disk that has an image.
    pub fn disk_of(&self, image: &str) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.image == image)
    }

    /// Every image that the guest uses, by name: those of its disks, and that of UEFI's variables.
    pub fn images(&self) -> impl Iterator<Item = &String> {
        let disks = self.disks.iter().map(|disk| &disk.image);
        disks.chain(self.variables())
    }

    /// Every image that the guest may write, by name.
    pub fn written_images(&self) -> impl Iterator<Item = &String> {
        let disks = self.disks.iter().filter(|disk| !disk.read_only);
        disks.map(|disk| &disk.image).chain(self.variables())
    }
}

impl Disk {
    /// Returns whether it is on the guest's host only, and has to move with the guest.
    pub fn is_local(&self) -> bool {
        !self.shared && !self.read_only
    }

    /// Returns whether it moves with the guest only if the destination lacks its image: it cannot
    /// change, so an equal file there is as good.
    pub fn moves_if_lacking(&self) -> bool {
        !self.shared && self.read_only
    }
}

/// A network card.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// The network, by name.
    pub network: String,
    /// The card's MAC address, such as `52:54:00:12:34:56`.
    pub mac: String,
    /// The port of its bridge at the host that it came from, if that is special. Between agents it
    /// travels beside the description.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "crate::port")]
    pub port: Option<Port>,
}

/// A program that manages guests beside Longhaul.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Manager {
    /// libvirt.
    Libvirt,
    /// Proxmox VE.
    Proxmox,
}

impl std::fmt::Display for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Libvirt => "libvirt",
            Self::Proxmox => "Proxmox VE",
        })
    }
}

/// A guest of another program, and what that program has for itself at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Managed {
    /// The program.
    pub by: Manager,
    /// Bytes that only it understands: see the pages of the programs in docs/wire.md.
    pub cookie: Vec<u8>,
}

/// A virtio-serial port that the host reaches through a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// The port's name inside the guest.
    pub name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugged_memory_counts() {
        let with = |settings: &[(&str, &str)]| {
            let settings = settings.iter();
            let settings = settings.map(|(name, value)| ((*name).into(), (*value).into()));
            let hardware = Hardware {
                settings: settings.collect(),
                ..Hardware::default()
            };
            let guest = GuestDescription {
                name: String::new(),
                machine: String::new(),
                cpu: String::new(),
                vcpus: 1,
                memory_mib: 64,
                firmware: None,
                kernel: None,
                disks: Vec::new(),
                nics: Vec::new(),
                channels: Vec::new(),
                hardware: Some(hardware),
            };
            guest.memory_bytes()
        };
        let dimm = ("ram.000.size", "1048576");
        let other = ("ram.001.size", "134217728");
        assert_eq!(with(&[("smbios.000.size", "3")]), 64 << 20);
        assert_eq!(with(&[dimm, other]), (64 << 20) + (1 << 20) + (128 << 20));
        let node = ("numa.000.memdev", "m");
        assert_eq!(with(&[dimm, node]), 64 << 20);
        assert_eq!(with(&[other, node]), 128 << 20);
        assert_eq!(with(&[("ram.000.size", "x")]), u64::MAX);
    }
}
