//! What is still at the source when a guest goes on at the destination, as the two sides tell each
//! other.

use longhaul_protocol::RegionId;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The same blocks of consecutive chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remaining {
    /// The first chunk.
    pub chunk: u32,
    /// How many chunks.
    pub chunks: u32,
    /// Which blocks of each, the first in the lowest bit. Bits beyond the region's end mean nothing.
    pub mask: u64,
    /// How much was written to each since the migration began, in blocks, up to 65535: what was
    /// written most travels first.
    pub written_blocks: u16,
}

impl Remaining {
    /// Whether these are in ascending order, without overlap, and within these chunks.
    pub(crate) fn are_within(parts: &[Self], chunks: &Range<u32>) -> bool {
        let mut next = chunks.start;
        parts.iter().all(|part| {
            let end = part.chunk.checked_add(part.chunks);
            let fits = part.chunk >= next && end.is_some_and(|end| end <= chunks.end);
            next = end.unwrap_or(u32::MAX);
            fits
        })
    }

    /// What is left of these chunks, each given by its mask and what was written to it, in at most so
    /// many entries; and where it goes on, if that is not the end.
    pub(crate) fn collect(
        chunks: Range<u32>,
        entries_max: usize,
        of: impl Fn(usize) -> (u64, u16),
    ) -> (Vec<Self>, Option<u32>) {
        let mut remaining: Vec<Self> = Vec::new();
        for chunk in chunks {
            let (mask, written_blocks) = of(chunk as usize);
            if let Some(last) = remaining.last_mut()
                && last.is_followed_by(chunk, mask, written_blocks)
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
            remaining.push(Self {
                chunk,
                chunks: 1,
                mask,
                written_blocks,
            });
        }
        (remaining, None)
    }

    fn is_followed_by(&self, chunk: u32, mask: u64, written_blocks: u16) -> bool {
        (self.mask, self.written_blocks) == (mask, written_blocks)
            && self.chunk + self.chunks == chunk
    }
}

/// A part of the list of what is left of one region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The region.
    pub region: RegionId,
    /// Where this part begins: the first one at 0.
    pub from_chunk: u32,
    /// Frames from this number on bring what the list names; older ones brought it before it was
    /// written again.
    pub from_seq: u64,
    /// What is left, in ascending order.
    pub remaining: Vec<Remaining>,
    /// Where the next part begins; none when this is the last one.
    pub next_chunk: Option<u32>,
}

impl List {
    /// Nothing is left: whatever comes, came before.
    pub fn nothing(region: RegionId) -> Self {
        Self {
            region,
            from_chunk: 0,
            from_seq: u64::MAX,
            remaining: Vec::new(),
            next_chunk: None,
        }
    }

    /// How many blocks it names.
    pub fn blocks(&self) -> u64 {
        let blocks = |part: &Remaining| u64::from(part.mask.count_ones()) * u64::from(part.chunks);
        self.remaining.iter().map(blocks).sum()
    }
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
        let (all, next) = Remaining::collect(0..10, 99, of);
        assert_eq!(all, [part(0, 3, 1), part(3, 1, 2), part(5, 5, 2)]);
        assert_eq!(next, None);
        let (first, next) = Remaining::collect(0..10, 2, of);
        assert_eq!((first.len(), next), (2, Some(5)));
        let (rest, next) = Remaining::collect(5..10, 2, of);
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
        assert!(!Remaining::are_within(&[part], &(0..u32::MAX)));
    }

    #[test]
    fn parts_are_in_order_and_do_not_overlap() {
        let part = |chunk, chunks| Remaining {
            chunk,
            chunks,
            mask: 1,
            written_blocks: 0,
        };
        let within = |parts: &[Remaining]| Remaining::are_within(parts, &(2..10));
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
}
