//! Carries out the actions that the core of an attempt decides. The ledger writes records and notes
//! the right to run the guest. The attempt's owner carries out all other actions.
//!
//! ```text
//! event -> core -> actions -> record, note (here)              -> event
//!                          -> the guest, connections (`act`)   -> event
//! ```

use crate::context::Context;
use crate::host::arbiter::{self, Answer};
use crate::host::fail_point;
use longhaul_attempt::source::Claimed;
use longhaul_attempt::{Destination, Source, destination, source};
use longhaul_engine::handover::{DestinationState, Record, SourceState, Terms};
use longhaul_protocol::{AttemptId, Generation, HostId, Incarnation, MigrationId, StoreId};
use longhaul_storage::{Holder, Journal, Right, RightsError};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::Instant;

/// The journal of an attempt, and the right to run its guest.
pub(crate) struct Ledger {
    pub(crate) context: Arc<Context>,
    pub(crate) migration: MigrationId,
    pub(crate) guest: String,
    /// The peer's name on this host when the attempt began.
    pub(crate) host: String,
    /// The peer. None if the journal only answers for an attempt that never began here.
    pub(crate) peer: Option<HostId>,
    pub(crate) terms: Terms,
    pub(crate) journal: Journal,
}

/// How long the destination asks the arbiter for its lease, while the guest is stopped.
const CLAIM_WITHIN: Duration = Duration::from_secs(3);
/// Between two questions.
const CLAIM_EVERY: Duration = Duration::from_millis(250);

/// A change of the right to run the guest.
enum Noting {
    Set(Right),
    GiveBack { taken: Right, back: Right },
}

impl Ledger {
    pub(crate) fn new(
        context: Arc<Context>,
        migration: MigrationId,
        guest: &str,
        (host, peer): (&str, Option<HostId>),
        terms: Terms,
        journal: Journal,
    ) -> Self {
        Self {
            context,
            migration,
            guest: guest.to_owned(),
            host: host.to_owned(),
            peer,
            terms,
            journal,
        }
    }

    /// Returns the id of the attempt.
    pub(crate) fn attempt_id(&self) -> AttemptId {
        AttemptId {
            migration: self.migration,
            attempt: self.terms.attempt,
        }
    }

    /// Returns the incarnation of the destination's journals that this attempt was offered to, if
    /// known.
    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        let attempt = self.terms.attempt;
        let records = self.journal.records().iter().rev();
        records
            .filter(|record| record.attempt() == attempt)
            .find_map(|record| match record {
                Record::Peer { incarnation, .. } => Some(*incarnation),
                _ => None,
            })
    }

    /// Asks the arbiter for the lease of the next generation.
    pub(crate) async fn claim(&self, store: StoreId) -> Answer {
        let networks = &self.context.parts.networks;
        let next = self.terms.next();
        let answer = arbiter::acquire(networks, store, &self.guest, next).await;
        tracing::info!(migration = %self.migration, ?next, ?answer, "asked the arbiter");
        answer
    }

    /// Asks the arbiter as long as the guest may be stopped for it.
    async fn claim_in_time(&self, store: StoreId) -> Claimed {
        let until = Instant::now() + CLAIM_WITHIN;
        let asking = async {
            loop {
                match self.claim(store).await {
                    Answer::Granted => return Claimed::Granted,
                    Answer::Denied(..) => return Claimed::Denied,
                    Answer::None(_) => tokio::time::sleep(CLAIM_EVERY).await,
                }
            }
        };
        let claimed = tokio::time::timeout_at(until, asking).await;
        claimed.unwrap_or(Claimed::Unanswered)
    }

    fn reaches(&self, store: StoreId) -> bool {
        arbiter::is_reached(&self.context.parts.networks, store)
    }

    fn append(&mut self, record: &Record) -> bool {
        let written = block_in_place(|| fail_point::append(&mut self.journal, record));
        if let Err(error) = &written {
            tracing::error!(migration = %self.migration, %error, "a record cannot be written");
        }
        written.is_ok()
    }

    /// Notes the right as the source knows it. Returns false if the note must be retried.
    fn note_of_source(&self, note: &source::Note) -> bool {
        let in_doubt = || Holder::InDoubt {
            host: self.host.clone(),
        };
        match note {
            source::Note::InDoubt(generation) => self.note(*generation, in_doubt()),
            source::Note::There(generation) => self.note(*generation, self.elsewhere()),
            source::Note::Conceded(generation) => self.concede(*generation),
            source::Note::BackHere => self.give_back(in_doubt(), Holder::Here),
            source::Note::Here(generation) => self.note(*generation, Holder::Here),
        }
    }

    /// Notes the right as the destination knows it. Returns false if the note must be retried.
    fn note_of_destination(&self, note: &destination::Note) -> bool {
        match note {
            destination::Note::Here(generation) => self.note(*generation, Holder::Here),
            destination::Note::BackThere => self.give_back(Holder::Here, self.elsewhere()),
            destination::Note::Conceded(generation) => self.concede(*generation),
        }
    }

    /// Notes the holder of the right. Removes the guest's mark if the holder is this host.
    fn note(&self, generation: Generation, holder: Holder) -> bool {
        let here = holder == Holder::Here;
        let right = self.right(generation, holder);
        let noted = self.try_to_note(&Noting::Set(right));
        if here {
            self.context.unmark(&self.guest);
        }
        noted
    }

    /// Sets the right back to the source's generation. The guest never ran in the later one.
    fn give_back(&self, taken: Holder, holder: Holder) -> bool {
        let taken = self.right(self.terms.next(), taken);
        let back = self.right(self.terms.generation, holder);
        self.try_to_note(&Noting::GiveBack { taken, back })
    }

    fn right(&self, generation: Generation, holder: Holder) -> Right {
        Right {
            guest: self.guest.clone(),
            generation,
            holder,
        }
    }

    fn try_to_note(&self, noting: &Noting) -> bool {
        let rights = &self.context.rights;
        let noted = block_in_place(|| match noting {
            Noting::Set(right) => rights.set(right),
            Noting::GiveBack { taken, back } => rights.give_back(taken, back),
        });
        match noted {
            Ok(()) => true,
            Err(error) => {
                // The journal contains this too. While the journal exists, it is read before the
                // rights.
                tracing::error!(guest = self.guest, %error, "cannot note who may run the guest");
                !matches!(error, RightsError::Io { .. })
            }
        }
    }

    fn elsewhere(&self) -> Holder {
        Holder::Elsewhere {
            host: self.host.clone(),
        }
    }

    /// Notes that an operator gave the guest to the other host. This is noted even if a copy of the
    /// guest is here: the copy may already be on its way back, and if it runs it must not be
    /// started again.
    fn concede(&self, generation: Generation) -> bool {
        let noted = self.note(generation, self.elsewhere());
        match self.context.parts.guests.find(&self.guest) {
            Ok(Some(_)) => tracing::error!(
                guest = self.guest,
                "{} runs this guest by an operator's decision, and there is a copy of it here \
                 too: stop one of them",
                self.host
            ),
            Ok(None) => {}
            Err(error) => tracing::error!(guest = self.guest, %error, "cannot look for the guest"),
        }
        noted
    }

    /// Removes the journal. Both sides have closed theirs, so it is no longer needed.
    pub(crate) fn remove_journal(self) {
        let path = self.journal.path().to_owned();
        if let Err(error) = block_in_place(|| self.journal.remove()) {
            tracing::warn!(path = %path.display(), %error, "an ended journal stays");
        }
    }
}

