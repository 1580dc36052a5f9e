//! Identifies a block's content: as zero, or by a keyed 128-bit BLAKE3 digest, for many blocks at a
//! time.
//!
//! A digest is the first half of the ordinary keyed BLAKE3 hash of the block. BLAKE3's public
//! functions hash one block at a time and fill at most four lanes with it; `hash_many` fills all
//! lanes with different blocks and is nearly twice as fast. It is hidden from blake3's
//! documentation, so the workspace pins that crate's exact version, and a test here compares every
//! batch size with the public function.

use blake3::IncrementCounter;
use blake3::platform::{MAX_SIMD_DEGREE, Platform, words_from_le_bytes_32};
use longhaul_protocol::BLOCK_SIZE;
use std::fmt;

/// Bytes in one of BLAKE3's chunks, the leaves of its tree.
const CHUNK: usize = 1024;
/// Leaves in the tree of one block.
const CHUNKS: usize = BLOCK_SIZE / CHUNK;
/// Bytes in a chaining value, which a node of the tree passes to its parent.
const CV: usize = 32;

// The domain flags of BLAKE3's compression function (section 2.1 of its paper).
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 1 << 1;
const PARENT: u8 = 1 << 2;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// The keyed BLAKE3 hash of some content, truncated to 128 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 16]);

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The key of all digests of one migration, known only to its two agents.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct DigestKey(pub [u8; 32]);

/// Omits the key: with it, digests reveal a guest's content to a third party.
impl fmt::Debug for DigestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DigestKey(..)")
    }
}

/// The result of staging a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Staged {
    /// Every byte is zero.
    Zero,
    /// Some byte is not zero.
    Content(Digest),
}

/// Returns whether every byte of a block is zero.
pub fn is_zero(block: &[u8; BLOCK_SIZE]) -> bool {
    let (pieces, _) = block.as_chunks::<128>();
    pieces
        .iter()
        .all(|piece| piece.iter().fold(0, |all, byte| all | byte) == 0)
}

