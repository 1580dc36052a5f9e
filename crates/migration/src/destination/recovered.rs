//! The destination's side of an attempt without a task: its source is answered from the journal.
//!
//! After a restart of the agent every attempt is in this state. A guest that was READY continues to
//! wait for the source's decision, since its QEMU outlives the agent. A question about an unknown
//! attempt aborts that attempt, so that a late COMMIT is refused.

use crate::context::Context;
use crate::destination::Destination;
use crate::destination::companion::{About, Companions};
use crate::destination::fetch::{Begun, Fetch};
use crate::destination::guest_rate::RateAfter;
use crate::destination::handle::{AttemptHandle, Present};
use crate::destination::page_server;
use crate::disks::exports;
use crate::handover::attempt_record::{self, AttemptRecord, abort_reason};
use crate::handover::ledger::{
    DestinationHandover, DestinationOwner, Ledger, drive_destination, tell_destination,
    time_destination,
};
use crate::host::memory_notes::{ArrivingNote, MemoryNote};
use crate::status::in_doubt;
use crate::status::migration::Entry;
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{ApiError, ErrorCode, HandoverRecord, Outcome, Phase, Resolve, Side};
use longhaul_attempt::Destination as Core;
use longhaul_attempt::destination::{Action, Config, Event, FromSource};
use longhaul_engine::handover::{DestinationState, Record, Terms};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::{Commit, CommitError, Cookie, GuestManager};
use longhaul_protocol::message::{ToDestination, ToSource};
use longhaul_protocol::{AttemptId, Generation, HostId, MigrationId};
use longhaul_storage::{Journal, JournalError};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::block_in_place;
use tokio::time::Instant;

/// Time limit for a guest to run that waits for its memory.
const RUN_WITHIN: Duration = Duration::from_secs(600);
/// Interval between attempts to let such a guest run.
const AGAIN_EVERY: Duration = Duration::from_secs(1);

/// Why a source gets no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AnswerError {
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The attempt belongs to another host.
    #[error("this attempt is not of the host that asks")]
    NotYours,
    /// The message does not belong to an attempt without a task.
    #[error("this attempt is not in progress here")]
    OutOfPlace,
}

/// The attempts without a task that wait for their sources.
#[derive(Default)]
pub(crate) struct Attempts {
    waiting: Mutex<HashMap<MigrationId, RecoveredDestination>>,
}

/// The destination's side of an attempt without a task.
struct RecoveredDestination {
    handover: DestinationHandover,
    /// The source; `None` for an attempt that never began here.
    peer: Option<HostId>,
    paused: bool,
    entry: Option<Arc<Entry>>,
    _reservation: Option<Reservation>,
    outbox: Vec<ToSource>,
    /// Whether blocks of the guest's disks may be missing here.
    fetches: bool,
    /// Both journals are complete.
    finished: bool,
    /// Why the guest, which belongs to this host, does not run.
    trouble: Option<ApiError>,
    companions: Companions,
}

impl Attempts {
    /// Takes up an attempt of an earlier agent. When this returns, everything is done that does not
    /// depend on the source.
    pub(crate) async fn take_up(&self, context: &Arc<Destination>, left: AttemptRecord) {
        let migration = left.migration;
        let mut remembered = RecoveredDestination::of(context, left);
        if matches!(remembered.state(), DestinationState::Closed { .. }) {
            // The source knows that it is closed, or asks again; the answer needs no record.
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

    /// Handles a message of an attempt's source, and returns the answers.
    pub(crate) async fn answer(
        &self,
        context: &Arc<Destination>,
        peer: HostId,
        id: AttemptId,
        message: ToDestination,
    ) -> Result<Vec<ToSource>, AnswerError> {
        let event = match (&message, FromSource::of(&message)) {
            // The source is only answered: no blocks are received.
            (ToDestination::Ask { .. } | ToDestination::Resume { .. }, _) => Event::Called(None),
            (_, Some(FromSource::Cancel(reason))) => {
                Event::Message(FromSource::Cancel(crate::channel::short(&reason)))
            }
            // The guest may be without them.
            (ToDestination::HeldFrames(_) | ToDestination::Flows(_), _) => return Ok(Vec::new()),
            (_, Some(FromSource::Verified) | None) => return Err(AnswerError::OutOfPlace),
            (_, Some(message)) => Event::Message(message),
        };
        // One conversation at a time: two about the same attempt must not write to one journal.
        let mut waiting = self.waiting.lock().await;
        if context.closed.has(peer, id) {
            return Ok(vec![ToSource::Closed]);
        }
        let mut remembered = match waiting.remove(&id.migration) {
            Some(remembered) => remembered,
            None => RecoveredDestination::from_journal(context, id)?,
        };
        if remembered.peer.is_some_and(|of| of != peer)
            || remembered.handover.ledger.terms.attempt != id.attempt
        {
            if remembered.is_open() {
                waiting.insert(id.migration, remembered);
            }
            return Err(AnswerError::NotYours);
        }
        // Completes what the journal requires and could not be done when the attempt was taken up.
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
            context.closed.add(peer, remembered.handover.ledger);
            answers.push(ToSource::Closed);
        } else if remembered.is_open() {
            waiting.insert(id.migration, remembered);
        }
        Ok(answers)
    }

    /// Carries out an operator's decision about an attempt that waits here. Returns false if no
    /// such attempt waits.
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
        // An operator may give up the missing blocks of a guest that runs here.
        let entry = (!core.state().is_settled() || runs_incomplete(core.state()))
            .then(|| left.entry(context, Phase::HandingOver));
        let about = About {
            context: context.context.clone(),
            guest: left.guest.clone(),
            shown: entry.clone().map(|entry| (entry, left.terms.next())),
        };
        Self {
            companions: context.companions(&about),
            peer: Some(left.peer),
            paused: left.paused,
            entry,
            handover: DestinationHandover::new(core, left.into_ledger(&context.context)),
            _reservation: None,
            outbox: Vec::new(),
            fetches: false,
            finished: false,
            trouble: None,
        }
    }

