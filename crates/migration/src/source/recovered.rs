//! The source's end of an attempt without a
//! [`SourceAttempt`](crate::source::attempt::SourceAttempt): after a restart of the agent, or once
//! it is decided where the guest runs and the destination has yet to hear of it.
//!
//! The core talks to the destination until both journals are complete. If the destination has yet
//! to send READY, no blocks are sent to it: it is asked to give up. If the guest runs there, the
//! missing blocks of its disks are sent from their images, and those of its memory from its stopped
//! QEMU or its memory file.

use crate::context::Context;
use crate::disks::exports;
use crate::disks::left_images;
use crate::handover::attempt_record::{AttemptRecord, is_stale, of_attempt, stale};
use crate::handover::ledger::{
    Ledger, SourceHandover, SourceOwner, claimed, drive_source, tell_source, time_source, until,
};
use crate::host::arbiter::Answer;
use crate::host::memory_notes::{LeftNote, MemoryNote};
use crate::host::right::Holder;
use crate::source::Source;
use crate::source::acks::Acknowledging;
use crate::source::companion::{About, Companions};
use crate::source::connect::{
    Attempted, Dial, Dialled, Session, SessionError, dialled, next_message,
};
use crate::source::drain::{self, Drain};
use crate::source::left_memory::LeftMemory;
use crate::source::memory_copy::Copying;
use crate::source::memory_file;
use crate::source::sender::SendError;
use crate::status::migration::Entry;
use crate::status::registry::{Reservation, Taken};
use crate::status::{failure, in_doubt};
use longhaul_api::{
    ApiError, ErrorCode, HandoverRecord, MemoryFileReport, Outcome, Phase, Resolve, Side,
};
use longhaul_attempt::Source as Core;
use longhaul_attempt::source::{Action, Cause, Claimed, Config, DialError, Event, FromDestination};
use longhaul_engine::handover::{SourceState, Terms};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::Stays;
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{Epoch, MigrationId, StoreId};
use longhaul_storage::Journal;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::sleep;

/// Time without an answer after which the destination is shown as lost.
const LOST_AFTER: Duration = Duration::from_secs(3);
/// Interval of the check for disk blocks that could not be read.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The source's end of an attempt without its task.
pub(crate) struct RecoveredSource {
    handover: SourceHandover,
    companions: Companions,
    paused: bool,
    entry: Option<Arc<Entry>>,
    reservation: Option<Reservation>,
    session: Option<Session>,
    dial: Option<Dial>,
    /// Whether the session begins with the lists of missing blocks, so that the drain uses it.
    begins_with_missing: bool,
    acknowledging: Option<Acknowledging>,
    /// The way in which this ends; `None` while it runs.
    ends: Option<End>,
    reason: Option<ApiError>,
    resolutions: Option<watch::Receiver<Option<Resolve>>>,
    /// The entry of a migration that has ended, until its last hook has run.
    ended: Option<Arc<Entry>>,
    /// The images that missing blocks are sent from, once the guest runs at the destination.
    left: Option<DrainImages>,
    /// Whether blocks may be missing at the destination.
    leaves: bool,
    /// Why missing blocks cannot be sent.
    trouble: Option<String>,
}

/// How a recovered attempt ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    BothClosed,
    /// The destination cannot be reached until an operator acts. The agent tries again after its
    /// next start.
    CannotTell,
}

/// The drain of a guest's disks and its sending worker.
struct DrainImages {
    draining: Drain,
    worker: JoinHandle<SendError>,
    /// The copy of memory that follows to its file.
    copying: Option<Copying>,
}

impl Drop for DrainImages {
    fn drop(&mut self) {
        self.worker.abort();
    }
}

enum Happened {
    Message(Box<Result<ToSource, crate::channel::TalkError>>),
    Dialled(Box<Dialled>),
    Rest(ToDestination),
    BulkGone(String),
    Resolved(Option<Resolve>),
    Timeout,
    Look,
}