/// Returns a fast hash of content, to notice a change. Collisions can be made on purpose, and it
/// says something about the content, so it must not leave the host.
pub fn fingerprint(content: &[u8]) -> u64 {
    // Four sums in parallel: a single one would wait for itself at every step.
    let mut lanes = [1_u64, 2, 3, 4];
    let (words, _) = content.as_chunks::<8>();
    let (quads, _) = words.as_chunks::<4>();
    for quad in quads {
        for (lane, word) in lanes.iter_mut().zip(quad) {
            let mixed = (*lane ^ u64::from_le_bytes(*word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            *lane = mixed.rotate_left(29);
        }
    }
    lanes.iter().fold(0, |hash: u64, lane| {
        (hash.rotate_left(17) ^ lane).wrapping_mul(0xff51_afd7_ed55_8ccd)
    })
}

/// Digests blocks under one key, as many at a time as the processor has lanes.
#[derive(Clone)]
pub struct Hasher {
    platform: Platform,
    key: DigestKey,
    key_words: [u32; 8],
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hasher").finish_non_exhaustive()
    }
}

impl Hasher {
    /// Creates a hasher for one migration.
    pub fn new(key: DigestKey) -> Self {
        Self {
            platform: Platform::detect(),
            key,
            key_words: words_from_le_bytes_32(&key.0),
        }
    }

    /// Finds the zero blocks among `blocks` and digests the others; appends one result per block.
    pub fn stage(&self, blocks: &[[u8; BLOCK_SIZE]], staged: &mut Vec<Staged>) {
        let first = staged.len();
        let mut group: [(usize, &[u8; BLOCK_SIZE]); MAX_SIMD_DEGREE] =
            [(0, &[0; BLOCK_SIZE]); MAX_SIMD_DEGREE];
        let mut grouped = 0;
        let flush = |group: &[(usize, &[u8; BLOCK_SIZE])], staged: &mut Vec<Staged>| {
            self.digest_group(group.iter().map(|(_, block)| *block), |index, digest| {
                staged[first + group[index].0] = Staged::Content(digest);
            });
        };
        for (index, block) in blocks.iter().enumerate() {
            staged.push(Staged::Zero);
            if !is_zero(block) {
                group[grouped] = (index, block);
                grouped += 1;
            }
            if grouped == MAX_SIMD_DEGREE {
                flush(&group, staged);
                grouped = 0;
            }
        }
        flush(&group[..grouped], staged);
    }

    /// Digests every block, zero or not; appends one digest per block.
    pub fn digest_blocks(&self, blocks: &[[u8; BLOCK_SIZE]], digests: &mut Vec<Digest>) {
        for group in blocks.chunks(MAX_SIMD_DEGREE) {
            self.digest_group(group.iter(), |_, digest| digests.push(digest));
        }
    }

    /// Digests bytes of any length.
    pub fn digest(&self, bytes: &[u8]) -> Digest {
        cut(blake3::keyed_hash(&self.key.0, bytes).as_bytes())
    }

    /// Digests at most `MAX_SIMD_DEGREE` blocks, in parallel through every level of their trees.
    fn digest_group<'a>(
        &self,
        blocks: impl ExactSizeIterator<Item = &'a [u8; BLOCK_SIZE]> + Clone,
        mut each: impl FnMut(usize, Digest),
    ) {
        let count = blocks.len().min(MAX_SIMD_DEGREE);
        if count == 0 {
            return;
        }
        let mut leaves = [[[0; CV]; MAX_SIMD_DEGREE]; CHUNKS];
        for (index, leaves) in leaves.iter_mut().enumerate() {
            let mut inputs: [&[u8; CHUNK]; MAX_SIMD_DEGREE] = [&[0; CHUNK]; MAX_SIMD_DEGREE];
            for (input, block) in inputs.iter_mut().zip(blocks.clone()) {
                *input = &block.as_chunks().0[index];
            }
            self.platform.hash_many(
                &inputs[..count],
                &self.key_words,
                index as u64,
                IncrementCounter::No,
                KEYED_HASH,
                CHUNK_START,
                CHUNK_END,
                leaves.as_flattened_mut(),
            );
        }
        // Per block: the pair of its first two leaves, then the pair of its last two.
        let mut pairs = [[0; 2 * CV]; 2 * MAX_SIMD_DEGREE];
        for (index, pair) in pairs[..2 * count].iter_mut().enumerate() {
            let (block, half) = (index / 2, index % 2);
            pair[..CV].copy_from_slice(&leaves[2 * half][block]);
            pair[CV..].copy_from_slice(&leaves[2 * half + 1][block]);
        }
        let mut halves = [[0; 2 * CV]; MAX_SIMD_DEGREE];
        self.parents(&pairs[..2 * count], 0, halves.as_flattened_mut());
        let mut roots = [[0; CV]; MAX_SIMD_DEGREE];
        self.parents(&halves[..count], ROOT, roots.as_flattened_mut());
        for (index, root) in roots[..count].iter().enumerate() {
            each(index, cut(root));
        }
    }

    /// Hashes parent nodes (two chaining values each) into their chaining values.
    fn parents(&self, nodes: &[[u8; 2 * CV]], flags: u8, values: &mut [u8]) {
        let groups = nodes.chunks(MAX_SIMD_DEGREE);
        for (nodes, values) in groups.zip(values.chunks_mut(MAX_SIMD_DEGREE * CV)) {
            let mut inputs: [&[u8; 2 * CV]; MAX_SIMD_DEGREE] = [&[0; 2 * CV]; MAX_SIMD_DEGREE];
            for (input, node) in inputs.iter_mut().zip(nodes) {
                *input = node;
            }
            self.platform.hash_many(
                &inputs[..nodes.len()],
                &self.key_words,
                0,
                IncrementCounter::No,
                KEYED_HASH | PARENT | flags,
                0,
                0,
                values,
            );
        }
    }
}

