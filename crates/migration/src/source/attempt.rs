//! A guest on its way out: one task from the request to the guest's running elsewhere, or on here.
//!
//! ```text
//! Preparing -> Precopy -> Stopping -> Loading -> [Verifying] -> HandingOver -> Finishing
//!     \___________\___________\__________\____________\______/ abort: the guest runs on here
//! ```
//!
//! One loop owns everything: it waits for what happens, tells the engine and the hand-over, and
//! does what they say. A lost connection is made again beside it, within patience. Blocks are sent
//! while the destination still launches its QEMU; the guest is not stopped before that waits for
//! it.

mod drain;
mod handover;
mod launch_wait;
mod progress;
mod switchover;

use crate::channel::TalkError;
use crate::context::{Context, Holder};
use crate::handover::ledger::{SourceHandover, retry_source};
use crate::limits::bandwidth::Share;
use crate::source::acks::{AcknowledgeError, Acknowledging};
use crate::source::attempt::drain::next_of_rest;
use crate::source::attempt::switchover::Disks;
use crate::source::connect::{Attempted, Redial, Session, SessionError};
use crate::source::drain::Draining;
use crate::source::plan::Look;
use crate::source::qemu::{Outbound, Stopped};
use crate::source::retained_qemu::Departed;
use crate::source::sender::{Line, SendError, Sending};
use crate::source::verify::{Comparison, Next};
use crate::status::failure;
use crate::status::in_doubt::record_of;
use crate::status::migration::Entry;
use crate::status::registry::Reservation;
use longhaul_api::{ApiError, HandoverRecord, Outcome, Phase, Resolve};
use longhaul_engine::handover::{SourceEvent, SourceState, Terms};
use longhaul_engine::source::{Advice, Link};
use longhaul_engine::stop::StopReason;
use longhaul_hypervisor::memory::Event;
use longhaul_protocol::Epoch;
use longhaul_protocol::message::{AttemptState, Offer, Summary, ToDestination, ToSource};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// How often the engine is asked what to do next.
const TICK: Duration = Duration::from_millis(5);
/// How often what people see is brought up to date.
const SHOW_EVERY: Duration = Duration::from_millis(200);
/// How long a pass may take to begin.
const PASS_WITHIN: Duration = Duration::from_secs(3);
/// How long the destination gets to say that its journal is at its end.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// Between two tries to ask a destination that does not know yet, or cannot be asked.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// A guest is shown as in doubt when the destination has been silent for so long.
const DOUBT_AFTER: Duration = Duration::from_secs(3);
/// How long the destination's figures are waited for when everything else is done.
const SUMMARY_WITHIN: Duration = Duration::from_secs(2);
/// Between two tries to write a record.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// Everything that preparing has made.
pub(crate) struct Task {
    pub(crate) context: Arc<Context>,
    pub(crate) entry: Arc<Entry>,
    pub(crate) offer: Offer,
    pub(crate) host: String,
    pub(crate) outbound: Outbound,
    pub(crate) sending: Arc<Sending>,
    pub(crate) handover: SourceHandover,
    pub(crate) patience: Duration,
    pub(crate) downtime: Duration,
    /// What the guest's memory looks like; it is whole when nothing more comes.
    pub(crate) look: watch::Receiver<Look>,
    /// What of its disks will probably travel, in bytes.
    pub(crate) disk_bytes: u64,
    /// What the link was known to carry before, in bytes per second.
    pub(crate) known_rate: Option<f64>,
    /// Its part of what all moves may send.
    pub(crate) share: Share,
    pub(crate) reservation: Reservation,
}

