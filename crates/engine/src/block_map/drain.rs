//! The order in which the drain sends pending blocks.
//!
//! The most written chunks travel first, since the guest needs them again soonest (paper 001,
//! algorithm 3). Among chunks with equal counts the one with the latest write travels first: a
//! guest that passes over its data repeatedly overwrites that chunk last, and a block that is
//! overwritten has been sent in vain.
//!
//! In a region whose writes are found by passes, chunks of which a few blocks were written come
//! first: the guest's own data, such as its stacks and tables, of which little has to travel, and
//! for each block of which the guest would wait alone. Then the chunks with the latest writes, and
//! of these those with the most written blocks.
//!
//! What is near a block that the guest waited for travels soon: alternately with the first of
//! these.
//!
//! Before all of these come single blocks that the guest is expected to use next. In a region whose
//! writes are found by passes, some that were written in pass after pass are among them, those with
//! the most passes first: what a kernel writes at each tick of its clock is one of these.

use super::{BlockMap, Class, Heat, ZERO};
use crate::chunk;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// Limit on chunks that are prefetched because the guest waited for a part of them.
const SOON_MAX: usize = 256;
/// The number of written blocks up to which a chunk counts as one with few of them.
const FEW_BLOCKS: u32 = 32;
/// The number of blocks that go first because they were written in pass after pass. The guest's
/// processors tell more of what it uses next, a little later.
const OFTEN_FIRST: usize = 64;
/// The number of blocks written in pass after pass beyond which they are not listed.
const OFTEN_MAX: u64 = 1 << 16;
/// Limit on chunks with records of single blocks: 24 MiB. Beyond it, a wanted block makes its whole
/// chunk travel soon, and does not go ahead of the chunk.
const PAGES_MAX: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Drain {
    /// Blocks that the guest is expected to use next, in this order.
    expected: VecDeque<usize>,
    /// Chunks whose remaining blocks are prefetched after a part of them was wanted.
    soon: VecDeque<u32>,
    /// Chunks by how soon the guest is expected to need them.
    order: Vec<u32>,
    next: usize,
    /// The number of chunks at the beginning of `order` of which a few blocks were written.
    few: usize,
    /// Whether the next of these goes before those that travel soon.
    few_next: bool,
}

/// How soon the guest is expected to need a chunk: the higher, the sooner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ExpectedUse {
    few_written: bool,
    /// In their order for a region that is written in passes: the latest pass, and the number of
    /// blocks; otherwise the number of blocks, and the last write.
    by: (u32, u32),
}

impl Drain {
    /// Returns the next chunk, and whether it comes from those that travel soon.
    fn next_chunk(&self) -> Option<(u32, bool)> {
        let soon = self.soon.front().map(|chunk| (*chunk, true));
        let next = self.order.get(self.next).map(|chunk| (*chunk, false));
        match self.few_next && self.next < self.few {
            true => next.or(soon),
            false => soon.or(next),
        }
    }
}

impl BlockMap {
    /// Switches to the order of the drain.
    pub(crate) fn drain(&mut self) {
        let left = (0..self.pending.len()).filter(|chunk| self.pending[*chunk] != 0);
        let expected = left.map(|chunk| (Reverse(self.expected_use(chunk)), chunk as u32));
        let mut order: Vec<_> = expected.collect();
        order.sort_by_key(|(expected, _)| *expected);
        let few = order.partition_point(|(expected, _)| expected.0.few_written);
        let before = self.drain.take();
        let often = match before.as_ref().is_some_and(|drain| !drain.order.is_empty()) {
            true => Vec::new(),
            false => self.written_often(),
        };
        let (before, often) = (before.unwrap_or_default(), often.into_iter());
        self.drain = Some(Drain {
            expected: before
                .expected
                .into_iter()
                .chain(often.take(OFTEN_FIRST))
                .collect(),
            soon: before.soon,
            order: order.into_iter().map(|(_, chunk)| chunk).collect(),
            next: 0,
            few,
            few_next: true,
        });
    }

