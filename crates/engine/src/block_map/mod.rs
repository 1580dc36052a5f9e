//! What the source knows of each block of one region: 24 bytes and a bit.

use longhaul_codec::Digest;
use longhaul_protocol::BlockRange;

/// Stands for a block that is all zero.
pub(crate) const ZERO: Digest = Digest([0; 16]);

/// How soon a pending block should travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Somebody waits for it.
    Wanted,
    /// Never or seldom written.
    Cold,
    /// Written now and then.
    Rest,
    /// Written in pass after pass: sent before the switchover only when it must be.
    Hot,
}

impl Class {
    /// Every class, in the order in which blocks are sent.
    pub const ALL: [Class; 4] = [Class::Wanted, Class::Cold, Class::Rest, Class::Hot];

    fn from_bits(bits: u8) -> Self {
        Self::ALL[usize::from(bits & CLASS)]
    }
}

const CLASS: u8 = 0b0000_0011;
const KNOWN: u8 = 0b0000_0100;
const IN_FLIGHT: u8 = 0b0000_1000;
/// What the destination was told of the block did not hold: its content travels as it is.
const WHOLE: u8 = 0b0001_0000;
/// A block written in this many passes running is hot.
const STREAK_HOT: u8 = 2;

#[derive(Debug, Clone, Copy)]
struct Block {
    /// What the destination has (if `KNOWN`) or will have once `sent_seq` is acknowledged.
    digest: Digest,
    /// The newest frame that this block was taken for; 0 before the first.
    sent_seq: u32,
    /// The low byte of the number of the last pass that reported a write.
    last_pass: u8,
    /// Passes running that reported a write.
    streak: u8,
    flags: u8,
    /// References to the block that are on their way.
    pins: u8,
}

/// The blocks of one region, as the source sees them.
#[derive(Debug)]
pub(crate) struct BlockMap {
    pending: Vec<u64>,
    blocks: Vec<Block>,
    counts: [u64; 4],
    cursors: [usize; 4],
}

impl BlockMap {
    /// A region of which every block is pending. Where the destination's blocks start as zero,
    /// that much is known of them.
    pub(crate) fn new(blocks: usize, starts_zero: bool) -> Self {
        let flags = Class::Cold as u8 | if starts_zero { KNOWN } else { 0 };
        let block = Block {
            digest: ZERO,
            sent_seq: 0,
            last_pass: 0,
            streak: 0,
            flags,
            pins: 0,
        };
        let mut pending = vec![u64::MAX; blocks.div_ceil(64)];
        if let (Some(last), used @ 1..) = (pending.last_mut(), blocks % 64) {
            *last = (1 << used) - 1;
        }
        let mut counts = [0; 4];
        counts[Class::Cold as usize] = blocks as u64;
        Self {
            pending,
            blocks: vec![block; blocks],
            counts,
            cursors: [0; 4],
        }
    }

    /// The search for blocks begins at this one, and goes once around.
    pub(crate) fn start_at(&mut self, index: usize) {
        self.cursors = [index / 64; 4];
    }

    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// How many blocks of a class are pending.
    pub(crate) fn pending(&self, class: Class) -> u64 {
        self.counts[class as usize]
    }

    pub(crate) fn pending_total(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn is_pending(&self, index: usize) -> bool {
        self.pending[index / 64] >> (index % 64) & 1 == 1
    }

    fn class(&self, index: usize) -> Class {
        Class::from_bits(self.blocks[index].flags)
    }

    fn set_pending(&mut self, index: usize, class: Class) {
        if self.is_pending(index) {
            self.counts[self.class(index) as usize] -= 1;
        } else {
            self.pending[index / 64] |= 1 << (index % 64);
        }
        self.counts[class as usize] += 1;
        let block = &mut self.blocks[index];
        block.flags = block.flags & !CLASS | class as u8;
    }

    fn clear_pending(&mut self, index: usize) {
        if self.is_pending(index) {
            self.pending[index / 64] &= !(1 << (index % 64));
            self.counts[self.class(index) as usize] -= 1;
        }
    }

    /// A pass reported writes to these blocks; one without a number reports every block.
    pub(crate) fn written(&mut self, range: BlockRange, pass: Option<u32>) {
        for index in range.blocks() {
            let index = index as usize;
            let block = &mut self.blocks[index];
            if let Some(now) = pass.map(|pass| pass as u8)
                && block.last_pass != now
            {
                let ran = block.last_pass == now.wrapping_sub(1) && block.last_pass != 0;
                block.streak = if ran {
                    block.streak.saturating_add(1)
                } else {
                    1
                };
                block.last_pass = now;
            }
            let class = match block.streak {
                0 => Class::Cold,
                streak if streak < STREAK_HOT => Class::Rest,
                _ => Class::Hot,
            };
            self.set_pending(index, class);
        }
    }

    /// A pass was read to its end: hot blocks that it did not report have cooled.
    pub(crate) fn pass_ended(&mut self, pass: u32) {
        if self.counts[Class::Hot as usize] == 0 {
            return;
        }
        for word in 0..self.pending.len() {
            let mut bits = self.pending[word];
            while bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                if self.class(index) == Class::Hot && self.blocks[index].last_pass != pass as u8 {
                    self.set_pending(index, Class::Rest);
                }
            }
        }
    }

