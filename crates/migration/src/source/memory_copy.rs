//! The copy of memory that follows to the [memory file](MemoryFile), beside the drain: a thread
//! that rests as long as it works.

use crate::host::memory_cache::{require_room, write_content};
use crate::host::memory_notes::{self, Complete, LeftNote, MemoryNote};
use crate::host::qemu::is_alive;
use crate::source::memory_file::{self, Kept, MemoryFile, places};
use longhaul_api::MemoryFileReport;
use longhaul_engine::remaining;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Number of blocks that are read, written and synced at once.
const PIECE_BLOCKS: u64 = 1024;
/// Limit on the pause between two pieces. A pause is as long as the piece took.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Reads ranges of a region's blocks, one after the other.
pub(crate) type Read = Box<dyn Fn(RegionId, &[BlockRange], &mut [u8]) -> Result<(), String> + Send>;

/// What is copied.
pub(crate) struct Job {
    pub(crate) state: PathBuf,
    pub(crate) guest: String,
    /// The note, with the list of blocks.
    pub(crate) note: LeftNote,
    pub(crate) read: Read,
    /// When the guest was handed over, unless an earlier agent did that.
    pub(crate) since: Option<Instant>,
}

/// A copy that is under way or complete. Dropped, it ends, and creates nothing any more. Its file
/// stays.
pub(crate) struct Copying {
    stage: Arc<Mutex<Stage>>,
    reported: bool,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Copies,
    Complete(Complete),
    Ended,
}

/// Why a copy is not completed.
enum Stop {
    /// It is not needed any more.
    Unneeded,
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// Returns the reader of a stopped QEMU's memory.
pub(crate) fn of_qemu(
    guest: Guest,
    memory: Arc<GuestMemory>,
    places: BTreeMap<RegionId, usize>,
) -> Read {
    Box::new(move |region, ranges, into| {
        let place = places.get(&region).ok_or("there is no such region")?;
        let read = memory.look(*place, ranges, into);
        read.map_err(|error| error.to_string())?;
        is_alive(&guest)
    })
}

impl Copying {
    /// Begins a copy. The drain uses the file as soon as it is complete.
    pub(crate) fn begin(job: Job, kept: Kept) -> Self {
        let stage = Arc::new(Mutex::new(Stage::Copies));
        let (guest, shared) = (job.guest.clone(), stage.clone());
        let thread = thread::Builder::new().name("memory-file".to_owned());
        let begun = thread.spawn(move || job.run(&shared, &kept));
        if let Err(error) = begun {
            warn(&guest, &error);
        }
        Self {
            stage,
            reported: false,
        }
    }

