//! Tracked writes: the server remembers which chunks of the image its guest has changed since
//! tracking began. It needs no owner, and may do this for days.
//!
//! The record is a file of [masks](super::arriving::masks), in which a bit that is set means that
//! the block is unchanged. Its unit is a chunk of 256 KiB: the first write to a chunk clears the
//! whole mask. The mask is durable *before* that write begins. So the record never lacks a change,
//! whichever process dies, and whenever the power is cut: the kernel may write the image's new
//! content to the disk at any time, before the guest has flushed it. Later writes to the chunk cost
//! nothing. It may name chunks whose write was never carried out.
//!
//! Writes beyond the end of the record count for its last chunk: an image may grow.
//!
//! If the fallback has answered ([`FrontFolder::fell_back`]), everything counts as changed.

use super::arriving::masks::{MaskFile, Masks};
use super::folder::{FolderError, FrontFolder, failed};
use super::server::{ServeError, serve};
use super::watched::{WatchedDisk, WriteSink};
use crate::disk::RawDisk;
use crate::files::{Files, RealFiles};
use crate::nbd::{Export, Notice, client_is_gone, others_go_on};
use crate::pulse::elsewhere;
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_engine::presence::ChunkMask;
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::{BLOCK_SIZE, RegionId};
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = CHUNK_BLOCKS * BLOCK_SIZE as u64;
/// The time between two attempts to make a mask durable without which no write begins.
const AGAIN: Duration = Duration::from_millis(200);

/// Begins the record of an image of this length, which must not be 0: nothing has changed. To be
/// called before the export is inserted.
pub fn begin(folder: &FrontFolder, image_bytes: u64) -> Result<(), FolderError> {
    begin_in(&RealFiles, &folder.tracked_writes(), image_bytes)
}

/// Begins the record in a given file system.
pub fn begin_in(files: &dyn Files, path: &Path, image_bytes: u64) -> Result<(), FolderError> {
    let blocks = image_bytes.div_ceil(BLOCK_SIZE as u64);
    let unchanged = Remaining {
        chunk: 0,
        chunks: blocks.div_ceil(CHUNK_BLOCKS) as u32,
        mask: u64::MAX,
        written_blocks: 0,
    };
    let masks = Masks {
        // A record has one disk.
        region: RegionId(0),
        blocks,
        // Power cuts do not invalidate it.
        boot: [0; 16],
        missing: vec![unchanged],
    };
    masks.write_in(files, path)
}

/// The changes of an image since tracking began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// The length of the image when tracking began, in bytes, rounded up to blocks.
    pub image_bytes: u64,
    /// The bytes that may have changed, in ascending order. The last range also stands for
    /// everything beyond the length.
    pub ranges: Vec<Range<u64>>,
}

impl Changed {
    /// Returns the changes of an export's image.
    pub fn of(folder: &FrontFolder) -> Result<Self, FolderError> {
        let mut changed = Self::read_in(&RealFiles, &folder.tracked_writes())?;
        if folder.fell_back() {
            changed.ranges.clear();
            changed.ranges.push(0..changed.image_bytes);
        }
        Ok(changed)
    }

    /// Reads the record of a given file system.
    pub fn read_in(files: &dyn Files, path: &Path) -> Result<Self, FolderError> {
        let masks = read(files, path)?;
        let image_bytes = masks.blocks * BLOCK_SIZE as u64;
        let mut ranges = Vec::new();
        let mut from = 0;
        for part in &masks.missing {
            let chunk = u64::from(part.chunk);
            if from < chunk {
                ranges.push(from * CHUNK_BYTES..chunk * CHUNK_BYTES);
            }
            from = chunk + u64::from(part.chunks);
        }
        if from * CHUNK_BYTES < image_bytes {
            ranges.push(from * CHUNK_BYTES..image_bytes);
        }
        Ok(Self {
            image_bytes,
            ranges,
        })
    }

    /// Returns how many bytes may have changed.
    pub fn bytes(&self) -> u64 {
        self.ranges
            .iter()
            .map(|range| range.end - range.start)
            .sum()
    }
}

fn read(files: &dyn Files, path: &Path) -> Result<Masks, FolderError> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    Masks::read_in(files, path)?.ok_or_else(|| failed(path, gone()))
}

