//! The source's end of an attempt.
//!
//! ```text
//! Up(blocks) --lost--> Waiting --time--> Dialling --> Up(blocks) | Up(questions)
//! ```
//!
//! A source that can still send blocks comes back with a connection for them (Resume). One that
//! has none to send only asks (Ask): after a restart, until the destination is known to run the
//! guest, and once the guest is known to stay here.

mod messages;

pub use messages::{Action, Cause, Claimed, Config, DialError, Event, FromDestination, Note};

use crate::durable::{Durable, Order};
use longhaul_engine::handover::{
    Record, SourceAction as Step, SourceEvent, SourceState, Terms, step_source,
};
use longhaul_protocol::message::{AttemptState, ToDestination};
use longhaul_protocol::{Attempt, Epoch, StoreId};
use std::collections::VecDeque;
use std::time::Duration;

/// Between two tries to connect again, while blocks wait.
const REDIAL_EVERY: Duration = Duration::from_millis(250);
/// Between two tries to ask, at first.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// The limit that this time grows to when no guest waits for the answer.
const ASK_EVERY_MAX: Duration = Duration::from_secs(30);
/// A destination that only answers questions is asked again after this silence.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// A guest is shown as in doubt when the destination has been gone for this time.
const DOUBT_AFTER: Duration = Duration::from_secs(3);
/// The arbiter is asked for the lease when the destination has been gone for this time: before the
/// doubt is shown.
const CLAIM_AFTER: Duration = Duration::from_secs(2);
/// ... or when a destination that has all data has not answered COMMIT for this time: it gives up
/// before. So the loss of a host is not waited for.
const CLAIM_SILENT: Duration = Duration::from_secs(6);
/// Between two questions to an arbiter that does not answer.
const CLAIM_EVERY: Duration = Duration::from_secs(5);

/// What is known of the lease of the next generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lease {
    Unknown,
    Asked,
    /// It is asked for again then.
    Waits(Duration),
    /// Another host has it.
    Elsewhere,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Connection {
    Up { blocks: bool, heard_at: Duration },
    Dialling,
    Waiting { until: Duration },
}

/// The source's end of an attempt.
#[derive(Debug, Clone)]
pub struct Source {
    config: Config,
    state: SourceState,
    durable: Durable<Note>,
    connection: Connection,
    /// The last epoch that was used or tried.
    epoch: Epoch,
    lost_at: Option<Duration>,
    /// The time of the last input.
    now: Duration,
    pause: Duration,
    /// Whether memory and disks can be sent: not after a restart.
    live: bool,
    launching: Option<Duration>,
    stopped_at: Option<Duration>,
    verified: bool,
    /// The hook decides about the release that this READY asks for.
    asked_release: Option<Attempt>,
    gave_up: bool,
    draining: bool,
    doubt_shown: bool,
    /// The guest stays here, and does not run yet.
    unresumed: bool,
    /// Whether the arbiter is reached from here, and from the destination.
    arbiter_reached: [bool; 2],
    lease: Lease,
    /// When the guest was released, by this agent.
    released_at: Option<Duration>,
    finished: bool,
    actions: VecDeque<Action>,
}

impl Source {
    /// Begins with a connection of epoch 1, over which the destination has said that it launches
    /// its QEMU.
    pub fn new(config: Config, now: Duration) -> Self {
        let state = SourceState::Here { postmigrate: false };
        let mut source = Self::with(config, state, true, Epoch(1), now);
        source.launching = Some(now);
        source.connection = Connection::Up {
            blocks: true,
            heard_at: now,
        };
        source.push(Action::SendBlocks);
        source.ask_for_arbiter();
        source
    }

    /// Goes on from the records of an attempt. `epoch` is the last one that may have been used.
    pub fn restore(config: Config, records: &[Record], epoch: Epoch, now: Duration) -> Self {
        let (state, steps) = SourceState::restore(records, &config.terms);
        let mut source = Self::with(config, state, false, epoch, now);
        source.carry_out(steps, None, now);
        source
    }

