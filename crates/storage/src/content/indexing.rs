//! Indexing of a file's content, in small steps.

use super::catalogue::{Identity, PATH_BYTES_MAX, Writes};
use super::table::{BLOCKS_MAX, PageEntry};
use super::{BLOCK_BYTES, ContentError, ContentIndex, failed};
use longhaul_codec::{Digest, Staged};
use longhaul_protocol::BLOCK_SIZE;
use nix::errno::Errno;
use nix::libc;
use nix::unistd::{Whence, lseek};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Blocks that are read at once.
const STEP_BLOCKS: usize = 64;
/// Blocks collected before the table is written: 48 bytes each in memory, and one pass over the
/// table for all of them.
const PENDING_MAX: usize = 256 << 10;
/// Longest pause between two steps.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The progress of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// More of the file remains.
    More,
    /// The whole file is in the index, durably.
    Done,
}

/// A file that is being indexed.
#[derive(Debug)]
pub struct Indexing<'a> {
    index: &'a ContentIndex,
    path: PathBuf,
    file: File,
    slot: u16,
    generation: u16,
    size_bytes: u64,
    next: u64,
    /// One block longer than a step, so that a step begins at a multiple of a block.
    buffer: Vec<u8>,
    pending: Vec<(Digest, PageEntry)>,
}

impl ContentIndex {
    /// Begins or resumes the indexing of a file. If the file has changed since, its entries are
    /// invalidated first.
    pub fn index(&self, path: &Path, writes: Writes) -> Result<Indexing<'_>, ContentError> {
        let path = std::path::absolute(path).map_err(failed("find", path))?;
        let unfit = |reason| ContentError::Unfit {
            path: path.clone(),
            reason,
        };
        if path.as_os_str().len() > PATH_BYTES_MAX || path.to_str().is_none() {
            return Err(unfit("its name is too long, or not UTF-8"));
        }
        let file = open(&path).map_err(failed("open", &path))?;
        let metadata = file.metadata().map_err(failed("look at", &path))?;
        if !metadata.is_file() {
            return Err(unfit("it is not a plain file"));
        }
        let identity = Identity::of(&metadata);
        if identity.size_bytes / BLOCK_BYTES > BLOCKS_MAX {
            return Err(unfit("it is too large"));
        }
        let mut state = self.state();
        let slot = state.catalogue.enter(&path, identity, writes);
        let slot = slot.ok_or(ContentError::Full)?;
        let (generation, next) = state
            .catalogue
            .slot(slot)
            .map(|known| (known.generation, known.indexed_bytes))
            .ok_or(ContentError::Full)?;
        self.write(&mut state)?;
        drop(state);
        Ok(Indexing {
            index: self,
            path,
            file,
            slot,
            generation,
            size_bytes: identity.size_bytes,
            next,
            buffer: vec![0; (STEP_BLOCKS + 1) * BLOCK_SIZE],
            pending: Vec::new(),
        })
    }
}

/// Opens a file so that reading it does not change the page cache, if its file system can do that:
/// the cached pages are those that guests use, and show which parts of a base image are hot.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => File::open(path),
        opened => opened,
    }
}

impl Indexing<'_> {
    /// Reads the next part of the file: 256 KiB at most.
    pub fn step(&mut self) -> Result<Step, ContentError> {
        let data = self.data().map_err(failed("read", &self.path))?;
        let Some(from) = data else {
            return self.save(self.size_bytes).map(|()| Step::Done);
        };
        let blocks = (self.size_bytes - from) / BLOCK_BYTES;
        // An incomplete last block is not indexed.
        let count = usize::try_from(blocks)
            .unwrap_or(STEP_BLOCKS)
            .min(STEP_BLOCKS);
        let aligned = self.buffer.as_ptr().align_offset(BLOCK_SIZE);
        let buffer = &mut self.buffer[aligned..][..count * BLOCK_SIZE];
        let mut read = self.file.read_exact_at(buffer, from);
        if matches!(&read, Err(error) if error.kind() == io::ErrorKind::InvalidInput) {
            // Its file system cannot bypass the page cache after all.
            self.file = File::open(&self.path).map_err(failed("open", &self.path))?;
            read = self.file.read_exact_at(buffer, from);
        }
        match read {
            // The file was truncated meanwhile: it has changed.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                self.next = self.size_bytes;
                return Ok(Step::More);
            }
            read => read.map_err(failed("read", &self.path))?,
        }
        let mut staged = Vec::with_capacity(count);
        let (blocks, _) = buffer.as_chunks::<BLOCK_SIZE>();
        self.index.hasher.stage(blocks, &mut staged);
        for (place, staged) in staged.iter().enumerate() {
            if let Staged::Content(digest) = staged {
                let block = from / BLOCK_BYTES + place as u64;
                let entry = PageEntry::new(digest, self.slot, self.generation, block);
                self.pending.push((*digest, entry));
            }
        }
        self.next = from + count as u64 * BLOCK_BYTES;
        if count == 0 {
            self.next = self.size_bytes;
        }
        if self.pending.len() >= PENDING_MAX {
            self.save(self.next)?;
        }
        Ok(Step::More)
    }

    /// Indexes the whole file, using at most this share of the time, until it is told to stop. A
    /// cause that slows reading down, such as a guest that reads, lengthens the pauses too.
    pub fn run(mut self, share_percent: u32, stop: &AtomicBool) -> Result<Step, ContentError> {
        let share = share_percent.clamp(1, 100);
        while !stop.load(Ordering::Relaxed) {
            let begin = Instant::now();
            if self.step()? == Step::Done {
                return Ok(Step::Done);
            }
            let pause = begin.elapsed() * (100 - share) / share;
            thread::sleep(pause.min(PAUSE_MAX));
        }
        self.save(self.next)?;
        Ok(Step::More)
    }

    /// Returns the offset of the next data, rounded down to a block.
    fn data(&self) -> io::Result<Option<u64>> {
        if self.next >= self.size_bytes {
            return Ok(None);
        }
        let offset = i64::try_from(self.next).map_err(io::Error::other)?;
        match lseek(&self.file, offset, Whence::SeekData) {
            Ok(place) => {
                let place = u64::try_from(place).map_err(io::Error::other)?;
                let block = place / BLOCK_BYTES * BLOCK_BYTES;
                Ok((block < self.size_bytes).then_some(block.max(self.next)))
            }
            Err(Errno::ENXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the collected blocks, and then the progress of the file.
    fn save(&mut self, indexed_bytes: u64) -> Result<(), ContentError> {
        let index = self.index;
        let live = index.state().catalogue.live();
        let is_live = |slot, generation| live.get(usize::from(slot)) == Some(&generation);
        index
            .table
            .insert(&mut self.pending, is_live)
            .and_then(|()| index.table.sync())
            .map_err(failed("write", &index.folder))?;
        self.pending.clear();
        let mut state = index.state();
        match state.catalogue.slot_mut(self.slot) {
            Some(known) if known.generation == self.generation && known.is_live() => {
                known.indexed_bytes = indexed_bytes;
            }
            // The file was forgotten meanwhile.
            Some(_) | None => {}
        }
        index.write(&mut state)
    }
}
