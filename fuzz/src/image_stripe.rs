//! Fuzzes a stored stripe of a base image: the first two bytes are the expected length of its
//! content, the others the store's answer.

use longhaul_image::{Digest, StripeFault, decode_stripe, encode_stripe};

/// Decodes the stripe: the result matches the digest, or is an error.
pub(crate) fn run(data: &[u8]) {
    let Some((length, stored)) = data.split_first_chunk() else {
        return;
    };
    let mut content = vec![0; usize::from(u16::from_le_bytes(*length)) + 1];
    let other = Digest([7; 32]);
    assert!(decode_stripe(stored, other, &mut content).is_err());
    // With the digest of its own content, if it has any, it is accepted.
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
