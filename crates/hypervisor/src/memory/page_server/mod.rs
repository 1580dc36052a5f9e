//! The page server: a process that holds the socket of QEMU's incoming post-copy, so that QEMU does
//! not notice when the agent ends.
//!
//! ```text
//! QEMU ──asks for pages──▶ page server ──Want──▶ agent ══▶ source
//!      ◀─sections with pages─┘        ◀──Give──┘
//! ```
//!
//! It knows which pages are missing, and gives each once. Agents connect on a Unix socket, one at a
//! time: a later one is told what is missing and what the guest waits for. What an agent has not
//! said whole is dropped with its connection, so its end at any moment does no harm.
//!
//! An agent starts it before QEMU loads the guest, and passes it QEMU's socket then. It ends when
//! QEMU closes that socket: when QEMU has all pages, or has ended. Without a QEMU it ends with its
//! agent. It has one thread and no runtime, so that only its own work can stall it.

pub mod core;
pub mod line;

use self::core::{Core, QemuError};
use self::line::SEND_BUFFER_BYTES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::fmt;
use std::fs::{self, Permissions};
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a server without a QEMU waits for an agent.
const ALONE: Duration = Duration::from_secs(60);
/// Limit on the bytes that wait for QEMU: nothing is taken from the agent while there are more. A
/// page that the guest waits for is behind them.
const QEMU_QUEUE_BYTES_MAX: usize = 64 << 10;
/// Limit on the bytes that wait for an agent: one that does not read them is disconnected, and gets
/// the state again when it reconnects.
const AGENT_QUEUE_BYTES_MAX: usize = 256 << 20;
/// Bytes taken from a socket at once.
const READ_BYTES: usize = 64 << 10;

/// Why a page server ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// There is no QEMU, and no agent.
    Unused,
    /// QEMU has closed its socket.
    QemuClosed {
        /// The number of pages that were missing then.
        missing: u64,
    },
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unused => f.write_str("there is no QEMU, and no agent"),
            Self::QemuClosed { missing: 0 } => f.write_str("QEMU has all pages"),
            Self::QemuClosed { missing } => {
                write!(f, "QEMU has closed its socket, and lacks {missing} pages")
            }
        }
    }
}

/// Why a page server failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The system refused.
    #[error("cannot serve pages: {0}")]
    Io(#[from] io::Error),
    /// QEMU is not understood.
    #[error("cannot serve pages: {0}")]
    Qemu(#[from] QemuError),
}

/// A socket file, which is removed in the end.
struct Listening {
    listener: UnixListener,
    path: PathBuf,
    file: (u64, u64),
}

impl Listening {
    fn at(path: &Path) -> io::Result<Self> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let metadata = fs::metadata(path)?;
        Ok(Self {
            listener,
            path: path.to_owned(),
            file: (metadata.dev(), metadata.ino()),
        })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // A later server may listen there.
        let is_ours = |metadata: fs::Metadata| (metadata.dev(), metadata.ino()) == self.file;
        if fs::metadata(&self.path).is_ok_and(is_ours) {
            // The agent removes it otherwise.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A connection, and how much of what waits for it was written.
struct Connection {
    stream: UnixStream,
    written: usize,
}

impl Connection {
    fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream, written: 0 })
    }

    /// Writes what the socket takes.
    fn flush(&mut self, queue: &mut Vec<u8>) -> io::Result<()> {
        while let Some(rest) = queue.get(self.written..).filter(|rest| !rest.is_empty()) {
            match self.stream.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(length) => self.written += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.written >= READ_BYTES {
                        queue.drain(..self.written);
                        self.written = 0;
                    }
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        queue.clear();
        self.written = 0;
        Ok(())
    }

    fn poll(&self, reads: bool, writes: bool) -> PollFd<'_> {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, reads);
        flags.set(PollFlags::OUT, writes);
        PollFd::new(&self.stream, flags)
    }
}

