//! Chunks: 64 blocks or 256 KiB, one word of a mask. Decisions on disks are made per chunk.

use longhaul_protocol::BlockRange;

/// Blocks per chunk.
pub const CHUNK_BLOCKS: u64 = 64;

/// Returns the number of chunks in a region of `blocks` blocks.
pub(crate) fn count(blocks: u64) -> usize {
    blocks.div_ceil(CHUNK_BLOCKS) as usize
}

/// Returns the chunk of a block.
pub(crate) fn of(block: u64) -> usize {
    (block / CHUNK_BLOCKS) as usize
}

/// Returns a block's bit in the mask of its chunk.
pub(crate) fn bit(block: u64) -> u64 {
    1 << (block % CHUNK_BLOCKS)
}

/// Returns the mask of all blocks of a chunk; the last chunk of a region may have fewer than 64.
pub(crate) fn whole(chunk: usize, blocks: u64) -> u64 {
    let here = blocks.saturating_sub(chunk as u64 * CHUNK_BLOCKS);
    low(here.min(CHUNK_BLOCKS))
}

/// Returns the chunks that a range touches, each with the mask of the touched blocks.
pub fn pieces(range: BlockRange) -> impl Iterator<Item = (usize, u64)> {
    let first = range.start / CHUNK_BLOCKS;
    let last = range.end().div_ceil(CHUNK_BLOCKS);
    let parts = (first..last).map(move |chunk| {
        let base = chunk * CHUNK_BLOCKS;
        let from = range.start.saturating_sub(base);
        let to = (range.end() - base).min(CHUNK_BLOCKS);
        (chunk as usize, low(to) & !low(from))
    });
    parts.filter(|(_, mask)| *mask != 0)
}

/// Returns the runs of set bits in a chunk's mask as ranges of blocks.
pub(crate) fn runs(chunk: usize, mask: u64) -> impl Iterator<Item = BlockRange> {
    let base = chunk as u64 * CHUNK_BLOCKS;
    let mut left = mask;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let start = u64::from(left.trailing_zeros());
        let count = u64::from((left >> start).trailing_ones());
        left &= !(low(start + count) & !low(start));
        Some(BlockRange::new(base + start, count))
    })
}

/// Returns a word with the lowest `bits` bits set.
fn low(bits: u64) -> u64 {
    match bits {
        64.. => u64::MAX,
        bits => (1 << bits) - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_at_chunks() {
        let cut = |start, count| pieces(BlockRange::new(start, count)).collect::<Vec<_>>();
        assert_eq!(cut(0, 64), [(0, u64::MAX)]);
        assert_eq!(cut(63, 2), [(0, 1 << 63), (1, 1)]);
        assert_eq!(cut(130, 3), [(2, 0b11100)]);
        assert_eq!(cut(5, 0), []);
    }

    #[test]
    fn a_mask_is_made_of_runs() {
        let of = |mask| runs(1, mask).collect::<Vec<_>>();
        assert_eq!(of(0), []);
        assert_eq!(of(u64::MAX), [BlockRange::new(64, 64)]);
        let two = [BlockRange::new(65, 2), BlockRange::new(127, 1)];
        assert_eq!(of(0b110 | 1 << 63), two);
    }

    #[test]
    fn the_last_chunk_may_be_short() {
        assert_eq!(count(65), 2);
        assert_eq!((whole(0, 65), whole(1, 65)), (u64::MAX, 1));
    }
}
