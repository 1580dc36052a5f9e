//! Controls the destination QEMU's migration: sends the prelude at the start and the devices at the
//! end.
//!
//! ```text
//! start(prelude) -> WAITS (RAM may be written from outside) -- finish(tail) --> LOADED (paused)
//!
//! start_for_postcopy(prelude) -> WAITS -- load_without(missing) --> an `Arriving`, then LOADED
//! ```

use super::arriving::{Arriving, Missing, PageServer};
use super::pages::Pages;
use super::source::{SourceError, run_state, set_capabilities};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use longhaul_qemu_stream::return_path::{self, Message, ReturnPathError};
use longhaul_qemu_stream::{Event, Limits, ParseError, Parser, Prelude, Writer, device_sections};
use serde_json::json;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The time limit for QEMU to listen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for QEMU to load the devices.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// QEMU's capability for guests that run before all of their RAM has arrived.
pub(super) const POSTCOPY: &str = "postcopy-ram";
pub(super) const POLL: Duration = Duration::from_millis(2);
/// The maximum length of a bitmap from QEMU: none is expected without a pause of post-copy.
const BITMAP_BYTES_MAX: u64 = 0;
/// Our own ping: when QEMU answers it has emptied its RAM.
const PING_EMPTY: u32 = 0x4c48_0001;

/// A QEMU that waits for a guest.
#[derive(Debug)]
pub struct Incoming {
    qmp: Qmp,
    socket: UnixStream,
    parser: Parser,
    back: return_path::Parser,
    prelude: Prelude,
}