    /// Returns the report of the complete file, once.
    pub(crate) fn news(&mut self) -> Option<MemoryFileReport> {
        // The thread may hold the lock while it waits for the disk.
        let Ok(Stage::Complete(complete)) = self.stage.try_lock().map(|stage| *stage) else {
            return None;
        };
        let first = !std::mem::replace(&mut self.reported, true);
        first.then(|| report(complete))
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        *lock(&self.stage) = Stage::Ended;
    }
}

/// Returns the report of a complete file.
pub(crate) fn report(complete: Complete) -> MemoryFileReport {
    MemoryFileReport {
        bytes: complete.bytes,
        complete_ms: complete.after_ms,
    }
}

impl Job {
    fn run(mut self, stage: &Mutex<Stage>, kept: &Kept) {
        let Err(Stop::Failed(error)) = self.copy(stage, kept) else {
            return;
        };
        // The file of a copy that is not needed may be that of another copy by now.
        let Ok(_stage) = goes_on(stage) else { return };
        warn(&self.guest, &error);
        let path = memory_file::path(&self.state, &self.guest, self.note.migration);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let (guest, file) = (&self.guest, path.display());
                tracing::warn!(guest, %file, %error, "a part of its memory stays in a file");
            }
            _ => {}
        }
    }

    fn copy(&mut self, stage: &Mutex<Stage>, kept: &Kept) -> Result<(), Stop> {
        let file = self.create(stage)?;
        let bytes = self.fill(&file, stage)?;
        file.sync_all()?;
        let mut stage = goes_on(stage)?;
        let since = self.since.map(|since| since.elapsed().as_millis() as u64);
        let complete = Complete {
            bytes,
            after_ms: since,
        };
        if let Some(noted) = &mut self.note.file {
            noted.complete = Some(complete);
        }
        let opened = MemoryFile::open(&self.state, &self.guest, &self.note)?;
        self.note.write_durably(&self.state, &self.guest)?;
        kept.set(opened);
        *stage = Stage::Complete(complete);
        let guest = &self.guest;
        tracing::info!(guest, bytes, "the drain no longer needs its QEMU here");
        Ok(())
    }

    fn create(&self, stage: &Mutex<Stage>) -> Result<File, Stop> {
        let stage = goes_on(stage)?;
        memory_notes::create_folder(&self.state)?;
        let path = memory_file::path(&self.state, &self.guest, self.note.migration);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(path);
        drop(stage);
        Ok(file?)
    }

    /// Writes all listed blocks, and returns how many bytes of them are not zero.
    fn fill(&self, file: &File, stage: &Mutex<Stage>) -> Result<u64, Stop> {
        let places = places(&self.note.regions);
        let places = places.ok_or_else(|| io::Error::other("its regions do not fit a file"))?;
        file.set_len(places.end_blocks * BLOCK_SIZE as u64)?;
        let folder = memory_notes::folder(&self.state);
        let mut buffer = vec![0; PIECE_BLOCKS as usize * BLOCK_SIZE];
        let mut bytes = 0;
        let listed = self.note.file.iter().flat_map(|kept| &kept.blocks);
        let regions = self.note.regions.iter().zip(places.first);
        for ((spec, first), listed) in regions.zip(listed) {
            for piece in pieces(&remaining::ranges(listed, spec.blocks)) {
                drop(goes_on(stage)?);
                require_room(&folder)?;
                let began = Instant::now();
                let count: u64 = piece.iter().map(|range| range.count).sum();
                let content = &mut buffer[..count as usize * BLOCK_SIZE];
                (self.read)(spec.id, &piece, content).map_err(io::Error::other)?;
                let (mut rest, mut written) = (&*content, 0);
                for range in &piece {
                    let (now, later) = rest.split_at(range.count as usize * BLOCK_SIZE);
                    written += write_content(file, first + range.start, now)?;
                    rest = later;
                }
                if written > 0 {
                    file.sync_data()?;
                }
                bytes += written;
                thread::sleep(began.elapsed().min(PAUSE_MAX));
            }
        }
        Ok(bytes)
    }
}

/// Returns ranges in groups of at most [`PIECE_BLOCKS`] blocks.
fn pieces(ranges: &[BlockRange]) -> Vec<Vec<BlockRange>> {
    let (mut pieces, mut piece, mut free) = (Vec::new(), Vec::new(), PIECE_BLOCKS);
    for range in ranges {
        let mut start = range.start;
        while start < range.end() {
            let count = free.min(range.end() - start);
            piece.push(BlockRange::new(start, count));
            (start, free) = (start + count, free - count);
            if free == 0 {
                pieces.push(std::mem::take(&mut piece));
                free = PIECE_BLOCKS;
            }
        }
    }
    pieces.extend((!piece.is_empty()).then_some(piece));
    pieces
}

/// Locks the stage, unless the copy is not needed any more.
fn goes_on(stage: &Mutex<Stage>) -> Result<MutexGuard<'_, Stage>, Stop> {
    let stage = lock(stage);
    match *stage {
        Stage::Copies => Ok(stage),
        Stage::Complete(_) | Stage::Ended => Err(Stop::Unneeded),
    }
}

