//! A guest on its way in: one task from the offer to the running guest, or to nothing left over.
//!
//! ```text
//! offer -> checks -> Launching -> QEMU with -incoming -> Accepted
//!   -> frames into RAM -> Complete -> QEMU loads -> [compared] -> READY -> COMMIT -> runs
//! ```
//!
//! The task owns the guest's QEMU until the hand-over is over; [`Arrival`] is what others see of
//! it, so that a source that was cut off can come back over a new connection.

mod compare;
mod handover;
mod prepare;

use crate::channel::TalkError;
use crate::destination::Destination;
use crate::destination::dispatch::{Call, attempt_state};
use crate::destination::qemu::{Inbound, InboundError};
use crate::destination::receiver::{ReceiveError, Receiving};
use crate::disks::base_images::ComingBases;
use crate::handover::ledger::{DestinationHandover, retry_destination};
use crate::host::hooks::Step;
use crate::host::task::owning;
use crate::limits::peer_quota::{Admission, Pace};
use crate::status::migration::Entry;
use crate::status::registry::Reservation;
use longhaul_api::{ApiError, ErrorCode, HandoverRecord, Outcome, Phase, Resolve};
use longhaul_codec::unpack;
use longhaul_engine::handover::{DestinationEvent, DestinationState};
use longhaul_protocol::disk::OfferedDisk;
use longhaul_protocol::files::FileClaim;
use longhaul_protocol::limits::DEVICE_STATE_BYTES_MAX;
use longhaul_protocol::message::{self, Offer, ToDestination, ToSource};
use longhaul_protocol::{Attempt, Epoch, HostId, MigrationId};
use longhaul_transport::{BulkError, BulkOffer, BulkReceiver};
use prepare::Refused;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{Instant, sleep_until};

/// The epoch of the connection that brought the offer.
const FIRST_EPOCH: Epoch = Epoch(1);
/// How long a source gets to say that its journal is at its end, after an abort.
const CLOSE_WITHIN: Duration = Duration::from_secs(30);
/// Between two tries to write a record.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// What others see of an arrival.
pub(crate) struct Arrival {
    pub(crate) migration: MigrationId,
    pub(crate) attempt: Attempt,
    pub(crate) source: HostId,
    state: Mutex<DestinationState>,
    calls: mpsc::Sender<(Call, Option<Epoch>)>,
}

/// Lets the source of an arrival find it, until it is dropped.
pub(crate) struct Present {
    context: Arc<Destination>,
    arrival: Arc<Arrival>,
}

impl Present {
    pub(crate) fn new(context: &Arc<Destination>, arrival: Arc<Arrival>) -> Self {
        context.add_arrival(arrival.clone());
        let context = context.clone();
        Self { context, arrival }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        self.context.remove_arrival(&self.arrival);
    }
}

