//! Compression of data other than blocks, such as the state of a guest's devices: one Zstandard
//! frame (RFC 8878).

use std::io;

/// Device state is small and compresses well: a higher level gains little.
const LEVEL: i32 = 3;

/// Compresses bytes.
pub fn pack(bytes: &[u8]) -> io::Result<Vec<u8>> {
    zstd::bulk::compress(bytes, LEVEL)
}

/// Decompresses the output of [`pack`], if that is at most `limit` bytes long.
pub fn unpack(packed: &[u8], limit: usize) -> io::Result<Vec<u8>> {
    zstd::bulk::decompress(packed, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_and_limits_hold() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n / 100) as u8).collect();
        let packed = pack(&bytes).unwrap();
        assert!(packed.len() < bytes.len() / 10);
        assert_eq!(unpack(&packed, bytes.len()).unwrap(), bytes);
        assert!(unpack(&packed, bytes.len() - 1).is_err());
        assert!(unpack(&packed[..packed.len() - 1], bytes.len()).is_err());
        assert!(unpack(b"nothing of the kind", 100).is_err());
    }
}
