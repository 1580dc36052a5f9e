//! Files of a guest that do not move with it: which they are, and what a source says of each so
//! that the destination can tell whether it has the same one.

use crate::guest::GuestDescription;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// Bytes of a file that may be locked for a proof.
pub const LOCK_BYTES: u64 = 128;
/// How many of them are.
pub const LOCKED_BYTES: u32 = 64;
/// Where the first of them may lie at the earliest: behind the data of every file.
pub const LOCKS_FROM: u64 = 1 << 62;
/// ... and before this, which is the end of what a lock can name.
pub const LOCKS_TO: u64 = (1 << 63) - 1;

/// What a file is to its guest.
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
    /// What an image of that name stands on (its backing file), or what that stands on, and so
    /// forth: which of them, from 1 on.
    Backing(u8),
}

/// A file of a guest's that does not move with it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Staying {
    /// What it is.
    pub kind: FileKind,
    /// The name by which each host's configuration has it.
    pub name: String,
    /// Whether nobody writes to it, so that equal content is as good as the same file.
    pub read_only: bool,
    /// Whether QEMU has it open for as long as the guest runs; the others it reads and closes.
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

/// The files of a guest that do not move with it, as its description names them. A kernel has an
/// initrd where a host's configuration says so, and an image a backing file where it does itself.
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

/// What a source says of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileClaim {
    /// What it is.
    pub kind: FileKind,
    /// Its name.
    pub name: String,
    /// Where it is at the source. It is compared with what the destination's configuration says,
    /// and nothing else.
    pub path: String,
    /// The locks that the source holds on it while it waits for the answer; none where it could
    /// take none.
    pub locks: Option<LockPattern>,
    /// What it holds, where the destination has asked for that.
    pub content: Option<FileContent>,
}

/// Which of a row of bytes of a file are locked. A host that sees the same pattern on a file has the
/// same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockPattern {
    /// The first byte of the row.
    pub first: u64,
    /// A bit for each byte, the first in the lowest bit of the first: whether it is locked.
    pub mask: [u8; (LOCK_BYTES / 8) as usize],
}

impl LockPattern {
    /// Whether a byte of the row is locked.
    pub fn is_locked(&self, byte: u64) -> bool {
        let bits = self.mask.get((byte / 8) as usize);
        bits.is_some_and(|bits| bits >> (byte % 8) & 1 == 1)
    }

    /// The bytes of the file that are locked, as runs of them.
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

    /// Whether it can be one: behind all data, and half of its bytes locked.
    pub fn is_sound(&self) -> bool {
        let locked: u32 = self.mask.iter().map(|bits| bits.count_ones()).sum();
        (LOCKS_FROM..=LOCKS_TO - LOCK_BYTES).contains(&self.first) && locked == LOCKED_BYTES
    }
}

/// What a file holds.
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
