//! Memory that files and devices read and write without a copy in the page cache.

use nix::libc::{MADV_COLLAPSE, MADV_HUGEPAGE, madvise};

/// What the memory, the offset and the length of direct reads and writes are multiples of: the
/// largest block that usual devices have.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Bytes of a huge page. A disk reads into a few of them up to three times as fast as into the many
/// pages that would be in their place, each of which is a part of the request.
const HUGE_BYTES: usize = 2 << 20;

/// Bytes that begin at a multiple of a block, and are in huge pages if they fill any.
pub(crate) struct Aligned {
    /// The bytes, with others before and behind them.
    all: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    /// Creates zeros.
    pub(crate) fn zeros(length: usize) -> Self {
        let alignment = match length < HUGE_BYTES {
            true => BLOCK_BYTES,
            false => HUGE_BYTES,
        };
        let all = vec![0; length + alignment - 1];
        // Where it cannot be aligned, reads and writes are not direct.
        let start = match all.as_ptr().align_offset(alignment) {
            start if start < alignment => start,
            _ => 0,
        };
        let mut zeros = Self { all, start, length };
        let huge = length - length % HUGE_BYTES;
        if huge > 0 {
            in_huge_pages(zeros.bytes_mut().get_mut(..huge).unwrap_or_default());
        }
        zeros
    }

    /// Returns the bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        let bytes = self.all.get(self.start..self.start + self.length);
        bytes.unwrap_or_default()
    }

    /// Returns the bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.all.get_mut(self.start..self.start + self.length);
        bytes.unwrap_or_default()
    }
}

/// Asks for huge pages. Without them everything is only slower.
#[expect(unsafe_code, reason = "there is no safe wrapper of madvise")]
fn in_huge_pages(bytes: &mut [u8]) {
    for advice in [MADV_HUGEPAGE, MADV_COLLAPSE] {
        // SAFETY: the advice changes in which pages the bytes are, and not the bytes.
        unsafe { madvise(bytes.as_mut_ptr().cast(), bytes.len(), advice) };
    }
}

impl Clone for Aligned {
    fn clone(&self) -> Self {
        let mut clone = Self::zeros(self.length);
        clone.bytes_mut().copy_from_slice(self.bytes());
        clone
    }
}

impl PartialEq for Aligned {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Aligned {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_aligned_and_those_of_the_clone_too() {
        for length in [1, 512, 5000, 1 << 20, 2 << 20, (4 << 20) + 1] {
            let mut bytes = Aligned::zeros(length);
            bytes.bytes_mut().fill(7);
            for it in [&bytes, &bytes.clone()] {
                assert_eq!(it.bytes(), vec![7; length]);
                assert_eq!(it.bytes().as_ptr() as usize % BLOCK_BYTES, 0);
            }
        }
    }
}
