//! The destination's side of an attempt that no task is busy with: it is answered from its journal.
//!
//! After a restart of the agent that is every attempt; one that had loaded everything waits on for
//! the source's decision, since its QEMU outlives the agent. An attempt that was never heard of is
//! aborted by being asked for, so that a late COMMIT is refused.

use crate::context::Context;
use crate::destination::Destination;
use crate::destination::attempt::{AttemptHandle, Present};
use crate::destination::fetch::{Begun, Fetch};
use crate::disks::{exports, images};
use crate::handover::attempt_record::{self, AttemptRecord, abort_reason};
use crate::handover::ledger::{
    DestinationHandover, DestinationOwner, Ledger, drive_destination, tell_destination,
    time_destination,
};
use crate::host::hooks::Step;
use crate::status::in_doubt;
use crate::status::migration::Entry;
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{ApiError, ErrorCode, HandoverRecord, Outcome, Phase, Resolve, Side};
use longhaul_attempt::Destination as Core;
use longhaul_attempt::destination::{Action, Config, Event, FromSource};
use longhaul_engine::handover::{DestinationState, Record, Terms};
use longhaul_hypervisor::memory::{self, Continuation};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{Attempt, Generation, HostId, MigrationId};
use longhaul_storage::{Journal, JournalError};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Mutex;

/// Why a source is not answered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerError {
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The attempt is another host's.
    #[error("this attempt is not of the host that asks")]
    NotYours,
    /// The message does not belong to a conversation about an attempt without a task.
    #[error("nobody is busy with this attempt")]
    OutOfPlace,
}

/// Closed attempts that are known yet.
const CLOSED_MAX: usize = 256;

/// The attempts that wait for their sources without a task.
#[derive(Default)]
pub(crate) struct Attempts {
    waiting: Mutex<HashMap<MigrationId, RecoveredDestination>>,
    /// Lately closed. A question about one of them that was overtaken on its way is not one about
    /// an attempt that never began, which would need a record that nobody removes; and an offer
    /// that was is not accepted, since its source would not come for what it leaves.
    closed: std::sync::Mutex<VecDeque<(HostId, MigrationId, Attempt)>>,
}

/// The destination's side without its task.
struct RecoveredDestination {
    handover: DestinationHandover,
    /// The source; none for an attempt that never began here.
    peer: Option<HostId>,
    paused: bool,
    entry: Option<Arc<Entry>>,
    _reservation: Option<Reservation>,
    outbox: Vec<ToSource>,
    /// Blocks of its disks may be missing here.
    fetches: bool,
    /// Both journals are complete.
    finished: bool,
    /// The guest is ours, and would not go on.
    trouble: Option<ApiError>,
}

impl Attempts {
    /// Takes up what an earlier agent left: what has to be done here is done when this returns.
    pub(crate) async fn take_up(&self, context: &Arc<Destination>, left: AttemptRecord) {
        let migration = left.migration;
        let mut remembered = RecoveredDestination::of(context, left);
        if matches!(remembered.state(), DestinationState::Closed { .. }) {
            // The source was told, or asks once more, and needs no record for the answer.
            return remembered.handover.ledger.remove_journal();
        }
        if remembered.is_open() || runs_incomplete(remembered.state()) {
            remembered.keep(context);
        }
        drive_destination(&mut remembered).await;
        remembered.look().await;
        if remembered.fetches {
            return remembered.fetch(context);
        }
        remembered.show();
        if remembered.is_open() {
            self.waiting.lock().await.insert(migration, remembered);
        }
    }

    /// Removes the journal of an attempt that is closed on both sides.
    pub(crate) fn close(&self, source: HostId, ledger: Ledger) {
        let attempt = (source, ledger.migration, ledger.terms.attempt);
        let mut closed = self.closed();
        closed.truncate(CLOSED_MAX - 1);
        closed.push_front(attempt);
        drop(closed);
        ledger.remove_journal();
    }

    /// Whether an attempt was lately closed here.
    pub(crate) fn is_closed(&self, source: HostId, of: (MigrationId, Attempt)) -> bool {
        self.closed().contains(&(source, of.0, of.1))
    }

