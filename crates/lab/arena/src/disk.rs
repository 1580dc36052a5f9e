//! Writes numbered sectors to the guest's disk, past its page cache, and reads them back: what
//! another copy of the guest wrote in between, or what was lost, is found.

use crate::content::Random;
use crate::page::{Mismatch, PAGE_BYTES};
use crate::pages::Fault;
use crate::sys::O_DIRECT;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// The disk that the laboratory gives its guests.
pub(crate) const PATH: &str = "/dev/vda";
/// Sectors that are written in turn.
const SLOTS: u64 = 64;

#[repr(C, align(4096))]
struct Sector([u8; PAGE_BYTES]);

/// An open disk, and what it must hold.
pub(crate) struct Disk {
    file: File,
    sector: Box<Sector>,
    random: Random,
    next: u64,
    /// What was written to each slot last; 0 where nothing was.
    written: Vec<u64>,
}

impl Disk {
    /// Opens it.
    pub(crate) fn open(path: &str, seed: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(O_DIRECT);
        Ok(Self {
            file: options.open(path)?,
            sector: Box::new(Sector([0; PAGE_BYTES])),
            random: Random::new(seed ^ 0x6469_736b),
            next: 0,
            written: vec![0; SLOTS as usize],
        })
    }

    /// Writes the next sector, and reads one of those written before.
    pub(crate) fn step(&mut self) -> Result<(), Fault> {
        let slot = self.next % SLOTS;
        self.next += 1;
        let mark = self.random.next() | 1;
        self.fill(mark);
        let written = self.file.write_all_at(&self.sector.0, place(slot));
        written.map_err(|error| failed(slot, "is written", &error))?;
        self.written[slot as usize] = mark;
        let slot = self.random.below(self.next.min(SLOTS) as usize) as u64;
        self.check(slot)
    }

    fn check(&mut self, slot: u64) -> Result<(), Fault> {
        let read = self.file.read_exact_at(&mut self.sector.0, place(slot));
        read.map_err(|error| failed(slot, "is read", &error))?;
        let expected = self.written[slot as usize];
        let (head, tail) = (self.mark_at(0), self.mark_at(PAGE_BYTES - 8));
        if (head, tail) == (expected, expected) {
            return Ok(());
        }
        Err(fault(
            slot,
            format!("sector {slot} holds {expected:016x}"),
            format!("{head:016x} and {tail:016x}"),
        ))
    }

    fn fill(&mut self, mark: u64) {
        for word in self.sector.0.chunks_exact_mut(8) {
            word.copy_from_slice(&mark.to_le_bytes());
        }
    }

    fn mark_at(&self, place: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.sector.0[place..place + 8]);
        u64::from_le_bytes(bytes)
    }
}

fn place(slot: u64) -> u64 {
    slot * PAGE_BYTES as u64
}

fn failed(slot: u64, what: &str, error: &io::Error) -> Fault {
    fault(slot, format!("sector {slot} {what}"), error.to_string())
}

fn fault(slot: u64, expected: String, found: String) -> Fault {
    Fault {
        page: slot as usize,
        mismatch: Mismatch { expected, found },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_copy_wrote_is_found() {
        let path = std::env::temp_dir().join(format!("arena-disk-{}", std::process::id()));
        File::create(&path)
            .and_then(|file| file.set_len(SLOTS * PAGE_BYTES as u64))
            .unwrap();
        let name = path.to_str().unwrap();
        let (Ok(mut one), Ok(mut other)) = (Disk::open(name, 1), Disk::open(name, 2)) else {
            // A file system without direct access.
            return std::fs::remove_file(&path).unwrap();
        };
        for _ in 0..3 * SLOTS {
            assert_eq!(one.step(), Ok(()));
        }
        assert_eq!(other.step(), Ok(()));
        let first = one.check(0).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(first.page, 0);
        assert_eq!(one.check(1), Ok(()));
    }
}
