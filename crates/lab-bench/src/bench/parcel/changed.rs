//! Computes from outside what had to be sent of disks of which an earlier copy was there.

use serde::Serialize;
use std::collections::HashSet;
use std::io;

const BLOCK_BYTES: usize = 4096;
/// Blocks that are compressed together, at this level.
const GROUP_BLOCKS: usize = 64;
const ZSTD_LEVEL: i32 = 3;

/// Blocks that have changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Changed {
    /// Bytes of blocks that have changed.
    pub(super) changed_bytes: u64,
    /// Those of them that are zero now.
    pub(super) zero_bytes: u64,
    /// Those that equal another one of them.
    pub(super) duplicate_bytes: u64,
    /// What all others are compressed to.
    pub(super) compressed_bytes: u64,
}

/// Compares all disks of a guest with their earlier copies, together: blocks of one may equal
/// blocks of another. Only blocks that `counts` names, by disk and number, are considered.
pub(super) fn between(
    disks: &[(Vec<u8>, Vec<u8>)],
    counts: impl Fn(usize, usize) -> bool,
) -> io::Result<Changed> {
    let mut all = Changed::default();
    let mut seen = HashSet::new();
    let mut group = Vec::new();
    for (number, (before, now)) in disks.iter().enumerate() {
        for (place, block) in now.chunks(BLOCK_BYTES).enumerate() {
            if !differs(before, now, place) || !counts(number, place) {
                continue;
            }
            let bytes = block.len() as u64;
            all.changed_bytes += bytes;
            if block.iter().all(|byte| *byte == 0) {
                all.zero_bytes += bytes;
            } else if !seen.insert(blake3::hash(block)) {
                all.duplicate_bytes += bytes;
            } else {
                group.extend_from_slice(block);
                if group.len() >= GROUP_BLOCKS * BLOCK_BYTES {
                    all.compressed_bytes += compressed(&group)?;
                    group.clear();
                }
            }
        }
    }
    if !group.is_empty() {
        all.compressed_bytes += compressed(&group)?;
    }
    Ok(all)
}

/// Returns whether two versions of a disk differ in a block.
pub(super) fn differs(before: &[u8], now: &[u8], block: usize) -> bool {
    let from = block * BLOCK_BYTES;
    let part = |disk: &[u8]| -> Vec<u8> {
        let rest = disk.get(from..).unwrap_or_default();
        rest.get(..BLOCK_BYTES).unwrap_or(rest).to_vec()
    };
    part(before) != part(now)
}

fn compressed(group: &[u8]) -> io::Result<u64> {
    Ok(zstd::bulk::compress(group, ZSTD_LEVEL)?.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_and_repetitions_need_not_be_sent() {
        let block = |byte: u8| vec![byte; BLOCK_BYTES];
        let mut random = vec![0; BLOCK_BYTES];
        blake3::Hasher::new().finalize_xof().fill(&mut random);
        let before = [block(1), block(2), block(3), block(4), block(5)].concat();
        let now = [block(1), random.clone(), block(0), random.clone(), block(6)].concat();
        let other = (block(7), random.clone());
        let disks = [(before, now), other];
        let changed = between(&disks, |_, _| true).unwrap();
        let blocks = |n: u64| n * BLOCK_BYTES as u64;
        assert_eq!(changed.changed_bytes, blocks(5));
        assert_eq!(changed.zero_bytes, blocks(1));
        assert_eq!(changed.duplicate_bytes, blocks(2));
        // The random block does not compress, that of sixes to next to nothing.
        let left = changed.compressed_bytes;
        assert!((blocks(1)..blocks(1) + 64).contains(&left), "{left}");
        let one = between(&disks, |disk, place| (disk, place) == (0, 2)).unwrap();
        assert_eq!((one.changed_bytes, one.compressed_bytes), (blocks(1), 0));
        let same = [(disks[0].0.clone(), disks[0].0.clone())];
        assert_eq!(between(&same, |_, _| true).unwrap(), Changed::default());
    }

    #[test]
    fn a_disk_that_grew_has_changed_where_it_grew() {
        let disks = [(vec![1; 100], vec![1; BLOCK_BYTES + 10])];
        let changed = between(&disks, |_, _| true).unwrap();
        assert_eq!(changed.changed_bytes, BLOCK_BYTES as u64 + 10);
    }
}