    fn closed(&self) -> MutexGuard<'_, VecDeque<(HostId, MigrationId, Attempt)>> {
        // What is inside is whole whenever the lock is free.
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What an attempt's source is told.
    pub(crate) async fn answer(
        &self,
        context: &Arc<Destination>,
        peer: HostId,
        (migration, attempt): (MigrationId, Attempt),
        message: ToDestination,
    ) -> Result<Vec<ToSource>, AnswerError> {
        let event = match (&message, FromSource::of(&message)) {
            // It is only answered: no block is taken.
            (ToDestination::Ask { .. } | ToDestination::Resume { .. }, _) => Event::Called(None),
            (_, Some(FromSource::Cancel(reason))) => {
                Event::Message(FromSource::Cancel(crate::channel::short(&reason)))
            }
            (_, Some(FromSource::Verified) | None) => return Err(AnswerError::OutOfPlace),
            (_, Some(message)) => Event::Message(message),
        };
        // One at a time: two conversations about one attempt must not write one journal.
        let mut waiting = self.waiting.lock().await;
        if self.is_closed(peer, (migration, attempt)) {
            return Ok(vec![ToSource::Closed]);
        }
        let mut remembered = match waiting.remove(&migration) {
            Some(remembered) => remembered,
            None => RecoveredDestination::from_journal(context, migration, attempt)?,
        };
        if remembered.peer.is_some_and(|of| of != peer)
            || remembered.handover.ledger.terms.attempt != attempt
        {
            if remembered.is_open() {
                waiting.insert(migration, remembered);
            }
            return Err(AnswerError::NotYours);
        }
        // What the journal says and could not be finished when it was taken up.
        remembered.handover.core.attend();
        drive_destination(&mut remembered).await;
        remembered.look().await;
        time_destination(&mut remembered).await;
        remembered.outbox.clear();
        tell_destination(&mut remembered, event).await;
        if remembered.fetches {
            let answers = std::mem::take(&mut remembered.outbox);
            remembered.fetch(context);
            return Ok(answers);
        }
        remembered.show();
        let mut answers = std::mem::take(&mut remembered.outbox);
        if remembered.finished {
            self.close(peer, remembered.handover.ledger);
            answers.push(ToSource::Closed);
        } else if remembered.is_open() {
            waiting.insert(migration, remembered);
        }
        Ok(answers)
    }

    /// A person decides about an attempt that waits here; false where none of that id does.
    pub(crate) async fn resolve(
        &self,
        context: &Arc<Destination>,
        migration: MigrationId,
        resolve: &Resolve,
    ) -> bool {
        let mut waiting = self.waiting.lock().await;
        let Some(mut remembered) = waiting.remove(&migration) else {
            return false;
        };
        let because = in_doubt::because(&remembered.handover.ledger.host, resolve);
        remembered.look().await;
        let event = match resolve.run_on {
            Side::Destination => Event::Overrule(because),
            Side::Source => Event::GiveUp(crate::channel::short(&because)),
        };
        tell_destination(&mut remembered, event).await;
        if remembered.fetches {
            remembered.fetch(context);
            return true;
        }
        remembered.show();
        remembered.outbox.clear();
        if remembered.is_open() {
            waiting.insert(migration, remembered);
        }
        true
    }
}

impl RecoveredDestination {
    fn of(context: &Arc<Destination>, left: AttemptRecord) -> Self {
        let core = core(left.terms, true, &left.records());
        Self {
            peer: Some(left.peer),
            paused: left.paused,
            // What is missing of a guest that runs here may be given up.
            entry: (!core.state().is_settled() || runs_incomplete(core.state()))
                .then(|| left.entry(context, Phase::HandingOver)),
            handover: DestinationHandover::new(core, left.into_ledger(&context.context)),
            _reservation: None,
            outbox: Vec::new(),
            fetches: false,
            finished: false,
            trouble: None,
        }
    }

    /// An attempt that is over here, or was never heard of.
    fn from_journal(
        context: &Arc<Destination>,
        migration: MigrationId,
        attempt: Attempt,
    ) -> Result<Self, JournalError> {
        let journal = Journal::open(&context.journals, migration)?;
        let journal = match AttemptRecord::of(migration, journal) {
            Ok(left) => return Ok(Self::of(context, left)),
            Err(journal) => *journal,
        };
        let terms = Terms {
            attempt,
            generation: Generation(0),
            early: false,
        };
        let records = attempt_record::of_attempt(&journal, terms);
        let core = core(terms, false, &records);
        let ledger = Ledger::new(
            context.context.clone(),
            migration,
            "",
            ("", None),
            terms,
            journal,
        );
        Ok(Self {
            peer: None,
            paused: false,
            entry: None,
            handover: DestinationHandover::new(core, ledger),
            _reservation: None,
            outbox: Vec::new(),
            fetches: false,
            finished: false,
            trouble: None,
        })
    }

