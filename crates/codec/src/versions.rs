//! The source's memory of the destination's block versions, from which deltas are made: not their
//! content but a short print of each part, a twentieth to a fifth of it.
//!
//! A part with an equal print is assumed to be unchanged. That is wrong once in 16 million changes
//! of a part; then the digest sent with the delta does not match the destination's result, and the
//! block is rejected and sent whole. So prints need neither a key nor secrecy: a guest that can
//! make them collide only makes its own blocks travel twice.
//!
//! Each block has one place in the table, which it may share with others. A block that was sent
//! again has a claim to the place; one that was sent once takes it when no other block has that
//! claim.

use crate::delta::{self, Words};
use crate::{BlockId, Digest};
use longhaul_protocol::BLOCK_SIZE;

/// Bytes in a print.
const PRINT: usize = 3;
/// The cost of a place besides its prints: the block, the version, the standing.
const OVERHEAD: usize = 17;
/// The initial standing of a block that was sent again, which is the number of other such blocks
/// that it resists; the gain of a use; and the limit.
const STANDING: u8 = 3;
const STANDING_USE: u8 = 2;
const STANDING_MAX: u8 = 7;

/// Odd numbers without a pattern: the fractions of the square roots of primes.
const FACTORS: [u64; 8] = [
    0x6a09_e667_f3bc_c909,
    0xbb67_ae85_84ca_a73b,
    0x3c6e_f372_fe94_f82b,
    0xa54f_f53a_5f1d_36f1,
    0x510e_527f_ade6_82d1,
    0x9b05_688c_2b3e_6c1f,
    0x1f83_d9ab_fb41_bd6b,
    0x5be0_cd19_137e_2179,
];
const LAST_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// The size of the parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parts {
    Bytes16,
    Bytes32,
    Bytes64,
}

impl Parts {
    const ALL: [Self; 3] = [Self::Bytes16, Self::Bytes32, Self::Bytes64];

    /// Returns the length of a block's prints, in bytes.
    const fn prints(self) -> usize {
        PRINT
            * match self {
                Self::Bytes16 => BLOCK_SIZE / 16,
                Self::Bytes32 => BLOCK_SIZE / 32,
                Self::Bytes64 => BLOCK_SIZE / 64,
            }
    }

    const fn place_bytes(self) -> usize {
        self.prints() + OVERHEAD
    }

    /// Returns the smallest parts with which half of the blocks have a place.
    fn fitting(bytes: usize, blocks: usize) -> Self {
        let fits = |parts: &Self| bytes / parts.place_bytes() >= blocks.div_ceil(2);
        Self::ALL.into_iter().find(fits).unwrap_or(Self::Bytes64)
    }
}

const PRINTS_MAX: usize = Parts::Bytes16.prints();

/// The table. Its memory is used only as it fills, up to its limit.
pub(crate) struct Versions {
    parts: Parts,
    /// The block in each place, as a number above 0.
    blocks: Vec<u64>,
    /// The first bytes of the digest of its version.
    tags: Vec<u64>,
    standing: Vec<u8>,
    prints: Vec<u8>,
    /// Prints of the block that is being sent.
    fresh: [u8; PRINTS_MAX],
}

impl Versions {
    /// Creates a table that uses at most `bytes`, for a memory of `blocks` blocks; there may be
    /// more.
    pub(crate) fn new(bytes: usize, blocks: usize) -> Self {
        let parts = Parts::fitting(bytes, blocks);
        let places = (bytes / parts.place_bytes()).min(blocks);
        Self {
            parts,
            blocks: vec![0; places],
            tags: vec![0; places],
            standing: vec![0; places],
            prints: vec![0; places * parts.prints()],
            fresh: [0; PRINTS_MAX],
        }
    }

    /// Records that a block is sent of which the destination held no version, or an unknown one.
    pub(crate) fn sent(&mut self, id: BlockId, digest: &Digest, content: &[u8; BLOCK_SIZE]) {
        let Some(place) = self.place(id) else { return };
        let held = self.blocks[place];
        if held == number(id) || self.standing[place] == 0 {
            self.print(content);
            self.put(place, id, digest);
        }
    }

    /// Records that a block is sent again, to a destination that holds its version `base`. Appends
    /// the delta to `out` if there is one. Returns whether there is.
    pub(crate) fn sent_again(
        &mut self,
        id: BlockId,
        base: &Digest,
        digest: &Digest,
        content: &[u8; BLOCK_SIZE],
        out: &mut Vec<u8>,
    ) -> bool {
        let Some(place) = self.place(id) else {
            return false;
        };
        self.print(content);
        let standing = self.standing[place];
        if self.blocks[place] != number(id) {
            match standing.checked_sub(1) {
                Some(less) => self.standing[place] = less,
                None => {
                    self.put(place, id, digest);
                    self.standing[place] = STANDING;
                }
            }
            return false;
        }
        let known = self.tags[place] == tag(base);
        let done = known && delta::encode(&self.words(place), content, out);
        self.put(place, id, digest);
        self.standing[place] = (standing + STANDING_USE).clamp(STANDING, STANDING_MAX);
        done
    }

