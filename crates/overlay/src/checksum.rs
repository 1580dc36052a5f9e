//! Computes internet checksums (RFC 1071).

/// Returns the sum of 16-bit big-endian words, not folded; an odd last byte counts as the upper
/// half of a word.
#[inline]
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    // The sum of 32-bit words is congruent, since 2^16 is 1 modulo 2^16 - 1.
    let (words, rest) = bytes.as_chunks::<4>();
    let mut total = 0u64;
    for word in words {
        total += u64::from(u32::from_be_bytes(*word));
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    total + u64::from(u32::from_be_bytes(last))
}

/// Folds a sum to 16 bits.
#[inline]
pub(crate) fn fold(mut sum: u64) -> u16 {
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff_ffff) + (sum >> 32);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}

/// Returns the sum of an IPv6 pseudo-header (RFC 8200, section 8.1): `addresses` are the source
/// and the destination, 32 bytes, or those of IPv4, 8 bytes (RFC 9293, section 3.1).
#[inline]
pub(crate) fn pseudo(addresses: &[u8], protocol: u8, length: usize) -> u64 {
    sum(addresses) + u64::from(protocol) + length as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of RFC 1071, section 3.
    #[test]
    fn the_example_of_the_rfc() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(fold(sum(&bytes)), 0xddf2);
    }

    #[test]
    fn odd_lengths_are_padded() {
        for length in 0..40u8 {
            let bytes: Vec<u8> = (0..length).map(|byte| byte.wrapping_mul(77)).collect();
            let mut padded = bytes.clone();
            padded.resize(bytes.len().next_multiple_of(2), 0);
            let slow = padded
                .chunks(2)
                .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair[1]])));
            assert_eq!(fold(sum(&bytes)), fold(slow.sum()), "{length}");
        }
        assert_eq!(fold(sum(&[0xff; 1 << 16])), 0xffff);
    }
}
