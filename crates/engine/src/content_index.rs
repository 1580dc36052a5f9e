//! Finds a block of the destination by its content, in about 5 bytes a block.
//!
//! A cache: an entry names a block, never a digest, and is only believed after the caller has
//! compared the digest that it keeps for that block. So entries may be stale, or pushed out.

use longhaul_codec::Digest;

const WAYS: usize = 4;
const EMPTY: u32 = u32::MAX;

/// Block numbers by digest.
#[derive(Debug)]
pub(crate) struct ContentIndex {
    slots: Vec<u32>,
}

impl ContentIndex {
    /// An index for that many blocks.
    pub(crate) fn new(blocks: usize) -> Self {
        let buckets = (blocks + blocks / 4).div_ceil(WAYS).next_power_of_two();
        Self {
            slots: vec![EMPTY; buckets * WAYS],
        }
    }

    fn bucket(&self, digest: &Digest) -> usize {
        let mut low = [0; 8];
        low.copy_from_slice(&digest.0[..8]);
        (u64::from_le_bytes(low) as usize & (self.slots.len() / WAYS - 1)) * WAYS
    }

    /// The block with this content, if `holds` confirms one.
    pub(crate) fn find(&self, digest: &Digest, holds: impl Fn(u32) -> bool) -> Option<u32> {
        let bucket = self.bucket(digest);
        let slots = &self.slots[bucket..bucket + WAYS];
        slots
            .iter()
            .copied()
            .find(|block| *block != EMPTY && holds(*block))
    }

    /// Notes that a block has this content; `holds` says whether another one has it too.
    pub(crate) fn insert(&mut self, digest: &Digest, block: u32, holds: impl Fn(u32) -> bool) {
        if self.find(digest, holds).is_some() {
            return;
        }
        let bucket = self.bucket(digest);
        let slots = &mut self.slots[bucket..bucket + WAYS];
        let free = slots
            .iter()
            .position(|slot| *slot == EMPTY || *slot == block);
        slots[free.unwrap_or(usize::from(digest.0[8]) % WAYS)] = block;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_confirmed_block_is_found_and_a_stale_one_is_not() {
        let mut index = ContentIndex::new(100);
        let digest = Digest([7; 16]);
        index.insert(&digest, 42, |_| false);
        assert_eq!(index.find(&digest, |block| block == 42), Some(42));
        assert_eq!(index.find(&digest, |_| false), None);
        assert_eq!(index.find(&Digest([8; 16]), |_| true), None);
    }

    #[test]
    fn a_full_bucket_forgets_but_never_grows() {
        let mut index = ContentIndex::new(4);
        let size = index.slots.len();
        for block in 0..1000 {
            index.insert(&Digest([(block % 251) as u8; 16]), block, |_| false);
        }
        assert_eq!(index.slots.len(), size);
    }
}