/// A guest that is loaded and paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// The process that holds QEMU's socket failed, or has ended.
    #[error("the page server of the destination's QEMU is gone: {0}")]
    PageServer(io::Error),
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
        // QEMU 10.0 activates disks late by itself, and accepts the name.
        let late = std::iter::once(("late-block-activate", true));
        let mut incoming = Self::open(qmp, path, prelude, late).await?;
        incoming.send(path, prelude).await?;
        Ok(incoming)
    }

    /// As [`Self::start`], for a QEMU that another program has set up and that listens at `path`
    /// already.
    pub async fn start_at_listening(
        qmp: &Qmp,
        path: &Path,
        prelude: &[u8],
    ) -> Result<Self, IncomingError> {
        let mut incoming = Self::at(qmp, path, parse(prelude)?).await?;
        incoming.send(path, prelude).await?;
        Ok(incoming)
    }

    /// Checks whether a QEMU that was started with `-incoming` can run its guest before all of its
    /// RAM has arrived, which needs userfaultfd.
    pub async fn can_run_early(qmp: &Qmp) -> Result<(), SourceError> {
        set_capabilities(qmp, std::iter::once((POSTCOPY, true))).await
    }

    /// As [`Self::start`], for a guest that may run before all of its RAM has arrived
    /// ([`Self::load_without`]). All of it must have pages of 4 KiB. QEMU refuses where it cannot
    /// use userfaultfd.
    pub async fn start_for_postcopy(
        qmp: &Qmp,
        path: &Path,
        prelude: &[u8],
    ) -> Result<Self, IncomingError> {
        let both = [("late-block-activate", true), (POSTCOPY, true)];
        let incoming = Self::open(qmp, path, prelude, both.into_iter()).await?;
        incoming.empty(path, prelude).await
    }

    /// As [`Self::start_for_postcopy`], for a QEMU that another program has set up and that listens
    /// at `path` already.
    pub async fn start_for_postcopy_at_listening(
        qmp: &Qmp,
        path: &Path,
        prelude: &[u8],
    ) -> Result<Self, IncomingError> {
        let parsed = parse(prelude)?;
        set_capabilities(qmp, std::iter::once((POSTCOPY, true))).await?;
        let incoming = Self::at(qmp, path, parsed).await?;
        incoming.empty(path, prelude).await
    }

    /// Sends the prelude of a post-copy, and waits until QEMU has emptied its RAM.
    async fn empty(mut self, path: &Path, prelude: &[u8]) -> Result<Self, IncomingError> {
        let (commands, section) = prelude.split_at(self.prelude.commands);
        let mut begin = commands.to_vec();
        Writer::postcopy_advise(&mut begin);
        begin.extend(section);
        Writer::new(&self.prelude).ping(PING_EMPTY, &mut begin);
        self.send(path, &begin).await?;
        let emptied = tokio::time::timeout(LOAD_TIMEOUT, self.wait_for_pong(PING_EMPTY)).await;
        match emptied {
            Ok(Ok(())) => Ok(self),
            Ok(Err(error)) => Err(reason(&self.qmp, error).await),
            Err(_) => Err(reason(&self.qmp, IncomingError::Timeout(LOAD_TIMEOUT)).await),
        }
    }

    async fn open(
        qmp: &Qmp,
        path: &Path,
        prelude: &[u8],
        capabilities: impl Iterator<Item = (&str, bool)>,
    ) -> Result<Self, IncomingError> {
        let parsed = parse(prelude)?;
        set_capabilities(qmp, capabilities).await?;
        let uri = format!("unix:{}", path.display());
        listen(qmp, &uri).await?;
        Self::at(qmp, path, parsed).await
    }

    async fn at(
        qmp: &Qmp,
        path: &Path,
        (parser, prelude): (Parser, Prelude),
    ) -> Result<Self, IncomingError> {
        Ok(Self {
            qmp: qmp.clone(),
            socket: connect(path).await?,
            parser,
            back: return_path::Parser::new(BITMAP_BYTES_MAX),
            prelude,
        })
    }

    async fn send(&mut self, path: &Path, bytes: &[u8]) -> Result<(), IncomingError> {
        let sent = self.socket.write_all(bytes).await;
        sent.map_err(|error| unreachable_at(path, &error))
    }

    /// Reads QEMU's answers up to that to a ping.
    async fn wait_for_pong(&mut self, ping: u32) -> Result<(), IncomingError> {
        let mut buffer = [0; 4096];
        loop {
            let length = self.socket.read(&mut buffer).await.unwrap_or(0);
            let mut input = buffer.get(..length).unwrap_or_default();
            if input.is_empty() {
                return Err(IncomingError::Ended);
            }
            while let Some(message) = self.back.next(&mut input)? {
                match message {
                    Message::Pong(value) if value == ping => return Ok(()),
                    Message::Shut(_) => {
                        return Err(IncomingError::Refused("it does not say why".to_owned()));
                    }
                    _ => {}
                }
            }
        }
    }

    /// Returns the head of the stream.
    pub fn prelude(&self) -> &Prelude {
        &self.prelude
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
            Ok(Err(error)) => return Err(reason(&self.qmp, error).await),
            Err(_) => return Err(reason(&self.qmp, IncomingError::Timeout(LOAD_TIMEOUT)).await),
        }
        loop {
            if is_loaded(&self.qmp, start).await? {
                return Ok(Loaded {
                    load_time: start.elapsed(),
                });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Lets QEMU load the tail without these pages, which are none of kept blocks: they arrive when
    /// the guest may run already. Every other block of RAM must be written before, or is zero.
    /// QEMU's socket goes to the page server.
    ///
    /// There must be a missing page: QEMU does not load a guest by post-copy without any. Devices
    /// may wait for pages while they are loaded, so the caller serves requests from now on.
    pub async fn load_without(
        mut self,
        mut server: PageServer,
        tail: &[u8],
        missing: &[Missing],
    ) -> Result<Arriving, IncomingError> {
        if missing.iter().all(|missing| missing.pages.is_empty()) {
            return Err(IncomingError::Content("no page of it is missing"));
        }
        let (kept, devices) = self.parts(tail)?;
        let mut out = kept.to_vec();
        let writer = Writer::new(&self.prelude);
        for missing in missing {
            if !writer.postcopy_discard(missing.block, &missing.pages, &mut out) {
                return Err(IncomingError::Content("it has no such pages of RAM"));
            }
        }
        Writer::postcopy_package(devices, &mut out);
        let start = Instant::now();
        let pages = Pages::without(&self.prelude, missing);
        let socket = self.socket.as_fd().try_clone_to_owned();
        let socket = socket.map_err(IncomingError::PageServer)?;
        let head = self.prelude.bytes.as_slice();
        // QEMU may wait for a page as soon as it has read all of this, and not before.
        let (written, served) = tokio::join!(
            self.socket.write_all(&out),
            server.serve(socket.as_fd(), head, &pages, false)
        );
        if written.is_err() {
            return Err(reason(&self.qmp, IncomingError::Ended).await);
        }
        served?;
        Ok(Arriving::new(server, pages).loading(self.qmp, start))
    }

    /// Returns the sections with kept blocks, and those of the devices, of a tail.
    fn parts<'a>(&mut self, tail: &'a [u8]) -> Result<(&'a [u8], &'a [u8]), IncomingError> {
        /// The mark and the id of a section.
        const SECTION_HEAD: usize = 5;
        let mut input = tail;
        let (mut last, mut devices) = (None, None);
        while let Some(event) = self.parser.next(&mut input)? {
            let at = tail.len() - input.len();
            match event {
                Event::SectionStart { last: true } => last = Some(at - SECTION_HEAD),
                Event::SectionEnd => devices = tail.get(at..),
                _ => {}
            }
        }
        let kept = last.and_then(|last| tail.get(..last));
        match (kept, devices.and_then(device_sections)) {
            (Some(kept), Some(devices)) if input.is_empty() => Ok((kept, devices)),
            _ => Err(IncomingError::Content("it does not end with the devices")),
        }
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
}

/// Reads the head of a stream, up to and including its list of RAM blocks.
fn parse(prelude: &[u8]) -> Result<(Parser, Prelude), IncomingError> {
    let mut parser = Parser::new(Limits::default());
    let mut input = prelude;
    match parser.next(&mut input)? {
        Some(Event::Prelude(parsed)) if input.is_empty() => Ok((parser, parsed)),
        _ => Err(IncomingError::Content(
            "it does not begin with a list of RAM blocks",
        )),
    }
}

/// Returns the head of a stream, up to and including its list of RAM blocks.
pub fn read_prelude(prelude: &[u8]) -> Result<Prelude, IncomingError> {
    Ok(parse(prelude)?.1)
}

/// Returns whether QEMU has loaded the guest: it is paused, or as it was at the source.
pub(super) async fn is_loaded(qmp: &Qmp, start: Instant) -> Result<bool, IncomingError> {
    let state = run_state(qmp).await?;
    match state.as_str() {
        // It was stopped at the source with an I/O error, and has the same state here.
        "paused" | "prelaunch" | "io-error" => Ok(true),
        "inmigrate" if start.elapsed() < LOAD_TIMEOUT => Ok(false),
        _ => Err(reason(qmp, IncomingError::State(state)).await),
    }
}

/// Returns QEMU's own error message, where it has one.
pub(super) async fn reason(qmp: &Qmp, error: IncomingError) -> IncomingError {
    let status = qmp.query("query-migrate").await;
    let text = status.ok().and_then(|status| {
        let text = status["error-desc"].as_str()?;
        Some(text.to_owned())
    });
    text.map_or(error, IncomingError::Refused)
}

/// Connects with a QEMU that listens.
pub(super) async fn connect(path: &Path) -> Result<UnixStream, IncomingError> {
    let connecting = tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(path));
    let connected = match connecting.await {
        Ok(connected) => connected.map_err(|error| unreachable_at(path, &error)),
        Err(_) => Err(unreachable_at(path, &std::io::ErrorKind::TimedOut.into())),
    };
    // No other client may connect. An error means that the file is gone already.
    let _ = std::fs::remove_file(path);
    connected
}

fn unreachable_at(path: &Path, error: &std::io::Error) -> IncomingError {
    IncomingError::Socket {
        path: path.to_owned(),
        why: error.to_string(),
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
