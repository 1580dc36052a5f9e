//! An arriving guest: one task from the offer until the guest runs here or the attempt is aborted.
//!
//! ```text
//! offer -> checks -> Launching -> QEMU with -incoming -> Accepted
//!   -> frames into RAM -> Complete -> QEMU loads -> [compared] -> READY -> COMMIT -> runs
//! ```
//!
//! The task owns the guest's QEMU until the handover is complete. Other tasks see it as an
//! [`AttemptHandle`], through which a disconnected source returns over a new connection.

mod compare;
mod handover;
mod prepare;

use crate::carrier::CarrierError;
use crate::channel::TalkError;
use crate::destination::Destination;
use crate::destination::arriving_memory::{self, ArrivingMemory, MemoryNews};
use crate::destination::call::Call;
use crate::destination::companion::Companions;
use crate::destination::guest_rate::RateAfter;
use crate::destination::handle::{AttemptHandle, Called, Present};
use crate::destination::qemu::{DestinationQemu, DestinationQemuError};
use crate::destination::receiver::{ReceiveError, Receiving};
use crate::handover::ledger::{DestinationHandover, time_destination, until};
use crate::host::task::owning;
use crate::limits::peer_quota::{Admission, Pace};
use crate::status::migration::Entry;
use crate::status::registry::Reservation;
use longhaul_api::{ApiError, ErrorCode, HandoverRecord, Outcome, Phase, Resolve};
use longhaul_attempt::destination::{Event, FromSource};
use longhaul_codec::unpack;
use longhaul_engine::handover::DestinationState;
use longhaul_protocol::Epoch;
use longhaul_protocol::disk::{OfferedDisk, Pulled};
use longhaul_protocol::files::FileClaim;
use longhaul_protocol::guest::Managed;
use longhaul_protocol::limits::DEVICE_STATE_BYTES_MAX;
use longhaul_protocol::message::{self, Offer, ToDestination, ToSource};
use longhaul_transport::{BulkOffer, BulkReceiver};
use prepare::Refused;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{Instant, sleep_until};

/// The epoch of the connection that brought the offer.
const FIRST_EPOCH: Epoch = Epoch(1);
/// Interval at which an attempt that waits for base images counts as progress. The source can only
/// wait for them, so the attempt is not aborted as stalled.
const STEP_EVERY: Duration = Duration::from_secs(1);

/// A guest that is offered.
pub(crate) struct Arriving {
    pub(crate) offer: Offer,
    /// The disks that move with it.
    pub(crate) disks: Vec<OfferedDisk>,
    /// The part of its memory that may follow when it runs here.
    pub(crate) follows: Pulled,
    /// The program that manages it, if Longhaul does not.
    pub(crate) managed: Option<Managed>,
}

impl Arriving {
    /// A guest of Longhaul's own whose memory does not follow.
    pub(crate) fn of(offer: Offer, disks: Vec<OfferedDisk>) -> Self {
        Self {
            offer,
            disks,
            follows: Pulled::Nothing,
            managed: None,
        }
    }
}

/// Carries out an attempt from its offer to its end.
pub(crate) async fn receive(
    context: Arc<Destination>,
    mut call: Call,
    arriving: Arriving,
    files: Option<Vec<FileClaim>>,
) {
    let peer = call.control.peer().host.clone();
    let span = (arriving.offer.migration, arriving.offer.guest.name.clone());
    // What ends here by itself soon is not in its way.
    context.registry.settled(&span.1).await;
    let prepared = prepare::prepare(&context, &mut call, arriving, files.as_deref());
    let (task, bulk) = match prepared.await {
        Ok(prepared) => prepared,
        Err(Refused { refusal, bulk }) => {
            tracing::warn!(migration = %span.0, guest = span.1, peer = peer.name,
                "refused: {}", refusal.text);
            if let Err(error) = call.sender.send(&ToSource::Refused(refusal)) {
                tracing::debug!(%error, "the source did not wait for the refusal");
            }
            drop(bulk);
            return;
        }
    };
    owning(task.run(call, bulk)).await;
}

