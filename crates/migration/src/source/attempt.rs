//! The attempt of a departing guest: one task, from the request until the guest runs at the
//! destination or continues to run here.
//!
//! ```text
//! Preparing -> Precopy -> Stopping -> Loading -> [Verifying] -> HandingOver -> Finishing
//!     \___________\___________\__________\____________\______/ abort: the guest runs here
//! ```
//!
//! One loop owns all state. It waits for events, passes them to the engine and to the core of the
//! handover, and carries out their decisions. A lost connection is made again in a task of its own,
//! for as long as the patience of the request lasts. Blocks are sent while the destination still
//! launches its QEMU. The guest is stopped only after that QEMU waits for it.

mod drain;
mod expected_use;
mod handover;
mod launch_wait;
mod prediction;
mod progress;
mod switchover;

use crate::channel::TalkError;
use crate::handover::ledger::{SourceHandover, drive_source, time_source};
use crate::host::right::Holder;
use crate::limits::bandwidth::Share;
use crate::source::Source;
use crate::source::acks::{AcknowledgeError, Acknowledging};
use crate::source::attempt::drain::next_of_rest;
use crate::source::attempt::switchover::Disks;
use crate::source::companion::Companions;
use crate::source::connect::{self, Dial, Dialled, Session, dialled, next_message};
use crate::source::drain::Drain;
use crate::source::memory_copy::Copying;
use crate::source::prediction::{Look, Predicted};
use crate::source::qemu::{SourceQemu, Stopped};
use crate::source::retained_qemu::RetainedQemu;
use crate::source::sample::Sampled;
use crate::source::sender::{Line, SendError, Sending};
use crate::source::verify::{Comparison, Next};
use crate::status::in_doubt::record_of;
use crate::status::migration::Entry;
use crate::status::registry::Reservation;
use crate::status::{failure, faults, in_doubt};
use longhaul_api::{ApiError, HandoverRecord, Outcome, Phase, Resolve};
use longhaul_attempt::source::{Event as CoreEvent, FromDestination};
use longhaul_engine::handover::{SourceState, Terms};
use longhaul_engine::source::{Advice, Link};
use longhaul_engine::stop::StopReason;
use longhaul_hypervisor::memory::Event;
use longhaul_protocol::Epoch;
use longhaul_protocol::disk::Remaining;
use longhaul_protocol::message::{AttemptState, Offer, Summary, ToDestination, ToSource, Used};
use longhaul_transport::{LinkGauge, LinkRate, PathTo};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// Interval at which the engine is asked for advice.
const TICK: Duration = Duration::from_millis(5);
/// Interval at which the shown progress is updated.
const SHOW_EVERY: Duration = Duration::from_millis(200);
/// Time limit for QEMU to begin a pass.
const PASS_WITHIN: Duration = Duration::from_secs(3);
/// Time limit for the destination's last messages before the report is written.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the destination's summary when everything else is done.
const SUMMARY_WITHIN: Duration = Duration::from_secs(2);
/// Time without a connection after which the destination is shown as lost.
const LOST_AFTER: Duration = Duration::from_secs(3);
/// Delay before a failed sending worker is restarted.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// The result of preparing.
pub(crate) struct Task {
    pub(crate) source: Arc<Source>,
    pub(crate) entry: Arc<Entry>,
    pub(crate) offer: Offer,
    pub(crate) host: String,
    pub(crate) outbound: SourceQemu,
    pub(crate) companions: Companions,
    pub(crate) sending: Arc<Sending>,
    pub(crate) handover: SourceHandover,
    pub(crate) downtime: Duration,
    /// Findings about the guest's memory. They are complete when the channel is closed.
    pub(crate) look: watch::Receiver<Look>,
    /// Its disks, by a sample; `None` if none moves.
    pub(crate) sampled_disks: Option<Sampled>,
    /// Whether the destination may have content of the guest.
    pub(crate) keeps: bool,
    /// Whether memory may follow the guest.
    pub(crate) may_follow: bool,
    /// Rate of the link known from before, in bytes per second.
    pub(crate) known_rate: Option<LinkRate>,
    /// This move's share of the bandwidth for all moves.
    pub(crate) share: Share,
    pub(crate) reservation: Reservation,
}

