//! The server: a listening socket, and a thread for each connection.

use super::connection::{ConnectionError, Failure, HangUp, negotiate, transmit};
use super::handshake::{ExportName, Offer};
use crate::disk::Disk;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::BTreeMap;
use std::io::{self, BufReader, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Bytes read from a socket at once: small requests arrive several at a time.
const READ_BYTES: usize = 64 << 10;
/// The time until the next attempt, in milliseconds, when the system cannot accept a connection.
const ACCEPT_AGAIN: u16 = 100;

/// Time for disconnected connections to end.
const CUT_PATIENCE: Duration = Duration::from_secs(5);

/// The time without a request or a reply after which a connection is hung up whose client may
/// withhold a reply: longer than most waits for another host, and shorter than people notice.
const QUIET: Duration = Duration::from_secs(1);

/// A disk that is exported under a name.
#[derive(Debug, Clone)]
pub struct Export {
    /// Its name.
    pub name: ExportName,
    /// The disk.
    pub disk: Arc<dyn Disk>,
}

/// Limits on clients.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Concurrent connections. Each may hold one request of 32 MiB in memory.
    pub connections: usize,
    /// Time for a handshake.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16,
            handshake: Duration::from_secs(10),
        }
    }
}

/// An event that the server's owner may want to report. The server continues.
#[derive(Debug, thiserror::Error)]
pub enum Notice {
    /// An operation of a disk failed; its client got an error.
    #[error("disk {export}: {failure}")]
    Disk {
        /// The index of the export.
        export: usize,
        /// What failed.
        failure: Failure,
    },
    /// A connection ended without a disconnect request.
    #[error("{0}")]
    Connection(#[from] ConnectionError),
    /// A connection was closed at once: the limit is reached.
    #[error("an NBD client was turned away: {0} are connected, which is the limit")]
    Full(usize),
    /// A record that must precede replies cannot be written; the write is repeated.
    #[error("cannot write {}: {error}; requests wait until it can be written", path.display())]
    NotNoted {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The system could not accept a connection.
    #[error("cannot take a connection of an NBD client: {0}; it may try again")]
    System(io::Error),
}

/// A reason why a server was not started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Two exports have the same name.
    #[error("two disks would be shown under one name")]
    SameName,
    /// The system refused.
    #[error("cannot serve disks: {0}")]
    Io(#[from] io::Error),
}

type Notify = dyn Fn(Notice) + Send + Sync;

/// A running server. When it is dropped, it stops without waiting: then a pending request may still
/// be carried out after its client has repeated it at the next server.
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    /// Closed to end the acceptor.
    wake: Option<UnixStream>,
}

struct Shared {
    offers: Vec<Offer>,
    disks: Vec<Arc<dyn Disk>>,
    limits: Limits,
    notify: Box<Notify>,
    connections: Mutex<Connections>,
    one_ended: Condvar,
}

#[derive(Default)]
struct Connections {
    stopping: bool,
    next: u64,
    open: BTreeMap<u64, Arc<UnixStream>>,
}

impl Server {
    /// Starts to answer on a socket, whose path and access rights stay with the caller. Notices
    /// come from the server's threads: the callback must not take long.
    pub fn start(
        listener: UnixListener,
        exports: Vec<Export>,
        limits: Limits,
        notify: impl Fn(Notice) + Send + Sync + 'static,
    ) -> Result<Self, ServerError> {
        let mut offers: Vec<Offer> = Vec::new();
        for Export { name, disk } in &exports {
            if offers.iter().any(|offer| offer.name == *name) {
                return Err(ServerError::SameName);
            }
            offers.push(Offer {
                name: name.clone(),
                size_bytes: disk.size_bytes(),
            });
        }
        // A client that disconnects between `poll` and `accept` must not block the acceptor.
        listener.set_nonblocking(true)?;
        let (wake, woken) = UnixStream::pair()?;
        let shared = Arc::new(Shared {
            offers,
            disks: exports.into_iter().map(|export| export.disk).collect(),
            limits,
            notify: Box::new(notify),
            connections: Mutex::default(),
            one_ended: Condvar::new(),
        });
        let accepting = shared.clone();
        let acceptor = thread::Builder::new()
            .name("nbd-accept".to_owned())
            .spawn(move || accept(&accepting, &listener, &woken))?;
        Ok(Self {
            shared,
            acceptor: Some(acceptor),
            wake: Some(wake),
        })
    }

