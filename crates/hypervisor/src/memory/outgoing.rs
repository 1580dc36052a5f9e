//! Controls the source QEMU's migration into a socket of the agent: paces, holds, freezes and
//! aborts it.

mod freeze;
mod guard;
mod migrator;
mod pace;

use super::guest_memory::{AccessError, GuestMemory};
use super::reader::{End, Goal, ReadError, Reader, Shared};
use super::sampler::start_of_last_non_zero;
use super::source::{Before, Continuation, SourceError};
use crate::process::Account;
use crate::qmp::{Qmp, QmpError, Version};
use longhaul_protocol::BlockRange;
use longhaul_qemu_stream::Prelude;
pub use migrator::{ByCommand, Migrator};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

/// The number of pages of a pass that stay unread. QEMU blocks when 60 are in the socket, 32 in its
/// own buffer, and 16 in the reader's.
pub const MARGIN_PAGES: u64 = 192;
/// The minimum number of dirty pages for which a QEMU that may complete by itself is allowed to end
/// a pass.
const DIRTY_PAGES_MIN: u64 = 256;
/// The rate at which such a QEMU ends a pass, in bytes per second: 50 pages each 100 ms.
const BANDWIDTH_AT_END: u64 = 2_000_000;
/// The rate at which a QEMU writes no pages at all, in bytes per second; 0 would mean no limit.
const BANDWIDTH_NONE: u64 = 10;
/// How long such a QEMU must be idle before the guest is stopped.
const STILLNESS: Duration = Duration::from_millis(150);
/// The interval between estimates of dirty pages while the reader rests.
const ESTIMATE_EVERY: Duration = Duration::from_millis(250);
/// The interval between queries of QEMU's pass, in case its events are lost.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// The time limit for QEMU to connect, and to write the list of its RAM blocks.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for QEMU to stop a guest: its disks are drained first.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for QEMU to write the end of its stream, and to end.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(2);

/// Blocks that the guest wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Index of the RAM block in [`GuestMemory::blocks`]; never a kept one.
    pub block: usize,
    /// Ranges of its blocks of 4 KiB.
    pub runs: Vec<BlockRange>,
}

/// An event that an [`Outgoing`] reports to its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A pass begins: the following blocks were written since the query of the pass before. Pass 1
    /// has every page.
    PassStarted {
        /// Counts from 1.
        pass: u64,
    },
    /// Blocks were written: content of them that was sent before is stale.
    Written(Written),
    /// The pass is read as far as allowed; for a paused guest, completely. The owner decides:
    /// [`Outgoing::next_pass`] or [`Outgoing::freeze`].
    Held {
        /// The pass.
        pass: u64,
        /// About how many of its pages stay unread, until the next pass or the freeze.
        unread_pages: u64,
    },
    /// QEMU completed by itself and was refused. Every page is reported again, from pass 1.
    Restarted,
    /// The migration cannot go on, and no further events follow; only [`Outgoing::abort`] remains.
    Failed(String),
}

/// The progress of an outgoing migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// The pass that is being read.
    pub pass: u64,
    /// Records of pages read since the start.
    pub pages_read: u64,
    /// About how many pages of this pass are unread, where that is known.
    pub unread_pages: Option<u64>,
    /// About how many pages were dirtied since this pass began.
    pub dirty: Option<Dirty>,
    /// By how much QEMU throttles the guest, in percent of its time.
    pub slowed_percent: Option<u8>,
}

/// An estimate of dirty pages, from samples of the RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dirty {
    /// The number of pages.
    pub pages: u64,
    /// The age of the estimate.
    pub age: Duration,
}

/// A guest stopped in `postmigrate`.
#[derive(Debug)]
pub struct Frozen {
    /// All blocks reported written and not taken by [`Outgoing::next_event`] before.
    pub written: Vec<Written>,
    /// Under TCG, all blocks that differ from their last read, reported or not.
    pub changed: Vec<Written>,
    /// The stream for the destination's QEMU after the prelude: the kept blocks and the devices.
    pub tail: Vec<u8>,
    /// Whether the guest ran before it was stopped.
    pub was_running: bool,
    /// Time from the order to stop to QEMU's reply: after it the RAM does not change.
    pub stop_time: Duration,
    /// Time from the reply to the end of the stream.
    pub read_time: Duration,
    /// Time from the end of the stream to `postmigrate`.
    pub finish_time: Duration,
    /// When the order to stop was given.
    pub stopped_at: Instant,
}