impl SourceOwner for RecoveredSource {
    fn handover(&mut self) -> &mut SourceHandover {
        &mut self.handover
    }

    async fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Dial {
                epoch,
                any_journals,
            } => return self.dial(epoch, any_journals).await,
            Action::Hangup => {
                self.session = None;
                self.dial = None;
                self.stop_sending();
            }
            Action::Send(message) => return self.post(message),
            Action::StopBlocks => self.stop_sending(),
            Action::Drain => self.drain_over_session(),
            Action::Resume => {
                return Some(match self.resume().await {
                    true => Event::Resumed,
                    false => Event::ResumeFailed,
                });
            }
            Action::Quit => {
                self.stop_copying();
                let ledger = &self.handover.ledger;
                let guests = &ledger.context.parts.guests;
                if let Err(error) = guests.confirm(&ledger.guest, None).await {
                    tracing::error!(guest = ledger.guest, %error, "something is left over");
                }
                forget_left_memory(ledger);
                self.companions.committed().await;
            }
            Action::Because(Cause::Peer(reason)) => {
                let host = &self.handover.ledger.host;
                let error = failure::peer_gave_up(host, &reason);
                self.reason.get_or_insert(error);
            }
            Action::Claim(store) => return Some(self.claim(store).await),
            // Without its task, no hook is asked about a release.
            Action::AskRelease => return Some(Event::MayRelease(Ok(()))),
            Action::Finish => self.ends = Some(End::BothClosed),
            // No memory is sent from here, the state itself shows the doubt, and the ledger carries
            // out the others.
            Action::Because(_)
            | Action::SendBlocks
            | Action::ShowDoubt
            | Action::Write(_)
            | Action::Note(_) => {}
        }
        None
    }
}

impl RecoveredSource {
    /// Asks the arbiter for the guest, whose destination is gone. Without its memory the guest
    /// cannot go on here, and the arbiter is not asked.
    async fn claim(&mut self, store: StoreId) -> Event {
        let ledger = &self.handover.ledger;
        match ledger.context.parts.guests.find(&ledger.guest) {
            Ok(Some(_)) => {}
            Ok(None) => return Event::Claimed(Claimed::Unanswered),
            Err(error) => {
                tracing::error!(guest = ledger.guest, %error, "cannot look for it");
                return Event::Claimed(Claimed::Unanswered);
            }
        }
        let answer = ledger.claim(store).await;
        if let Some(entry) = &self.entry {
            entry.arbiter(&in_doubt::arbiter(&ledger.host, &answer));
        }
        if answer == Answer::Granted {
            let reason = failure::by_arbiter(&ledger.guest, &ledger.host);
            self.reason.get_or_insert(reason);
        }
        Event::Claimed(claimed(&answer))
    }

    /// Restores an attempt of an earlier agent. The first actions of its core are complete when
    /// this returns.
    pub(crate) async fn take_up(source: &Arc<Source>, left: AttemptRecord) -> Self {
        let context = &source.context;
        let leaves = leaves(context, &left.guest, left.migration);
        let config = config(left.terms, leaves);
        let core = Core::restore(config, &left.records(), first_epoch(), Duration::ZERO);
        let state = core.state();
        let entry = (!state.is_over()).then(|| left.entry(context, phase(state)));
        let reservation = entry.as_ref().and_then(|entry| {
            let taken = Taken::Moving(left.migration, Side::Source);
            let reservation = context.registry.take(&left.guest, taken);
            reservation
                .inspect_err(|error| tracing::error!(migration = %entry.id(), %error, "not kept"))
                .ok()
        });
        let paused = left.paused;
        let handover = SourceHandover::new(core, left.into_ledger(context));
        let shown = entry.clone();
        let mut settling = Self::of(source, shown, handover, (paused, reservation, leaves));
        settling.resolutions = entry.as_ref().map(|entry| entry.resolutions());
        settling.entry = entry;
        drive_source(&mut settling).await;
        settling.show();
        settling
    }

