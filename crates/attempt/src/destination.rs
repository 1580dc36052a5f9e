//! The destination's end of an attempt.
//!
//! ```text
//! receiving -> loaded, settled, base images here, compared -> READY -> COMMIT -> runs
//!   runs, with blocks missing -> fetches them -> ALL-PRESENT -> both journals are closed
//! ```
//!
//! Fetching is a state of this type, and so is waiting for the source after a restart.

mod messages;

pub use messages::{Action, Config, Event, FromSource, Note};

use crate::durable::{Durable, Order};
use crate::source::Claimed;
use longhaul_engine::handover::{
    DestinationAction as Step, DestinationEvent, DestinationState, Record, Terms, step_destination,
};
use longhaul_protocol::message::{AttemptState, ToSource};
use longhaul_protocol::{Epoch, StoreId};
use std::collections::VecDeque;
use std::time::Duration;

/// A source whose data cannot be taken is let in again after this time.
const PAUSE: Duration = Duration::from_secs(2);
/// How long an aborted or complete attempt waits for its source's last message.
const GOODBYE_WITHIN: Duration = Duration::from_secs(30);

/// The destination's end of an attempt.
#[derive(Debug, Clone)]
pub struct Destination {
    config: Config,
    state: DestinationState,
    durable: Durable<Note>,
    /// Whether memory and disks can be received: not after a restart.
    live: bool,
    connected: bool,
    /// The last epoch that was used.
    epoch: Epoch,
    lost_at: Option<Duration>,
    /// When the attempt was aborted, or all blocks were here.
    settled_at: Option<Duration>,
    bases_here: bool,
    loading: bool,
    loaded: bool,
    settled: bool,
    verified: bool,
    asked_ready: bool,
    /// The arbiter that the source has asked about.
    arbiter: Option<StoreId>,
    fetching: bool,
    /// The missing blocks are given up.
    filling: bool,
    paused_until: Duration,
    doubt_shown: bool,
    /// Why the attempt was aborted.
    reason: String,
    finished: bool,
    actions: VecDeque<Action>,
}

impl Destination {
    /// Begins with a connection of epoch 1. BEGAN is on disk, and QEMU is launched.
    pub fn new(config: Config) -> Self {
        let state = DestinationState::Receiving { commit: None };
        let mut destination = Self::with(config, state, true);
        destination.connected = true;
        destination.epoch = Epoch(1);
        destination.accept_guest();
        destination
    }

    /// Goes on from the records of an attempt, or from none of an attempt that is not known here.
    pub fn restore(config: Config, records: &[Record], now: Duration) -> Self {
        let (state, steps) = DestinationState::restore(records, &config.terms);
        let mut destination = Self::with(config, state, false);
        destination.reason = abort_reason(records).unwrap_or_default();
        destination.lost_at = Some(now);
        destination.carry_out(steps, None, now);
        destination.after_step(now);
        destination
    }

    fn with(config: Config, state: DestinationState, live: bool) -> Self {
        Self {
            bases_here: !config.awaits_bases,
            config,
            state,
            durable: Durable::new(Order::Aborted),
            live,
            connected: false,
            epoch: Epoch(0),
            lost_at: None,
            settled_at: None,
            loading: false,
            loaded: false,
            settled: false,
            verified: false,
            asked_ready: false,
            arbiter: None,
            fetching: false,
            filling: false,
            paused_until: Duration::ZERO,
            doubt_shown: false,
            reason: String::new(),
            finished: false,
            actions: VecDeque::new(),
        }
    }

    /// Returns where the right to run the guest is, as this host knows it.
    pub fn state(&self) -> &DestinationState {
        &self.state
    }

    /// Returns the terms of the attempt.
    pub fn terms(&self) -> &Terms {
        &self.config.terms
    }

    /// Returns the last epoch that was used.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns since when the source is gone.
    pub fn lost_at(&self) -> Option<Duration> {
        self.lost_at
    }

    /// Returns whether more has to come before the source may decide.
    pub fn is_waiting(&self) -> bool {
        matches!(
            self.state,
            DestinationState::Receiving { commit: None } | DestinationState::Readying
        )
    }

    /// Returns whether a source whose data cannot be taken is not let in yet.
    pub fn is_paused(&self, now: Duration) -> bool {
        now < self.paused_until
    }

