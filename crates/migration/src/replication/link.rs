//! The channel over which versions of a guest's disks go to the host of its replica.

use crate::channel::{self, Receiver, Sender, TalkError};
use crate::context::Context;
use crate::limits::bandwidth::Share;
use crate::status::failure;
use crate::status::registry::Taken;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_parcel::{Asked, Newest, ReplicaLink};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::replica::{FromReplica, ReplicaOffer, ToReplica};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::sleep;

/// The first version of the messages that has replicas.
const VERSION: u16 = 3;
/// Bytes of records between two marks.
const MARK_BYTES: u64 = 1 << 20;
/// Marks that may be under way. It bounds what is queued here.
const MARKS_AHEAD: u32 = 16;

/// The guest belongs to the host of its replica.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the guest runs there since an operator has failed over to its replica")]
pub(crate) struct Superseded {
    /// The generation of the right to run it.
    pub(crate) generation: u64,
}

/// The host does not take the version.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
struct Refused {
    text: String,
    hint: Option<String>,
}

/// Returns whether the guest belongs to the host of its replica.
pub(crate) fn superseded(error: &io::Error) -> Option<Superseded> {
    error.get_ref()?.downcast_ref::<Superseded>().copied()
}

/// Returns what to do about an error.
pub(crate) fn hint_of(error: &io::Error) -> Option<String> {
    error.get_ref()?.downcast_ref::<Refused>()?.hint.clone()
}

/// Ends a version that is not wanted any more.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) context: Arc<Context>,
    pub(super) guest: String,
    pub(super) stopped: watch::Receiver<bool>,
}

impl Guard {
    fn check(&self) -> io::Result<()> {
        let guest = &self.guest;
        if *self.stopped.borrow() {
            return Err(io::Error::other("the replication is stopped"));
        }
        match self.context.registry.taken(guest) {
            Some(Taken::Moving(..)) => Err(io::Error::other(format!("{guest} is moving"))),
            _ => Ok(()),
        }
    }

    /// Waits until the replication is stopped.
    async fn stopped(&mut self) {
        if self.stopped.wait_for(|stopped| *stopped).await.is_err() {
            // The agent ends.
            std::future::pending::<()>().await;
        }
    }
}

/// Keeps the rate of a version below a limit.
#[derive(Debug)]
struct Pace {
    share: Share,
    begun: Instant,
    /// Time that the bytes before needed at their limits.
    needed: Duration,
}

impl Pace {
    async fn wait(&mut self, bytes: u64) {
        let Some(limit_bps) = self.share.of(None) else {
            return;
        };
        self.needed += Duration::from_secs_f64(bytes as f64 * 8.0 / limit_bps as f64);
        let elapsed = self.begun.elapsed();
        match self.needed.checked_sub(elapsed) {
            Some(early) => sleep(early).await,
            // What was not used is not made up for.
            None => self.needed = elapsed,
        }
    }
}

enum Channel {
    Opened(Sender<ToDestination>, Receiver<ToSource>),
    Begun(Sender<ToReplica>, Receiver<FromReplica>),
    Lost,
}

/// The channel.
pub(super) struct Link {
    handle: Handle,
    guard: Option<Guard>,
    channel: Channel,
    offer: ReplicaOffer,
    pace: Pace,
    unmarked_bytes: u64,
    /// The last mark that was sent, and the last one that was reached.
    marks: (u32, u32),
    /// Questions about blocks whose answers were not used.
    questions: usize,
    answers: VecDeque<u64>,
    asked: Asked,
    sent_bytes: Arc<AtomicU64>,
}

impl Link {
    /// Connects to a host.
    pub(super) async fn connect(
        context: &Context,
        host: &str,
        offer: ReplicaOffer,
    ) -> Result<Self, ApiError> {
        let control = context.endpoint.connect(host).await;
        let control = control.map_err(|error| failure::connect(host, &error))?;
        if control.peer().version < VERSION {
            let text = format!("the agent of {host} is too old to keep replicas");
            return Err(ApiError::new(ErrorCode::PeerVersion, text).hint("update longhaul there"));
        }
        let lost = |error| {
            let text = format!("the connection with {host} is lost: {error}");
            ApiError::new(ErrorCode::PeerUnreachable, text)
        };
        let channel = control.open().await.map_err(lost)?;
        let (sender, receiver) = channel::as_source(channel);
        Ok(Self {
            handle: Handle::current(),
            guard: None,
            channel: Channel::Opened(sender, receiver),
            offer,
            pace: Pace {
                share: context.throttle.join(None),
                begun: Instant::now(),
                needed: Duration::ZERO,
            },
            unmarked_bytes: 0,
            marks: (0, 0),
            questions: 0,
            answers: VecDeque::new(),
            asked: Asked::default(),
            sent_bytes: Arc::default(),
        })
    }

    /// Ends with an error when the version is not wanted any more.
    pub(super) fn guarded(&mut self, guard: Guard) {
        self.guard = Some(guard);
    }

    /// Returns the bytes of records that were sent.
    pub(super) fn sent(&self) -> Arc<AtomicU64> {
        self.sent_bytes.clone()
    }

