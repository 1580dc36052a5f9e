//! Defines the content of a sector: its writer, place and time, and a body derived from these.
//!
//! | offset | bytes | content (little-endian) |
//! |---|---|---|
//! | 0 | 8 | `lh-disk` and a newline |
//! | 8 | 8 | the history's seed |
//! | 16 | 8 | number of the operation |
//! | 24 | 8 | number of the sector on its disk |
//! | 32 | 4 | number of the disk |
//! | 36 | 4 | zero |
//! | 40 | 472 | body: random in every second operation, one repeated word in the others |
//!
//! In a history with [`RANDOM_BODIES`] the body is always random.

use crate::plan::{OPERATIONS_MAX, SECTOR_BYTES};
use crate::random::{Random, mixed};

const MAGIC: [u8; 8] = *b"lh-disk\n";
const BODY_AT: usize = 40;

/// A bit of the seed: no write of the history is compressible.
pub const RANDOM_BODIES: u64 = 1 << 63;

/// A sector's bytes.
pub type Sector = [u8; SECTOR_BYTES];

/// The content found in a sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Nothing but zeros.
    Zeros,
    /// Exactly the content that this operation writes there.
    Written(u64),
    /// It begins as an operation's content, and differs later.
    Torn {
        /// The operation.
        number: u64,
        /// The first byte that differs.
        byte: usize,
    },
    /// Content that an operation writes to another place.
    Misplaced {
        /// The operation.
        number: u64,
        /// The disk that it belongs to.
        disk: u32,
        /// The sector that it belongs to.
        sector: u64,
    },
    /// A sector of another history.
    OtherHistory {
        /// That history's seed.
        seed: u64,
    },
    /// Anything else.
    Foreign,
}

/// Fills a sector as an operation writes it.
pub fn fill(bytes: &mut Sector, seed: u64, disk: u32, sector: u64, number: u64) {
    let (head, body) = bytes.split_at_mut(BODY_AT);
    head[..8].copy_from_slice(&MAGIC);
    for (place, word) in [(8, seed), (16, number), (24, sector), (32, u64::from(disk))] {
        head[place..place + 8].copy_from_slice(&word.to_le_bytes());
    }
    let own = mixed(seed ^ mixed(number ^ mixed(sector ^ (u64::from(disk) << 56))));
    let mut random = Random::new(own);
    for word in body.chunks_exact_mut(8) {
        let next = if number.is_multiple_of(2) || seed & RANDOM_BODIES != 0 {
            random.draw()
        } else {
            own
        };
        word.copy_from_slice(&next.to_le_bytes());
    }
}

/// Identifies the content of a sector.
pub fn identify(bytes: &Sector, seed: u64, disk: u32, sector: u64) -> Content {
    if *bytes == [0; SECTOR_BYTES] {
        return Content::Zeros;
    }
    let word = |place: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[place..place + 8]);
        u64::from_le_bytes(word)
    };
    if bytes[..8] != MAGIC {
        return Content::Foreign;
    }
    if word(8) != seed {
        return Content::OtherHistory { seed: word(8) };
    }
    let (number, its_sector, its_disk) = (word(16), word(24), word(32));
    if number >= OPERATIONS_MAX {
        return Content::Foreign;
    }
    if (its_disk, its_sector) != (u64::from(disk), sector) {
        return Content::Misplaced {
            number,
            disk: its_disk as u32,
            sector: its_sector,
        };
    }
    let mut whole = [0; SECTOR_BYTES];
    fill(&mut whole, seed, disk, sector, number);
    match whole
        .iter()
        .zip(bytes)
        .position(|(one, other)| one != other)
    {
        None => Content::Written(number),
        Some(byte) => Content::Torn { number, byte },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_says_what_it_is() {
        let mut sector = [0; SECTOR_BYTES];
        assert_eq!(identify(&sector, 3, 1, 70), Content::Zeros);
        for number in [812, 813] {
            fill(&mut sector, 3, 1, 70, number);
            assert_eq!(identify(&sector, 3, 1, 70), Content::Written(number));
            let other = Content::OtherHistory { seed: 3 };
            assert_eq!(identify(&sector, 4, 1, 70), other);
            let misplaced = Content::Misplaced {
                number,
                disk: 1,
                sector: 70,
            };
            assert_eq!(identify(&sector, 3, 0, 70), misplaced);
            assert_eq!(identify(&sector, 3, 1, 71), misplaced);
            for byte in [39, 40, 300, 511] {
                let mut torn = sector;
                torn[byte] ^= 1;
                let found = identify(&torn, 3, 1, 70);
                // The disk's number ends with byte 39.
                assert_eq!(
                    found == Content::Torn { number, byte },
                    byte > 39,
                    "{found:?}"
                );
                assert_ne!(found, Content::Written(number));
            }
        }
        sector[0] = 0;
        assert_eq!(identify(&sector, 3, 1, 70), Content::Foreign);
    }

    #[test]
    fn bodies_repeat_only_where_they_may() {
        let repeats = |seed: u64, number: u64| {
            let mut sector = [0; SECTOR_BYTES];
            fill(&mut sector, seed, 0, 1, number);
            assert_eq!(identify(&sector, seed, 0, 1), Content::Written(number));
            sector[BODY_AT..BODY_AT + 8] == sector[BODY_AT + 8..BODY_AT + 16]
        };
        assert_eq!([0, 1].map(|number| repeats(3, number)), [false, true]);
        let random = [0, 1].map(|number| repeats(3 | RANDOM_BODIES, number));
        assert_eq!(random, [false, false]);
    }
}
