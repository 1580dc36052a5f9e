//! Implements the cache that both ends keep: FIFO, with entries of one size.

use crate::ConfigError;

/// The maximum size of a cache in bytes: entries are named by a positive 32-bit number.
const BYTES_MAX: usize = 8 << 30;

/// A FIFO cache of blocks of one size.
pub(crate) struct Cache {
    bytes: Vec<u8>,
    block_bytes: usize,
    /// How often each entry was filled; identifies the content that a reference meant.
    fills: Vec<u32>,
    next: usize,
}

/// A reference to one content of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) slot: u32,
    pub(crate) fill: u32,
}

impl Cache {
    pub(crate) fn new(cache_bytes: usize, block_bytes: usize) -> Result<Self, ConfigError> {
        if cache_bytes < block_bytes || cache_bytes > BYTES_MAX {
            return Err(ConfigError::CacheBytes(cache_bytes));
        }
        let slots = cache_bytes / block_bytes;
        // Written once, so that its memory is allocated before anything is measured.
        let mut bytes = vec![0; slots * block_bytes];
        bytes.fill(1);
        Ok(Self {
            bytes,
            block_bytes,
            fills: vec![0; slots],
            next: 0,
        })
    }

    /// Forgets all entries. The next one goes to the following slot: as in a migration under way,
    /// new content does not go to memory that was just used.
    pub(crate) fn clear(&mut self) {
        self.fills.fill(0);
    }

    pub(crate) fn slots(&self) -> usize {
        self.fills.len()
    }

    /// Returns the slot of the next content.
    pub(crate) fn next(&self) -> u32 {
        self.next as u32
    }

    /// Puts a block into the next slot, replacing its content.
    pub(crate) fn add(&mut self, block: &[u8]) -> Entry {
        let slot = self.next;
        let start = slot * self.block_bytes;
        self.bytes[start..start + self.block_bytes].copy_from_slice(block);
        self.fills[slot] = self.fills[slot].wrapping_add(1);
        self.next = (slot + 1) % self.fills.len();
        Entry {
            slot: slot as u32,
            fill: self.fills[slot],
        }
    }

    /// Returns the content of a slot; `None` if it was never filled.
    pub(crate) fn get(&self, slot: u32) -> Option<&[u8]> {
        let slot = slot as usize;
        if *self.fills.get(slot)? == 0 {
            return None;
        }
        let start = slot * self.block_bytes;
        self.bytes.get(start..start + self.block_bytes)
    }

    /// Returns the content of an entry, unless it was replaced.
    pub(crate) fn get_entry(&self, entry: Entry) -> Option<&[u8]> {
        (self.fills.get(entry.slot as usize) == Some(&entry.fill))
            .then(|| self.get(entry.slot))
            .flatten()
    }

    /// Returns a reference to the current content of a slot.
    pub(crate) fn entry(&self, slot: u32) -> Option<Entry> {
        let fill = *self.fills.get(slot as usize)?;
        (fill != 0).then_some(Entry { slot, fill })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_makes_room_and_is_known_to_be_gone() {
        let mut cache = Cache::new(300, 100).unwrap();
        assert_eq!(cache.slots(), 3);
        assert_eq!(cache.get(0), None);
        let entries: Vec<Entry> = (1..=4).map(|value| cache.add(&[value; 100])).collect();
        assert_eq!(cache.get_entry(entries[0]), None);
        assert_eq!(cache.get_entry(entries[3]), Some(&[4; 100][..]));
        assert_eq!(cache.entry(0), Some(entries[3]));
        assert_eq!(cache.next(), 1);
        cache.clear();
        assert_eq!(cache.get(1), None);
        assert_eq!(cache.get_entry(entries[3]), None);
        assert_eq!(cache.add(&[5; 100]).slot, 1);
        assert!(Cache::new(99, 100).is_err());
    }
}
