//! One outgoing region: its blocks, and how its strategy treats the guest's writes.

use super::kept::Kept;
use super::mirror::Mirror;
use crate::block_map::{BlockMap, Class};
use crate::chunk;
use crate::strategy::{Before, Promise, Strategy};
use longhaul_protocol::{BlockRange, RegionSpec};
use std::collections::BTreeMap;

/// How the guest's writes are reported.
#[derive(Debug)]
enum Reports {
    /// By successive passes over the region.
    Passes,
    /// One by one, at the time of the write.
    Writes {
        /// Writes held for the next pass, so that the data sent in one pass is finite.
        kept: BTreeMap<usize, u64>,
        kept_blocks: u64,
    },
}

#[derive(Debug)]
pub(super) struct Region {
    pub(super) spec: RegionSpec,
    /// The number of its first block over all regions.
    pub(super) first: u32,
    pub(super) map: BlockMap,
    pub(super) strategy: Strategy,
    pub(super) mirror: Option<Mirror>,
    /// The hit rate of digests, where the destination has content in which blocks may be found.
    pub(super) kept: Option<Kept>,
    /// Blocks taken so far.
    pub(super) taken_blocks: u64,
    /// Blocks that must arrive before the switchover although the region may be listed, in
    /// ascending order.
    pub(super) promised: Vec<BlockRange>,
    /// Whether only wanted blocks are read.
    pub(super) held_back: bool,
    /// Whether a further pass sends it, which leaves out no blocks.
    pub(super) in_further_pass: bool,
    /// Blocks reported as written one by one, counting repetitions.
    pub(super) written_blocks: u64,
    reports: Reports,
}

impl Region {
    /// Creates a region whose writes are reported by passes.
    pub(super) fn by_passes(spec: RegionSpec, first: u32, strategy: Strategy) -> Self {
        let map = match strategy.promise {
            Promise::Everything | Promise::List => {
                BlockMap::new(spec.blocks as usize, spec.starts_zero)
            }
            Promise::Nothing => Self::nothing(&spec),
        };
        Self::with(spec, first, strategy, map, Reports::Passes)
    }

    /// Creates a region whose writes are reported one by one.
    pub(super) fn by_writes(spec: RegionSpec, first: u32, strategy: Strategy) -> Self {
        let threshold = match strategy.before {
            Before::BelowThreshold(times) => Some(times),
            Before::UntilStopRule | Before::InStep | Before::Nothing => None,
        };
        let map = match strategy.promise {
            Promise::Everything | Promise::List => {
                BlockMap::by_chunk(spec.blocks as usize, spec.starts_zero, threshold)
            }
            Promise::Nothing => Self::nothing(&spec),
        };
        let reports = Reports::Writes {
            kept: BTreeMap::new(),
            kept_blocks: 0,
        };
        Self::with(spec, first, strategy, map, reports)
    }

    fn with(
        spec: RegionSpec,
        first: u32,
        strategy: Strategy,
        map: BlockMap,
        reports: Reports,
    ) -> Self {
        Self {
            spec,
            first,
            map,
            mirror: (strategy.before == Before::InStep).then(Mirror::default),
            kept: None,
            strategy,
            taken_blocks: 0,
            promised: Vec::new(),
            held_back: false,
            in_further_pass: false,
            written_blocks: 0,
            reports,
        }
    }

    fn nothing(spec: &RegionSpec) -> BlockMap {
        let mut map = BlockMap::by_chunk(spec.blocks as usize, spec.starts_zero, None);
        map.superseded(BlockRange::new(0, spec.blocks), false);
        map
    }

    /// Returns whether all of it must arrive before the switchover.
    pub(super) fn is_promised(&self) -> bool {
        self.strategy.promise == Promise::Everything
    }

    /// Returns whether its missing blocks may be listed.
    pub(super) fn is_listed(&self) -> bool {
        self.strategy.promise == Promise::List
    }

    /// Returns whether QEMU may write to it after the guest has been stopped.
    pub(super) fn is_written_late(&self) -> bool {
        matches!(self.reports, Reports::Writes { .. })
    }

    /// Returns whether it is a mirror that is not yet in step.
    pub(super) fn is_behind(&self) -> bool {
        self.mirror
            .as_ref()
            .is_some_and(|mirror| !mirror.is_in_step())
    }

    /// Returns whether blocks of a class may be sent among those that must arrive before the
    /// switchover: while mirrors are behind, only mirrors are sent. Of a region that may be listed
    /// only promised blocks count, which are wanted.
    pub(super) fn goes_before_the_switchover(&self, class: Class, behind: bool) -> bool {
        match self.is_listed() {
            true => class == Class::Wanted && !self.promised.is_empty(),
            false => self.is_promised() && (!behind || self.mirror.is_some()),
        }
    }