/// A running attempt at the source.
pub(crate) struct SourceAttempt {
    task: Task,
    session: Option<Session>,
    dial: Option<Dial>,
    /// Whether the session begins with the lists of missing blocks, so that the drain uses it.
    begins_with_missing: bool,
    ticks: Interval,
    interruptions: u32,
    worker: JoinHandle<SendError>,
    acknowledging: Option<Acknowledging>,
    cancelled: watch::Receiver<Option<String>>,
    limits: watch::Receiver<Option<u64>>,
    resolutions: watch::Receiver<Option<Resolve>>,
    began: Instant,
    shown_at: Instant,
    wire_bytes: (u64, u64),
    /// Bytes that earlier carriers sent over each network path.
    path_bytes: BTreeMap<PathTo, u64>,
    stopped: Option<StoppedAt>,
    announced: Option<(Epoch, u64)>,
    /// Whether what the guest uses next has been looked for.
    expects: bool,
    /// Whether the destination loads the guest, and takes memory that follows.
    loading: bool,
    /// The least round-trip time over the connection of an epoch.
    least_rtt: Option<(Epoch, Duration)>,
    /// Whether frames that come for the guest are passed on: from COMMIT until QEMU ends.
    passes_on: bool,
    /// The pass that was current when another was requested, and the time of the request.
    asked_pass: Option<(u32, Instant)>,
    disks: Disks,
    early: Option<Vec<u8>>,
    comparing: Option<Comparison>,
    /// Whether disks have yet to be compared while the guest runs.
    compares_ahead: bool,
    verified: bool,
    /// The error behind the event that is being passed to the core.
    failing: Option<ApiError>,
    failure: Option<ApiError>,
    summary: Option<Summary>,
    /// What the move had cost at the destination when no block was missing any more.
    used: Option<Used>,
    /// The rate of the link in this move, in bytes per second.
    gauge: LinkGauge,
    predicted: Option<Predicted>,
    /// Whether the strategy of the memory was judged by how fast the guest writes.
    judged: bool,
    /// The missing blocks of its memory, by region, as they were listed last.
    listed: Vec<Vec<Remaining>>,
    /// The drain of memory and disks, once the guest runs at the destination.
    draining: Option<Drain>,
    /// The copy of memory that follows to its file.
    copying: Option<Copying>,
    committed_at: Option<Instant>,
    /// The QEMU that is retained until the guest's memory is cached.
    departed: Option<RetainedQemu>,
    /// Whether the guest could not be resumed. It is tried again without this task.
    unresumed: bool,
    /// Whether both journals are complete.
    closed: bool,
    /// The session over which that was heard. The guest's rate may come over it later.
    parting: Option<Session>,
}

struct StoppedAt {
    at: Instant,
    what: Stopped,
    loaded_at: Option<Instant>,
    ready_at: Option<Instant>,
}

enum Happened {
    Guest(Event),
    Acknowledging(AcknowledgeError),
    Message(Result<ToSource, TalkError>),
    Worker(SendError),
    Dialled(Box<Dialled>),
    Compared(Next),
    Rest(ToDestination),
    Cancelled(String),
    Limit,
    Resolved(Option<Resolve>),
    QemuEnded,
    Tick,
}

