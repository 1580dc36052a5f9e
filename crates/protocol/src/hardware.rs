//! The machine of a guest that Longhaul did not launch, exactly as it was found: every device at
//! its place, in words that hold on every host.
//!
//! Like the rest of a description it holds no path, no socket and no piece of a command line.
//! Settings and properties are names and values that a host holds against tables of its own.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Everything of a machine that the description of a launched guest leaves to fixed places.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// The machine's UUID, where it was given one.
    #[serde(default)]
    pub uuid: Option<String>,
    /// How its vCPUs are arranged.
    #[serde(default)]
    pub topology: Topology,
    /// Its memory, where that is an object with a name.
    #[serde(default)]
    pub memory: Option<MemoryBackend>,
    /// Firmware in flash.
    #[serde(default)]
    pub flash: Option<Flash>,
    /// The display adapter that came with the machine, such as `std`.
    #[serde(default)]
    pub vga: Option<String>,
    /// Serial ports that came with the machine.
    #[serde(default)]
    pub serial_ports: u8,
    /// Parallel ports that came with the machine.
    #[serde(default)]
    pub parallel_ports: u8,
    /// Whether it has the CD drive that came with the machine; it is empty.
    #[serde(default)]
    pub cd_drive: bool,
    /// Whether it has the floppy drive that came with the machine; it is empty.
    #[serde(default)]
    pub floppy_drive: bool,
    /// What the machine was asked for, such as `machine.usb` or `rtc.base`.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// Its devices, in the order in which they were made.
    #[serde(default)]
    pub devices: Vec<PlacedDevice>,
}

/// How vCPUs are arranged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Sockets.
    pub sockets: u32,
    /// Dies of a socket.
    pub dies: u32,
    /// Cores of a die.
    pub cores: u32,
    /// Threads of a core.
    pub threads: u32,
}

/// Memory as an object of QEMU's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryBackend {
    /// The object's id, which names the RAM block.
    pub id: String,
    /// Whether it is a file in memory (`memory-backend-memfd`).
    #[serde(default)]
    pub memfd: bool,
    /// Whether it can be shared with other processes.
    #[serde(default)]
    pub share: bool,
    /// Size of its huge pages in MiB, where it has such.
    #[serde(default)]
    pub huge_page_mib: Option<u32>,
}

/// Firmware in flash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flash {
    /// The firmware, by name.
    pub code: String,
    /// The image that holds its variables, by name. It is a disk of the guest.
    #[serde(default)]
    pub variables: Option<String>,
}

/// A device at its place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedDevice {
    /// Its model, such as `virtio-net-pci`.
    pub model: String,
    /// Its id, where it was given one.
    #[serde(default)]
    pub id: Option<String>,
    /// The bus that it sits on, such as `pcie.0`, where it sits on one.
    #[serde(default)]
    pub bus: Option<String>,
    /// Its place there: `slot.function` on PCI, a number elsewhere.
    #[serde(default)]
    pub place: Option<String>,
    /// What it serves: a disk's or channel's name, or the number of a network card.
    #[serde(default)]
    pub serves: Option<String>,
    /// What it was asked for.
    #[serde(default)]
    pub properties: BTreeMap<String, String>,
}