    /// Creates the side of an attempt that is over here or is unknown.
    fn from_journal(context: &Arc<Destination>, id: AttemptId) -> Result<Self, JournalError> {
        let AttemptId { migration, attempt } = id;
        let journal = Journal::open(&context.journals, migration)?;
        let journal = match AttemptRecord::of(migration, journal) {
            Ok(left) => return Ok(Self::of(context, left)),
            Err(journal) => *journal,
        };
        let terms = Terms {
            attempt,
            generation: Generation(0),
            early: false,
            arbiter: None,
        };
        let records = attempt_record::of_attempt(&journal, terms);
        let core = core(terms, false, &records);
        let about = About {
            context: context.context.clone(),
            guest: String::new(),
            shown: None,
        };
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
            companions: context.companions(&about),
        })
    }

    fn state(&self) -> &DestinationState {
        self.handover.state()
    }

    /// Returns whether the attempt waits for its source.
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

    /// Checks whether the QEMU of a guest that waits for a decision has ended meanwhile.
    async fn look(&mut self) {
        if *self.state() != DestinationState::Ready {
            return;
        }
        let ledger = &self.handover.ledger;
        match ledger.context.parts.guests.find(&ledger.guest) {
            Ok(Some(_)) => {}
            Ok(None) => tell_destination(self, Event::QemuGone).await,
            Err(error) => tracing::error!(guest = ledger.guest, %error, "cannot look for it"),
        }
    }

    /// Returns whether blocks of the disks of a guest that runs here are missing.
    fn lacks_blocks(&self) -> bool {
        let ledger = &self.handover.ledger;
        let state = &ledger.context.parts.config.state;
        if attempt_record::incomplete_disks(&ledger.journal, ledger.terms).is_some() {
            return true;
        }
        match exports::incomplete(state, &ledger.guest, ledger.migration) {
            Ok(disks) => !disks.is_empty(),
            Err(error) => {
                // The fetch task checks again.
                tracing::error!(guest = ledger.guest, %error, "cannot look for its disks");
                true
            }
        }
    }

    /// Returns whether memory of a guest that runs here may be missing.
    fn lacks_memory(&self) -> bool {
        let ledger = &self.handover.ledger;
        let state = &ledger.context.parts.config.state;
        match ArrivingNote::read(state, &ledger.guest, ledger.migration) {
            Ok(note) => note.is_some_and(|note| !note.whole),
            Err(error) => {
                // The fetch task reads it again.
                tracing::error!(guest = ledger.guest, %error, "cannot look for its memory");
                true
            }
        }
    }

    /// Fetches the missing blocks, in a separate task.
    fn fetch(self, context: &Arc<Destination>) {
        let ledger = &self.handover.ledger;
        let id = ledger.attempt_id();
        let Some(peer) = self.peer else { return };
        let (arrival, called) = AttemptHandle::new(id, peer, self.handover.state());
        let begun = Begun {
            present: Present::new(&context.handles, arrival.clone()),
            entry: self.entry,
            handover: self.handover,
            reservation: self._reservation,
            arrival,
            called,
            call: None,
            bulk: None,
            memory: None,
            clock: None,
            rate: RateAfter::default(),
            meter: None,
            running: None,
            companions: self.companions,
        };
        crate::host::task::spawn(Fetch::new(context.clone(), begun).run());
    }

    /// Resumes the guest, unless it was resumed before or has moved on since. A guest that QEMU
    /// does not resume is left to its owner: it may have run before, so it is not given back to the
    /// source.
    async fn resume(&mut self) -> Event {
        let ledger = &self.handover.ledger;
        let (guest, generation) = (&ledger.guest, ledger.terms.next());
        match ledger.context.rights.get(guest) {
            Ok(Some(right)) if right.generation > generation => return Event::Resumed,
            Ok(_) => {}
            Err(error) => tracing::error!(guest, %error, "cannot read who may run it"),
        }
        let guests = &ledger.context.parts.guests;
        match block_in_place(|| guests.has_never_run(guest)) {
            Ok(true) => {
                let why = "its QEMU has ended with the agent, before the guest ran";
                return Event::ResumeFailed(why.to_owned());
            }
            Ok(false) => {}
            Err(error) => tracing::error!(guest, %error, "cannot tell whether it has run"),
        }
        let found = match guests.find(guest) {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(guest, %error, "cannot look for it");
                None
            }
        };
        // A guest without a QEMU may have run and ended here.
        let Some(found) = found else {
            return Event::Resumed;
        };
        if found.generation() == generation.0 {
            // The guest was resumed before, and its owner controls it since.
            return Event::Resumed;
        }
        let lacks_memory = self.lacks_memory();
        let commit = Commit {
            generation: generation.0,
            runs: !self.paused,
            follows: lacks_memory,
            cookie: Cookie::default(),
        };
        let guests = ledger.context.parts.guests.clone();
        self.companions.committed().await;
        if lacks_memory {
            // QEMU may need memory for that which has yet to come, and which the fetch brings.
            tokio::spawn(run_on_its_memory(guests, found, commit));
            self.companions.running();
            return Event::Resumed;
        }
        let ledger = &self.handover.ledger;
        let guest = &ledger.guest;
        if let Err(error) = guests.commit(&found, None, commit).await {
            tracing::error!(guest, %error, "committed, and does not run");
            let text = format!("QEMU did not let {guest} go on after the agent's restart: {error}");
            let here = &ledger.context.parts.config.name;
            let hint = format!(
                "remove what keeps it from running, then on {here}: longhaul guests resume {guest}"
            );
            let trouble = ApiError::new(ErrorCode::Internal, text).hint(hint);
            let state = format!("{guest} is {here}'s, and is stopped there");
            self.trouble = Some(trouble.state_of_guest(state));
        }
        if self.trouble.is_none() {
            self.companions.running();
        }
        Event::Resumed
    }

    /// Returns whether this host has had the right to run the guest since this attempt, which was
    /// not committed. A QEMU of that name then belongs to a later attempt or to the owner.
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

    /// Shows the state of the attempt, and its outcome.
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
            self.companions.finished();
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
                let guests = &ledger.context.parts.guests;
                if let Err(error) = guests.abort_incoming(&ledger.guest, None).await {
                    tracing::error!(guest = ledger.guest, %error, "something is left over");
                }
                let state = &ledger.context.parts.config.state;
                page_server::forget(state, &ledger.guest, ledger.migration).await;
                self.companions.ended().await;
                self.companions.aborted().await;
                return Some(Event::QemuGone);
            }
            Action::Fetch if self.lacks_blocks() => self.fetches = true,
            // All of the guest is here.
            Action::Fetch => return Some(Event::AllPresent),
            Action::Send(message) => self.outbox.push(message),
            Action::Finish => self.finished = true,
            // The source's channel exists already, and no blocks are received. `show` reports the
            // doubt, and the ledger carries out the other actions.
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
            | Action::CheckArbiter(_)
            | Action::Claim(_)
            | Action::Write(_)
            | Action::Note(_) => {}
        }
        None
    }
}

/// Lets a guest run whose memory may be missing: its QEMU answers nothing while it waits for some.
async fn run_on_its_memory(guests: Arc<dyn GuestManager>, guest: Guest, commit: Commit) {
    let name = guest.name().to_owned();
    let deadline = Instant::now() + RUN_WITHIN;
    loop {
        match guests.commit(&guest, None, commit.clone()).await {
            Ok(()) => return,
            Err(CommitError::Unknown(why))
                if Instant::now() < deadline && matches!(guests.find(&name), Ok(Some(_))) =>
            {
                tracing::info!(guest = name, why, "told to run, no answer");
                tokio::time::sleep(AGAIN_EVERY).await;
            }
            Err(error) => {
                return tracing::error!(guest = name, %error, "committed, and does not run");
            }
        }
    }
}

fn runs_incomplete(state: &DestinationState) -> bool {
    *state == (DestinationState::Running { all_present: false })
}

/// Restores the core of an attempt from its records.
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