impl Arrival {
    /// How far it is.
    pub(crate) fn state(&self) -> DestinationState {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// One that is there again, and whoever takes the source's calls for it.
    pub(crate) fn again(
        (migration, attempt): (MigrationId, Attempt),
        source: HostId,
        state: &DestinationState,
    ) -> (Arc<Self>, mpsc::Receiver<(Call, Option<Epoch>)>) {
        let (calls, called) = mpsc::channel(4);
        let arrival = Arc::new(Self {
            migration,
            attempt,
            source,
            state: Mutex::new(state.clone()),
            calls,
        });
        (arrival, called)
    }

    pub(crate) fn set_state(&self, state: &DestinationState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state.clone();
    }

    /// The source is back over another connection, with an epoch if it has blocks to send.
    pub(crate) async fn resume(&self, call: Call, epoch: Option<Epoch>) {
        if let Err(mpsc::error::SendError((mut call, _))) = self.calls.send((call, epoch)).await {
            let state = attempt_state(&self.state());
            let message = ToSource::Status {
                attempt: self.attempt,
                state,
            };
            if let Err(error) = call.sender.send(&message).await {
                tracing::debug!(%error, "a source that came back went again");
            }
        }
    }
}

/// Deals with an offer, to its very end.
pub(crate) async fn receive(
    context: Arc<Destination>,
    mut call: Call,
    (offer, disks): (Offer, Vec<OfferedDisk>),
    files: Option<Vec<FileClaim>>,
) {
    let peer = call.control.peer().host.clone();
    let span = (offer.migration, offer.guest.name.clone());
    let offered = (offer, disks.as_slice());
    let prepared = prepare::prepare(&context, &mut call, offered, files.as_deref());
    let (task, bulk) = match prepared.await {
        Ok(prepared) => prepared,
        Err(Refused { refusal, bulk }) => {
            tracing::warn!(migration = %span.0, guest = span.1, peer = peer.name,
                "refused: {}", refusal.text);
            if let Err(error) = call.sender.send(&ToSource::Refused(refusal)).await {
                tracing::debug!(%error, "the source did not wait for the refusal");
            }
            drop(bulk);
            return;
        }
    };
    owning(task.run(call, bulk)).await;
}

struct Task {
    context: Arc<Destination>,
    entry: Arc<Entry>,
    arrival: Arc<Arrival>,
    present: Present,
    offer: Offer,
    handover: DestinationHandover,
    inbound: Inbound,
    /// What the guest's disks stand on; it is not stopped before that is here.
    bases: ComingBases,
    called: mpsc::Receiver<(Call, Option<Epoch>)>,
    resolutions: watch::Receiver<Option<Resolve>>,
    retry_at: Instant,
    /// When it was aborted.
    settled_at: Option<Instant>,
    call: Option<Call>,
    bulk: Option<JoinHandle<BulkEnd>>,
    /// A connection over which nothing more is taken.
    _broken: Option<Box<BulkReceiver>>,
    epoch: Epoch,
    patience: Duration,
    lost_at: Option<Instant>,
    /// How many bytes were sent early, and of how many bytes in all, as Complete says.
    tail_bytes: Option<(u32, u32)>,
    loading: Option<JoinHandle<Result<(), InboundError>>>,
    loaded: bool,
    /// Everything is here, and no frame changes anything any more.
    sealed: bool,
    /// ... and of disks it is durable.
    settled: bool,
    /// A part of the guest's disks may come when it runs here.
    pulls: bool,
    verified: bool,
    complete_at: Option<Instant>,
    load_time: Duration,
    commit_at: Option<Instant>,
    commit_time: Duration,
    /// The hook that runs beside the guest.
    running: Option<JoinHandle<()>>,
    /// What looks at the guest's clock.
    clock: Option<JoinHandle<Option<message::GuestClock>>>,
    pace: Arc<Pace>,
    /// What the guest holds of its sender's allowance.
    admission: Admission,
    reservation: Reservation,
}

/// How a bulk connection ended.
pub(crate) enum BulkEnd {
    Lost(BulkError),
    /// For this reason. A connection that is not at fault stays until the source has heard it.
    Broken(String, Option<Box<BulkReceiver>>),
}

enum Happened {
    Message(Result<ToDestination, TalkError>),
    Call(Option<Box<(Call, Option<Epoch>)>>),
    Bulk(BulkEnd),
    Everything,
    Loaded(Result<(), InboundError>),
    Settled(Result<(), String>),
    Bases(Result<(), String>),
    QemuEnded,
    PatienceOver,
    Retry,
    Cancelled,
    Resolved(Option<Resolve>),
}

impl Task {
    async fn run(mut self, call: Call, bulk: BulkOffer) {
        self.connected(call, FIRST_EPOCH, bulk);
        self.accept_if_so().await;
        while !self.over() {
            let happened = self.wait().await;
            self.handle(happened).await;
        }
        let runs = matches!(
            self.state(),
            DestinationState::Running { all_present: false }
        );
        match runs && self.pulls {
            true => self.pull().await,
            false => self.end().await,
        }
    }

    /// Says that the guest's QEMU waits, once it has all that it needs for that.
    async fn accept_if_so(&mut self) {
        let receiving = matches!(self.state(), DestinationState::Receiving { .. });
        if !receiving || !self.bases.are_here() {
            return;
        }
        let machine = Box::new(self.inbound.machine().clone());
        self.send(ToSource::Accepted { machine }).await;
    }