    /// The same for an attempt whose guest has changed hands since: the destination is told of the
    /// outcome, and the guest is left alone.
    pub fn pass_on(config: Config, records: &[Record], epoch: Epoch, now: Duration) -> Self {
        let (state, mut steps) = SourceState::restore(records, &config.terms);
        steps.retain(|step| !step.lets_go_on());
        let mut source = Self::with(config, state, false, epoch, now);
        source.carry_out(steps, None, now);
        source
    }

    fn with(config: Config, state: SourceState, live: bool, epoch: Epoch, now: Duration) -> Self {
        Self {
            config,
            state,
            durable: Durable::new(Order::Closed),
            connection: Connection::Waiting { until: now },
            epoch,
            lost_at: None,
            now,
            pause: ASK_EVERY,
            live,
            launching: None,
            stopped_at: None,
            verified: false,
            asked_release: None,
            gave_up: false,
            draining: false,
            doubt_shown: false,
            unresumed: false,
            arbiter_reached: [false; 2],
            lease: Lease::Unknown,
            released_at: None,
            finished: false,
            actions: VecDeque::new(),
        }
    }

    /// Returns where the right to run the guest is, as this host knows it.
    pub fn state(&self) -> &SourceState {
        &self.state
    }

    /// Returns the terms of the attempt.
    pub fn terms(&self) -> &Terms {
        &self.config.terms
    }

    /// Returns whether the guest may be stopped now: the destination waits for it.
    pub fn may_stop(&self) -> bool {
        let up = matches!(self.connection, Connection::Up { .. });
        up && self.launching.is_none() && self.state.may_abort() && !self.gave_up
    }

    /// Returns whether the destination launches its QEMU.
    pub fn is_launching(&self) -> bool {
        self.launching.is_some()
    }

    /// Returns whether the guest stays here and does not run yet.
    pub fn is_unresumed(&self) -> bool {
        self.unresumed
    }

    /// Returns whether the attempt was given up.
    pub fn has_given_up(&self) -> bool {
        self.gave_up
    }

    /// Returns since when the destination is gone.
    pub fn lost_at(&self) -> Option<Duration> {
        self.lost_at
    }

    /// Returns whether the guest's name is free here: nothing more is done for it.
    pub fn is_over(&self) -> bool {
        self.state.is_over()
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
        let dial = match self.connection {
            Connection::Waiting { until } => Some(until),
            Connection::Up { blocks, heard_at } if !(blocks && self.wants_blocks()) => {
                Some(heard_at + ANSWER_WITHIN)
            }
            Connection::Up { .. } | Connection::Dialling => None,
        };
        let times = [
            dial,
            self.durable.retry_at(),
            self.deadline(),
            self.launch_deadline(),
            self.doubt_at(),
            self.claim_at(),
        ];
        times.into_iter().flatten().min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        self.now = now;
        if self.finished {
            return;
        }
        let (due, note) = self.durable.due(now);
        if let Some(note) = note {
            self.push(Action::Note(note));
        }
        if due && self.unresumed {
            self.push(Action::Resume);
        }
        if due {
            self.write_waiting(now);
        }
        if let (Some(deadline), Some(lost_at)) = (self.deadline(), self.lost_at)
            && deadline <= now
        {
            let cause = Cause::LinkCut {
                silent: now.saturating_sub(lost_at),
                stopped: self.stopped_at.is_some(),
            };
            self.give_up(cause, "the connection did not come back in time", now);
        }
        if self.launch_deadline().is_some_and(|at| at <= now) {
            self.give_up(Cause::NotLaunched, "its QEMU was not launched in time", now);
        }
        if self.doubt_at().is_some_and(|at| at <= now) {
            self.doubt_shown = true;
            self.push(Action::ShowDoubt);
        }
        if self.claim_at().is_some_and(|at| at <= now)
            && let Some(store) = self.released_to()
        {
            self.lease = Lease::Asked;
            self.push(Action::Claim(store));
        }
        match self.connection {
            Connection::Waiting { until } if until <= now => self.dial(),
            Connection::Up { blocks, heard_at }
                if !(blocks && self.wants_blocks()) && heard_at + ANSWER_WITHIN <= now =>
            {
                self.hang_up(now);
            }
            _ => {}
        }
    }