impl SourceAttempt {
    /// Creates the task after preparing: the destination launches its QEMU, and QEMU at the source
    /// tracks writes.
    pub(crate) fn new(task: Task, session: Session) -> Self {
        let now = Instant::now();
        let sending = &task.sending;
        let acknowledging = session.line.clone();
        let acknowledging = acknowledging.map(|line| Acknowledging::begin(sending.clone(), line));
        let worker = tokio::spawn(task.sending.clone().work());
        let (cancelled, limits) = (task.entry.cancelled(), task.entry.limits());
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            session: Some(session),
            dial: None,
            begins_with_missing: false,
            ticks,
            interruptions: 0,
            worker,
            acknowledging,
            cancelled,
            limits,
            resolutions: task.entry.resolutions(),
            began: now,
            shown_at: now,
            wire_bytes: (0, 0),
            path_bytes: BTreeMap::new(),
            stopped: None,
            announced: None,
            expects: false,
            loading: false,
            least_rtt: None,
            passes_on: false,
            asked_pass: None,
            disks: Disks::default(),
            early: None,
            comparing: None,
            compares_ahead: task.offer.verify && !task.outbound.disks().is_empty(),
            verified: false,
            failing: None,
            failure: None,
            summary: None,
            used: None,
            gauge: LinkGauge::default(),
            predicted: None,
            judged: false,
            listed: Vec::new(),
            draining: None,
            copying: None,
            committed_at: None,
            departed: None,
            unresumed: false,
            closed: false,
            parting: None,
            task,
        }
    }

    fn entry(&self) -> &Entry {
        &self.task.entry
    }

    /// Returns the bandwidth limit of this move, in bits per second.
    fn limit_bps(&self) -> Option<u64> {
        self.task.share.of(*self.limits.borrow())
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Moves the guest, or restores the state from before the move.
    pub(crate) async fn run(mut self) {
        self.entry().enter(Phase::Precopy);
        self.seek_code();
        drive_source(&mut self).await;
        while !self.is_decided() {
            let happened = self.wait().await;
            self.handle(happened).await;
        }
        self.worker.abort();
        let here = *self.state() != SourceState::Closed { here: false };
        self.task.companions.finished(here).await;
        self.close().await;
    }

    /// Returns whether it is decided where the guest runs, and nothing more is done with its QEMU
    /// here.
    fn is_decided(&self) -> bool {
        let overruled = *self.state() == SourceState::Overruled;
        self.task.handover.core.is_over() || overruled || self.unresumed
    }

    /// Returns an error if the move cannot succeed any more.
    fn watch(&self) -> Result<(), ApiError> {
        self.task.companions.watch()?;
        self.task.outbound.check_disks()
    }

    // Waiting.

    async fn wait(&mut self) -> Happened {
        let may_cancel = self.state().may_abort();
        tokio::select! {
            biased;
            Ok(why) = self.cancelled.wait_for(Option::is_some), if may_cancel => {
                Happened::Cancelled(why.clone().unwrap_or_default())
            }
            Ok(()) = self.resolutions.changed() => {
                Happened::Resolved(self.resolutions.borrow_and_update().clone())
            }
            Ok(()) = self.limits.changed() => {
                self.limits.borrow_and_update();
                Happened::Limit
            }
            () = self.task.share.changed() => Happened::Limit,
            error = &mut self.worker, if self.failure.is_none() => {
                Happened::Worker(error.unwrap_or_else(|error| {
                    SendError::Content(format!("a part of the agent broke: {error}"))
                }))
            }
            // Polled before the events that may always be ready, so that these cannot delay
            // patience and retries.
            _ = self.ticks.tick() => Happened::Tick,
            message = next_message(&mut self.session) => Happened::Message(message),
            error = ended(&mut self.acknowledging) => Happened::Acknowledging(error),
            event = self.task.outbound.event() => Happened::Guest(event),
            done = dialled(&mut self.dial) => Happened::Dialled(Box::new(done)),
            next = next_comparison(&mut self.comparing), if self.may_compare() => {
                Happened::Compared(next)
            }
            message = next_of_rest(&mut self.draining), if self.session.is_some() => {
                Happened::Rest(message)
            }
            () = self.task.outbound.qemu_ended() => Happened::QemuEnded,
        }
    }

    async fn handle(&mut self, happened: Happened) {
        match happened {
            Happened::Tick => self.tick().await,
            Happened::Guest(event) => self.guest(event).await,
            Happened::Acknowledging(AcknowledgeError::Lost(error)) => {
                self.lost(&error.to_string()).await;
            }
            Happened::Acknowledging(error) => {
                self.fail(failure::protocol(&self.task.host, &error)).await;
            }
            Happened::Message(Ok(message)) => self.message(message).await,
            Happened::Message(Err(TalkError::Wire(error))) => {
                self.fail(failure::protocol(&self.task.host, &error)).await;
            }
            Happened::Message(Err(error)) => self.lost(&error.to_string()).await,
            Happened::Worker(error) => self.sending_broke(error).await,
            Happened::Dialled(done) => self.dialled(*done).await,
            Happened::Compared(next) => self.compare(next).await,
            Happened::Rest(message) => self.tell_of_rest(message).await,
            Happened::Cancelled(why) => self.fail(failure::cancelled(&why)).await,
            Happened::Resolved(resolve) => self.resolved(resolve).await,
            Happened::Limit => {
                if let Some(line) = self.line() {
                    line.carrier.set_bandwidth(self.limit_bps());
                }
            }
            Happened::QemuEnded => self.qemu_ended().await,
        }
    }

    // The engine.

    async fn tick(&mut self) {
        time_source(self).await;
        if let Some(lost) = self.send_held() {
            self.tell(lost).await;
        }
        if self.is_disconnected() {
            // If the destination never returns, an operator may reclaim the guest.
            let next = self.terms().next();
            self.entry().in_doubt(HandoverRecord::Done, next);
        }
        if self.is_decided() || self.failure.is_some() {
            return;
        }
        let now = self.now();
        if let Some(line) = self.line() {
            let stats = line.carrier.stats();
            let queued_bytes = self.task.sending.queued_bytes();
            let (host, context) = (&self.task.host, &self.task.source);
            // The delivery rate is that of the slowest part: the encoder, the link or the
            // destination. The path's rate is that of the link alone. It is noted only while more
            // than half a window is queued.
            let possible = stats.path_rate_bps.map(|rate| rate / 8.0);
            if let Some(possible) = possible
                && queued_bytes > stats.window_bytes / 2
            {
                context.note_link_rate(host, possible);
                self.gauge.add(now, stats.rtt, possible);
            }
            let limit = self.limit_bps().map(|limit| limit as f64 / 8.0);
            let known = context.link_rate(host);
            let least = self.least_rtt.filter(|(of, _)| *of == line.epoch);
            let least = least.map_or(stats.rtt, |(_, rtt)| rtt.min(stats.rtt));
            // Of memory that follows, no more is on the way than the link carries. A rate that is
            // known to be too low, or a queue, would stay.
            let (rate, rtt) = match self.stopped {
                Some(_) => {
                    let rates = [known, possible].into_iter().flatten();
                    (rates.reduce(f64::max), least)
                }
                None => (known.or(possible), stats.rtt),
            };
            if let Some(rate) = rate {
                self.task.sending.engine().link(Link {
                    rate_bytes_per_s: limit.map_or(rate, |limit| rate.min(limit)),
                    rtt,
                    queued_bytes,
                });
            }
            self.least_rtt = Some((line.epoch, least));
        }
        if self.shown_at.elapsed() >= SHOW_EVERY {
            if let Some(line) = self.line().filter(|_| self.draining.is_some()) {
                let (stats, in_flight_bytes) =
                    (line.carrier.stats(), self.task.sending.queued_bytes());
                let ready = line.carrier.frames_in_hand();
                tracing::debug!(?stats, in_flight_bytes, ready, "the link of the drain");
            }
            self.show();
            if self.draining.is_none()
                && let Err(error) = self.watch()
            {
                return self.fail(error).await;
            }
        }
        if self.draining.is_some() {
            return self.drain().await;
        }
        if self.stopped.is_some() {
            self.announce().await;
            return;
        }
        self.judge_strategy();
        let advice = {
            let mut engine = self.task.sending.engine();
            engine.unseen(self.task.outbound.unseen(now));
            engine.advise(now)
        };
        self.send_early().await;
        self.flush_disks();
        match advice {
            Advice::Send => self.task.sending.wake(),
            Advice::Wait | Advice::Complete => {}
            Advice::ReadPass => {
                if self.session.is_some() {
                    self.read_pass().await;
                }
            }
            Advice::Stop(reason) => self.stop_if_it_may(reason).await,
        }
    }

    /// Asks QEMU for another pass. QEMU may begin none when it has no writes to report. If none
    /// begins within [`PASS_WITHIN`], all writes are known, and the guest may be stopped.
    async fn read_pass(&mut self) {
        let pass = self.task.sending.engine().pass_number();
        let (asked_for, at) = *self.asked_pass.get_or_insert((pass, Instant::now()));
        if asked_for != pass {
            self.asked_pass = Some((pass, Instant::now()));
        } else if at.elapsed() > PASS_WITHIN {
            return self.stop_if_it_may(StopReason::LocalMinimum).await;
        }
        self.task.outbound.next_pass();
    }

    async fn guest(&mut self, event: Event) {
        let now = self.now();
        let mut next = Some(event);
        // Handles all events that are ready, because the reader may have thousands of runs.
        while let Some(event) = next {
            let noted = self
                .task
                .outbound
                .note(event, &mut self.task.sending.engine(), now);
            if let Err(error) = noted {
                return self.fail(error.into_api()).await;
            }
            next = self.task.outbound.try_event();
        }
        self.task.sending.wake();
    }

    /// Gives up the attempt. If that is no longer possible, sending is tried again, over another
    /// connection: the destination says then what it lacks.
    async fn sending_broke(&mut self, error: SendError) {
        if self.draining.is_none() {
            self.fail(failure::internal(&error.to_string())).await;
        }
        if self.failure.is_some() {
            return;
        }
        tracing::error!(migration = %self.task.offer.migration, %error, "sending broke");
        let sending = self.task.sending.clone();
        self.worker = tokio::spawn(async move {
            tokio::time::sleep(RETRY_EVERY).await;
            sending.work().await
        });
        match self.draining {
            Some(_) => self.tell(CoreEvent::Reconnect).await,
            None => self.lost(&error.to_string()).await,
        }
    }

    // The destination.

    async fn message(&mut self, message: ToSource) {
        if let Some(decided) = FromDestination::of(&message) {
            return self.decided(decided, message).await;
        }
        match message {
            ToSource::Want { region, ranges } if self.draining.is_none() => {
                self.asked_for(region, &ranges).await;
            }
            ToSource::Missing(_) | ToSource::Want { .. } | ToSource::Superseded { .. } => {
                self.hear_of_left(&message).await;
            }
            ToSource::Digests { .. } if self.draining.is_some() => {
                self.hear_of_left(&message).await;
            }
            ToSource::Loading if self.announced.is_some() => self.loading(),
            ToSource::Loaded => {
                if let Some(stopped) = &mut self.stopped {
                    stopped.loaded_at.get_or_insert_with(Instant::now);
                }
            }
            ToSource::Digests {
                region,
                range,
                digests,
            } => {
                if let Some(comparing) = &mut self.comparing {
                    comparing.answered(region, range, digests);
                }
            }
            ToSource::Summary(summary) => {
                self.summary = Some(summary);
                if self.draining.as_ref().is_some_and(|drain| !drain.goes_on()) {
                    self.tell(CoreEvent::Reconnect).await;
                }
            }
            ToSource::Clock(clock) => self.tell_clock(clock),
            ToSource::Rate(rate) => self.tell_rate(rate),
            ToSource::Used(used) => self.used = Some(used),
            ToSource::Faults(said) => {
                let memory = self.task.outbound.regions();
                let entry = self.entry();
                entry.report_with(|report| faults::report(&said, memory, report));
            }
            _ => {
                let error = "an answer that nothing was asked for";
                self.fail(failure::protocol(&self.task.host, &error)).await;
            }
        }
    }

    /// Handles a message that the core decides about.
    async fn decided(&mut self, decided: FromDestination, message: ToSource) {
        match message {
            ToSource::Ready { .. } => {
                if let Some(stopped) = &mut self.stopped {
                    stopped.ready_at.get_or_insert_with(Instant::now);
                }
            }
            ToSource::Committed { .. } | ToSource::AllPresent { .. } => {
                self.committed_at.get_or_insert_with(Instant::now);
            }
            ToSource::Accepted { machine } if self.is_launching() => {
                self.tell(CoreEvent::Message(decided)).await;
                return self.accepted(&machine).await;
            }
            ToSource::Refused(refusal) if self.is_launching() => self.refused(refusal),
            ToSource::Refused(_) => {
                let error = "an answer that nothing was asked for";
                return self.fail(failure::protocol(&self.task.host, &error)).await;
            }
            _ => {}
        }
        self.tell(CoreEvent::Message(decided)).await;
    }

    /// Returns whether a comparison may ask the destination: it is connected, and the guest runs or
    /// the destination has loaded it.
    fn may_compare(&self) -> bool {
        let stopped = self.stopped.as_ref();
        let may = stopped.is_none_or(|stopped| stopped.loaded_at.is_some());
        may && self.session.is_some()
    }

    async fn compare(&mut self, next: Next) {
        match next {
            Next::Ask(question) => {
                if self.entry().phase() == Phase::Loading {
                    self.entry().enter(Phase::Verifying);
                }
                self.send(question).await;
            }
            Next::Done(Ok(_)) if self.compares_ahead => {
                self.comparing = None;
                self.compares_ahead = false;
            }
            Next::Done(Ok(compared)) => {
                self.comparing = None;
                let result = compared.result();
                self.entry()
                    .report_with(|report| report.verify = Some(result.clone()));
                if result.different_blocks == 0 {
                    self.verified = true;
                    self.tell(CoreEvent::Verified).await;
                    self.send(ToDestination::Verified).await;
                } else {
                    self.fail(failure::different(&result)).await;
                }
            }
            Next::Done(Err(error)) => {
                self.comparing = None;
                self.fail(failure::internal(&error)).await;
            }
        }
    }

    // The connection.

    async fn lost(&mut self, why: &str) {
        if self.let_go(why) {
            self.tell(CoreEvent::Lost).await;
        }
    }

    /// Drops a lost connection. Returns false if there was none.
    fn let_go(&mut self, why: &str) -> bool {
        let Some(session) = self.session.take() else {
            return false;
        };
        self.keep_wire_bytes(&session);
        self.acknowledging = None;
        if !self.is_decided() {
            tracing::warn!(migration = %self.task.offer.migration, why, "the connection is lost");
            self.interruptions += 1;
        }
        true
    }

    /// Closes the connection and stops connecting.
    fn hang_up(&mut self) {
        if let Some(session) = self.session.take() {
            self.keep_wire_bytes(&session);
            let moved = *self.state() == SourceState::Closed { here: false };
            self.parting = Some(session).filter(|_| moved);
        }
        self.acknowledging = None;
        self.dial = None;
    }

    async fn dialled(&mut self, done: Dialled) {
        match done {
            Ok((session, state)) => {
                let migration = self.task.offer.migration;
                tracing::info!(%migration, ?state, "connected again");
                self.entry().heard(state.map(record_of));
                let line = session.line.clone();
                let epoch = line.as_ref().map(|line| line.epoch);
                self.begins_with_missing = line.is_some() && state == Some(AttemptState::Committed);
                if let Some(line) = line {
                    let sending = self.task.sending.clone();
                    self.acknowledging = Some(Acknowledging::begin(sending, line));
                }
                if state == Some(AttemptState::Committed) {
                    self.committed_at.get_or_insert_with(Instant::now);
                }
                self.session = Some(session);
                self.tell(CoreEvent::Connected { epoch, state }).await;
                self.task.sending.wake();
            }
            Err(error) => {
                if matches!(error, connect::SessionError::Committed { .. }) {
                    self.committed_at.get_or_insert_with(Instant::now);
                } else {
                    tracing::debug!(migration = %self.task.offer.migration, %error, "not back yet");
                    self.entry().silent(&error.to_string());
                }
                self.failing = Some(connect::failure(&self.task.host, &error));
                self.tell(CoreEvent::DialFailed(error.to_core())).await;
                self.failing = None;
            }
        }
    }

    fn state(&self) -> &SourceState {
        self.task.handover.state()
    }

    fn terms(&self) -> &Terms {
        &self.task.handover.ledger.terms
    }

    fn line(&self) -> Option<Arc<Line>> {
        self.session
            .as_ref()
            .and_then(|session| session.line.clone())
    }

    /// Returns whether the destination, which runs the guest and needs blocks from here, has been
    /// gone for longer than [`LOST_AFTER`].
    pub(crate) fn is_disconnected(&self) -> bool {
        let lost_for = self.task.handover.lost_for();
        let lost = lost_for.is_some_and(|time| time > LOST_AFTER);
        lost && *self.state() == SourceState::Done
    }

    fn is_launching(&self) -> bool {
        self.task.handover.core.is_launching()
    }

    /// Shows that only the destination knows where the guest runs.
    fn show_doubt(&self) {
        if self.entry().outcome().is_none() {
            let next = self.terms().next();
            self.entry().in_doubt(HandoverRecord::Released, next);
            let guest = &self.task.offer.guest.name;
            let doubt = Holder::InDoubt(self.task.host.clone());
            let reason = failure::not_here(guest, &doubt);
            self.entry().end(Outcome::InDoubt, Some(reason));
            if self.task.handover.core.released_to().is_some() {
                self.entry().arbiter(&in_doubt::arbiter_is_asked());
            }
        }
    }

    /// Sends a message. Returns `Lost` if this shows that the connection is lost.
    fn post(&mut self, message: ToDestination) -> Option<CoreEvent> {
        let session = self.session.as_mut()?;
        if let Err(error) = session.sender.send(&message) {
            return self.let_go(&error.to_string()).then_some(CoreEvent::Lost);
        }
        None
    }

    async fn send(&mut self, message: ToDestination) {
        if let Some(lost) = self.post(message) {
            self.tell(lost).await;
        }
    }

    /// Waits for the destination's last messages, until the destination has closed its journal.
    async fn hear_last_messages(&mut self) {
        let until = Instant::now() + CLOSE_WITHIN;
        while self.session.is_some() && !self.closed && self.task.handover.core.is_over() {
            let message = tokio::time::timeout_at(until, next_message(&mut self.session)).await;
            match message {
                Ok(Ok(ToSource::Summary(summary))) => self.summary = Some(summary),
                Ok(Ok(ToSource::Clock(clock))) => self.tell_clock(clock),
                Ok(Ok(ToSource::Rate(rate))) => self.tell_rate(rate),
                Ok(Ok(message)) => {
                    if let Some(decided) = FromDestination::of(&message) {
                        self.tell(CoreEvent::Message(decided)).await;
                    }
                }
                Ok(Err(error)) => self.lost(&error.to_string()).await,
                Err(_) => return,
            }
        }
    }
}

async fn next_comparison(comparing: &mut Option<Comparison>) -> Next {
    match comparing {
        Some(comparing) => comparing.next().await,
        None => std::future::pending().await,
    }
}

/// Waits until no more acknowledgements come.
async fn ended(acknowledging: &mut Option<Acknowledging>) -> AcknowledgeError {
    let error = match acknowledging {
        Some(acknowledging) => acknowledging.ended().await,
        None => std::future::pending().await,
    };
    *acknowledging = None;
    error
}
