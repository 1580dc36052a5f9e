//! Patches: the blocks of a chunk that differ from what the replica's host has.
//!
//! The source asks with the digests of a chunk's blocks ([`blocks_of`]), the host answers which
//! ones differ ([`Replica::differing`](super::Replica::differing)), and the source sends those.

use crate::record::{CHUNK_BYTES, Chunk, Packer, RecordError};
use ring::digest::{SHA256, digest};

/// The kind of a record that has a patch. Parcels have none.
pub(crate) const KIND_PATCH: u8 = 16;
/// Bytes of a block.
const BLOCK_BYTES: usize = CHUNK_BYTES / 64;
/// Bytes of a block's digest: the first ones of its SHA-256. The whole chunk is compared too.
const DIGEST_BYTES: usize = 16;
/// The digest of a whole chunk.
const WHOLE_BYTES: usize = 32;
/// Where nothing is saved: a record of a few blocks.
const SMALL_BYTES: usize = 2 * BLOCK_BYTES;

/// Returns whether the blocks of a chunk are worth a question, by its content and its record.
pub(crate) fn is_worth_asking(content: &[u8], rest: &[u8]) -> bool {
    content.len() > SMALL_BYTES && rest.len() > SMALL_BYTES
}

/// Returns the digests of the blocks of a chunk.
pub(crate) fn blocks_of(content: &[u8]) -> Vec<u8> {
    let blocks = content.chunks(BLOCK_BYTES);
    let each = blocks.flat_map(|block| {
        let whole = digest(&SHA256, block);
        let first: [u8; DIGEST_BYTES] = whole.as_ref().first_chunk().copied().unwrap_or_default();
        first
    });
    each.collect()
}

/// Returns for each block, from the lowest bit on, whether it has another digest. `content` is what
/// is there, and may be shorter.
pub(super) fn differing(content: &[u8], digests: &[u8]) -> u64 {
    let here = blocks_of(content);
    let mut here = here.chunks(DIGEST_BYTES);
    let each = digests.chunks(DIGEST_BYTES).enumerate();
    each.fold(0, |mask, (at, wanted)| {
        let is_other = here.next() != Some(wanted);
        mask | u64::from(is_other).checked_shl(at as u32).unwrap_or(0)
    })
}

/// A patch of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Patch {
    pub(super) disk: u32,
    pub(super) chunk: u64,
    /// The length of the chunk afterwards.
    pub(super) length: usize,
    /// The digest of the chunk afterwards.
    digest: [u8; WHOLE_BYTES],
    /// The blocks that the content has.
    mask: u64,
    content: Vec<u8>,
}

/// Returns the rest of a record with a patch, of the rest of a chunk's record and the blocks that
/// differ; `None` if that is as short.
pub(crate) fn encode(
    rest: &[u8],
    mask: u64,
    whole: &[u8; WHOLE_BYTES],
    packer: &mut Packer,
) -> Result<Option<Vec<u8>>, RecordError> {
    let differing = mask.count_ones() as usize * BLOCK_BYTES;
    if differing > CHUNK_BYTES / 2 {
        return Ok(None);
    }
    let Chunk {
        disk,
        chunk,
        content: Some(content),
        ..
    } = Chunk::decode(rest)?
    else {
        return Ok(None);
    };
    let blocks = content.chunks(BLOCK_BYTES).enumerate();
    let blocks = blocks.filter(|(at, _)| mask >> at & 1 == 1);
    let blocks: Vec<u8> = blocks.flat_map(|(_, block)| block).copied().collect();
    let mut patch = Vec::with_capacity(64 + blocks.len());
    patch.extend((content.len() as u32).to_le_bytes());
    patch.extend(mask.to_le_bytes());
    patch.extend(whole);
    // The blocks are encoded as those of a chunk are; nothing is nothing but zeros.
    let content = Some(&*blocks).filter(|blocks| !blocks.is_empty());
    patch.extend(packer.encode((0, disk, chunk), content)?);
    Ok((patch.len() < rest.len()).then_some(patch))
}

