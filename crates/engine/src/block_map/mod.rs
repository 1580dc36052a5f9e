//! The source's knowledge of each block of one region: which blocks are pending, in which order
//! they travel, and which content the destination has.
//!
//! Regions differ in two policies. *Records* ([`records`]): a record of 24 bytes for every block,
//! so that unchanged blocks are skipped and equal ones are sent as references, or records only
//! while a block is in flight. *Heat*: frequent writes are found by passes, for each block, or by
//! counting the writes to each chunk and keeping the time of the last one. A region without records
//! costs 18 bytes per chunk: 72 KiB per GiB.

mod drain;
mod records;

use crate::chunk::{self, CHUNK_BLOCKS};
use drain::Drain;
use longhaul_codec::Digest;
use longhaul_protocol::BlockRange;
use records::{Block, CLASS, IN_FLIGHT, KNOWN, Records, WHOLE};

/// The digest that represents an all-zero block.
pub(crate) const ZERO: Digest = Digest([0; 16]);

/// The priority of a pending block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// The guest waits for it.
    Wanted,
    /// Never or seldom written.
    Cold,
    /// Written occasionally.
    Rest,
    /// Written in pass after pass, or at least as often as the threshold: sent before the
    /// switchover only if it has to be.
    Hot,
}

impl Class {
    /// Every class, in the order in which blocks are sent.
    pub const ALL: [Class; 4] = [Class::Wanted, Class::Cold, Class::Rest, Class::Hot];
}

/// The number of the pass that reports all blocks.
const FIRST_PASS: u8 = 1;
/// The number of consecutive passes with a write that makes a block hot.
const STREAK_HOT: u8 = 2;

/// Limit on chunks with records of single blocks that are kept as targets of references: 12 MiB.
const PAGES_MEANT_MAX: usize = 1 << 13;

/// How frequent writes are detected.
#[derive(Debug)]
enum Heat {
    /// By passes, for each block.
    Passes,
    /// By the number of blocks written to each chunk, which is hot from a threshold on; and the
    /// number of the last write to each chunk among all writes, from 1.
    Written {
        blocks: Vec<u16>,
        last: Vec<u32>,
        writes: u32,
        hot_blocks: Option<u16>,
    },
}

/// The blocks of one region, as the source sees them.
#[derive(Debug)]
pub(crate) struct BlockMap {
    blocks: usize,
    pending: Vec<u64>,
    records: Records,
    heat: Heat,
    counts: [u64; 4],
    cursors: [usize; 4],
    /// The latest pass that reported a write.
    pass: u32,
    drain: Option<Drain>,
}

impl BlockMap {
    /// Creates a map of a region in which every block is pending and has a record. If the
    /// destination's blocks start as zeros, they are known to be zero.
    pub(crate) fn new(blocks: usize, starts_zero: bool) -> Self {
        let records = Records::of_all(blocks, starts_zero);
        Self::with(blocks, records, Heat::Passes)
    }

    /// Creates a map of a region that is tracked by chunk. A chunk is hot once `threshold` times
    /// its length was written to it.
    pub(crate) fn by_chunk(blocks: usize, starts_zero: bool, threshold: Option<u8>) -> Self {
        let heat = Heat::Written {
            blocks: vec![0; chunk::count(blocks as u64)],
            last: vec![0; chunk::count(blocks as u64)],
            writes: 0,
            hot_blocks: threshold.map(|times| u16::from(times) * CHUNK_BLOCKS as u16),
        };
        Self::with(blocks, Records::of_few(blocks, starts_zero), heat)
    }

    fn with(blocks: usize, records: Records, heat: Heat) -> Self {
        let chunks = chunk::count(blocks as u64);
        let pending = (0..chunks).map(|chunk| chunk::whole(chunk, blocks as u64));
        let mut map = Self {
            blocks,
            pending: pending.collect(),
            records,
            heat,
            counts: [0; 4],
            cursors: [0; 4],
            pass: 0,
            drain: None,
        };
        let class = map.class(0, &Block::default());
        map.counts[class as usize] = blocks as u64;
        map
    }

