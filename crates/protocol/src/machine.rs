//! A guest's machine as its QEMU reports it, and the comparison of two machines.
//!
//! A destination can only load a state into the same machine: the same RAM blocks, devices at the
//! same places, and CPU features. [`Machine::differences`] returns everything that is not the same.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The beginning of the name of a device that came with the machine, in [`Machine::devices`].
pub const BOARD: &str = "board ";
/// ... and of one that was requested without an id.
pub const UNNAMED: &str = "unnamed ";

/// Most CPU features that one sentence names.
const FEATURES_NAMED_MAX: usize = 16;

/// A machine as the QEMU that emulates it reports it.
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
    /// Devices by id, or by number where they have none.
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
    /// Its place (`bus/slot.function` on PCI), if it is known.
    pub address: Option<String>,
}

/// A difference between the two ends that prevents the guest's state from being loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The difference, in one sentence.
    pub text: String,
    /// The remedy.
    pub hint: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Machine {
    /// Returns all differences of this machine, at the destination, from the source's.
    ///
    /// QEMU's own version may differ, but not the machine that it reports.
    pub fn differences(&self, source: &Self) -> Vec<Difference> {
        let mut found = Vec::new();
        self.compare_basics(source, &mut found);
        self.compare_ram_blocks(source, &mut found);
        self.compare_devices(source, &mut found);
        self.compare_cpu(source, &mut found);
        found
    }

    fn compare_basics(&self, source: &Self, found: &mut Vec<Difference>) {
        let mut compare = |what: &str, there: &str, here: &str, hint: &str| {
            if there != here {
                found.push(Difference {
                    text: format!("{what}: {there} at the source, {here} at the destination"),
                    hint: hint.to_owned(),
                });
            }
        };
        compare(
            "machine type",
            &source.machine_type,
            &self.machine_type,
            "launch the guest with the same versioned machine type at both ends",
        );
        compare(
            "accelerator",
            &source.accelerator,
            &self.accelerator,
            "choose a host that runs guests with the same accelerator",
        );
        compare(
            "number of vCPUs",
            &source.vcpus.to_string(),
            &self.vcpus.to_string(),
            "give the guest the same number of vCPUs at both ends",
        );
    }

    fn compare_ram_blocks(&self, source: &Self, found: &mut Vec<Difference>) {
        let names: BTreeSet<&String> = source
            .ram_blocks
            .keys()
            .chain(self.ram_blocks.keys())
            .collect();
        for name in names {
            let text = match (source.ram_blocks.get(name), self.ram_blocks.get(name)) {
                (Some(there), Some(here)) => match here.difference(there) {
                    Some(text) => text,
                    None => continue,
                },
                (Some(_), None) => "missing at the destination".to_owned(),
                (None, Some(_)) => "at the destination only".to_owned(),
                (None, None) => continue,
            };
            found.push(Difference {
                text: format!("memory block {name}: {text}"),
                hint: ram_block_hint(name).to_owned(),
            });
        }
    }

    fn compare_devices(&self, source: &Self, found: &mut Vec<Difference>) {
        let names: BTreeSet<&String> = source.devices.keys().chain(self.devices.keys()).collect();
        let renamed = self.renamed_devices(source);
        for name in names {
            let text = match (source.devices.get(name), self.devices.get(name)) {
                (Some(there), Some(here)) if there == here => continue,
                _ if renamed.contains(name) => continue,
                (Some(there), Some(here)) => {
                    format!("{there} at the source, {here} at the destination")
                }
                (Some(there), None) => format!("{there} at the source, missing at the destination"),
                (None, Some(here)) => format!("{here} at the destination, missing at the source"),
                (None, None) => continue,
            };
            found.push(Difference {
                text: format!("device {name}: {text}"),
                hint: "launch the guest with the same devices in the same order, and its cards on \
                       the same kind of network, at both ends"
                    .to_owned(),
            });
        }
    }

    /// Returns the names, at both ends, of devices that have the same place under different names,
    /// of which one is a number: QEMU finds a device's state by its place.
    fn renamed_devices(&self, source: &Self) -> BTreeSet<String> {
        let is_numbered = |name: &str| name.starts_with(BOARD) || name.starts_with(UNNAMED);
        let others = |own: &Self, other: &Self| -> Vec<(String, Device)> {
            let devices = own.devices.iter();
            let others = devices.filter(|(name, device)| other.devices.get(*name) != Some(*device));
            others
                .map(|(name, device)| (name.clone(), device.clone()))
                .collect()
        };
        let mut there = others(source, self);
        let mut renamed = BTreeSet::new();
        for (name, device) in others(self, source) {
            let is_it = |(other, at): &(String, Device)| {
                *at == device && (is_numbered(&name) || is_numbered(other))
            };
            if let Some(place) = there.iter().position(is_it) {
                renamed.extend([name, there.remove(place).0]);
            } else if name.starts_with(BOARD) || (is_numbered(&name) && device.kind == "ide-cd") {
                // Older agents do not report the source's; no agent reports its CD drives.
                renamed.insert(name);
            }
        }
        renamed
    }

    fn compare_cpu(&self, source: &Self, found: &mut Vec<Difference>) {
        let (mut lost, mut gained) = (Vec::new(), Vec::new());
        let names: BTreeSet<&String> = source
            .cpu_properties
            .keys()
            .chain(self.cpu_properties.keys())
            .collect();
        for name in names {
            let there = source.cpu_properties.get(name).map(String::as_str);
            let here = self.cpu_properties.get(name).map(String::as_str);
            match (there, here) {
                (there, here) if there == here => {}
                (Some("on"), Some("off")) | (Some("on"), None) => lost.push(name.as_str()),
                (Some("off"), Some("on")) | (None, Some("on")) => gained.push(name.as_str()),
                // A QEMU that does not know a feature does not have it.
                (Some("off"), None) | (None, Some("off")) => {}
                // A number that one QEMU does not know, and that is 0 in the other.
                (Some("0"), None) | (None, Some("0")) => {}
                (there, here) => found.push(Difference {
                    text: format!(
                        "CPU property {name}: {} at the source, {} at the destination",
                        there.unwrap_or("unknown"),
                        here.unwrap_or("unknown")
                    ),
                    hint: "launch the guest with a CPU model that is the same everywhere (not \
                           `host` or `max`)"
                        .to_owned(),
                }),
            }
        }
        push_features(
            found,
            &lost,
            "the guest sees at the source and the destination lacks",
        );
        push_features(
            found,
            &gained,
            "the destination has and the guest does not see now",
        );
    }
}

