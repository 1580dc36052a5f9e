//! The memory file of a guest that has left: the blocks of its memory that were missing at the
//! destination, so that the drain outlives its QEMU.
//!
//! ```text
//! STATE/following/GUEST.MIGRATION.memory   sparse; the regions follow one another, each block has
//!                                          its place
//! ```
//!
//! The [note](LeftNote) of the migration lists the blocks. It says so when all of them are on disk;
//! before that the file is not used.

use crate::host::atomic_file;
use crate::host::memory_notes::{self, LeftNote, MemoryNote};
use longhaul_codec::BlockId;
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_protocol::disk::Remaining;
use longhaul_protocol::{BLOCK_SIZE, MigrationId, RegionId, RegionSpec};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The end of a file's name, after its guest and its migration.
const ENDING: &str = "memory";

/// A complete memory file.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    file: File,
    regions: BTreeMap<RegionId, Placed>,
}

/// A region in the file.
#[derive(Debug)]
struct Placed {
    /// Where it begins, in blocks.
    first: u64,
    /// The blocks that the file has, in ascending order.
    blocks: Vec<Remaining>,
}

/// The place of a memory file, which is empty until the file is complete.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kept(Arc<OnceLock<MemoryFile>>);

impl Kept {
    /// Uses this file from now on.
    pub(crate) fn set(&self, file: MemoryFile) {
        // A second file of the same migration has the same content.
        let _ = self.0.set(file);
    }

    /// Returns whether the file is complete.
    pub(crate) fn is_complete(&self) -> bool {
        self.0.get().is_some()
    }

    /// Passes on what was read from QEMU. If QEMU has ended, reads the blocks from the file.
    pub(crate) fn read_after(
        &self,
        of_qemu: Result<(), String>,
        blocks: &[BlockId],
        into: &mut [u8],
    ) -> Result<(), String> {
        match (of_qemu, self.0.get()) {
            (Err(_), Some(file)) => file.read(blocks, into),
            (of_qemu, _) => of_qemu,
        }
    }
}

impl MemoryFile {
    /// Opens the file that a note says is complete.
    pub(crate) fn open(state: &Path, guest: &str, note: &LeftNote) -> io::Result<Self> {
        let path = path(state, guest, note.migration);
        let bad = |why: &str| {
            let text = format!("{}: {why}; nothing is read from it", path.display());
            io::Error::new(io::ErrorKind::InvalidData, text)
        };
        let kept = note.file.as_ref().filter(|kept| kept.complete.is_some());
        let kept = kept.ok_or_else(|| bad("it is not complete"))?;
        let places = places(&note.regions).ok_or_else(|| bad("its note has impossible regions"))?;
        let fits = kept.blocks.len() == note.regions.len()
            && note.regions.iter().zip(&kept.blocks).all(are_within);
        if !fits {
            return Err(bad("its note lists impossible blocks"));
        }
        let mut options = OpenOptions::new();
        let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
        let opened = options.read(true).custom_flags(flags).open(&path);
        let file = opened.map_err(|error| bad(&error.to_string()))?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(bad("it is not a file"));
        }
        let bytes = places.end_blocks * BLOCK_SIZE as u64;
        if found.len() != bytes {
            let why = format!("it has {} bytes instead of {bytes}", found.len());
            return Err(bad(&why));
        }
        let regions = note.regions.iter().zip(places.first).zip(&kept.blocks);
        let regions = regions.map(|((spec, first), blocks)| {
            let blocks = blocks.clone();
            (spec.id, Placed { first, blocks })
        });
        Ok(Self {
            file,
            regions: regions.collect(),
        })
    }

    /// Reads blocks, in their order.
    pub(crate) fn read(&self, blocks: &[BlockId], into: &mut [u8]) -> Result<(), String> {
        let mut rest = into;
        for run in blocks.chunk_by(follows) {
            let Some(first) = run.first() else { continue };
            let placed = self.regions.get(&first.region);
            let placed = placed.ok_or("the memory file has no such region")?;
            if let Some(other) = run.iter().find(|block| !placed.has(block.block)) {
                let text = "is not in the memory file: it was not missing";
                return Err(format!("block {} {text}", other.block));
            }
            let (now, later) = rest
                .split_at_mut_checked(run.len() * BLOCK_SIZE)
                .ok_or("there is no room for all blocks")?;
            let at = (placed.first + first.block) * BLOCK_SIZE as u64;
            let read = self.file.read_exact_at(now, at);
            read.map_err(|error| format!("the memory file cannot be read: {error}"))?;
            rest = later;
        }
        Ok(())
    }
}

impl Placed {
    fn has(&self, block: u64) -> bool {
        let chunk = block / CHUNK_BLOCKS;
        let end = |part: &Remaining| u64::from(part.chunk) + u64::from(part.chunks);
        let place = self.blocks.partition_point(|part| end(part) <= chunk);
        let part = self.blocks.get(place);
        part.is_some_and(|part| {
            u64::from(part.chunk) <= chunk && part.mask >> (block % CHUNK_BLOCKS) & 1 == 1
        })
    }
}