    /// Sets the block at which the circular search for blocks begins.
    pub(crate) fn start_at(&mut self, index: usize) {
        self.cursors = [index / 64; 4];
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks
    }

    /// Returns the number of pending blocks of a class.
    pub(crate) fn pending(&self, class: Class) -> u64 {
        self.counts[class as usize]
    }

    pub(crate) fn pending_total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns whether the destination's content is known by digest.
    pub(crate) fn keeps_digests(&self) -> bool {
        self.records.keeps()
    }

    fn is_pending(&self, index: usize) -> bool {
        self.pending[index / 64] >> (index % 64) & 1 == 1
    }

    /// Returns the class of a block of a chunk.
    fn class(&self, chunk: usize, block: &Block) -> Class {
        let own = block.class();
        match &self.heat {
            Heat::Passes => own,
            Heat::Written { .. } if own == Class::Wanted => own,
            Heat::Written {
                blocks, hot_blocks, ..
            } => {
                let written = blocks.get(chunk).copied().unwrap_or(0);
                match (written, hot_blocks) {
                    (0, _) => Class::Cold,
                    (written, Some(hot)) if written >= *hot => Class::Hot,
                    _ => Class::Rest,
                }
            }
        }
    }

    fn class_of(&self, index: usize) -> Class {
        self.class(index / 64, &self.records.get(index))
    }

    fn set_pending(&mut self, index: usize, class: Class) {
        if self.is_pending(index) {
            self.counts[self.class_of(index) as usize] -= 1;
        } else {
            self.pending[index / 64] |= 1 << (index % 64);
        }
        let by_chunk = matches!(self.heat, Heat::Written { .. });
        if !by_chunk || class == Class::Wanted || self.records.has_page(index / 64) {
            let block = self.records.get_mut(index);
            block.flags = block.flags & !CLASS | class as u8;
        }
        self.counts[self.class_of(index) as usize] += 1;
    }

    fn clear_pending(&mut self, index: usize) {
        if self.is_pending(index) {
            self.pending[index / 64] &= !(1 << (index % 64));
            self.counts[self.class_of(index) as usize] -= 1;
        }
    }

    /// Marks blocks as written, as a pass reported; a pass without a number reports every block.
    pub(crate) fn written(&mut self, range: BlockRange, pass: Option<u32>) {
        self.pass = pass.unwrap_or(self.pass);
        match self.heat {
            Heat::Passes => {
                for index in range.blocks() {
                    self.written_in_pass(index as usize, pass);
                }
            }
            Heat::Written { .. } => {
                for (chunk, mask) in chunk::pieces(range) {
                    self.written_chunk(chunk, mask);
                }
            }
        }
    }

    fn written_in_pass(&mut self, index: usize, pass: Option<u32>) {
        let block = self.records.get_mut(index);
        match pass.map(|pass| pass as u8) {
            // QEMU may begin the second pass before it has reported all blocks in the first one. A
            // block that it reports for the first time then need not have been written.
            Some(now) if block.last_pass == 0 && block.sent_seq == 0 => block.last_pass = now,
            Some(now) if block.last_pass != now => {
                let ran = block.last_pass == now.wrapping_sub(1) && block.last_pass != 0;
                block.streak = if ran {
                    block.streak.saturating_add(1)
                } else {
                    1
                };
                block.last_pass = now;
            }
            Some(_) => {}
            None => block.last_pass = FIRST_PASS,
        }
        let class = match block.streak {
            0 => Class::Cold,
            streak if streak < STREAK_HOT => Class::Rest,
            _ => Class::Hot,
        };
        self.set_pending(index, class);
    }

    /// Marks blocks of a chunk as written; the heat applies to the whole chunk.
    fn written_chunk(&mut self, chunk: usize, mask: u64) {
        self.count_chunk(chunk, false);
        if let Heat::Written {
            blocks,
            last,
            writes,
            ..
        } = &mut self.heat
            && let (Some(written), Some(last)) = (blocks.get_mut(chunk), last.get_mut(chunk))
        {
            *written = written.saturating_add(mask.count_ones() as u16);
            *writes = writes.saturating_add(1);
            *last = *writes;
        }
        self.pending[chunk] |= mask;
        self.count_chunk(chunk, true);
    }