    fn over(&self) -> bool {
        match self.state() {
            DestinationState::Running { all_present: false } if self.pulls => true,
            DestinationState::Closed { .. } => true,
            // The source's DONE is waited for as long as it is there; it is answered from the
            // journal afterwards.
            DestinationState::Aborted | DestinationState::Running { all_present: true } => {
                self.call.is_none()
            }
            _ => false,
        }
    }

    /// Answers a source that is back with a token, and takes the connection that brings it into
    /// use.
    async fn reconnect(&mut self, mut call: Call, epoch: Epoch) {
        self.disconnect();
        let state = attempt_state(self.state());
        let resumed = |bulk_token| ToSource::Resumed { bulk_token, state };
        let attempt = (self.offer.migration, self.offer.attempt);
        match call.expect_bulk(attempt, epoch, resumed).await {
            Ok(bulk) => self.connected(call, epoch, bulk),
            Err(error) => {
                tracing::info!(%error, "the source cannot come back");
                self.lost_at.get_or_insert_with(Instant::now);
            }
        }
    }

    /// Takes a connection into use, and waits for the bulk connection that belongs to it.
    fn connected(&mut self, call: Call, epoch: Epoch, bulk: BulkOffer) {
        self.epoch = epoch;
        let receiving = self.inbound.receiving().clone();
        receiving.connected(epoch);
        self.bulk = Some(tokio::spawn(async move {
            match bulk.accept().await {
                Ok(bulk) => receive_from(&receiving, epoch, bulk).await,
                Err(error) => BulkEnd::Lost(error),
            }
        }));
        self.call = Some(call);
        if let Some(at) = self.lost_at.take() {
            self.pace.was_away(at.elapsed());
        }
    }

    fn disconnect(&mut self) {
        if let Some(bulk) = self.bulk.take() {
            bulk.abort();
        }
        self.call = None;
    }

    async fn wait(&mut self) -> Happened {
        let deadline = self.deadline();
        let receiving = self.inbound.receiving().clone();
        let ready_to_load = !self.loaded && self.loading.is_none() && self.complete_at.is_some();
        let mut cancelled = self.entry.cancelled();
        let may_abort = self.state().may_abort();
        let resolutions = &mut self.resolutions;
        let here = &self.context.parts.config.name;
        tokio::select! {
            message = next_message(&mut self.call) => Happened::Message(message),
            call = self.called.recv() => Happened::Call(call.map(Box::new)),
            end = join(&mut self.bulk) => {
                self.bulk = None;
                Happened::Bulk(end.unwrap_or_else(|error| BulkEnd::Broken(error.to_string(), None)))
            }
            () = receiving.completed(), if ready_to_load => Happened::Everything,
            loaded = join(&mut self.loading) => {
                self.loading = None;
                Happened::Loaded(loaded.unwrap_or_else(|error| {
                    Err(InboundError::Broken(error.to_string()))
                }))
            }
            settled = receiving.settled(), if self.sealed && !self.settled => {
                Happened::Settled(settled)
            }
            brought = self.bases.brought(here) => Happened::Bases(brought),
            () = self.inbound.ended() => Happened::QemuEnded,
            () = sleep_until(deadline) => Happened::PatienceOver,
            () = sleep_until(self.retry_at + RETRY_EVERY) => Happened::Retry,
            Ok(()) = resolutions.changed() => {
                Happened::Resolved(resolutions.borrow_and_update().clone())
            }
            Ok(_) = cancelled.wait_for(Option::is_some), if may_abort => {
                Happened::Cancelled
            }
        }
    }

    fn deadline(&self) -> Instant {
        let far = || Instant::now() + Duration::from_secs(86_400);
        match (self.state(), self.lost_at) {
            // After READY only the source decides, or a person.
            (DestinationState::Ready, Some(at)) if self.entry.outcome().is_none() => {
                at + self.patience
            }
            (DestinationState::Receiving { .. } | DestinationState::Readying, Some(at)) => {
                at + self.patience
            }
            (DestinationState::Running { .. }, Some(at)) => at,
            (DestinationState::Aborted, _) => {
                self.settled_at.map_or_else(far, |at| at + CLOSE_WITHIN)
            }
            (DestinationState::Running { .. }, None) if self.call.is_some() => self.pace.goodbye(),
            (DestinationState::Receiving { .. } | DestinationState::Readying, None) => {
                self.pace.deadline()
            }
            _ => far(),
        }
    }