    /// Restores an attempt whose guest continues here by an operator's decision. The destination
    /// has yet to hear of that. The guest is not touched.
    pub(crate) async fn pass_on(source: &Arc<Source>, left: AttemptRecord) -> Self {
        let config = config(left.terms, false);
        let core = Core::pass_on(config, &left.records(), first_epoch(), Duration::ZERO);
        let paused = left.paused;
        let handover = SourceHandover::new(core, left.into_ledger(&source.context));
        let mut settling = Self::of(source, None, handover, (paused, None, false));
        drive_source(&mut settling).await;
        settling
    }

    /// Continues an attempt that its task has decided, until the destination has heard of it.
    pub(crate) fn hand_on(
        source: &Arc<Source>,
        handover: SourceHandover,
        (paused, reservation): (bool, Option<Reservation>),
        session: Option<Session>,
    ) -> Self {
        let ledger = &handover.ledger;
        let leaves = leaves(&ledger.context, &ledger.guest, ledger.migration);
        let mut settling = Self::of(source, None, handover, (paused, reservation, leaves));
        settling.session = session;
        settling
    }

    /// Continues an attempt that failed before it had a task. The guest cannot begin another
    /// attempt before this journal is closed: a later agent that reads it would resume the guest.
    pub(crate) async fn given_up(
        source: &Arc<Source>,
        journal: Journal,
        entry: &Entry,
        reservation: Reservation,
    ) {
        let Ok(left) = AttemptRecord::of(entry.id(), journal) else {
            return;
        };
        let core = Core::restore(
            config(left.terms, false),
            &left.records(),
            first_epoch(),
            Duration::ZERO,
        );
        let paused = left.paused;
        let handover = SourceHandover::new(core, left.into_ledger(&source.context));
        let of = (paused, Some(reservation), false);
        let mut settling = Self::of(source, None, handover, of);
        drive_source(&mut settling).await;
        settling.free_if_over();
        settling.go_on();
    }

    fn of(
        source: &Arc<Source>,
        entry: Option<Arc<Entry>>,
        handover: SourceHandover,
        (paused, reservation, leaves): (bool, Option<Reservation>, bool),
    ) -> Self {
        let ledger = &handover.ledger;
        let about = About {
            context: source.context.clone(),
            guest: ledger.guest.clone(),
            host: ledger.host.clone(),
            shown: entry.map(|entry| (entry, ledger.terms.next())),
        };
        Self {
            companions: source.companions(&about),
            handover,
            paused,
            leaves,
            trouble: None,
            entry: None,
            reservation,
            session: None,
            dial: None,
            begins_with_missing: false,
            acknowledging: None,
            ends: None,
            reason: None,
            resolutions: None,
            ended: None,
            left: None,
        }
    }

    /// Continues in a task of its own.
    pub(crate) fn go_on(self) {
        crate::host::task::spawn(self.run());
    }

    async fn run(mut self) {
        if self.session.is_none() && self.dial.is_none() {
            // The task that this continues was connected, or was connecting.
            self.tell(Event::Lost).await;
            self.tell(Event::DialFailed(DialError::Unreachable)).await;
        }
        while self.ends.is_none() {
            self.free_if_over();
            self.show();
            self.finish().await;
            let happened = self.wait().await;
            self.handle(happened).await;
        }
        self.free_if_over();
        self.show();
        self.finish().await;
        if self.ends == Some(End::BothClosed) {
            self.handover.ledger.remove_journal();
        }
    }

    async fn tell(&mut self, event: Event) {
        tell_source(self, event).await;
    }

