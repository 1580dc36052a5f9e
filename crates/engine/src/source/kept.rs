//! Blocks of known content: the destination has cached blocks of the guest or holds them in its
//! files, so a block travels as its digest alone, and as a literal if the destination did not find
//! it. Before that, the blocks of a chunk travel as a run, with one digest for all of them.

use super::{Source, SourceError};
use crate::chunk;
use longhaul_codec::{BlockId, RUN_BLOCKS};
use longhaul_protocol::{BlockRange, RegionId};
use std::collections::BTreeSet;

/// Blocks of a region that are sent as digests before the hit rate is known.
const TRIED_MIN: u64 = 4096;
/// After that, digests are sent as long as one in this many is found: a digest is 16 bytes, and a
/// block on the link about a hundred times that. Below that rate, one block in this many is probed
/// for a change.
const WORTH_ONE_IN: u64 = 32;
/// Limit on blocks whose digest was not found and that have not travelled as literals yet: their
/// chunks keep records here, and the destination keeps records of the blocks.
const FOR_NOTHING_MAX: u64 = 1 << 15;

/// Blocks of a region that are sent in runs before it is known how many of them are found.
const RUNS_TRIED_MIN: u64 = 64 * RUN_BLOCKS;
/// After that, runs are sent as long as one in this many is found: a run that is not found costs a
/// quarter of a block's digest for each block, and a round trip.
const RUN_WORTH_ONE_IN: u64 = 8;
/// Limit on chunks whose runs were not found.
const SPLIT_MAX: usize = 1 << 16;
const _: () = assert!(
    RUN_BLOCKS == chunk::CHUNK_BLOCKS,
    "runs are those of chunks"
);

/// A block that was sent as a digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Named {
    pub(super) id: BlockId,
    /// Whether the digest is that of a run.
    pub(super) in_run: bool,
}

/// The hit rate of digests in a region.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Blocks sent as digests that the destination has not answered yet.
    unanswered: u64,
    found: u64,
    for_nothing: u64,
    /// Blocks that were found, and were not, in runs.
    in_runs: [u64; 2],
    /// Chunks whose runs were not found: their blocks are sent as digests of their own.
    split: BTreeSet<usize>,
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

    /// Returns whether a block that is sent as a digest is part of a run.
    fn tries_run(&self, index: usize) -> bool {
        let [found, failed] = self.in_runs;
        let is_worth_it = found.saturating_mul(RUN_WORTH_ONE_IN) > failed;
        let is_early = found + failed < RUNS_TRIED_MIN;
        let has_room = self.split.len() < SPLIT_MAX;
        (is_early || is_worth_it) && has_room && !self.split.contains(&chunk::of(index as u64))
    }

    /// Records whether the destination found a block.
    fn answered(&mut self, named: Named, is_there: bool) {
        self.unanswered = self.unanswered.saturating_sub(1);
        match (named.in_run, is_there) {
            (_, true) => self.found += 1,
            (false, false) => self.for_nothing += 1,
            // It is sent as a digest of its own.
            (true, false) => {
                self.split.insert(chunk::of(named.id.block));
            }
        }
        if named.in_run {
            self.in_runs[usize::from(!is_there)] += 1;
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

    /// Lets blocks be compared in runs, which the destination must understand.
    pub fn use_runs(&mut self) {
        self.runs = true;
    }

    /// Returns whether a block that is sent as a digest is part of a run.
    pub(super) fn tries_run(&self, region: RegionId, index: usize) -> bool {
        let kept = self.regions[region].kept.as_ref();
        self.runs && kept.is_some_and(|kept| kept.tries_run(index))
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
    /// frames that carried them. Returns those that were rejected in runs, in ascending order.
    pub(super) fn named_answered(
        &mut self,
        mut named: Vec<Named>,
        rejected: &[(RegionId, BlockRange)],
    ) -> Vec<BlockId> {
        named.sort_unstable();
        let mut missing = vec![false; named.len()];
        for (region, range) in rejected {
            let at = |block| {
                let id = BlockId {
                    region: *region,
                    block,
                };
                named.partition_point(|other| other.id < id)
            };
            missing[at(range.start)..at(range.start + range.count)].fill(true);
        }
        let mut again = Vec::new();
        for (named, missing) in named.into_iter().zip(missing) {
            if let Some(kept) = self.kept_of(named.id.region) {
                kept.answered(named, !missing);
            }
            self.sent.kept_blocks -= u64::from(missing);
            again.extend((missing && named.in_run).then_some(named.id));
        }
        again
    }

    /// Records that the digests are no longer in flight, without an answer.
    pub(super) fn named_lost(&mut self, named: &[Named]) {
        for Named { id, .. } in named {
            if let Some(kept) = self.kept_of(id.region) {
                kept.unanswered = kept.unanswered.saturating_sub(1);
            }
        }
    }

    fn kept_of(&mut self, region: RegionId) -> Option<&mut Kept> {
        self.regions.get_mut(region)?.kept.as_mut()
    }
}
