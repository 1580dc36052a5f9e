//! Receives the write reports of a disk's export during a move, and passes them to the engine.

use crate::source::local_disks::LocalDisk;
use crate::source::reply::Reply;
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

/// Time limit for the last write reports after the guest is stopped.
const CLOSE_WITHIN: Duration = Duration::from_secs(10);
/// Interval of the checks for a connected export.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const BLOCK: u64 = BLOCK_SIZE as u64;

/// The reason why a disk's copy cannot be trusted.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum WatchError {
    /// The guest wrote without a report to the agent.
    #[error("the guest wrote to disk {0} while the agent did not hear of it")]
    Missed(String),
    /// The export does not report writes.
    #[error("the export of disk {0} does not answer")]
    Silent(String),
    /// A write report is invalid.
    #[error("disk {disk}: {why}")]
    Broken {
        /// The disk.
        disk: String,
        /// The error.
        why: String,
    },
}

/// The receiver of one disk's write reports, until it is dropped.
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
    /// Servers that are connected, or whose reports have not all been read.
    lines: BTreeMap<u64, mpsc::UnboundedSender<ToServer>>,
    next: u64,
    marks: u64,
    /// The last server that reached a mark, and that mark.
    reached: Option<(u64, u64)>,
    broken: Option<String>,
}

impl Watch {
    /// Listens for servers, which must not have been started before this.
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

    /// Returns an error if the copy may lack a write.
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

    /// Waits until every write that completed before this call has been reported. If the guest is
    /// stopped and QEMU has closed the disk, these are all writes.
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
                // The record of the fallback is made before the first unreported write, so the
                // check finds it.
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
        // The tasks of the connections end with their senders.
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
                tracing::warn!(disk = shared.disk, %error, "a disk export cannot connect");
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the connected server for a mark after its reports. Returns `None` unless exactly one
    /// server is connected.
    fn ask(&self) -> Option<(u64, u64)> {
        let mut state = self.lock();
        state.marks += 1;
        let mark = state.marks;
        // An earlier server's reports may not all have been read.
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
        // Cannot fail: the channel is open.
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
                tracing::error!(disk = self.disk, why, "a disk export is not understood");
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
                // A write past the end was refused and changed nothing, or the image has outgrown
                // its region and the move will be given up.
                let (first, end) = (bytes.start / BLOCK, bytes.end.div_ceil(BLOCK));
                let (first, end) = (first.min(self.blocks), end.min(self.blocks));
                let range = BlockRange::new(first, end - first);
                let reply = self.answers.then_some(Reply::new(line, id));
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
