//! The server's side of supervision: it sends heartbeats, takes the turn, and answers on the socket
//! that it was given, until it is killed.

use super::folder::{FolderError, FrontFolder};
use super::heart::Heart;
use super::turn::{Turn, TurnError};
use crate::disk::{OpenError, RawDisk};
use crate::nbd::{Export, Limits, Notice, Server, ServerError};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Time for an earlier server, which is dead or being killed, to end.
const TURN_PATIENCE: Duration = Duration::from_secs(10);
/// How often a server checks whether it is still in use.
const LOOK: Duration = Duration::from_millis(500);
/// The time without a supervisor and without clients after which a server ends.
const LINGER: Duration = Duration::from_secs(60);

/// A reason why a server does not answer.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It was not started by a supervisor.
    #[error(
        "this is for a supervisor to start, with a listening socket as its standard input: {0}"
    )]
    NotStarted(io::Error),
    /// Another server answers.
    #[error("another server answers for this disk: {0}")]
    Turn(#[from] TurnError),
    /// Its description cannot be read.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The image cannot be exported.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The disk consists of more than a file, and cannot be exported.
    #[error("{0}")]
    Disk(Box<dyn std::error::Error + Send + Sync>),
    /// The server cannot be started.
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// Answers, in a process that a supervisor has started, until it is killed. Returns after a minute
/// without a supervisor and without clients.
///
/// The disk is opened once no other process uses it. Opening may take long: only time in requests
/// counts as hanging.
pub fn serve(
    folder: &FrontFolder,
    open: impl FnOnce() -> Result<Export, ServeError>,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let given = ServeError::NotStarted as fn(_) -> _;
    let listener = UnixListener::from(io::stdin().as_fd().try_clone_to_owned().map_err(given)?);
    listener.local_addr().map_err(given)?;
    let beats = io::stdout().as_fd().try_clone_to_owned().map_err(given)?;
    let heart = Heart::start(beats).map_err(given)?;
    let _turn = Turn::take(&folder.turn(), TURN_PATIENCE)?;
    // The answer is reliable only with the turn taken: once this server's supervisor is dead, the
    // next one looks for the holder of the turn.
    if !heart.beat() {
        return Ok(());
    }
    let exports = vec![open()?];
    let server = Server::start(listener, exports, Limits::default(), notify)?;
    let mut of_use = Instant::now();
    while of_use.elapsed() < LINGER {
        thread::sleep(LOOK);
        if heart.is_heard() || server.connections() > 0 {
            of_use = Instant::now();
        }
    }
    Ok(())
}

/// The minimal server: it exports the image's file as it is, and does nothing else.
pub fn pass_through(
    folder: &FrontFolder,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let spec = folder.spec()?;
    let open = || {
        let disk = Arc::new(RawDisk::open(&spec.image, spec.size)?);
        let name = spec.name;
        Ok(Export { name, disk })
    };
    serve(folder, open, notify)
}
