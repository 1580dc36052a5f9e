//! Tracks what a running guest must read back from a disk: the last operation on each sector.

use crate::plan::{Kind, Operation, SECTOR_BYTES};
use crate::sector::{Content, Sector, identify};

/// What may be read from a discarded sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discards {
    /// Zeros: raw images in files with holes, under `discard=unmap`.
    Zeros,
    /// Zeros, or the old content: the minimum that a disk promises.
    ZerosOrKept,
}

/// A flag of an entry: discarded after the operation.
const DISCARDED: u32 = 1 << 31;

/// A disk: an entry for each sector, which is 0 (zeros) or an operation's number and one.
#[derive(Debug)]
pub struct Table {
    seed: u64,
    disk: u32,
    discards: Discards,
    entries: Vec<u32>,
}

/// A sector with wrong content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// The sector.
    pub sector: u64,
    /// The content found.
    pub found: Content,
    /// The operation whose content should be there; `None`: zeros.
    pub expected: Option<u64>,
}

impl Table {
    /// Returns a disk of zeros.
    pub fn new(seed: u64, disk: u32, sectors: u64, discards: Discards) -> Self {
        Self {
            seed,
            disk,
            discards,
            entries: vec![0; sectors as usize],
        }
    }

    /// Records an acknowledged operation.
    pub fn apply(&mut self, operation: &Operation) {
        let range = operation.first as usize..(operation.first + operation.sectors) as usize;
        let entries = &mut self.entries[range];
        match (operation.kind, self.discards) {
            (Kind::Write, _) => entries.fill(operation.number as u32 + 1),
            (Kind::Zero, _) | (Kind::Discard, Discards::Zeros) => entries.fill(0),
            (Kind::Discard, Discards::ZerosOrKept) => {
                entries.iter_mut().for_each(|entry| *entry |= DISCARDED);
            }
            (Kind::Read | Kind::Flush { .. }, _) => {}
        }
    }

    /// Returns the entries of some sectors, for a later comparison.
    pub fn entries(&self, first: u64, sectors: u64) -> Vec<u32> {
        self.entries[first as usize..(first + sectors) as usize].to_vec()
    }

    /// Returns the number of sectors.
    pub fn sectors(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Returns the first sector from `first` on that differs from its entry.
    pub fn compare(&self, first: u64, entries: &[u32], bytes: &[u8]) -> Option<Wrong> {
        compare((self.seed, self.disk), first, entries, bytes)
    }
}

/// As [`Table::compare`], for a seed and a disk.
pub fn compare(
    (seed, disk): (u64, u32),
    first: u64,
    entries: &[u32],
    bytes: &[u8],
) -> Option<Wrong> {
    let sectors = bytes.as_chunks::<SECTOR_BYTES>().0.iter();
    let numbered = (first..).zip(sectors.zip(entries));
    numbered
        .map(|(sector, (bytes, entry))| compare_one(seed, disk, sector, bytes, *entry))
        .find_map(Result::err)
}

fn compare_one(seed: u64, disk: u32, sector: u64, bytes: &Sector, entry: u32) -> Result<(), Wrong> {
    let expected = (entry & !DISCARDED).checked_sub(1).map(u64::from);
    let found = identify(bytes, seed, disk, sector);
    let fits = match found {
        Content::Zeros => expected.is_none() || entry & DISCARDED != 0,
        Content::Written(number) => expected == Some(number),
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(Wrong {
        sector,
        found,
        expected,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sector::fill;

    fn operation(number: u64, kind: Kind) -> Operation {
        Operation {
            number,
            kind,
            disk: 1,
            first: 2,
            sectors: 2,
        }
    }

    #[test]
    fn what_was_written_last_is_read_back() {
        for discards in [Discards::Zeros, Discards::ZerosOrKept] {
            let mut table = Table::new(7, 1, 8, discards);
            let mut bytes = vec![0; 8 * SECTOR_BYTES];
            let wrong = |table: &Table, bytes: &[u8]| {
                table
                    .compare(0, &table.entries(0, 8), bytes)
                    .map(|wrong| (wrong.sector, wrong.expected))
            };
            assert_eq!(wrong(&table, &bytes), None);
            table.apply(&operation(5, Kind::Write));
            assert_eq!(wrong(&table, &bytes), Some((2, Some(5))));
            let (sectors, _) = bytes.as_chunks_mut::<SECTOR_BYTES>();
            fill(&mut sectors[2], 7, 1, 2, 5);
            fill(&mut sectors[3], 7, 1, 3, 4);
            assert_eq!(wrong(&table, &bytes), Some((3, Some(5))));
            let (sectors, _) = bytes.as_chunks_mut::<SECTOR_BYTES>();
            fill(&mut sectors[3], 7, 1, 3, 5);
            assert_eq!(wrong(&table, &bytes), None);
            table.apply(&operation(6, Kind::Discard));
            let kept = wrong(&table, &bytes);
            assert_eq!(kept.is_none(), discards == Discards::ZerosOrKept);
            assert_eq!(wrong(&table, &vec![0; 8 * SECTOR_BYTES]), None);
            table.apply(&operation(7, Kind::Zero));
            assert_eq!(wrong(&table, &bytes), Some((2, None)));
        }
    }
}