/// Why a move cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum OutgoingError {
    /// QEMU's state does not allow a move, or QEMU does not return to its earlier state.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// QEMU's stream cannot be used.
    #[error(transparent)]
    Stream(#[from] ReadError),
    /// The guest's RAM cannot be read.
    #[error(transparent)]
    Memory(#[from] AccessError),
    /// The socket cannot be created.
    #[error("cannot listen on {} for QEMU's stream: {why}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// QEMU did not act in time.
    #[error("QEMU did not {what} within {} s", waited.as_secs())]
    Timeout {
        /// The expected action.
        what: &'static str,
        /// The time limit.
        waited: Duration,
    },
    /// QEMU completed by itself; the guest goes on, and the migration begins again.
    #[error("QEMU completed by itself; the migration starts again")]
    Restarted,
    /// QEMU stopped the guest in order to complete, although it was held. The guest runs again.
    #[error(
        "QEMU {version} stopped the guest and completed by itself, though it was held: this QEMU \
         is not one that Longhaul can hold; the guest runs on here"
    )]
    NotHeld {
        /// The QEMU's version.
        version: Version,
    },
    /// The guest's owner paused it after the migration had begun.
    #[error("the guest was paused while it moved")]
    Paused,
    /// The migration failed earlier.
    #[error("the migration has failed: {0}")]
    Failed(String),
    /// QEMU is in an unexpected state.
    #[error("QEMU is `{found}` where it should be `{expected}`")]
    State {
        /// The expected state.
        expected: &'static str,
        /// The actual state.
        found: String,
    },
}

impl From<QmpError> for OutgoingError {
    fn from(error: QmpError) -> Self {
        Self::Source(error.into())
    }
}

/// The migration of one guest away from this host, up to the moment when it may be released.
#[derive(Debug)]
pub struct Outgoing {
    migration: Arc<Migration>,
    pacer: Option<JoinHandle<()>>,
    guard: Option<JoinHandle<()>>,
    wishes: watch::Sender<Wish>,
}

/// The owner's orders to the pacing task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wish {
    /// The migration that this is about: QEMU's may have to be started again.
    life: u64,
    /// The number of its passes that may be begun.
    passes: u64,
    /// Whether the task shall leave QEMU held and end.
    end: bool,
}

/// State shared by the owner's side and the pacing task.
#[derive(Debug)]
struct Migration {
    by: Arc<dyn Migrator>,
    qmp: Qmp,
    memory: Arc<GuestMemory>,
    path: PathBuf,
    before: Before,
    prelude: Prelude,
    inner: Mutex<Inner>,
    /// Wakes tasks that wait for an event of a replaced stream.
    replaced: Notify,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    socket: UnixStream,
    life: u64,
    /// Where the first pass is held; `None`: before its first page.
    first_goal: Option<Goal>,
    progress: Progress,
    /// The newest estimate of dirty pages of this pass, and its time.
    dirty: Option<(u64, Instant)>,
    /// Whether the guest was ordered to stop here.
    stop_ordered: bool,
}

impl Outgoing {
    /// Prepares the source's QEMU and begins its migration into a socket at `path`, which is
    /// created and removed here. QEMU's account must be able to reach it. A guest that writes too
    /// fast may be throttled by up to `slow_at_most` percent of its time.
    ///
    /// On an error QEMU is restored. Reading begins at once: events follow.
    pub async fn start(
        qmp: &Qmp,
        memory: Arc<GuestMemory>,
        path: &Path,
        slow_at_most: Option<u8>,
    ) -> Result<(Self, Prelude), OutgoingError> {
        Self::start_by(Arc::new(ByCommand), qmp, memory, path, slow_at_most).await
    }