/// Exports the image, and records every chunk that the guest changes.
pub fn tracking(
    folder: &FrontFolder,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let spec = folder.spec()?;
    let open = || {
        let sink = WriteMap::open_in(&RealFiles, &folder.tracked_writes())?;
        let disk = RawDisk::open(&spec.image, spec.size)?;
        let disk = Arc::new(WatchedDisk { disk, sink });
        let name = spec.name;
        Ok(Export { name, disk })
    };
    serve(folder, open, notify)
}

/// The record as the server uses it.
#[derive(Debug)]
pub struct WriteMap {
    file: MaskFile,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// For each chunk, whether the record says durably that it has changed.
    durable: Vec<bool>,
    /// Chunks that writes wait for.
    wanted: BTreeSet<u32>,
    /// Whether a thread is making chunks durable. The others wait for it, and then one of them does
    /// the same for all that came meanwhile.
    syncing: bool,
}

impl WriteMap {
    /// Opens the record of a given file system. What an earlier process has recorded is durable
    /// when this returns.
    pub fn open_in(files: &dyn Files, path: &Path) -> Result<Self, FolderError> {
        let masks = read(files, path)?;
        let mut durable = vec![true; masks.blocks.div_ceil(CHUNK_BLOCKS) as usize];
        for part in &masks.missing {
            let first = part.chunk as usize;
            durable[first..first + part.chunks as usize].fill(false);
        }
        let map = Self {
            file: MaskFile::open_in(files, path)?,
            state: Mutex::new(State {
                durable,
                wanted: BTreeSet::new(),
                syncing: false,
            }),
            changed: Condvar::new(),
        };
        // After a failed sync, the earlier process may have seen what is not on the disk.
        let changed = |(chunk, changed): (u32, &bool)| changed.then_some(chunk);
        let recorded = (0..).zip(&map.lock().durable).filter_map(changed).collect();
        let stored = map.store(&recorded);
        stored.map_err(|error| failed(path, error))?;
        Ok(map)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self, chunks: &BTreeSet<u32>) -> io::Result<()> {
        let changed = |chunk: &u32| ChunkMask {
            chunk: *chunk,
            missing: 0,
        };
        let masks: Vec<ChunkMask> = chunks.iter().map(changed).collect();
        self.file.set(&masks)?;
        self.file.sync_as("the tracked writes")
    }

    /// Returns the chunks of these bytes that are not durably recorded.
    fn unrecorded(&self, bytes: &Range<u64>) -> Vec<u32> {
        let state = self.lock();
        let last = (state.durable.len() as u64).saturating_sub(1);
        let first = (bytes.start / CHUNK_BYTES).min(last);
        let end = bytes.end.div_ceil(CHUNK_BYTES).min(last + 1).max(first + 1);
        let chunks = first as u32..end as u32;
        let is_new = |chunk: &u32| !state.durable[*chunk as usize];
        chunks.filter(is_new).collect()
    }

    /// Records a write to these bytes, durably; to be called before it begins. After an error
    /// nothing is known to be durable, and it is to be called again.
    pub fn note(&self, bytes: &Range<u64>) -> io::Result<()> {
        let new = self.unrecorded(bytes);
        if new.is_empty() {
            return Ok(());
        }
        self.lock().wanted.extend(&new);
        others_go_on(|| elsewhere(|| self.make_durable(&new)))?;
        is_wanted()
    }

    fn make_durable(&self, new: &[u32]) -> io::Result<()> {
        let mut state = self.lock();
        loop {
            let waits = |state: &mut State| state.syncing && !is_durable(state, new);
            let waited = self.changed.wait_while(state, waits);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            if is_durable(&state, new) {
                return Ok(());
            }
            state.syncing = true;
            let chunks = state.wanted.clone();
            drop(state);
            let stored = self.store(&chunks);
            state = self.lock();
            state.syncing = false;
            if stored.is_ok() {
                for chunk in chunks {
                    state.durable[chunk as usize] = true;
                    state.wanted.remove(&chunk);
                }
            }
            self.changed.notify_all();
            stored?;
        }
    }
}

fn is_durable(state: &State, chunks: &[u32]) -> bool {
    chunks.iter().all(|chunk| state.durable[*chunk as usize])
}

/// Returns an error if the client of this thread's request is gone: it repeats the request
/// elsewhere, and must not be overtaken.
fn is_wanted() -> io::Result<()> {
    match client_is_gone() {
        true => Err(Errno::ECANCELED.into()),
        false => Ok(()),
    }
}

