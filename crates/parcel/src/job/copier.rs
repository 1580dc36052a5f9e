//! What parcels and replicas have in common: versions of guests' disks that are copied to a place
//! which only takes records, and how far that has come.

use super::DURABLE_EVERY;
use super::document::{self, Copied};
use super::error::{JobError, io_at};
use super::moment::{Moment, Tracking, Untracked};
use crate::lock::{FolderLock, lock_folder};
use crate::record::{KIND_CHUNK, Record};
use crate::writer::Writer;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where records go.
pub(super) trait Sink {
    /// Puts a record behind the others.
    fn put(&mut self, record: &Record) -> Result<(), JobError>;

    /// Puts a chunk that was encoded before.
    fn put_chunk(&mut self, chunk: Encoded) -> Result<(), JobError>;
}

/// A chunk that was read.
#[derive(Debug)]
pub(super) struct Encoded {
    /// The rest of its record.
    pub(super) rest: Vec<u8>,
    pub(super) digest: [u8; 32],
    /// The digests of its blocks, if it may be patched.
    pub(super) blocks: Option<Vec<u8>>,
}

impl Sink for Writer {
    fn put(&mut self, record: &Record) -> Result<(), JobError> {
        Ok(Writer::put(self, record)?)
    }

    fn put_chunk(&mut self, chunk: Encoded) -> Result<(), JobError> {
        Ok(self.put_encoded(KIND_CHUNK, &chunk.rest)?)
    }
}

/// What is kept beside the state of the copies, in one document with it.
pub(super) trait Document: Debug + Serialize + DeserializeOwned {
    /// Where the records go.
    type Sink: Sink + ?Sized;
    /// Whether chunks may be patched there.
    const PATCHES: bool;

    /// Makes durable what was put, and notes where that is.
    fn sync(&mut self, sink: &mut Self::Sink) -> Result<(), JobError>;

    /// Returns whether its numbers are possible.
    fn is_possible(&self) -> bool;
}

/// Copies versions of guests' disks.
#[derive(Debug)]
pub(super) struct Copier<D> {
    pub(super) folder: PathBuf,
    pub(super) state: Copied,
    pub(super) document: D,
    pub(super) durable_every: Duration,
    pub(super) tracking: Box<dyn Tracking>,
    /// Whether guests' file systems are frozen at their moments, where that is possible.
    pub(super) freezes: bool,
    /// The moments of guests that wait for others of their group, by their numbers.
    pub(super) moments: BTreeMap<usize, Moment>,
}

impl<D: Document> Copier<D> {
    /// Goes on with what is known. No writes are tracked.
    pub(super) fn new(folder: &Path, state: Copied, document: D) -> Self {
        Self {
            folder: folder.to_path_buf(),
            state,
            document,
            durable_every: DURABLE_EVERY,
            tracking: Box::new(Untracked),
            freezes: true,
            moments: BTreeMap::new(),
        }
    }

    /// Reads what the last command has left.
    pub(super) fn read(&mut self) -> Result<(), JobError> {
        (self.state, self.document) = document::read(&self.folder)?;
        Ok(())
    }

    /// Makes the document durable.
    pub(super) fn save(&self) -> Result<(), JobError> {
        document::save(&self.folder, &self.state, &self.document)
    }

    /// Makes durable what was put, and then the document.
    pub(super) fn durable(&mut self, sink: &mut D::Sink) -> Result<(), JobError> {
        self.document.sync(sink)?;
        self.save()
    }

    /// Returns the file of the digests that a disk has in a version.
    pub(super) fn digests(&self, (guest, disk): (usize, usize), version: u64) -> PathBuf {
        self.folder
            .join(format!("digests.{guest}.{disk}.{version}"))
    }
}

/// Returns the folder that has a file.
pub(super) fn parent_of(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

/// Keeps other commands from the folder of a job.
pub(super) fn lock(folder: &Path, name: &str) -> Result<FolderLock, JobError> {
    let lock = lock_folder(folder).map_err(io_at(folder))?;
    lock.ok_or_else(|| JobError::Busy(name.to_owned()))
}
