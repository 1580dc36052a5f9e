//! Stores a hash of every page as last read for sending, for a QEMU that does not see all writes.

use longhaul_codec::fingerprint;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::sync::atomic::{AtomicU64, Ordering};

/// Marks a page that was not read.
const UNREAD: u64 = 0;

/// A hash of each page of each block, as last read.
#[derive(Debug)]
pub(crate) struct Fingerprints {
    blocks: Vec<Vec<AtomicU64>>,
}

impl Fingerprints {
    /// Creates the table for blocks of these lengths, with all pages unread.
    pub(crate) fn new(lengths: impl Iterator<Item = u64>) -> Self {
        let none = |length| (0..length).map(|_| AtomicU64::new(UNREAD)).collect();
        Self {
            blocks: lengths.map(none).collect(),
        }
    }

    /// Forgets all pages.
    pub(crate) fn clear(&self) {
        let all = self.blocks.iter().flatten();
        all.for_each(|page| page.store(UNREAD, Ordering::Relaxed));
    }

    /// Records that these pages of a block were read, with this content.
    pub(crate) fn remember(&self, block: usize, ranges: &[BlockRange], content: &[u8]) {
        let Some(known) = self.blocks.get(block) else {
            return;
        };
        let pages = ranges.iter().flat_map(BlockRange::blocks);
        for (page, content) in pages.zip(content.chunks(BLOCK_SIZE)) {
            if let Some(known) = known.get(page as usize) {
                known.store(fingerprint(content) | 1, Ordering::Relaxed);
            }
        }
    }

    /// Returns whether any of these pages of a block was read.
    pub(crate) fn knows_any(&self, block: usize, range: BlockRange) -> bool {
        let known = self.blocks.get(block).and_then(|known| {
            let (start, end) = (range.start as usize, range.end() as usize);
            known.get(start..end.min(known.len()))
        });
        let mut known = known.unwrap_or_default().iter();
        known.any(|page| page.load(Ordering::Relaxed) != UNREAD)
    }

    /// Returns the pages with another content than when they were last read, of consecutive pages
    /// from `start` on with this content.
    pub(crate) fn changed(&self, block: usize, start: u64, content: &[u8]) -> Vec<BlockRange> {
        let mut runs = Vec::<BlockRange>::new();
        let known = self
            .blocks
            .get(block)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let known = known.iter().skip(start as usize);
        for ((page, known), content) in (start..).zip(known).zip(content.chunks(BLOCK_SIZE)) {
            let known = known.load(Ordering::Relaxed);
            if known == UNREAD || known == fingerprint(content) | 1 {
                continue;
            }
            match runs.last_mut() {
                Some(last) if last.end() == page => last.count += 1,
                _ => runs.push(BlockRange::new(page, 1)),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_read_and_changed_is_told() {
        let fingerprints = Fingerprints::new([8, 4].into_iter());
        let mut content = vec![0_u8; 8 * BLOCK_SIZE];
        let ranges = [BlockRange::new(1, 2), BlockRange::new(4, 4)];
        fingerprints.remember(0, &ranges, &content[..6 * BLOCK_SIZE]);
        assert_eq!(fingerprints.changed(0, 0, &content), []);
        for page in [0, 2, 3, 5, 6] {
            content[page * BLOCK_SIZE + 5] = 7;
        }
        let changed = fingerprints.changed(0, 0, &content);
        assert_eq!(changed, [BlockRange::new(2, 1), BlockRange::new(5, 2)]);
        let behind = fingerprints.changed(0, 6, &content[6 * BLOCK_SIZE..]);
        assert_eq!(behind, [BlockRange::new(6, 1)]);
        fingerprints.clear();
        assert_eq!(fingerprints.changed(0, 0, &content), []);
    }
}
