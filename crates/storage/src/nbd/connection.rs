//! One client's connection from its handshake to its end, over anything that can be read and
//! written. Requests are done one after the other as they come: to hand them to other threads
//! costs more than most of them take. Only those that may have to wait for another host are.

use super::handshake::{
    self, CLIENT_FLAGS_BYTES, Handshake, HandshakeError, OPTION_HEADER_BYTES, Offer, OptionHeader,
    Session, Step,
};
use super::request::{NbdErrno, READ_HEADER_BYTES_MAX, REQUEST_BYTES, Replies, Request};
use super::request::{RequestError, Task};
use crate::disk::Disk;
use crate::pulse;
use std::cell::RefCell;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Requests of a connection that wait at a time, at most: QEMU has no more under way,
const WAITING_MAX: usize = 16;
/// over so many bytes.
const WAITING_BYTES_MAX: u64 = 32 << 20;
/// Bytes of a connection's buffer that are kept for the next request; a longer one is given back.
const BUFFER_KEPT_BYTES: usize = 1 << 20;

/// Why a connection ended otherwise than by a goodbye. What was answered is done; of what was not,
/// a write whose payload did not come whole has changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// Its handshake was none.
    #[error("an NBD client was turned away: {0}")]
    Handshake(#[from] HandshakeError),
    /// Its requests were none.
    #[error("an NBD client was cut off: {0}")]
    Request(#[from] RequestError),
    /// It went away, or the system failed.
    #[error("an NBD client went away in the middle: {0}")]
    Io(#[from] io::Error),
}

/// What a disk was asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// To read.
    Read,
    /// To write.
    Write,
    /// To make durable.
    Flush,
    /// To zero.
    Zero,
    /// To discard.
    Discard,
    /// To say what is allocated.
    Extents,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Zero => "zero",
            Self::Discard => "discard",
            Self::Extents => "look for holes in",
        })
    }
}

/// Something that a disk could not do. The client was told so.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {} bytes at {}: {error}", range.end - range.start, range.start)]
pub struct Failure {
    /// What it was asked to do.
    pub operation: Operation,
    /// Of these bytes.
    pub range: Range<u64>,
    /// What the disk said.
    pub error: io::Error,
}

/// Leads a handshake; `None` when the client went away before it chose an export.
pub fn negotiate(
    reader: &mut impl Read,
    writer: &mut impl Write,
    offers: &[Offer],
) -> Result<Option<Session>, ConnectionError> {
    writer.write_all(&handshake::greeting())?;
    let mut flags = [0; CLIENT_FLAGS_BYTES];
    if !read_or_end(reader, &mut flags)? {
        return Ok(None);
    }
    handshake::check_flags(flags)?;
    let mut handshake = Handshake::new(offers);
    loop {
        let mut header = [0; OPTION_HEADER_BYTES];
        if !read_or_end(reader, &mut header)? {
            return Ok(None);
        }
        let header = OptionHeader::parse(&header)?;
        let mut data = vec![0; header.length];
        reader.read_exact(&mut data)?;
        let mut replies = Vec::new();
        let step = handshake.option(header, &data, &mut replies)?;
        let written = writer.write_all(&replies);
        match step {
            // It need not wait for the answer to its goodbye.
            Step::End => return Ok(None),
            Step::Next => written?,
            Step::Go(session) => {
                written?;
                return Ok(Some(session));
            }
        }
    }
}

