//! One client's connection from its handshake to its end, over any stream. Requests are carried out
//! one after the other in their order, except that those behind a waiting one proceed
//! ([`super::others_go_on`]).

use super::handshake::{
    self, CLIENT_FLAGS_BYTES, Handshake, HandshakeError, OPTION_HEADER_BYTES, Offer, OptionHeader,
    Session, Step,
};
use super::request::{NbdErrno, READ_HEADER_BYTES_MAX, REQUEST_BYTES, Replies, Request};
use super::request::{RequestError, Task};
pub use super::turns::HangUp;
use super::turns::Turns;
use crate::disk::Disk;
use crate::pulse;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};

/// Bytes of a connection's buffer that are kept for the next request; a longer buffer is freed.
const BUFFER_KEPT_BYTES: usize = 1 << 20;

/// A reason why a connection ended without a disconnect request. Answered requests are done; of the
/// unanswered ones, a write whose payload did not arrive completely has changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ConnectionError {
    /// Its handshake was invalid.
    #[error("an NBD client was turned away: {0}")]
    Handshake(#[from] HandshakeError),
    /// A request was invalid.
    #[error("an NBD client was cut off: {0}")]
    Request(#[from] RequestError),
    /// The client disconnected, or the system failed.
    #[error("an NBD client went away in the middle: {0}")]
    Io(#[from] io::Error),
}

/// An operation of a disk.
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
    /// Query of allocation.
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

/// A failed operation of a disk. The client got an error.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {} bytes at {}: {error}", range.end - range.start, range.start)]
pub struct Failure {
    /// The operation.
    pub operation: Operation,
    /// Its bytes.
    pub range: Range<u64>,
    /// The cause.
    pub error: io::Error,
}

/// Conducts a handshake; `None` when the client disconnected before it chose an export.
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
            // It need not wait for the reply to its goodbye.
            Step::End => return Ok(None),
            Step::Next => written?,
            Step::Go(session) => {
                written?;
                return Ok(Some(session));
            }
        }
    }
}

/// Answers requests until the client disconnects or its connection is hung up. Failures of the disk
/// are reported, and answered with an error.
pub fn transmit(
    reader: &mut (impl Read + Send),
    writer: &mut (impl Write + Send),
    disk: &dyn Disk,
    session: Session,
    report: &(dyn Fn(Failure) + Sync),
    hang_up: HangUp,
) -> Result<(), ConnectionError> {
    let conversation = Conversation {
        reader: Mutex::new(reader),
        writer: Mutex::new(writer),
        disk,
        session,
        report,
        turns: Arc::new(Turns::new(hang_up)),
        error: Mutex::new(None),
    };
    conversation.turns.needs_another();
    thread::scope(|scope| conversation.work(scope));
    let error = conversation.error.into_inner();
    match error.unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// The state that the threads of a connection share.
struct Conversation<'a, R, W> {
    reader: Mutex<&'a mut R>,
    writer: Mutex<&'a mut W>,
    disk: &'a dyn Disk,
    session: Session,
    report: &'a (dyn Fn(Failure) + Sync),
    turns: Arc<Turns>,
    /// The error that has ended the connection.
    error: Mutex<Option<ConnectionError>>,
}

impl<R: Read + Send, W: Write + Send> Conversation<'_, R, W> {
    /// Carries out requests until there are no more, taking turns with other threads.
    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let mut worker = Worker {
            disk: self.disk,
            report: self.report,
            replies: Replies {
                structured: self.session.structured,
            },
            buffer: Vec::new(),
            reply: Vec::new(),
        };
        let _ending = self.turns.end_in_panic();
        while let Some(turn) = self.turns.take() {
            if self.turns.needs_another() {
                let thread = thread::Builder::new().name("nbd-behind".to_owned());
                // Without another thread, requests wait for those before them.
                if thread.spawn_scoped(scope, || self.work(scope)).is_err() {
                    self.turns.is_missing();
                }
            }
            let mut turn = Some(turn);
            while let Some(mine) = turn.take().filter(|_| !self.turns.is_over()) {
                // An event that ends the connection does so before another thread has the turn.
                let request = match self.read(&mut worker) {
                    Ok(Some(request)) => request,
                    Ok(None) => return self.turns.end(),
                    Err(error) => return self.fail(error),
                };
                let bytes = request.bytes();
                let done = mine.during(bytes, || self.answer(&mut worker, request));
                let Some((answered, back)) = done else {
                    return;
                };
                // A client that has disconnected gets no more replies.
                if let Err(error) = answered
                    && !self.turns.is_over()
                {
                    self.fail(error.into());
                }
                turn = back;
                worker.tidy();
            }
        }
    }

    fn fail(&self, error: ConnectionError) {
        lock(&self.error).get_or_insert(error);
        self.turns.end();
    }

    /// Reads the next request with its payload; `None` after the last one.
    fn read(&self, worker: &mut Worker<'_>) -> Result<Option<Asked>, ConnectionError> {
        let mut reader = lock(&self.reader);
        let mut header = [0; REQUEST_BYTES];
        if !read_or_end(&mut **reader, &mut header)? {
            return Ok(None);
        }
        let request = Request::parse(&header)?;
        let payload = request.payload_bytes()?;
        reader.read_exact(worker.room(payload))?;
        let task = request.task(self.disk.size_bytes(), self.session.allocation);
        let goes_on = !matches!(task, Ok(Task::Disconnect));
        let cookie = request.cookie;
        Ok(goes_on.then_some(Asked {
            cookie,
            task,
            payload,
        }))
    }

    /// Carries out a request, and answers it.
    fn answer(&self, worker: &mut Worker<'_>, asked: Asked) -> io::Result<()> {
        let Asked {
            cookie,
            task,
            payload,
        } = asked;
        worker.reply.clear();
        match task {
            Ok(Task::Read(range)) => {
                let reply = pulse::request(|| worker.read(cookie, range))?;
                lock(&self.writer).write_all(reply)
            }
            Ok(task) => {
                pulse::request(|| worker.run(cookie, task, payload))?;
                lock(&self.writer).write_all(&worker.reply)
            }
            Err(errno) => {
                let why = "not a request that this disk takes";
                worker.replies.failed(&mut worker.reply, cookie, errno, why);
                lock(&self.writer).write_all(&worker.reply)
            }
        }
    }
}

/// A request that was read.
struct Asked {
    cookie: u64,
    task: Result<Task, NbdErrno>,
    payload: usize,
}

impl Asked {
    /// Returns the bytes that it holds in memory.
    fn bytes(&self) -> usize {
        match &self.task {
            Ok(Task::Read(range)) => usize::try_from(range.end - range.start).unwrap_or(usize::MAX),
            _ => self.payload,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic under such a lock ends the connection.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries out requests.
struct Worker<'a> {
    disk: &'a dyn Disk,
    report: &'a (dyn Fn(Failure) + Sync),
    replies: Replies,
    /// The payload of a write, or the reply to a read.
    buffer: Vec<u8>,
    /// The reply to any other request.
    reply: Vec<u8>,
}

impl Worker<'_> {
    /// Returns this many bytes of the buffer, with arbitrary content.
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

    /// Reads from the disk, and returns the whole reply: its header directly precedes the data.
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

    /// Carries out any other request, and leaves the reply in its buffer.
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

/// Fills the buffer; `false` at the end of the stream, which is valid only here.
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