    async fn handle(&mut self, happened: Happened) {
        match happened {
            Happened::Message(Ok(message)) => self.message(message).await,
            Happened::Message(Err(error)) => {
                tracing::info!(migration = %self.offer.migration, %error, "the source is gone");
                self.disconnect();
                self.lost_at.get_or_insert_with(Instant::now);
                if error.is_meant() && self.is_waiting() {
                    self.abort(error.to_string()).await;
                }
            }
            Happened::Call(Some(call)) => self.resumed(call.0, call.1).await,
            Happened::Call(None) => {}
            Happened::Bulk(BulkEnd::Lost(error)) => {
                tracing::info!(migration = %self.offer.migration, %error, "bulk is gone");
                if self.call.is_none() {
                    self.lost_at.get_or_insert_with(Instant::now);
                }
            }
            Happened::Bulk(BulkEnd::Broken(reason, bulk)) => {
                self._broken = bulk;
                self.abort(reason).await;
            }
            Happened::Everything => self.load().await,
            Happened::Loaded(Ok(())) => self.loaded().await,
            Happened::Loaded(Err(error)) => self.abort(error.to_string()).await,
            Happened::Settled(Ok(())) => {
                let receiving = self.inbound.receiving();
                // READY promises that whoever answers the guest knows what is missing, durably.
                let handed_on = block_in_place(|| receiving.hand_on(self.offer.verify));
                self.settled = true;
                match handed_on {
                    Ok(()) => self.ready_if_so().await,
                    Err(reason) => self.abort(reason).await,
                }
            }
            Happened::Settled(Err(reason)) => {
                // It will not get better, and is not to be asked again.
                self.settled = true;
                self.abort(reason).await;
            }
            Happened::Bases(Ok(())) => {
                self.accept_if_so().await;
                self.ready_if_so().await;
            }
            Happened::Bases(Err(reason)) => self.abort(reason).await,
            Happened::QemuEnded => self.qemu_ended().await,
            Happened::Resolved(resolve) => self.resolved(resolve).await,
            Happened::Retry => {
                self.retry_at = Instant::now();
                if !self.bases.are_here() {
                    // The source can only wait.
                    self.pace.stepped(Instant::now());
                }
                retry_destination(self).await;
                self.arrival.set_state(&self.handover.state);
            }
            Happened::PatienceOver => match self.state() {
                DestinationState::Running { .. } | DestinationState::Aborted => self.disconnect(),
                DestinationState::Ready => self.show_doubt(),
                _ if self.lost_at.is_none() => {
                    let stall = "the source is there and hardly sends anything (`stall` and \
                                 `move_time` under [limits] of the destination)";
                    self.abort(stall.to_owned()).await;
                }
                _ => {
                    self.abort("the source did not come back in time".to_owned())
                        .await
                }
            },
            Happened::Cancelled => {
                self.abort("it was cancelled at the destination".to_owned())
                    .await;
            }
        }
    }

    async fn resumed(&mut self, mut call: Call, epoch: Option<Epoch>) {
        self.entry.heard(None);
        let Some(epoch) = epoch else {
            // It has nothing to send, only to ask.
            self.disconnect();
            self.call = Some(call);
            self.lost_at = None;
            return self.step(DestinationEvent::Asked).await;
        };
        if epoch <= self.epoch {
            // The source tries again with a newer one. ABORTED is said only when it is durable.
            let (attempt, state) = (self.offer.attempt, attempt_state(self.state()));
            let message = ToSource::Status { attempt, state };
            if let Err(error) = call.sender.send(&message).await {
                tracing::debug!(%error, "a source that came too late went again");
            }
            return;
        }
        self.reconnect(call, epoch).await;
        self.accept_if_so().await;
        if self.loaded && self.is_waiting() {
            self.send(ToSource::Loaded).await;
        }
        self.step(DestinationEvent::Asked).await;
    }