impl Patch {
    pub(super) fn decode(rest: &[u8]) -> Result<Self, RecordError> {
        const SHORT: RecordError = RecordError::Contradiction("a patch is too short");
        const WRONG: RecordError =
            RecordError::Contradiction("a patch has other blocks than it says");
        let (length, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let (mask, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let (digest, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let blocks = Chunk::decode(rest)?;
        let length = u32::from_le_bytes(*length) as usize;
        let mask = u64::from_le_bytes(*mask);
        let content = blocks.content.unwrap_or_default();
        let count = length.div_ceil(BLOCK_BYTES);
        let is_possible = (1..=CHUNK_BYTES).contains(&length)
            && blocks.guest == 0
            && mask.checked_shr(count as u32).unwrap_or(0) == 0
            && Self::bytes_of(length, mask) == content.len();
        match is_possible {
            true => Ok(Self {
                disk: blocks.disk,
                chunk: blocks.chunk,
                length,
                digest: *digest,
                mask,
                content,
            }),
            false => Err(WRONG),
        }
    }

    /// Returns how many bytes some blocks of a chunk have.
    fn bytes_of(length: usize, mask: u64) -> usize {
        let blocks = (0..64).filter(|at| mask >> at & 1 == 1);
        let each = blocks.map(|at| length.saturating_sub(at * BLOCK_BYTES).min(BLOCK_BYTES));
        each.sum()
    }

    /// Applies it to what the chunk was. Returns what it is, and its digest, if the patch fits.
    pub(super) fn apply(&self, mut content: Vec<u8>) -> Option<(Vec<u8>, [u8; WHOLE_BYTES])> {
        content.resize(self.length, 0);
        let mut rest = &*self.content;
        for (at, block) in content.chunks_mut(BLOCK_BYTES).enumerate() {
            if self.mask >> at & 1 == 1 {
                let (new, others) = rest.split_at_checked(block.len())?;
                block.copy_from_slice(new);
                rest = others;
            }
        }
        let digest = crate::tree::Tree::of_chunk(&content);
        (digest == self.digest).then_some((content, digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lives::dice::Dice;
    use crate::tree::Tree;

    #[test]
    fn a_patch_has_the_blocks_that_differ() {
        let mut dice = Dice(5);
        let mut packer = Packer::default();
        for length in [CHUNK_BYTES, CHUNK_BYTES - BLOCK_BYTES / 2, 3 * BLOCK_BYTES] {
            let old = dice.bytes(length);
            for changed in [0, 1, 7] {
                let mut new = old.clone();
                for _ in 0..changed {
                    let at = dice.below(length as u64) as usize;
                    new[at] = !new[at];
                }
                // The image may still be shorter.
                let there = &old[..length - BLOCK_BYTES / 4];
                let mask = differing(there, &blocks_of(&new));
                assert!((1..=changed + 1).contains(&mask.count_ones()));
                let rest = packer.encode((0, 3, 9), Some(&new)).unwrap();
                let whole = Tree::of_chunk(&new);
                let Some(bytes) = encode(&rest, mask, &whole, &mut packer).unwrap() else {
                    // It would be longer.
                    assert!(length < CHUNK_BYTES / 2);
                    continue;
                };
                assert!(bytes.len() < 100 + mask.count_ones() as usize * BLOCK_BYTES);
                let patch = Patch::decode(&bytes).unwrap();
                assert_eq!((patch.disk, patch.chunk, patch.length), (3, 9, length));
                assert_eq!(patch.apply(there.to_vec()), Some((new, whole)));
                // It fits nothing else.
                assert_eq!(patch.apply(dice.bytes(length)), None);
                for end in 0..bytes.len() {
                    assert!(Patch::decode(&bytes[..end]).is_err(), "{end}");
                }
                for at in [0, 3, 4, 11, 44, 60] {
                    let mut other = bytes.clone();
                    other[at] ^= 0x80;
                    let fits = Patch::decode(&other)
                        .ok()
                        .and_then(|it| it.apply(there.to_vec()));
                    assert!(fits.is_none() || (44..60).contains(&at), "{at}");
                }
            }
        }
    }
}
