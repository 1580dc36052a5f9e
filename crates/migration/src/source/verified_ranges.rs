//! The parts of a guest's disks that were found equal at both ends while the guest runs.
//!
//! ```text
//! unknown --asked for, when nothing of it is pending or in flight--> asked --equal--> equal
//!    ^                                                                 |               |
//!    +------------- some of it is taken to be sent --------------------+---------------+
//! ```
//!
//! Every write at the source is reported, and its blocks are sent before the destination may become
//! ready. At the destination, only received blocks change the disk. So the equal parts need not be
//! read again while the guest is stopped.

use longhaul_codec::BlockId;
use longhaul_protocol::{BlockRange, RegionId, RegionSpec};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of blocks of a piece, which is compared as a whole: 1 MiB.
pub(crate) const PIECE_BLOCKS: u64 = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Unknown,
    Asked,
    Equal,
}

/// The state of the pieces of all disks.
#[derive(Debug, Default)]
pub(crate) struct Checked(Mutex<BTreeMap<RegionId, Disk>>);

#[derive(Debug)]
struct Disk {
    blocks: u64,
    pieces: Vec<Piece>,
}

fn piece_of(block: u64) -> usize {
    (block / PIECE_BLOCKS) as usize
}

impl Checked {
    /// Creates it for these disks, with all pieces unknown.
    pub(crate) fn of<'a>(disks: impl Iterator<Item = &'a RegionSpec>) -> Self {
        Self::new(disks.map(|spec| (spec.id, spec.blocks)))
    }

    fn new(disks: impl Iterator<Item = (RegionId, u64)>) -> Self {
        let disk = |(region, blocks): (RegionId, u64)| {
            let pieces = vec![Piece::Unknown; blocks.div_ceil(PIECE_BLOCKS) as usize];
            (region, Disk { blocks, pieces })
        };
        Self(Mutex::new(disks.map(disk).collect()))
    }

    /// Returns the ids of the disks.
    pub(crate) fn regions(&self) -> Vec<RegionId> {
        self.lock().keys().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<RegionId, Disk>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks the pieces of blocks that were taken to be sent as unknown. The engine must be locked.
    pub(crate) fn sent(&self, blocks: &[BlockId]) {
        let mut disks = self.lock();
        for id in blocks {
            let disk = disks.get_mut(&id.region);
            if let Some(piece) = disk.and_then(|disk| disk.pieces.get_mut(piece_of(id.block))) {
                *piece = Piece::Unknown;
            }
        }
    }

    /// Returns the next settled pieces from this block on, up to this number of blocks, and marks
    /// them as asked. Also returns the block at which the next search begins. The engine must be
    /// locked.
    pub(crate) fn ask(
        &self,
        region: RegionId,
        from: u64,
        most: u64,
        is_settled: impl Fn(BlockRange) -> bool,
    ) -> (Option<BlockRange>, Option<u64>) {
        let mut disks = self.lock();
        let Some(disk) = disks.get_mut(&region) else {
            return (None, None);
        };
        let blocks = disk.blocks;
        let (mut start, mut end) = (from, from);
        while end < blocks && end - start < most {
            let piece = BlockRange::new(end, (blocks - end).min(PIECE_BLOCKS));
            if is_settled(piece) {
                disk.pieces[piece_of(end)] = Piece::Asked;
                end = piece.end();
            } else if start < end {
                break;
            } else {
                (start, end) = (piece.end(), piece.end());
            }
        }
        let asked = (start < end).then(|| BlockRange::new(start, end - start));
        (asked, (end < blocks).then_some(end))
    }

    /// Handles an answer: these pieces of the range differ, by their indexes.
    pub(crate) fn answered(&self, region: RegionId, range: BlockRange, different: &[u64]) {
        let mut disks = self.lock();
        let Some(disk) = disks.get_mut(&region) else {
            return;
        };
        let pieces = &mut disk.pieces[piece_of(range.start)..];
        let asked = range.count.div_ceil(PIECE_BLOCKS);
        for (piece, index) in pieces.iter_mut().zip(0..asked) {
            *piece = match *piece {
                // The guest may have written it meanwhile, so it is compared again later.
                Piece::Asked if different.contains(&index) => Piece::Unknown,
                Piece::Asked => Piece::Equal,
                other => other,
            };
        }
    }

    /// Returns the parts that are not known to be equal, in ranges of at most this number of
    /// blocks.
    pub(crate) fn unequal(&self, region: RegionId, most: u64) -> Vec<BlockRange> {
        let disks = self.lock();
        let Some(disk) = disks.get(&region) else {
            return Vec::new();
        };
        let mut ranges: Vec<BlockRange> = Vec::new();
        for (index, piece) in (0..).zip(&disk.pieces) {
            if *piece == Piece::Equal {
                continue;
            }
            let start = index * PIECE_BLOCKS;
            let count = (disk.blocks - start).min(PIECE_BLOCKS);
            match ranges.last_mut() {
                Some(last) if last.end() == start && last.count + count <= most => {
                    last.count += count;
                }
                _ => ranges.push(BlockRange::new(start, count)),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: RegionId = RegionId(3);

    fn sent(checked: &Checked, block: u64) {
        let region = DISK;
        checked.sent(&[BlockId { region, block }]);
    }

    #[test]
    fn what_was_sent_since_is_compared_again() {
        let checked = Checked::new([(DISK, 1000)].into_iter());
        let all = BlockRange::new(0, 1000);
        assert_eq!(checked.unequal(DISK, u64::MAX), [all]);
        assert_eq!(checked.ask(DISK, 0, 1024, |_| true), (Some(all), None));
        sent(&checked, 300);
        checked.answered(DISK, all, &[3]);
        let left = [BlockRange::new(256, 256), BlockRange::new(768, 232)];
        assert_eq!(checked.unequal(DISK, u64::MAX), left);
        sent(&checked, 5);
        let left = [BlockRange::new(0, 512), BlockRange::new(768, 232)];
        assert_eq!(checked.unequal(DISK, 512), left);
        assert_eq!(checked.unequal(DISK, 256).len(), 3);
    }

    #[test]
    fn only_what_has_settled_is_asked_for() {
        let checked = Checked::new([(DISK, 256 * 8)].into_iter());
        let settled = |range: BlockRange| ![0, 256 * 3].contains(&range.start);
        let (asked, next) = checked.ask(DISK, 0, 256 * 4, settled);
        assert_eq!(asked, Some(BlockRange::new(256, 512)));
        assert_eq!(next, Some(256 * 3));
        let (asked, next) = checked.ask(DISK, 256 * 3, 256 * 2, settled);
        assert_eq!(asked, Some(BlockRange::new(256 * 4, 512)));
        assert_eq!(next, Some(256 * 6));
        let (asked, next) = checked.ask(DISK, 0, 256, |_| false);
        assert_eq!((asked, next), (None, None));
        checked.answered(DISK, BlockRange::new(256, 512), &[]);
        assert_eq!(checked.unequal(DISK, u64::MAX).len(), 2);
        // For regions that are not disks, nothing is known, and that is no error.
        assert!(checked.unequal(RegionId(0), 9).is_empty());
    }
}
