//! Encodes pages as strings of any length that the cache holds, found by fingerprints of short
//! windows.
//!
//! Windows are chosen by their own fingerprint, so that moved content has the same ones. For each
//! page of the cache up to a fixed number of them is kept. A match of a chosen window is extended
//! to both sides as far as it goes.
//!
//! A page is sent as its number (64 bits) and then parts until it is complete. A part begins with
//! an index of the cache (32 bits). If the index is negative, a length (16 bits) and that many
//! bytes follow; if not, the offset in that entry and the length of the string (16 bits each). A
//! page that is not one single string is kept in the cache afterwards, at both ends.

use crate::cache::Cache;
use crate::index::Index;
use crate::rabin::{Rabin, WINDOW};
use crate::read::Reader;
use crate::{ConfigError, DecodeError, NoSuchPage, PAGE_BYTES, Page, Sent};

/// The maximum number of entries that are compared for one window; the longest match is taken.
const TRIES: usize = 4;

/// Parameters that both ends must share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The number of fingerprints kept for a page of the cache, and about the number looked up: a
    /// power of two.
    pub fingerprints: usize,
    /// Capacity of each end's cache in bytes.
    pub cache_bytes: usize,
    /// Number of pages of the memory.
    pub pages: u64,
}

impl Config {
    fn cache(&self) -> Result<Cache, ConfigError> {
        let count = self.fingerprints;
        if !count.is_power_of_two() || count > 64 {
            return Err(ConfigError::Fingerprints(count));
        }
        Cache::new(self.cache_bytes, PAGE_BYTES)
    }

    fn check(&self, page: u64) -> Result<(), NoSuchPage> {
        let pages = self.pages;
        match page < pages {
            true => Ok(()),
            false => Err(NoSuchPage { page, pages }),
        }
    }
}

/// The encoder at the source.
pub struct Encoder {
    config: Config,
    rabin: Rabin,
    cache: Cache,
    index: Index,
    /// The start in its page of the window of each entry of the index.
    offsets: Vec<u16>,
    /// The chosen windows of the current page: start and fingerprint.
    chosen: Vec<(usize, u64)>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// A string that the cache holds.
struct Match {
    slot: u32,
    offset: usize,
    start: usize,
    length: usize,
}

impl Encoder {
    /// Returns an encoder with an empty cache.
    ///
    /// # Errors
    /// When the sizes make no sense.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let cache = config.cache()?;
        let entries = cache.slots() * config.fingerprints;
        Ok(Self {
            config,
            rabin: Rabin::new(),
            cache,
            index: Index::new(entries),
            offsets: vec![0; entries],
            chosen: Vec::new(),
        })
    }

    /// Forgets what was sent and keeps the allocated memory. The other end must do so at the same
    /// time.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.index.clear();
    }

    /// Encodes one page, appending to `out`.
    ///
    /// # Errors
    /// When the memory has no such page.
    pub fn page(
        &mut self,
        number: u64,
        page: &Page,
        out: &mut Vec<u8>,
    ) -> Result<Sent, NoSuchPage> {
        self.config.check(number)?;
        out.extend_from_slice(&number.to_le_bytes());
        self.choose(page);
        let (mut sent, mut done, mut strings) = (Sent::default(), 0, 0);
        for &(start, print) in &self.chosen {
            if start < done {
                continue;
            }
            let Some(found) = self.find(page, done, start, print) else {
                continue;
            };
            literal(&page[done..found.start], out);
            out.extend_from_slice(&found.slot.to_le_bytes());
            out.extend_from_slice(&(found.offset as u16).to_le_bytes());
            out.extend_from_slice(&(found.length as u16).to_le_bytes());
            sent.found += found.length as u64;
            done = found.start + found.length;
            strings += 1;
        }
        literal(&page[done..], out);
        sent.whole = PAGE_BYTES as u64 - sent.found;
        if sent.whole != 0 || strings > 1 {
            self.keep(page);
        }
        Ok(sent)
    }

    /// Collects the chosen windows; of consecutive ones with one fingerprint the first.
    fn choose(&mut self, page: &Page) {
        let chosen = &mut self.chosen;
        chosen.clear();
        let mask = (PAGE_BYTES / self.config.fingerprints) as u64 - 1;
        self.rabin.choose(page, mask, |start, print| {
            if chosen.last().is_none_or(|(_, last)| *last != print) {
                chosen.push((start, print));
            }
        });
    }

    /// Returns the longest string around the window at `start` that the cache holds; bytes before
    /// `done` are not used.
    fn find(&self, page: &Page, done: usize, start: usize, print: u64) -> Option<Match> {
        let matches = self.index.find(short(print)).filter_map(|entry| {
            let slot = entry / self.config.fingerprints as u32;
            let offset = usize::from(self.offsets[entry as usize]);
            let held = self.cache.get(slot)?;
            let right = common(page[start..].iter(), held[offset..].iter());
            if right < WINDOW {
                return None;
            }
            let left = common(page[done..start].iter().rev(), held[..offset].iter().rev());
            Some(Match {
                slot,
                offset: offset - left,
                start: start - left,
                length: left + right,
            })
        });
        matches.take(TRIES).max_by_key(|found| found.length)
    }

    /// Adds a page to the cache, and its first fingerprints to the index.
    fn keep(&mut self, page: &Page) {
        let first = self.cache.next() as usize * self.config.fingerprints;
        let mut chosen = self.chosen.iter();
        for entry in first..first + self.config.fingerprints {
            match chosen.next() {
                Some(&(start, print)) => {
                    self.offsets[entry] = start as u16;
                    self.index.insert(entry as u32, short(print));
                }
                None => self.index.remove(entry as u32),
            }
        }
        self.cache.add(page);
    }
}