    fn expected_use(&self, chunk: usize) -> ExpectedUse {
        if matches!(self.heat, Heat::Written { .. }) {
            let written = u32::from(self.written_blocks(chunk));
            return ExpectedUse {
                few_written: false,
                by: (written, self.last_write(chunk)),
            };
        }
        let (mut latest, mut count) = (0, 0);
        for index in (chunk * 64..(chunk + 1) * 64).take_while(|index| *index < self.blocks) {
            let block = self.records.get(index);
            let age = match block.streak {
                0 if !self.is_pending(index) || self.known(index).is_none_or(|of| of == ZERO) => {
                    continue;
                }
                // It was sent and written in the first pass.
                0 => 0,
                _ => (self.pass as u8).wrapping_sub(block.last_pass),
            };
            latest = latest.max(u32::from(u8::MAX - age) + 1);
            count += 1;
        }
        ExpectedUse {
            few_written: (1..=FEW_BLOCKS).contains(&count),
            by: (latest, count),
        }
    }

    /// Returns the pending blocks that were written in pass after pass, the longest first; none if
    /// there are very many, or writes are not found by passes.
    pub(crate) fn written_often(&self) -> Vec<usize> {
        let by_passes = matches!(self.heat, Heat::Passes);
        if !by_passes || self.counts[Class::Hot as usize] > OFTEN_MAX {
            return Vec::new();
        }
        let chunks = self.pending.iter().enumerate();
        let pending = chunks.flat_map(|(chunk, mask)| {
            let bits = (0..64).filter(move |bit| mask >> bit & 1 == 1);
            bits.map(move |bit| chunk * 64 + bit)
        });
        let mut hot: Vec<_> = pending
            .map(|index| (Reverse(self.records.get(index).streak), index))
            .filter(|(_, index)| self.class_of(*index) == Class::Hot)
            .collect();
        hot.sort_unstable();
        hot.into_iter().map(|(_, index)| index).collect()
    }

    /// Returns how much was written to a chunk since the migration began, in blocks.
    pub(crate) fn written_blocks(&self, chunk: usize) -> u16 {
        match &self.heat {
            Heat::Passes => 0,
            Heat::Written { blocks, .. } => blocks.get(chunk).copied().unwrap_or(0),
        }
    }

    /// Returns the number of the last write to a chunk among the writes to the region; 0 for none.
    fn last_write(&self, chunk: usize) -> u32 {
        match &self.heat {
            Heat::Passes => 0,
            Heat::Written { last, .. } => last.get(chunk).copied().unwrap_or(0),
        }
    }

    /// Returns the pending blocks of a chunk.
    pub(crate) fn pending_mask(&self, chunk: usize) -> u64 {
        self.pending.get(chunk).copied().unwrap_or(0)
    }

    /// Returns the pending blocks of each chunk.
    pub(crate) fn pending_masks(&self) -> &[u64] {
        &self.pending
    }

    /// Sets the missing blocks of a chunk at the destination, and how much was written to the
    /// chunk.
    pub(crate) fn set_missing(&mut self, chunk: usize, mask: u64, written_blocks: u16) {
        self.count_chunk(chunk, false);
        self.pending[chunk] = mask & chunk::whole(chunk, self.blocks as u64);
        if let Heat::Written { blocks, .. } = &mut self.heat
            && let Some(written) = blocks.get_mut(chunk)
        {
            *written = written_blocks;
        }
        self.count_chunk(chunk, true);
        self.records.settle(chunk, self.pending[chunk]);
    }