    /// Begins a version of disks of the sizes in the offer.
    pub(super) async fn begin_now(&mut self) -> io::Result<Option<Newest>> {
        let opened = std::mem::replace(&mut self.channel, Channel::Lost);
        let Channel::Opened(mut sender, receiver) = opened else {
            return Err(io::Error::other("a channel carries one version"));
        };
        let offer = Box::new(self.offer.clone());
        sender
            .send(&ToDestination::Replicate(offer))
            .map_err(lost)?;
        self.channel = Channel::Begun(sender.of(), receiver.of());
        match self.answer().await? {
            FromReplica::Begun { newest, same } => Ok(newest.map(|version| Newest {
                version,
                is_ours: same,
            })),
            _ => Err(unfit()),
        }
    }

    fn send(&mut self, message: &ToReplica) -> io::Result<()> {
        self.guard.as_ref().map_or(Ok(()), Guard::check)?;
        match &mut self.channel {
            Channel::Begun(sender, _) => sender.send(message).map_err(lost),
            Channel::Opened(..) | Channel::Lost => Err(unfit()),
        }
    }

    /// Returns the next answer that is no refusal.
    async fn answer(&mut self) -> io::Result<FromReplica> {
        let Channel::Begun(_, receiver) = &mut self.channel else {
            return Err(unfit());
        };
        // The host may read a whole disk before it answers. Whether it is there, the connection
        // knows.
        let received = match &mut self.guard {
            None => receiver.recv().await,
            Some(guard) => tokio::select! {
                received = receiver.recv() => received,
                () = guard.stopped() => return Err(io::Error::other("it is stopped")),
            },
        };
        match received.map_err(lost)? {
            FromReplica::Refused(refusal) => {
                let (text, hint) = (refusal.text, refusal.hint);
                Err(io::Error::other(Refused { text, hint }))
            }
            FromReplica::Superseded { generation } => {
                Err(io::Error::other(Superseded { generation }))
            }
            answer => Ok(answer),
        }
    }

    /// Takes an answer to a mark or to a question about blocks. They come in the order of what they
    /// answer.
    async fn take_answer(&mut self) -> io::Result<()> {
        match self.answer().await? {
            FromReplica::Marked { number } if number == self.marks.1 + 1 => {
                self.marks.1 = number;
                Ok(())
            }
            FromReplica::Blocks { mask } if self.answers.len() < self.questions => {
                self.answers.push_back(mask);
                Ok(())
            }
            _ => Err(unfit()),
        }
    }

    async fn mark(&mut self, durable: bool) -> io::Result<()> {
        let number = self.marks.0 + 1;
        self.send(&ToReplica::Mark { number, durable })?;
        (self.marks.0, self.unmarked_bytes) = (number, 0);
        let ahead = if durable { 0 } else { MARKS_AHEAD };
        while self.marks.0 - self.marks.1 > ahead {
            self.take_answer().await?;
        }
        Ok(())
    }
}

impl Link {
    /// Counts what was sent, and keeps its rate and what is under way within their limits.
    fn has_sent(&mut self, bytes: u64) -> io::Result<()> {
        self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.unmarked_bytes += bytes;
        let handle = self.handle.clone();
        handle.block_on(self.pace.wait(bytes));
        match self.unmarked_bytes >= MARK_BYTES {
            true => handle.block_on(self.mark(false)),
            false => Ok(()),
        }
    }
}

fn unfit() -> io::Error {
    lost(TalkError::Unfit("an answer does not fit its question"))
}

fn lost(error: TalkError) -> io::Error {
    io::Error::other(error)
}

impl ReplicaLink for Link {
    fn begin(&mut self, sizes: &[u64]) -> io::Result<Option<Newest>> {
        for (disk, bytes) in self.offer.disks.iter_mut().zip(sizes) {
            disk.bytes = *bytes;
        }
        self.handle.clone().block_on(self.begin_now())
    }

    fn digests(&mut self, disk: usize, first: u64) -> io::Result<Vec<u8>> {
        let disk = u32::try_from(disk).map_err(io::Error::other)?;
        self.send(&ToReplica::QueryDigests { disk, first })?;
        match self.handle.clone().block_on(self.answer())? {
            FromReplica::Digests { digests } if digests.len().is_multiple_of(32) => Ok(digests),
            _ => Err(unfit()),
        }
    }

    fn put(&mut self, kind: u8, rest: &[u8]) -> io::Result<()> {
        self.send(&ToReplica::Record {
            kind,
            rest: rest.to_vec(),
        })?;
        self.has_sent(rest.len() as u64)
    }

    fn ask(&mut self, disk: u32, chunk: u64, digests: &[u8]) -> io::Result<()> {
        self.send(&ToReplica::QueryBlocks {
            disk,
            chunk,
            digests: digests.to_vec(),
        })?;
        self.questions += 1;
        self.has_sent(digests.len() as u64)
    }

    fn differing(&mut self) -> io::Result<u64> {
        let handle = self.handle.clone();
        while self.questions > 0 {
            if let Some(mask) = self.answers.pop_front() {
                self.questions -= 1;
                return Ok(mask);
            }
            handle.block_on(self.take_answer())?;
        }
        Err(unfit())
    }

    fn asked(&mut self) -> &mut Asked {
        &mut self.asked
    }

    fn sync(&mut self) -> io::Result<()> {
        self.handle.clone().block_on(self.mark(true))
    }
}
