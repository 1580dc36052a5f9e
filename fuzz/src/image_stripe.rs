//! A stored stripe of a base image: the first two bytes say how long its content is to be, the
//! rest is what the store gave.

use longhaul_image::{Digest, StripeFault, decode_stripe, encode_stripe};

/// Reads it: what comes out is what the digest says, or nothing.
pub(crate) fn run(data: &[u8]) {
    let Some((length, stored)) = data.split_first_chunk() else {
        return;
    };
    let mut content = vec![0; usize::from(u16::from_le_bytes(*length)) + 1];
    let other = Digest([7; 32]);
    assert!(decode_stripe(stored, other, &mut content).is_err());
    // With the digest of what it holds, if it holds anything, it is whole.
    let digest = match decode_stripe(stored, other, &mut content) {
        Err(StripeFault::Digest) => Digest::of(&content),
        Ok(()) | Err(StripeFault::Compressed) => return,
    };
    let mut again = vec![1; content.len()];
    decode_stripe(stored, digest, &mut again).expect("it was read just now");
    assert_eq!(again, content);
    let encoded = encode_stripe(&content).expect("it fits");
    decode_stripe(&encoded, digest, &mut again).expect("our own");
}
