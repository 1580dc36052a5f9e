//! One connection to a daemon of libvirt.
//!
//! A migration's job belongs to the connection that began it: when the connection ends, so does the
//! job, and the daemon puts things back. So nothing here connects again by itself.

use crate::message::{Header, Kind, Message, QEMU, REMOTE, Status};
use crate::xdr::{Reader, Writer, XdrError};
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use std::collections::HashMap;
use std::io::{self, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread;
use std::time::Duration;

/// The sockets of the daemons that have QEMU's guests: that of the modular one first, since the
/// other may only pass calls on.
pub const SOCKETS: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];
/// The time limit of a call, where the caller has no reason for another.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The guests of the system.
const URI: &str = "qemu:///system";
/// The number of calls that may wait for their answer.
const PENDING_MAX: usize = 256;
/// The number of events that may wait for who listens.
const EVENTS_MAX: usize = 1024;

/// A procedure of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Procedure {
    pub(crate) program: u32,
    pub(crate) number: i32,
    /// Its name in libvirt's protocol, without the prefix.
    pub(crate) name: &'static str,
}

impl Procedure {
    /// One of the program `remote`.
    pub(crate) const fn remote(number: i32, name: &'static str) -> Self {
        Self {
            program: REMOTE,
            number,
            name,
        }
    }

    /// One of the program `qemu`.
    pub(crate) const fn qemu(number: i32, name: &'static str) -> Self {
        Self {
            program: QEMU,
            number,
            name,
        }
    }
}

const CONNECT_OPEN: Procedure = Procedure::remote(1, "CONNECT_OPEN");
const AUTH_LIST: Procedure = Procedure::remote(66, "AUTH_LIST");
const AUTH_POLKIT: Procedure = Procedure::remote(70, "AUTH_POLKIT");
const CONNECT_GET_LIB_VERSION: Procedure = Procedure::remote(157, "CONNECT_GET_LIB_VERSION");

/// No authentication.
const AUTH_NONE: u32 = 0;
/// Authentication by the account of the process.
const AUTH_BY_POLKIT: u32 = 2;

/// A refusal by libvirt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("libvirt refuses {procedure}: {message}")]
pub struct Refusal {
    /// The procedure.
    pub procedure: &'static str,
    /// libvirt's number of the error (`virErrorNumber`).
    pub code: i32,
    /// libvirt's text.
    pub message: String,
}

impl Refusal {
    /// There is no such domain (`VIR_ERR_NO_DOMAIN`).
    const NO_DOMAIN: i32 = 42;
    /// A migration was cancelled, as asked (`VIR_ERR_MIGRATE_FINISH_OK`).
    const CANCELLED: i32 = 93;

    /// Returns whether the domain is not there.
    pub fn is_no_domain(&self) -> bool {
        self.code == Self::NO_DOMAIN
    }

    /// Returns whether the refusal only says that the migration was cancelled, as asked.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.code == Self::CANCELLED
    }
}

/// Why a call has no result.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LibvirtError {
    /// No daemon listens.
    #[error("cannot reach libvirt on {}: {why}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// The daemon wants an authentication that is not offered here.
    #[error(
        "libvirt on {} wants an authentication of type {types:?}: run the agent as root, or set \
         auth_unix_rw = \"none\" in libvirt's configuration",
        path.display()
    )]
    Authentication {
        /// The socket.
        path: PathBuf,
        /// The types that the daemon offers.
        types: Vec<u32>,
    },
    /// The connection has ended. Of a call that was sent it is not known what became of it.
    #[error("the connection to libvirt on {} ended: {why}", path.display())]
    Closed {
        /// The socket.
        path: PathBuf,
        /// Why it ended.
        why: String,
        /// Whether the whole call had been sent.
        sent: bool,
    },
    /// No answer arrived in time, so it is not known what became of the call.
    #[error("libvirt did not answer {procedure} within {} s", waited.as_secs())]
    Timeout {
        /// The procedure.
        procedure: &'static str,
        /// The time waited.
        waited: Duration,
    },
    /// libvirt refuses.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// What the agent notes about a domain cannot be read or written.
    #[error("the agent's note about the domain: {0}")]
    Note(String),
    /// An answer is not understood.
    #[error("libvirt's answer to {procedure} is not understood: {why}")]
    Answer {
        /// The procedure.
        procedure: &'static str,
        /// What is wrong with it.
        why: XdrError,
    },
}

impl LibvirtError {
    pub(crate) fn note(error: io::Error) -> Self {
        Self::Note(error.to_string())
    }

    /// Returns whether libvirt says that the domain is not there.
    pub fn is_no_domain(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.is_no_domain())
    }

    /// Returns whether the daemon cannot have carried out the call, since it has not received it.
    pub fn was_not_sent(&self) -> bool {
        matches!(self, Self::Closed { sent: false, .. })
    }
}

/// A connection; clones share it, and it ends with the last of them.
#[derive(Debug, Clone)]
pub struct Connection(Arc<Handle>);