    async fn message(&mut self, message: ToDestination) {
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
                if epoch != self.epoch {
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
            ToDestination::Verified => {
                self.verified = true;
                self.ready_if_so().await;
            }
            ToDestination::Commit {
                attempt,
                generation,
            } => {
                self.commit_at.get_or_insert_with(Instant::now);
                if generation != self.handover.ledger.terms.next() {
                    tracing::warn!(?generation, "a commit for another generation is ignored");
                    return;
                }
                self.step(DestinationEvent::Commit(attempt, generation))
                    .await;
            }
            ToDestination::Cancel { reason } => self.abort(reason).await,
            ToDestination::Done => self.step(DestinationEvent::Done).await,
            ToDestination::Overruled { generation } => {
                self.step(DestinationEvent::PeerOverruled(generation)).await;
            }
            ToDestination::List(list) => {
                let listed = self.inbound.receiving().listed(&list);
                self.keeps_to_the_protocol(listed).await;
            }
            ToDestination::Length { region, bytes } => {
                let taken = self.inbound.receiving().has_length(region, bytes);
                self.keeps_to_the_protocol(taken).await;
            }
            ToDestination::Query(_)
            | ToDestination::Offer(_)
            | ToDestination::OfferDisks(_)
            | ToDestination::QueryFiles(_)
            | ToDestination::OfferFiles(_)
            | ToDestination::Resume { .. }
            | ToDestination::Unreadable { .. }
            | ToDestination::Ask { .. } => {
                self.abort("the source breaks the protocol: a second beginning".to_owned())
                    .await;
            }
        }
    }

    /// Gives the attempt up if the source does not.
    async fn keeps_to_the_protocol(&mut self, kept: Result<(), String>) {
        if let Err(why) = kept {
            self.abort(format!("the source breaks the protocol: {why}"))
                .await;
        }
    }

    /// What QEMU is given after the prelude.
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

    async fn load(&mut self) {
        self.entry.enter(Phase::Loading);
        self.complete_at = Some(Instant::now());
        self.sealed = true;
        let receiving = self.inbound.receiving();
        block_in_place(|| receiving.seal());
        match self.tail() {
            Ok(tail) => self.loading = Some(tokio::spawn(self.inbound.load(tail))),
            Err(reason) => {
                self.abort(format!("the source breaks the protocol: {reason}"))
                    .await;
            }
        }
    }

    async fn loaded(&mut self) {
        self.loaded = true;
        self.pace.stepped(Instant::now());
        self.load_time = self.complete_at.map_or(Duration::ZERO, |at| at.elapsed());
        if self.offer.verify && !self.verified {
            self.entry.enter(Phase::Verifying);
        }
        self.send(ToSource::Loaded).await;
        self.ready_if_so().await;
    }

    async fn ready_if_so(&mut self) {
        let compared = self.verified || !self.offer.verify;
        let here = self.loaded && self.settled && self.bases.are_here();
        if here && compared && matches!(self.state(), DestinationState::Receiving { .. }) {
            self.entry.enter(Phase::HandingOver);
            match self.hook(Step::Ready).await {
                Ok(()) => self.step(DestinationEvent::Loaded).await,
                Err(error) => self.abort(error.message).await,
            }
        }
    }

    async fn qemu_ended(&mut self) {
        let log = self.inbound.last_words();
        tracing::error!(migration = %self.offer.migration, "QEMU ended: {log}");
        self.inbound.forget_process();
        self.step(DestinationEvent::QemuGone).await;
    }

    /// Whether more has to come before the source may decide.
    fn is_waiting(&self) -> bool {
        matches!(
            self.state(),
            DestinationState::Receiving { commit: None } | DestinationState::Readying
        )
    }

    /// Says that only the source knows where the guest runs.
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
        self.step(DestinationEvent::Abort(crate::channel::short(&reason)))
            .await;
    }

    async fn send(&mut self, message: ToSource) {
        let Some(call) = &mut self.call else { return };
        if let Err(error) = call.sender.send(&message).await {
            tracing::info!(%error, "the source is gone");
            self.disconnect();
            self.lost_at.get_or_insert_with(Instant::now);
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
        // The source did nothing wrong: it hears of it by the attempt's end.
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