    async fn wait(&mut self) -> Happened {
        let timeout = self.handover.timeout();
        let drains = self.left.is_some() && self.session.is_some();
        tokio::select! {
            biased;
            () = until(timeout) => Happened::Timeout,
            resolve = resolution(&mut self.resolutions) => Happened::Resolved(resolve),
            message = next_message(&mut self.session) => Happened::Message(Box::new(message)),
            done = dialled(&mut self.dial) => Happened::Dialled(Box::new(done)),
            error = bulk_gone(&mut self.acknowledging) => Happened::BulkGone(error),
            message = next_of_rest(&mut self.left), if drains => Happened::Rest(message),
            () = sleep(LOOK_EVERY), if drains => Happened::Look,
        }
    }

    async fn handle(&mut self, happened: Happened) {
        match happened {
            Happened::Timeout => time_source(self).await,
            Happened::Message(message) => match *message {
                Ok(message) => self.heard(message).await,
                Err(error) => {
                    tracing::debug!(guest = self.handover.ledger.guest, %error, "it went");
                    self.session = None;
                    self.tell(Event::Lost).await;
                }
            },
            Happened::Dialled(done) => self.dialled(*done).await,
            Happened::BulkGone(error) => {
                tracing::info!(error, "the missing blocks cannot be sent now");
                self.tell(Event::Reconnect).await;
            }
            Happened::Rest(message) => {
                self.report_rest();
                self.send(message).await;
            }
            Happened::Resolved(Some(resolve)) => {
                let because = in_doubt::because(&self.handover.ledger.host, &resolve);
                self.reason.get_or_insert(failure::overruled(&because));
                self.tell(Event::Overrule(because)).await;
            }
            Happened::Resolved(None) | Happened::Look => {}
        }
        let copying = self.left.as_mut().and_then(|left| left.copying.as_mut());
        let complete = copying.and_then(Copying::news);
        self.report_memory_file(complete);
        let unreadable = self.left.as_mut().map(|left| left.draining.unreadable());
        for message in unreadable.unwrap_or_default() {
            self.send(message).await;
        }
    }

    /// Frees the guest's name once the journal shows that nothing remains to be done for it here.
    fn free_if_over(&mut self) {
        if self.entry.is_none() && self.ended.is_none() && self.handover.core.is_over() {
            self.reservation = None;
        }
    }

    /// Ends the companions with the attempt, once.
    async fn finish(&mut self) {
        let Some(entry) = self.ended.take() else {
            return;
        };
        let here = *self.handover.state() != SourceState::Closed { here: false };
        self.companions.finished(here).await;
        self.handover.ledger.context.archive.keep(&entry);
        self.reservation = None;
    }

    // The connection.

    async fn dial(&mut self, epoch: Option<Epoch>, any_journals: bool) -> Option<Event> {
        if epoch.is_some() {
            let found = self.find_left().await;
            if let Err(error) = found {
                let guest = &self.handover.ledger.guest;
                let why = error.to_string();
                if self.trouble.as_ref() != Some(&why) {
                    tracing::error!(guest, "{why}");
                }
                self.trouble = Some(why);
                return Some(Event::DialFailed(error.to_core()));
            }
        }
        let attempted = Attempted::of(&self.handover.ledger, any_journals);
        let context = &self.handover.ledger.context;
        self.dial = Some(Dial::begin(context, attempted, epoch, None));
        None
    }

    async fn dialled(&mut self, done: Dialled) {
        match done {
            Ok((session, state)) => {
                let epoch = session.line.as_ref().map(|line| line.epoch);
                self.begins_with_missing = epoch.is_some();
                if let (Some(entry), Some(state)) = (&self.entry, state) {
                    entry.heard(Some(in_doubt::record_of(state)));
                }
                self.session = Some(session);
                if *self.handover.state() == SourceState::Done
                    && let Some(resolutions) = &mut self.resolutions
                {
                    // Drops a decision that an operator made while the destination did not answer.
                    resolutions.mark_unchanged();
                }
                self.tell(Event::Connected { epoch, state }).await;
            }
            Err(error) => {
                let guest = &self.handover.ledger.guest;
                tracing::debug!(guest, %error, "the other host cannot be asked");
                if let Some(entry) = &self.entry {
                    entry.silent(&error.to_string());
                }
                if self.handover.core.is_over() && error.is_final() {
                    self.ends = Some(End::CannotTell);
                }
                self.tell(Event::DialFailed(error.to_core())).await;
            }
        }
    }

