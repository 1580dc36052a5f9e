//! Checkpoints, from the side that copies.

use super::control::{Answer, Ask, receive, send};
use super::copy_log::LogReader;
use super::rounds::Changed;
use crate::files::RealFiles;
use crate::front::folder::{FolderError, FrontFolder};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, BufReader};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Time for a server to answer: it may have to flush the image.
const PATIENCE: Duration = Duration::from_secs(120);

/// Why there is no checkpoint, or not any more. The guest goes on in any case, and a later
/// checkpoint has the same changes and more.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The server does not answer: it was restarted, or the disk is not tracked any more.
    #[error("the export that tracks the disk does not answer: {0}")]
    Io(#[from] io::Error),
    /// The folder of the export cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The changes since the round in question are not recorded any more: the whole disk may have
    /// changed.
    #[error("the changes since then are not recorded any more")]
    Forgotten,
    /// The server refuses, or the checkpoint is lost.
    #[error("the checkpoint is lost: {0}")]
    Lost(String),
}

/// Identifies a record of tracked writes: rounds of different ones do not compare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackingId(String);

impl TrackingId {
    /// Returns that of an export.
    ///
    /// # Errors
    /// When its description cannot be read.
    pub fn of(folder: &FrontFolder) -> Result<Self, FolderError> {
        let spec = folder.spec()?;
        // The name itself is a secret.
        let digest = blake3::derive_key("longhaul tracked writes", spec.name.as_str().as_bytes());
        Ok(Self(
            digest[..8]
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        ))
    }
}

impl fmt::Display for TrackingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a checkpoint is to have.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// The first round whose changes are to be copied; `None` for the whole image.
    pub from: Option<u64>,
    /// How long the guest's writes may wait: 2 s at most.
    pub hold: Duration,
    /// The limit on the copy-before-write log.
    pub log_bytes_max: u64,
}

#[derive(Debug)]
struct Line(BufReader<UnixStream>);

impl Line {
    fn connect(folder: &FrontFolder) -> io::Result<Self> {
        let stream = UnixStream::connect(folder.checkpoints())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn ask(&mut self, ask: &Ask) -> Result<Answer, CheckpointError> {
        send(self.0.get_ref(), ask)?;
        let ended = || io::Error::from(io::ErrorKind::UnexpectedEof);
        match receive(&mut self.0)?.ok_or_else(ended)? {
            Answer::Failed { why } => Err(CheckpointError::Lost(why)),
            Answer::Forgotten => Err(CheckpointError::Forgotten),
            answer => Ok(answer),
        }
    }
}

fn unexpected(answer: &Answer) -> CheckpointError {
    io::Error::other(format!("an answer that was not expected: {answer:?}")).into()
}

/// Returns the current round: what is written from now on is in it, or in a later one.
///
/// # Errors
/// When the server does not answer.
pub fn current(folder: &FrontFolder) -> Result<u64, CheckpointError> {
    match Line::connect(folder)?.ask(&Ask::Current)? {
        Answer::Current { round } => Ok(round),
        answer => Err(unexpected(&answer)),
    }
}

/// Says that what was copied of the rounds up to this one is durable. The server makes the image
/// durable, and forgets them.
///
/// # Errors
/// When the server does not answer. The rounds are then copied again.
pub fn ship(folder: &FrontFolder, round: u64) -> Result<(), CheckpointError> {
    match Line::connect(folder)?.ask(&Ask::Shipped { round })? {
        Answer::Done => Ok(()),
        answer => Err(unexpected(&answer)),
    }
}

/// A disk whose writes wait. Those of a guest's other disks, or of a group's, can be held before
/// any is committed: then the checkpoints are of the same moment. Dropped, it lets them go on.
#[derive(Debug)]
pub struct Held {
    folder: FrontFolder,
    line: Line,
    from: Option<u64>,
}

impl Held {
    /// Lets the writes to a disk wait.
    ///
    /// # Errors
    /// When the server does not answer, or writes that had begun were not complete in time.
    pub fn prepare(folder: &FrontFolder, request: &Request) -> Result<Self, CheckpointError> {
        let mut line = Line::connect(folder)?;
        let ask = Ask::Prepare {
            from: request.from,
            hold_ms: u64::try_from(request.hold.as_millis()).unwrap_or(u64::MAX),
            log_bytes_max: request.log_bytes_max,
        };
        match line.ask(&ask)? {
            Answer::Held => Ok(Self {
                folder: folder.clone(),
                line,
                from: request.from,
            }),
            answer => Err(unexpected(&answer)),
        }
    }

    /// Lets the writes go on, and keeps the content of this moment.
    ///
    /// # Errors
    /// When they have gone on already.
    pub fn commit(mut self) -> Result<Checkpoint, CheckpointError> {
        let (round, image_bytes) = match self.line.ask(&Ask::Commit)? {
            Answer::Committed { round, image_bytes } => (round, image_bytes),
            answer => return Err(unexpected(&answer)),
        };
        let ranges = match self.from {
            Some(from) => {
                let record = self.folder.tracked_writes();
                let changed = Changed::between(&RealFiles, &record, (from, round))?;
                changed.ok_or(CheckpointError::Forgotten)?
            }
            None => Changed {
                image_bytes,
                ranges: std::iter::once(0..image_bytes).collect(),
            },
        };
        Ok(Checkpoint {
            log: LogReader::open(&self.folder)?,
            line: self.line,
            round,
            image_bytes,
            changed: ranges,
        })
    }
}

/// A moment of a disk that is being copied. Dropped, it is forgotten.
#[derive(Debug)]
pub struct Checkpoint {
    line: Line,
    log: LogReader,
    round: u64,
    image_bytes: u64,
    changed: Changed,
}

impl Checkpoint {
    /// Returns the round that it closed. Changes after the checkpoint are in later ones.
    pub fn round(&self) -> u64 {
        self.round
    }

    /// Returns the length of the image at that moment, in bytes.
    pub fn image_bytes(&self) -> u64 {
        self.image_bytes
    }

    /// Returns whether these bytes are among those that may have changed.
    pub fn has_changed(&self, bytes: &Range<u64>) -> bool {
        self.changed.meets(bytes)
    }

    /// Returns how many bytes may have changed.
    pub fn changed_bytes(&self) -> u64 {
        self.changed.bytes()
    }

    /// Reads bytes among those that may have changed, in ascending order. What was read is of that
    /// moment if [`copied`](Self::copied) succeeds afterwards.
    ///
    /// # Errors
    /// When the image cannot be read.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.log.read(offset, buffer)
    }

    /// Says that everything before this byte was read, and will not be read again. Returns whether
    /// it was of that moment.
    ///
    /// # Errors
    /// When the checkpoint is lost.
    pub fn copied(&mut self, to: u64) -> Result<(), CheckpointError> {
        match self.line.ask(&Ask::Copied { to })? {
            Answer::Valid => Ok(()),
            answer => Err(unexpected(&answer)),
        }
    }
}