/// A connection as long as others keep it.
#[derive(Debug, Clone)]
pub(crate) struct WeakConnection(Weak<Handle>);

impl WeakConnection {
    /// Returns the connection, if it is still kept.
    pub(crate) fn upgrade(&self) -> Option<Connection> {
        self.0.upgrade().map(Connection)
    }
}

#[derive(Debug)]
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        // It has ended already, or ends now; so does the thread that reads.
        let _ = self.0.socket.shutdown(Shutdown::Both);
    }
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    socket: UnixStream,
    /// Held while a frame is written.
    writing: Mutex<()>,
    serial: AtomicU32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<u32, mpsc::SyncSender<Message>>,
    listener: Option<tokio::sync::mpsc::Sender<Message>>,
    /// Why it has ended.
    ended: Option<String>,
}

impl Connection {
    /// Connects to the daemon that has QEMU's guests; `None` where there is none.
    ///
    /// # Errors
    /// When a daemon is there and cannot be used.
    pub fn find() -> Result<Option<Self>, LibvirtError> {
        let there = SOCKETS.iter().map(Path::new).filter(|path| path.exists());
        let mut first = None;
        for path in there {
            match Self::open(path) {
                Ok(connection) => return Ok(Some(connection)),
                Err(error) => first = first.or(Some(error)),
            }
        }
        first.map_or(Ok(None), Err)
    }

    /// Connects to the daemon at a socket, and to the guests of the system.
    ///
    /// # Errors
    /// When nothing listens, or the account may not use it.
    pub fn open(path: &Path) -> Result<Self, LibvirtError> {
        let failed = |error: io::Error| LibvirtError::Connect {
            path: path.to_owned(),
            why: error.to_string(),
        };
        let socket = UnixStream::connect(path).map_err(failed)?;
        socket
            .set_write_timeout(Some(CALL_TIMEOUT))
            .map_err(failed)?;
        let reading = socket.try_clone().map_err(failed)?;
        let shared = Arc::new(Shared {
            path: path.to_owned(),
            socket,
            writing: Mutex::default(),
            serial: AtomicU32::new(1),
            state: Mutex::default(),
        });
        let connection = Self(Arc::new(Handle(Arc::clone(&shared))));
        let reader = thread::Builder::new().name("libvirt".to_owned());
        reader
            .spawn(move || shared.read_all(reading))
            .map_err(failed)?;
        connection.authenticate()?;
        let mut arguments = Writer::default();
        arguments.optional_text(Some(URI)).u32(0);
        connection.run(CONNECT_OPEN, arguments)?;
        Ok(connection)
    }

    fn authenticate(&self) -> Result<(), LibvirtError> {
        let types = self.ask(AUTH_LIST, Writer::default(), |it| it.array(|it| it.u32()))?;
        if types.is_empty() || types.contains(&AUTH_NONE) {
            return Ok(());
        }
        if types.contains(&AUTH_BY_POLKIT) {
            return self.ask(AUTH_POLKIT, Writer::default(), |it| it.u32().map(drop));
        }
        Err(LibvirtError::Authentication {
            path: self.path().to_owned(),
            types,
        })
    }

    pub(crate) fn downgrade(&self) -> WeakConnection {
        WeakConnection(Arc::downgrade(&self.0))
    }

    /// Returns the socket.
    pub fn path(&self) -> &Path {
        &self.0.0.path
    }

    /// Returns the process that listens; `None` where it is not visible from here. Where another
    /// has started to listen for the daemon, that one.
    pub(crate) fn peer(&self) -> Option<i32> {
        let peer = getsockopt(&self.0.0.socket, PeerCredentials).ok()?;
        Some(peer.pid()).filter(|pid| *pid > 0)
    }