/// Returns the digest of consecutive blocks, from the bytes of their digests. It needs no key:
/// those have one.
pub(crate) fn of_run(digests: &[u8]) -> Digest {
    cut(blake3::hash(digests).as_bytes())
}

fn cut(hash: &[u8; CV]) -> Digest {
    let mut digest = [0; 16];
    digest.copy_from_slice(&hash[..16]);
    Digest(digest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(seed: u64) -> [u8; BLOCK_SIZE] {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        std::array::from_fn(|_| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
    }

    #[test]
    fn any_byte_changes_a_fingerprint() {
        let mut content = [0_u8; BLOCK_SIZE];
        let zero = fingerprint(&content);
        for at in [0, 1, 9, 2048, 4095] {
            content[at] = 1;
            assert_ne!(fingerprint(&content), zero, "{at}");
            content[at] = 0;
        }
    }

    #[test]
    fn a_digest_is_half_of_the_public_keyed_hash_for_every_batch_size() {
        let key = DigestKey(std::array::from_fn(|i| i as u8));
        let hasher = Hasher::new(key);
        for count in 0..=3 * MAX_SIMD_DEGREE {
            let blocks: Vec<_> = (0..count as u64).map(block).collect();
            let mut digests = Vec::new();
            hasher.digest_blocks(&blocks, &mut digests);
            assert_eq!(digests.len(), count);
            for (block, digest) in blocks.iter().zip(&digests) {
                assert_eq!(digest.0, blake3::keyed_hash(&key.0, block).as_bytes()[..16]);
                assert_eq!(*digest, hasher.digest(block));
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn every_width_of_vectors_gives_the_same_digests() {
        let key = DigestKey([5; 32]);
        let blocks: Vec<_> = (0..37).map(block).collect();
        let widths = [
            Some(Platform::portable()),
            Platform::sse2(),
            Platform::sse41(),
            Platform::avx2(),
            Platform::avx512(),
        ];
        for platform in widths.into_iter().flatten() {
            let hasher = Hasher {
                platform,
                ..Hasher::new(key)
            };
            let mut digests = Vec::new();
            hasher.digest_blocks(&blocks, &mut digests);
            for (block, digest) in blocks.iter().zip(&digests) {
                assert_eq!(digest.0, blake3::keyed_hash(&key.0, block).as_bytes()[..16]);
            }
        }
    }

    #[test]
    fn one_byte_anywhere_makes_a_block_not_zero() {
        let mut block = [0; BLOCK_SIZE];
        assert!(is_zero(&block));
        for index in 0..BLOCK_SIZE {
            block[index] = 1 << (index % 8);
            assert!(!is_zero(&block), "byte {index}");
            block[index] = 0;
        }
    }

    #[test]
    fn a_key_does_not_show() {
        assert_eq!(format!("{:?}", DigestKey([7; 32])), "DigestKey(..)");
        assert!(!format!("{:?}", Hasher::new(DigestKey([7; 32]))).contains('7'));
    }

    proptest! {
        #[test]
        fn staging_answers_for_every_block_in_order(
            zero in prop::collection::vec(any::<bool>(), 0..70)
        ) {
            let hasher = Hasher::new(DigestKey([3; 32]));
            let blocks: Vec<_> = zero
                .iter()
                .enumerate()
                .map(|(index, zero)| if *zero { [0; BLOCK_SIZE] } else { block(index as u64 + 1) })
                .collect();
            let mut staged = vec![Staged::Zero];
            hasher.stage(&blocks, &mut staged);
            let expected = blocks.iter().zip(&zero).map(|(block, zero)| match zero {
                true => Staged::Zero,
                false => Staged::Content(hasher.digest(block)),
            });
            prop_assert_eq!(&staged[1..], &expected.collect::<Vec<_>>()[..]);
        }
    }
}