    /// Stops: no client is accepted any more, received requests are answered, connections are
    /// closed. After the given time, the remaining connections are cut; the number of those that do
    /// not end even then is returned: their disk does not answer. Only when that number is 0 may
    /// another server export the same disks: a client repeats unanswered requests there, and the
    /// first attempt must not overtake the repetition.
    pub fn stop(mut self, within: Duration) -> usize {
        self.close(Shutdown::Read);
        let left = self.shared.wait_until_none(within);
        if left == 0 {
            return 0;
        }
        // They wait for clients that do not read their replies.
        self.close(Shutdown::Both);
        self.shared.wait_until_none(CUT_PATIENCE)
    }

    /// Returns the number of connected clients.
    pub fn connections(&self) -> usize {
        self.shared.lock().open.len()
    }

    fn close(&mut self, how: Shutdown) {
        self.wake = None;
        if let Some(acceptor) = self.acceptor.take() {
            // It ends as soon as it is woken; a panic of the thread is not passed on.
            let _ = acceptor.join();
        }
        let mut connections = self.shared.lock();
        connections.stopping = true;
        for stream in connections.open.values() {
            // A closed connection needs no closing.
            let _ = stream.shutdown(how);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close(Shutdown::Both);
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener, woken: &UnixStream) {
    let mut timeout = PollTimeout::NONE;
    loop {
        let mut ready = [
            PollFd::new(woken.as_fd(), PollFlags::POLLIN),
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        ];
        // After an error of the system only the wake-up is polled, until the next attempt.
        let asked = if timeout == PollTimeout::NONE { 2 } else { 1 };
        match poll(&mut ready[..asked], timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return (shared.notify)(Notice::System(error.into())),
        }
        if ready[0].any().unwrap_or(true) {
            return;
        }
        timeout = PollTimeout::NONE;
        match listener.accept() {
            Ok((stream, _)) => shared.begin(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                (shared.notify)(Notice::System(error));
                timeout = PollTimeout::from(ACCEPT_AGAIN);
            }
        }
    }
}

/// A connection's place among the open ones.
struct Place {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Place {
    /// Releases it, even when the connection's thread panics.
    fn drop(&mut self) {
        self.shared.lock().open.remove(&self.number);
        self.shared.one_ended.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        // No operation under the lock leaves the state half changed.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until_none(&self, within: Duration) -> usize {
        let open = self.lock();
        let waited = self
            .one_ended
            .wait_timeout_while(open, within, |connections| !connections.open.is_empty());
        let (connections, _) = waited.unwrap_or_else(PoisonError::into_inner);
        connections.open.len()
    }

    fn begin(self: &Arc<Self>, stream: UnixStream) {
        let stream = Arc::new(stream);
        let mut connections = self.lock();
        if connections.stopping {
            return;
        }
        let count = connections.open.len();
        if count >= self.limits.connections {
            drop(connections);
            return (self.notify)(Notice::Full(count));
        }
        let number = connections.next;
        connections.next += 1;
        connections.open.insert(number, stream.clone());
        drop(connections);
        let place = Place {
            shared: self.clone(),
            number,
        };
        let spawned = thread::Builder::new()
            .name(format!("nbd-{number}"))
            .spawn(move || {
                if let Err(error) = place.shared.serve(&stream) {
                    (place.shared.notify)(Notice::Connection(error));
                }
                // The client sees the end of its connection before its place is free.
                let _ = stream.shutdown(Shutdown::Both);
            });
        if let Err(error) = spawned {
            (self.notify)(Notice::System(error));
        }
    }

    fn serve(&self, stream: &Arc<UnixStream>) -> Result<(), ConnectionError> {
        let until = Instant::now().checked_add(self.limits.handshake);
        stream.set_write_timeout(Some(self.limits.handshake))?;
        let mut reader = BufReader::with_capacity(READ_BYTES, Socket { stream, until });
        let mut writer = &**stream;
        let Some(session) = negotiate(&mut reader, &mut writer, &self.offers)? else {
            return Ok(());
        };
        // A guest may be silent, or stopped, for any time.
        reader.get_mut().until = None;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(None)?;
        let report = |failure| {
            let export = session.export;
            (self.notify)(Notice::Disk { export, failure });
        };
        let disk = &*self.disks[session.export];
        let closing = stream.clone();
        let hang_up = HangUp {
            after: QUIET,
            // A closed connection needs no closing.
            close: Box::new(move || drop(closing.shutdown(Shutdown::Both))),
        };
        transmit(&mut reader, &mut writer, disk, session, &report, hang_up)
    }
}

/// A socket that is read until a deadline.
struct Socket<'a> {
    stream: &'a UnixStream,
    until: Option<Instant>,
}

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(until) = self.until {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
        }
        match self.stream.read(buffer) {
            Err(error) if self.until.is_some() && error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::ErrorKind::TimedOut.into())
            }
            other => other,
        }
    }
}