struct DestinationAttempt {
    context: Arc<Destination>,
    entry: Arc<Entry>,
    arrival: Arc<AttemptHandle>,
    present: Present,
    offer: Offer,
    handover: DestinationHandover,
    inbound: DestinationQemu,
    companions: Companions,
    called: mpsc::Receiver<Called>,
    resolutions: watch::Receiver<Option<Resolve>>,
    stepped_at: Instant,
    call: Option<Call>,
    /// The source's new connection, until the core decides about it.
    caller: Option<Call>,
    bulk: Option<JoinHandle<BulkEnd>>,
    /// A bulk connection from which nothing more is received. It stays open until the attempt ends.
    _broken: Option<Box<BulkReceiver>>,
    /// The number of bytes of device state that were sent early, and in all, from `Complete`.
    tail_bytes: Option<(u32, u32)>,
    loading: Option<JoinHandle<Result<(), DestinationQemuError>>>,
    /// The memory that follows, once QEMU loads the guest, and the news of it.
    memory: Option<Following>,
    /// Whether everything is here, so that frames change nothing any more.
    sealed: bool,
    /// Whether everything that was received of disks is durable.
    settled: bool,
    /// Whether the guest runs here and the core has decided to fetch missing blocks.
    fetches: bool,
    /// Both journals are complete.
    finished: bool,
    complete_at: Option<Instant>,
    load_time: Duration,
    commit_at: Option<Instant>,
    commit_time: Duration,
    /// The hook that runs beside the guest.
    running: Option<JoinHandle<()>>,
    /// The task that measures the guest's clock.
    clock: Option<JoinHandle<Option<message::GuestClock>>>,
    /// The measurement of the guest's rate, once it runs here.
    rate: RateAfter,
    pace: Arc<Pace>,
    /// The guest's share of its sender's quota.
    admission: Admission,
    reservation: Reservation,
}

/// The memory of a guest that follows.
pub(crate) struct Following {
    pub(crate) memory: Arc<ArrivingMemory>,
    pub(crate) news: mpsc::UnboundedReceiver<MemoryNews>,
}

/// Waits for news of memory that follows.
pub(crate) async fn next_news(following: &mut Option<Following>) -> MemoryNews {
    let news = match following {
        Some(following) => following.news.recv().await,
        None => None,
    };
    match news {
        Some(news) => news,
        None => std::future::pending().await,
    }
}

/// How a bulk connection ended.
pub(crate) enum BulkEnd {
    Lost(CarrierError),
    /// Aborts the attempt for this reason. If the source is not at fault, the connection stays open
    /// until the source has the reason.
    Broken(String, Option<Box<BulkReceiver>>),
}

enum Happened {
    Message(Result<ToDestination, TalkError>),
    Call(Option<Box<Called>>),
    Bulk(BulkEnd),
    Memory(MemoryNews),
    Everything,
    Loaded(Result<(), DestinationQemuError>),
    Settled(Result<(), String>),
    Bases(Result<(), String>),
    QemuEnded,
    PatienceOver,
    Timeout,
    BasesTakeTime,
    Cancelled,
    Resolved(Option<Resolve>),
}

impl DestinationAttempt {
    async fn run(mut self, call: Call, bulk: BulkOffer) {
        self.connected(call, FIRST_EPOCH, bulk);
        self.drive().await;
        while !self.over() {
            let happened = self.wait().await;
            self.handle(happened).await;
        }
        match self.fetches {
            true => self.fetch().await,
            false => self.end().await,
        }
    }

    /// Returns whether this task is done. From then on the journal or the fetch task answers the
    /// source.
    fn over(&self) -> bool {
        self.fetches || self.finished || self.handover.core.is_idle()
    }