    /// Adds the pending blocks of a chunk to the counts of their classes, or subtracts them.
    fn count_chunk(&mut self, chunk: usize, add: bool) {
        if matches!(self.heat, Heat::Passes) {
            let pending = (0..64).filter(|n| self.pending[chunk] >> n & 1 == 1);
            for n in pending.collect::<Vec<usize>>() {
                let class = self.class_of(chunk * 64 + n);
                let counted = &mut self.counts[class as usize];
                *counted = if add { *counted + 1 } else { *counted - 1 };
            }
            return;
        }
        let mut wanted = 0;
        if self.records.has_page(chunk) {
            let is_wanted = |n: &usize| self.records.get(chunk * 64 + n).class() == Class::Wanted;
            let bits = (0..64).filter(is_wanted);
            wanted = bits.fold(0, |mask, n| mask | 1 << n) & self.pending[chunk];
        }
        let others = self.pending[chunk] & !wanted;
        let class = self.class(chunk, &Block::default());
        for (class, mask) in [(Class::Wanted, wanted), (class, others)] {
            let count = u64::from(mask.count_ones());
            let counted = &mut self.counts[class as usize];
            *counted = if add {
                *counted + count
            } else {
                *counted - count
            };
        }
    }

    /// Marks blocks as unnecessary: the destination has something newer, both ends have zeros
    /// (`zero`), or the content is not needed there.
    pub(crate) fn superseded(&mut self, range: BlockRange, zero: bool) {
        for (chunk, mask) in chunk::pieces(range) {
            if zero && mask == chunk::whole(chunk, self.blocks as u64) {
                self.records.zeroed(chunk);
            }
            if !self.records.keeps() {
                self.count_chunk(chunk, false);
                self.pending[chunk] &= !mask;
                self.count_chunk(chunk, true);
                self.records.settle(chunk, self.pending[chunk]);
                continue;
            }
            for range in chunk::runs(chunk, mask) {
                range
                    .blocks()
                    .for_each(|index| self.clear_pending(index as usize));
            }
        }
    }