/// The source's core of an attempt, with its ledger.
pub(crate) struct SourceHandover {
    pub(crate) core: Source,
    pub(crate) ledger: Ledger,
    began: Instant,
}

impl SourceHandover {
    /// Creates the handover. The core's time zero is now.
    pub(crate) fn new(core: Source, ledger: Ledger) -> Self {
        Self {
            core,
            ledger,
            began: Instant::now(),
        }
    }

    pub(crate) fn state(&self) -> &SourceState {
        self.core.state()
    }

    /// Returns when the core next has a timeout to handle.
    pub(crate) fn timeout(&self) -> Option<Instant> {
        self.core.poll_timeout().map(|at| self.began + at)
    }

    /// Reports to the core whether the arbiter is reached, before the guest is released.
    pub(crate) fn look_for_arbiter(&mut self) {
        if let Some(store) = self.core.arbiter() {
            let reached = self.ledger.reaches(store);
            self.handle(source::Event::Arbiter(reached));
        }
    }

    /// Returns the time since the destination was lost. None while it is connected.
    pub(crate) fn lost_for(&self) -> Option<Duration> {
        let now = self.began.elapsed();
        self.core.lost_at().map(|at| now.saturating_sub(at))
    }

    fn handle(&mut self, event: source::Event) {
        let before = self.core.state().clone();
        self.core.handle(event, self.began.elapsed());
        self.log(&before);
    }

    fn handle_timeout(&mut self) {
        let before = self.core.state().clone();
        self.core.handle_timeout(self.began.elapsed());
        self.log(&before);
    }

    fn log(&self, before: &SourceState) {
        let state = self.core.state();
        if state != before {
            tracing::info!(migration = %self.ledger.migration, ?state, "handover");
        }
    }
}

/// The owner of the source's handover: it has the guest, and while connected the connection.
pub(crate) trait SourceOwner: Send {
    /// Returns the handover.
    fn handover(&mut self) -> &mut SourceHandover;
    /// Carries out an action that is not the ledger's, and returns the event that results.
    fn act(&mut self, action: source::Action)
    -> impl Future<Output = Option<source::Event>> + Send;
}

/// Passes an event to the core, and carries out the resulting actions.
pub(crate) async fn tell_source<O: SourceOwner>(owner: &mut O, event: source::Event) {
    owner.handover().handle(event);
    drive_source(owner).await;
}

/// Lets the core handle a timeout that is due, and carries out the resulting actions.
pub(crate) async fn time_source<O: SourceOwner>(owner: &mut O) {
    let handover = owner.handover();
    if handover.timeout().is_some_and(|at| at <= Instant::now()) {
        handover.handle_timeout();
    }
    drive_source(owner).await;
}

