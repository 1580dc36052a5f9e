//! Content of an arriving guest that this host has already: its memory and disks as they were when
//! it left, and files in the [content index](Held). A block is used only if it has the digest that
//! the source names. So it does not matter which guest's block it was, or what has changed the file
//! since.

use crate::disks::images::Place;
use crate::host::content_index::Held;
use crate::host::memory_cache::{KeptMemory, open_plain};
use crate::host::set_aside::set_aside_as;
use longhaul_codec::{BlockId, Digest, DigestKey, Hasher};
use longhaul_protocol::message::{Keeps, KnownQuery};
use longhaul_protocol::{BLOCK_SIZE, RegionId, RegionKind, RegionSpec};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The places where blocks of an arriving guest are looked up.
#[derive(Default)]
pub(crate) struct Kept {
    regions: Vec<RegionId>,
    /// Files with the former content of regions, in block order, and the number of the file's block
    /// where the region begins.
    files: BTreeMap<RegionId, (Arc<File>, u64)>,
    held: Option<Arc<Held>>,
}

impl Kept {
    /// Finds what is cached from when this guest, or one with these disks, left.
    pub(crate) fn look(
        regions: &[RegionSpec],
        places: &[Place],
        memory: Option<(&KeptMemory, &str)>,
        held: Option<Arc<Held>>,
    ) -> Self {
        let disks = places.iter().filter_map(|place| {
            let path = set_aside_as(place.path());
            Some((place.region(), (Arc::new(open_plain(&path)?), 0)))
        });
        let mut files: BTreeMap<RegionId, (Arc<File>, u64)> = disks.collect();
        files.extend(
            memory
                .into_iter()
                .flat_map(|(kept, guest)| of_memory(regions, kept, guest)),
        );
        let held = held.filter(|held| held.has_content());
        let regions = match held {
            Some(_) => regions.iter().map(|region| region.id).collect(),
            None => files.keys().copied().collect(),
        };
        Self {
            regions,
            files,
            held,
        }
    }

    /// Returns the key of all digests, if the content index has one.
    pub(crate) fn key(&self) -> Option<DigestKey> {
        self.held.as_ref().map(|held| held.key())
    }

    /// Returns the known regions and the digest key, for the source.
    pub(crate) fn told(&self) -> Keeps {
        Keeps {
            regions: self.regions.clone(),
            digest_key: self.key().map(|key| key.0),
        }
    }

    /// Reads the former content of a block, or an indexed block with this digest. Returns false if
    /// neither is found. The caller compares the content with the digest.
    pub(crate) fn read(
        &self,
        id: BlockId,
        digest: Option<&Digest>,
        into: &mut [u8; BLOCK_SIZE],
    ) -> bool {
        let in_place = self.read_in_place(id, into);
        match (&self.held, digest) {
            (None, _) | (_, None) => in_place,
            (Some(held), Some(digest)) => {
                in_place && held.is(into, digest) || held.read(digest, into)
            }
        }
    }

    /// Returns how many of these blocks are as they were when the guest left.
    pub(crate) fn count(&self, asked: &KnownQuery) -> u32 {
        let hasher = Hasher::new(DigestKey(asked.offered.offer.digest_key));
        let mut content = [0; BLOCK_SIZE];
        let found = asked.samples.iter().filter(|sample| {
            let id = BlockId {
                region: sample.region,
                block: sample.block,
            };
            self.read_in_place(id, &mut content) && hasher.digest(&content).0 == sample.digest
        });
        found.count() as u32
    }

    fn read_in_place(&self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> bool {
        let Some((file, first)) = self.files.get(&id.region) else {
            return false;
        };
        let block = first.checked_add(id.block);
        let at = block.and_then(|block| block.checked_mul(BLOCK_SIZE as u64));
        at.is_some_and(|at| file.read_exact_at(into, at).is_ok())
    }
}

/// Returns where each region of a guest's memory begins in its memory cache.
fn of_memory(
    regions: &[RegionSpec],
    kept: &KeptMemory,
    guest: &str,
) -> Vec<(RegionId, (Arc<File>, u64))> {
    let mut blocks: u64 = 0;
    let mut places = Vec::new();
    for region in regions
        .iter()
        .filter(|region| region.kind() == RegionKind::Memory)
    {
        places.push((region.id, blocks));
        blocks = blocks.saturating_add(region.blocks);
    }
    let Some(file) = kept.look(guest, blocks).map(Arc::new) else {
        return Vec::new();
    };
    let places = places.into_iter();
    places
        .map(|(region, first)| (region, (file.clone(), first)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_whole_blocks_of_plain_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.moved");
        assert!(open_plain(&path).is_none());
        let content = [vec![7; BLOCK_SIZE], vec![8; BLOCK_SIZE + 100]].concat();
        fs::write(&path, content).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open_plain(&link).is_none() && open_plain(folder.path()).is_none());
        let [first, second] = [RegionId(3), RegionId(4)];
        let file = Arc::new(open_plain(&path).unwrap());
        let kept = Kept {
            regions: vec![first, second],
            files: [(first, (file.clone(), 0)), (second, (file, 1))].into(),
            held: None,
        };
        assert_eq!(kept.told().regions, [first, second]);
        let digest = Digest([0; 16]);
        let read = |region, block| {
            let mut content = [0; BLOCK_SIZE];
            let read = kept.read(BlockId { region, block }, Some(&digest), &mut content);
            read.then_some(content)
        };
        assert_eq!(read(first, 0), Some([7; BLOCK_SIZE]));
        assert_eq!(read(first, 1), Some([8; BLOCK_SIZE]));
        assert_eq!(read(second, 0), Some([8; BLOCK_SIZE]));
        for (region, block) in [
            (first, 2),
            (second, 1),
            (first, u64::MAX),
            (second, u64::MAX),
        ] {
            assert!(read(region, block).is_none(), "a part is no block");
        }
        assert!(read(RegionId(2), 0).is_none());
    }
}