    /// As [`Self::start`], where another program makes QEMU migrate. Such a guest is not throttled
    /// if that program sets QEMU up.
    pub async fn start_by(
        by: Arc<dyn Migrator>,
        qmp: &Qmp,
        memory: Arc<GuestMemory>,
        path: &Path,
        slow_at_most: Option<u8>,
    ) -> Result<(Self, Prelude), OutgoingError> {
        let before = match by.sets_up() {
            true => Before::look_at_set_up(qmp).await?,
            false => Before::look(qmp, slow_at_most).await?,
        };
        let events = qmp.events();
        let (connection, prelude) = match connect(&*by, qmp, &before, &memory, path).await {
            Ok(connected) => connected,
            Err(error) => {
                by.resume(qmp, Continuation::of(before.running, false))
                    .await?;
                before.restore(qmp).await?;
                return Err(error);
            }
        };
        let migration = Arc::new(Migration {
            by,
            qmp: qmp.clone(),
            memory,
            path: path.to_owned(),
            before,
            prelude: prelude.clone(),
            inner: Mutex::new(connection),
            replaced: Notify::new(),
        });
        let wishes = watch::Sender::new(Wish {
            life: 0,
            passes: 1,
            end: false,
        });
        let pacer = tokio::spawn(Arc::clone(&migration).pace(wishes.subscribe()));
        let running = migration.before.running;
        let guard = running.then(|| tokio::spawn(Arc::clone(&migration).guard(events)));
        let outgoing = Self {
            migration,
            pacer: Some(pacer),
            guard,
            wishes,
        };
        Ok((outgoing, prelude))
    }

    /// Waits for the next event. Untaken events block the reader after some thousands of runs.
    /// Dropping the future loses nothing.
    pub async fn next_event(&self) -> Event {
        loop {
            let shared = self.migration.shared();
            let (event, replaced) = (shared.event.notified(), self.migration.replaced.notified());
            tokio::pin!(event, replaced);
            event.as_mut().enable();
            replaced.as_mut().enable();
            if let Some(event) = self.migration.shared().take_event() {
                return event;
            }
            tokio::select! {
                () = event => {}
                () = replaced => {}
            }
        }
    }

    /// Returns the next event if there is one.
    pub fn try_event(&self) -> Option<Event> {
        self.migration.shared().take_event()
    }

    /// Allows the next pass to begin, now or as soon as this one is read. A QEMU that may complete
    /// by itself begins it only when enough is dirty.
    pub fn next_pass(&self) {
        let (life, pass) = self.migration.life_and_pass();
        self.wishes.send_modify(|wish| {
            wish.life = life;
            wish.passes = pass + 1;
        });
    }

    /// Stops reading in the middle of the pass (`true`), or goes on. QEMU blocks, and the guest
    /// goes on running.
    pub fn hold(&self, held: bool) {
        self.migration.shared().hold(held);
    }

    /// Returns the progress.
    pub fn progress(&self) -> Progress {
        self.migration.progress()
    }

    /// Returns the beginning of the tail if the guest were frozen now: the kept blocks, as far as
    /// they were read. They seldom change, so most of it can be sent before.
    pub fn kept_so_far(&self) -> Vec<u8> {
        self.migration.kept_section(&self.migration.shared().kept())
    }

    /// Returns whether the guest ran before the move.
    pub fn was_running(&self) -> bool {
        self.migration.before.running
    }

    /// Stops the guest, reads the stream to its end and leaves QEMU in `postmigrate`.
    ///
    /// Only when this has returned may the guest be released to another host. On
    /// [`OutgoingError::Restarted`] the guest runs on and the pass starts from 1 again; after any
    /// other error the owner must call [`Outgoing::abort`].
    pub async fn freeze(&mut self) -> Result<Frozen, OutgoingError> {
        self.stop_pacing().await;
        if self.migration.before.holds_by_rate() {
            self.migration.settle().await?;
        }
        match self.migration.freeze().await {
            Err(OutgoingError::Restarted) => {
                let migration = Arc::clone(&self.migration);
                self.wishes.send_modify(|wish| wish.end = false);
                self.pacer = Some(tokio::spawn(migration.pace(self.wishes.subscribe())));
                Err(OutgoingError::Restarted)
            }
            other => other,
        }
    }