    /// Takes a source as connected that has asked before: its messages follow.
    pub fn attend(&mut self) {
        self.is_back();
    }

    /// Returns whether missing blocks are being fetched.
    pub fn is_fetching(&self) -> bool {
        self.fetching && self.state == DestinationState::Running { all_present: false }
    }

    /// Returns whether nothing is done until the source calls. The journal answers for an attempt
    /// that has no owner.
    pub fn is_idle(&self) -> bool {
        use DestinationState as Is;
        let settled = matches!(
            self.state,
            Is::Aborted | Is::Running { all_present: true } | Is::Closed { .. } | Is::Unknown
        );
        settled && !self.connected && self.durable.retry_at().is_none() && self.actions.is_empty()
    }

    /// Returns how far the attempt is, for its source.
    pub fn attempt_state(&self) -> AttemptState {
        attempt_state(&self.state)
    }

    /// Takes the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        if self.finished {
            return None;
        }
        let times = [self.durable.retry_at(), self.deadline(), self.goodbye()];
        times.into_iter().flatten().min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        if self.finished {
            return;
        }
        let (due, note) = self.durable.due(now);
        if let Some(note) = note {
            self.push(Action::Note(note));
        }
        if due && let Some(record) = self.durable.take_unwritten(true) {
            self.push(Action::Write(record));
        }
        if self.deadline().is_some_and(|at| at <= now) {
            match self.state {
                DestinationState::Ready => {
                    self.doubt_shown = true;
                    self.push(Action::ShowDoubt);
                }
                _ => {
                    let reason = "the source did not come back in time";
                    self.step(DestinationEvent::Abort(reason.to_owned()), now);
                }
            }
        }
        if self.goodbye().is_some_and(|at| at <= now) {
            self.hang_up(now);
        }
    }

    /// Takes an input.
    pub fn handle(&mut self, event: Event, now: Duration) {
        if self.finished {
            return;
        }
        match event {
            Event::Message(message) => self.message(message, now),
            Event::Called(epoch) => self.called(epoch, now),
            Event::Accepted(true) => self.accepted(now),
            Event::Accepted(false) => self.lost(None, now),
            Event::Lost { meant } => self.lost(meant, now),
            Event::Everything => {
                if self.live && !self.loading && self.may_receive() {
                    self.loading = true;
                    self.push(Action::Load);
                }
            }
            Event::Loaded(Ok(())) => {
                self.loaded = true;
                self.send(ToSource::Loaded);
                self.ready_if_so();
            }
            Event::Settled(Ok(())) => {
                self.settled = true;
                self.ready_if_so();
            }
            Event::BasesHere(Ok(())) => {
                self.bases_here = true;
                self.accept_guest();
                self.ready_if_so();
            }
            Event::MayBeReady(Ok(())) => self.step(DestinationEvent::Loaded, now),
            Event::Loaded(Err(reason))
            | Event::Settled(Err(reason))
            | Event::BasesHere(Err(reason))
            | Event::MayBeReady(Err(reason))
            | Event::GiveUp(reason) => self.step(DestinationEvent::Abort(reason), now),
            Event::Written(record) => self.step(DestinationEvent::Written(record), now),
            Event::WriteFailed(record) => self.step(DestinationEvent::WriteFailed(record), now),
            Event::Noted(note) => {
                self.durable.noted(&note);
                if let Some(record) = self.durable.take_unwritten(true) {
                    self.push(Action::Write(record));
                }
            }
            Event::NoteFailed(note) => self.durable.note_failed(&note, now),
            Event::Resumed => self.step(DestinationEvent::Resumed, now),
            Event::ResumeFailed(reason) => self.step(DestinationEvent::ResumeFailed(reason), now),
            Event::QemuGone => self.step(DestinationEvent::QemuGone, now),
            Event::AllPresent => self.step(DestinationEvent::AllPresent, now),
            Event::FetchTrouble if self.is_fetching() => {
                self.paused_until = now + PAUSE;
                self.hang_up(now);
            }
            Event::FetchTrouble => {}
            Event::GiveUpMissing(because) => self.step(DestinationEvent::GiveUp(because), now),
            Event::Overrule(because) => self.step(DestinationEvent::Overrule(because), now),
            Event::Arbiter(reached) => self.send(ToSource::Arbiter { reached }),
            Event::Claimed(claimed) => self.claimed(claimed, now),
        }
    }

    fn claimed(&mut self, claimed: Claimed, now: Duration) {
        let DestinationState::Claiming { arbiter } = self.state else {
            return;
        };
        let event = match claimed {
            Claimed::Granted => DestinationEvent::Granted(arbiter),
            Claimed::Denied => DestinationEvent::Denied(arbiter),
            Claimed::Unanswered => {
                DestinationEvent::Abort("the arbiter does not answer the destination".to_owned())
            }
        };
        self.step(event, now);
    }

    // The source.

    fn message(&mut self, message: FromSource, now: Duration) {
        match message {
            FromSource::Commit(attempt, commit) => {
                self.step(DestinationEvent::Commit(attempt, commit), now);
            }
            FromSource::Cancel(reason) => self.step(DestinationEvent::Abort(reason), now),
            FromSource::Done => self.step(DestinationEvent::Done, now),
            FromSource::Overruled(generation) => {
                self.step(DestinationEvent::PeerOverruled(generation), now);
            }
            FromSource::Verified => {
                self.verified = true;
                self.ready_if_so();
            }
            FromSource::Arbiter(store) => {
                self.arbiter = Some(store);
                self.push(Action::CheckArbiter(store));
            }
        }
    }

    fn may_receive(&self) -> bool {
        matches!(
            self.state,
            DestinationState::Receiving { .. } | DestinationState::Readying
        )
    }

    fn called(&mut self, epoch: Option<Epoch>, now: Duration) {
        let takes = self.live && self.may_receive() || self.is_fetching();
        match epoch.filter(|_| takes) {
            // The source tries again with a newer epoch.
            Some(epoch) if epoch <= self.epoch || self.filling || now < self.paused_until => {
                self.push(Action::Decline);
            }
            Some(epoch) => {
                self.epoch = epoch;
                self.connected = true;
                self.push(Action::Accept(epoch));
            }
            // It has nothing to send, or nothing that is taken.
            None => {
                self.is_back();
                self.push(Action::Take);
                self.step(DestinationEvent::Asked, now);
            }
        }
    }

    fn accepted(&mut self, now: Duration) {
        self.is_back();
        self.accept_guest();
        if self.loaded && self.may_receive() {
            self.send(ToSource::Loaded);
        }
        self.step(DestinationEvent::Asked, now);
        if self.is_fetching() {
            self.push(Action::SendMissing);
        }
    }

    fn is_back(&mut self) {
        self.connected = true;
        self.lost_at = None;
        self.doubt_shown = false;
    }

    fn lost(&mut self, meant: Option<String>, now: Duration) {
        if !self.connected {
            return;
        }
        self.connected = false;
        self.lost_at.get_or_insert(now);
        if let Some(reason) = meant.filter(|_| self.is_waiting()) {
            self.step(DestinationEvent::Abort(reason), now);
        }
    }

    fn hang_up(&mut self, now: Duration) {
        if self.connected {
            self.push(Action::Hangup);
            self.lost(None, now);
        }
    }

    /// Says that QEMU waits for the guest, once it has all that it needs for that.
    fn accept_guest(&mut self) {
        let receiving = matches!(self.state, DestinationState::Receiving { .. });
        if receiving && self.live && self.bases_here && self.connected {
            self.push(Action::SendAccepted);
        }
    }

    fn ready_if_so(&mut self) {
        let compared = self.verified || !self.config.verify;
        let here = self.loaded && self.settled && self.bases_here;
        let receiving = matches!(self.state, DestinationState::Receiving { .. });
        if here && compared && receiving && !self.asked_ready {
            self.asked_ready = true;
            if let Some(store) = self.arbiter {
                self.push(Action::CheckArbiter(store));
            }
            self.push(Action::AskReady);
        }
    }

    // Time limits.

    /// When a source that is gone ends the attempt, or leaves it in doubt.
    fn deadline(&self) -> Option<Duration> {
        use DestinationState as Is;
        let lost_at = self.lost_at?;
        let waits = match self.state {
            Is::Receiving { .. } | Is::Readying => true,
            Is::Ready => !self.doubt_shown,
            _ => false,
        };
        waits.then_some(lost_at + self.config.patience)
    }

    /// When a source that has heard everything is no longer waited for.
    fn goodbye(&self) -> Option<Duration> {
        let since = self.settled_at.filter(|_| self.connected)?;
        Some(since + GOODBYE_WITHIN)
    }

    // The handover.

    fn step(&mut self, event: DestinationEvent, now: Duration) {
        let (state, steps) = step_destination(&self.state, &event, &self.config.terms);
        let ran = matches!(self.state, DestinationState::Running { .. });
        self.state = state;
        let failed = match event {
            DestinationEvent::WriteFailed(record) => Some(record),
            _ => None,
        };
        self.carry_out(steps, failed.as_ref(), now);
        if !ran {
            self.after_step(now);
        }
        let over = matches!(
            self.state,
            DestinationState::Aborted | DestinationState::Running { all_present: true }
        );
        if over {
            self.settled_at.get_or_insert(now);
        }
    }

    /// The guest has just begun to run here.
    fn after_step(&mut self, now: Duration) {
        if self.state != (DestinationState::Running { all_present: false }) {
            return;
        }
        match self.config.fetches {
            true => {
                self.fetching = true;
                self.push(Action::Fetch);
            }
            false => self.step(DestinationEvent::AllPresent, now),
        }
    }

    fn carry_out(&mut self, steps: Vec<Step>, failed: Option<&Record>, now: Duration) {
        let attempt = self.config.terms.attempt;
        for step in steps {
            match step {
                Step::Write(record) if failed == Some(&record) => self.durable.keep(record, now),
                Step::Write(record) => {
                    if let Record::Aborted { reason, .. } = &record {
                        self.reason.clone_from(reason);
                    }
                    if self.durable.may_write(&record, true) {
                        self.push(Action::Write(record));
                    }
                }
                Step::Claim(store) => self.push(Action::Claim(store)),
                Step::Own(generation) => self.note(Note::Here(generation)),
                Step::Yield(_) => self.note(Note::BackThere),
                Step::Concede(generation) => self.note(Note::Conceded(generation)),
                Step::Resume => self.push(Action::Resume),
                Step::Quit => self.push(Action::Quit),
                Step::FillMissing => {
                    self.filling = true;
                    self.push(Action::FillMissing);
                }
                Step::SendReady => self.send(ToSource::Ready { attempt }),
                Step::SendCommitted => self.send(ToSource::Committed { attempt }),
                Step::SendAllPresent => self.send(ToSource::AllPresent { attempt }),
                Step::SendAborted => {
                    let reason = self.reason.clone();
                    self.send(ToSource::Aborted { attempt, reason });
                }
                Step::SendStatus => {
                    let state = self.attempt_state();
                    self.send(ToSource::Status { attempt, state });
                }
                // Said with the last action, when the journal is gone.
                Step::SendClosed => {
                    self.finished = true;
                    self.push(Action::Finish);
                }
            }
        }
    }

    fn note(&mut self, note: Note) {
        self.durable.note(note.clone());
        self.push(Action::Note(note));
    }

    fn send(&mut self, message: ToSource) {
        if self.connected {
            self.push(Action::Send(message));
        }
    }

    fn push(&mut self, action: Action) {
        self.actions.push_back(action);
    }
}

/// Returns why an attempt was aborted, as its records say.
pub fn abort_reason(records: &[Record]) -> Option<String> {
    records.iter().rev().find_map(|record| match record {
        Record::Aborted { reason, .. } => Some(reason.clone()),
        _ => None,
    })
}

/// Returns how far an attempt in this state is, for its source.
pub fn attempt_state(state: &DestinationState) -> AttemptState {
    use DestinationState as Is;
    match state {
        Is::Unknown | Is::Beginning | Is::Receiving { .. } => AttemptState::Receiving,
        Is::Readying => AttemptState::Loading,
        Is::Ready | Is::Claiming { .. } | Is::Committing => AttemptState::Ready,
        Is::Committed
        | Is::Running { .. }
        | Is::Yielding
        | Is::Closing { here: true }
        | Is::Closed { here: true } => AttemptState::Committed,
        // The source hears that the attempt is over once that is written.
        Is::Aborting { .. } | Is::Recording | Is::Returning { .. } | Is::GivingBack { .. } => {
            AttemptState::Ready
        }
        Is::Aborted | Is::Closing { here: false } | Is::Closed { here: false } => {
            AttemptState::Aborted
        }
    }
}