    /// Takes an input.
    pub fn handle(&mut self, event: Event, now: Duration) {
        self.now = now;
        if self.finished {
            return;
        }
        match event {
            Event::Message(message) => {
                if let Connection::Up { heard_at, .. } = &mut self.connection {
                    *heard_at = now;
                }
                self.message(message, now);
            }
            Event::Connected { epoch, state } => self.connected(epoch, state, now),
            Event::DialFailed(error) => self.dial_failed(error, now),
            Event::Lost => self.lost(now),
            Event::Reconnect => self.hang_up(now),
            Event::Stopped => {
                self.stopped_at.get_or_insert(now);
                if !self.config.terms.early || self.may_release(now) {
                    self.step(SourceEvent::Postmigrate, now);
                }
            }
            Event::MayRelease(answer) => {
                let Some(attempt) = self.asked_release.take() else {
                    return;
                };
                match answer {
                    Ok(()) => {
                        if self.may_release(now) {
                            self.step(SourceEvent::Ready(attempt), now);
                        }
                    }
                    Err(reason) => self.give_up(Cause::Told(reason.clone()), &reason, now),
                }
            }
            Event::Verified => self.verified = true,
            Event::Written(record) => self.step(SourceEvent::Written(record), now),
            Event::WriteFailed(record) => self.step(SourceEvent::WriteFailed(record), now),
            Event::Noted(note) => {
                self.durable.noted(&note);
                self.write_waiting(now);
            }
            Event::NoteFailed(note) => self.durable.note_failed(&note, now),
            Event::Resumed => {
                self.unresumed = false;
                self.write_waiting(now);
            }
            Event::ResumeFailed => self.durable.retry(now),
            Event::GiveUp(reason) => self.give_up(Cause::Told(reason.clone()), &reason, now),
            Event::Overrule(because) => self.step(SourceEvent::Overrule(because), now),
            Event::Arbiter(reached) => self.arbiter_reached[0] = reached,
            Event::Claimed(claimed) => self.claimed(claimed, now),
        }
    }

    // The destination.

    fn message(&mut self, message: FromDestination, now: Duration) {
        match message {
            FromDestination::Accepted => self.launching = None,
            FromDestination::Refused(reason) => {
                if self.launching.is_some() {
                    self.because(Cause::Refused(reason));
                    let attempt = self.config.terms.attempt;
                    self.step(SourceEvent::PeerAborted(attempt), now);
                }
            }
            FromDestination::Ready(attempt) => self.ready(attempt, now),
            FromDestination::Committed(attempt) => self.committed(attempt, now),
            FromDestination::AllPresent(attempt) => {
                self.step(SourceEvent::Committed(attempt), now);
                self.step(SourceEvent::AllPresent(attempt), now);
            }
            FromDestination::Aborted(attempt, reason) => {
                if attempt == self.config.terms.attempt {
                    self.because(Cause::Peer(reason));
                }
                self.step(SourceEvent::PeerAborted(attempt), now);
            }
            FromDestination::Status(AttemptState::Receiving | AttemptState::Loading)
                if self.state.in_doubt() && !self.live =>
            {
                // It waits for blocks, which nobody can send any more.
                self.because(Cause::Restarted);
                let reason = "the source's agent was restarted".to_owned();
                self.step(SourceEvent::Abort(reason), now);
            }
            FromDestination::Status(_) => {}
            FromDestination::Arbiter(reached) => self.arbiter_reached[1] = reached,
            FromDestination::Closed => {
                if self.state.is_over() {
                    self.finished = true;
                    self.actions.extend([Action::Hangup, Action::Finish]);
                }
            }
        }
    }

    /// The destination has everything: the guest is released, unless a hook forbids it.
    fn ready(&mut self, attempt: Attempt, now: Duration) {
        if self.live && self.config.verify && !self.verified && self.state.may_abort() {
            let error = "Ready before both copies were compared";
            return self.give_up(Cause::Protocol(error), error, now);
        }
        let releases = matches!(self.state, SourceState::Here { postmigrate: true });
        if !releases || self.gave_up {
            return self.step(SourceEvent::Ready(attempt), now);
        }
        if attempt == self.config.terms.attempt && self.asked_release.is_none() {
            self.asked_release = Some(attempt);
            self.push(Action::AskRelease);
        }
    }