/// Reads without waiting. Returns `None` if there is nothing to read now, and 0 at the end.
fn tried(read: io::Result<usize>) -> io::Result<Option<usize>> {
    match read {
        Ok(length) => Ok(Some(length)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The server's sockets.
struct Process {
    core: Core,
    listening: Listening,
    qemu: Option<Connection>,
    agent: Option<Connection>,
    buffer: Vec<u8>,
}

/// What can be read.
struct Readable {
    listener: bool,
    qemu: bool,
    agent: bool,
}

/// Serves pages on a socket at `path`, until there is nothing left to do.
pub fn run(path: &Path) -> Result<End, ServeError> {
    let mut process = Process {
        core: Core::default(),
        listening: Listening::at(path)?,
        qemu: None,
        agent: None,
        buffer: vec![0; READ_BYTES],
    };
    let deadline = Instant::now() + ALONE;
    let mut had_agent = false;
    loop {
        let readable = process.wait(deadline)?;
        if readable.qemu && !process.read_qemu()? {
            let missing = process.core.missing();
            return Ok(End::QemuClosed { missing });
        }
        if readable.listener {
            process.accept();
        }
        if readable.agent
            && let Err(error) = process.read_agent()
        {
            tracing::info!(%error, "the agent is gone");
            process.agent = None;
        }
        if !process.flush() {
            let missing = process.core.missing();
            return Ok(End::QemuClosed { missing });
        }
        had_agent |= process.agent.is_some();
        let unused = !process.core.serves() && process.agent.is_none();
        if unused && (had_agent || Instant::now() >= deadline) {
            return Ok(End::Unused);
        }
    }
}

impl Process {
    fn wait(&mut self, deadline: Instant) -> io::Result<Readable> {
        let to_qemu = self.core.to_qemu().map_or(0, |queue| queue.len());
        let takes = to_qemu < QEMU_QUEUE_BYTES_MAX;
        let listener = &self.listening.listener;
        let mut polled = vec![PollFd::new(listener, PollFlags::IN)];
        // What QEMU says before it is served is read then.
        let qemu = self.qemu.as_ref().filter(|_| self.core.serves());
        let qemu = qemu.map(|qemu| qemu.poll(true, to_qemu > 0));
        let has_qemu = qemu.is_some();
        polled.extend(qemu);
        // One that is gone would be reported all the time while nothing is taken from it.
        let tells = !self.core.to_agent.is_empty();
        let agent = self.agent.as_ref().filter(|_| takes || tells);
        polled.extend(agent.map(|agent| agent.poll(takes, tells)));
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left)
            .ok()
            .filter(|_| !self.core.serves());
        match poll(&mut polled, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let mut heard = polled.iter().map(|of| of.revents().intersects(readable));
        let listener = heard.next().unwrap_or(false);
        let qemu = has_qemu && heard.next().unwrap_or(false);
        let agent = heard.next().unwrap_or(false);
        Ok(Readable {
            listener,
            qemu,
            agent: agent && takes,
        })
    }

    fn accept(&mut self) {
        match self.listening.listener.accept() {
            Ok((stream, _)) => match Connection::new(stream) {
                Ok(agent) => {
                    self.core.connected();
                    if !self.core.serves() {
                        self.qemu = None;
                    }
                    self.agent = Some(agent);
                }
                Err(error) => tracing::warn!(%error, "an agent cannot be accepted"),
            },
            // It went again.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => tracing::warn!(%error, "an agent cannot be accepted"),
        }
    }

    /// Returns whether QEMU is still there.
    fn read_qemu(&mut self) -> Result<bool, ServeError> {
        let Some(qemu) = &mut self.qemu else {
            return Ok(true);
        };
        // A broken socket is closed, too.
        let length = tried(qemu.stream.read(&mut self.buffer)).unwrap_or(Some(0));
        let Some(length) = length else {
            return Ok(true);
        };
        self.core
            .from_qemu(self.buffer.get(..length).unwrap_or_default())?;
        Ok(length > 0)
    }

    fn read_agent(&mut self) -> io::Result<()> {
        let Some(agent) = &mut self.agent else {
            return Ok(());
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [IoSliceMut::new(&mut self.buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(&agent.stream, &mut buffers, &mut ancillary, flags);
        let received = received.map(|received| received.bytes).map_err(Into::into);
        let Some(length) = tried(received)? else {
            return Ok(());
        };
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                let sockets = files.map(|file: OwnedFd| UnixStream::from(file));
                if let Some(socket) = sockets.last().filter(|_| !self.core.serves()) {
                    set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES)?;
                    self.qemu = Some(Connection::new(socket)?);
                }
            }
        }
        self.core
            .from_agent(self.buffer.get(..length).unwrap_or_default())?;
        if self.core.serves() && self.qemu.is_none() {
            return Err(io::Error::other("it has not passed QEMU's socket"));
        }
        Ok(())
    }

    /// Writes what waits. Returns whether QEMU is still there.
    fn flush(&mut self) -> bool {
        if let (Some(qemu), Some(queue)) = (&mut self.qemu, self.core.to_qemu())
            && let Err(error) = qemu.flush(queue)
        {
            tracing::info!(%error, "QEMU is gone");
            return false;
        }
        let Some(agent) = &mut self.agent else {
            self.core.to_agent.clear();
            return true;
        };
        let queue = &mut self.core.to_agent;
        let flushed = agent.flush(queue);
        let is_full = queue.len() > AGENT_QUEUE_BYTES_MAX;
        if let Err(error) = &flushed {
            tracing::info!(%error, "the agent is gone");
        }
        if flushed.is_err() || is_full {
            self.agent = None;
        }
        true
    }
}
