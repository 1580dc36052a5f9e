//! Controls the destination QEMU's migration: sends the prelude at the start and the devices at the
//! end.
//!
//! ```text
//! start(prelude) -> WAITS (RAM may be written from outside) -- finish(tail) --> LOADED (paused)
//! ```

use super::source::{SourceError, run_state, set_capabilities};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_qemu_stream::return_path::{self, Message, ReturnPathError};
use longhaul_qemu_stream::{Event, Limits, ParseError, Parser};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The time limit for QEMU to listen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for QEMU to load the devices.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(2);
/// The maximum length of a bitmap from QEMU: none is expected before post-copy.
const BITMAP_BYTES_MAX: u64 = 0;

/// A QEMU that waits for a guest.
#[derive(Debug)]
pub struct Incoming {
    qmp: Qmp,
    socket: UnixStream,
    parser: Parser,
    back: return_path::Parser,
}

/// A guest that is loaded and paused.
#[derive(Debug, Clone, Copy)]
pub struct Loaded {
    /// Time from the tail's first byte to QEMU's report that everything is loaded.
    pub load_time: Duration,
}

/// Why a guest was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum IncomingError {
    /// QEMU did not answer, or refused.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's state or settings are unsuitable.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The source's stream is malformed.
    #[error("what the source sent is refused: {0}")]
    Stream(#[from] ParseError),
    /// The source's stream has content that is not allowed there.
    #[error("what the source sent is refused: {0}")]
    Content(&'static str),
    /// The socket failed.
    #[error("cannot talk to the destination's QEMU on {}: {why}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// QEMU refused the guest.
    #[error("QEMU cannot load this guest: {0}")]
    Refused(String),
    /// QEMU has ended.
    #[error("the destination's QEMU ended while it loaded the guest")]
    Ended,
    /// QEMU's answer is not understood.
    #[error(transparent)]
    ReturnPath(#[from] ReturnPathError),
    /// QEMU did not answer in time.
    #[error("the destination's QEMU has not loaded the guest within {} s", .0.as_secs())]
    Timeout(Duration),
    /// QEMU is not paused after loading.
    #[error("the destination's QEMU is `{0}` after loading, not paused")]
    State(String),
}

impl Incoming {
    /// Prepares a QEMU that was started with `-S -incoming defer`, lets it listen at `path` and
    /// sends it the prelude. QEMU's account must be able to create the socket.
    ///
    /// When this has returned the guest's RAM may be written from outside.
    pub async fn start(qmp: &Qmp, path: &Path, prelude: &[u8]) -> Result<Self, IncomingError> {
        let mut parser = Parser::new(Limits::default());
        let mut input = prelude;
        match parser.next(&mut input)? {
            Some(Event::Prelude(_)) if input.is_empty() => {}
            _ => {
                return Err(IncomingError::Content(
                    "it does not begin with a list of RAM blocks",
                ));
            }
        }
        // QEMU 10.0 activates disks late by itself, and accepts the name.
        let late = std::iter::once(("late-block-activate", true));
        set_capabilities(qmp, late).await?;
        let uri = format!("unix:{}", path.display());
        listen(qmp, &uri).await?;
        let failed = |error: std::io::Error| IncomingError::Socket {
            path: path.to_owned(),
            why: error.to_string(),
        };
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(path));
        let connected = match connecting.await {
            Ok(connected) => connected.map_err(failed),
            Err(_) => Err(failed(std::io::ErrorKind::TimedOut.into())),
        };
        // No other client may connect. An error means that the file is gone already.
        let _ = std::fs::remove_file(path);
        let mut socket = connected?;
        socket.write_all(prelude).await.map_err(failed)?;
        Ok(Self {
            qmp: qmp.clone(),
            socket,
            parser,
            back: return_path::Parser::new(BITMAP_BYTES_MAX),
        })
    }

    /// Sends QEMU the tail, and waits until it has loaded everything and is paused.
    ///
    /// Every block of RAM must be written before, and none may be written afterwards.
    pub async fn finish(mut self, tail: &[u8]) -> Result<Loaded, IncomingError> {
        self.check(tail)?;
        let start = Instant::now();
        let exchange = tokio::time::timeout(LOAD_TIMEOUT, self.exchange(tail)).await;
        match exchange {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(self.reason(error).await),
            Err(_) => return Err(self.reason(IncomingError::Timeout(LOAD_TIMEOUT)).await),
        }
        loop {
            let state = run_state(&self.qmp).await?;
            match state.as_str() {
                // It was stopped at the source with an I/O error, and has the same state here.
                "paused" | "prelaunch" | "io-error" => break,
                "inmigrate" if start.elapsed() < LOAD_TIMEOUT => tokio::time::sleep(POLL).await,
                _ => return Err(self.reason(IncomingError::State(state)).await),
            }
        }
        Ok(Loaded {
            load_time: start.elapsed(),
        })
    }

    /// Checks the whole tail before QEMU gets its first byte.
    fn check(&mut self, tail: &[u8]) -> Result<(), IncomingError> {
        let mut input = tail;
        let mut loads = false;
        while let Some(event) = self.parser.next(&mut input)? {
            loads |= matches!(event, Event::DeviceState(_));
        }
        if loads && input.is_empty() {
            return Ok(());
        }
        Err(IncomingError::Content("it does not end with the devices"))
    }

    /// Writes the tail and reads QEMU's answers until it reports that it has loaded.
    async fn exchange(&mut self, tail: &[u8]) -> Result<(), IncomingError> {
        let (mut reading, mut writing) = self.socket.split();
        let back = &mut self.back;
        let answered = async {
            let mut buffer = [0; 4096];
            loop {
                // A broken socket means QEMU's end or refusal; the caller finds out which.
                let length = reading.read(&mut buffer).await.unwrap_or(0);
                let mut input = buffer.get(..length).unwrap_or_default();
                if input.is_empty() {
                    return Err(IncomingError::Ended);
                }
                while let Some(message) = back.next(&mut input)? {
                    match message {
                        Message::Shut(0) => return Ok(()),
                        Message::Shut(_) => {
                            return Err(IncomingError::Refused("it does not say why".to_owned()));
                        }
                        _ => {}
                    }
                }
            }
        };
        let written = async {
            // If this fails, reading the answer fails as well.
            let _ = writing.write_all(tail).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            answered = answered => answered,
            () = written => Err(IncomingError::Ended),
        }
    }

    /// Returns QEMU's own error message, where it has one.
    async fn reason(&self, error: IncomingError) -> IncomingError {
        let status = self.qmp.query("query-migrate").await;
        let text = status.ok().and_then(|status| {
            let text = status["error-desc"].as_str()?;
            Some(text.to_owned())
        });
        text.map_or(error, IncomingError::Refused)
    }
}

/// Lets QEMU listen. A version that supports it stays alive when it cannot load the guest, and
/// reports why.
async fn listen(qmp: &Qmp, uri: &str) -> Result<(), IncomingError> {
    let arguments = json!({"uri": uri, "exit-on-error": false});
    match qmp
        .execute("migrate-incoming", arguments, COMMAND_TIMEOUT)
        .await
    {
        Err(QmpError::Refused { description, .. }) if description.contains("exit-on-error") => {}
        other => return other.map(drop).map_err(Into::into),
    }
    let arguments = json!({"uri": uri});
    qmp.execute("migrate-incoming", arguments, COMMAND_TIMEOUT)
        .await?;
    Ok(())
}
