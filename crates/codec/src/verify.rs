//! Comparing a whole region at both ends: digests of chunks first, of blocks where they differ.

use crate::{Digest, DigestKey, Hasher};
use longhaul_protocol::BLOCK_SIZE;

/// Blocks in a chunk of a comparison (1 MiB); the last chunk of a region may be shorter.
pub const CHUNK_BLOCKS: u64 = 256;

/// Digests a region, whose content is fed from its first block to its last.
#[derive(Debug)]
pub struct RegionHasher {
    hasher: Hasher,
    chunks: Vec<Digest>,
}

impl RegionHasher {
    /// Starts on a region's first chunk.
    pub fn new(key: DigestKey) -> Self {
        Self {
            hasher: Hasher::new(key),
            chunks: Vec::new(),
        }
    }

    /// Takes in the next chunk: [`CHUNK_BLOCKS`] blocks, fewer only at the end of the region.
    pub fn chunk(&mut self, content: &[u8]) {
        self.chunks.push(self.hasher.digest(content));
    }

    /// The digests of all chunks, in order.
    pub fn finish(self) -> Vec<Digest> {
        self.chunks
    }

    /// The digests of a chunk's blocks, for a chunk that was found to differ.
    pub fn blocks(key: DigestKey, chunk: &[[u8; BLOCK_SIZE]]) -> Vec<Digest> {
        let mut digests = Vec::with_capacity(chunk.len());
        Hasher::new(key).digest_blocks(chunk, &mut digests);
        digests
    }
}

/// Where two copies of a region differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Difference {
    /// The first block that differs, counted from the start of the region.
    pub first_block: u64,
    /// How many blocks differ.
    pub blocks: u64,
}

impl Difference {
    /// Bytes from the start of the region to the first block that differs.
    pub fn offset(&self) -> u64 {
        self.first_block * BLOCK_SIZE as u64
    }

    /// Both differences as one; they must be of different blocks.
    pub fn merge(self, other: Self) -> Self {
        Self {
            first_block: self.first_block.min(other.first_block),
            blocks: self.blocks + other.blocks,
        }
    }
}

/// The indices at which two lists of digests differ; what only one of them has differs too.
pub fn differing_chunks(ours: &[Digest], theirs: &[Digest]) -> Vec<u64> {
    (0..ours.len().max(theirs.len()))
        .filter(|index| ours.get(*index) != theirs.get(*index))
        .map(|index| index as u64)
        .collect()
}

/// Where the blocks of one chunk differ; `None` when they do not.
pub fn differing_blocks(chunk: u64, ours: &[Digest], theirs: &[Digest]) -> Option<Difference> {
    let blocks = differing_chunks(ours, theirs);
    let first = blocks.first()?;
    Some(Difference {
        first_block: chunk * CHUNK_BLOCKS + first,
        blocks: blocks.len() as u64,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_region(key: DigestKey, region: &[[u8; BLOCK_SIZE]]) -> Vec<Digest> {
        let mut hasher = RegionHasher::new(key);
        for chunk in region.chunks(CHUNK_BLOCKS as usize) {
            hasher.chunk(chunk.as_flattened());
        }
        hasher.finish()
    }

    fn difference(ours: &[[u8; BLOCK_SIZE]], theirs: &[[u8; BLOCK_SIZE]]) -> Option<Difference> {
        let key = DigestKey([9; 32]);
        let chunks = differing_chunks(&digest_region(key, ours), &digest_region(key, theirs));
        let differences = chunks.into_iter().filter_map(|chunk| {
            let start = (chunk * CHUNK_BLOCKS) as usize;
            let end = ours.len().min(start + CHUNK_BLOCKS as usize);
            let ours = RegionHasher::blocks(key, &ours[start..end]);
            differing_blocks(
                chunk,
                &ours,
                &RegionHasher::blocks(key, &theirs[start..end]),
            )
        });
        differences.reduce(Difference::merge)
    }

    #[test]
    fn single_bits_are_found_with_block_offset_and_count() {
        let blocks = 2 * CHUNK_BLOCKS as usize + 7;
        let ours: Vec<_> = (0..blocks).map(|block| [block as u8; BLOCK_SIZE]).collect();
        let mut theirs = ours.clone();
        assert_eq!(difference(&ours, &theirs), None);
        theirs[blocks - 1][BLOCK_SIZE - 1] ^= 0x80;
        let found = difference(&ours, &theirs);
        assert_eq!(
            found,
            Some(Difference {
                first_block: blocks as u64 - 1,
                blocks: 1
            })
        );
        theirs[300][0] ^= 1;
        theirs[3][4000] ^= 1;
        let found = difference(&ours, &theirs).expect("they differ");
        assert_eq!(
            found,
            Difference {
                first_block: 3,
                blocks: 3
            }
        );
        assert_eq!(found.offset(), 3 * 4096);
    }

    #[test]
    fn a_missing_chunk_differs() {
        let digests = [Digest([1; 16]), Digest([2; 16])];
        assert_eq!(differing_chunks(&digests, &digests[..1]), [1]);
        assert_eq!(differing_chunks(&digests[..1], &digests), [1]);
    }
}