    fn state(&self) -> &DestinationState {
        self.handover.state()
    }

    /// Whether it waits for its source.
    fn is_open(&self) -> bool {
        self.entry.is_some() && !self.handover.state().is_settled()
    }

    fn keep(&mut self, context: &Context) {
        let ledger = &self.handover.ledger;
        let taken = Taken::Moving(ledger.migration, Side::Destination);
        match context.registry.take(&ledger.guest, taken) {
            Ok(reservation) => self._reservation = Some(reservation),
            Err(error) => tracing::error!(guest = ledger.guest, %error, "not kept"),
        }
    }

    /// A copy that waits for a decision may have ended meanwhile.
    async fn look(&mut self) {
        if *self.state() != DestinationState::Ready {
            return;
        }
        let ledger = &self.handover.ledger;
        match crate::host::qemu::find(&ledger.context.parts.config.state, &ledger.guest) {
            Ok(Some(_)) => {}
            Ok(None) => tell_destination(self, Event::QemuGone).await,
            Err(error) => tracing::error!(guest = ledger.guest, %error, "cannot look for it"),
        }
    }

    /// Whether blocks of the disks of a guest that runs here are missing.
    fn lacks_blocks(&self) -> bool {
        let ledger = &self.handover.ledger;
        let state = &ledger.context.parts.config.state;
        if attempt_record::incomplete_disks(&ledger.journal, ledger.terms).is_some() {
            return true;
        }
        match exports::incomplete(state, &ledger.guest, ledger.migration) {
            Ok(disks) => !disks.is_empty(),
            Err(error) => {
                // What fetches looks again.
                tracing::error!(guest = ledger.guest, %error, "cannot look for its disks");
                true
            }
        }
    }

    /// Fetches them, in a task of its own.
    fn fetch(self, context: &Arc<Destination>) {
        let ledger = &self.handover.ledger;
        let attempt = (ledger.migration, ledger.terms.attempt);
        let Some(peer) = self.peer else { return };
        let (arrival, called) = AttemptHandle::again(attempt, peer, self.handover.state());
        let begun = Begun {
            present: Present::new(context, arrival.clone()),
            entry: self.entry,
            handover: self.handover,
            reservation: self._reservation,
            arrival,
            called,
            call: None,
            clock: None,
            running: None,
        };
        crate::host::task::spawn(Fetch::new(context.clone(), begun).run());
    }