    /// Finds what missing blocks are sent from, unless it is known.
    async fn find_left(&mut self) -> Result<(), SessionError> {
        if self.left.is_some() {
            return Ok(());
        }
        let ledger = &self.handover.ledger;
        let (state, guest) = (&ledger.context.parts.config.state, &ledger.guest);
        let memory = LeftMemory::find(&ledger.context, guest, ledger.migration).await?;
        let copying = memory.as_ref().and_then(|left| left.copy(state, guest));
        let report = memory.as_ref().and_then(LeftMemory::report);
        let left = block_in_place(|| drain::left(state, guest, ledger.migration, memory))?;
        let Some(draining) = left else {
            return Ok(());
        };
        let answering = exports::keep_answering(state, guest).await;
        answering.map_err(|error| SessionError::Left(io::Error::other(error)))?;
        self.left = Some(DrainImages {
            worker: tokio::spawn(draining.sending().clone().work()),
            draining,
            copying,
        });
        self.report_memory_file(report);
        Ok(())
    }

    /// Sends the missing blocks over a session that begins with their lists.
    fn drain_over_session(&mut self) {
        let line = self
            .session
            .as_ref()
            .and_then(|session| session.line.clone());
        let Some(line) = line.filter(|_| self.begins_with_missing) else {
            return;
        };
        let Some(left) = &mut self.left else { return };
        let sending = left.draining.sending().clone();
        if left.worker.is_finished() {
            left.worker = tokio::spawn(sending.clone().work());
        }
        left.draining.connected(line.clone());
        self.acknowledging = Some(Acknowledging::begin(sending, line));
        self.trouble = None;
    }

    /// Ends the copy of memory, so that no file appears any more.
    fn stop_copying(&mut self) {
        let copying = self.left.as_mut().and_then(|left| left.copying.take());
        block_in_place(|| drop(copying));
    }

    fn stop_sending(&mut self) {
        self.acknowledging = None;
        if let Some(left) = &self.left {
            left.draining.sending().disconnect();
        }
    }

    /// Returns whether the guest, which runs at the destination, may need blocks from here.
    fn is_needed(&self) -> bool {
        self.leaves && *self.handover.state() == SourceState::Done
    }

    /// Reports the complete memory file.
    fn report_memory_file(&self, complete: Option<MemoryFileReport>) {
        if let (Some(entry), Some(complete)) = (&self.entry, complete) {
            entry.report_with(|report| report.memory_file = Some(complete));
        }
    }

    /// Updates the report with the result of the drain's comparison.
    fn report_rest(&self) {
        if let (Some(entry), Some(left)) = (&self.entry, &self.left) {
            entry.report_with(|report| left.draining.report(report));
        }
    }

    async fn heard(&mut self, message: ToSource) {
        if let Some(entry) = &self.entry {
            let record = match &message {
                ToSource::Status { state, .. } => Some(in_doubt::record_of(*state)),
                ToSource::Ready { .. } => Some(HandoverRecord::Ready),
                _ => None,
            };
            entry.heard(record);
        }
        if let Some(decided) = FromDestination::of(&message) {
            return self.tell(Event::Message(decided)).await;
        }
        let Some(left) = &mut self.left else { return };
        if let Err(error) = left.draining.hear(&message) {
            tracing::error!(%error, "what the destination lacks makes no sense");
            self.tell(Event::Reconnect).await;
        }
    }

    /// Sends a message. Returns `Lost` if this shows that the connection is lost.
    fn post(&mut self, message: ToDestination) -> Option<Event> {
        let session = self.session.as_mut()?;
        if let Err(error) = session.sender.send(&message) {
            tracing::debug!(%error, "the destination went");
            self.session = None;
            return Some(Event::Lost);
        }
        None
    }