    fn committed(&mut self, attempt: Attempt, now: Duration) {
        self.step(SourceEvent::Committed(attempt), now);
        if attempt == self.config.terms.attempt {
            self.begin_draining();
            if self.draining && matches!(self.connection, Connection::Up { blocks: false, .. }) {
                self.hang_up(now);
            }
        }
    }

    /// The destination runs the guest and fetches the rest of its disks over a connection that
    /// begins with what is missing.
    fn begin_draining(&mut self) {
        let gone = matches!(self.state, SourceState::Finishing | SourceState::Done);
        if gone && self.config.drains && !self.draining {
            self.draining = true;
            self.push(Action::Drain);
        }
    }

    // The arbiter.

    /// Asks whether the destination reaches the arbiter.
    fn ask_for_arbiter(&mut self) {
        if let Some(store) = self.config.arbiter
            && self.state.may_abort()
        {
            self.send(ToDestination::Arbiter { store });
        }
    }

    /// Decides whether the release needs the arbiter, which both hosts must reach now. Returns
    /// whether the guest may be released.
    fn may_release(&mut self, now: Duration) -> bool {
        if !self.state.may_abort() {
            return true;
        }
        let arbiter = self.config.arbiter;
        let arbiter = arbiter.filter(|_| self.arbiter_reached == [true; 2]);
        if arbiter.is_none() && self.config.requires_arbiter {
            let reason = "the arbiter is required, and is not reached from both hosts";
            self.give_up(Cause::NoArbiter, reason, now);
            return false;
        }
        self.config.terms.arbiter = arbiter;
        true
    }

    /// Returns the arbiter that the release may need.
    pub fn arbiter(&self) -> Option<StoreId> {
        self.config.arbiter
    }

    /// Returns the arbiter that decides beside the destination.
    pub fn released_to(&self) -> Option<StoreId> {
        match self.state {
            SourceState::Released { arbiter } => arbiter,
            _ => None,
        }
    }

    /// Returns whether the arbiter has said that it is not this host that has the lease.
    pub fn lease_is_elsewhere(&self) -> bool {
        self.lease == Lease::Elsewhere
    }

    /// When the arbiter is asked for the lease.
    fn claim_at(&self) -> Option<Duration> {
        self.released_to()?;
        // A guest that is released early is not committed before its last blocks have arrived.
        let silent = self.released_at.filter(|_| !self.config.terms.early);
        let silent = silent.map(|at| at + CLAIM_SILENT);
        let lost = self.lost_at.map(|at| at + CLAIM_AFTER);
        let after = lost.into_iter().chain(silent).min()?;
        match self.lease {
            Lease::Unknown => Some(after),
            Lease::Waits(until) => Some(after.max(until)),
            Lease::Asked | Lease::Elsewhere => None,
        }
    }

    fn claimed(&mut self, claimed: Claimed, now: Duration) {
        let store = self.released_to();
        self.lease = match claimed {
            Claimed::Denied => Lease::Elsewhere,
            // After a record that could not be written it is asked again.
            Claimed::Granted | Claimed::Unanswered => Lease::Waits(now + CLAIM_EVERY),
        };
        if claimed == Claimed::Granted
            && let Some(store) = store
        {
            self.step(SourceEvent::Granted(store), now);
        }
    }

    // The connection.

    /// Whether a connection for blocks is wanted.
    fn wants_blocks(&self) -> bool {
        use SourceState as Is;
        match self.state {
            Is::Here { .. }
            | Is::Releasing
            | Is::Released { .. }
            | Is::Overruling { done: false, .. } => self.live,
            Is::Finishing | Is::Done | Is::Overruling { done: true, .. } => self.config.drains,
            _ => false,
        }
    }

