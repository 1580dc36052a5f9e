//! The control protocol between an owner and a supervisor, which may have outlived the owner that
//! started it: one command and one answer per connection, as JSON.

use super::folder::FrontFolder;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longest command or answer, in bytes.
const MESSAGE_BYTES_MAX: u64 = 4096;
/// Time for an owner to send its command and to take the answer: everything else waits.
const OWNER_PATIENCE: Duration = Duration::from_millis(200);
/// Time for a supervisor to answer; stopping a server may have to wait for a slow disk.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Command {
    Status,
    TakeLocks,
    GiveLocks,
    Stop,
}

/// The state of a disk export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// The server that answers or is starting; `None` while the one before is ending.
    pub server_pid: Option<u32>,
    /// Servers that died or hung.
    pub failures: u64,
    /// Whether the fallback answers.
    pub fell_back: bool,
    /// Whether the image's locks are held.
    pub locked: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Done(Status),
    Failed(String),
}

/// A reason why a supervisor did not carry out a command.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No supervisor runs there, or it does not answer.
    #[error("the supervisor of a disk export does not answer: {0}")]
    Io(#[from] io::Error),
    /// The command failed.
    #[error("{0}")]
    Failed(String),
}

/// An owner's handle on a supervisor.
#[derive(Debug, Clone)]
pub struct Control(FrontFolder);

impl Control {
    /// Returns a handle on the supervisor of a folder.
    pub fn new(folder: FrontFolder) -> Self {
        Self(folder)
    }

    /// Returns its state.
    pub fn status(&self) -> Result<Status, ControlError> {
        self.ask(Command::Status)
    }

    /// Releases the image's locks, which QEMU checks when it is to open the file again.
    pub fn give_locks(&self) -> Result<Status, ControlError> {
        self.ask(Command::GiveLocks)
    }

    /// Takes the image's locks, beside those of the guest's own QEMU.
    pub fn take_locks(&self) -> Result<Status, ControlError> {
        self.ask(Command::TakeLocks)
    }

    /// Ends the supervisor and the server. When this has returned, neither touches the image any
    /// more.
    pub fn stop(&self) -> Result<Status, ControlError> {
        self.ask(Command::Stop)
    }

    fn ask(&self, command: Command) -> Result<Status, ControlError> {
        let mut stream = UnixStream::connect(self.0.control())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(&serde_json::to_vec(&command).map_err(io::Error::other)?)?;
        stream.shutdown(Shutdown::Write)?;
        let mut answer = Vec::new();
        stream.take(MESSAGE_BYTES_MAX).read_to_end(&mut answer)?;
        match serde_json::from_slice(&answer).map_err(io::Error::other)? {
            Answer::Done(status) => Ok(status),
            Answer::Failed(why) => Err(ControlError::Failed(why)),
        }
    }
}

/// An owner's command, to be answered.
pub(super) struct Asked {
    pub(super) command: Command,
    stream: UnixStream,
}

impl Asked {
    /// Reads it; an owner that does not send one in time is disconnected.
    pub(super) fn read(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(OWNER_PATIENCE))?;
        stream.set_write_timeout(Some(OWNER_PATIENCE))?;
        let mut text = Vec::new();
        (&stream).take(MESSAGE_BYTES_MAX).read_to_end(&mut text)?;
        let command = serde_json::from_slice(&text).map_err(io::Error::other)?;
        Ok(Self { command, stream })
    }

    pub(super) fn answer(mut self, answer: &Answer) -> io::Result<()> {
        let answer = serde_json::to_vec(answer).map_err(io::Error::other)?;
        self.stream.write_all(&answer)
    }
}