    /// Aborts the move: the guest goes on here as before, and QEMU's settings are restored.
    ///
    /// Allowed until the guest is released, also after a freeze. A guest that was paused before and
    /// is frozen runs for a moment: QEMU offers no other way back.
    pub async fn abort(mut self) -> Result<(), OutgoingError> {
        for task in [self.pacer.take(), self.guard.take()].into_iter().flatten() {
            task.abort();
            // It was ordered to end; its result is of no interest.
            let _ = task.await;
        }
        let migration = Arc::clone(&self.migration);
        // A closed socket also releases a QEMU that blocks in a write with its big lock held.
        migration.shared().quit();
        migration.close();
        let how = migration.continuation();
        migration.by.resume(&migration.qmp, how).await?;
        migration.before.restore(&migration.qmp).await?;
        Ok(())
    }

    /// Lets QEMU complete by itself, which it must never do in production: for tests of a guest
    /// whose agent dies then. A [`Outgoing::freeze`] may follow.
    pub async fn complete_early(&mut self) -> Result<(), OutgoingError> {
        self.stop_pacing().await;
        self.migration.complete_early().await
    }

    async fn stop_pacing(&mut self) {
        self.wishes.send_modify(|wish| wish.end = true);
        if let Some(pacer) = self.pacer.take() {
            // A task that panicked left QEMU unchanged, and the freeze queries its state itself.
            let _ = pacer.await;
        }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        for task in [self.pacer.take(), self.guard.take()].into_iter().flatten() {
            task.abort();
        }
        self.migration.shared().quit();
    }
}

impl Migration {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        // The content is consistent whenever the lock is free.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how the guest continues here if the move is aborted now.
    fn continuation(&self) -> Continuation {
        Continuation::of(self.before.running, self.inner().stop_ordered)
    }

    fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.inner().shared)
    }

    fn life_and_pass(&self) -> (u64, u64) {
        let inner = self.inner();
        (inner.life, inner.progress.pass)
    }

    fn progress(&self) -> Progress {
        let inner = self.inner();
        Progress {
            pages_read: inner.shared.pages_read(),
            dirty: inner.dirty.map(|(pages, at)| Dirty {
                pages,
                age: at.elapsed(),
            }),
            ..inner.progress
        }
    }

    /// Returns whether QEMU may complete by itself.
    fn may_complete(&self) -> bool {
        !self.before.held_by_ack
    }

    fn close(&self) {
        // Closed by QEMU already, or closed now.
        let _ = self.inner().socket.shutdown(std::net::Shutdown::Both);
    }
}

/// Sets QEMU up, begins its migration and reads the prelude.
async fn connect(
    by: &dyn Migrator,
    qmp: &Qmp,
    before: &Before,
    memory: &Arc<GuestMemory>,
    path: &Path,
) -> Result<(Inner, Prelude), OutgoingError> {
    if before.misses_writes {
        memory.remember_reads();
    }
    // The place to stop at is known before QEMU can run past it. Where the RAM has so little
    // content that a socket could take it all, QEMU is not allowed to write any page.
    let looking = Arc::clone(memory);
    let places = tokio::task::spawn_blocking(move || last_places(&looking)).await;
    let places = places.map_err(|error| OutgoingError::Failed(error.to_string()))??;
    let little = places.iter().all(|(_, page)| *page == 0);
    let none = little && !before.held_by_ack && before.running;
    let bandwidth = if none { BANDWIDTH_NONE } else { 0 };
    before.set(qmp, bandwidth).await?;
    let (shared, socket) = open(by, qmp, memory, path).await?;
    if by.sets_up() {
        // It has set its own limits. Until here nothing was read, so QEMU waits in its first pass.
        before.limit(qmp, bandwidth).await?;
    }
    let prelude = prelude(&shared).await?;
    let goal = prelude
        .blocks
        .iter()
        .enumerate()
        .rev()
        .find_map(|(index, block)| {
            let at = memory.find(&block.name)?;
            let (_, page) = places.iter().find(|(place, _)| *place == at)?;
            Some(Goal::Place {
                block: index,
                page: *page,
            })
        });
    let inner = Inner {
        shared,
        socket,
        life: 0,
        first_goal: goal.filter(|_| !none),
        progress: Progress::default(),
        dirty: None,
        stop_ordered: false,
    };
    Ok((inner, prelude))
}

