//! Versions of blocks that the destination holds or will hold, kept at the source to send deltas
//! against: a cache with a bound.
//!
//! A version is only ever used when its digest is that of what the destination is known to hold, so
//! the cache may forget and may be behind. Each pass over a guest's memory goes over the same blocks
//! in the same order; a cache that always took the newest would then hold nothing when it is asked.
//! So a newcomer only takes the place of a version that others have come to and nobody has used for
//! some time.

use crate::{BlockId, Digest};
use longhaul_protocol::BLOCK_SIZE;
use std::collections::HashMap;

/// Versions in a piece of the store; it grows by pieces.
const PIECE: usize = 64;
/// What a version costs beside its content: its slot, and its place in the table.
const OVERHEAD: usize = 80;
/// How many newcomers a version stands when it is new, what a use adds to that, and the most.
const STANDING: u8 = 3;
const STANDING_USE: u8 = 2;
const STANDING_MAX: u8 = 7;

struct Slot {
    id: BlockId,
    digest: Digest,
    /// Newcomers that it still stands.
    standing: u8,
}

/// The cache. It grows with what it is given, up to its bound.
pub(crate) struct Versions {
    slots_max: usize,
    by_block: HashMap<BlockId, usize>,
    slots: Vec<Slot>,
    content: Vec<Box<[[u8; BLOCK_SIZE]]>>,
    free: Vec<usize>,
    /// The slot that the next newcomer looks at.
    hand: usize,
}

impl Versions {
    /// A cache that needs at most `bytes` of memory; with less than a block's it keeps nothing.
    pub(crate) fn new(bytes: usize) -> Self {
        let slots_max = bytes / (BLOCK_SIZE + OVERHEAD);
        Self {
            slots_max,
            by_block: HashMap::with_capacity(slots_max),
            slots: Vec::new(),
            content: Vec::new(),
            free: Vec::new(),
            hand: 0,
        }
    }

    /// The version of a block that has this digest.
    pub(crate) fn find(&mut self, id: BlockId, digest: &Digest) -> Option<&[u8; BLOCK_SIZE]> {
        let slot = *self.by_block.get(&id)?;
        let held = &mut self.slots[slot];
        if held.digest != *digest {
            return None;
        }
        held.standing = (held.standing + STANDING_USE).min(STANDING_MAX);
        Some(&self.content[slot / PIECE][slot % PIECE])
    }

    /// Keeps what is sent of a block, if there is a place for it.
    pub(crate) fn keep(&mut self, id: BlockId, digest: &Digest, content: &[u8; BLOCK_SIZE]) {
        if self.renew(id, digest, content) {
            return;
        }
        let newcomer = Slot {
            id,
            digest: *digest,
            standing: STANDING,
        };
        if let Some(slot) = self.place(newcomer) {
            self.by_block.insert(id, slot);
            self.content[slot / PIECE][slot % PIECE] = *content;
        }
    }

    /// Brings a block that is kept up to date; false when it is not kept.
    pub(crate) fn renew(
        &mut self,
        id: BlockId,
        digest: &Digest,
        content: &[u8; BLOCK_SIZE],
    ) -> bool {
        let Some(slot) = self.by_block.get(&id).copied() else {
            return false;
        };
        self.slots[slot].digest = *digest;
        self.content[slot / PIECE][slot % PIECE] = *content;
        true
    }

    /// Drops what is kept of a block.
    pub(crate) fn forget(&mut self, id: BlockId) {
        if let Some(slot) = self.by_block.remove(&id) {
            self.free.push(slot);
        }
    }

    /// Finds a slot for a newcomer, and gives it to it.
    fn place(&mut self, newcomer: Slot) -> Option<usize> {
        let slot = self.slots.len();
        if self.free.is_empty() && slot < self.slots_max {
            if slot.is_multiple_of(PIECE) {
                let piece = PIECE.min(self.slots_max - slot);
                self.content
                    .push(vec![[0; BLOCK_SIZE]; piece].into_boxed_slice());
            }
            self.slots.push(newcomer);
            return Some(slot);
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.make_room()?,
        };
        *self.slots.get_mut(slot)? = newcomer;
        Some(slot)
    }

