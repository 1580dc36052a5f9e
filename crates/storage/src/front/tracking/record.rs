//! The record of a round as the server uses it: writes to it wait until their chunks are durable.

use super::CHUNK_BYTES;
use super::rounds::{changed_chunks, read};
use crate::files::Files;
use crate::front::arriving::masks::MaskFile;
use crate::front::folder::{FolderError, failed};
use crate::nbd::{client_is_gone, others_go_on};
use crate::pulse::elsewhere;
use longhaul_engine::presence::ChunkMask;
use nix::errno::Errno;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Chunks in a row, recorded before the one that a write begins, that make it sequential.
const RUN_MIN: u32 = 2;
/// The maximum number of chunks that are recorded ahead of a sequential write: 16 MiB.
const AHEAD_MAX: u32 = 64;

/// The record of a round as the server uses it.
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
        let durable = changed_chunks(&masks);
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

    /// Returns the bytes that are recorded as changed, chunk by chunk. The last chunk has no end.
    pub(super) fn ranges(&self) -> Vec<Range<u64>> {
        let state = self.lock();
        let changed = (0..).zip(&state.durable).filter(|(_, changed)| **changed);
        let last = (state.durable.len() as u64).saturating_sub(1);
        let bytes = |chunk: u64| match chunk == last {
            true => chunk * CHUNK_BYTES..u64::MAX,
            false => chunk * CHUNK_BYTES..(chunk + 1) * CHUNK_BYTES,
        };
        changed.map(|(chunk, _)| bytes(chunk)).collect()
    }

    /// Returns the chunks of these bytes that are not durably recorded.
    pub(super) fn unrecorded(&self, bytes: &Range<u64>) -> Vec<u32> {
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
        let mut state = self.lock();
        let ahead = state.ahead(&new);
        state.wanted.extend(new.iter().copied().chain(ahead));
        drop(state);
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

impl State {
    /// Returns the chunks after these that are recorded with them: when writes are sequential, as
    /// many as are recorded in a row before them. So a long run costs few syncs, and its end names
    /// at most as many chunks again, which nobody may have changed.
    fn ahead(&self, new: &[u32]) -> Range<u32> {
        let (Some(first), Some(last)) = (new.first(), new.last()) else {
            return 0..0;
        };
        let before = self.durable[..*first as usize].iter().rev();
        let run = before.take(AHEAD_MAX as usize).take_while(|it| **it);
        let run = run.count() as u32;
        let end = match run < RUN_MIN {
            true => last + 1,
            false => (last + 1 + run).min(self.durable.len() as u32),
        };
        last + 1..end
    }
}

fn is_durable(state: &State, chunks: &[u32]) -> bool {
    chunks.iter().all(|chunk| state.durable[*chunk as usize])
}

/// Returns an error if the client of this thread's request is gone: it repeats the request
/// elsewhere, and must not be overtaken.
pub(super) fn is_wanted() -> io::Result<()> {
    match client_is_gone() {
        true => Err(Errno::ECANCELED.into()),
        false => Ok(()),
    }
}