    /// Sends a block that the destination waits for and knows to be missing, even if it was
    /// believed to have arrived, unless a frame from `from_seq` on carries it. The other blocks of
    /// its chunk follow soon.
    pub(crate) fn want_missing(&mut self, index: usize, from_seq: u32) {
        let block = self.records.get(index);
        if block.flags & super::IN_FLIGHT != 0 && block.sent_seq >= from_seq {
            return;
        }
        let chunk = chunk::of(index as u64) as u32;
        let has_room = self.records.has_page(chunk as usize) || self.records.pages() < PAGES_MAX;
        self.set_pending(index, if has_room { Class::Wanted } else { Class::Rest });
        let Some(drain) = &mut self.drain else { return };
        // Sequential readers find the next chunk already there.
        for chunk in [chunk, chunk + 1] {
            let left = self
                .pending
                .get(chunk as usize)
                .is_some_and(|mask| *mask != 0);
            if left && drain.soon.len() < SOON_MAX && !drain.soon.contains(&chunk) {
                drain.soon.push_back(chunk);
            }
        }
    }

    /// Lets these blocks go first in the drain, in this order.
    pub(crate) fn expect(&mut self, blocks: impl Iterator<Item = usize>) {
        let blocks = blocks.filter(|index| *index < self.blocks && self.is_pending(*index));
        let blocks: Vec<usize> = blocks.collect();
        let drain = self.drain.get_or_insert_default();
        drain.expected.extend(blocks);
    }

    /// Returns whether expected blocks have yet to travel.
    pub(crate) fn expects(&mut self) -> bool {
        let pending = &self.pending;
        let Some(drain) = &mut self.drain else {
            return false;
        };
        while let Some(index) = drain.expected.front() {
            if pending[index / 64] >> (index % 64) & 1 == 1 {
                return true;
            }
            drain.expected.pop_front();
        }
        false
    }

    /// Lets expected blocks travel in the order of the others.
    pub(crate) fn expect_nothing(&mut self) {
        if let Some(drain) = &mut self.drain {
            drain.expected.clear();
        }
    }

    /// Takes expected blocks, unless it is the turn of those that travel soon.
    pub(crate) fn take_expected(
        &mut self,
        max: usize,
        seq: u32,
        taken: &mut impl FnMut(u64),
    ) -> usize {
        let mut count = 0;
        while count < max {
            let Some(drain) = &mut self.drain else { break };
            if !drain.few_next && !drain.soon.is_empty() {
                break;
            }
            let Some(index) = drain.expected.pop_front() else {
                break;
            };
            if self.is_pending(index) && self.take_block(index, seq, false) {
                taken(index as u64);
                count += 1;
            }
        }
        count
    }

