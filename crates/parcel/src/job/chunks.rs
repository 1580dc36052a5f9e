//! Reads and encodes the chunks of a disk: in several threads, and in bounded memory.

use super::copier::Encoded;
use super::rests::Rests;
use crate::aligned::Aligned;
use crate::direct::DirectReads;
use crate::record::{CHUNK_BYTES, Packer, RecordError, is_zero};
use crate::replica::patch;
use crate::tree::{Before, Tree};
use longhaul_storage::disk::{Disk as _, RawDisk};
use longhaul_storage::front::tracking::{Checkpoint, CheckpointError};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, Scope};

/// Chunks that one thread reads and encodes before it passes them on.
const BATCH: u64 = 16;
/// Chunks of a disk that are read at once: a huge page.
const PIECE: u64 = 8;
/// Batches of all threads that wait while earlier ones are written: as many as are read while
/// devices make rows durable.
const BATCHES_AHEAD: usize = 8;
/// Threads for each processor: half of them may wait for the disk.
const THREADS_EACH: usize = 2;
/// More threads would take more memory, and read no faster than devices are written.
const THREADS_MAX: usize = 8;

/// Returns how many threads read one disk.
pub(super) fn threads() -> usize {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    (processors * THREADS_EACH).min(THREADS_MAX)
}

/// Where the content of a disk is read.
pub(super) enum Content<'a> {
    /// As it is.
    Disk(RawDisk, DirectReads),
    /// As it was at a moment; the version before has this many bytes.
    Moment(&'a mut Checkpoint, u64),
}

impl Content<'_> {
    /// Reads a disk as it is.
    pub(super) fn of_disk(disk: RawDisk) -> Self {
        let direct = DirectReads::of(disk.file());
        Self::Disk(disk, direct)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Disk(_, direct) if direct.read(offset, buffer) => Ok(()),
            Self::Disk(disk, _) => disk.read(offset, buffer),
            Self::Moment(checkpoint, _) => checkpoint.read(offset, buffer),
        }
    }

    /// Returns whether bytes are known to be those of the version before.
    fn is_unchanged(&self, bytes: &Range<u64>) -> bool {
        match self {
            Self::Disk(..) => false,
            // The last chunk of an image that has grown is longer now, also if nothing was written
            // to it.
            Self::Moment(checkpoint, had) => bytes.end <= *had && !checkpoint.has_changed(bytes),
        }
    }

    /// Returns whether a guest may be writing, which is to go on as before.
    fn is_in_use(&self) -> bool {
        matches!(self, Self::Moment(..))
    }

    /// Returns how many chunks are read at once.
    fn piece(&self) -> u64 {
        match self {
            Self::Disk(..) => PIECE,
            // Most of them have not changed.
            Self::Moment(..) => 1,
        }
    }

    /// Says that these bytes will be read soon.
    fn prefetch(&self, bytes: &Range<u64>) {
        if let Self::Disk(disk, direct) = self
            && !direct.are_possible()
        {
            let length = bytes.end.saturating_sub(bytes.start);
            let (from, length) = (bytes.start as i64, length as i64);
            let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
            // The advice only saves time: the bytes are also read if it fails.
            let _ = posix_fadvise(disk.file(), from, length, advice);
        }
    }

    /// Confirms what was read before this byte.
    fn copied(&mut self, to: u64) -> Result<(), CheckpointError> {
        match self {
            Self::Disk(..) => Ok(()),
            Self::Moment(checkpoint, _) => checkpoint.copied(to),
        }
    }
}

/// Why a chunk cannot be exported.
pub(super) enum ReadOrRecord {
    Read(io::Error),
    Record(RecordError),
}

/// A chunk of a disk.
pub(super) enum Read {
    /// It is that of the version before, and was not read.
    Unchanged([u8; 32]),
    Encoded(Encoded),
}

/// What became of a chunk.
pub(super) type Encoding = Result<Read, ReadOrRecord>;

/// Chunks that were read.
pub(super) struct Batch {
    /// The number of the chunk behind them.
    pub(super) end: u64,
    /// Each with its digest in the version before.
    pub(super) chunks: Vec<(Encoding, Option<[u8; 32]>)>,
    /// Whether they are of the moment.
    pub(super) copied: Result<(), CheckpointError>,
}

/// Reads a disk in one thread.
pub(super) struct Reading<'a> {
    content: Content<'a>,
    /// The numbers of the guest and the disk.
    disk: (u32, u32),
    bytes: u64,
    before: Before,
    /// Whether chunks may be patched.
    patches: bool,
    packer: Packer,
    piece: Aligned,
    /// The chunks that the piece has.
    has: Range<u64>,
}

impl<'a> Reading<'a> {
    /// Prepares to read a disk: its numbers, and its length in bytes. `before` has the digests of
    /// the version before, and chunks of it may be patched or not.
    pub(super) fn new(
        content: Content<'a>,
        (disk, bytes): ((u32, u32), u64),
        (before, patches): (Before, bool),
    ) -> Self {
        Self {
            content,
            disk,
            bytes,
            before,
            patches,
            packer: Packer::default(),
            piece: Aligned::zeros(PIECE as usize * CHUNK_BYTES),
            has: 0..0,
        }
    }
}