fn push_features(found: &mut Vec<Difference>, features: &[&str], what: &str) {
    if features.is_empty() {
        return;
    }
    let named = &features[..features.len().min(FEATURES_NAMED_MAX)];
    let more = match features.len() - named.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let taken: String = named.iter().map(|name| format!(",-{name}")).collect();
    found.push(Difference {
        text: format!("CPU features that {what}: {}{more}", named.join(", ")),
        hint: format!(
            "choose a host with the same CPU features, or take these from the guest's CPU in its \
             description (cpu = \"MODEL{taken}\") and restart it"
        ),
    });
}

/// Returns the remedy for a RAM block, which depends on its origin.
fn ram_block_hint(name: &str) -> &'static str {
    if name.ends_with(".ram") || name.starts_with("mem") {
        "give the guest the same memory, with pages of the same size, at both ends"
    } else if name.ends_with(".rom") || name.ends_with(".bios") {
        "install the same firmware images (packages such as seabios, ovmf, ipxe-qemu) on both hosts"
    } else {
        "launch the guest with the same machine type, devices and firmware at both ends"
    }
}

impl RamBlock {
    /// Returns why the source's block does not fit into this one.
    fn difference(&self, source: &Self) -> Option<String> {
        let between = |what: &str, there: u64, here: u64| {
            format!(
                "{what} {} at the source, {} at the destination",
                bytes(there),
                bytes(here)
            )
        };
        if source.page_bytes != self.page_bytes {
            return Some(between("pages of", source.page_bytes, self.page_bytes));
        }
        if source.max_bytes != self.max_bytes {
            return Some(between("at most", source.max_bytes, self.max_bytes));
        }
        // A block below its maximum can be resized, and QEMU does so when it loads the state.
        let fixed = self.used_bytes == self.max_bytes;
        if source.used_bytes != self.used_bytes && (fixed || source.used_bytes > self.max_bytes) {
            return Some(between("size", source.used_bytes, self.used_bytes));
        }
        None
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Some(address) => write!(f, "{} at {address}", self.kind),
            None => f.write_str(&self.kind),
        }
    }
}