    /// Forgets the version of a block.
    pub(crate) fn forget(&mut self, id: BlockId) {
        if let Some(place) = self.place(id)
            && self.blocks[place] == number(id)
        {
            self.blocks[place] = 0;
            self.standing[place] = 0;
        }
    }

    /// Returns a block's place; neighbours have neighbouring places.
    fn place(&self, id: BlockId) -> Option<usize> {
        let spread = u64::from(id.region.0).wrapping_mul(LAST_FACTOR >> 32);
        (id.block.wrapping_add(spread) as usize).checked_rem(self.blocks.len())
    }

    fn put(&mut self, place: usize, id: BlockId, digest: &Digest) {
        self.blocks[place] = number(id);
        self.tags[place] = tag(digest);
        let length = self.parts.prints();
        self.prints[place * length..][..length].copy_from_slice(&self.fresh[..length]);
    }

    fn print(&mut self, content: &[u8; BLOCK_SIZE]) {
        let prints = &mut self.fresh[..self.parts.prints()];
        match self.parts {
            Parts::Bytes16 => print::<2>(content, prints),
            Parts::Bytes32 => print::<4>(content, prints),
            Parts::Bytes64 => print::<8>(content, prints),
        }
    }

    /// Returns the words of the parts in which the block that is being sent differs from the
    /// remembered version.
    fn words(&self, place: usize) -> Words {
        let length = self.parts.prints();
        let known = &self.prints[place * length..][..length];
        let fresh = &self.fresh[..length];
        match self.parts {
            Parts::Bytes16 => words::<2>(known, fresh),
            Parts::Bytes32 => words::<4>(known, fresh),
            Parts::Bytes64 => words::<8>(known, fresh),
        }
    }
}

fn number(id: BlockId) -> u64 {
    (u64::from(id.region.0) << 40)
        .wrapping_add(id.block)
        .wrapping_add(1)
}

fn tag(digest: &Digest) -> u64 {
    let mut tag = [0; 8];
    tag.copy_from_slice(&digest.0[..8]);
    u64::from_le_bytes(tag)
}

/// Computes the prints of parts of `WORDS` words: the highest bits of a sum that depends on every
/// bit of the part. Four at a time, as four are written at once.
fn print<const WORDS: usize>(content: &[u8; BLOCK_SIZE], prints: &mut [u8]) {
    let parts = content.as_chunks::<8>().0.as_chunks::<WORDS>().0;
    let fours = parts.as_chunks::<4>().0;
    for (four, prints) in fours.iter().zip(prints.as_chunks_mut().0) {
        let [a, b, c, d] = four.each_ref().map(|part| sum(part) >> 40);
        let written: &mut [u8; 4 * PRINT] = prints;
        written[..8].copy_from_slice(&(a | b << 24 | c << 48).to_le_bytes());
        written[8..].copy_from_slice(&((c >> 16 | d << 8) as u32).to_le_bytes());
    }
}

#[inline(always)]
fn sum<const WORDS: usize>(part: &[[u8; 8]; WORDS]) -> u64 {
    part.iter().zip(FACTORS).fold(0, |sum, (word, factor)| {
        sum.wrapping_add(u64::from_le_bytes(*word).wrapping_mul(factor))
    })
}