impl WriteSink for WriteMap {
    fn begins(&self, bytes: &Range<u64>) -> io::Result<()> {
        // Like a disk that does not answer, for as long as the record cannot be made.
        while self.note(bytes).is_err() {
            others_go_on(|| elsewhere(|| thread::sleep(AGAIN)));
            is_wanted()?;
        }
        Ok(())
    }

    fn done(&self, _: Range<u64>) {}

    fn took(&self, _: Duration) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, ExportSize, Zeros};
    use std::fs::File;

    const IMAGE_BYTES: u64 = 10 * CHUNK_BYTES + 5;

    struct Fixture {
        folder: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            begin_in(&RealFiles, &folder.path().join("map"), IMAGE_BYTES).unwrap();
            let image = File::create(folder.path().join("image")).unwrap();
            image.set_len(IMAGE_BYTES).unwrap();
            Self { folder }
        }

        fn disk(&self, size: ExportSize) -> WatchedDisk<WriteMap> {
            let path = |name: &str| self.folder.path().join(name);
            WatchedDisk {
                disk: RawDisk::open(&path("image"), size).unwrap(),
                sink: WriteMap::open_in(&RealFiles, &path("map")).unwrap(),
            }
        }

        fn changed(&self) -> Changed {
            Changed::read_in(&RealFiles, &self.folder.path().join("map")).unwrap()
        }
    }

    fn chunks(range: Range<u64>) -> Range<u64> {
        range.start * CHUNK_BYTES..range.end * CHUNK_BYTES
    }

    #[test]
    fn every_kind_of_change_is_recorded_and_nothing_else() {
        let fixture = Fixture::new();
        let disk = fixture.disk(ExportSize::OfFile);
        let blocks = IMAGE_BYTES.div_ceil(BLOCK_SIZE as u64) * BLOCK_SIZE as u64;
        assert_eq!(fixture.changed().bytes(), 0);
        disk.read(0, &mut [0; 512]).unwrap();
        disk.flush().unwrap();
        assert_eq!(fixture.changed().bytes(), 0);
        disk.write(CHUNK_BYTES - 1, &[1; 2]).unwrap();
        disk.zero(4 * CHUNK_BYTES..5 * CHUNK_BYTES, Zeros::MayBeHole)
            .unwrap();
        disk.discard(5 * CHUNK_BYTES + 512..6 * CHUNK_BYTES)
            .unwrap();
        disk.write(IMAGE_BYTES - 1, &[1]).unwrap();
        let expected = vec![chunks(0..2), chunks(4..6), 10 * CHUNK_BYTES..blocks];
        assert_eq!(fixture.changed().ranges, expected);
        assert_eq!(fixture.changed().image_bytes, blocks);
        // The next server knows the same.
        drop(disk);
        let disk = fixture.disk(ExportSize::OfFile);
        assert!(disk.sink.unrecorded(&(0..1)).is_empty());
        assert_eq!(disk.sink.unrecorded(&chunks(1..4)), [2, 3]);
    }

    #[test]
    fn what_grows_counts_for_the_last_chunk() {
        let fixture = Fixture::new();
        let disk = fixture.disk(ExportSize::Bytes(1 << 40));
        disk.write(1 << 30, &[1; 4096]).unwrap();
        let blocks = fixture.changed().image_bytes;
        let changed = fixture.changed().ranges;
        assert_eq!(
            changed.as_slice(),
            std::slice::from_ref(&(10 * CHUNK_BYTES..blocks))
        );
    }

    #[test]
    fn writes_at_once_are_all_recorded_before_they_begin() {
        let fixture = Fixture::new();
        let disk = fixture.disk(ExportSize::OfFile);
        thread::scope(|scope| {
            for start in 0..4 {
                let (disk, fixture) = (&disk, &fixture);
                scope.spawn(move || {
                    for chunk in (start..10).step_by(2) {
                        let bytes = chunk * CHUNK_BYTES..chunk * CHUNK_BYTES + 1;
                        disk.sink.note(&bytes).unwrap();
                        let changed = fixture.changed().ranges;
                        assert!(changed.iter().any(|range| range.contains(&bytes.start)));
                    }
                });
            }
        });
        assert_eq!(fixture.changed().ranges, [chunks(0..10)]);
    }
}