/// Answers requests until the client goes away. What the disk cannot do is reported, and answered
/// with an error. A request that may have to wait is done beside those that follow it.
pub fn transmit(
    reader: &mut impl Read,
    writer: &mut (impl Write + Send),
    disk: &dyn Disk,
    session: Session,
    report: &(dyn Fn(Failure) + Sync),
) -> Result<(), ConnectionError> {
    let writer = Mutex::new(writer);
    let waiting = Waiting::default();
    let worker = |buffer| Worker {
        disk,
        report,
        replies: Replies {
            structured: session.structured,
        },
        buffer,
        reply: Vec::new(),
    };
    let write = |reply: &[u8]| {
        let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_all(reply)
    };
    let size_bytes = disk.size_bytes();
    let gone = Arc::new(AtomicBool::new(false));
    let mut own = worker(Vec::new());
    thread::scope(|scope| {
        // What waits yet is not done after what the client says to somebody else.
        let _gone = Gone(&gone);
        loop {
            let mut header = [0; REQUEST_BYTES];
            if !read_or_end(reader, &mut header)? {
                return Ok(());
            }
            let request = Request::parse(&header)?;
            let payload = request.payload_bytes()?;
            reader.read_exact(own.room(payload))?;
            own.reply.clear();
            let cookie = request.cookie;
            match request.task(size_bytes, session.allocation) {
                Ok(Task::Disconnect) => return Ok(()),
                Ok(task) => {
                    let range = task.range(payload);
                    let length = range.end - range.start;
                    let waits = disk.may_wait(range);
                    if waits && let Some(place) = waiting.place(length) {
                        let mut beside = worker(std::mem::take(&mut own.buffer));
                        let (waiting, write, gone) = (&waiting, &write, gone.clone());
                        let work = move || {
                            GONE.set(Some(gone));
                            // A client that is gone is noticed by whoever reads from it.
                            let _ = pulse::request(|| beside.answer(cookie, task, payload))
                                .and_then(write);
                            waiting.leave(place);
                        };
                        thread::Builder::new()
                            .name("nbd-waits".to_owned())
                            .spawn_scoped(scope, work)?;
                        continue;
                    }
                    let reply = pulse::request(|| own.answer(cookie, task, payload))?;
                    write(reply)?;
                }
                Err(errno) => {
                    let why = "not a request that this disk takes";
                    own.replies.failed(&mut own.reply, cookie, errno, why);
                    write(&own.reply)?;
                }
            }
            own.tidy();
        }
    })
}

thread_local! {
    /// Of a thread that does a request beside others: whether the client is gone.
    static GONE: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether nobody waits any more for the request that this thread does. Only known of those that
/// [may wait](Disk::may_wait).
pub(crate) fn client_is_gone() -> bool {
    GONE.with_borrow(|gone| {
        gone.as_ref()
            .is_some_and(|gone| gone.load(Ordering::SeqCst))
    })
}

struct Gone<'a>(&'a AtomicBool);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Requests of a connection that are done beside others.
#[derive(Default)]
struct Waiting(Mutex<(usize, u64)>);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, (usize, u64)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a request over so many bytes, if there is one; it is left with the same number.
    fn place(&self, length_bytes: u64) -> Option<u64> {
        let mut taken = self.lock();
        let (count, bytes) = *taken;
        let bytes = bytes.saturating_add(length_bytes);
        if count >= WAITING_MAX || bytes > WAITING_BYTES_MAX {
            return None;
        }
        *taken = (count + 1, bytes);
        Some(length_bytes)
    }

    fn leave(&self, length_bytes: u64) {
        let mut taken = self.lock();
        *taken = (taken.0 - 1, taken.1 - length_bytes);
    }
}

impl Task {
    /// The bytes that it is about, with a payload of so many.
    fn range(&self, payload: usize) -> Range<u64> {
        match self {
            Self::Read(range)
            | Self::Discard { range, .. }
            | Self::Zero { range, .. }
            | Self::Status { range, .. } => range.clone(),
            Self::Write { offset, .. } => *offset..offset.saturating_add(payload as u64),
            Self::Flush | Self::Disconnect => 0..0,
        }
    }
}

/// Does what requests ask for.
struct Worker<'a> {
    disk: &'a dyn Disk,
    report: &'a (dyn Fn(Failure) + Sync),
    replies: Replies,
    /// The payload of a write, or the reply to a read.
    buffer: Vec<u8>,
    /// The reply to anything else.
    reply: Vec<u8>,
}

