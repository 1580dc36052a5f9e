//! One region on its way out: its blocks, and what its strategy makes of the guest's writes.

use super::kept::Kept;
use super::mirror::Mirror;
use crate::block_map::{BlockMap, Class};
use crate::chunk;
use crate::strategy::{Before, Promise, Strategy};
use longhaul_protocol::{BlockRange, RegionSpec};
use std::collections::BTreeMap;

/// Who says what the guest has written.
#[derive(Debug)]
enum Reports {
    /// Passes over the region, one after the other.
    Passes,
    /// Whoever writes, at once.
    Writes {
        /// Kept for the next pass: what is sent in one is finite.
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
    /// How it goes to name blocks that the destination may have kept, where it has kept anything.
    pub(super) kept: Option<Kept>,
    /// Blocks taken so far.
    pub(super) taken_blocks: u64,
    /// Blocks that must be there before the switchover, whatever else is left: in ascending order.
    pub(super) promised: Vec<BlockRange>,
    /// Only what somebody waits for is read.
    pub(super) held_back: bool,
    /// Blocks that writes were reported of, one by one; as often as that was.
    pub(super) written_blocks: u64,
    reports: Reports,
}

impl Region {
    /// A region whose writes are reported by passes.
    pub(super) fn by_passes(spec: RegionSpec, first: u32, strategy: Strategy) -> Self {
        let map = match strategy.promise {
            Promise::Everything | Promise::List => {
                BlockMap::new(spec.blocks as usize, spec.starts_zero)
            }
            Promise::Nothing => Self::nothing(&spec),
        };
        Self::with(spec, first, strategy, map, Reports::Passes)
    }

    /// A region whose writes are reported one by one.
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
            written_blocks: 0,
            reports,
        }
    }

    fn nothing(spec: &RegionSpec) -> BlockMap {
        let mut map = BlockMap::by_chunk(spec.blocks as usize, spec.starts_zero, None);
        map.superseded(BlockRange::new(0, spec.blocks), false);
        map
    }

    /// Whether all of it must be there before the switchover.
    pub(super) fn is_promised(&self) -> bool {
        self.strategy.promise == Promise::Everything
    }

    /// Whether what is left of it may be listed.
    pub(super) fn is_listed(&self) -> bool {
        self.strategy.promise == Promise::List
    }

    /// Whether QEMU may write to it after the guest has been stopped.
    pub(super) fn is_written_late(&self) -> bool {
        matches!(self.reports, Reports::Writes { .. })
    }

    /// Whether a mirror of it is not yet in step.
    pub(super) fn is_behind(&self) -> bool {
        self.mirror
            .as_ref()
            .is_some_and(|mirror| !mirror.is_in_step())
    }

    /// Whether blocks of a class may be sent as what must be there: while mirrors are behind, mirrors go alone. Of what may
    /// be listed only what was promised, which is wanted.
    pub(super) fn goes_before_the_switchover(&self, class: Class, behind: bool) -> bool {
        match self.is_listed() {
            true => class == Class::Wanted && !self.promised.is_empty(),
            false => self.is_promised() && (!behind || self.mirror.is_some()),
        }
    }

    /// Whether nothing of it goes now but what somebody waits for.
    pub(super) fn waits(&self) -> bool {
        self.held_back || self.kept.as_ref().is_some_and(Kept::waits)
    }

    /// What was promised of it, and is not there, goes next.
    pub(super) fn want_promised(&mut self) {
        for range in &self.promised {
            range
                .blocks()
                .for_each(|block| self.map.want(block as usize));
        }
    }

    /// Whether it has blocks that may travel beside what must be there.
    pub(super) fn pushes(&self) -> bool {
        let before = matches!(self.strategy.before, Before::BelowThreshold(_));
        let pending = |class: Class| self.map.pending(class) > 0;
        self.is_listed() && before && (pending(Class::Cold) || pending(Class::Rest))
    }

    /// Whether the guest has written nothing near a block since the migration began: what came of it
    /// first is what the destination has.
    pub(super) fn stays(&self, index: usize) -> bool {
        self.map.written_blocks(chunk::of(index as u64)) == 0
    }

    /// Whether a reference may mean a block that arrived once, though it is not known any more with
    /// which content. One that does not hold comes again: with the guest stopped nobody has time for that. Nor
    /// should a write that the guest waits for have to wait for a reference.
    pub(super) fn can_be_meant_unseen(&self, index: usize, frozen: bool) -> bool {
        let has_time = !frozen && self.mirror.is_none();
        (has_time || self.stays(index)) && self.map.can_be_meant(index, frozen)
    }

    /// These blocks were written: in a pass, or just now. `still` when no pass comes any more.
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

    /// A pass begins, or the guest is stopped: what was kept for it is pending. Returns how much.
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

    /// Whether the destination has these blocks as they are here, as far as is known.
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

    /// Blocks that are kept for the next pass.
    pub(super) fn kept_blocks(&self) -> u64 {
        match &self.reports {
            Reports::Passes => 0,
            Reports::Writes { kept_blocks, .. } => *kept_blocks,
        }
    }
}