    async fn send(&mut self, message: ToDestination) {
        if let Some(lost) = self.post(message) {
            self.tell(lost).await;
        }
    }

    /// Resumes the guest here, if its QEMU still exists. Returns false if it has to be tried again.
    async fn resume(&mut self) -> bool {
        // No blocks of it are sent any more.
        block_in_place(|| self.left = None);
        let ledger = &self.handover.ledger;
        forget_left_memory(ledger);
        let here = &ledger.context.parts.config.name;
        let guest = &ledger.guest;
        let records = of_attempt(&ledger.journal, ledger.terms);
        let (resumed, state) = match ledger.context.parts.guests.find(guest) {
            Ok(Some(found)) if is_stale(&records, found.description()) => {
                ledger.context.sweeper.wake();
                (true, stale(guest, here))
            }
            Ok(Some(found)) => {
                match resume(&found, !self.paused, ledger, &mut self.companions).await {
                    Ok(()) if self.paused => (true, format!("{guest} is paused on {here}")),
                    Ok(()) => (true, format!("{guest} runs on {here}")),
                    Err(error) => (
                        false,
                        format!(
                            "{guest} could not be resumed on {here}, which is tried again: {error}"
                        ),
                    ),
                }
            }
            Ok(None) => (true, format!("{guest} does not run on {here}")),
            Err(error) => (
                false,
                format!("cannot determine whether {guest} runs on {here}: {error}"),
            ),
        };
        tracing::info!(guest, "{state}");
        let reason = "the source's agent was restarted";
        let error = self
            .reason
            .take()
            .unwrap_or_else(|| ApiError::new(ErrorCode::Internal, reason));
        self.reason = Some(error.state_of_guest(state));
        resumed
    }

    /// Shows the state of the attempt in its entry.
    fn show(&mut self) {
        let Some(entry) = &self.entry else { return };
        let state = self.handover.state();
        let ledger = &self.handover.ledger;
        if state.in_doubt() {
            entry.in_doubt(HandoverRecord::Released, ledger.terms.next());
            if self.handover.core.released_to().is_some() {
                entry.arbiter_unless_known(&in_doubt::arbiter_is_asked());
            }
            if entry.outcome().is_none() {
                let doubt = Holder::InDoubt(ledger.host.clone());
                entry.end(
                    Outcome::InDoubt,
                    Some(failure::not_here(&ledger.guest, &doubt)),
                );
            }
            return;
        }
        let lost = self
            .handover
            .lost_for()
            .is_some_and(|time| time > LOST_AFTER);
        match (*state == SourceState::Done, lost) {
            // If the destination never returns, an operator may reclaim the guest.
            (true, true) => entry.in_doubt(HandoverRecord::Done, ledger.terms.next()),
            (true, false) | (false, _) => entry.certain(),
        }
        let there = matches!(
            state,
            SourceState::Done | SourceState::Retiring | SourceState::Closed { here: false }
        );
        if *state == SourceState::Overruled {
            // The destination may never hear of the decision.
            entry.end(Outcome::Failed, self.reason.take());
            ledger.context.archive.keep(entry);
            self.ended = self.entry.take();
            return;
        }
        if self.is_needed() {
            if entry.phase() != Phase::Finishing {
                entry.enter(Phase::Finishing);
            }
            entry.goes_on();
            let left = self.left.as_ref();
            let regions = left.map_or_else(Vec::new, |left| left.draining.progress());
            let found = || left.and_then(|left| left.draining.trouble());
            let trouble = self.trouble.clone().or_else(found);
            let lost_for = self.handover.lost_for();
            let silent = lost_for.map(|time| time.as_millis() as u64);
            entry.progress(|progress| {
                progress.regions = regions;
                progress.trouble = trouble;
                progress.link.interrupted_ms = silent;
            });
            return;
        }
        if there && entry.outcome() != Some(Outcome::Completed) {
            entry.end(Outcome::Completed, None);
        }
        if state.is_over() {
            if !there {
                entry.end(Outcome::Failed, self.reason.take());
            }
            ledger.context.archive.keep(entry);
            self.ended = self.entry.take();
        }
    }
}