    /// Offers a returned source a bulk connection, and uses the connection that the source called
    /// on. Returns whether that succeeded.
    async fn reconnect(&mut self, epoch: Epoch) -> bool {
        self.disconnect();
        let Some(mut call) = self.caller.take() else {
            return false;
        };
        let state = self.handover.core.attempt_state();
        let resumed = |bulk_token| ToSource::Resumed { bulk_token, state };
        let id = self.offer.attempt_id();
        match call.expect_bulk(id, epoch, resumed).await {
            Ok(bulk) => {
                if let Some(away) = self.handover.lost_for() {
                    self.pace.was_away(away);
                }
                self.connected(call, epoch, bulk);
                self.ask_again()
            }
            Err(error) => {
                tracing::info!(%error, "the source cannot come back");
                false
            }
        }
    }

    /// Uses a connection, and starts to receive from the bulk connection that belongs to it.
    fn connected(&mut self, call: Call, epoch: Epoch, bulk: BulkOffer) {
        let receiving = self.inbound.receiving().clone();
        receiving.connected(epoch);
        self.bulk = Some(tokio::spawn(async move {
            match bulk.accept().await {
                Ok(bulk) => receive_from(&receiving, epoch, bulk).await,
                Err(error) => BulkEnd::Lost(error.into()),
            }
        }));
        self.call = Some(call);
    }

    fn disconnect(&mut self) {
        if let Some(bulk) = self.bulk.take() {
            bulk.abort();
        }
        self.call = None;
    }

    async fn wait(&mut self) -> Happened {
        let deadline = self.deadline();
        let timeout = self.handover.timeout();
        let receiving = self.inbound.receiving().clone();
        let receives = matches!(self.state(), DestinationState::Receiving { .. });
        let ready_to_load = receives && !self.sealed && self.complete_at.is_some();
        let mut cancelled = self.entry.cancelled();
        let may_abort = self.state().may_abort();
        let waits = !self.companions.have_arrived();
        let resolutions = &mut self.resolutions;
        tokio::select! {
            message = next_message(&mut self.call) => Happened::Message(message),
            call = self.called.recv() => Happened::Call(call.map(Box::new)),
            end = join(&mut self.bulk) => {
                self.bulk = None;
                Happened::Bulk(end.unwrap_or_else(|error| BulkEnd::Broken(error.to_string(), None)))
            }
            news = next_news(&mut self.memory) => Happened::Memory(news),
            () = receiving.completed(), if ready_to_load => Happened::Everything,
            loaded = join(&mut self.loading) => {
                self.loading = None;
                Happened::Loaded(loaded.unwrap_or_else(|error| {
                    Err(DestinationQemuError::Broken(error.to_string()))
                }))
            }
            settled = receiving.settled(), if self.sealed && !self.settled => {
                Happened::Settled(settled)
            }
            arrived = self.companions.arrive() => Happened::Bases(arrived),
            () = self.inbound.ended() => Happened::QemuEnded,
            () = until(deadline) => Happened::PatienceOver,
            () = until(timeout) => Happened::Timeout,
            () = sleep_until(self.stepped_at + STEP_EVERY), if waits => {
                Happened::BasesTakeTime
            }
            Ok(()) = resolutions.changed() => {
                Happened::Resolved(resolutions.borrow_and_update().clone())
            }
            Ok(_) = cancelled.wait_for(Option::is_some), if may_abort => {
                Happened::Cancelled
            }
        }
    }

    /// Returns when a connected source will have made too little progress.
    fn deadline(&self) -> Option<Instant> {
        self.call.as_ref()?;
        match self.state() {
            DestinationState::Running { .. } => Some(self.pace.goodbye()),
            DestinationState::Receiving { .. } | DestinationState::Readying => {
                Some(self.pace.deadline())
            }
            _ => None,
        }
    }