fn words<const WORDS: usize>(known: &[u8], fresh: &[u8]) -> Words {
    let mut words = [0; 64];
    let known = known.as_chunks::<PRINT>().0;
    for (index, (known, fresh)) in known.iter().zip(fresh.as_chunks::<PRINT>().0).enumerate() {
        let first = index * WORDS;
        let bits = u8::MAX >> (8 - WORDS) << (first % 8);
        words[first / 8] |= if known == fresh { 0 } else { bits };
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::RegionId;
    use proptest::prelude::*;

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
        let mut block = [0; BLOCK_SIZE];
        let mut reader = blake3::Hasher::new();
        reader
            .update(&n.to_le_bytes())
            .finalize_xof()
            .fill(&mut block);
        block
    }

    /// Returns a table with 64-byte parts and this number of places.
    fn table(places: usize) -> Versions {
        let versions = Versions::new(places * Parts::Bytes64.place_bytes(), 1000 * places);
        assert_eq!(
            (versions.parts, versions.blocks.len()),
            (Parts::Bytes64, places)
        );
        versions
    }

    /// Sends version `to` of a block again, to a destination that holds `from`. Returns whether it
    /// is a delta.
    fn again(versions: &mut Versions, n: u64, from: u64, to: u64) -> bool {
        let mut content = block(n);
        content[(to as usize % 64) * 64] ^= to as u8 | 1;
        versions.sent_again(id(n), &digest(from), &digest(to), &content, &mut Vec::new())
    }

    #[test]
    fn parts_are_as_small_as_the_bound_allows() {
        let parts = |bytes, blocks| Versions::new(bytes, blocks).parts;
        assert_eq!(parts(100 << 20, 65536), Parts::Bytes16);
        assert_eq!(parts(20 << 20, 65536), Parts::Bytes32);
        assert_eq!(parts(20 << 20, 131_072), Parts::Bytes64);
        assert_eq!(parts(100, 131_072), Parts::Bytes64);
        let versions = Versions::new(20 << 20, 131_072);
        let held = versions.prints.len() + versions.blocks.len() * OVERHEAD;
        assert!((19 << 20..=20 << 20).contains(&held), "{held}");
        assert_eq!(
            Versions::new(1 << 30, 10).blocks.len(),
            10,
            "no more than are there"
        );
    }

    #[test]
    fn a_delta_needs_the_version_that_the_destination_holds() {
        let mut versions = table(100);
        assert!(!again(&mut versions, 1, 0, 1), "nothing is known");
        assert!(again(&mut versions, 1, 1, 2));
        assert!(!again(&mut versions, 1, 1, 3), "it was 2");
        assert!(again(&mut versions, 1, 3, 4));
        versions.forget(id(1));
        versions.forget(id(1));
        assert!(!again(&mut versions, 1, 4, 5));
        assert!(
            !again(&mut versions, 1, 5, 5),
            "no part has changed, and something has"
        );
        versions.sent(id(2), &digest(7), &block(2));
        assert!(again(&mut versions, 2, 7, 8), "sent once before");
    }

    #[test]
    fn without_room_nothing_is_kept() {
        let mut versions = Versions::new(50, 1000);
        versions.sent(id(1), &digest(1), &block(1));
        versions.forget(id(1));
        assert!(!again(&mut versions, 1, 1, 2) && !again(&mut versions, 1, 2, 3));
    }

    #[test]
    fn what_is_sent_again_outlives_what_was_sent_once() {
        let mut versions = table(10);
        versions.sent(id(1), &digest(1), &block(1));
        versions.sent(id(11), &digest(1), &block(11));
        assert!(
            again(&mut versions, 11, 1, 2),
            "the newer of two that were sent once"
        );
        for other in 2..100 {
            versions.sent(id(10 * other + 1), &digest(1), &block(5));
        }
        assert!(again(&mut versions, 11, 2, 3));
    }

    #[test]
    fn going_round_more_blocks_than_fit_still_finds_many() {
        let mut versions = table(100);
        let mut found = 0;
        for round in 0..20 {
            for n in 0..200 {
                found += u64::from(again(&mut versions, n, round, round + 1) && round >= 10);
            }
        }
        assert!(found >= 1000, "{found} of 2000");
    }

    #[test]
    fn versions_that_are_not_used_any_more_give_way() {
        let mut versions = table(100);
        for round in 0..20 {
            for n in 0..100 {
                again(&mut versions, n, round, round + 1);
            }
        }
        let mut found = 0;
        for round in 0..30 {
            for n in 1000..1100 {
                found += u64::from(again(&mut versions, n, round, round + 1) && round >= 20);
            }
        }
        assert_eq!(found, 1000);
    }

    #[test]
    fn prints_tell_small_changes_apart() {
        let mut content = block(1);
        let prints = |content: &[u8; BLOCK_SIZE]| {
            let mut prints = [0; 192];
            print::<8>(content, &mut prints);
            prints
        };
        let before = prints(&content);
        for byte in 0..BLOCK_SIZE {
            for change in [1, 0x80, 0xff] {
                content[byte] ^= change;
                let after = prints(&content);
                content[byte] ^= change;
                let differ = |part: usize| before[part * 3..][..3] != after[part * 3..][..3];
                assert!(
                    (0..64).all(|part| differ(part) == (part == byte / 64)),
                    "{byte}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn a_delta_brings_every_byte_that_has_changed(
            places in 1..4usize,
            writes in prop::collection::vec((0..BLOCK_SIZE, 1..80usize, any::<u8>()), 1..20),
        ) {
            let bytes = [0, 300, 500, 1000][places];
            let mut versions = Versions::new(bytes, 1);
            let base = block(9);
            let mut content = base;
            for (at, length, value) in writes {
                content[at..BLOCK_SIZE.min(at + length)].fill(value);
            }
            versions.sent(id(1), &digest(1), &base);
            let mut delta = Vec::new();
            if versions.sent_again(id(1), &digest(1), &digest(2), &content, &mut delta) {
                prop_assert_eq!(delta::length(&delta), Some(delta.len()));
                let mut made = base;
                delta::apply(&mut made, &delta);
                prop_assert!(made == content);
            } else {
                prop_assert!(content == base || versions.parts != Parts::Bytes16);
            }
        }
    }
}
