//! Files of a guest that do not move with it: their list, and the source's claims about each, by
//! which the destination checks that it has the same one.

use crate::guest::GuestDescription;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Bytes of a file among which some are locked for a proof.
pub const LOCK_BYTES: u64 = 128;
/// The number of locked bytes.
pub const LOCKED_BYTES: u32 = 64;
/// The earliest place of these bytes: behind the data of every file.
pub const LOCKS_FROM: u64 = 1 << 62;
/// ... and the limit, which is the last place of a lock.
pub const LOCKS_TO: u64 = (1 << 63) - 1;

/// The purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FileKind {
    /// The image of a disk, or of the firmware's variables.
    Image,
    /// Firmware.
    Firmware,
    /// A kernel.
    Kernel,
    /// The initial RAM file system of a kernel.
    Initrd,
    /// A backing file of an image with that name: its level in the chain, from 1 on.
    Backing(u8),
}

/// A file of a guest that does not move with it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Staying {
    /// Its purpose.
    pub kind: FileKind,
    /// Its name in each host's configuration.
    pub name: String,
    /// Whether it is never written, so that equal content is as good as the same file.
    pub read_only: bool,
    /// Whether QEMU keeps it open while the guest runs; QEMU reads and closes the others.
    pub opened: bool,
}

impl fmt::Display for Staying {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        match self.kind {
            FileKind::Image => write!(f, "image {name}"),
            FileKind::Firmware => write!(f, "firmware {name}"),
            FileKind::Kernel => write!(f, "kernel {name}"),
            FileKind::Initrd => write!(f, "initrd {name}"),
            FileKind::Backing(1) => write!(f, "backing file of image {name}"),
            FileKind::Backing(number) => write!(f, "backing file {number} of image {name}"),
        }
    }
}

/// Returns the files of a guest that do not move with it, from its description. A host's
/// configuration determines whether a kernel has an initrd, and an image whether it has a backing
/// file.
pub fn staying(guest: &GuestDescription) -> Vec<Staying> {
    let of = |kind, name: &String, (read_only, opened)| Staying {
        kind,
        name: name.clone(),
        read_only,
        opened,
    };
    let disks = guest
        .disks
        .iter()
        .filter(|disk| disk.shared || disk.read_only);
    let disks = disks.map(|disk| of(FileKind::Image, &disk.image, (disk.read_only, true)));
    let flash = guest.hardware.as_ref().and_then(|it| it.flash.as_ref());
    let variables = flash.and_then(|flash| flash.variables.as_ref());
    let variables = variables.map(|name| of(FileKind::Image, name, (false, true)));
    let code = flash.map(|flash| of(FileKind::Firmware, &flash.code, (true, true)));
    let firmware = guest.firmware.iter();
    let firmware = firmware.map(|name| of(FileKind::Firmware, name, (true, false)));
    let kernel = guest.kernel.iter();
    let kernel = kernel.map(|kernel| of(FileKind::Kernel, &kernel.name, (true, false)));
    let mut seen = BTreeSet::new();
    let all = disks
        .chain(variables)
        .chain(code)
        .chain(firmware)
        .chain(kernel);
    all.filter(|file| seen.insert((file.kind, file.name.clone())))
        .collect()
}

/// A source's claim about a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileClaim {
    /// Its purpose.
    pub kind: FileKind,
    /// Its name.
    pub name: String,
    /// Its path at the source, which is only compared with the destination's configuration.
    pub path: String,
    /// The locks that the source holds on it until the answer arrives; `None` where it could take
    /// none.
    pub locks: Option<LockPattern>,
    /// Its content, if the destination has asked for it.
    pub content: Option<FileContent>,
}

/// The locked bytes in a row of bytes of a file. A host that sees the same pattern on a file has
/// the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockPattern {
    /// The first byte of the row.
    pub first: u64,
    /// One bit per byte, the first in the lowest bit of the first byte: whether it is locked.
    pub mask: [u8; (LOCK_BYTES / 8) as usize],
}

