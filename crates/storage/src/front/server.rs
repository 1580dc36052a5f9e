//! A supervised server's own side: it beats, takes the turn, and answers on the socket that it was
//! given, until it is killed.

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

/// Time for a server from before, which is dead or being killed, to end.
const TURN_PATIENCE: Duration = Duration::from_secs(10);
/// How often a server looks whether it is of use to anybody.
const LOOK: Duration = Duration::from_millis(500);
/// After so long without a supervisor and without clients, a server ends.
const LINGER: Duration = Duration::from_secs(60);

/// Why a server does not answer.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It was not started as a supervisor starts it.
    #[error(
        "this is for a supervisor to start, with a listening socket as its standard input: {0}"
    )]
    NotStarted(io::Error),
    /// Another server answers.
    #[error("another server answers for this disk: {0}")]
    Turn(#[from] TurnError),
    /// What it is to show is not known.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The image cannot be shown.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// What is to be shown is not a file alone, and cannot be shown.
    #[error("{0}")]
    Disk(Box<dyn std::error::Error + Send + Sync>),
    /// The server cannot be started.
    #[error(transparent)]
    Server(#[from] ServerError),
}

/// Answers, in a process that a supervisor has started, until it is killed. Returns when it has
/// been without a supervisor and without clients for a minute.
///
/// The disk is opened when nobody else uses it. To open it may take its time: only what is done in
/// requests counts as hanging.
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
    // With the turn taken, and only then, the answer is good: the supervisor that is next looks for
    // whoever has the turn when this one's is dead.
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

/// The dumb server: it shows the image's file as it is, and nothing else.
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
