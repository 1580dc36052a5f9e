//! Defines a page: its header, its checksum, and the errors it can have.

use crate::content::{Kind, Random};

/// Size of a page in bytes.
pub(crate) const PAGE_BYTES: usize = 4096;
const HEADER_BYTES: usize = 32;
const SEED_AT: usize = 8;
const CHECKSUM_AT: usize = 16;
/// Size of the rewritable body in bytes.
pub(crate) const BODY_BYTES: usize = PAGE_BYTES - HEADER_BYTES;

/// A page: index and version (4 bytes each), seed, checksum of everything else (8 bytes each),
/// 8 bytes of zero, then the body; little-endian.
#[derive(Clone)]
#[repr(C, align(4096))]
pub(crate) struct Page([u8; PAGE_BYTES]);

impl Page {
    pub(crate) const ZERO: Self = Self([0; PAGE_BYTES]);

    /// Makes this the page `index` at `version` 0 with new content.
    pub(crate) fn create(&mut self, index: u32, seed: u64, kind: Kind) {
        let mut random = Random::new(crate::content::mixed(seed.wrapping_add(u64::from(index))));
        kind.fill(&mut self.0[HEADER_BYTES..], &mut random);
        self.put(0, &index.to_le_bytes());
        self.put(4, &0_u32.to_le_bytes());
        self.put(SEED_AT, &seed.to_le_bytes());
        self.put(24, &[0; 8]);
        self.seal();
    }

    /// Changes `write_bytes` of the body at a place chosen by `random`, as `version`.
    pub(crate) fn rewrite(
        &mut self,
        version: u32,
        kind: Kind,
        write_bytes: usize,
        random: &mut Random,
    ) {
        let length = write_bytes.min(BODY_BYTES);
        let start = HEADER_BYTES + random.below(BODY_BYTES - length + 1);
        kind.fill(&mut self.0[start..start + length], random);
        self.put(4, &version.to_le_bytes());
        self.seal();
    }

    /// Compares the page with its expected content.
    pub(crate) fn check(&self, index: u32, version: u32, seed: u64) -> Result<(), Mismatch> {
        let found = (self.u32_at(0), self.u32_at(4), self.u64_at(SEED_AT));
        if found != (index, version, seed) {
            return Err(Mismatch {
                expected: format!("page {index} version {version} seed {seed}"),
                found: format!("page {} version {} seed {}", found.0, found.1, found.2),
            });
        }
        let (kept, computed) = (self.u64_at(CHECKSUM_AT), self.checksum());
        if kept != computed {
            return Err(Mismatch {
                expected: format!("version {version} checksum {kept:016x}"),
                found: format!("checksum {computed:016x}"),
            });
        }
        Ok(())
    }

    /// Compares the page with zeros.
    pub(crate) fn check_zero(&self) -> Result<(), Mismatch> {
        match self.0.iter().position(|byte| *byte != 0) {
            None => Ok(()),
            Some(at) => Err(Mismatch {
                expected: "zeros".to_owned(),
                found: format!("{:#04x} at byte {at}", self.0[at]),
            }),
        }
    }

    fn seal(&mut self) {
        self.put(CHECKSUM_AT, &self.checksum().to_le_bytes());
    }

    /// Returns the checksum of everything but its own field: four lanes, for speed.
    fn checksum(&self) -> u64 {
        let mut lanes = [1_u64, 2, 3, 4];
        for (number, chunk) in self.0.chunks_exact(32).enumerate() {
            for (lane, word) in lanes.iter_mut().zip(chunk.chunks_exact(8)) {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(word);
                *lane = (*lane ^ u64::from_le_bytes(bytes)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                *lane ^= *lane >> 29;
            }
            if number == 0 {
                lanes[CHECKSUM_AT / 8] = 3;
            }
        }
        lanes
            .iter()
            .fold(0, |sum, lane| crate::content::mixed(sum ^ lane))
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn u32_at(&self, at: usize) -> u32 {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(&self.0[at..at + 4]);
        u32::from_le_bytes(bytes)
    }

    fn u64_at(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.0[at..at + 8]);
        u64::from_le_bytes(bytes)
    }
}

/// A page's expected and actual content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) expected: String,
    pub(crate) found: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::ZERO;
        page.create(7, 3, Kind::Text);
        page
    }

    #[test]
    fn every_flipped_byte_is_found() {
        for at in 0..PAGE_BYTES {
            let mut page = page();
            page.0[at] ^= 0x40;
            assert!(page.check(7, 0, 3).is_err(), "byte {at}");
        }
    }

    #[test]
    fn an_older_version_is_found() {
        let mut page = page();
        let old = page.clone();
        page.rewrite(1, Kind::Text, 512, &mut Random::new(1));
        assert_eq!(page.check(7, 1, 3), Ok(()));
        let mismatch = old.check(7, 1, 3).unwrap_err();
        assert_eq!(mismatch.expected, "page 7 version 1 seed 3");
        assert_eq!(mismatch.found, "page 7 version 0 seed 3");
    }

    #[test]
    fn a_rewrite_changes_the_bytes_asked_for() {
        let (before, mut after) = (page(), page());
        after.rewrite(1, Kind::Random, 512, &mut Random::new(4));
        let body = |page: &Page| page.0[HEADER_BYTES..].to_vec();
        let changed = body(&before)
            .iter()
            .zip(body(&after))
            .filter(|(a, b)| **a != *b)
            .count();
        assert!((480..=512).contains(&changed), "{changed}");
        after.rewrite(2, Kind::Random, 1 << 20, &mut Random::new(4));
        assert_eq!(after.check(7, 2, 3), Ok(()));
    }

    #[test]
    fn zeros_are_checked() {
        assert_eq!(Page::ZERO.check_zero(), Ok(()));
        assert!(page().check_zero().is_err());
    }
}
