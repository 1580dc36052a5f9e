//! What is known of each page of a guest whose RAM arrives while it runs.

use super::arriving::Missing;
use longhaul_protocol::BlockRange;
use longhaul_qemu_stream::{Prelude, RamBlock};

/// What is known of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Page {
    /// It was there when the guest was loaded, or is zero.
    There,
    Missing,
    /// It is missing, and the guest waits for it.
    Wanted,
    /// QEMU got it, and must not get it again.
    Given,
}

/// What a request for a page needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    /// The page's content, which is missing.
    Content,
    /// A page of zeros.
    Zeros,
    /// Nothing: it is on its way.
    Nothing,
}

/// The pages of all RAM blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pages {
    blocks: Vec<Vec<Page>>,
    missing: u64,
}

impl Pages {
    /// Creates the pages of a stream's RAM: all of them are there.
    pub(super) fn new(prelude: &Prelude) -> Self {
        let pages = prelude.blocks.iter().map(RamBlock::pages);
        Self {
            blocks: pages
                .map(|pages| vec![Page::There; pages as usize])
                .collect(),
            missing: 0,
        }
    }

    /// Creates the pages of a stream's RAM. Those that it does not have are left out.
    pub(super) fn without(prelude: &Prelude, missing: &[Missing]) -> Self {
        let mut pages = Self::new(prelude);
        for Missing {
            block,
            pages: ranges,
        } in missing
        {
            for range in ranges {
                pages.set(*block, *range, Page::Missing);
            }
        }
        pages
    }

    /// Records what is known of a range. Returns `false`, and changes nothing, if there are no such
    /// pages.
    pub(super) fn set(&mut self, block: usize, range: BlockRange, to: Page) -> bool {
        let bounds = range.start.checked_add(range.count);
        let bounds = bounds.map(|end| range.start as usize..end as usize);
        let known = self.blocks.get_mut(block);
        let Some(known) = known.zip(bounds).and_then(|(of, at)| of.get_mut(at)) else {
            return false;
        };
        let lacks = |page: &&Page| matches!(page, Page::Missing | Page::Wanted);
        self.missing -= known.iter().filter(lacks).count() as u64;
        known.fill(to);
        if lacks(&&to) {
            self.missing += range.count;
        }
        true
    }

    /// Returns the number of missing pages.
    pub(super) fn missing(&self) -> u64 {
        self.missing
    }

    /// Returns what is known of a page.
    pub(super) fn get(&self, block: usize, page: u64) -> Option<Page> {
        self.blocks.get(block)?.get(page as usize).copied()
    }

    /// Records that the guest waits for a page. Returns what it needs; `None` if there is no such
    /// page.
    pub(super) fn ask(&mut self, block: usize, page: u64) -> Option<Needs> {
        let known = self.blocks.get_mut(block)?.get_mut(page as usize)?;
        Some(match *known {
            Page::There => {
                *known = Page::Given;
                Needs::Zeros
            }
            Page::Missing => {
                *known = Page::Wanted;
                Needs::Content
            }
            Page::Wanted | Page::Given => Needs::Nothing,
        })
    }

    /// Records that QEMU gets a page. Returns `false` if it is not missing, or not any more.
    pub(super) fn give(&mut self, block: usize, page: u64) -> bool {
        let is_missing = matches!(self.get(block, page), Some(Page::Missing | Page::Wanted));
        is_missing && self.set(block, BlockRange::new(page, 1), Page::Given)
    }

    /// Takes over which pages of a block QEMU got, one bit each.
    pub(super) fn received(&mut self, block: usize, bitmap: &[u8]) {
        let count = self.blocks.get(block).map_or(0, Vec::len) as u64;
        for page in 0..count {
            let bits = bitmap.get(page as usize / 8).copied().unwrap_or(0);
            if bits & 1 << (page % 8) != 0 {
                self.set(block, BlockRange::new(page, 1), Page::Given);
            }
        }
    }

    /// Returns the ranges of the pages of a block of which one of these is known.
    pub(super) fn ranges(&self, block: usize, wanted: &[Page]) -> Vec<BlockRange> {
        let mut ranges: Vec<BlockRange> = Vec::new();
        let known = self.blocks.get(block).map_or(&[][..], Vec::as_slice);
        for (page, known) in (0..).zip(known) {
            if !wanted.contains(known) {
                continue;
            }
            match ranges.last_mut().filter(|range| range.end() == page) {
                Some(range) => range.count += 1,
                None => ranges.push(BlockRange::new(page, 1)),
            }
        }
        ranges
    }

    /// Returns the missing pages of each block that lacks some.
    pub(super) fn missing_pages(&self) -> Vec<Missing> {
        let blocks = 0..self.blocks.len();
        let of = blocks.map(|block| Missing {
            block,
            pages: self.ranges(block, &[Page::Missing, Page::Wanted]),
        });
        of.filter(|missing| !missing.pages.is_empty()).collect()
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_qemu_stream::Writer;

    #[test]
    fn a_page_is_given_once_and_asked_for_once() {
        let block = |name: &str| RamBlock {
            name: name.to_owned(),
            used_bytes: 64 * 4096,
        };
        let bytes = Writer::prelude("pc", 2, &[block("a"), block("b")]);
        let prelude = crate::memory::read_prelude(&bytes).unwrap();
        let missing = [Missing {
            block: 1,
            pages: vec![BlockRange::new(3, 2), BlockRange::new(60, 9)],
        }];
        let mut pages = Pages::without(&prelude, &missing);
        // A range beyond the end is none.
        assert_eq!(pages.missing(), 2);
        assert!(!pages.set(2, BlockRange::new(0, 1), Page::Missing));
        assert!(!pages.set(0, BlockRange::new(u64::MAX, 2), Page::Missing));
        assert_eq!(pages.ask(1, 3), Some(Needs::Content));
        assert_eq!(pages.ask(1, 3), Some(Needs::Nothing));
        assert_eq!(pages.ask(1, 5), Some(Needs::Zeros));
        assert_eq!(pages.ask(1, 5), Some(Needs::Nothing));
        assert_eq!((pages.ask(1, 64), pages.ask(2, 0)), (None, None));
        assert_eq!(pages.ranges(1, &[Page::Wanted]), [BlockRange::new(3, 1)]);
        let lacks = pages.missing_pages();
        assert_eq!(
            (lacks[0].block, &lacks[0].pages[..]),
            (1, &[BlockRange::new(3, 2)][..])
        );
        assert!(pages.give(1, 3) && !pages.give(1, 3) && !pages.give(0, 3));
        assert_eq!(pages.missing(), 1);
        pages.received(1, &[0b0001_0000]);
        assert_eq!((pages.missing(), pages.get(1, 4)), (0, Some(Page::Given)));
        assert!(pages.missing_pages().is_empty());
    }
}