    fn dial(&mut self) {
        let epoch = self.wants_blocks().then(|| {
            // The destination may have taken an epoch into use of which this side never heard.
            self.epoch = Epoch(self.epoch.0.saturating_add(1));
            self.epoch
        });
        self.connection = Connection::Dialling;
        // Once the guest is known to stay here, the answer of other journals is as good.
        let any_journals = self.state.keeps_guest();
        self.push(Action::Dial {
            epoch,
            any_journals,
        });
    }

    fn connected(&mut self, epoch: Option<Epoch>, state: Option<AttemptState>, now: Duration) {
        if self.connection != Connection::Dialling {
            return;
        }
        if epoch.is_some() && epoch != Some(self.epoch) {
            return;
        }
        self.lost_at = None;
        self.doubt_shown = false;
        self.pause = ASK_EVERY;
        self.connection = Connection::Up {
            blocks: epoch.is_some(),
            heard_at: now,
        };
        let receives = epoch.is_some() && state == Some(AttemptState::Receiving);
        if receives && self.live && !self.state.is_settled() {
            self.push(Action::SendBlocks);
        }
        if state == Some(AttemptState::Committed) {
            let attempt = self.config.terms.attempt;
            self.step(SourceEvent::Committed(attempt), now);
            self.draining = false;
            self.begin_draining();
        }
        self.ask_for_arbiter();
        self.step(SourceEvent::Connected, now);
        if epoch.is_none() && state == Some(AttemptState::Ready) {
            self.ready(self.config.terms.attempt, now);
        }
    }

    fn dial_failed(&mut self, error: DialError, now: Duration) {
        if self.connection != Connection::Dialling {
            return;
        }
        self.wait_to_dial(now);
        let attempt = self.config.terms.attempt;
        match error {
            DialError::Aborted(reason) => {
                self.because(Cause::Peer(reason));
                self.step(SourceEvent::PeerAborted(attempt), now);
            }
            DialError::Committed { all_present } => {
                self.step(SourceEvent::Committed(attempt), now);
                if all_present {
                    self.step(SourceEvent::AllPresent(attempt), now);
                }
                self.lost_at = None;
            }
            DialError::Unreachable => {
                self.lost_at.get_or_insert(now);
            }
            DialError::Local => {}
            DialError::Refused(_) | DialError::OtherJournals => {
                self.lost_at.get_or_insert(now);
                if self.state.may_abort() && self.live {
                    let reason = "the destination cannot be connected to again";
                    self.give_up(Cause::Dial(error), reason, now);
                }
            }
        }
    }

    fn lost(&mut self, now: Duration) {
        if !matches!(self.connection, Connection::Up { .. }) {
            return;
        }
        self.lost_at.get_or_insert(now);
        self.push(Action::StopBlocks);
        // Gone after a while: the first try is made at once.
        self.connection = Connection::Waiting { until: now };
        if self.state.is_over() {
            self.wait_to_dial(now);
        }
    }

    fn hang_up(&mut self, now: Duration) {
        if self.connection == Connection::Dialling
            || matches!(self.connection, Connection::Up { .. })
        {
            self.actions.extend([Action::Hangup, Action::StopBlocks]);
            self.connection = Connection::Waiting { until: now };
        }
    }

    fn wait_to_dial(&mut self, now: Duration) {
        let needed = self.state.in_doubt() || self.draining || self.state == SourceState::Done;
        let wait = match self.live && self.wants_blocks() {
            true => REDIAL_EVERY,
            false => self.pause,
        };
        if !needed && !self.wants_blocks() {
            self.pause = (self.pause * 2).min(ASK_EVERY_MAX);
        }
        self.connection = Connection::Waiting { until: now + wait };
    }

    // Time limits.

    /// When a lost connection ends the attempt.
    fn deadline(&self) -> Option<Duration> {
        let lost_at = self.lost_at?;
        if self.gave_up || !self.live || !self.state.may_abort() {
            return None;
        }
        Some(match self.stopped_at {
            // The guest is stopped: no longer than was asked for.
            Some(stopped_at) => lost_at.max(stopped_at + self.config.downtime),
            None => lost_at + self.config.patience,
        })
    }

    fn launch_deadline(&self) -> Option<Duration> {
        let up = matches!(self.connection, Connection::Up { .. });
        let since = self.launching.filter(|_| up && !self.gave_up)?;
        Some(since + self.config.launch_within?)
    }

