//! Computes the fingerprint of a block: Hsieh's SuperFastHash.

/// Hashes a block whose length is a multiple of 4, so that the algorithm's steps for a remainder of
/// 1 to 3 bytes are not needed.
pub(crate) fn super_fast_hash(block: &[u8]) -> u32 {
    let (words, _) = block.as_chunks::<4>();
    let mut hash = block.len() as u32;
    for [a, b, c, d] in words {
        let low = u32::from(u16::from_le_bytes([*a, *b]));
        let high = u32::from(u16::from_le_bytes([*c, *d]));
        hash = hash.wrapping_add(low);
        hash = (hash << 16) ^ (high << 11) ^ hash;
        hash = hash.wrapping_add(hash >> 11);
    }
    hash ^= hash << 3;
    hash = hash.wrapping_add(hash >> 5);
    hash ^= hash << 4;
    hash = hash.wrapping_add(hash >> 17);
    hash ^= hash << 25;
    hash.wrapping_add(hash >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the hash by the definition, a step at a time, with a signed 64-bit accumulator cut
    /// to 32 bits.
    fn by_definition(block: &[u8]) -> u32 {
        let cut = |value: u64| value & 0xffff_ffff;
        let mut hash = block.len() as u64;
        for word in block.chunks(4) {
            hash = cut(hash + u64::from(word[0]) + (u64::from(word[1]) << 8));
            let high = u64::from(word[2]) + (u64::from(word[3]) << 8);
            let mixed = (high << 11) ^ hash;
            hash = cut((hash << 16) ^ mixed);
            hash = cut(hash + (hash >> 11));
        }
        for (left, right) in [(3, 5), (4, 17), (25, 6)] {
            hash = cut(hash ^ (hash << left));
            hash = cut(hash + (hash >> right));
        }
        hash as u32
    }

    #[test]
    fn it_follows_the_definition_and_spreads() {
        let mut seen = std::collections::HashSet::new();
        for seed in 0..2000_u32 {
            let block: Vec<u8> = (0..1024_u32)
                .map(|n| (n.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 13) as u8)
                .chain(seed.to_le_bytes())
                .collect();
            assert_eq!(super_fast_hash(&block), by_definition(&block));
            seen.insert(super_fast_hash(&block));
        }
        assert!(seen.len() > 1990, "{} of 2000", seen.len());
    }
}
