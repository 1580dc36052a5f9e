//! What the destination has kept of a guest from before, or holds in its files: a block is named by its digest
//! alone, and comes whole where that was for nothing.

use super::{Source, SourceError};
use longhaul_protocol::{BlockRange, RegionId};

/// So many are tried before anything is known of a region.
const TRIED_MIN: u64 = 4096;
/// Beyond that it is worth it as long as one in so many is there: a digest is 16 bytes, and a block that
/// travels about a hundred times that.
const WORTH_ONE_IN: u64 = 32;
/// Blocks that were named for nothing and have not come whole yet, at most: their chunks are remembered here,
/// and they themselves at the destination.
const FOR_NOTHING_MAX: u64 = 1 << 15;

/// How well it goes to name blocks of a region by their digests.
#[derive(Debug, Default)]
pub(super) struct Kept {
    tried: u64,
    for_nothing: u64,
}

impl Kept {
    fn is_worth_it(&self) -> bool {
        let there = self.tried.saturating_sub(self.for_nothing);
        self.tried < TRIED_MIN || there.saturating_mul(WORTH_ONE_IN) > self.tried
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
        let tries = kept.is_worth_it();
        kept.tried += u64::from(tries);
        tries
    }

    /// Blocks of a region could not be used.
    pub(super) fn tried_for_nothing(&mut self, region: RegionId, blocks: u64) {
        self.whole_blocks += blocks;
        let region = self.regions.get_mut(usize::from(region.0));
        if let Some(kept) = region.and_then(|region| region.kept.as_mut()) {
            kept.for_nothing += blocks;
            self.sent.kept_blocks = self.sent.kept_blocks.saturating_sub(blocks);
        }
    }
}