    async fn handle(&mut self, happened: Happened) {
        match happened {
            Happened::Message(Ok(message)) => self.message(message).await,
            Happened::Message(Err(error)) => {
                tracing::info!(migration = %self.offer.migration, %error, "the source is gone");
                self.disconnect();
                let reason = || crate::channel::short(&error.to_string());
                let meant = error.is_meant().then(reason);
                self.tell(Event::Lost { meant }).await;
            }
            Happened::Call(Some(call)) => self.called(call.0, call.1).await,
            Happened::Call(None) => {}
            Happened::Bulk(BulkEnd::Lost(error)) => {
                tracing::info!(migration = %self.offer.migration, %error, "bulk is gone");
            }
            Happened::Bulk(BulkEnd::Broken(reason, bulk)) => {
                self._broken = bulk;
                self.abort(reason).await;
            }
            Happened::Memory(news) => self.of_memory(news).await,
            Happened::Everything => self.tell(Event::Everything).await,
            Happened::Loaded(loaded) => self.loaded(loaded).await,
            Happened::Settled(settled) => {
                self.settled = true;
                let receiving = self.inbound.receiving();
                // READY promises that the disk exports know durably which blocks are missing.
                let hand_on = || block_in_place(|| receiving.hand_on(self.offer.verify));
                let settled = settled.and_then(|()| hand_on());
                let settled = settled.map_err(|why| crate::channel::short(&why));
                self.tell(Event::Settled(settled)).await;
            }
            Happened::Bases(here) => {
                let here = here.map_err(|why| crate::channel::short(&why));
                self.tell(Event::BasesHere(here)).await;
            }
            Happened::QemuEnded => self.qemu_ended().await,
            Happened::Resolved(resolve) => self.resolved(resolve).await,
            Happened::Timeout => {
                let before = self.state().clone();
                time_destination(self).await;
                self.stepped(&before);
            }
            Happened::BasesTakeTime => {
                // The source can only wait for base images.
                self.stepped_at = Instant::now();
                self.pace.stepped(Instant::now());
            }
            Happened::PatienceOver => match self.state() {
                DestinationState::Running { .. } => {
                    self.disconnect();
                    self.tell(Event::Lost { meant: None }).await;
                }
                _ => {
                    let stall = "the source is there and hardly sends anything (`stall` and \
                                 `move_time` under [limits] of the destination)";
                    self.abort(stall.to_owned()).await;
                }
            },
            Happened::Cancelled => {
                self.abort("it was cancelled at the destination".to_owned())
                    .await;
            }
        }
    }

    /// Takes a new connection of the source, with an epoch if the source has blocks to send.
    async fn called(&mut self, call: Call, epoch: Option<Epoch>) {
        self.entry.heard(None);
        self.caller = Some(call);
        self.tell(Event::Called(epoch)).await;
    }

    async fn message(&mut self, message: ToDestination) {
        if let Some(message) = FromSource::of(&message) {
            return self.decided(message).await;
        }
        match message {
            ToDestination::Start { prelude } => {
                if let Err(error) = self.inbound.begin(&prelude).await {
                    self.abort(error.to_string()).await;
                } else {
                    self.entry.enter(Phase::Precopy);
                }
            }
            ToDestination::Complete {
                epoch,
                frames,
                early_bytes,
                device_state_bytes,
            } => {
                if epoch != self.handover.core.epoch() {
                    return;
                }
                self.tail_bytes = Some((early_bytes, device_state_bytes));
                if self.complete_at.is_none() {
                    self.complete_at = Some(Instant::now());
                    self.pace.stepped(Instant::now());
                }
                let receiving = self.inbound.receiving();
                receiving.announced(epoch, frames, early_bytes > 0);
            }
            ToDestination::VerifyRegion {
                region,
                range,
                blocks_per_digest,
            } => {
                self.compare(region, range, blocks_per_digest).await;
            }
            ToDestination::List(list) => {
                let listed = self.inbound.receiving().listed(&list);
                self.keeps_to_the_protocol(listed).await;
            }
            ToDestination::Length { region, bytes } => {
                let taken = self.inbound.receiving().has_length(region, bytes);
                self.keeps_to_the_protocol(taken).await;
            }
            ToDestination::HeldFrames(frames) => self.companions.held(&frames),
            ToDestination::Flows(flows) => self.companions.flows(&flows),
            ToDestination::Departed { cookie } => self.inbound.departed(cookie),
            ToDestination::Query(_)
            | ToDestination::Offer(_)
            | ToDestination::OfferDisks(_)
            | ToDestination::QueryFiles(_)
            | ToDestination::OfferFiles(_)
            | ToDestination::QueryPorts(_)
            | ToDestination::QueryKnown(_)
            | ToDestination::Replicate(_)
            | ToDestination::ParcelDevice
            | ToDestination::OfferPorts(_)
            | ToDestination::Resume { .. }
            | ToDestination::Unreadable { .. }
            | ToDestination::Verified
            | ToDestination::Commit { .. }
            | ToDestination::CommitWithLease { .. }
            | ToDestination::Arbiter { .. }
            | ToDestination::Cancel { .. }
            | ToDestination::Done
            | ToDestination::Overruled { .. }
            | ToDestination::Ask { .. } => {
                self.abort("the source breaks the protocol: a second beginning".to_owned())
                    .await;
            }
        }
    }