    /// Returns whether only wanted blocks of it travel now.
    pub(super) fn waits(&self) -> bool {
        self.held_back || self.kept.as_ref().is_some_and(Kept::waits)
    }

    /// Makes promised blocks that are not there travel next.
    pub(super) fn want_promised(&mut self) {
        for range in &self.promised {
            range
                .blocks()
                .for_each(|block| self.map.want(block as usize));
        }
    }

    /// Returns whether it has blocks that may travel beside those that must be there.
    pub(super) fn pushes(&self) -> bool {
        let before = match self.strategy.before {
            Before::BelowThreshold(_) => true,
            Before::Nothing => self.fills(),
            Before::UntilStopRule | Before::InStep => false,
        };
        let pending = |class: Class| self.map.pending(class) > 0;
        let some = pending(Class::Cold) || pending(Class::Rest);
        self.is_listed() && before && (some || self.in_further_pass && pending(Class::Hot))
    }

    /// Returns whether blocks of it that the guest has written are sent again before the
    /// switchover, although they may be listed.
    pub(super) fn sends_again(&self) -> bool {
        self.is_listed() && matches!(self.strategy.before, Before::BelowThreshold(_))
    }

    /// Returns whether its blocks only fill the link until the guest is stopped, which nothing
    /// waits for: memory of which nothing has to travel before. The link is warm then.
    pub(super) fn fills(&self) -> bool {
        let nothing = self.strategy.before == Before::Nothing;
        nothing && self.is_listed() && !self.is_written_late()
    }

    /// Returns whether the guest has written nothing near a block since the migration began, so
    /// that the destination has its first content.
    pub(super) fn stays(&self, index: usize) -> bool {
        self.map.written_blocks(chunk::of(index as u64)) == 0
    }

    /// Returns whether a reference may point to a block that arrived once, although its content
    /// there is no longer recorded. A mismatch is repeated as a literal, for which there is no time
    /// once the guest is stopped. Nor should a write that the guest waits for depend on a
    /// reference.
    pub(super) fn can_be_meant_unseen(&self, index: usize, frozen: bool) -> bool {
        let has_time = !frozen && self.mirror.is_none();
        (has_time || self.stays(index)) && self.map.can_be_meant(index, frozen)
    }

    /// Marks blocks as written: in a pass, or now. `still` means that no more passes follow.
    /// Returns how many count for the pass.
    pub(super) fn written(&mut self, range: BlockRange, pass: Option<u32>, still: bool) -> u64 {
        if self.strategy.promise == Promise::Nothing {
            return 0;
        }
        if self.is_written_late() {
            self.written_blocks += range.count;
        }
        let waits = self.strategy.before == Before::UntilStopRule && !still;
        match &mut self.reports {
            Reports::Passes => {
                self.map.written(range, pass);
                return range.count;
            }
            Reports::Writes { kept, kept_blocks } if waits => {
                for (chunk, mask) in chunk::pieces(range) {
                    let had = kept.entry(chunk).or_default();
                    *kept_blocks += u64::from((mask & !*had).count_ones());
                    *had |= mask;
                }
            }
            Reports::Writes { .. } => self.map.written(range, None),
        }
        0
    }

    /// Begins a pass, or the stop: writes held for it become pending. Returns their number.
    pub(super) fn pass_started(&mut self) -> u64 {
        let Reports::Writes { kept, kept_blocks } = &mut self.reports else {
            return 0;
        };
        let blocks = std::mem::take(kept_blocks);
        for (chunk, mask) in std::mem::take(kept) {
            for range in chunk::runs(chunk, mask) {
                self.map.written(range, None);
            }
        }
        blocks
    }

    /// Returns whether the destination is known to have these blocks in their current state.
    pub(super) fn is_settled(&self, range: BlockRange) -> bool {
        let kept = match &self.reports {
            Reports::Passes => None,
            Reports::Writes { kept, .. } => Some(kept),
        };
        let is_kept = |(chunk, mask): (usize, u64)| {
            kept.is_some_and(|kept| kept.get(&chunk).is_some_and(|had| had & mask != 0))
        };
        self.map.is_settled(range) && !chunk::pieces(range).any(is_kept)
    }

    /// Returns the number of blocks held for the next pass.
    pub(super) fn kept_blocks(&self) -> u64 {
        match &self.reports {
            Reports::Passes => 0,
            Reports::Writes { kept_blocks, .. } => *kept_blocks,
        }
    }
}