fn follows(one: &BlockId, next: &BlockId) -> bool {
    one.region == next.region && one.block.checked_add(1) == Some(next.block)
}

/// Returns whether these blocks are in ascending order and within their region.
fn are_within((spec, blocks): (&RegionSpec, &Vec<Remaining>)) -> bool {
    let chunks = spec.blocks.div_ceil(CHUNK_BLOCKS);
    let mut next = 0;
    blocks.iter().all(|part| {
        let (begins, end) = (
            u64::from(part.chunk),
            u64::from(part.chunk) + u64::from(part.chunks),
        );
        let fits = begins >= next && end <= chunks;
        next = end;
        fits
    })
}

/// Where the regions of a memory file lie.
pub(crate) struct Places {
    /// The first block of each region.
    pub(crate) first: Vec<u64>,
    pub(crate) end_blocks: u64,
}

/// Returns where regions lie, one after the other; `None` if they cannot fit a file.
pub(crate) fn places(regions: &[RegionSpec]) -> Option<Places> {
    let (mut first, mut end_blocks) = (Vec::new(), 0_u64);
    for spec in regions {
        first.push(end_blocks);
        end_blocks = end_blocks.checked_add(spec.blocks)?;
    }
    let bytes = end_blocks.checked_mul(BLOCK_SIZE as u64)?;
    i64::try_from(bytes).ok()?;
    Some(Places { first, end_blocks })
}

/// Returns the memory file of a guest's migration.
pub(crate) fn path(state: &Path, guest: &str, migration: MigrationId) -> PathBuf {
    memory_notes::folder(state).join(format!("{guest}.{migration}.{ENDING}"))
}

/// Removes the note of memory that a guest's QEMU holds for the destination, and its memory file.
pub(crate) fn forget(state: &Path, guest: &str, migration: MigrationId) -> io::Result<()> {
    LeftNote::forget(state, guest)?;
    let path = path(state, guest, migration);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(named(&path, &error)),
        _ => Ok(()),
    }
}

