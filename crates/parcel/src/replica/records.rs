//! Files of chunk records: those of a version that arrives, and the undo logs.
//!
//! A record has its length in 4 bytes, and then the rest of a chunk record of a parcel.

use super::UNKNOWN;
use super::document::CHUNKS_MAX;
use super::error::{ReplicaError, io_at};
use crate::record::{Chunk, KIND_CHUNK, RECORD_BYTES_MAX, Record};
use crate::room::Places;
use longhaul_storage::files::{Access, Files, OpenFile};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Bytes that are written at once.
const WRITE_BYTES: usize = 1 << 20;

/// A file of records that is written.
#[derive(Debug)]
pub(super) struct RecordWriter {
    path: PathBuf,
    file: Box<dyn OpenFile>,
    /// Where the buffer goes.
    at: u64,
    buffer: Vec<u8>,
}

impl RecordWriter {
    pub(super) fn create(files: &dyn Places, path: &Path) -> Result<Self, ReplicaError> {
        Ok(Self {
            path: path.to_path_buf(),
            file: files.create(path).map_err(io_at(path))?,
            at: 0,
            buffer: Vec::new(),
        })
    }

    /// Returns the length with all records that were put.
    pub(super) fn bytes(&self) -> u64 {
        self.at + self.buffer.len() as u64
    }

    pub(super) fn put(&mut self, rest: &[u8]) -> Result<(), ReplicaError> {
        self.buffer.extend((rest.len() as u32).to_le_bytes());
        self.buffer.extend(rest);
        match self.buffer.len() >= WRITE_BYTES {
            true => self.write(),
            false => Ok(()),
        }
    }

    fn write(&mut self) -> Result<(), ReplicaError> {
        let written = self.file.write_at(self.at, &self.buffer);
        written.map_err(io_at(&self.path))?;
        self.at += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    pub(super) fn sync(&mut self) -> Result<(), ReplicaError> {
        self.write()?;
        let synced = self.file.sync("the records");
        synced.map_err(io_at(&self.path))
    }
}

/// Reads the chunks of a file that was written by [`RecordWriter`].
pub(super) struct Records {
    path: PathBuf,
    file: Box<dyn OpenFile>,
    at: u64,
    end: u64,
}

impl Records {
    /// Opens a file of which so many bytes are records; all, if that is not said.
    pub(super) fn open(
        files: &dyn Files,
        path: &Path,
        bytes: Option<u64>,
    ) -> Result<Self, ReplicaError> {
        let fails = io_at(path);
        let file = files.open(path, Access::Read).map_err(&fails)?;
        let end = match bytes {
            Some(bytes) => bytes,
            None => file.length().map_err(fails)?,
        };
        Ok(Self {
            path: path.to_path_buf(),
            file,
            at: 0,
            end,
        })
    }

    /// Reads a chunk, and its record as it was put.
    pub(super) fn next_record(&mut self) -> Result<Option<(Vec<u8>, Chunk)>, ReplicaError> {
        let at = self.at;
        if at == self.end {
            return Ok(None);
        }
        let fails = io_at(&self.path);
        let mut length = [0; 4];
        self.file.read_at(at, &mut length).map_err(&fails)?;
        let length = u32::from_le_bytes(length) as usize;
        let end = at + 4 + length as u64;
        if length > RECORD_BYTES_MAX || end > self.end {
            return Err(fails(io::Error::other("it has an impossible record")));
        }
        let mut rest = vec![0; length];
        self.file.read_at(at + 4, &mut rest).map_err(&fails)?;
        self.at = end;
        match Record::decode(KIND_CHUNK, &rest)? {
            Record::Chunk(chunk) if chunk.chunk <= CHUNKS_MAX => Ok(Some((rest, chunk))),
            _ => Err(fails(io::Error::other("it has an impossible record"))),
        }
    }
}

impl Iterator for Records {
    type Item = Result<Chunk, ReplicaError>;

    fn next(&mut self) -> Option<Self::Item> {
        let record = self.next_record().transpose()?;
        Some(record.map(|(_, chunk)| chunk))
    }
}

/// The records of a version that arrives, while the images have the one before.
#[derive(Debug)]
pub(super) struct Collected {
    writer: RecordWriter,
    /// For each disk and chunk, where its last record begins, and its digest.
    pub(super) chunks: BTreeMap<(usize, u64), (u64, [u8; 32])>,
}

impl Collected {
    pub(super) fn file(folder: &Path) -> PathBuf {
        folder.join("arriving")
    }

    pub(super) fn begin(files: &dyn Places, folder: &Path) -> Result<Self, ReplicaError> {
        Ok(Self {
            writer: RecordWriter::create(files, &Self::file(folder))?,
            chunks: BTreeMap::new(),
        })
    }

    pub(super) fn add(
        &mut self,
        at: (usize, u64),
        rest: &[u8],
        digest: [u8; 32],
    ) -> Result<(), ReplicaError> {
        self.chunks.insert(at, (self.writer.bytes(), digest));
        self.writer.put(rest)
    }

    /// Returns whether a chunk has arrived.
    pub(super) fn has(&self, at: (usize, u64)) -> bool {
        let known = self.chunks.get(&at);
        known.is_some_and(|(_, digest)| *digest != UNKNOWN)
    }

    /// Says that a chunk has another digest than is known.
    pub(super) fn forget(&mut self, at: (usize, u64)) {
        self.chunks.insert(at, (0, UNKNOWN));
    }

    pub(super) fn bytes(&self) -> u64 {
        self.writer.bytes()
    }

    pub(super) fn sync(&mut self) -> Result<(), ReplicaError> {
        self.writer.sync()
    }
}
