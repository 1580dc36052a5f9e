//! What the destination has kept of a guest from before, or holds in its files: a block is named by its digest
//! alone, and comes whole where that was for nothing.

use super::{Source, SourceError};
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
    /// Whether one more is named. As many may be unanswered as were found: the answers of a region in which
    /// nothing is there would come too late otherwise, and leave no room for the others.
    fn tries(&mut self, index: usize) -> bool {
        let answered = self.found + self.for_nothing;
        let is_worth_it = self.found.saturating_mul(WORTH_ONE_IN) > answered
            || (index as u64).is_multiple_of(WORTH_ONE_IN);
        let is_early = answered + self.unanswered < TRIED_MIN;
        let has_room = self.unanswered < self.found.max(TRIED_MIN);
        let tries = is_early || (is_worth_it && has_room);
        self.unanswered += u64::from(tries);
        tries
    }

    /// So many have arrived, as far as is known.
    fn answered(&mut self, blocks: u64) {
        self.unanswered = self.unanswered.saturating_sub(blocks);
        self.found += blocks;
    }

    /// So many of those that had arrived are not there.
    fn were_for_nothing(&mut self, blocks: u64) {
        self.found = self.found.saturating_sub(blocks);
        self.for_nothing += blocks;
    }

    /// So many were never answered.
    fn lost(&mut self, blocks: u64) {
        self.unanswered = self.unanswered.saturating_sub(blocks);
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

    /// Frames with blocks of those regions that were named by their digests are not on their way any more: each is there,
    /// unless it is rejected.
    pub(super) fn named_arrived(&mut self, named: &[RegionId]) {
        self.count_named(named, Kept::answered);
    }

    /// They are not on their way, and will be tried again.
    pub(super) fn named_lost(&mut self, named: &[RegionId]) {
        self.count_named(named, Kept::lost);
    }

    fn count_named(&mut self, named: &[RegionId], count: impl Fn(&mut Kept, u64)) {
        for of_one in named.chunk_by(|one, next| one == next) {
            let region = self.regions.get_mut(usize::from(of_one[0].0));
            if let Some(kept) = region.and_then(|region| region.kept.as_mut()) {
                count(kept, of_one.len() as u64);
            }
        }
    }

    /// Blocks of a region could not be used.
    pub(super) fn tried_for_nothing(&mut self, region: RegionId, blocks: u64) {
        self.whole_blocks += blocks;
        let region = self.regions.get_mut(usize::from(region.0));
        if let Some(kept) = region.and_then(|region| region.kept.as_mut()) {
            kept.were_for_nothing(blocks);
            self.sent.kept_blocks = self.sent.kept_blocks.saturating_sub(blocks);
        }
    }
}