/// Batches in the order of chunks.
pub(super) struct Batches {
    threads: Vec<Receiver<io::Result<Batch>>>,
    next: usize,
}

impl Iterator for Batches {
    type Item = io::Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let thread = self.threads.get(self.next)?;
        self.next = (self.next + 1) % self.threads.len();
        // The threads have batches in turn: if one has no more, there are no more.
        thread.recv().ok()
    }
}

/// Reads chunks, each of the readings in a thread of its own. If the batches are dropped, the
/// threads end.
pub(super) fn read_all<'scope>(
    scope: &'scope Scope<'scope, '_>,
    readings: Vec<Reading<'scope>>,
    chunks: &Range<u64>,
) -> Batches {
    let step = BATCH * readings.len() as u64;
    let ahead = (BATCHES_AHEAD / readings.len().max(1)).max(1);
    let firsts = (chunks.start..).step_by(BATCH as usize);
    let threads = readings.into_iter().zip(firsts).map(|(reading, first)| {
        let (sender, receiver) = mpsc::sync_channel(ahead);
        let end = chunks.end;
        scope.spawn(move || reading.send_all(first..end, step, &sender));
        receiver
    });
    Batches {
        threads: threads.collect(),
        next: 0,
    }
}

impl Reading<'_> {
    /// Reads and encodes a batch of each step until all are sent, or one batch is not of the
    /// moment, or nobody receives them.
    fn send_all(mut self, chunks: Range<u64>, step: u64, batches: &SyncSender<io::Result<Batch>>) {
        let mut rests = Rests::begin();
        for chunk in chunks.clone().step_by(step as usize) {
            let next = (chunk + step) * CHUNK_BYTES as u64;
            let end = next + BATCH * CHUNK_BYTES as u64;
            self.content
                .prefetch(&(next.min(self.bytes)..end.min(self.bytes)));
            let batch = self.batch(chunk..(chunk + BATCH).min(chunks.end));
            if self.content.is_in_use() {
                rests.take();
            }
            let is_last = !matches!(&batch, Ok(Batch { copied: Ok(()), .. }));
            if batches.send(batch).is_err() || is_last {
                return;
            }
        }
    }

    fn batch(&mut self, chunks: Range<u64>) -> io::Result<Batch> {
        let old = self.before.digests(chunks.clone())?;
        self.has = 0..0;
        let read = chunks.clone().zip(old).map(|(chunk, old)| {
            let encoding = self.encode(chunk, old.as_ref(), chunks.end);
            (encoding, old)
        });
        let read = read.collect();
        let end = self.bytes.min(chunks.end * CHUNK_BYTES as u64);
        Ok(Batch {
            end: chunks.end,
            chunks: read,
            copied: self.content.copied(end),
        })
    }

    /// Reads and encodes a chunk. `old` is its digest in the version before.
    fn encode(&mut self, chunk: u64, old: Option<&[u8; 32]>, end: u64) -> Encoding {
        let from = chunk * CHUNK_BYTES as u64;
        let length = (self.bytes - from).min(CHUNK_BYTES as u64);
        if let Some(old) = old
            && self.content.is_unchanged(&(from..from + length))
        {
            return Ok(Read::Unchanged(*old));
        }
        if !self.has.contains(&chunk) {
            self.read(chunk..(chunk + self.content.piece()).min(end))
                .map_err(ReadOrRecord::Read)?;
        }
        let at = (chunk - self.has.start) as usize * CHUNK_BYTES;
        let content = self.piece.bytes().get(at..at + length as usize);
        let content = content.unwrap_or_default();
        let zeros = content.len() == CHUNK_BYTES && is_zero(content);
        let (digest, content) = match zeros {
            true => (digest_of_zeros(), None),
            false => (Tree::of_chunk(content), Some(content)),
        };
        let (guest, disk) = self.disk;
        let rest = self.packer.encode((guest, disk, chunk), content);
        let rest = rest.map_err(ReadOrRecord::Record)?;
        let has_changed = old.is_some_and(|old| *old != digest);
        let content = content.filter(|content| patch::is_worth_asking(content, &rest));
        let blocks = content.filter(|_| self.patches && has_changed);
        Ok(Read::Encoded(Encoded {
            blocks: blocks.map(patch::blocks_of),
            rest,
            digest,
        }))
    }

    /// Reads chunks that fit into the piece.
    fn read(&mut self, chunks: Range<u64>) -> io::Result<()> {
        self.has = 0..0;
        let from = chunks.start * CHUNK_BYTES as u64;
        let to = self.bytes.min(chunks.end * CHUNK_BYTES as u64);
        let piece = self.piece.bytes_mut().get_mut(..(to - from) as usize);
        self.content.read(from, piece.unwrap_or_default())?;
        self.has = chunks;
        Ok(())
    }
}

/// Returns the digest of a whole chunk of zeros.
fn digest_of_zeros() -> [u8; 32] {
    static DIGEST: OnceLock<[u8; 32]> = OnceLock::new();
    *DIGEST.get_or_init(|| Tree::of_chunk(&[0; CHUNK_BYTES]))
}