fn warn(guest: &str, error: &io::Error) {
    tracing::warn!(
        guest,
        %error,
        "its memory is not copied to a file: it goes on following from its QEMU, but until all of \
         it has followed the guest is lost if that QEMU or this host ends"
    );
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::memory_file::tests::{MIGRATION, id, note};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::path::Path;
    use std::sync::mpsc;

    /// A job that reads blocks with their number in each byte, after `look`.
    fn job(state: &Path, look: impl Fn() -> Result<(), String> + Send + 'static) -> Job {
        let mut note = note();
        note.file.as_mut().unwrap().complete = None;
        note.write(state, "web-7").unwrap();
        Job {
            state: state.to_owned(),
            guest: "web-7".to_owned(),
            note,
            read: Box::new(move |region, ranges, into| {
                let blocks = ranges.iter().flat_map(|range| range.blocks());
                for (block, into) in blocks.zip(into.chunks_mut(BLOCK_SIZE)) {
                    into.fill(block as u8 + 10 * region.0 as u8);
                }
                look()
            }),
            since: Some(Instant::now()),
        }
    }

    fn ended(copying: &Copying) -> bool {
        let deadline = Instant::now() + Duration::from_secs(60);
        // The thread's own handle is the second one.
        while Arc::strong_count(&copying.stage) > 1 {
            assert!(Instant::now() < deadline, "it does not end");
            thread::sleep(Duration::from_millis(1));
        }
        matches!(*lock(&copying.stage), Stage::Complete(_))
    }

    #[test]
    fn all_listed_blocks_are_copied_and_the_complete_file_is_noted() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let kept = Kept::default();
        let mut copying = Copying::begin(job(state, || Ok(())), kept.clone());
        assert!(ended(&copying) && kept.is_complete());
        let report = copying.news().unwrap();
        // Block 0 of the first region is zero.
        assert_eq!(report.bytes, 5 << 12);
        assert!(report.complete_ms.is_some());
        assert_eq!(copying.news(), None);
        drop(copying);
        let noted = LeftNote::read(state, "web-7", MIGRATION).unwrap().unwrap();
        let file = MemoryFile::open(state, "web-7", &noted).unwrap();
        let blocks = [id(0, 0), id(0, 1), id(0, 65), id(0, 129), id(1, 3)];
        let mut into = vec![9; blocks.len() * BLOCK_SIZE];
        file.read(&blocks, &mut into).unwrap();
        let read: Vec<u8> = into.chunks(BLOCK_SIZE).map(|block| block[1]).collect();
        assert_eq!(read, [0, 1, 65, 129, 13]);
        let found = fs::metadata(memory_file::path(state, "web-7", MIGRATION)).unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o600);
        assert_eq!(found.len(), 205 * BLOCK_SIZE as u64);
        assert!(found.blocks() * 512 < 100 << 12, "it is not sparse");
    }

    #[test]
    fn a_copy_that_fails_leaves_no_file_and_no_note_of_one() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let kept = Kept::default();
        let fails = || Err("its QEMU has ended".to_owned());
        let mut copying = Copying::begin(job(state, fails), kept.clone());
        assert!(!ended(&copying) && !kept.is_complete());
        assert_eq!(copying.news(), None);
        assert!(!memory_file::path(state, "web-7", MIGRATION).exists());
        let noted = LeftNote::read(state, "web-7", MIGRATION).unwrap().unwrap();
        assert!(noted.file.unwrap().complete.is_none());
    }

    #[test]
    fn a_copy_that_is_not_needed_any_more_creates_nothing() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let (reads, is_read) = mpsc::channel();
        let (go_on, waits) = mpsc::channel::<()>();
        let waits = Mutex::new(waits);
        let held = move || {
            reads.send(()).unwrap();
            let _ = lock(&waits).recv();
            Ok(())
        };
        let kept = Kept::default();
        let copying = Copying::begin(job(state, held), kept.clone());
        is_read.recv().unwrap();
        let stage = copying.stage.clone();
        drop(copying);
        memory_file::forget(state, "web-7", MIGRATION).unwrap();
        drop(go_on);
        let left = Copying {
            stage,
            reported: false,
        };
        assert!(!ended(&left) && !kept.is_complete());
        let mut files = fs::read_dir(memory_notes::folder(state)).unwrap();
        assert!(files.next().is_none());
    }

    #[test]
    fn pieces_have_all_blocks_and_no_more_than_fit() {
        let ranges =
            [(0, 1), (5, 3000), (9000, 70)].map(|(start, count)| BlockRange::new(start, count));
        let pieces = pieces(&ranges);
        let count = |piece: &Vec<BlockRange>| piece.iter().map(|range| range.count).sum::<u64>();
        assert_eq!(
            pieces.iter().map(count).collect::<Vec<_>>(),
            [1024, 1024, 1023]
        );
        let blocks = |ranges: &[BlockRange]| {
            let blocks = ranges.iter().flat_map(|range| range.blocks());
            blocks.collect::<Vec<_>>()
        };
        assert_eq!(blocks(&pieces.concat()), blocks(&ranges));
        assert!(super::pieces(&[]).is_empty());
    }
}
