//! The encoding of missing blocks in the lists that the two agents exchange while a guest runs at
//! the destination.

use crate::chunk::{self, CHUNK_BLOCKS};
use longhaul_protocol::BlockRange;
use std::collections::BTreeMap;
use std::ops::Range;

pub use longhaul_protocol::disk::{List, Remaining};

/// Returns whether the entries are in ascending order, do not overlap, and lie within these chunks.
pub(crate) fn are_within(parts: &[Remaining], chunks: &Range<u32>) -> bool {
    let mut next = chunks.start;
    parts.iter().all(|part| {
        let end = part.chunk.checked_add(part.chunks);
        let fits = part.chunk >= next && end.is_some_and(|end| end <= chunks.end);
        next = end.unwrap_or(u32::MAX);
        fits
    })
}

/// Collects the missing blocks of chunks, each given by its mask and its write count, into at most
/// `entries_max` entries. Also returns where the next part begins, if there is one.
pub(crate) fn collect(
    chunks: Range<u32>,
    entries_max: usize,
    of: impl Fn(usize) -> (u64, u16),
) -> (Vec<Remaining>, Option<u32>) {
    let mut remaining: Vec<Remaining> = Vec::new();
    for chunk in chunks {
        let (mask, written_blocks) = of(chunk as usize);
        if let Some(last) = remaining.last_mut()
            && is_followed_by(last, chunk, mask, written_blocks)
        {
            last.chunks += 1;
            continue;
        }
        if mask == 0 {
            continue;
        }
        if remaining.len() == entries_max {
            return (remaining, Some(chunk));
        }
        remaining.push(Remaining {
            chunk,
            chunks: 1,
            mask,
            written_blocks,
        });
    }
    (remaining, None)
}

/// Returns the blocks of these entries, in as few ranges as possible. Entries in ascending order
/// give ranges in ascending order.
pub fn ranges(parts: &[Remaining], blocks: u64) -> Vec<BlockRange> {
    let mut ranges: Vec<BlockRange> = Vec::new();
    for part in parts {
        for chunk in part.chunk..part.chunk.saturating_add(part.chunks) {
            let chunk = chunk as usize;
            for run in chunk::runs(chunk, part.mask & chunk::whole(chunk, blocks)) {
                match ranges.last_mut() {
                    Some(last) if last.end() == run.start => last.count += run.count,
                    _ => ranges.push(run),
                }
            }
        }
    }
    ranges
}

/// Returns the entries that name these blocks of a region.
pub fn of_ranges(ranges: &[BlockRange], blocks: u64) -> Vec<Remaining> {
    let mut masks: BTreeMap<usize, u64> = BTreeMap::new();
    let pieces = ranges.iter().flat_map(|range| chunk::pieces(*range));
    pieces.for_each(|(chunk, mask)| *masks.entry(chunk).or_default() |= mask);
    let chunks = 0..blocks.div_ceil(CHUNK_BLOCKS) as u32;
    let of = |chunk: usize| (masks.get(&chunk).copied().unwrap_or(0), 0);
    collect(chunks, usize::MAX, of).0
}

fn is_followed_by(part: &Remaining, chunk: u32, mask: u64, written_blocks: u16) -> bool {
    (part.mask, part.written_blocks) == (mask, written_blocks) && part.chunk + part.chunks == chunk
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_chunks_are_named_together_and_lists_are_cut() {
        let of = |chunk: usize| match chunk {
            0..3 => (7, 1),
            3 => (7, 2),
            4 => (0, 9),
            _ => (7, 2),
        };
        let part = |chunk, chunks, written_blocks| Remaining {
            chunk,
            chunks,
            mask: 7,
            written_blocks,
        };
        let (all, next) = collect(0..10, 99, of);
        assert_eq!(all, [part(0, 3, 1), part(3, 1, 2), part(5, 5, 2)]);
        assert_eq!(next, None);
        let (first, next) = collect(0..10, 2, of);
        assert_eq!((first.len(), next), (2, Some(5)));
        let (rest, next) = collect(5..10, 2, of);
        assert_eq!((rest, next), (vec![part(5, 5, 2)], None));
    }

    #[test]
    fn what_overflows_is_not_within() {
        let part = Remaining {
            chunk: 5,
            chunks: u32::MAX,
            mask: 1,
            written_blocks: 0,
        };
        assert!(!are_within(&[part], &(0..u32::MAX)));
    }

    #[test]
    fn parts_are_in_order_and_do_not_overlap() {
        let part = |chunk, chunks| Remaining {
            chunk,
            chunks,
            mask: 1,
            written_blocks: 0,
        };
        let within = |parts: &[Remaining]| are_within(parts, &(2..10));
        assert!(within(&[]) && within(&[part(2, 3), part(5, 5)]));
        for parts in [
            [part(1, 1), part(5, 1)],
            [part(5, 2), part(6, 1)],
            [part(5, 1), part(3, 1)],
            [part(5, 1), part(9, 2)],
        ] {
            assert!(!within(&parts), "{parts:?}");
        }
    }

    #[test]
    fn blocks_are_named_in_few_ranges_and_back() {
        let part = |chunk, chunks, mask| Remaining {
            chunk,
            chunks,
            mask,
            written_blocks: 0,
        };
        let blocks = 4 * CHUNK_BLOCKS + 1;
        let parts = [
            part(0, 1, 0b101),
            part(1, 2, u64::MAX),
            part(3, 1, 1),
            part(4, 1, u64::MAX),
        ];
        let range = BlockRange::new;
        let named = [
            range(0, 1),
            range(2, 1),
            range(CHUNK_BLOCKS, 2 * CHUNK_BLOCKS + 1),
            range(4 * CHUNK_BLOCKS, 1),
        ];
        assert_eq!(ranges(&parts, blocks), named);
        let back = of_ranges(&named, blocks);
        assert_eq!(back[..2], parts[..2]);
        // Of the last chunk only the block that is there: it is like the chunk before.
        assert_eq!(back[2..], [part(3, 2, 1)]);
    }
}