    fn doubt_at(&self) -> Option<Duration> {
        let lost_at = self.lost_at.filter(|_| self.state.in_doubt())?;
        (!self.doubt_shown).then_some(lost_at + DOUBT_AFTER)
    }

    // The handover.

    /// Ends the attempt, where that is still this side's decision, or worth asking for.
    fn give_up(&mut self, cause: Cause, reason: &str, now: Duration) {
        if self.gave_up {
            return;
        }
        // What was released late is all at the destination: only it can go on.
        if self.state.may_abort() || self.state.in_doubt() && self.config.terms.early {
            self.because(cause);
            self.gave_up = true;
            self.step(SourceEvent::Abort(reason.to_owned()), now);
        }
    }

    fn because(&mut self, cause: Cause) {
        if !self.gave_up {
            self.push(Action::Because(cause));
        }
    }

    fn step(&mut self, event: SourceEvent, now: Duration) {
        let (state, steps) = step_source(&self.state, &event, &self.config.terms);
        let kept = self.state.keeps_guest();
        self.state = state;
        if matches!(self.state, SourceState::Released { .. }) {
            self.released_at.get_or_insert(now);
        }
        if self.state.keeps_guest() && !kept {
            self.live = false;
            if self.connection == Connection::Dialling {
                // Coming back to an attempt that is over would have the destination record it.
                self.hang_up(now);
            }
        }
        let failed = match event {
            SourceEvent::WriteFailed(record) => Some(record),
            _ => None,
        };
        self.carry_out(steps, failed.as_ref(), now);
    }

    fn carry_out(&mut self, steps: Vec<Step>, failed: Option<&Record>, now: Duration) {
        for step in steps {
            match step {
                Step::Write(record) if failed == Some(&record) => self.durable.keep(record, now),
                Step::Write(record) => {
                    if self.durable.may_write(&record, !self.unresumed) {
                        self.push(Action::Write(record));
                    }
                }
                Step::Fence(generation) => self.note(Note::InDoubt(generation)),
                Step::Cede(generation) => self.note(Note::There(generation)),
                Step::Concede(generation) => self.note(Note::Conceded(generation)),
                Step::Unfence(generation) if generation == self.config.terms.generation => {
                    self.note(Note::BackHere);
                }
                Step::Unfence(generation) => self.note(Note::Here(generation)),
                Step::SendCommit(commit) => {
                    let attempt = self.config.terms.attempt;
                    let generation = commit.generation;
                    self.send(match commit.arbiter {
                        None => ToDestination::Commit {
                            attempt,
                            generation,
                        },
                        Some(store) => ToDestination::CommitWithLease {
                            attempt,
                            generation,
                            store,
                        },
                    });
                }
                Step::SendCancel(reason) => self.send(ToDestination::Cancel { reason }),
                Step::SendOverruled(generation) => {
                    self.send(ToDestination::Overruled { generation });
                }
                Step::SendDone => self.send(ToDestination::Done),
                // Every connection begins with the question.
                Step::Ask => {}
                Step::Resume => {
                    self.unresumed = true;
                    self.actions.extend([Action::StopBlocks, Action::Resume]);
                }
                Step::Quit => {
                    self.draining = false;
                    self.push(Action::Quit);
                }
            }
        }
    }

    fn write_waiting(&mut self, now: Duration) {
        if let Some(record) = self.durable.take_unwritten(!self.unresumed) {
            // A retry that fails is kept again by the answer to its failure.
            self.push(Action::Write(record));
        } else if self.unresumed {
            self.durable.retry(now);
        }
    }

    fn note(&mut self, note: Note) {
        self.durable.note(note.clone());
        self.push(Action::Note(note));
    }

    fn send(&mut self, message: ToDestination) {
        if let Connection::Up { heard_at, .. } = &mut self.connection {
            // The answer is waited for from now on.
            *heard_at = self.now;
            self.push(Action::Send(message));
        }
    }

    fn push(&mut self, action: Action) {
        self.actions.push_back(action);
    }
}