    /// Handles a message about the attempt itself.
    async fn decided(&mut self, message: FromSource) {
        let next = self.handover.ledger.terms.next();
        let message = match message {
            FromSource::Commit(_, commit) if commit.generation != next => {
                tracing::warn!(?commit, "a commit for another generation is ignored");
                return;
            }
            FromSource::Commit(..) => {
                self.commit_at.get_or_insert_with(Instant::now);
                message
            }
            FromSource::Cancel(reason) => FromSource::Cancel(crate::channel::short(&reason)),
            message => message,
        };
        self.tell(Event::Message(message)).await;
    }

    /// Aborts the attempt if the source has broken the protocol.
    async fn keeps_to_the_protocol(&mut self, kept: Result<(), String>) {
        if let Err(why) = kept {
            self.abort(format!("the source breaks the protocol: {why}"))
                .await;
        }
    }

    /// Returns the device state that QEMU gets after the prelude.
    fn tail(&self) -> Result<Vec<u8>, String> {
        let (early_bytes, all_bytes) = self.tail_bytes.ok_or("Complete is missing")?;
        let unpacked = |packed: Option<Vec<u8>>| match packed {
            Some(packed) => unpack(&packed, DEVICE_STATE_BYTES_MAX).map_err(|e| e.to_string()),
            None => Ok(Vec::new()),
        };
        let (early, rest) = self.inbound.receiving().device_state();
        let (mut tail, rest) = (unpacked(early)?, unpacked(rest)?);
        if tail.len() < early_bytes as usize {
            return Err("it did not send as much early as it says".to_owned());
        }
        tail.truncate(early_bytes as usize);
        tail.extend(rest);
        if tail.len() != all_bytes as usize {
            return Err("its device state has another length than it says".to_owned());
        }
        Ok(tail)
    }

    /// Lets QEMU load the device state. Returns an error if the source did not send what it
    /// announced.
    fn load(&mut self) -> Result<(), String> {
        self.entry.enter(Phase::Loading);
        self.complete_at = Some(Instant::now());
        self.sealed = true;
        let receiving = self.inbound.receiving();
        block_in_place(|| receiving.seal());
        let tail = self.tail();
        let tail = tail.map_err(|reason| format!("the source breaks the protocol: {reason}"))?;
        let state = self.context.parts.config.state.clone();
        let serving = (self.inbound.follows() != Pulled::Nothing).then(|| {
            let (memory, serving, news) = arriving_memory::hold();
            self.inbound.receiving().memory_follows(memory.clone());
            self.memory = Some(Following { memory, news });
            serving
        });
        self.loading = Some(tokio::spawn(self.inbound.load(tail, state, serving)));
        Ok(())
    }

    /// Tells the source that memory that follows is taken from now on, if there is some.
    fn say_loading(&mut self) -> Option<Event> {
        match self.inbound.lacks_memory() {
            true => self.post(ToSource::Loading),
            false => None,
        }
    }

