//! Digests of the content of a guest's RAM and disks. Both ends compute and compare them.

use longhaul_codec::{DigestKey, Hasher};
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_storage::disk::{Disk as _, RawDisk};
use std::sync::Arc;

/// Limit on the blocks that one digest covers.
const DIGEST_BLOCKS_MAX: u32 = 4096;
/// Limit on the digests in one answer, which must fit a message.
pub(crate) const DIGESTS_MAX: u64 = 1 << 17;
pub(crate) const BLOCK: u64 = BLOCK_SIZE as u64;
/// Sent instead of the digest of blocks that the guest has written at the destination.
pub(crate) const WRITTEN: [u8; 16] = [0; 16];

/// The content that is compared.
#[derive(Clone)]
pub(crate) enum Content {
    /// A RAM block of the guest, by its index.
    Memory(Arc<GuestMemory>, usize),
    /// A disk.
    Disk(Arc<RawDisk>),
}

impl Content {
    fn read(&self, range: BlockRange, into: &mut [u8]) -> Result<(), String> {
        match self {
            Self::Memory(memory, place) => {
                let read = memory.read(*place, &[range], into);
                read.map_err(|error| error.to_string())
            }
            Self::Disk(disk) => crate::disks::read_blocks(disk, range, into),
        }
    }

    /// Returns whether a range is known to be zero without reading it.
    fn is_hole(&self, range: BlockRange) -> bool {
        let Self::Disk(disk) = self else { return false };
        let bytes = range.start * BLOCK..range.end() * BLOCK;
        let found = match bytes.end <= disk.size_bytes() {
            true => disk.extents(bytes.clone(), 1).unwrap_or_default(),
            false => Vec::new(),
        };
        let whole = bytes.end - bytes.start;
        found
            .first()
            .is_some_and(|it| it.hole && it.length_bytes >= whole)
    }

    /// Returns digests of consecutive pieces of `blocks_per_digest` blocks each.
    pub(crate) fn digests(
        &self,
        range: BlockRange,
        blocks_per_digest: u32,
        key: DigestKey,
    ) -> Result<Vec<[u8; 16]>, String> {
        let piece = u64::from(blocks_per_digest);
        if !(1..=DIGEST_BLOCKS_MAX).contains(&blocks_per_digest)
            || range.count.div_ceil(piece) > DIGESTS_MAX
        {
            return Err(format!(
                "{} blocks in digests of {piece} are too many",
                range.count
            ));
        }
        let hasher = Hasher::new(key);
        let mut digests = Vec::new();
        let mut content = vec![0; blocks_per_digest as usize * BLOCK_SIZE];
        let mut of_zeros = None;
        for start in (range.start..range.end()).step_by(blocks_per_digest as usize) {
            let part = BlockRange::new(start, (range.end() - start).min(piece));
            let content = &mut content[..part.count as usize * BLOCK_SIZE];
            if part.count == piece && self.is_hole(part) {
                digests.push(*of_zeros.get_or_insert_with(|| {
                    content.fill(0);
                    hasher.digest(content).0
                }));
                continue;
            }
            self.read(part, content)?;
            digests.push(hasher.digest(content).0);
        }
        Ok(digests)
    }
}