/// A task at work.
pub(crate) struct Departure {
    task: Task,
    session: Option<Session>,
    epoch: Epoch,
    redial: Option<Redial>,
    lost_at: Option<Instant>,
    ticks: Interval,
    interruptions: u32,
    worker: JoinHandle<SendError>,
    acknowledging: Option<Acknowledging>,
    cancelled: watch::Receiver<Option<String>>,
    limits: watch::Receiver<Option<u64>>,
    resolutions: watch::Receiver<Option<Resolve>>,
    began: Instant,
    shown_at: Instant,
    retry_at: Instant,
    wire_bytes: (u64, u64),
    stopped: Option<StoppedAt>,
    announced: Option<(Epoch, u64)>,
    /// Since when the destination launches its QEMU; none once it has accepted the guest.
    launching: Option<Instant>,
    /// The pass after which another was asked for, and when.
    asked_pass: Option<(u32, Instant)>,
    disks: Disks,
    early: Option<Vec<u8>>,
    comparing: Option<Comparison>,
    /// Whether disks are still to be compared while the guest runs.
    compares_ahead: bool,
    verified: bool,
    failure: Option<ApiError>,
    summary: Option<Summary>,
    predicted: bool,
    /// The guest runs at the destination, which fetches what is left of its disks.
    draining: Option<Draining>,
    committed_at: Option<Instant>,
    /// Its QEMU, where that stands for what its memory held.
    departed: Option<Departed>,
    finished: bool,
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
    Redialled(Box<Result<(Session, AttemptState), SessionError>>),
    Compared(Next),
    Rest(ToDestination),
    Cancelled(String),
    Limit,
    Resolved(Option<Resolve>),
    QemuEnded,
    Tick,
}

