//! Memory that files and devices read and write without a copy in the page cache.

/// What the memory, the offset and the length of direct reads and writes are multiples of: the
/// largest block that usual devices have.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Bytes that begin at a multiple of a block.
pub(crate) struct Aligned {
    /// The bytes, with others before and behind them.
    all: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    /// Creates zeros.
    pub(crate) fn zeros(length: usize) -> Self {
        let all = vec![0; length + BLOCK_BYTES - 1];
        // Where it cannot be aligned, reads and writes are not direct.
        let start = match all.as_ptr().align_offset(BLOCK_BYTES) {
            start if start < BLOCK_BYTES => start,
            _ => 0,
        };
        Self { all, start, length }
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
        for length in [1, 512, 5000, 1 << 20] {
            let mut bytes = Aligned::zeros(length);
            bytes.bytes_mut().fill(7);
            for it in [&bytes, &bytes.clone()] {
                assert_eq!(it.bytes(), vec![7; length]);
                assert_eq!(it.bytes().as_ptr() as usize % BLOCK_BYTES, 0);
            }
        }
    }
}