    /// Tells the guest to run, unless it was told, or has changed hands since. One that would not
    /// is left to its owner: whether it ran before is not known, so it is not given back.
    async fn resume(&mut self) -> Event {
        let ledger = &self.handover.ledger;
        let (guest, generation) = (&ledger.guest, ledger.terms.next());
        match ledger.context.rights.get(guest) {
            Ok(Some(right)) if right.generation > generation => return Event::Resumed,
            Ok(_) => {}
            Err(error) => tracing::error!(guest, %error, "cannot read who may run it"),
        }
        let found = match crate::host::qemu::find(&ledger.context.parts.config.state, guest) {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(guest, %error, "cannot look for it");
                None
            }
        };
        // One that is not there may have run, and ended here.
        let Some(mut found) = found else {
            return Event::Resumed;
        };
        if found.record().generation == generation.0 {
            // It was told to run, and has been its owner's since.
            return Event::Resumed;
        }
        if let Some(entry) = &self.entry {
            ledger
                .context
                .last_hook(entry, Step::Taken, generation)
                .await;
        }
        if !self.paused {
            let resumed = match found.connect().await {
                Ok(qmp) => memory::resume(&qmp, Continuation::Running)
                    .await
                    .map_err(|e| e.to_string()),
                Err(error) => Err(error.to_string()),
            };
            if let Err(error) = resumed {
                tracing::error!(guest, error, "committed, and does not run");
                let text =
                    format!("QEMU did not let {guest} go on after the agent's restart: {error}");
                let here = &ledger.context.parts.config.name;
                let hint = "remove what keeps it from running, then `cont` in its monitor";
                let trouble = ApiError::new(ErrorCode::Internal, text).hint(hint);
                let state = format!("{guest} is {here}'s, and stands still there");
                self.trouble = Some(trouble.state_of_guest(state));
            }
        }
        if let Err(error) = found.set_generation(generation.0) {
            tracing::error!(guest, %error, "cannot note the generation");
        }
        if let Some(entry) = &self.entry
            && self.trouble.is_none()
        {
            ledger.context.running(entry, generation);
        }
        Event::Resumed
    }

    /// Whether this host has had the right to run the guest since this attempt, which was not
    /// committed: a QEMU of that name is a later one's, or the owner's.
    fn is_anothers(&self) -> bool {
        let ledger = &self.handover.ledger;
        let records = attempt_record::of_attempt(&ledger.journal, ledger.terms);
        let committed = |record: &Record| matches!(record, Record::Committed { .. });
        if records.iter().any(committed) {
            return false;
        }
        match ledger.context.rights.get(&ledger.guest) {
            Ok(right) => right.is_some_and(|right| {
                right.holder == longhaul_storage::Holder::Here
                    && right.generation >= ledger.terms.generation
            }),
            Err(error) => {
                tracing::error!(guest = ledger.guest, %error, "cannot read who may run it");
                true
            }
        }
    }

    /// Tells people how it stands.
    fn show(&mut self) {
        let Some(entry) = &self.entry else { return };
        let ledger = &self.handover.ledger;
        let guest = &ledger.guest;
        match self.handover.state() {
            DestinationState::Ready => {
                if entry.outcome().is_none() {
                    let text = format!(
                        "{guest} is all here and waits for {}, which has not said that it may run",
                        ledger.host
                    );
                    let error = ApiError::new(ErrorCode::InDoubt, text).hint(
                        "it is decided as soon as the two agents meet: see `longhaul migrations`",
                    );
                    entry.in_doubt(HandoverRecord::Ready, ledger.terms.next());
                    entry.end(Outcome::InDoubt, Some(error));
                }
            }
            state if state.owns_guest() => entry.end(Outcome::Completed, self.trouble.take()),
            state if state.is_settled() => {
                let reason = abort_reason(ledger.journal.records());
                let state = format!("{guest} stays at {}", ledger.host);
                let error = ApiError::new(ErrorCode::Internal, reason).state_of_guest(state);
                entry.end(Outcome::Failed, Some(error));
            }
            _ => return,
        }
        if self.handover.state().is_settled() {
            tokio::task::block_in_place(|| images::sweep(&ledger.context));
            ledger.context.archive.keep(entry);
            self.entry = None;
        }
    }
}

impl DestinationOwner for RecoveredDestination {
    fn handover(&mut self) -> &mut DestinationHandover {
        &mut self.handover
    }

    async fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Resume => return Some(self.resume().await),
            Action::Quit if self.is_anothers() => {
                let guest = &self.handover.ledger.guest;
                tracing::info!(
                    guest,
                    "its QEMU here is not of this attempt, and is left alone"
                );
                return Some(Event::QemuGone);
            }
            Action::Quit => {
                let ledger = &self.handover.ledger;
                if let Err(error) =
                    crate::host::qemu::remove(&ledger.context.parts.config.state, &ledger.guest)
                        .await
                {
                    tracing::error!(guest = ledger.guest, %error, "something is left over");
                }
                let state = &ledger.context.parts.config.state;
                exports::ended(state, &ledger.guest, false).await;
                if let Some(entry) = &self.entry {
                    let next = ledger.terms.next();
                    ledger.context.last_hook(entry, Step::NotComing, next).await;
                }
                return Some(Event::QemuGone);
            }
            Action::Fetch if self.lacks_blocks() => self.fetches = true,
            // All of the guest is here.
            Action::Fetch => return Some(Event::AllPresent),
            Action::Send(message) => self.outbox.push(message),
            Action::Finish => self.finished = true,
            // It has a conversation, and nothing is received; the doubt is shown by its state, and
            // the rest is the ledger's.
            Action::Take
            | Action::Accept(_)
            | Action::Decline
            | Action::Hangup
            | Action::SendAccepted
            | Action::SendMissing
            | Action::Load
            | Action::AskReady
            | Action::ShowDoubt
            | Action::FillMissing
            | Action::Write(_)
            | Action::Note(_) => {}
        }
        None
    }
}

fn runs_incomplete(state: &DestinationState) -> bool {
    *state == (DestinationState::Running { all_present: false })
}

/// The core of an attempt that goes on from its records.
fn core(terms: Terms, fetches: bool, records: &[Record]) -> Core {
    let config = Config {
        terms,
        patience: Duration::ZERO,
        verify: false,
        fetches,
        awaits_bases: false,
    };
    Core::restore(config, records, Duration::ZERO)
}
