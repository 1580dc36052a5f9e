//! Records of single blocks: of every block of a region, or only of those in chunks with something
//! in flight.

use super::{Class, ZERO};
use crate::chunk::{self, CHUNK_BLOCKS};
use longhaul_codec::Digest;

pub(super) const CLASS: u8 = 0b0000_0011;
pub(super) const KNOWN: u8 = 0b0000_0100;
pub(super) const IN_FLIGHT: u8 = 0b0000_1000;
/// The destination could not use the last encoding of the block: it travels as a literal.
pub(super) const WHOLE: u8 = 0b0001_0000;

#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// What the destination has (if `KNOWN`) or will have once `sent_seq` is acknowledged.
    pub(super) digest: Digest,
    /// The newest frame that this block was taken for; 0 before the first.
    pub(super) sent_seq: u32,
    /// The low byte of the number of the last pass that reported a write.
    pub(super) last_pass: u8,
    /// Number of consecutive passes that reported a write.
    pub(super) streak: u8,
    pub(super) flags: u8,
    /// References to the block that are in flight.
    pub(super) pins: u8,
}

impl Block {
    fn new(zero: bool) -> Self {
        Self {
            digest: ZERO,
            sent_seq: 0,
            last_pass: 0,
            streak: 0,
            flags: Class::Cold as u8 | if zero { KNOWN } else { 0 },
            pins: 0,
        }
    }

    pub(super) fn class(&self) -> Class {
        Class::ALL[usize::from(self.flags & CLASS)]
    }
}

impl Default for Block {
    fn default() -> Self {
        Self::new(false)
    }
}

type Page = [Block; CHUNK_BLOCKS as usize];

/// In place of a page: nothing is known of the chunk's blocks.
const UNKNOWN: u32 = u32::MAX;
/// In place of a page: the destination has zeros in all of them.
const ZEROS: u32 = u32::MAX - 1;

#[derive(Debug)]
pub(super) struct Records {
    /// The page of each chunk.
    places: Vec<u32>,
    pages: Vec<Page>,
    free: Vec<u32>,
    /// Whether every chunk always has a page.
    keeps: bool,
}

impl Records {
    /// Records of every block: 24 bytes each.
    pub(super) fn of_all(blocks: usize, zero: bool) -> Self {
        let chunks = chunk::count(blocks as u64);
        Self {
            places: (0..chunks as u32).collect(),
            pages: vec![[Block::new(zero); CHUNK_BLOCKS as usize]; chunks],
            free: Vec::new(),
            keeps: true,
        }
    }

    /// Creates records only of blocks in flight: 4 bytes per chunk, and a page of 1.5 KiB while it
    /// is needed.
    pub(super) fn of_few(blocks: usize, zero: bool) -> Self {
        let place = if zero { ZEROS } else { UNKNOWN };
        Self {
            places: vec![place; chunk::count(blocks as u64)],
            pages: Vec::new(),
            free: Vec::new(),
            keeps: false,
        }
    }

    /// Returns whether the destination's content of every block is known.
    pub(super) fn keeps(&self) -> bool {
        self.keeps
    }

    pub(super) fn get(&self, index: usize) -> Block {
        match self.places[index / CHUNK_BLOCKS as usize] {
            UNKNOWN => Block::new(false),
            ZEROS => Block::new(true),
            page => self.pages[page as usize][index % CHUNK_BLOCKS as usize],
        }
    }

    /// Returns whether a chunk has records of its single blocks.
    pub(super) fn has_page(&self, chunk: usize) -> bool {
        self.places[chunk] < ZEROS
    }

    pub(super) fn get_mut(&mut self, index: usize) -> &mut Block {
        let chunk = index / CHUNK_BLOCKS as usize;
        if !self.has_page(chunk) {
            let page = [Block::new(self.places[chunk] == ZEROS); CHUNK_BLOCKS as usize];
            self.places[chunk] = match self.free.pop() {
                Some(free) => {
                    self.pages[free as usize] = page;
                    free
                }
                None => {
                    self.pages.push(page);
                    self.pages.len() as u32 - 1
                }
            };
        }
        &mut self.pages[self.places[chunk] as usize][index % CHUNK_BLOCKS as usize]
    }

    /// Records that both ends have zeros in a whole chunk.
    pub(super) fn zeroed(&mut self, chunk: usize) {
        if !self.keeps && !self.has_page(chunk) {
            self.places[chunk] = ZEROS;
        }
    }

    /// Drops the records of a chunk if none of its blocks is in flight; `pending` are its pending
    /// blocks.
    pub(super) fn settle(&mut self, chunk: usize, pending: u64) {
        if self.keeps || !self.has_page(chunk) {
            return;
        }
        let place = self.places[chunk];
        let page = &self.pages[place as usize];
        let wanted =
            |n: usize, block: &Block| pending >> n & 1 == 1 && block.class() == Class::Wanted;
        let busy = page.iter().enumerate().any(|(n, block)| {
            block.flags & (IN_FLIGHT | WHOLE) != 0 || block.pins > 0 || wanted(n, block)
        });
        if busy {
            return;
        }
        let zeros = page
            .iter()
            .all(|block| block.flags & KNOWN != 0 && block.digest == ZERO);
        self.places[chunk] = if zeros { ZEROS } else { UNKNOWN };
        self.free.push(place);
        if self.free.len() == self.pages.len() {
            self.free = Vec::new();
            self.pages = Vec::new();
        }
    }

    /// Returns how many chunks have records of their single blocks.
    pub(super) fn pages(&self) -> usize {
        self.pages.len() - self.free.len()
    }
}
