//! What this host has already of a guest that comes: its disks as they were when it left, and what any file
//! holds that the [content index](Held) knows. Blocks are taken from there only where they have the digest that the
//! source names, so it does not matter whose they were, or who has changed them since.

use super::disks::fronts;
use super::disks::making::Place;
use crate::agent::content::Held;
use longhaul_codec::{BlockId, Digest, DigestKey};
use longhaul_protocol::message::Keeps;
use longhaul_protocol::{BLOCK_SIZE, RegionId, RegionSpec};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

/// What blocks of an arriving guest are looked for in.
#[derive(Default)]
pub(super) struct Kept {
    regions: Vec<RegionId>,
    /// Files that have what blocks of regions may have had, each in the same place.
    files: BTreeMap<RegionId, File>,
    held: Option<Arc<Held>>,
}

impl Kept {
    /// Looks for what was set aside when a guest with these disks left.
    pub(super) fn look(regions: &[RegionSpec], places: &[Place], held: Option<Arc<Held>>) -> Self {
        let found = places.iter().filter_map(|place| {
            let path = fronts::set_aside_as(place.path());
            Some((place.region(), open(&path)?))
        });
        let files: BTreeMap<RegionId, File> = found.collect();
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

    /// The key of all digests, where the content index gives one.
    pub(super) fn key(&self) -> Option<DigestKey> {
        self.held.as_ref().map(|held| held.key())
    }

    /// What the source is told of it.
    pub(super) fn told(&self) -> Keeps {
        Keeps {
            regions: self.regions.clone(),
            digest_key: self.key().map(|key| key.0),
        }
    }

    /// Reads what a block was, or one with that digest from anywhere; false where neither is known. What was
    /// read has yet to be compared.
    pub(super) fn read(&self, id: BlockId, digest: &Digest, into: &mut [u8; BLOCK_SIZE]) -> bool {
        let in_place = self.read_in_place(id, into);
        match &self.held {
            None => in_place,
            Some(held) => in_place && held.is(into, digest) || held.read(digest, into),
        }
    }

    fn read_in_place(&self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> bool {
        let Some(file) = self.files.get(&id.region) else {
            return false;
        };
        let at = id.block.checked_mul(BLOCK_SIZE as u64);
        at.is_some_and(|at| file.read_exact_at(into, at).is_ok())
    }
}

fn open(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    // Neither a link to somewhere else nor a pipe that nobody writes to.
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = options.read(true).custom_flags(flags).open(path).ok()?;
    let is_file = file.metadata().is_ok_and(|about| about.is_file());
    is_file.then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn only_whole_blocks_of_plain_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.moved");
        assert!(open(&path).is_none());
        fs::write(&path, vec![7; BLOCK_SIZE + 100]).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(open(&link).is_none() && open(folder.path()).is_none());
        let region = RegionId(3);
        let kept = Kept {
            regions: vec![region],
            files: [(region, open(&path).unwrap())].into(),
            held: None,
        };
        assert_eq!(kept.told().regions, [region]);
        let (mut content, digest) = ([0; BLOCK_SIZE], Digest([0; 16]));
        let mut read = |region, block| kept.read(BlockId { region, block }, &digest, &mut content);
        assert!(read(region, 0));
        assert!(!read(region, 1), "a part is no block");
        assert!(!read(region, u64::MAX) && !read(RegionId(2), 0));
        assert_eq!(content, [7; BLOCK_SIZE]);
    }
}