    /// Somebody waits for this block.
    pub(crate) fn want(&mut self, index: usize) {
        if self.is_pending(index) {
            self.set_pending(index, Class::Wanted);
        }
    }

    /// Takes up to `max` pending blocks of a class out of the index, in ascending order from where
    /// the last search ended, and notes that frame `seq` carries them. Blocks that are on their
    /// way, or that a reference on its way means, wait for the acknowledgement unless `overtake`.
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
            let mut bits = self.pending[word];
            while bits != 0 {
                let index = word * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let Block { flags, pins, .. } = self.blocks[index];
                let waits = flags & IN_FLIGHT != 0 || pins > 0;
                if Class::from_bits(flags) != class || (waits && !overtake) {
                    continue;
                }
                self.clear_pending(index);
                let block = &mut self.blocks[index];
                block.flags |= IN_FLIGHT;
                block.sent_seq = seq;
                taken(index as u64);
                count += 1;
                if count == max {
                    self.cursors[class as usize] = word;
                    return count;
                }
            }
            if self.counts[class as usize] == 0 {
                break;
            }
        }
        self.cursors[class as usize] = start;
        count
    }

    /// Whether the destination has exactly this content for the block, as far as is known.
    pub(crate) fn holds(&self, index: usize, digest: &Digest) -> bool {
        let block = &self.blocks[index];
        block.flags & KNOWN != 0 && block.digest == *digest
    }

    /// What the destination has for the block, as far as is known.
    pub(crate) fn known(&self, index: usize) -> Option<Digest> {
        let block = &self.blocks[index];
        (block.flags & KNOWN != 0).then_some(block.digest)
    }

    /// Whether the block must travel as it is.
    pub(crate) fn is_whole(&self, index: usize) -> bool {
        self.blocks[index].flags & WHOLE != 0
    }

    /// Whether a reference may mean the block: nothing newer is on its way, and, where nothing can
    /// be made to wait any more (`overtake`), nothing newer will be.
    pub(crate) fn can_be_meant(&self, index: usize, overtake: bool) -> bool {
        let block = &self.blocks[index];
        let stays = block.flags & IN_FLIGHT == 0 && !(overtake && self.is_pending(index));
        stays && block.pins < u8::MAX
    }

    /// A reference to the block is on its way: it is not sent anew before that has arrived.
    pub(crate) fn pin(&mut self, index: usize) {
        self.blocks[index].pins += 1;
    }

    /// A reference to the block has arrived, or is lost.
    pub(crate) fn unpin(&mut self, index: usize) {
        self.blocks[index].pins -= 1;
    }

    /// The block need not travel: the destination has this content.
    pub(crate) fn skip(&mut self, index: usize, seq: u32) {
        let block = &mut self.blocks[index];
        if block.sent_seq == seq {
            block.flags &= !IN_FLIGHT;
        }
    }

    /// The block travels in frame `seq` with this content.
    pub(crate) fn sent(&mut self, index: usize, seq: u32, digest: Digest) {
        let block = &mut self.blocks[index];
        if block.sent_seq == seq {
            block.flags &= !KNOWN;
            block.digest = digest;
        }
    }

    /// Frame `seq` was applied. Returns what the destination has now, unless a newer frame
    /// carries the block.
    pub(crate) fn acknowledged(&mut self, index: usize, seq: u32) -> Option<Digest> {
        let block = &mut self.blocks[index];
        if block.sent_seq != seq {
            return None;
        }
        block.flags = block.flags & !(IN_FLIGHT | WHOLE) | KNOWN;
        Some(block.digest)
    }

    /// What frame `seq` carried for the block did not arrive: it is pending again. A block that a
    /// newer frame carries is left to that one.
    pub(crate) fn lost(&mut self, index: usize, seq: u32) {
        let block = &mut self.blocks[index];
        if block.sent_seq == seq {
            block.flags &= !(IN_FLIGHT | KNOWN);
            let class = if self.is_pending(index) {
                self.class(index)
            } else {
                Class::Rest
            };
            self.set_pending(index, class);
        }
    }

    /// The destination could not use what it was told of this block.
    pub(crate) fn rejected(&mut self, index: usize) {
        let block = &mut self.blocks[index];
        block.flags = block.flags & !(IN_FLIGHT | KNOWN) | WHOLE;
        block.sent_seq = 0;
        self.set_pending(index, Class::Rest);
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
}