/// Waits for the next message of the drain's comparison.
async fn next_of_rest(left: &mut Option<DrainImages>) -> ToDestination {
    match left {
        Some(left) => left.draining.next().await,
        None => std::future::pending().await,
    }
}

/// Waits until the bulk connection is lost.
async fn bulk_gone(acknowledging: &mut Option<Acknowledging>) -> String {
    let error = match acknowledging {
        Some(acknowledging) => acknowledging.ended().await.to_string(),
        None => std::future::pending().await,
    };
    *acknowledging = None;
    error
}

/// Waits until an operator decides.
async fn resolution(resolutions: &mut Option<watch::Receiver<Option<Resolve>>>) -> Option<Resolve> {
    let Some(changes) = resolutions else {
        return std::future::pending().await;
    };
    if changes.changed().await.is_err() {
        *resolutions = None;
        return None;
    }
    changes.borrow_and_update().clone()
}

/// Returns the configuration of the core for an attempt that is restored from its records.
fn config(terms: Terms, drains: bool) -> Config {
    Config {
        terms,
        patience: Duration::ZERO,
        downtime: Duration::ZERO,
        launch_within: None,
        verify: false,
        drains,
        arbiter: None,
        requires_arbiter: false,
    }
}

/// Removes the note of memory that is held here for the destination, and its memory file.
fn forget_left_memory(ledger: &Ledger) {
    let (state, guest) = (&ledger.context.parts.config.state, &ledger.guest);
    let forgotten = block_in_place(|| memory_file::forget(state, guest, ledger.migration));
    if let Err(error) = forgotten {
        tracing::warn!(guest, %error, "a note of its memory, or its memory file, stays");
    }
}

/// Returns whether blocks of a departed guest may be missing at the destination. Its disk exports
/// and its QEMU stay until all blocks are there.
fn leaves(context: &Context, guest: &str, migration: MigrationId) -> bool {
    let state = &context.parts.config.state;
    let disks = block_in_place(|| left_images::left(state, guest, migration));
    let memory = block_in_place(|| LeftNote::read(state, guest, migration));
    // Notes that cannot be read are read again when the blocks are sent.
    disks.map_or(true, |left| !left.is_empty()) || memory.map_or(true, |left| left.is_some())
}

/// Returns the first epoch of a restored attempt. The destination may have seen any number of
/// connections of an earlier agent, so epochs count from the current time. If the destination
/// rejects one as too low, higher ones follow.
fn first_epoch() -> Epoch {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Epoch(now.map_or(1, |now| now.as_secs() as u32))
}

fn phase(state: &SourceState) -> Phase {
    match state {
        SourceState::Released { .. } | SourceState::Overruling { .. } => Phase::HandingOver,
        SourceState::Done | SourceState::Finishing | SourceState::Retiring => Phase::Finishing,
        _ => Phase::Preparing,
    }
}

async fn resume(
    guest: &Guest,
    run: bool,
    ledger: &Ledger,
    companions: &mut Companions,
) -> Result<(), String> {
    let guests = &ledger.context.parts.guests;
    let lease = guests.lease(guest, COMMAND_TIMEOUT).await;
    let lease = lease.map_err(|error| error.to_string())?;
    let state = &ledger.context.parts.config.state;
    let stays = Stays::Interrupted {
        ran: run,
        stopped: exports::are_stopping(state, guest.name()),
    };
    let aborted = guests.abort_outgoing(guest, &lease, stays).await;
    aborted.map_err(|error| error.to_string())?;
    companions.resumed(guest, lease.qmp()).await;
    Ok(())
}