    /// Puts somebody out for a newcomer, or makes him stand one less.
    fn make_room(&mut self) -> Option<usize> {
        let slot = self.hand;
        let held = self.slots.get_mut(slot)?;
        self.hand = (slot + 1) % self.slots_max;
        match held.standing.checked_sub(1) {
            Some(less) => {
                held.standing = less;
                None
            }
            None => {
                self.by_block.remove(&held.id);
                Some(slot)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::RegionId;

    fn id(block: u64) -> BlockId {
        BlockId {
            region: RegionId(1),
            block,
        }
    }

    fn digest(n: u64) -> Digest {
        Digest(std::array::from_fn(|i| (n >> (8 * (i % 8))) as u8))
    }

    fn block(n: u64) -> [u8; BLOCK_SIZE] {
        [n as u8; BLOCK_SIZE]
    }

    fn cache(blocks: usize) -> Versions {
        Versions::new(blocks * (BLOCK_SIZE + OVERHEAD))
    }

    #[test]
    fn a_version_is_found_by_its_digest_alone() {
        let mut versions = cache(100);
        versions.keep(id(1), &digest(1), &block(1));
        assert_eq!(versions.find(id(1), &digest(1)), Some(&block(1)));
        assert_eq!(versions.find(id(1), &digest(2)), None);
        assert_eq!(versions.find(id(2), &digest(1)), None);
        versions.keep(id(1), &digest(2), &block(2));
        assert_eq!(versions.find(id(1), &digest(1)), None);
        assert_eq!(versions.find(id(1), &digest(2)), Some(&block(2)));
        assert!(!versions.renew(id(2), &digest(1), &block(1)));
        assert_eq!(versions.find(id(2), &digest(1)), None);
    }

    #[test]
    fn the_bound_holds_and_what_is_forgotten_makes_room() {
        let mut versions = cache(70);
        for n in 0..1000 {
            versions.keep(id(n), &digest(n), &block(n));
        }
        assert_eq!((versions.slots.len(), versions.by_block.len()), (70, 70));
        let held: usize = versions.content.iter().map(|piece| piece.len()).sum();
        assert_eq!(held, 70);
        let (kept, _) = versions.by_block.iter().next().unwrap();
        let kept = *kept;
        versions.forget(kept);
        versions.forget(kept);
        assert_eq!(versions.by_block.len(), 69);
        versions.keep(id(5000), &digest(5), &block(5));
        assert_eq!(versions.find(id(5000), &digest(5)), Some(&block(5)));
        assert_eq!((versions.slots.len(), versions.by_block.len()), (70, 70));
        assert!(versions.free.is_empty());
    }

    #[test]
    fn nothing_is_kept_without_room() {
        let mut versions = Versions::new(BLOCK_SIZE);
        versions.keep(id(1), &digest(1), &block(1));
        assert_eq!(versions.find(id(1), &digest(1)), None);
        assert!(versions.content.is_empty());
    }

    #[test]
    fn going_round_more_blocks_than_fit_still_finds_many() {
        let mut versions = cache(100);
        let mut found = 0;
        for round in 0..20 {
            for n in 0..300 {
                found += u64::from(round >= 10 && versions.find(id(n), &digest(n)).is_some());
                versions.keep(id(n), &digest(n), &block(n));
            }
        }
        assert!(found >= 90 * 10, "{found} of 3000, 1000 are possible");
    }

    #[test]
    fn versions_that_are_not_used_any_more_give_way() {
        let mut versions = cache(100);
        for _ in 0..20 {
            for n in 0..100 {
                versions.find(id(n), &digest(n));
                versions.keep(id(n), &digest(n), &block(n));
            }
        }
        let mut found = 0;
        for round in 0..30 {
            for n in 1000..1100 {
                found += u64::from(round >= 20 && versions.find(id(n), &digest(n)).is_some());
                versions.keep(id(n), &digest(n), &block(n));
            }
        }
        assert_eq!(found, 1000);
    }
}
