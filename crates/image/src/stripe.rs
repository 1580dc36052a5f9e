//! The stored form of a stripe: compressed, and checked by its digest on reading.

use crate::manifest::STRIPE_BYTES;
use crate::name::Digest;
use std::io;

/// Zstandard's level: an image is written once, and read over links many times.
const LEVEL: i32 = 6;
/// Longest stored stripe: incompressible content grows a little.
pub(crate) const STORED_BYTES_MAX: u64 = STRIPE_BYTES + (4 << 10);

/// A fault of a stored stripe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StripeFault {
    /// It is not a Zstandard frame of the right length.
    #[error("it cannot be decompressed")]
    Compressed,
    /// Its content is another one.
    #[error("it holds something else than its digest says")]
    Digest,
}

/// Returns the stored form of a stripe.
pub fn encode_stripe(content: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(content, LEVEL)
}

/// Decodes a stored stripe into a buffer of its length, whose content is undefined after an error.
pub fn decode_stripe(stored: &[u8], digest: Digest, content: &mut [u8]) -> Result<(), StripeFault> {
    let length = zstd::bulk::decompress_to_buffer(stored, content);
    if length.ok() != Some(content.len()) {
        return Err(StripeFault::Compressed);
    }
    match Digest::of(content) == digest {
        true => Ok(()),
        false => Err(StripeFault::Digest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise() -> Vec<u8> {
        let mut state = 1_u64;
        let next = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        };
        std::iter::repeat_with(next)
            .take(STRIPE_BYTES as usize)
            .collect()
    }

    #[test]
    fn stripes_come_back() {
        let text = b"abcdefgh".repeat(1000);
        for content in [noise(), text, vec![7]] {
            let stored = encode_stripe(&content).unwrap();
            assert!(stored.len() as u64 <= STORED_BYTES_MAX);
            let mut back = vec![1; content.len()];
            decode_stripe(&stored, Digest::of(&content), &mut back).unwrap();
            assert_eq!(back, content);
        }
    }

    #[test]
    fn damage_is_noticed() {
        let content = b"abcdefgh".repeat(1000);
        let digest = Digest::of(&content);
        let stored = encode_stripe(&content).unwrap();
        let mut buffer = vec![0; content.len()];
        let mut check = |stored: &[u8], length: usize| {
            decode_stripe(stored, digest, &mut buffer[..length]).unwrap_err()
        };
        assert_eq!(check(b"", 8000), StripeFault::Compressed);
        assert_eq!(
            check(&stored[..stored.len() - 1], 8000),
            StripeFault::Compressed
        );
        assert_eq!(check(&stored, 7999), StripeFault::Compressed);
        let other = encode_stripe(&b"abcdefgi".repeat(1000)).unwrap();
        assert_eq!(check(&other, 8000), StripeFault::Digest);
    }
}