    /// Ends a pass: hot blocks that it did not report cool down.
    pub(crate) fn pass_ended(&mut self, pass: u32) {
        if self.counts[Class::Hot as usize] == 0 || !matches!(self.heat, Heat::Passes) {
            return;
        }
        for word in 0..self.pending.len() {
            let mut bits = self.pending[word];
            while bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let block = self.records.get(index);
                if block.class() == Class::Hot && block.last_pass != pass as u8 {
                    self.set_pending(index, Class::Rest);
                }
            }
        }
    }

    /// Marks a block as wanted unless it has been sent.
    pub(crate) fn want(&mut self, index: usize) {
        if self.is_pending(index) {
            self.set_pending(index, Class::Wanted);
        }
    }

    /// Takes up to `max` pending blocks of a class out of the index, in ascending order from where
    /// the last search ended, and records that frame `seq` carries them. Blocks that are in flight,
    /// or that a reference in flight points to, wait for the acknowledgement unless `overtake` is
    /// set, which requires a destination that keeps the version of each block.
    pub(crate) fn take(
        &mut self,
        class: Class,
        max: usize,
        seq: u32,
        overtake: bool,
        mut taken: impl FnMut(u64),
    ) -> usize {
        if self.counts[class as usize] == 0 || max == 0 {
            return 0;
        }
        let words = self.pending.len();
        let start = self.cursors[class as usize] % words;
        let mut count = 0;
        for step in 0..words {
            let word = (start + step) % words;
            count += self.take_chunk(word, Some(class), max - count, seq, overtake, &mut taken);
            if count == max {
                self.cursors[class as usize] = word;
                return count;
            }
            if self.counts[class as usize] == 0 {
                break;
            }
        }
        self.cursors[class as usize] = start;
        count
    }

    /// Takes up to `max` pending blocks of one chunk, of one class or of any.
    fn take_chunk(
        &mut self,
        chunk: usize,
        class: Option<Class>,
        max: usize,
        seq: u32,
        overtake: bool,
        taken: &mut impl FnMut(u64),
    ) -> usize {
        let mut bits = self.pending[chunk];
        let mut count = 0;
        while bits != 0 && count < max {
            let index = chunk * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let other =
                class.is_some_and(|class| self.class(chunk, &self.records.get(index)) != class);
            if other || !self.take_block(index, seq, overtake) {
                continue;
            }
            taken(index as u64);
            count += 1;
        }
        count
    }

    /// Takes a pending block, unless it waits for an acknowledgement.
    fn take_block(&mut self, index: usize, seq: u32, overtake: bool) -> bool {
        let block = self.records.get(index);
        let waits = block.flags & IN_FLIGHT != 0 || block.pins > 0;
        if waits && !(overtake && self.records.keeps()) {
            return false;
        }
        self.clear_pending(index);
        let block = self.records.get_mut(index);
        block.flags |= IN_FLIGHT;
        block.sent_seq = seq;
        true
    }

    /// Returns whether none of these blocks is pending or in flight.
    pub(crate) fn is_settled(&self, range: BlockRange) -> bool {
        chunk::pieces(range).all(|(chunk, mask)| {
            let on_its_way = |n: u64| {
                let block = self.records.get(chunk * CHUNK_BLOCKS as usize + n as usize);
                mask >> n & 1 == 1 && block.flags & IN_FLIGHT != 0
            };
            let quiet = !self.records.has_page(chunk) || !(0..CHUNK_BLOCKS).any(on_its_way);
            self.pending[chunk] & mask == 0 && quiet
        })
    }

    /// Returns whether the destination is known to have exactly this content in the block.
    pub(crate) fn holds(&self, index: usize, digest: &Digest) -> bool {
        let block = self.records.get(index);
        block.flags & KNOWN != 0 && block.digest == *digest
    }

    /// Returns the content that the destination is known to have in the block.
    pub(crate) fn known(&self, index: usize) -> Option<Digest> {
        let block = self.records.get(index);
        (block.flags & KNOWN != 0).then_some(block.digest)
    }

    /// Returns whether the block must travel as a literal.
    pub(crate) fn is_whole(&self, index: usize) -> bool {
        self.records.get(index).flags & WHOLE != 0
    }

    /// Returns whether a reference may point to the block: nothing newer is in flight and, where
    /// blocks cannot be held back any more (`overtake`), nothing newer will be.
    pub(crate) fn can_be_meant(&self, index: usize, overtake: bool) -> bool {
        let block = self.records.get(index);
        let stays = block.flags & IN_FLIGHT == 0 && !(overtake && self.is_pending(index));
        let has_page = self.records.has_page(index / 64);
        stays && block.pins < u8::MAX && (has_page || self.has_room())
    }

    /// Returns whether more blocks may get records of their own.
    pub(crate) fn has_room(&self) -> bool {
        self.records.keeps() || self.records.pages() < PAGES_MEANT_MAX
    }

    /// Records that a reference to the block is in flight: the block is not sent again before the
    /// reference has arrived.
    pub(crate) fn pin(&mut self, index: usize) {
        self.records.get_mut(index).pins += 1;
    }

    /// Records that a reference to the block has arrived or was lost.
    pub(crate) fn unpin(&mut self, index: usize) {
        self.records.get_mut(index).pins -= 1;
    }

    /// Records that the block need not travel, since the destination has this content.
    pub(crate) fn skip(&mut self, index: usize, seq: u32) {
        if let Some(block) = self.carried_by(index, seq) {
            block.flags &= !IN_FLIGHT;
        }
    }

    /// Records that frame `seq` carries the block with this content.
    pub(crate) fn sent(&mut self, index: usize, seq: u32, digest: Digest) {
        if let Some(block) = self.carried_by(index, seq) {
            block.flags &= !KNOWN;
            block.digest = digest;
        }
    }

    /// Records that frame `seq` was applied. Returns the content that the destination has now,
    /// unless a newer frame carries the block.
    pub(crate) fn acknowledged(&mut self, index: usize, seq: u32) -> Option<Digest> {
        let block = self.carried_by(index, seq)?;
        block.flags = block.flags & !(IN_FLIGHT | WHOLE) | KNOWN;
        Some(block.digest)
    }

    /// Makes the block pending again because frame `seq` was lost. A block that a newer frame
    /// carries is left to that frame.
    pub(crate) fn lost(&mut self, index: usize, seq: u32) {
        let Some(block) = self.carried_by(index, seq) else {
            return;
        };
        block.flags &= !(IN_FLIGHT | KNOWN);
        let class = if self.is_pending(index) {
            self.class_of(index)
        } else {
            Class::Rest
        };
        self.set_pending(index, class);
    }

    /// Records that the destination could not use the encoding of this block.
    pub(crate) fn rejected(&mut self, index: usize) {
        let block = self.records.get_mut(index);
        block.flags = block.flags & !(IN_FLIGHT | KNOWN) | WHOLE;
        block.sent_seq = 0;
        self.set_pending(index, Class::Rest);
    }

    /// Records that the destination does not have the block as part of a run.
    pub(crate) fn rejected_in_run(&mut self, index: usize) {
        let block = self.records.get_mut(index);
        block.flags &= !(IN_FLIGHT | KNOWN);
        block.sent_seq = 0;
        self.set_pending(index, Class::Rest);
    }

    /// Records that a frame with blocks of this chunk is no longer in flight.
    pub(crate) fn settle(&mut self, chunk: usize) {
        self.records.settle(chunk, self.pending[chunk]);
    }

    /// Returns the block if frame `seq` is the newest that carries it.
    fn carried_by(&mut self, index: usize, seq: u32) -> Option<&mut Block> {
        let newest = self.records.get(index).sent_seq == seq;
        newest.then(|| self.records.get_mut(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u8) -> Digest {
        Digest([n; 16])
    }

    fn take_all(map: &mut BlockMap, class: Class, seq: u32) -> Vec<u64> {
        let mut taken = Vec::new();
        map.take(class, usize::MAX, seq, false, |block| taken.push(block));
        taken
    }

    #[test]
    fn a_block_costs_24_bytes() {
        assert_eq!(size_of::<Block>(), 24);
    }

    #[test]
    fn everything_is_pending_at_first_and_taken_once() {
        let mut map = BlockMap::new(130, true);
        assert_eq!(map.pending_total(), 130);
        assert_eq!(
            take_all(&mut map, Class::Cold, 1),
            (0..130).collect::<Vec<_>>()
        );
        assert_eq!(map.pending_total(), 0);
        assert!(take_all(&mut map, Class::Cold, 2).is_empty());
    }

    #[test]
    fn a_block_on_its_way_waits_unless_it_may_overtake() {
        let mut map = BlockMap::new(4, false);
        take_all(&mut map, Class::Cold, 1);
        map.sent(2, 1, digest(1));
        map.written(BlockRange::new(2, 1), Some(2));
        assert!(take_all(&mut map, Class::Rest, 2).is_empty());
        let mut taken = Vec::new();
        map.take(Class::Rest, 9, 3, true, |block| taken.push(block));
        assert_eq!(taken, [2]);
        map.sent(2, 3, digest(2));
        assert_eq!(map.acknowledged(2, 1), None);
        assert!(!map.holds(2, &digest(2)));
        assert_eq!(map.acknowledged(2, 3), Some(digest(2)));
        assert!(map.holds(2, &digest(2)));
    }

    #[test]
    fn blocks_written_pass_after_pass_are_hot_and_cool_again() {
        let mut map = BlockMap::new(8, false);
        take_all(&mut map, Class::Cold, 1);
        (0..8).for_each(|index| map.skip(index, 1));
        map.written(BlockRange::new(3, 2), Some(2));
        assert_eq!(map.pending(Class::Rest), 2);
        map.written(BlockRange::new(3, 1), Some(3));
        map.pass_ended(3);
        assert_eq!((map.pending(Class::Hot), map.pending(Class::Rest)), (1, 1));
        map.pass_ended(4);
        assert_eq!((map.pending(Class::Hot), map.pending(Class::Rest)), (0, 2));
    }

    #[test]
    fn a_block_that_a_reference_means_waits_too() {
        let mut map = BlockMap::new(2, false);
        take_all(&mut map, Class::Cold, 1);
        assert!(
            !map.can_be_meant(0, false),
            "newer content may be on its way"
        );
        map.sent(0, 1, digest(1));
        map.acknowledged(0, 1);
        assert!(map.can_be_meant(0, false));
        map.pin(0);
        map.pin(0);
        map.written(BlockRange::new(0, 1), Some(2));
        assert!(map.can_be_meant(0, false) && !map.can_be_meant(0, true));
        assert!(take_all(&mut map, Class::Rest, 2).is_empty());
        map.unpin(0);
        assert!(take_all(&mut map, Class::Rest, 3).is_empty());
        map.unpin(0);
        assert_eq!(take_all(&mut map, Class::Rest, 4), [0]);
    }

    #[test]
    fn a_rejected_block_travels_whole_until_it_has_arrived() {
        let mut map = BlockMap::new(1, false);
        take_all(&mut map, Class::Cold, 1);
        map.sent(0, 1, digest(1));
        map.acknowledged(0, 1);
        assert_eq!((map.known(0), map.is_whole(0)), (Some(digest(1)), false));
        map.rejected(0);
        assert_eq!((map.known(0), map.is_whole(0)), (None, true));
        take_all(&mut map, Class::Rest, 2);
        map.sent(0, 2, digest(2));
        map.lost(0, 2);
        assert!(map.is_whole(0));
        take_all(&mut map, Class::Rest, 3);
        map.sent(0, 3, digest(3));
        map.acknowledged(0, 3);
        assert_eq!((map.known(0), map.is_whole(0)), (Some(digest(3)), false));
    }

    #[test]
    fn what_is_lost_or_rejected_is_pending_again() {
        let mut map = BlockMap::new(2, false);
        take_all(&mut map, Class::Cold, 1);
        map.sent(0, 1, digest(1));
        map.sent(1, 1, digest(2));
        map.lost(0, 1);
        map.lost(0, 1);
        map.rejected(1);
        assert_eq!(map.acknowledged(1, 1), None);
        assert_eq!(map.pending(Class::Rest), 2);
        assert!(!map.holds(1, &digest(2)));
    }

    #[test]
    fn a_zero_start_is_known() {
        let map = BlockMap::new(1, true);
        assert!(map.holds(0, &ZERO));
        assert!(!BlockMap::new(1, false).holds(0, &ZERO));
    }

    fn all_of(map: &mut BlockMap, seq: u32) -> Vec<u64> {
        let mut taken = Vec::new();
        for class in [Class::Wanted, Class::Cold, Class::Rest] {
            map.take(class, usize::MAX, seq, true, |block| taken.push(block));
        }
        taken
    }

    fn arrive(map: &mut BlockMap, blocks: &[u64], seq: u32) {
        for block in blocks {
            map.sent(*block as usize, seq, digest(1));
            map.acknowledged(*block as usize, seq);
        }
        blocks
            .iter()
            .for_each(|block| map.settle(*block as usize / 64));
    }

    #[test]
    fn single_blocks_are_forgotten_when_nothing_is_under_way() {
        let mut map = BlockMap::by_chunk(64 * 1000 + 10, true, Some(2));
        assert_eq!(map.pending(Class::Cold), 64_010);
        assert_eq!(map.records.pages(), 0);
        let taken = all_of(&mut map, 1);
        assert_eq!(map.records.pages(), 1001);
        arrive(&mut map, &taken, 1);
        assert_eq!(map.records.pages(), 0);
        assert_eq!(map.pending_total(), 0);
    }

    #[test]
    fn a_chunk_written_as_often_as_the_threshold_waits() {
        let mut map = BlockMap::by_chunk(200, true, Some(2));
        let taken = all_of(&mut map, 1);
        arrive(&mut map, &taken, 1);
        map.written(BlockRange::new(60, 68), None);
        assert_eq!(map.pending(Class::Rest), 68);
        map.written(BlockRange::new(64, 64), None);
        assert_eq!((map.pending(Class::Rest), map.pending(Class::Hot)), (4, 64));
        assert_eq!(all_of(&mut map, 2), [60, 61, 62, 63]);
        assert_eq!((map.written_blocks(0), map.written_blocks(1)), (4, 128));
    }

    #[test]
    fn a_block_on_its_way_is_not_overtaken_where_versions_are_not_kept() {
        let mut map = BlockMap::by_chunk(64, true, None);
        all_of(&mut map, 1);
        map.written(BlockRange::new(3, 1), None);
        assert!(all_of(&mut map, 2).is_empty());
        map.lost(4, 1);
        assert_eq!(all_of(&mut map, 3), [4]);
        arrive(&mut map, &[3], 1);
        assert_eq!(all_of(&mut map, 4), [3]);
    }

    #[test]
    fn the_drain_goes_by_decreasing_count_and_what_is_wanted_goes_first() {
        let mut map = BlockMap::by_chunk(64 * 4, true, Some(1));
        map.written(BlockRange::new(64, 64), None);
        map.written(BlockRange::new(128, 128), None);
        map.written(BlockRange::new(192, 1), None);
        map.drain();
        map.want_missing(5, 0);
        let mut order = Vec::new();
        map.take(Class::Wanted, 9, 1, false, |block| order.push(block));
        assert_eq!(order, [5]);
        map.superseded(BlockRange::new(0, 4), false);
        map.superseded(BlockRange::new(7, 57), false);
        map.take_drained(usize::MAX, 2, |block| order.push(block));
        // After the wanted chunk: the chunk behind it, then the most written one.
        let rest = (64..128).chain(192..256).chain(128..192);
        let expected: Vec<u64> = [5, 4, 6].into_iter().chain(rest).collect();
        assert_eq!(order, expected);
        assert_eq!(map.pending_total(), 0);
        map.lost(200, 2);
        order.clear();
        map.take_drained(usize::MAX, 3, |block| order.push(block));
        assert_eq!(order, [200], "what was lost comes again");
    }

    #[test]
    fn a_block_that_a_later_pass_reports_first_was_not_written() {
        let mut map = BlockMap::new(64 * 2, true);
        map.written(BlockRange::new(0, 64), None);
        // QEMU has begun the second pass before the first one had reported these.
        map.written(BlockRange::new(64, 64), Some(2));
        assert_eq!(map.pending(Class::Cold), 128);
        map.written(BlockRange::new(64, 8), Some(3));
        assert_eq!(map.pending(Class::Rest), 8);
        // A block that was sent has been written, whichever pass reports it.
        map.take(Class::Cold, 64, 1, false, |_| {});
        for block in 0..64 {
            map.sent(block, 1, digest(1));
            map.acknowledged(block, 1);
        }
        map.written(BlockRange::new(0, 2), Some(3));
        assert_eq!(map.pending(Class::Rest), 10);
    }

    #[test]
    fn what_is_missing_after_passes_is_counted_by_its_heat() {
        let mut map = BlockMap::new(100, true);
        map.written(BlockRange::new(0, 100), None);
        for pass in 2..=4 {
            map.written(BlockRange::new(2, 1), Some(pass));
        }
        map.written(BlockRange::new(70, 2), Some(4));
        map.set_missing(0, 0b111, 0);
        map.set_missing(1, 0b100_0000, 0);
        let pending = |map: &BlockMap| Class::ALL.map(|class| map.pending(class));
        assert_eq!(pending(&map), [0, 2, 1, 1]);
        map.drain();
        map.want_missing(1, 0);
        assert_eq!(pending(&map), [1, 1, 1, 1]);
        let mut order = Vec::new();
        map.take_drained(usize::MAX, 1, |block| order.push(block));
        assert_eq!(pending(&map), [0; 4]);
        assert_eq!(order, [2, 70, 0, 1]);
    }

    #[test]
    fn what_the_destination_lacks_is_pending_and_nothing_else() {
        let mut map = BlockMap::by_chunk(100, true, Some(1));
        map.set_missing(0, 0b101, 7);
        map.set_missing(1, u64::MAX, 0);
        assert_eq!(map.pending_total(), 2 + 36);
        assert_eq!(map.written_blocks(0), 7);
        map.superseded(BlockRange::new(0, 100), true);
        assert_eq!(map.pending_total(), 0);
        assert!(map.holds(70, &ZERO));
        map.want_missing(70, 0);
        assert_eq!(map.pending(Class::Wanted), 1, "it is believed");
    }
}
