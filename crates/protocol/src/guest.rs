//! The description of a guest, in terms that are valid on every host.
//!
//! A description never holds a path, a socket or a part of a command line: images, networks,
//! firmware and kernels are names that each host's own configuration resolves. So a peer's
//! description can be launched without trusting the peer with this host's files.

use crate::hardware::Hardware;
use crate::port::Port;
use serde::{Deserialize, Serialize};

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
    /// The image of UEFI's variables, by name, if the guest has one. The guest writes it.
    pub fn variables(&self) -> Option<&String> {
        let flash = self.hardware.as_ref()?.flash.as_ref()?;
        flash.variables.as_ref()
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

/// A virtio-serial port that the host reaches through a unix socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Channel {
    /// The port's name inside the guest.
    pub name: String,
}
