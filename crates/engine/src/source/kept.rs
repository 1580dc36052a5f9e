//! What the destination has kept of a guest from before, or holds in its files: a block is named by its digest
//! alone, and comes whole where that was for nothing.

use super::{Source, SourceError};
use longhaul_codec::BlockId;
use longhaul_protocol::{BlockRange, RegionId};

/// So many are tried before anything is known of a region.
const TRIED_MIN: u64 = 4096;
/// Beyond that it is worth it as long as one in so many is there: a digest is 16 bytes, and a block that
/// travels about a hundred times that. Where it is not, one in so many shows whether that changes.
const WORTH_ONE_IN: u64 = 32;
/// Blocks that were named for nothing and have not come whole yet, at most: their chunks are remembered here,
/// and they themselves at the destination.
const FOR_NOTHING_MAX: u64 = 1 << 15;

/// How well it goes to name blocks of a region by their digests.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Named, and nothing is known of them yet.
    unanswered: u64,
    found: u64,
    for_nothing: u64,
}

impl Kept {
    /// Whether one more is named.
    fn tries(&mut self, index: usize) -> bool {
        let answered = self.answered_blocks();
        let is_worth_it = self.found.saturating_mul(WORTH_ONE_IN) > answered
            || (index as u64).is_multiple_of(WORTH_ONE_IN);
        let is_early = answered + self.unanswered < TRIED_MIN;
        let tries = is_early || self.is_mostly_found() || (is_worth_it && self.has_room());
        self.unanswered += u64::from(tries);
        tries
    }

    /// Whether what comes next waits for answers. Where most is found, what travels meanwhile would do so for nothing; where
    /// it is not, the link has better things to do than to be idle.
    pub(super) fn waits(&self) -> bool {
        self.is_mostly_found() && !self.has_room()
    }

    /// As many may be unanswered as were found: the answers of a region in which nothing is there would come too late
    /// otherwise, and leave no room for the others.
    fn has_room(&self) -> bool {
        self.unanswered < self.found.max(TRIED_MIN)
    }

    /// Half at least; also where nothing is known yet.
    fn is_mostly_found(&self) -> bool {
        self.found >= self.for_nothing
    }

    fn answered_blocks(&self) -> u64 {
        self.found + self.for_nothing
    }

    /// One was there, or not.
    fn answered(&mut self, is_there: bool) {
        self.unanswered = self.unanswered.saturating_sub(1);
        match is_there {
            true => self.found += 1,
            false => self.for_nothing += 1,
        }
    }
}

impl Source {
    /// The destination has kept something that blocks of a region may be found in.
    pub fn kept(&mut self, region: RegionId) -> Result<(), SourceError> {
        let region = self.region(region, BlockRange::new(0, 0))?;
        region.kept.get_or_insert_default();
        Ok(())
    }

    /// Whether a block is named by its digest alone. Not what the guest has written lately, nor what
    /// somebody waits for.
    pub(super) fn tries(&mut self, region: usize, index: usize) -> bool {
        if self.frozen || self.draining || self.whole_blocks >= FOR_NOTHING_MAX {
            return false;
        }
        let region = &mut self.regions[region];
        let is_old = region.stays(index) && region.map.has_room();
        let Some(kept) = region.kept.as_mut().filter(|_| is_old) else {
            return false;
        };
        kept.tries(index)
    }

    /// What is known now of blocks that were named by their digests: of each frame of theirs the destination has said all.
    pub(super) fn named_answered(
        &mut self,
        mut named: Vec<BlockId>,
        rejected: &[(RegionId, BlockRange)],
    ) {
        if named.is_empty() {
            return;
        }
        named.sort_unstable();
        let mut missing = vec![false; named.len()];
        for (region, range) in rejected {
            let at = |block| {
                let id = BlockId {
                    region: *region,
                    block,
                };
                named.partition_point(|other| *other < id)
            };
            missing[at(range.start)..at(range.start + range.count)].fill(true);
        }
        for (id, missing) in named.iter().zip(missing) {
            if let Some(kept) = self.kept_of(id.region) {
                kept.answered(!missing);
            }
            self.sent.kept_blocks -= u64::from(missing);
        }
    }

    /// These are not on their way any more, and nothing is known of them.
    pub(super) fn named_lost(&mut self, named: &[BlockId]) {
        for id in named {
            if let Some(kept) = self.kept_of(id.region) {
                kept.unanswered = kept.unanswered.saturating_sub(1);
            }
        }
    }

    fn kept_of(&mut self, region: RegionId) -> Option<&mut Kept> {
        self.regions.get_mut(usize::from(region.0))?.kept.as_mut()
    }
}
