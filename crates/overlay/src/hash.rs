//! Hashes the keys of tables quickly, under a secret: guests choose their addresses, and must not
//! be able to choose addresses that collide.

use std::hash::{BuildHasher, Hasher};

/// Makes hashers with one secret.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keyed {
    start: u64,
    factor: u64,
}

impl Keyed {
    pub(crate) fn new(secret: [u64; 2]) -> Self {
        Self {
            start: secret[0] ^ 0x9e37_79b9_7f4a_7c15,
            factor: (secret[1] ^ 0xd6e8_feb8_6659_fd93) | 1,
        }
    }
}

impl BuildHasher for Keyed {
    type Hasher = KeyedHasher;

    #[inline]
    fn build_hasher(&self) -> KeyedHasher {
        KeyedHasher {
            state: self.start,
            factor: self.factor,
        }
    }
}

/// Folds each word into its state by a multiplication of 64 by 64 bits.
#[derive(Debug, Clone)]
pub(crate) struct KeyedHasher {
    state: u64,
    factor: u64,
}

#[inline]
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    (product as u64) ^ (product >> 64) as u64
}

impl Hasher for KeyedHasher {
    #[inline]
    fn finish(&self) -> u64 {
        fold(self.state, self.factor.rotate_left(32) | 1)
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        // Rotated, so that the order of words matters.
        self.state = fold(self.state.rotate_left(23) ^ word, self.factor);
    }

    #[inline]
    fn write_u16(&mut self, word: u16) {
        self.write_u64(u64::from(word));
    }

    #[inline]
    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.write_u64(u64::from_le_bytes(last) ^ ((rest.len() as u64) << 56));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn consecutive_addresses_spread() {
        let keyed = Keyed::new([1, 2]);
        for shift in [0, 8, 24, 40] {
            let low: HashSet<u64> = (0..1024u64)
                .map(|number| keyed.hash_one(number << shift) & 0x3ff)
                .collect();
            // Random values: 1024 * (1 - 1/e) = 647.
            assert!(low.len() > 580, "{shift}: {}", low.len());
        }
        let other = Keyed::new([1, 4]);
        assert_ne!(keyed.hash_one(7u64), other.hash_one(7u64));
    }
}
