//! The table of blocks: pages found by digest, each with a checksum of its own, so that a torn page
//! counts as empty and the others stay valid.

use longhaul_codec::Digest;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The name of the table's file.
pub(super) const NAME: &str = "table";
/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// Entries of a page.
pub const PAGE_ENTRIES: usize = (PAGE_BYTES - HEADER_BYTES) / ENTRY_BYTES;
const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Bytes of the digest that an entry stores.
const FRAGMENT_BYTES: usize = 7;
/// Planned entries per page; the space above it is for pages that get more than the average.
const ENTRIES_USUAL: u64 = 200;
/// Limit on the block number of an entry.
pub(super) const BLOCKS_MAX: u64 = 1 << 40;

/// An entry: the place of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageEntry {
    fragment: [u8; FRAGMENT_BYTES],
    /// The file.
    pub slot: u16,
    /// The generation of the file's slot; never 0.
    pub generation: u16,
    /// Its place in the file, in blocks.
    pub block: u64,
}

impl PageEntry {
    pub(super) fn new(digest: &Digest, slot: u16, generation: u16, block: u64) -> Self {
        Self {
            fragment: fragment(digest),
            slot,
            generation,
            block,
        }
    }

    /// Returns whether the block may have this content.
    pub fn may_be(&self, digest: &Digest) -> bool {
        self.fragment == fragment(digest)
    }

    /// Returns `None` for a free entry.
    fn parse(bytes: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let mut entry = Self {
            fragment: [0; FRAGMENT_BYTES],
            slot: u16::from_le_bytes([bytes[7], bytes[8]]),
            generation: u16::from_le_bytes([bytes[9], bytes[10]]),
            block: 0,
        };
        entry.fragment.copy_from_slice(&bytes[..FRAGMENT_BYTES]);
        let mut block = [0; 8];
        block[..5].copy_from_slice(&bytes[11..]);
        entry.block = u64::from_le_bytes(block);
        (entry.generation > 0).then_some(entry)
    }

    fn bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..7].copy_from_slice(&self.fragment);
        bytes[7..9].copy_from_slice(&self.slot.to_le_bytes());
        bytes[9..11].copy_from_slice(&self.generation.to_le_bytes());
        bytes[11..].copy_from_slice(&self.block.to_le_bytes()[..5]);
        bytes
    }
}

fn fragment(digest: &Digest) -> [u8; FRAGMENT_BYTES] {
    let mut fragment = [0; FRAGMENT_BYTES];
    fragment.copy_from_slice(&digest.0[8..8 + FRAGMENT_BYTES]);
    fragment
}

/// A page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    number: u64,
    entries: [Option<PageEntry>; PAGE_ENTRIES],
}

impl Page {
    fn empty(number: u64) -> Self {
        Self {
            number,
            entries: [None; PAGE_ENTRIES],
        }
    }

    /// Parses the page of that number; empty if the bytes are not a valid page, as where nothing
    /// was ever written.
    pub fn parse(number: u64, bytes: &[u8; PAGE_BYTES]) -> Self {
        let mut page = Self::empty(number);
        let (stored, body) = bytes.split_at(8);
        if *stored == checksum(body) && body[..8] == number.to_le_bytes() {
            let (entries, _) = body[8..].as_chunks::<ENTRY_BYTES>();
            for (entry, bytes) in page.entries.iter_mut().zip(entries) {
                *entry = PageEntry::parse(bytes);
            }
        }
        page
    }

    /// Returns its stored form.
    pub fn bytes(&self) -> [u8; PAGE_BYTES] {
        let mut bytes = [0; PAGE_BYTES];
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        let (entries, _) = bytes[HEADER_BYTES..].as_chunks_mut::<ENTRY_BYTES>();
        for (bytes, entry) in entries.iter_mut().zip(&self.entries) {
            *bytes = entry.map_or([0; ENTRY_BYTES], |entry| entry.bytes());
        }
        let sum = checksum(&bytes[8..]);
        bytes[..8].copy_from_slice(&sum);
        bytes
    }

    /// Returns its entries.
    pub fn entries(&self) -> impl Iterator<Item = PageEntry> {
        self.entries.iter().copied().flatten()
    }

    /// Adds an entry, in place of an invalid one, or of any if the page is full. One place per
    /// content is enough.
    fn insert(&mut self, new: PageEntry, is_live: impl Fn(u16, u16) -> bool) {
        let live = |entry: &PageEntry| is_live(entry.slot, entry.generation);
        let mut free = None;
        for (place, entry) in self.entries.iter().enumerate() {
            match entry {
                Some(entry) if !live(entry) => free = free.or(Some(place)),
                Some(entry) if entry.fragment == new.fragment => return,
                Some(_) => {}
                None => free = free.or(Some(place)),
            }
        }
        let any = usize::from(new.fragment[0]) % PAGE_ENTRIES;
        self.entries[free.unwrap_or(any)] = Some(new);
    }
}

