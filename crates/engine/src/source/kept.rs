//! Blocks of known content: the destination has cached blocks of the guest or holds them in its
//! files, so a block travels as its digest alone, and as a literal if the destination did not find
//! it.

use super::{Source, SourceError};
use longhaul_codec::BlockId;
use longhaul_protocol::{BlockRange, RegionId};

/// Blocks of a region that are sent as digests before the hit rate is known.
const TRIED_MIN: u64 = 4096;
/// After that, digests are sent as long as one in this many is found: a digest is 16 bytes, and a
/// block on the link about a hundred times that. Below that rate, one block in this many is probed
/// for a change.
const WORTH_ONE_IN: u64 = 32;
/// Limit on blocks whose digest was not found and that have not travelled as literals yet: their
/// chunks keep records here, and the destination keeps records of the blocks.
const FOR_NOTHING_MAX: u64 = 1 << 15;

/// The hit rate of digests in a region.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Blocks sent as digests that the destination has not answered yet.
    unanswered: u64,
    found: u64,
    for_nothing: u64,
}

impl Kept {
    /// Returns whether one more block is sent as a digest.
    fn tries(&mut self, index: usize) -> bool {
        let answered = self.answered_blocks();
        let is_worth_it = self.found.saturating_mul(WORTH_ONE_IN) > answered
            || (index as u64).is_multiple_of(WORTH_ONE_IN);
        let is_early = answered + self.unanswered < TRIED_MIN;
        let tries = is_early || self.is_mostly_found() || (is_worth_it && self.has_room());
        self.unanswered += u64::from(tries);
        tries
    }

    /// Returns whether the next blocks wait for answers. At a high hit rate, literals sent
    /// meanwhile would mostly be unnecessary; at a low one, the link should not be idle.
    pub(super) fn waits(&self) -> bool {
        self.is_mostly_found() && !self.has_room()
    }

    /// Returns whether another digest may be unanswered. There may be as many as were found:
    /// otherwise the answers of a region with no known content would come too late and leave no
    /// room for other regions.
    fn has_room(&self) -> bool {
        self.unanswered < self.found.max(TRIED_MIN)
    }

    /// Returns whether at least half of the digests were found, or none is answered yet.
    fn is_mostly_found(&self) -> bool {
        self.found >= self.for_nothing
    }

    fn answered_blocks(&self) -> u64 {
        self.found + self.for_nothing
    }

    /// Records whether the destination found a block.
    fn answered(&mut self, is_there: bool) {
        self.unanswered = self.unanswered.saturating_sub(1);
        match is_there {
            true => self.found += 1,
            false => self.for_nothing += 1,
        }
    }
}

impl Source {
    /// Returns how many of the blocks that were sent as digests the destination has found, and how
    /// many it has not.
    pub fn known_content(&self) -> (u64, u64) {
        let kept = self
            .regions
            .iter()
            .filter_map(|region| region.kept.as_ref());
        kept.fold((0, 0), |(found, missing), kept| {
            (found + kept.found, missing + kept.for_nothing)
        })
    }

    /// Records that the destination has content in which blocks of the region may be found.
    pub fn kept(&mut self, region: RegionId) -> Result<(), SourceError> {
        let region = self.region(region, BlockRange::new(0, 0))?;
        region.kept.get_or_insert_default();
        Ok(())
    }

    /// Returns whether a block is sent as a digest alone. Recently written and wanted blocks are
    /// not.
    pub(super) fn tries(&mut self, region: RegionId, index: usize) -> bool {
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

    /// Records the answers for blocks sent as digests, once the destination has answered for all
    /// frames that carried them.
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

    /// Records that the digests are no longer in flight, without an answer.
    pub(super) fn named_lost(&mut self, named: &[BlockId]) {
        for id in named {
            if let Some(kept) = self.kept_of(id.region) {
                kept.unanswered = kept.unanswered.saturating_sub(1);
            }
        }
    }

    fn kept_of(&mut self, region: RegionId) -> Option<&mut Kept> {
        self.regions.get_mut(region)?.kept.as_mut()
    }
}