impl Departure {
    /// Takes over from preparing: the destination launches its QEMU, the source's tracks writes.
    pub(crate) fn new(task: Task, session: Session) -> Self {
        let now = Instant::now();
        let acknowledging = session.line.clone().map(|line| {
            task.sending.connect(line.clone());
            Acknowledging::begin(task.sending.clone(), line)
        });
        let worker = tokio::spawn(task.sending.clone().work());
        let (cancelled, limits) = (task.entry.cancelled(), task.entry.limits());
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            epoch: session.line.as_ref().map_or(Epoch(1), |line| line.epoch),
            session: Some(session),
            redial: None,
            lost_at: None,
            ticks,
            interruptions: 0,
            worker,
            acknowledging,
            cancelled,
            limits,
            resolutions: task.entry.resolutions(),
            began: now,
            shown_at: now,
            retry_at: now,
            wire_bytes: (0, 0),
            stopped: None,
            announced: None,
            launching: Some(now),
            asked_pass: None,
            disks: Disks::default(),
            early: None,
            comparing: None,
            compares_ahead: task.offer.verify && !task.outbound.disks().is_empty(),
            verified: false,
            failure: None,
            summary: None,
            predicted: false,
            draining: None,
            committed_at: None,
            departed: None,
            finished: false,
            task,
        }
    }

    fn entry(&self) -> &Entry {
        &self.task.entry
    }

    /// What it may send, in bits per second.
    fn limit_bps(&self) -> Option<u64> {
        self.task.share.of(*self.limits.borrow())
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Moves the guest, or brings everything back to where it was.
    pub(crate) async fn run(mut self) {
        self.entry().enter(Phase::Precopy);
        let prelude = self.task.outbound.prelude().to_vec();
        self.send(ToDestination::Start { prelude }).await;
        while !self.finished {
            let happened = self.wait().await;
            self.handle(happened).await;
        }
        self.worker.abort();
        // Whoever settles the attempt asks for himself.
        self.redial = None;
        self.last_hook().await;
        self.close().await;
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
            // Before what may always be there: patience and retries must not wait for silence.
            _ = self.ticks.tick() => Happened::Tick,
            message = next_message(&mut self.session) => Happened::Message(message),
            error = ended(&mut self.acknowledging) => Happened::Acknowledging(error),
            event = self.task.outbound.event() => Happened::Guest(event),
            done = redialled(&mut self.redial) => {
                self.redial = None;
                Happened::Redialled(Box::new(done))
            }
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
                self.lost(&error.to_string());
            }
            Happened::Acknowledging(error) => {
                self.fail(failure::protocol(&self.task.host, &error)).await;
            }
            Happened::Message(Ok(message)) => self.message(message).await,
            Happened::Message(Err(TalkError::Wire(error))) => {
                self.fail(failure::protocol(&self.task.host, &error)).await;
            }
            Happened::Message(Err(error)) => self.lost(&error.to_string()),
            Happened::Worker(error) if self.draining.is_some() => {
                // Nothing can be given up any more: it is tried again.
                tracing::error!(migration = %self.task.offer.migration, %error, "sending broke");
                let sending = self.task.sending.clone();
                self.worker = tokio::spawn(async move {
                    tokio::time::sleep(RETRY_EVERY).await;
                    sending.work().await
                });
                self.come_again();
            }
            Happened::Worker(error) => {
                self.fail(failure::internal(&error.to_string())).await;
            }
            Happened::Redialled(result) => self.redialled(*result).await,
            Happened::Compared(next) => self.compare(next).await,
            Happened::Rest(message) => self.tell_of_rest(message).await,
            Happened::Cancelled(why) => self.fail(failure::cancelled(&why)).await,
            Happened::Resolved(resolve) => self.resolved(resolve).await,
            Happened::Limit => {
                if let Some(line) = self.line() {
                    line.bulk.set_bandwidth(self.limit_bps());
                }
            }
            Happened::QemuEnded => self.qemu_ended().await,
        }
    }

    // The engine.

    async fn tick(&mut self) {
        self.watch_patience().await;
        self.watch_launch().await;
        if self.retry_at.elapsed() >= RETRY_EVERY {
            self.retry_at = Instant::now();
            retry_source(self).await;
            self.finished |= self.state().is_over();
        }
        if self.finished || self.failure.is_some() {
            return;
        }
        let now = self.now();
        if let Some(line) = self.line() {
            let stats = line.bulk.stats();
            let queued_bytes = self.task.sending.queued_bytes();
            let (host, context) = (&self.task.host, &self.task.context);
            // What is delivered would be what the slowest makes of it: the encoder, the link, or
            // the destination.
            let possible = stats.path_rate_bps().map(|rate| rate / 8.0);
            if let Some(possible) = possible
                && queued_bytes > stats.congestion_window_bytes / 2
            {
                context.note_link_rate(host, possible);
            }
            let limit = self.limit_bps().map(|limit| limit as f64 / 8.0);
            if let Some(rate) = context.link_rate(host).or(possible) {
                self.task.sending.engine().link(Link {
                    rate_bytes_per_s: limit.map_or(rate, |limit| rate.min(limit)),
                    rtt: stats.rtt,
                    queued_bytes,
                });
            }
        }
        if self.shown_at.elapsed() >= SHOW_EVERY {
            self.show();
            if self.draining.is_none()
                && let Err(error) = self.task.outbound.check_disks()
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

    /// Asks QEMU for another pass. One that has nothing to report may not begin any: then what is
    /// known is all that there is.
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
        // Whole bursts at once: the reader has thousands of runs ready.
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

    // The destination.

    async fn message(&mut self, message: ToSource) {
        let attempt = self.task.offer.attempt;
        match message {
            ToSource::Missing(_) | ToSource::Want { .. } | ToSource::Superseded { .. } => {
                self.hear_of_left(&message);
            }
            ToSource::Digests { .. } if self.draining.is_some() => self.hear_of_left(&message),
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
            ToSource::Ready { attempt: of } => {
                if let Some(stopped) = &mut self.stopped {
                    stopped.ready_at.get_or_insert_with(Instant::now);
                }
                if self.task.offer.verify && !self.verified {
                    let error = "Ready before both copies were compared";
                    return self.fail(failure::protocol(&self.task.host, &error)).await;
                }
                self.entry().enter(Phase::HandingOver);
                self.ready(of).await;
            }
            ToSource::Committed { attempt: of } => {
                self.committed_at.get_or_insert_with(Instant::now);
                self.step(SourceEvent::Committed(of)).await;
                self.begin_draining();
            }
            ToSource::Aborted {
                attempt: of,
                reason,
            } => {
                if of == attempt && self.failure.is_none() {
                    self.failure = Some(failure::peer_gave_up(&self.task.host, &reason));
                }
                self.step(SourceEvent::PeerAborted(of)).await;
            }
            ToSource::AllPresent { attempt: of } => {
                self.committed_at.get_or_insert_with(Instant::now);
                self.step(SourceEvent::Committed(of)).await;
                self.step(SourceEvent::AllPresent(of)).await;
            }
            ToSource::Summary(summary) => {
                self.summary = Some(summary);
                if self.draining.is_some() {
                    self.come_again();
                }
            }
            ToSource::Clock(clock) => self.tell_clock(clock),
            ToSource::Accepted { machine } => self.accepted(&machine).await,
            ToSource::Refused(refusal) if self.launching.is_some() => self.refused(refusal).await,
            ToSource::Status { .. } | ToSource::Closed => {}
            ToSource::Answer(_)
            | ToSource::WantContent { .. }
            | ToSource::Launching { .. }
            | ToSource::Refused(_)
            | ToSource::Resumed { .. } => {
                let error = "an answer that nothing was asked for";
                self.fail(failure::protocol(&self.task.host, &error)).await;
            }
        }
    }

    /// While the guest runs, or once the destination has loaded, and as long as it can be asked.
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

    fn lost(&mut self, why: &str) {
        let Some(session) = self.session.take() else {
            return;
        };
        self.keep_wire_bytes(&session);
        self.acknowledging = None;
        self.task.sending.disconnect();
        if self.finished || self.state().is_over() {
            return;
        }
        tracing::warn!(migration = %self.task.offer.migration, why, "the connection is lost");
        self.interruptions += 1;
        self.lost_at.get_or_insert_with(Instant::now);
        self.redial(Duration::ZERO, self.limit_bps());
    }

    fn redial(&mut self, after: Duration, limit_bps: Option<u64>) {
        let (context, attempted) = (&self.task.context, self.attempted());
        self.redial = Some(Redial::begin(
            context,
            attempted,
            self.epoch,
            (after, limit_bps),
        ));
    }

    fn attempted(&self) -> Attempted {
        Attempted::of(&self.task.handover.ledger, self.state())
    }

    async fn watch_patience(&mut self) {
        let Some(at) = self.lost_at else {
            return;
        };
        if self.state().in_doubt() {
            return self.show_doubt(at);
        }
        if *self.state() == SourceState::Done && at.elapsed() > DOUBT_AFTER {
            // An operator who knows that it never comes back may take the guest back.
            let next = self.terms().next();
            return self.entry().in_doubt(HandoverRecord::Done, next);
        }
        if !self.state().may_abort() {
            return;
        }
        let patience = match &self.stopped {
            // The guest stands still: no longer than was asked for.
            Some(stopped) => self
                .task
                .downtime
                .saturating_sub(at.saturating_duration_since(stopped.at)),
            None => self.task.patience,
        };
        if at.elapsed() > patience && self.failure.is_none() {
            self.fail(failure::link_cut(
                &self.task.host,
                at.elapsed(),
                self.stopped.is_some(),
            ))
            .await;
        }
    }

    async fn redialled(&mut self, result: Result<(Session, AttemptState), SessionError>) {
        let attempt = self.task.offer.attempt;
        match result {
            Ok((session, state)) => {
                tracing::info!(migration = %self.task.offer.migration, ?state, "connected again");
                self.entry().heard(Some(record_of(state)));
                self.lost_at = None;
                // A destination that has everything is sent nothing again: its guest may run before
                // that comes.
                let receives = state == AttemptState::Receiving;
                if state == AttemptState::Committed {
                    self.begin_draining();
                }
                if let Some(line) = &session.line {
                    self.epoch = line.epoch;
                    if let Some(draining) = &mut self.draining {
                        draining.connected(line.clone());
                    }
                    if receives {
                        self.task.sending.connect(line.clone());
                    }
                    let sending = self.task.sending.clone();
                    self.acknowledging = Some(Acknowledging::begin(sending, line.clone()));
                }
                let bulk = session.line.is_some();
                self.session = Some(session);
                if receives {
                    self.announced = None;
                    let prelude = self.task.outbound.prelude().to_vec();
                    self.send(ToDestination::Start { prelude }).await;
                    if let Some(question) = self.comparing.as_ref().and_then(Comparison::unanswered)
                    {
                        self.send(question).await;
                    }
                    if self.verified {
                        self.send(ToDestination::Verified).await;
                    }
                }
                self.task.sending.wake();
                self.step(SourceEvent::Connected).await;
                if !bulk && state == AttemptState::Ready {
                    self.ready(attempt).await;
                }
            }
            Err(SessionError::Aborted(reason)) => {
                if self.failure.is_none() {
                    self.failure = Some(failure::peer_gave_up(&self.task.host, &reason));
                }
                self.step(SourceEvent::PeerAborted(attempt)).await;
            }
            Err(SessionError::Committed { all_present }) => {
                self.committed_at.get_or_insert_with(Instant::now);
                self.step(SourceEvent::Committed(attempt)).await;
                if all_present {
                    self.step(SourceEvent::AllPresent(attempt)).await;
                } else {
                    // It answers.
                    self.lost_at = self.lost_at.map(|_| Instant::now());
                    self.redial(ASK_EVERY, None);
                }
            }
            Err(error) if self.state().may_abort() => {
                self.fail(crate::source::connect::failure(&self.task.host, &error))
                    .await;
            }
            Err(error) => {
                // Released: there is no other way than to go on trying.
                tracing::error!(%error, "cannot ask the destination");
                self.entry().silent(&error.to_string());
                self.redial(ASK_EVERY, None);
            }
        }
    }

    fn state(&self) -> &SourceState {
        &self.task.handover.state
    }

    fn terms(&self) -> &Terms {
        &self.task.handover.ledger.terms
    }

    fn line(&self) -> Option<Arc<Line>> {
        self.session
            .as_ref()
            .and_then(|session| session.line.clone())
    }

    /// Says that only the destination knows where the guest runs, once that has lasted.
    fn show_doubt(&self, since: Instant) {
        if since.elapsed() > DOUBT_AFTER && self.entry().outcome().is_none() {
            let next = self.terms().next();
            self.entry().in_doubt(HandoverRecord::Released, next);
            let guest = &self.task.offer.guest.name;
            let doubt = Holder::InDoubt(self.task.host.clone());
            let reason = failure::not_here(guest, &doubt);
            self.entry().end(Outcome::InDoubt, Some(reason));
        }
    }

    async fn send(&mut self, message: ToDestination) {
        let Some(session) = &mut self.session else {
            return;
        };
        if let Err(error) = session.sender.send(&message).await {
            self.lost(&error.to_string());
        }
    }

    /// Waits until the destination has closed its journal too; false where it does not say so.
    async fn both_closed(&mut self) -> bool {
        let until = Instant::now() + CLOSE_WITHIN;
        while self.session.is_some() {
            let message = tokio::time::timeout_at(until, next_message(&mut self.session)).await;
            match message {
                Ok(Ok(ToSource::Closed)) => return true,
                Ok(Ok(ToSource::Summary(summary))) => self.summary = Some(summary),
                Ok(Ok(ToSource::Clock(clock))) => self.tell_clock(clock),
                // What it says of the attempt decides whether it may forget it.
                Ok(Ok(ToSource::Aborted { attempt, .. })) => {
                    self.step(SourceEvent::PeerAborted(attempt)).await;
                }
                Ok(Ok(ToSource::Committed { attempt })) => {
                    self.step(SourceEvent::Committed(attempt)).await;
                }
                Ok(Ok(ToSource::AllPresent { attempt })) => {
                    self.step(SourceEvent::AllPresent(attempt)).await;
                }
                Ok(Ok(_)) => {}
                Ok(Err(_)) | Err(_) => return false,
            }
        }
        false
    }
}

async fn next_message(session: &mut Option<Session>) -> Result<ToSource, TalkError> {
    match session {
        Some(session) => session.receiver.recv().await,
        None => std::future::pending().await,
    }
}

async fn next_comparison(comparing: &mut Option<Comparison>) -> Next {
    match comparing {
        Some(comparing) => comparing.next().await,
        None => std::future::pending().await,
    }
}

/// Waits until acknowledgements end.
async fn ended(acknowledging: &mut Option<Acknowledging>) -> AcknowledgeError {
    let error = match acknowledging {
        Some(acknowledging) => acknowledging.ended().await,
        None => std::future::pending().await,
    };
    *acknowledging = None;
    error
}

async fn redialled(redial: &mut Option<Redial>) -> Result<(Session, AttemptState), SessionError> {
    match redial {
        Some(redial) => redial.done().await,
        None => std::future::pending().await,
    }
}