/// Carries out all pending actions of the core.
pub(crate) async fn drive_source<O: SourceOwner>(owner: &mut O) {
    use source::{Action, Event};
    let stays = SourceState::Closed { here: true };
    let stayed = *owner.handover().state() == stays;
    while let Some(action) = owner.handover().core.poll_action() {
        if action == Action::AskRelease {
            owner.handover().look_for_arbiter();
        }
        let ledger = &mut owner.handover().ledger;
        let event = match action {
            Action::Write(record) => Some(match ledger.append(&record) {
                true => Event::Written(record),
                false => Event::WriteFailed(record),
            }),
            Action::Note(note) => Some(match ledger.note_of_source(&note) {
                true => Event::Noted(note),
                false => Event::NoteFailed(note),
            }),
            action => owner.act(action).await,
        };
        if let Some(event) = event {
            owner.handover().handle(event);
        }
    }
    if !stayed && *owner.handover().state() == stays {
        let ledger = &owner.handover().ledger;
        ledger.context.parts.guests.settle_guest(&ledger.guest);
    }
}

/// The destination's core of an attempt, with its ledger.
pub(crate) struct DestinationHandover {
    pub(crate) core: Destination,
    pub(crate) ledger: Ledger,
    began: Instant,
}

impl DestinationHandover {
    /// Creates the handover. The core's time zero is now.
    pub(crate) fn new(core: Destination, ledger: Ledger) -> Self {
        Self {
            core,
            ledger,
            began: Instant::now(),
        }
    }

    pub(crate) fn state(&self) -> &DestinationState {
        self.core.state()
    }

    /// Returns when the core next has a timeout to handle.
    pub(crate) fn timeout(&self) -> Option<Instant> {
        self.core.poll_timeout().map(|at| self.began + at)
    }

    /// Returns whether the destination declines connections of the source for now. It does so for a
    /// while after the source's data could not be applied.
    pub(crate) fn is_paused(&self) -> bool {
        self.core.is_paused(self.began.elapsed())
    }

    /// Returns the time since the source was lost. None while it is connected.
    pub(crate) fn lost_for(&self) -> Option<Duration> {
        let now = self.began.elapsed();
        self.core.lost_at().map(|at| now.saturating_sub(at))
    }

    fn handle(&mut self, event: destination::Event) {
        let before = self.core.state().clone();
        self.core.handle(event, self.began.elapsed());
        self.log(&before);
    }

    fn handle_timeout(&mut self) {
        let before = self.core.state().clone();
        self.core.handle_timeout(self.began.elapsed());
        self.log(&before);
    }

    fn log(&self, before: &DestinationState) {
        let state = self.core.state();
        if state != before {
            tracing::info!(migration = %self.ledger.migration, ?state, "handover");
        }
    }
}

/// The owner of the destination's handover: it has the guest, and while connected the connection.
pub(crate) trait DestinationOwner: Send {
    /// Returns the handover.
    fn handover(&mut self) -> &mut DestinationHandover;
    /// Carries out an action that is not the ledger's, and returns the event that results.
    fn act(
        &mut self,
        action: destination::Action,
    ) -> impl Future<Output = Option<destination::Event>> + Send;
}

/// Passes an event to the core, and carries out the resulting actions.
pub(crate) async fn tell_destination<O: DestinationOwner>(
    owner: &mut O,
    event: destination::Event,
) {
    owner.handover().handle(event);
    drive_destination(owner).await;
}

/// Lets the core handle a timeout that is due, and carries out the resulting actions.
pub(crate) async fn time_destination<O: DestinationOwner>(owner: &mut O) {
    let handover = owner.handover();
    if handover.timeout().is_some_and(|at| at <= Instant::now()) {
        handover.handle_timeout();
    }
    drive_destination(owner).await;
}

/// Carries out all pending actions of the core.
pub(crate) async fn drive_destination<O: DestinationOwner>(owner: &mut O) {
    use destination::{Action, Event};
    while let Some(action) = owner.handover().core.poll_action() {
        let ledger = &mut owner.handover().ledger;
        let event = match action {
            Action::Write(record) => Some(match ledger.append(&record) {
                true => Event::Written(record),
                false => Event::WriteFailed(record),
            }),
            Action::Note(note) => Some(match ledger.note_of_destination(&note) {
                true => Event::Noted(note),
                false => Event::NoteFailed(note),
            }),
            Action::CheckArbiter(store) => Some(Event::Arbiter(ledger.reaches(store))),
            Action::Claim(store) => Some(Event::Claimed(ledger.claim_in_time(store).await)),
            action => owner.act(action).await,
        };
        if let Some(event) = event {
            owner.handover().handle(event);
        }
    }
}

/// Returns the arbiter's answer as the core takes it.
pub(crate) fn claimed(answer: &Answer) -> Claimed {
    match answer {
        Answer::Granted => Claimed::Granted,
        Answer::Denied(..) => Claimed::Denied,
        Answer::None(_) => Claimed::Unanswered,
    }
}

/// Waits until this time; forever if there is none.
pub(crate) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
