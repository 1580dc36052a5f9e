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

/// What is read from a socket at once: small requests come several at a time.
const READ_BYTES: usize = 64 << 10;
/// Time until it is tried again, when the system cannot accept a connection.
const ACCEPT_AGAIN: u16 = 100;

/// Time for connections that are cut to end.
const CUT_PATIENCE: Duration = Duration::from_secs(5);

/// Time without a request or an answer, after which a connection is hung up whose client may keep an answer
/// back: longer than most waits for something from another host, and shorter than people notice.
const QUIET: Duration = Duration::from_secs(1);

/// A disk that is shown under a name.
#[derive(Debug, Clone)]
pub struct Export {
    /// Its name.
    pub name: ExportName,
    /// The disk.
    pub disk: Arc<dyn Disk>,
}

/// What clients may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections at a time. Each may hold one request of 32 MiB in memory.
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

/// Something that whoever runs the server may want to tell somebody. The server goes on.
#[derive(Debug, thiserror::Error)]
pub enum Notice {
    /// A disk could not do something; its client was told.
    #[error("disk {export}: {failure}")]
    Disk {
        /// Which of the exports.
        export: usize,
        /// What failed.
        failure: Failure,
    },
    /// A connection ended otherwise than by a goodbye.
    #[error("{0}")]
    Connection(#[from] ConnectionError),
    /// A connection was closed at once: there are as many as there may be.
    #[error("an NBD client was turned away: {0} are connected, which is the limit")]
    Full(usize),
    /// What has to be noted before clients are answered cannot be; it is tried again.
    #[error("cannot write {}: {error}; requests wait until it can be written", path.display())]
    NotNoted {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The system could not give us a connection.
    #[error("cannot take a connection of an NBD client: {0}; it may try again")]
    System(io::Error),
}

/// Why a server was not started.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Two exports have one name.
    #[error("two disks would be shown under one name")]
    SameName,
    /// The system refused.
    #[error("cannot serve disks: {0}")]
    Io(#[from] io::Error),
}

type Notify = dyn Fn(Notice) + Send + Sync;

/// A running server. Dropped, it stops, and waits for nobody: then a request that was under way may
/// still be done, after what its client said to the next server.
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
    /// Starts to answer on a socket, of which the caller keeps the path and the access rights.
    /// Notices come from the server's threads: taking one must not take long.
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
        // A client that goes away between `poll` and `accept` must not block the acceptor.
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

    /// Stops: nobody is let in any more, requests that came are answered, connections are closed.
    /// After the time given, connections are cut; the number of those that even then go on is
    /// returned: their disk does not answer. Only when that is none may another server show the
    /// same disks: a client repeats there what it had no answer to, and must not be overtaken by
    /// the first try.
    pub fn stop(mut self, within: Duration) -> usize {
        self.close(Shutdown::Read);
        let left = self.shared.wait_until_none(within);
        if left == 0 {
            return 0;
        }
        // They wait for clients that do not take their answers.
        self.close(Shutdown::Both);
        self.shared.wait_until_none(CUT_PATIENCE)
    }

    /// How many clients are connected.
    pub fn connections(&self) -> usize {
        self.shared.lock().open.len()
    }

    fn close(&mut self, how: Shutdown) {
        self.wake = None;
        if let Some(acceptor) = self.acceptor.take() {
            // It ends as soon as it is woken, and a panic of its is not passed on.
            let _ = acceptor.join();
        }
        let mut connections = self.shared.lock();
        connections.stopping = true;
        for stream in connections.open.values() {
            // One that is closed already needs no closing.
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
        // After an error of the system only the wake is waited for, until it is tried again.
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

/// A connection's place among those that are open.
struct Place {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Place {
    /// Gives it up, also when the connection's thread panics.
    fn drop(&mut self) {
        self.shared.lock().open.remove(&self.number);
        self.shared.one_ended.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Connections> {
        // Nothing is done under it that could leave it half changed.
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
        // A guest may be silent, or stopped, for as long as it likes.
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
            // One that is closed already needs no closing.
            close: Box::new(move || drop(closing.shutdown(Shutdown::Both))),
        };
        transmit(&mut reader, &mut writer, disk, session, &report, hang_up)
    }
}

/// A socket that is read until a moment.
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