impl Worker<'_> {
    /// Does a request, and gives the whole reply.
    fn answer(&mut self, cookie: u64, task: Task, payload: usize) -> io::Result<&[u8]> {
        match task {
            Task::Read(range) => self.read(cookie, range),
            task => {
                self.run(cookie, task, payload)?;
                Ok(&self.reply)
            }
        }
    }

    /// So many bytes of the buffer; what they hold is of no meaning.
    fn room(&mut self, length: usize) -> &mut [u8] {
        if self.buffer.len() < length {
            self.buffer.resize(length, 0);
        }
        &mut self.buffer[..length]
    }

    fn tidy(&mut self) {
        if self.buffer.len() > BUFFER_KEPT_BYTES {
            self.buffer.truncate(BUFFER_KEPT_BYTES);
            self.buffer.shrink_to_fit();
        }
    }

    /// Reads, and gives the whole reply: its header stands just before the data.
    fn read(&mut self, cookie: u64, range: Range<u64>) -> io::Result<&[u8]> {
        let length = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        if length == 0 {
            self.replies.done(&mut self.reply, cookie);
            return Ok(&self.reply);
        }
        let end = READ_HEADER_BYTES_MAX + length;
        self.room(end);
        let data = &mut self.buffer[READ_HEADER_BYTES_MAX..end];
        if let Err(error) = self.disk.read(range.start, data) {
            self.refuse(cookie, Operation::Read, range, error);
            return Ok(&self.reply);
        }
        self.replies
            .data(&mut self.reply, cookie, range.start, length);
        let start = READ_HEADER_BYTES_MAX - self.reply.len();
        self.buffer[start..READ_HEADER_BYTES_MAX].copy_from_slice(&self.reply);
        Ok(&self.buffer[start..end])
    }

    /// Does everything else, and leaves the reply.
    fn run(&mut self, cookie: u64, task: Task, payload: usize) -> io::Result<()> {
        let disk = self.disk;
        let (operation, range, done, durable) = match task {
            Task::Write { offset, durable } => {
                let end = offset + u64::try_from(payload).map_err(io::Error::other)?;
                let done = disk.write(offset, &self.buffer[..payload]);
                (Operation::Write, offset..end, done, durable)
            }
            Task::Zero {
                range,
                zeros,
                durable,
            } => {
                let done = disk.zero(range.clone(), zeros);
                (Operation::Zero, range, done, durable)
            }
            Task::Discard { range, durable } => {
                let done = disk.discard(range.clone());
                (Operation::Discard, range, done, durable)
            }
            Task::Status { range, count_max } => {
                match disk.extents(range.clone(), count_max) {
                    Ok(extents) => self.replies.status(&mut self.reply, cookie, &extents),
                    Err(error) => self.refuse(cookie, Operation::Extents, range, error),
                }
                return Ok(());
            }
            Task::Flush => (Operation::Flush, 0..disk.size_bytes(), Ok(()), true),
            // Answered by the caller.
            Task::Read(_) | Task::Disconnect => return Ok(()),
        };
        if let Err(error) = done {
            self.refuse(cookie, operation, range, error);
        } else if durable && let Err(error) = disk.flush() {
            self.refuse(cookie, Operation::Flush, range, error);
        } else {
            self.replies.done(&mut self.reply, cookie);
        }
        Ok(())
    }

    fn refuse(&mut self, cookie: u64, operation: Operation, range: Range<u64>, error: io::Error) {
        let errno = NbdErrno::of(&error);
        let failure = Failure {
            operation,
            range,
            error,
        };
        let why = failure.to_string();
        self.replies.failed(&mut self.reply, cookie, errno, &why);
        (self.report)(failure);
    }
}

/// Fills the buffer; `false` when there is nothing any more, which is an end only here.
fn read_or_end(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    loop {
        match reader.read(buffer) {
            Ok(0) => return Ok(false),
            Ok(length) => {
                reader.read_exact(&mut buffer[length..])?;
                return Ok(true);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