impl LockPattern {
    /// Returns whether a byte of the row is locked.
    pub fn is_locked(&self, byte: u64) -> bool {
        let bits = self.mask.get((byte / 8) as usize);
        bits.is_some_and(|bits| bits >> (byte % 8) & 1 == 1)
    }

    /// Returns the ranges of locked bytes in the file.
    pub fn runs(&self) -> Vec<std::ops::Range<u64>> {
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for byte in (0..LOCK_BYTES).filter(|byte| self.is_locked(*byte)) {
            let at = self.first + byte;
            match runs.last_mut() {
                Some(run) if run.end == at => run.end += 1,
                _ => runs.push(at..at + 1),
            }
        }
        runs
    }

    /// Returns whether the pattern is valid: behind all data, with half of its bytes locked.
    pub fn is_sound(&self) -> bool {
        let locked: u32 = self.mask.iter().map(|bits| bits.count_ones()).sum();
        (LOCKS_FROM..=LOCKS_TO - LOCK_BYTES).contains(&self.first) && locked == LOCKED_BYTES
    }
}

/// The content of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileContent {
    /// Its length.
    pub bytes: u64,
    /// The BLAKE3 hash of all of it.
    pub digest: [u8; 32],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{Disk, Kernel};
    use crate::hardware::{Flash, Hardware};

    fn disk(image: &str, shared: bool, read_only: bool) -> Disk {
        Disk {
            name: format!("vd-{image}"),
            image: image.to_owned(),
            shared,
            read_only,
        }
    }

    #[test]
    fn what_does_not_move_stays() {
        let mut guest = GuestDescription {
            name: "web".to_owned(),
            machine: String::new(),
            cpu: String::new(),
            vcpus: 1,
            memory_mib: 64,
            firmware: None,
            kernel: None,
            disks: vec![
                disk("own", false, false),
                disk("data", true, false),
                disk("cd", false, true),
                disk("seed", true, true),
            ],
            nics: Vec::new(),
            channels: Vec::new(),
            hardware: None,
        };
        let named = |guest: &GuestDescription| -> Vec<String> {
            let show = |file: Staying| match file.read_only {
                true => format!("{file} (read only)"),
                false => file.to_string(),
            };
            staying(guest).into_iter().map(show).collect()
        };
        let disks = [
            "image data",
            "image cd (read only)",
            "image seed (read only)",
        ];
        assert_eq!(named(&guest), disks);
        guest.kernel = Some(Kernel {
            name: "tiny".to_owned(),
            command_line: String::new(),
        });
        guest.firmware = Some("ovmf".to_owned());
        let flash = Flash {
            code: "ovmf".to_owned(),
            variables: Some("vars".to_owned()),
        };
        guest.hardware = Some(Hardware {
            flash: Some(flash),
            ..Hardware::default()
        });
        let more = [
            "image vars",
            "firmware ovmf (read only)",
            "kernel tiny (read only)",
        ];
        assert_eq!(named(&guest), [&disks[..], &more[..]].concat());
    }

    #[test]
    fn a_pattern_names_each_byte_once() {
        let mut mask = [0; 16];
        mask[0] = 0b1000_0111;
        mask[1] = 0b0000_0001;
        mask[15] = 0b1000_0000;
        let pattern = LockPattern {
            first: LOCKS_FROM,
            mask,
        };
        let at = |from, to| LOCKS_FROM + from..LOCKS_FROM + to;
        assert_eq!(pattern.runs(), [at(0, 3), at(7, 9), at(127, 128)]);
        assert!(!pattern.is_sound(), "too few");
        let half = LockPattern {
            first: LOCKS_FROM,
            mask: [0b0101_0101; 16],
        };
        assert!(half.is_sound());
        assert_eq!(half.runs().len(), 64);
        for first in [0, 100, LOCKS_FROM - 1, LOCKS_TO - LOCK_BYTES + 1, u64::MAX] {
            assert!(!LockPattern { first, ..half }.is_sound(), "{first}");
        }
        assert!(!half.is_locked(128));
    }
}