/// Removes memory files that no later agent may use: those that are not complete, and those of
/// migrations without a journal. Call this before an earlier agent's attempts are taken up.
pub(crate) fn sweep(state: &Path, migrations: &[MigrationId]) -> io::Result<()> {
    let folder = memory_notes::folder(state);
    atomic_file::remove_unfinished(&folder)?;
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let found = entry?.path();
        let name = found.file_name().and_then(|name| name.to_str());
        let stem = name.and_then(|name| name.strip_suffix(ENDING)?.strip_suffix('.'));
        let Some((guest, migration)) = stem.and_then(|stem| stem.rsplit_once('.')) else {
            continue;
        };
        let mut known = migrations.iter();
        let migration = known.find(|known| known.to_string() == migration);
        let is_complete = |note: LeftNote| note.file.is_some_and(|kept| kept.complete.is_some());
        let used = match migration {
            // A note that cannot be read is read again when the blocks are sent.
            Some(migration) => LeftNote::read(state, guest, *migration)
                .map_or(true, |note| note.is_some_and(is_complete)),
            None => false,
        };
        if !used {
            tracing::info!(file = %found.display(), "removed: it is not complete, or not needed");
            fs::remove_file(&found).map_err(|error| named(&found, &error))?;
        }
    }
    Ok(())
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::host::memory_notes::{Complete, FileNote};

    pub(crate) const MIGRATION: MigrationId = MigrationId([7; 8]);

    fn spec(id: u16, blocks: u64) -> RegionSpec {
        RegionSpec {
            id: RegionId(id),
            name: format!("ram{id}"),
            blocks,
            durable: false,
            starts_zero: true,
        }
    }

    fn part(chunk: u32, chunks: u32, mask: u64) -> Remaining {
        Remaining {
            chunk,
            chunks,
            mask,
            written_blocks: 0,
        }
    }

    pub(crate) fn id(region: u16, block: u64) -> BlockId {
        let region = RegionId(region);
        BlockId { region, block }
    }

    /// The note of two regions, of which the blocks 0, 1, 65, 129 and 2, 3 are missing.
    pub(crate) fn note() -> LeftNote {
        LeftNote {
            migration: MIGRATION,
            digest_key: [1; 32],
            regions: vec![spec(0, 200), spec(1, 5)],
            file: Some(FileNote {
                blocks: vec![
                    vec![part(0, 1, 0b11), part(1, 2, 0b10)],
                    vec![part(0, 1, u64::MAX << 2 & 0b1100)],
                ],
                complete: Some(Complete {
                    bytes: 6 << 12,
                    after_ms: Some(20),
                }),
            }),
        }
    }

    fn content(block: u64) -> [u8; BLOCK_SIZE] {
        [block as u8; BLOCK_SIZE]
    }

    /// Writes a file whose blocks contain their places.
    fn write(state: &Path, blocks: u64) -> PathBuf {
        memory_notes::create_folder(state).unwrap();
        let path = path(state, "web-7", MIGRATION);
        let bytes: Vec<u8> = (0..blocks).flat_map(content).collect();
        fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn listed_blocks_are_read_at_their_places_and_no_others() {
        let state = tempfile::tempdir().unwrap();
        write(state.path(), 205);
        let file = MemoryFile::open(state.path(), "web-7", &note()).unwrap();
        let blocks = [id(0, 0), id(0, 1), id(0, 129), id(1, 2), id(1, 3)];
        let mut into = vec![0; blocks.len() * BLOCK_SIZE];
        file.read(&blocks, &mut into).unwrap();
        let read: Vec<u8> = into.chunks(BLOCK_SIZE).map(|block| block[9]).collect();
        assert_eq!(read, [0, 1, 129, 202, 203]);
        for other in [id(0, 2), id(0, 64), id(0, 193), id(1, 1), id(1, 4)] {
            let error = file.read(&[other], &mut into).unwrap_err();
            assert!(error.contains("was not missing"), "{other:?}: {error}");
        }
        assert!(file.read(&[id(2, 0)], &mut into).is_err());
        assert!(file.read(&blocks, &mut into[1..]).is_err());
    }

    #[test]
    fn the_file_is_read_only_when_qemu_has_ended_and_the_file_is_complete() {
        let state = tempfile::tempdir().unwrap();
        write(state.path(), 205);
        let kept = Kept::default();
        let (blocks, ended) = ([id(1, 2)], || Err("its QEMU has ended".to_owned()));
        let mut into = [9; BLOCK_SIZE];
        assert!(kept.read_after(ended(), &blocks, &mut into).is_err());
        kept.set(MemoryFile::open(state.path(), "web-7", &note()).unwrap());
        assert!(kept.is_complete());
        kept.read_after(Ok(()), &blocks, &mut into).unwrap();
        assert_eq!(into, [9; BLOCK_SIZE]);
        kept.read_after(ended(), &blocks, &mut into).unwrap();
        assert_eq!(into, content(202));
    }

    #[test]
    fn a_file_that_is_not_whole_or_not_of_this_migration_is_refused() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let path = write(state, 205);
        let refused = |note: &LeftNote, why: &str| {
            let error = MemoryFile::open(state, "web-7", note).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(why) && text.contains(".memory"), "{text}");
        };
        let changed = |change: &dyn Fn(&mut LeftNote)| {
            let mut note = note();
            change(&mut note);
            note
        };
        let kept =
            |change: &dyn Fn(&mut FileNote)| changed(&|note| change(note.file.as_mut().unwrap()));
        let other = changed(&|note| note.migration = MigrationId([8; 8]));
        refused(&other, "No such file");
        refused(&changed(&|note| note.file = None), "not complete");
        refused(&kept(&|kept| kept.complete = None), "not complete");
        refused(
            &changed(&|note| note.regions[0].blocks = 300),
            "bytes instead of",
        );
        refused(
            &changed(&|note| note.regions[0].blocks = u64::MAX),
            "impossible regions",
        );
        refused(
            &changed(&|note| note.regions[0].blocks = u64::MAX >> 13),
            "impossible regions",
        );
        refused(&kept(&|kept| drop(kept.blocks.pop())), "impossible blocks");
        refused(&kept(&|kept| kept.blocks[0].reverse()), "impossible blocks");
        refused(
            &kept(&|kept| kept.blocks[1][0].chunks = u32::MAX),
            "impossible blocks",
        );
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        refused(&note(), "4096 bytes instead of 839680");
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", &path).unwrap();
        refused(&note(), "nothing is read from it");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused(&note(), "not a file");
    }

    #[test]
    fn files_that_no_agent_may_use_are_removed() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        sweep(state, &[]).unwrap();
        let used = write(state, 205);
        let folder = memory_notes::folder(state);
        let stale = [
            "web-7.0808080808080808.memory",
            "db.1.0707070707070707.memory",
        ];
        let others = ["web-8.pages.log", "web-8.memory"];
        for name in stale.iter().chain(&others).chain(&["web-7.left.new"]) {
            fs::write(folder.join(name), "").unwrap();
        }
        note().write_durably(state, "web-7").unwrap();
        sweep(state, &[MIGRATION, MigrationId([8; 8])]).unwrap();
        assert!(used.exists());
        assert!(stale.iter().all(|name| !folder.join(name).exists()));
        assert!(others.iter().all(|name| folder.join(name).exists()));
        assert!(!folder.join("web-7.left.new").exists());
        // Nobody continues a migration whose journal is gone.
        sweep(state, &[]).unwrap();
        assert!(!used.exists());

        write(state, 205);
        let mut begun = note();
        begun.file.as_mut().unwrap().complete = None;
        begun.write(state, "web-7").unwrap();
        sweep(state, &[MIGRATION]).unwrap();
        assert!(!used.exists());

        write(state, 205);
        forget(state, "web-7", MIGRATION).unwrap();
        forget(state, "web-7", MIGRATION).unwrap();
        assert!(!used.exists());
        assert_eq!(LeftNote::read(state, "web-7", MIGRATION).unwrap(), None);
    }
}