    /// Takes up to `max` blocks in the order of the drain, as [`BlockMap::take`] does by class.
    pub(crate) fn take_drained(
        &mut self,
        max: usize,
        seq: u32,
        mut taken: impl FnMut(u64),
    ) -> usize {
        let mut count = self.take_expected(max, seq, &mut taken);
        let mut again = true;
        while count < max && self.pending_total() > 0 {
            let Some(drain) = &mut self.drain else { break };
            let Some((chunk, is_soon)) = drain.next_chunk() else {
                // Blocks that were lost lie behind the position of the search.
                if !std::mem::take(&mut again) {
                    break;
                }
                self.drain();
                continue;
            };
            count += self.take_chunk(chunk as usize, None, max - count, seq, false, &mut taken);
            if count == max {
                break;
            }
            let Some(drain) = &mut self.drain else { break };
            match is_soon {
                true => drop(drain.soon.pop_front()),
                false => drain.next += 1,
            }
        }
        if let Some(drain) = &mut self.drain {
            drain.few_next = !drain.few_next;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_codec::Digest;
    use longhaul_protocol::BlockRange;

    #[test]
    fn of_what_was_written_as_often_the_drain_takes_the_latest_first() {
        let mut map = BlockMap::by_chunk(64 * 5, true, Some(1));
        for chunk in [1, 2, 3, 1] {
            map.written(BlockRange::new(chunk * 64, 32), None);
        }
        map.written(BlockRange::new(3 * 64, 64), None);
        map.written(BlockRange::new(2 * 64, 32), None);
        map.drain();
        let mut order = Vec::new();
        map.take_drained(usize::MAX, 1, |block| order.push(block / 64));
        order.dedup();
        assert_eq!(order, [3, 2, 1, 0, 4]);
    }

    #[test]
    fn after_passes_the_drain_begins_with_a_few_blocks_written_last() {
        let mut map = BlockMap::new(64 * 5, true);
        map.written(BlockRange::new(0, 64 * 5), None);
        map.written(BlockRange::new(4 * 64, 64), Some(258));
        map.written(BlockRange::new(64, 3), Some(256));
        map.written(BlockRange::new(2 * 64, 9), Some(256));
        map.written(BlockRange::new(3 * 64 + 5, 1), Some(257));
        // The numbers of passes are kept in a byte.
        map.written(BlockRange::new(3 * 64 + 6, 1), Some(258));
        map.drain();
        let mut order = Vec::new();
        map.take_drained(usize::MAX, 1, |block| order.push(block / 64));
        assert_eq!(order.len(), 64 * 5);
        order.dedup();
        assert_eq!(order, [3, 2, 1, 4, 0]);
    }

    #[test]
    fn what_the_guest_uses_next_is_drained_first_and_alternates_with_what_it_waited_for() {
        let mut map = BlockMap::new(64 * 5, true);
        map.written(BlockRange::new(0, 64 * 5), None);
        map.superseded(BlockRange::new(200, 1), false);
        // Block 200 is there already, and there is no block 64 * 5.
        map.expect([130, 200, 7, 64 * 5, 131, 9].into_iter());
        map.drain();
        let take = |map: &mut BlockMap, max| {
            let mut order = Vec::new();
            map.take_drained(max, 1, |block| order.push(block));
            order
        };
        assert_eq!(take(&mut map, 2), [130, 7]);
        map.want_missing(70, 1);
        map.take(Class::Wanted, 1, 1, false, |_| {});
        assert_eq!(take(&mut map, 2), [64, 65]);
        assert_eq!(take(&mut map, 2), [131, 9]);
        assert_eq!(take(&mut map, 2), [66, 67]);
    }

    #[test]
    fn some_of_what_was_written_in_pass_after_pass_is_drained_first() {
        let order_of = |hot: u64| {
            let mut map = BlockMap::new(64 * 64, true);
            map.written(BlockRange::new(0, 64 * 64), None);
            map.expect([9].into_iter());
            for pass in 2..6 {
                map.written(BlockRange::new(64, hot), Some(pass));
                map.written(BlockRange::new(64 * 60 + u64::from(pass), 1), Some(pass));
            }
            map.written(BlockRange::new(3, 1), Some(5));
            map.written(BlockRange::new(3, 1), Some(6));
            map.written(BlockRange::new(64, hot), Some(6));
            map.drain();
            let mut order = Vec::new();
            map.take_drained(OFTEN_FIRST + 2, 1, |block| order.push(block));
            order
        };
        assert_eq!(order_of(3)[..5], [9, 64, 65, 66, 3]);
        let many = order_of(200);
        assert_eq!(
            (many[1], many[OFTEN_FIRST], many[OFTEN_FIRST + 1]),
            (64, 127, 256)
        );
    }

    #[test]
    fn what_was_sent_and_written_in_the_first_pass_is_drained_first() {
        let mut map = BlockMap::new(64 * 3, true);
        map.written(BlockRange::new(0, 64 * 3), None);
        map.take(Class::Cold, 64 * 3, 1, false, |_| {});
        for block in 0..64 * 3 {
            map.sent(block, 1, Digest([1; 16]));
            map.acknowledged(block, 1);
        }
        map.written(BlockRange::new(0, 64), None);
        map.written(BlockRange::new(130, 2), None);
        map.drain();
        let mut order = Vec::new();
        map.take_drained(4, 2, |block| order.push(block));
        assert_eq!(order, [130, 131, 0, 1]);
    }
}