fn checksum(body: &[u8]) -> [u8; 8] {
    let mut sum = [0; 8];
    sum.copy_from_slice(&blake3::hash(body).as_bytes()[..8]);
    sum
}

/// The file of pages.
#[derive(Debug)]
pub(super) struct Table {
    file: File,
    pages: u64,
}

impl Table {
    /// Returns the number of pages for this number of blocks.
    pub(super) fn pages_for(blocks: u64) -> u64 {
        blocks.min(BLOCKS_MAX).div_ceil(ENTRIES_USUAL).max(1)
    }

    pub(super) fn open(path: &Path, pages: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(path)?;
        // A truncated file is empty from there on.
        file.set_len(pages * PAGE_BYTES as u64)?;
        Ok(Self { file, pages })
    }

    /// Returns the number of a digest's page.
    pub(super) fn place(&self, digest: &Digest) -> u64 {
        let mut high = [0; 8];
        high.copy_from_slice(&digest.0[..8]);
        let product = u128::from(u64::from_le_bytes(high)) * u128::from(self.pages);
        // It is below the number of pages.
        (product >> 64) as u64
    }

    fn page(&self, number: u64) -> io::Result<Page> {
        let mut bytes = [0; PAGE_BYTES];
        self.file
            .read_exact_at(&mut bytes, number * PAGE_BYTES as u64)?;
        Ok(Page::parse(number, &bytes))
    }

    /// Reads the page of a digest.
    pub(super) fn read(&self, digest: &Digest) -> io::Result<Page> {
        self.page(self.place(digest))
    }

    /// Adds blocks, page by page in the order of the file.
    pub(super) fn insert(
        &self,
        blocks: &mut [(Digest, PageEntry)],
        is_live: impl Fn(u16, u16) -> bool,
    ) -> io::Result<()> {
        blocks.sort_unstable_by_key(|(digest, _)| self.place(digest));
        for same in blocks.chunk_by(|(a, _), (b, _)| self.place(a) == self.place(b)) {
            let number = self.place(&same[0].0);
            let mut page = self.page(number)?;
            for (_, entry) in same {
                page.insert(*entry, &is_live);
            }
            self.file
                .write_all_at(&page.bytes(), number * PAGE_BYTES as u64)?;
        }
        Ok(())
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(number: u64) -> Digest {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&blake3::hash(&number.to_le_bytes()).as_bytes()[..16]);
        Digest(bytes)
    }

    #[test]
    fn a_page_is_as_documented() {
        let mut page = Page::empty(5);
        let digest = Digest([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
        page.insert(
            PageEntry::new(&digest, 0x0201, 3, 0x05_0403_0201),
            |_, _| true,
        );
        let bytes = page.bytes();
        assert_eq!(bytes[..8], blake3::hash(&bytes[8..]).as_bytes()[..8]);
        assert_eq!(bytes[8..16], [5, 0, 0, 0, 0, 0, 0, 0]);
        let entry = [9, 10, 11, 12, 13, 14, 15, 1, 2, 3, 0, 1, 2, 3, 4, 5];
        assert_eq!(bytes[16..32], entry);
        assert_eq!(bytes[32..], [0; PAGE_BYTES - 32]);
        assert_eq!(Page::parse(5, &bytes), page);
        // At another place it is invalid.
        assert_eq!(Page::parse(6, &bytes), Page::empty(6));
        assert_eq!(Page::parse(0, &[0; PAGE_BYTES]), Page::empty(0));
    }

    #[test]
    fn a_full_page_forgets_and_prefers_what_is_gone() {
        let mut page = Page::empty(0);
        let entry = |number, generation| PageEntry::new(&digest(number), 1, generation, number);
        for number in 0..255 {
            page.insert(entry(number, 1), |_, _| true);
        }
        assert_eq!(page.entries().count(), PAGE_ENTRIES);
        // The same content again changes nothing.
        let before = page.clone();
        page.insert(PageEntry::new(&digest(7), 2, 1, 99), |_, _| true);
        assert_eq!(page, before);
        page.insert(entry(1000, 1), |_, _| true);
        assert_eq!(page.entries().count(), PAGE_ENTRIES);
        assert!(page.entries().any(|entry| entry.may_be(&digest(1000))));
        for number in 2000..2100 {
            page.insert(entry(number, 2), |_, generation| generation == 2);
        }
        let new = page.entries().filter(|entry| entry.generation == 2);
        assert_eq!(new.count(), 100);
    }
}