    /// Passes on what QEMU asks for.
    async fn of_memory(&mut self, news: MemoryNews) {
        match news {
            MemoryNews::Want(region, range) => {
                let ranges = vec![range];
                self.send(ToSource::Want { region, ranges }).await;
            }
            MemoryNews::Whole => {}
            MemoryNews::Gone(why) => {
                tracing::error!(migration = %self.offer.migration, why, "its memory is stuck");
            }
        }
    }

    /// Asks for what QEMU waits for again, over a new connection. Returns false if that is lost.
    fn ask_again(&mut self) -> bool {
        let asked = self.memory.as_ref().map(|it| it.memory.asked());
        let mut asked = asked.unwrap_or_default().into_iter();
        asked.all(|(region, range)| {
            let ranges = vec![range];
            self.post(ToSource::Want { region, ranges }).is_none()
        })
    }

    async fn loaded(&mut self, loaded: Result<(), DestinationQemuError>) {
        if loaded.is_ok() {
            self.pace.stepped(Instant::now());
            self.load_time = self.complete_at.map_or(Duration::ZERO, |at| at.elapsed());
            if self.offer.verify {
                self.entry.enter(Phase::Verifying);
            }
        }
        let loaded = loaded.map_err(|error| crate::channel::short(&error.to_string()));
        self.tell(Event::Loaded(loaded)).await;
    }

    async fn qemu_ended(&mut self) {
        let log = self.inbound.last_words();
        tracing::error!(migration = %self.offer.migration, "QEMU ended: {log}");
        self.inbound.forget_process();
        self.tell(Event::QemuGone).await;
    }

    /// Shows that only the source knows where the guest runs.
    fn show_doubt(&self) {
        let (guest, source) = (&self.offer.guest.name, self.entry.report().source);
        let text = format!("{guest} is all here and waits for {source}, which is gone");
        let error = ApiError::new(ErrorCode::InDoubt, text)
            .hint("it is decided as soon as the two agents meet: see `longhaul migrations`");
        let next = self.handover.ledger.terms.next();
        self.entry.in_doubt(HandoverRecord::Ready, next);
        self.entry.end(Outcome::InDoubt, Some(error));
    }

    async fn abort(&mut self, reason: String) {
        let reason = crate::channel::short(&reason);
        self.tell(Event::GiveUp(reason)).await;
    }

    /// Sends a message. Returns an event if the source is disconnected.
    fn post(&mut self, message: ToSource) -> Option<Event> {
        let call = self.call.as_mut()?;
        if let Err(error) = call.sender.send(&message) {
            tracing::info!(%error, "the source is gone");
            self.disconnect();
            return Some(Event::Lost { meant: None });
        }
        None
    }

    async fn send(&mut self, message: ToSource) {
        if let Some(lost) = self.post(message) {
            self.tell(lost).await;
        }
    }
}

pub(crate) async fn receive_from(
    receiving: &Receiving,
    epoch: Epoch,
    bulk: BulkReceiver,
) -> BulkEnd {
    match receiving.work(epoch, &bulk).await {
        ReceiveError::Lost(error) => BulkEnd::Lost(error),
        // The source is not at fault. It learns the reason when the attempt ends.
        error @ ReceiveError::Store(_) => BulkEnd::Broken(error.to_string(), Some(Box::new(bulk))),
        other => {
            bulk.close(longhaul_transport::CloseCode::Violation, &other.to_string());
            BulkEnd::Broken(other.to_string(), None)
        }
    }
}

pub(crate) async fn next_message(call: &mut Option<Call>) -> Result<ToDestination, TalkError> {
    match call {
        Some(call) => call.receiver.recv().await,
        None => std::future::pending().await,
    }
}

pub(crate) async fn join<T>(
    handle: &mut Option<JoinHandle<T>>,
) -> Result<T, tokio::task::JoinError> {
    match handle {
        Some(handle) => handle.await,
        None => std::future::pending().await,
    }
}