/// Returns, for each block that is not kept, where its last pages with content begin.
fn last_places(memory: &GuestMemory) -> Result<Vec<(usize, u64)>, AccessError> {
    let blocks = memory.blocks().iter().enumerate();
    let direct = blocks.filter(|(_, block)| !block.is_kept());
    let place = |index| start_of_last_non_zero(memory, index, MARGIN_PAGES);
    direct
        .map(|(index, _)| Ok((index, place(index)?)))
        .collect()
}

/// Waits for the beginning of the stream.
async fn prelude(shared: &Shared) -> Result<Prelude, OutgoingError> {
    if tokio::time::timeout(CONNECT_TIMEOUT, shared.rests())
        .await
        .is_err()
    {
        shared.quit();
    }
    match (shared.prelude(), shared.end()) {
        (Some(prelude), _) => Ok(prelude),
        (None, Some(End::Failed(error))) => Err(error.into()),
        (None, _) => Err(OutgoingError::Timeout {
            what: "write the beginning of its stream",
            waited: CONNECT_TIMEOUT,
        }),
    }
}

/// Lets QEMU connect, and starts reading.
async fn open(
    by: &dyn Migrator,
    qmp: &Qmp,
    memory: &Arc<GuestMemory>,
    path: &Path,
) -> Result<(Arc<Shared>, UnixStream), OutgoingError> {
    let failed = |error: std::io::Error| OutgoingError::Listen {
        path: path.to_owned(),
        why: error.to_string(),
    };
    let listener = listen(path, memory.pid()).map_err(failed)?;
    let migrating = by.migrate(qmp, path).await;
    let accepted = async {
        migrating?;
        let is_it = |peer| by.connects(memory.pid(), peer);
        let accepted = tokio::time::timeout(CONNECT_TIMEOUT, accept(&listener, is_it)).await;
        let accepted = accepted.map_err(|_| OutgoingError::Timeout {
            what: "connect to its migration socket",
            waited: CONNECT_TIMEOUT,
        })?;
        accepted.map_err(failed)
    };
    let accepted = accepted.await;
    // No other client may connect. An error means that the file is gone already.
    let _ = std::fs::remove_file(path);
    let socket = accepted?;
    let shared = Shared::new();
    let reading = socket.try_clone().map_err(failed)?;
    Reader::start(Arc::clone(&shared), reading, Arc::clone(memory)).map_err(failed)?;
    Ok((shared, socket))
}

/// Returns a socket that only this QEMU's account can connect to.
fn listen(path: &Path, pid: i32) -> std::io::Result<tokio::net::UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = tokio::net::UnixListener::bind(path)?;
    give(path, Account::of_process(pid)?.uid.as_raw())?;
    Ok(listener)
}

/// Gives a socket to QEMU's account. That account owns the folder, which is closed to others, and
/// may
/// have replaced the socket by a link: the link is not followed.
fn give(path: &Path, uid: u32) -> std::io::Result<()> {
    std::os::unix::fs::lchown(path, Some(uid), None)
}

/// Returns the connection from the process that it has to be from; others are closed.
async fn accept(
    listener: &tokio::net::UnixListener,
    is_it: impl Fn(i32) -> bool,
) -> std::io::Result<UnixStream> {
    loop {
        let (socket, _) = listener.accept().await?;
        if socket.peer_cred()?.pid().is_some_and(&is_it) {
            let socket = socket.into_std()?;
            socket.set_nonblocking(false)?;
            return Ok(socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, symlink};

    #[test]
    fn a_link_in_the_place_of_the_socket_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (key, socket) = (folder.path().join("key"), folder.path().join("outgoing"));
        std::fs::write(&key, b"secret").unwrap();
        symlink(&key, &socket).unwrap();
        let before = std::fs::metadata(&key).unwrap();
        // Only root may give files away.
        if before.uid() != 0 {
            return;
        }
        give(&socket, 12345).unwrap();
        let after = std::fs::metadata(&key).unwrap();
        assert_eq!((after.uid(), after.mode()), (0, before.mode()));
        assert_eq!(std::fs::symlink_metadata(&socket).unwrap().uid(), 12345);
    }
}
