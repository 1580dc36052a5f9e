//! Indexes that find a block of the destination by its content.
//!
//! Both are caches: entries may be stale or evicted. Where a region has records with digests, an
//! entry of [`ContentIndex`] takes 4 bytes, and the caller compares the digest before it relies on
//! the entry. Disks have no such records: an entry of [`TaggedIndex`] holds 32 bits of the digest
//! as well, and the destination compares.

use longhaul_codec::Digest;

const WAYS: usize = 4;
const EMPTY: u32 = u32::MAX;

/// Block numbers by digest.
#[derive(Debug)]
pub(crate) struct ContentIndex {
    slots: Vec<u32>,
}

impl ContentIndex {
    /// Creates an index for this number of blocks.
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

    /// Returns the block with this content if `holds` confirms it.
    pub(crate) fn find(&self, digest: &Digest, holds: impl Fn(u32) -> bool) -> Option<u32> {
        let bucket = self.bucket(digest);
        let slots = &self.slots[bucket..bucket + WAYS];
        slots
            .iter()
            .copied()
            .find(|block| *block != EMPTY && holds(*block))
    }

    /// Records that a block has this content; `holds` says whether another block has it too.
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

/// Limit on the slots of a [`TaggedIndex`]: 16 MiB, for 8 GiB of content.
const TAGGED_MAX: usize = 1 << 21;

/// A block, counted from 1, and a tag that separates its content from others in its bucket; 0 is an
/// empty slot.
#[derive(Debug, Clone, Copy, Default)]
struct Tagged {
    tag: u32,
    block: u32,
}

/// Block numbers by digest, for blocks without stored digests: 8 bytes each.
#[derive(Debug, Default)]
pub(crate) struct TaggedIndex {
    slots: Vec<Tagged>,
}

impl TaggedIndex {
    /// Returns whether the index has any slots.
    pub(crate) fn is_open(&self) -> bool {
        !self.slots.is_empty()
    }

    /// Allocates slots for this number of blocks, up to the limit.
    pub(crate) fn open(&mut self, blocks: u64) {
        let wanted = usize::try_from(blocks + blocks / 4).unwrap_or(usize::MAX);
        let slots = wanted.clamp(WAYS, TAGGED_MAX).next_power_of_two();
        self.slots = vec![Tagged::default(); slots];
    }

    /// Returns the first slot of a digest's bucket, and the digest's tag.
    fn place(&self, digest: &Digest) -> (usize, u32) {
        let [low, tag, ..] = *digest.0.as_chunks::<4>().0 else {
            return (0, 0);
        };
        let buckets = (self.slots.len() / WAYS).max(1);
        let bucket = u32::from_le_bytes(low) as usize & (buckets - 1);
        (bucket * WAYS, u32::from_le_bytes(tag))
    }

    /// Returns a block that probably has this content and that `fits` accepts.
    pub(crate) fn find(&self, digest: &Digest, fits: impl Fn(u32) -> bool) -> Option<u32> {
        let (bucket, tag) = self.place(digest);
        let slots = self.slots.get(bucket..bucket + WAYS)?;
        let same = slots
            .iter()
            .filter(|slot| slot.block > 0 && slot.tag == tag);
        let mut blocks = same.map(|slot| slot.block - 1);
        blocks.find(|block| fits(*block))
    }

    /// Records that a block has this content; `stays` says whether the block of an existing entry
    /// still has it.
    pub(crate) fn insert(&mut self, digest: &Digest, block: u32, stays: impl Fn(u32) -> bool) {
        let (bucket, tag) = self.place(digest);
        let Some(slots) = self.slots.get_mut(bucket..bucket + WAYS) else {
            return;
        };
        let new = Tagged {
            tag,
            block: block.saturating_add(1),
        };
        let same = slots
            .iter_mut()
            .find(|slot| slot.block > 0 && slot.tag == tag);
        if let Some(same) = same {
            if !stays(same.block - 1) {
                *same = new;
            }
            return;
        }
        let free = slots
            .iter()
            .position(|slot| slot.block == 0 || slot.block == new.block);
        slots[free.unwrap_or(usize::from(digest.0[8]) % WAYS)] = new;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u64) -> Digest {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        bytes[8] = n as u8;
        Digest(bytes)
    }

    #[test]
    fn a_tagged_block_is_found_until_another_takes_its_place() {
        let mut index = TaggedIndex::default();
        index.insert(&digest(1), 7, |_| true);
        assert_eq!(
            index.find(&digest(1), |_| true),
            None,
            "there is no room yet"
        );
        index.open(100);
        index.insert(&digest(1), 0, |_| true);
        assert_eq!(index.find(&digest(1), |_| true), Some(0));
        assert_eq!(index.find(&digest(1), |_| false), None);
        assert_eq!(index.find(&digest(2), |_| true), None);
        index.insert(&digest(1), 9, |_| true);
        assert_eq!(
            index.find(&digest(1), |_| true),
            Some(0),
            "which still has it"
        );
        index.insert(&digest(1), 9, |block| block != 0);
        assert_eq!(index.find(&digest(1), |_| true), Some(9));
    }

    #[test]
    fn a_tagged_index_never_grows() {
        let mut index = TaggedIndex::default();
        index.open(u64::MAX / 2);
        assert_eq!(index.slots.len(), TAGGED_MAX);
        index.open(1000);
        let size = index.slots.len();
        (0..20_000).for_each(|n| index.insert(&digest(n), n as u32, |_| true));
        assert_eq!(index.slots.len(), size);
        let found = |n: &u64| index.find(&digest(*n), |_| true) == Some(*n as u32);
        assert!((0..20_000).filter(found).count() > size * 3 / 4);
    }

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
