//! Encodes blocks of a fixed size by a cache that both ends keep, and as deltas against the last
//! content of an address.
//!
//! A page is sent as its number (64 bits), then a meta record for each of its blocks: an index of
//! the cache (32 bits) and the length of a delta (16 bits). A negative index -1-N means that the
//! whole block follows and that the caches keep it as entry N. A positive index with length 0 is a
//! block that the entry holds; with another length, a delta of that many bytes against the entry
//! follows.

use crate::cache::{Cache, Entry};
use crate::hash::super_fast_hash;
use crate::index::Index;
use crate::read::Reader;
use crate::{ConfigError, DecodeError, NoSuchPage, PAGE_BYTES, Page, Sent, delta};

/// Parameters that both ends must share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Size of a block in bytes: a power of two, at most a page.
    pub block_bytes: usize,
    /// Capacity of each end's cache in bytes.
    pub cache_bytes: usize,
    /// Whether blocks are looked up by their content.
    pub redundancy: bool,
    /// Whether blocks are looked up by their address and sent as deltas.
    pub deltas: bool,
    /// Number of pages of the memory.
    pub pages: u64,
}

impl Config {
    fn cache(&self) -> Result<Cache, ConfigError> {
        let size = self.block_bytes;
        if !size.is_power_of_two() || !(64..=PAGE_BYTES).contains(&size) {
            return Err(ConfigError::BlockBytes(size));
        }
        Cache::new(self.cache_bytes, size)
    }

    /// Returns the length from which a delta is not worth it; it must also fit the 16 bits of its
    /// length.
    fn delta_limit(&self) -> usize {
        self.block_bytes / 8 * 7
    }

    fn check(&self, page: u64) -> Result<usize, NoSuchPage> {
        let pages = self.pages;
        (page < pages)
            .then_some(page as usize * (PAGE_BYTES / self.block_bytes))
            .ok_or(NoSuchPage { page, pages })
    }
}

/// The result of looking up a block by its address.
enum Delta {
    /// The block is unchanged.
    Same(Entry),
    /// A delta was appended.
    Sent,
    /// There is no earlier version, or no short delta from it.
    None,
}

/// The encoder at the source.
pub struct Encoder {
    config: Config,
    cache: Cache,
    index: Index,
    /// The last content sent of each block of the memory.
    addresses: Vec<Option<Entry>>,
}

impl std::fmt::Debug for Encoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Encoder")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl Encoder {
    /// Returns an encoder with an empty cache.
    ///
    /// # Errors
    /// When the sizes make no sense.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        let cache = config.cache()?;
        let slots = cache.slots();
        let blocks = config.pages as usize * (PAGE_BYTES / config.block_bytes);
        Ok(Self {
            config,
            cache,
            index: Index::new(slots),
            addresses: vec![None; blocks],
        })
    }

    /// Forgets what was sent and keeps the allocated memory. The other end must do so at the same
    /// time.
    pub fn clear(&mut self) {
        self.cache.clear();
        self.index.clear();
        self.addresses.fill(None);
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
        let first = self.config.check(number)?;
        out.extend_from_slice(&number.to_le_bytes());
        let mut sent = Sent::default();
        for (index, block) in page.chunks_exact(self.config.block_bytes).enumerate() {
            self.block(first + index, block, out, &mut sent);
        }
        Ok(sent)
    }

    fn block(&mut self, address: usize, block: &[u8], out: &mut Vec<u8>, sent: &mut Sent) {
        let length = block.len() as u64;
        let mut fingerprint = 0;
        if self.config.redundancy {
            fingerprint = super_fast_hash(block);
            if let Some(entry) = self.find(fingerprint, block) {
                meta(entry.slot as i32, 0, out);
                self.addresses[address] = Some(entry);
                sent.found += length;
                return;
            }
        }
        match self.delta(address, block, out) {
            Delta::Same(entry) => {
                meta(entry.slot as i32, 0, out);
                sent.found += length;
                return;
            }
            Delta::Sent => sent.delta += length,
            Delta::None => {
                let slot = self.cache.next();
                meta(-1 - slot as i32, 0, out);
                out.extend_from_slice(block);
                sent.whole += length;
            }
        }
        if self.config.redundancy {
            self.index.insert(self.cache.next(), fingerprint);
        }
        self.addresses[address] = Some(self.cache.add(block));
    }

    /// Returns the entry with this exact content.
    fn find(&self, fingerprint: u32, block: &[u8]) -> Option<Entry> {
        let mut slots = self.index.find(fingerprint);
        let slot = slots.find(|slot| self.cache.get(*slot) == Some(block))?;
        self.cache.entry(slot)
    }

    /// Encodes a delta against the last content sent of this address, if the delta is worth it.
    fn delta(&self, address: usize, block: &[u8], out: &mut Vec<u8>) -> Delta {
        let entry = self.addresses[address].filter(|_| self.config.deltas);
        let Some((entry, old)) =
            entry.and_then(|entry| Some((entry, self.cache.get_entry(entry)?)))
        else {
            return Delta::None;
        };
        let start = out.len();
        meta(entry.slot as i32, 0, out);
        let body = out.len();
        if !delta::encode(old, block, self.config.delta_limit(), out) {
            out.truncate(start);
            return Delta::None;
        }
        let length = (out.len() - body) as u16;
        if length == 0 {
            out.truncate(start);
            return Delta::Same(entry);
        }
        out[body - 2..body].copy_from_slice(&length.to_le_bytes());
        Delta::Sent
    }
}

fn meta(index: i32, delta_bytes: u16, out: &mut Vec<u8>) {
    out.extend_from_slice(&index.to_le_bytes());
    out.extend_from_slice(&delta_bytes.to_le_bytes());
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
            for block in page.chunks_exact_mut(self.config.block_bytes) {
                self.block(&mut reader, block)?;
            }
            apply(number, &page);
        }
        Ok(())
    }

    fn block(&mut self, reader: &mut Reader<'_>, block: &mut [u8]) -> Result<(), DecodeError> {
        let index = i32::from_le_bytes(reader.array()?);
        let delta_bytes = reader.u16()?;
        if index < 0 {
            if u32::try_from(-1 - i64::from(index)) != Ok(self.cache.next()) {
                return Err(DecodeError::Cache(index.into()));
            }
            block.copy_from_slice(reader.take(block.len())?);
            self.cache.add(block);
            return Ok(());
        }
        let held = self.cache.get(index as u32);
        block.copy_from_slice(held.ok_or(DecodeError::Cache(index.into()))?);
        if delta_bytes != 0 {
            delta::apply(reader.take(delta_bytes)?, block)?;
            self.cache.add(block);
        }
        Ok(())
    }
}