/// Returns the part of a fingerprint that the index uses, without the bits that all chosen ones
/// share.
fn short(print: u64) -> u32 {
    (print >> 12) as u32
}

/// Returns the length of the common prefix of two sequences.
fn common<'a>(a: impl Iterator<Item = &'a u8>, b: impl Iterator<Item = &'a u8>) -> usize {
    a.zip(b).take_while(|(a, b)| a == b).count()
}

fn literal(bytes: &[u8], out: &mut Vec<u8>) {
    if !bytes.is_empty() {
        out.extend_from_slice(&(-1_i32).to_le_bytes());
        out.extend_from_slice(&(bytes.len() as u16).to_le_bytes());
        out.extend_from_slice(bytes);
    }
}

/// The decoder at the destination.
pub struct Decoder {
    config: Config,
    cache: Cache,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Decoder {
    /// Returns a decoder with an empty cache.
    ///
    /// # Errors
    /// When the sizes make no sense.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let cache = config.cache()?;
        Ok(Self { config, cache })
    }

    /// Forgets what was received and keeps the allocated memory. The other end must do so at the
    /// same time.
    pub fn clear(&mut self) {
        self.cache.clear();
    }

    /// Decodes pages, in the order in which they were encoded.
    ///
    /// # Errors
    /// When the bytes are not output of an encoder with this decoder's history. The caches of the
    /// two ends differ afterwards.
    pub fn pages(
        &mut self,
        bytes: &[u8],
        mut apply: impl FnMut(u64, &Page),
    ) -> Result<(), DecodeError> {
        let mut reader = Reader(bytes);
        let mut page = [0; PAGE_BYTES];
        while !reader.is_empty() {
            let number = u64::from_le_bytes(reader.array()?);
            self.config.check(number)?;
            let (mut literals, mut strings) = (0, 0);
            let mut rest = &mut page[..];
            while !rest.is_empty() {
                let index = i32::from_le_bytes(reader.array()?);
                let offset = if index < 0 { 0 } else { reader.u16()? };
                let length = reader.u16()?;
                let (part, after) = rest
                    .split_at_mut_checked(length)
                    .filter(|_| length != 0)
                    .ok_or(DecodeError::Bounds)?;
                if index < 0 {
                    part.copy_from_slice(reader.take(length)?);
                    literals += 1;
                } else {
                    let held = self.cache.get(index as u32);
                    let held = held.ok_or(DecodeError::Cache(index.into()))?;
                    let held = held.get(offset..offset + length);
                    part.copy_from_slice(held.ok_or(DecodeError::Bounds)?);
                    strings += 1;
                }
                rest = after;
            }
            if literals > 0 || strings > 1 {
                self.cache.add(&page);
            }
            apply(number, &page);
        }
        Ok(())
    }
}
