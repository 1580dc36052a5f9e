//! Hears of the guest's writes to a disk that moves, from whoever answers for it, and tells the
//! engine.

use crate::source::local_disks::LocalDisk;
use crate::source::sender::Sending;
use longhaul_engine::strategy::Before;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId};
use longhaul_storage::front::FrontFolder;
use longhaul_storage::front::telling::{MESSAGE_BYTES, ToOwner, ToServer};
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};

/// Time until everything must have been heard of a guest that stands still.
const CLOSE_WITHIN: Duration = Duration::from_secs(10);
/// How often it is looked whether somebody answers.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const BLOCK: u64 = BLOCK_SIZE as u64;

/// Why a disk's copy cannot be trusted.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum WatchError {
    /// The guest wrote while the agent was not told.
    #[error("the guest wrote to disk {0} while the agent did not hear of it")]
    Missed(String),
    /// Nobody says what was written.
    #[error("the front end of disk {0} does not answer")]
    Silent(String),
    /// What was written makes no sense.
    #[error("disk {disk}: {why}")]
    Broken {
        /// The disk.
        disk: String,
        /// What is wrong.
        why: String,
    },
}

/// Whoever waits for a write to be answered.
pub(crate) struct Reply {
    line: mpsc::UnboundedSender<ToServer>,
    id: u64,
}

impl Reply {
    /// The guest may hear of it.
    pub(crate) fn answer(self) {
        // A server that is gone has answered already, or its guest asks again.
        let _ = self.line.send(ToServer::Answered(self.id));
    }
}

/// A watch over one disk, until it is dropped.
pub(crate) struct Watch {
    shared: Arc<Shared>,
    listening: JoinHandle<()>,
}

struct Shared {
    disk: String,
    region: RegionId,
    blocks: u64,
    folder: FrontFolder,
    sending: Arc<Sending>,
    answers: bool,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Servers that are connected, or were and have not been heard to the end.
    lines: BTreeMap<u64, mpsc::UnboundedSender<ToServer>>,
    next: u64,
    marks: u64,
    /// The last mark that was reached, and by which of them.
    reached: Option<(u64, u64)>,
    broken: Option<String>,
}

impl Watch {
    /// Listens for servers, which must not have been started before.
    pub(crate) fn begin(
        disk: &LocalDisk,
        folder: &FrontFolder,
        sending: &Arc<Sending>,
    ) -> io::Result<Self> {
        let listener = UnixListener::bind(folder.owner())?;
        let shared = Arc::new(Shared {
            disk: disk.spec.name.clone(),
            region: disk.spec.id,
            blocks: disk.spec.blocks,
            folder: folder.clone(),
            sending: sending.clone(),
            answers: disk.strategy.before == Before::InStep,
            state: Mutex::default(),
            changed: Notify::new(),
        });
        let listening = tokio::spawn(listen(shared.clone(), listener));
        Ok(Self { shared, listening })
    }

    /// Whether the copy has missed something.
    pub(crate) fn check(&self) -> Result<(), WatchError> {
        let disk = self.shared.disk.clone();
        if self.shared.folder.fell_back() {
            return Err(WatchError::Missed(disk));
        }
        match self.shared.lock().broken.clone() {
            Some(why) => Err(WatchError::Broken { disk, why }),
            None => Ok(()),
        }
    }

    /// Waits until every write has been heard of that was answered before this was called: with a
    /// guest that stands still, and a QEMU that has let go of the disk, all there will ever be.
    pub(crate) async fn caught_up(&self) -> Result<(), WatchError> {
        let deadline = Instant::now() + CLOSE_WITHIN;
        loop {
            let changed = self.shared.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let asked = self.shared.ask();
            self.check()?;
            if let Some(asked) = asked
                && self.shared.reaches(asked, deadline).await
            {
                // Made before the first write that was not told: so there was none.
                return self.check();
            }
            if Instant::now() >= deadline {
                return Err(WatchError::Silent(self.shared.disk.clone()));
            }
            let _ = timeout(LOOK_EVERY, changed).await;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.listening.abort();
        // Their tasks end with their senders.
        self.shared.lock().lines.clear();
    }
}

async fn listen(shared: Arc<Shared>, listener: UnixListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let shared = shared.clone();
                tokio::spawn(async move { shared.hear(stream).await });
            }
            Err(error) => {
                tracing::warn!(disk = shared.disk, %error, "a front end cannot connect");
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the one server that is there to say when it has told everything.
    fn ask(&self) -> Option<(u64, u64)> {
        let mut state = self.lock();
        state.marks += 1;
        let mark = state.marks;
        // One from before may not have been heard to its end.
        let (number, line) = match state.lines.len() {
            1 => state.lines.first_key_value()?,
            _ => return None,
        };
        line.send(ToServer::Mark(mark)).ok()?;
        Some((*number, mark))
    }

    async fn reaches(&self, asked: (u64, u64), deadline: Instant) -> bool {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            {
                let state = self.lock();
                if state.reached == Some(asked) {
                    return state.lines.len() == 1;
                }
                if !state.lines.contains_key(&asked.0) {
                    return false;
                }
            }
            if timeout_at(deadline, changed).await.is_err() {
                return false;
            }
        }
    }

    async fn hear(&self, stream: UnixStream) {
        let (mut reader, writer) = stream.into_split();
        let (line, said) = mpsc::unbounded_channel();
        let begin = ToServer::Begin {
            answers: self.answers,
        };
        // The first in a channel that is open.
        let _ = line.send(begin);
        let number = {
            let mut state = self.lock();
            state.next += 1;
            let number = state.next;
            state.lines.insert(number, line.clone());
            number
        };
        let line = line.downgrade();
        let speaking = tokio::spawn(speak(writer, said));
        let mut bytes = [0; MESSAGE_BYTES];
        while reader.read_exact(&mut bytes).await.is_ok() {
            let Some(line) = line.upgrade() else { break };
            if let Err(why) = self.heard(&bytes, number, line) {
                tracing::error!(disk = self.disk, why, "a front end is not understood");
                self.lock().broken = Some(why);
                break;
            }
        }
        self.lock().lines.remove(&number);
        self.changed.notify_waiters();
        speaking.abort();
    }

    fn heard(
        &self,
        bytes: &[u8; MESSAGE_BYTES],
        number: u64,
        line: mpsc::UnboundedSender<ToServer>,
    ) -> Result<(), String> {
        match ToOwner::from_bytes(bytes).map_err(|error| error.to_string())? {
            ToOwner::Written { id, bytes } => {
                // A write beyond the end has changed nothing, and was refused; or the image has
                // outgrown its region, and the move will be given up.
                let (first, end) = (bytes.start / BLOCK, bytes.end.div_ceil(BLOCK));
                let (first, end) = (first.min(self.blocks), end.min(self.blocks));
                let range = BlockRange::new(first, end - first);
                let reply = self.answers.then_some(Reply { line, id });
                let written = self.sending.written(self.region, range, reply);
                written.map_err(|error| error.to_string())
            }
            ToOwner::Waited { requests, together } => {
                self.sending.guest_waited(self.region, requests, together);
                Ok(())
            }
            ToOwner::Reached(mark) => {
                self.lock().reached = Some((number, mark));
                self.changed.notify_waiters();
                Ok(())
            }
        }
    }
}

async fn speak(mut writer: OwnedWriteHalf, mut said: mpsc::UnboundedReceiver<ToServer>) {
    while let Some(message) = said.recv().await {
        if writer.write_all(&message.to_bytes()).await.is_err() {
            return;
        }
    }
}