    /// Returns whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.0.0.state().ended.is_some()
    }

    /// Returns the daemon's version: major, minor, and release.
    ///
    /// # Errors
    /// When it does not say.
    pub fn version(&self) -> Result<[u64; 3], LibvirtError> {
        let version = self.ask(CONNECT_GET_LIB_VERSION, Writer::default(), |it| it.u64())?;
        Ok([version / 1_000_000, version / 1000 % 1000, version % 1000])
    }

    /// Returns all events from now on. They belong to who asked last. Those that are not taken in
    /// time are dropped.
    pub(crate) fn events(&self) -> tokio::sync::mpsc::Receiver<Message> {
        let (sender, receiver) = tokio::sync::mpsc::channel(EVENTS_MAX);
        self.0.0.state().listener = Some(sender);
        receiver
    }

    /// Calls a procedure that has no result.
    pub(crate) fn run(&self, procedure: Procedure, arguments: Writer) -> Result<(), LibvirtError> {
        self.ask(procedure, arguments, |_| Ok(()))
    }

    /// Calls a procedure, and reads its result.
    pub(crate) fn ask<T>(
        &self,
        procedure: Procedure,
        arguments: Writer,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T, XdrError>,
    ) -> Result<T, LibvirtError> {
        self.ask_within(procedure, arguments, CALL_TIMEOUT, read)
    }

    /// As [`Self::ask`], with a time limit of its own.
    pub(crate) fn ask_within<T>(
        &self,
        procedure: Procedure,
        arguments: Writer,
        within: Duration,
        read: impl FnOnce(&mut Reader<'_>) -> Result<T, XdrError>,
    ) -> Result<T, LibvirtError> {
        let reply = self.0.0.call(procedure, arguments, within)?;
        let not_understood = |why| LibvirtError::Answer {
            procedure: procedure.name,
            why,
        };
        let mut reader = Reader::new(&reply.payload);
        if reply.header.status != Status::Ok {
            let refusal = refusal(&mut reader, procedure).map_err(not_understood)?;
            return Err(refusal.into());
        }
        let value = read(&mut reader).map_err(not_understood)?;
        reader.end().map_err(not_understood)?;
        Ok(value)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // The state is consistent whenever the lock is free.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed(&self, sent: bool) -> LibvirtError {
        let why = self.state().ended.clone();
        LibvirtError::Closed {
            path: self.path.clone(),
            why: why.unwrap_or_else(|| "it was closed here".to_owned()),
            sent,
        }
    }

    fn call(
        &self,
        procedure: Procedure,
        arguments: Writer,
        within: Duration,
    ) -> Result<Message, LibvirtError> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::sync_channel(1);
        {
            let mut state = self.state();
            if state.ended.is_some() {
                drop(state);
                return Err(self.closed(false));
            }
            if state.pending.len() >= PENDING_MAX {
                return Err(LibvirtError::Refused(Refusal {
                    procedure: procedure.name,
                    code: 0,
                    message: format!("{PENDING_MAX} calls wait for it already"),
                }));
            }
            state.pending.insert(serial, sender);
        }
        let message = Message {
            header: Header {
                program: procedure.program,
                procedure: procedure.number,
                kind: Kind::Call,
                serial,
                status: Status::Ok,
            },
            payload: arguments.into_bytes(),
        };
        if let Err(error) = self.send(&message) {
            // A part of a frame may have been written, so nothing can follow it.
            self.end(&error.to_string());
            return Err(self.closed(false));
        }
        let received = receiver.recv_timeout(within);
        self.state().pending.remove(&serial);
        received.map_err(|error| match error {
            mpsc::RecvTimeoutError::Disconnected => self.closed(true),
            mpsc::RecvTimeoutError::Timeout => LibvirtError::Timeout {
                procedure: procedure.name,
                waited: within,
            },
        })
    }

    fn send(&self, message: &Message) -> io::Result<()> {
        let writing = self.writing.lock();
        let _writing = writing.unwrap_or_else(PoisonError::into_inner);
        (&self.socket).write_all(&message.frame())
    }

    fn read_all(&self, socket: UnixStream) {
        let mut input = BufReader::new(socket);
        let why = loop {
            match Message::read(&mut input) {
                Ok(Some(message)) => self.take(message),
                Ok(None) => break "it was closed by the daemon".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        self.end(&why);
    }

    fn end(&self, why: &str) {
        let mut state = self.state();
        if state.ended.is_none() {
            tracing::debug!(path = %self.path.display(), why, "the connection to libvirt ended");
            state.ended = Some(why.to_owned());
        }
        // Calls that wait end with their channels.
        state.pending.clear();
        state.listener = None;
        drop(state);
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn take(&self, message: Message) {
        let state = self.state();
        let serial = message.header.serial;
        // An answer after its time limit is dropped, and so is what nobody listens to.
        let taken = match message.header.kind {
            Kind::Reply => match state.pending.get(&serial) {
                Some(waits) => waits.try_send(message).is_ok(),
                None => false,
            },
            Kind::Event => match &state.listener {
                Some(listener) => listener.try_send(message).is_ok(),
                None => true,
            },
            _ => false,
        };
        if !taken {
            tracing::debug!(serial, "a message of libvirt was dropped");
        }
    }
}

/// Reads an error (`virNetMessageError`).
fn refusal(reader: &mut Reader<'_>, procedure: Procedure) -> Result<Refusal, XdrError> {
    let code = reader.i32()?;
    let _domain = reader.i32()?;
    let message = reader
        .optional(Reader::text)?
        .unwrap_or("it does not say why");
    let message = message.to_owned();
    let _level = reader.i32()?;
    reader.optional(|it| {
        it.text()?;
        it.fixed::<16>()?;
        it.i32()
    })?;
    for _ in 0..3 {
        reader.optional(Reader::text)?;
    }
    let _numbers = [reader.i32()?, reader.i32()?];
    reader.optional(|it| {
        it.text()?;
        it.fixed::<16>()
    })?;
    Ok(Refusal {
        procedure: procedure.name,
        code,
        message,
    })
}
