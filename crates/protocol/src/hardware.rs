//! The machine of a guest that Longhaul did not launch, exactly as discovered: every device at its
//! place, in terms that are valid on every host.
//!
//! Like the rest of a description it holds no path, no socket and no part of a command line.
//! Settings and properties are names and values that each host checks against its own tables.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The parts of a machine that have fixed values in the description of a launched guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hardware {
    /// The machine's UUID, if it was given one.
    #[serde(default)]
    pub uuid: Option<String>,
    /// The arrangement of its vCPUs.
    #[serde(default)]
    pub topology: Topology,
    /// Its memory, if that is a named object.
    #[serde(default)]
    pub memory: Option<MemoryBackend>,
    /// Firmware in flash.
    #[serde(default)]
    pub flash: Option<Flash>,
    /// The built-in display adapter, such as `std`.
    #[serde(default)]
    pub vga: Option<String>,
    /// Number of built-in serial ports.
    #[serde(default)]
    pub serial_ports: u8,
    /// Number of built-in parallel ports.
    #[serde(default)]
    pub parallel_ports: u8,
    /// Whether it has the built-in CD drive, which is empty.
    #[serde(default)]
    pub cd_drive: bool,
    /// Whether it has the built-in floppy drive, which is empty.
    #[serde(default)]
    pub floppy_drive: bool,
    /// The machine's requested settings, such as `machine.usb` or `rtc.base`.
    #[serde(default)]
    pub settings: BTreeMap<String, String>,
    /// Its devices, in the order of their creation.
    #[serde(default)]
    pub devices: Vec<PlacedDevice>,
}

/// The arrangement of vCPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Sockets.
    pub sockets: u32,
    /// Dies per socket.
    pub dies: u32,
    /// Cores per die.
    pub cores: u32,
    /// Threads per core.
    pub threads: u32,
}

/// Memory as a QEMU object.
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
    /// Size of its huge pages in MiB, if it has any.
    #[serde(default)]
    pub huge_page_mib: Option<u32>,
}

/// Firmware in flash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Flash {
    /// The firmware, by name.
    pub code: String,
    /// The image that holds its variables, by name. It is not one of the guest's disks.
    #[serde(default)]
    pub variables: Option<String>,
}

/// A device at its place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacedDevice {
    /// Its model, such as `virtio-net-pci`.
    pub model: String,
    /// Its id, if it was given one.
    #[serde(default)]
    pub id: Option<String>,
    /// The bus that it is attached to, such as `pcie.0`, if any.
    #[serde(default)]
    pub bus: Option<String>,
    /// Its place there: `slot.function` on PCI, a number elsewhere.
    #[serde(default)]
    pub place: Option<String>,
    /// The name of its disk or channel, or the number of its network card.
    #[serde(default)]
    pub serves: Option<String>,
    /// Its requested properties.
    #[serde(default)]
    pub properties: BTreeMap<String, String>,
}
