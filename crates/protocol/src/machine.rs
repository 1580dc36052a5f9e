//! A guest's machine as its QEMU shows it, and how two of them differ.
//!
//! A destination can only load a state into the same machine: the same RAM blocks, devices at the
//! same places, and CPU features. [`Machine::differences`] names everything that is not the same.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What a QEMU says of the machine that it emulates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// QEMU's version, such as `10.0.2`.
    pub qemu: String,
    /// The versioned machine type, such as `pc-q35-7.2`.
    pub machine_type: String,
    /// `tcg` or `kvm`.
    pub accelerator: String,
    /// Number of virtual CPUs.
    pub vcpus: u32,
    /// RAM blocks by name.
    pub ram_blocks: BTreeMap<String, RamBlock>,
    /// Devices by their path in QEMU's object model, or by id where they have one.
    pub devices: BTreeMap<String, Device>,
    /// The CPU model's properties after expansion, by name.
    pub cpu_properties: BTreeMap<String, String>,
}

/// One of QEMU's RAM blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes that it can grow to.
    pub max_bytes: u64,
    /// Size of the pages that back it, in bytes.
    pub page_bytes: u64,
}

/// One of a machine's devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its type, such as `virtio-net-pci`.
    pub kind: String,
    /// Where it sits (`bus/slot.function` on PCI), where that is known.
    pub address: Option<String>,
}
