//! Comparing a guest's RAM at both ends, as the two QEMUs hold it.

use longhaul_codec::{DigestKey, Hasher};
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};

/// Most bytes that one digest may cover.
const DIGEST_BLOCKS_MAX: u32 = 4096;
/// Most digests in one answer: they have to fit a message.
const DIGESTS_MAX: u64 = 1 << 17;

/// Digests of consecutive pieces of a block of RAM, each of so many blocks.
pub(super) fn digests(
    memory: &GuestMemory,
    place: usize,
    range: BlockRange,
    blocks_per_digest: u32,
    key: DigestKey,
) -> Result<Vec<[u8; 16]>, String> {
    let piece = u64::from(blocks_per_digest);
    if !(1..=DIGEST_BLOCKS_MAX).contains(&blocks_per_digest)
        || range.count.div_ceil(piece) > DIGESTS_MAX
    {
        return Err(format!("{} blocks in digests of {piece} are too many", range.count));
    }
    let hasher = Hasher::new(key);
    let mut digests = Vec::new();
    let mut content = vec![0; blocks_per_digest as usize * BLOCK_SIZE];
    for start in (range.start..range.end()).step_by(blocks_per_digest as usize) {
        let count = (range.end() - start).min(piece);
        let content = &mut content[..count as usize * BLOCK_SIZE];
        let read = memory.read(place, &[BlockRange::new(start, count)], content);
        read.map_err(|error| error.to_string())?;
        digests.push(hasher.digest(content).0);
    }
    Ok(digests)
}
