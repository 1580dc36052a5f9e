//! Provides the building blocks of the explorer's states: lists without memory of their own, and a
//! fast hash.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

/// A list of at most `N` small numbers, none of them zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Small<const N: usize>([u8; N]);

impl<const N: usize> Default for Small<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize> Small<N> {
    pub(crate) fn len(&self) -> usize {
        self.0.iter().take_while(|item| **item != 0).count()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0[0] == 0
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = u8> {
        self.0[..self.len()].iter().copied()
    }

    /// Returns its bytes as a number; `N` is at most 8.
    pub(crate) fn word(&self) -> u64 {
        self.0
            .iter()
            .rev()
            .fold(0, |word, item| word << 8 | u64::from(*item))
    }

    pub(crate) fn first(&self) -> Option<u8> {
        (self.0[0] != 0).then_some(self.0[0])
    }

    /// Appends an item; returns whether there was room.
    #[must_use]
    pub(crate) fn push(&mut self, item: u8) -> bool {
        let at = self.len();
        if let Some(place) = self.0.get_mut(at) {
            *place = item;
        }
        at < N
    }

    /// Keeps the items for which `keep` is true, in their order.
    pub(crate) fn retain(&mut self, keep: impl Fn(u8) -> bool) {
        let mut kept = Self::default();
        let items = self.iter().filter(|item| keep(*item));
        for (place, item) in kept.0.iter_mut().zip(items) {
            *place = item;
        }
        *self = kept;
    }

    pub(crate) fn pop_front(&mut self) -> Option<u8> {
        let first = self.first()?;
        self.0.copy_within(1.., 0);
        self.0[N - 1] = 0;
        Some(first)
    }
}

/// A 64-bit hash: words are folded in by multiplication.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Folding(u64);

impl Folding {
    pub(crate) fn fold(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

impl Hasher for Folding {
    fn finish(&self) -> u64 {
        let mut last = *self;
        last.fold(0x2545_f491_4f6c_dd1d);
        last.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, byte: u8) {
        self.fold(u64::from(byte));
    }

    fn write_u32(&mut self, word: u32) {
        self.fold(u64::from(word));
    }

    fn write_u64(&mut self, word: u64) {
        self.fold(word);
    }

    // Lengths of arrays, which never change, and the numbers of variants.
    fn write_usize(&mut self, _: usize) {}

    fn write_isize(&mut self, word: isize) {
        self.fold(word as u64);
    }
}

pub(crate) type Quick = BuildHasherDefault<Folding>;

/// Passes on a number that is a hash already.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 | u64::from(*byte);
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = word;
    }
}

/// A set of hashes.
pub(crate) type Fingerprints = HashSet<u64, BuildHasherDefault<AsItIs>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_its_order_and_says_when_it_is_full() {
        let mut list = Small::<3>::default();
        assert!(list.is_empty() && list.push(1) && list.push(2) && list.push(3));
        assert!(!list.push(4));
        assert_eq!(list.iter().collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(list.pop_front(), Some(1));
        assert_eq!((list.len(), list.first()), (2, Some(2)));
    }
}