/// Returns a size as text, exactly.
fn bytes(value: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units
        .iter()
        .find(|(shift, _)| value >= 1 << shift && value.trailing_zeros() >= *shift);
    match unit {
        Some((shift, unit)) => format!("{} {unit}", value >> shift),
        None => format!("{value} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(used_bytes: u64, max_bytes: u64) -> RamBlock {
        RamBlock {
            used_bytes,
            max_bytes,
            page_bytes: 4096,
        }
    }

    fn device(kind: &str, address: &str) -> Device {
        Device {
            kind: kind.to_owned(),
            address: Some(address.to_owned()),
        }
    }

    fn map<T>(entries: impl IntoIterator<Item = (&'static str, T)>) -> BTreeMap<String, T> {
        entries
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }

    fn machine() -> Machine {
        Machine {
            qemu: "7.2.22".to_owned(),
            machine_type: "pc-q35-7.2".to_owned(),
            accelerator: "tcg".to_owned(),
            vcpus: 2,
            ram_blocks: map([
                ("pc.ram", block(256 << 20, 256 << 20)),
                ("pc.bios", block(256 << 10, 256 << 10)),
                ("/rom@etc/acpi/tables", block(0x20000, 0x200000)),
            ]),
            devices: map([
                ("nic0", device("virtio-net-pci", "pcie.0/10.0")),
                ("serial", device("virtio-serial-pci", "pcie.0/03.0")),
            ]),
            cpu_properties: map([
                ("avx", "on"),
                ("rdseed", "off"),
                ("model", "107"),
                ("vendor", "AuthenticAMD"),
            ]
            .map(|(name, value)| (name, value.to_owned()))),
        }
    }

    fn texts(change: impl FnOnce(&mut Machine)) -> Vec<String> {
        let mut destination = machine();
        change(&mut destination);
        let found = destination.differences(&machine());
        assert!(found.iter().all(|difference| !difference.hint.is_empty()));
        found.iter().map(Difference::to_string).collect()
    }

    #[test]
    fn equal_machines_have_no_differences() {
        assert!(texts(|_| ()).is_empty());
        // Another QEMU with the same machine, which knows more features and does not have them.
        let found = texts(|machine| {
            machine.qemu = "10.0.2".to_owned();
            machine
                .cpu_properties
                .insert("avx10".to_owned(), "off".to_owned());
            machine
                .cpu_properties
                .insert("avx10-version".to_owned(), "0".to_owned());
            machine.cpu_properties.remove("rdseed");
            let tables = machine.ram_blocks.get_mut("/rom@etc/acpi/tables").unwrap();
            tables.used_bytes = 0x40000;
        });
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn basics_that_differ_are_named() {
        let found = texts(|machine| {
            machine.machine_type = "pc-q35-10.0".to_owned();
            machine.accelerator = "kvm".to_owned();
            machine.vcpus = 1;
        });
        assert_eq!(
            found,
            [
                "machine type: pc-q35-7.2 at the source, pc-q35-10.0 at the destination",
                "accelerator: tcg at the source, kvm at the destination",
                "number of vCPUs: 2 at the source, 1 at the destination",
            ]
        );
    }

    #[test]
    fn ram_blocks_that_differ_are_named() {
        let found = texts(|machine| {
            machine
                .ram_blocks
                .insert("pc.ram".to_owned(), block(128 << 20, 128 << 20));
            machine
                .ram_blocks
                .insert("vga.vram".to_owned(), block(16 << 20, 16 << 20));
            machine.ram_blocks.remove("pc.bios");
            let tables = machine.ram_blocks.get_mut("/rom@etc/acpi/tables").unwrap();
            tables.page_bytes = 2 << 20;
        });
        assert_eq!(
            found,
            [
                "memory block /rom@etc/acpi/tables: pages of 4 KiB at the source, 2 MiB at the \
                 destination",
                "memory block pc.bios: missing at the destination",
                "memory block pc.ram: at most 256 MiB at the source, 128 MiB at the destination",
                "memory block vga.vram: at the destination only",
            ]
        );
    }

    #[test]
    fn a_block_that_cannot_be_resized_must_have_the_size() {
        let fixed = block(0x20000, 0x20000);
        assert_eq!(fixed.difference(&fixed), None);
        let grown = block(0x20001, 0x20000);
        assert_eq!(
            fixed.difference(&grown).unwrap(),
            "size 131073 bytes at the source, 128 KiB at the destination"
        );
        let resizable = block(0x1000, 0x20000);
        assert_eq!(resizable.difference(&fixed), None);
        assert!(resizable.difference(&grown).is_some());
    }

    #[test]
    fn devices_that_differ_are_named() {
        let found = texts(|machine| {
            machine.devices.remove("serial");
            machine
                .devices
                .insert("nic0".to_owned(), device("virtio-net-pci", "pcie.0/11.0"));
            machine.devices.insert(
                "blk-vda".to_owned(),
                device("virtio-blk-pci", "pcie.0/04.0"),
            );
        });
        assert_eq!(
            found,
            [
                "device blk-vda: virtio-blk-pci at pcie.0/04.0 at the destination, missing at the \
                 source",
                "device nic0: virtio-net-pci at pcie.0/10.0 at the source, virtio-net-pci at \
                 pcie.0/11.0 at the destination",
                "device serial: virtio-serial-pci at pcie.0/03.0 at the source, missing at the \
                 destination",
            ]
        );
    }

    #[test]
    fn devices_are_the_same_by_their_places() {
        let with = |names: &[(&str, &str, &str)]| {
            let mut machine = machine();
            machine.devices = names
                .iter()
                .map(|(name, kind, place)| ((*name).to_owned(), device(kind, place)))
                .collect();
            machine
        };
        let source = with(&[
            ("board device[18]", "ide-hd", "ide.0"),
            ("board device[19]", "ide-hd", "ide.0"),
            ("board device[30]", "e1000", "pci.0/03.0"),
            ("unnamed device[0]", "virtio-rng-pci", "pci.0/04.0"),
            ("hot", "virtio-rng-pci", "pci.0/05.0"),
        ]);
        let same = with(&[
            ("unnamed device[0]", "ide-hd", "ide.0"),
            ("unnamed device[1]", "ide-hd", "ide.0"),
            ("unnamed device[2]", "e1000", "pci.0/03.0"),
            ("unnamed device[3]", "virtio-rng-pci", "pci.0/04.0"),
            ("unnamed device[4]", "virtio-rng-pci", "pci.0/05.0"),
            ("board device[7]", "ide-hd", "ide.1"),
        ]);
        assert_eq!(same.differences(&source), []);
        let other = with(&[
            ("unnamed device[0]", "ide-hd", "ide.0"),
            ("unnamed device[2]", "e1000", "pci.0/04.0"),
            ("rng", "virtio-rng-pci", "pci.0/04.0"),
            ("cold", "virtio-rng-pci", "pci.0/05.0"),
        ]);
        let texts: Vec<String> = other
            .differences(&source)
            .iter()
            .map(Difference::to_string)
            .collect();
        assert_eq!(
            texts,
            [
                "device board device[19]: ide-hd at ide.0 at the source, missing at the \
                 destination",
                "device board device[30]: e1000 at pci.0/03.0 at the source, missing at the \
                 destination",
                "device cold: virtio-rng-pci at pci.0/05.0 at the destination, missing at the \
                 source",
                "device hot: virtio-rng-pci at pci.0/05.0 at the source, missing at the \
                 destination",
                "device unnamed device[2]: e1000 at pci.0/04.0 at the destination, missing at the \
                 source",
            ]
        );
    }

    #[test]
    fn cpu_features_that_differ_are_named() {
        let found = texts(|machine| {
            let properties = &mut machine.cpu_properties;
            properties.insert("avx".to_owned(), "off".to_owned());
            properties.insert("rdseed".to_owned(), "on".to_owned());
            properties.insert("model".to_owned(), "6".to_owned());
            properties.remove("vendor");
            for number in 0..20 {
                properties.insert(format!("new{number:02}"), "on".to_owned());
            }
        });
        assert_eq!(found.len(), 4);
        assert_eq!(
            found[0],
            "CPU property model: 107 at the source, 6 at the destination"
        );
        assert_eq!(
            found[1],
            "CPU property vendor: AuthenticAMD at the source, unknown at the destination"
        );
        assert_eq!(
            found[2],
            "CPU features that the guest sees at the source and the destination lacks: avx"
        );
        assert!(found[3].ends_with("new15 and 5 more"), "{}", found[3]);
    }
}
