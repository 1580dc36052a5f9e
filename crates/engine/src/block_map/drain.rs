//! The order in which what is left travels when the guest runs at the destination already: what was
//! written most comes first, since it will be needed again soonest (paper 001, algorithm 3). Of what was written as
//! often the latest comes first: a guest that passes over its data again and again writes that over last, and what it
//! writes over has come for nothing.

use super::{BlockMap, Class, Heat};
use crate::chunk;
use std::cmp::Reverse;
use std::collections::VecDeque;

/// Chunks that are fetched ahead because somebody waited for a part of them.
const SOON_MAX: usize = 256;
/// Chunks of which single blocks are remembered at a time: 24 MiB. Beyond that, whoever waits gets the
/// chunk soon, and not the block first.
const PAGES_MAX: usize = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Drain {
    /// The rest of chunks that somebody waited for a part of.
    soon: VecDeque<u32>,
    /// Chunks by decreasing count, then by the time of their last write, the latest first.
    order: Vec<u32>,
    next: usize,
}

impl BlockMap {
    /// From now on blocks travel in the order of the drain.
    pub(crate) fn drain(&mut self) {
        let left = (0..self.pending.len()).filter(|chunk| self.pending[*chunk] != 0);
        let mut order: Vec<u32> = left.map(|chunk| chunk as u32).collect();
        let heat = |chunk: usize| (self.written_blocks(chunk), self.last_write(chunk));
        order.sort_by_key(|chunk| Reverse(heat(*chunk as usize)));
        let soon = self.drain.take().unwrap_or_default().soon;
        self.drain = Some(Drain {
            soon,
            order,
            next: 0,
        });
    }

    /// How much was written to a chunk since the migration began, in blocks.
    pub(crate) fn written_blocks(&self, chunk: usize) -> u16 {
        match &self.heat {
            Heat::Passes => 0,
            Heat::Written { blocks, .. } => blocks.get(chunk).copied().unwrap_or(0),
        }
    }

    /// Which write to the region was the last to a chunk; 0: none.
    fn last_write(&self, chunk: usize) -> u32 {
        match &self.heat {
            Heat::Passes => 0,
            Heat::Written { last, .. } => last.get(chunk).copied().unwrap_or(0),
        }
    }

    /// What of a chunk waits to be sent.
    pub(crate) fn pending_mask(&self, chunk: usize) -> u64 {
        self.pending.get(chunk).copied().unwrap_or(0)
    }

    /// The destination lacks exactly these blocks of a chunk, to which so much was written.
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

    /// Somebody at the destination waits for this block, and knows that it is not there: it travels
    /// even if it was believed to have arrived. The rest of its chunk follows soon.
    pub(crate) fn want_missing(&mut self, index: usize) {
        if self.records.get(index).flags & super::IN_FLIGHT != 0 {
            return;
        }
        let chunk = chunk::of(index as u64) as u32;
        let has_room = self.records.has_page(chunk as usize) || self.records.pages() < PAGES_MAX;
        self.set_pending(index, if has_room { Class::Wanted } else { Class::Rest });
        let Some(drain) = &mut self.drain else { return };
        // Whoever reads on finds what follows.
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

    /// Takes up to `max` blocks in the order of the drain, as [`BlockMap::take`] does by class.
    pub(crate) fn take_drained(
        &mut self,
        max: usize,
        seq: u32,
        mut taken: impl FnMut(u64),
    ) -> usize {
        let mut count = 0;
        let mut again = true;
        while count < max && self.pending_total() > 0 {
            let Some(drain) = &mut self.drain else { break };
            let from_soon = drain.soon.front().copied();
            let Some(chunk) = from_soon.or_else(|| drain.order.get(drain.next).copied()) else {
                // What was lost on its way is behind us.
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
            match from_soon {
                Some(_) => drop(drain.soon.pop_front()),
                None => drain.next += 1,
            }
        }
        count
    }
}
