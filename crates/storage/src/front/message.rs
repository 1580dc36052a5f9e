//! Messages of a fixed size between a disk export and its owner: four little-endian numbers.

use std::io;

/// Bytes of every message, without content that may follow it.
pub const MESSAGE_BYTES: usize = 32;

/// Returns the bytes of a message.
pub(super) fn message(words: [u64; 4]) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Returns the numbers of a message.
pub(super) fn words(bytes: &[u8; MESSAGE_BYTES]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = bytes
            .iter()
            .rev()
            .fold(0, |word, byte| word << 8 | u64::from(*byte));
    }
    words
}

/// Returns the error for numbers without a meaning.
pub(super) fn not_understood() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "not a message of this version")
}
