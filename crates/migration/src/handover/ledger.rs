//! A hand-over as it runs: what its transition functions decide is made durable here, in this order
//! and before anything else; what is left is done by whoever has the guest and the connection.
//!
//! ```text
//! event -> transition function -> actions -> durable: journal, rights (here) -> Written, an event
//!                                         -> the guest, messages (the owner's `act`)
//! ```

use crate::context::Context;
use crate::host::fail_point;
use longhaul_engine::handover::{
    DestinationAction, DestinationEvent, DestinationState, Record, SourceAction, SourceEvent,
    SourceState, Terms, step_destination, step_source,
};
use longhaul_protocol::{Generation, HostId, Incarnation, MigrationId};
use longhaul_storage::{Holder, Journal, Right, RightsError};
use std::collections::VecDeque;
use std::sync::Arc;
use tokio::task::block_in_place;

/// Where an attempt's records and the right to run its guest are kept.
pub(crate) struct Ledger {
    pub(crate) context: Arc<Context>,
    pub(crate) migration: MigrationId,
    pub(crate) guest: String,
    /// The other host's name here, when the attempt began.
    pub(crate) host: String,
    /// The other host, unless the journal only answers for an attempt that never began here.
    pub(crate) peer: Option<HostId>,
    pub(crate) terms: Terms,
    pub(crate) journal: Journal,
    /// A record that was decided on and could not be written yet.
    unwritten: Option<Record>,
    /// What is known of the right and could not be noted yet.
    unnoted: Option<Noting>,
    /// The guest stays here and could not be resumed yet: the journal is not closed before it is.
    pub(crate) unresumed: bool,
}

/// A change of who may run the guest.
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
            unwritten: None,
            unnoted: None,
            unresumed: false,
        }
    }

    /// The incarnation of the destination's journals that this attempt was offered to, if it is
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

    fn append(&mut self, record: &Record) -> bool {
        // A closed journal is removed: from then on only the right says who may run the guest.
        if matches!(record, Record::Closed { .. })
            && let Some(noting) = self.unnoted.take()
        {
            self.try_to_note(noting);
            if self.unnoted.is_some() {
                return false;
            }
        }
        let written = block_in_place(|| fail_point::append(&mut self.journal, record));
        if let Err(error) = &written {
            tracing::error!(migration = %self.migration, %error, "a record cannot be written");
        }
        written.is_ok()
    }

    /// Notes who may run the guest.
    fn note(&mut self, generation: Generation, holder: Holder) {
        let here = holder == Holder::Here;
        let right = self.right(generation, holder);
        self.try_to_note(Noting::Set(right));
        if here {
            self.context.unmark(&self.guest);
        }
    }

    /// Goes back to the generation that the source had, from one that never ran the guest.
    fn give_back(&mut self, taken: Holder, holder: Holder) {
        let taken = self.right(self.terms.next(), taken);
        let back = self.right(self.terms.generation, holder);
        self.try_to_note(Noting::GiveBack { taken, back });
    }

    fn right(&self, generation: Generation, holder: Holder) -> Right {
        Right {
            guest: self.guest.clone(),
            generation,
            holder,
        }
    }

    fn try_to_note(&mut self, noting: Noting) {
        let rights = &self.context.rights;
        let noted = block_in_place(|| match &noting {
            Noting::Set(right) => rights.set(right),
            Noting::GiveBack { taken, back } => rights.give_back(taken, back),
        });
        self.unnoted = None;
        if let Err(error) = noted {
            // The journal says it too, and is read first, for as long as it is there.
            tracing::error!(guest = self.guest, %error, "cannot note who may run the guest");
            if matches!(error, RightsError::Io { .. }) {
                self.unnoted = Some(noting);
            }
        }
    }

    fn elsewhere(&self) -> Holder {
        Holder::Elsewhere {
            host: self.host.clone(),
        }
    }

    /// A person has given the guest to the other host. That is noted whatever is here: a copy may
    /// be on its way back already, and one that runs is not to be started again.
    fn concede(&mut self, generation: Generation) {
        self.note(generation, self.elsewhere());
        match crate::host::qemu::find(&self.context.parts.config.state, &self.guest) {
            Ok(Some(_)) => tracing::error!(
                guest = self.guest,
                "{} runs this guest by a person's word, and there is a copy of it here too: stop \
                 one of them",
                self.host
            ),
            Ok(None) => {}
            Err(error) => tracing::error!(guest = self.guest, %error, "cannot look for the guest"),
        }
    }

    /// The journal is not needed any more: both sides have closed theirs.
    pub(crate) fn remove_journal(self) {
        let path = self.journal.path().to_owned();
        if let Err(error) = block_in_place(|| self.journal.remove()) {
            tracing::warn!(path = %path.display(), %error, "an ended journal stays");
        }
    }
}

/// The source's side.
pub(crate) struct SourceHandover {
    pub(crate) state: SourceState,
    pub(crate) ledger: Ledger,
}

/// Whoever has the guest at the source, and perhaps a connection.
pub(crate) trait SourceOwner: Send {
    /// The hand-over.
    fn handover(&mut self) -> &mut SourceHandover;
    /// Does what is not a matter of the ledger.
    fn act(&mut self, action: SourceAction) -> impl Future<Output = ()> + Send;
}

/// Feeds the source's hand-over, and does what it says until it asks for nothing more.
pub(crate) async fn feed_source<O: SourceOwner>(owner: &mut O, event: SourceEvent) {
    let mut events = VecDeque::from([event]);
    while let Some(event) = events.pop_front() {
        let handover = owner.handover();
        let (state, actions) = step_source(&handover.state, &event, &handover.ledger.terms);
        if state != handover.state {
            tracing::info!(migration = %handover.ledger.migration, ?state, "hand-over");
        }
        handover.state = state;
        let again = matches!(event, SourceEvent::WriteFailed(_));
        run_source(owner, actions, again, &mut events).await;
    }
}

/// Does what a restored hand-over begins with.
pub(crate) async fn begin_source<O: SourceOwner>(owner: &mut O, actions: Vec<SourceAction>) {
    let mut events = VecDeque::new();
    run_source(owner, actions, false, &mut events).await;
    while let Some(event) = events.pop_front() {
        feed_source(owner, event).await;
    }
}

/// Tries again to resume the guest, and to write what could not be written.
pub(crate) async fn retry_source<O: SourceOwner>(owner: &mut O) {
    if owner.handover().ledger.unresumed {
        owner.act(SourceAction::Resume).await;
        if owner.handover().ledger.unresumed {
            return;
        }
    }
    if let Some(record) = owner.handover().ledger.unwritten.take() {
        let mut events = VecDeque::new();
        run_source(owner, vec![SourceAction::Write(record)], true, &mut events).await;
        while let Some(event) = events.pop_front() {
            feed_source(owner, event).await;
        }
    }
}

async fn run_source<O: SourceOwner>(
    owner: &mut O,
    actions: Vec<SourceAction>,
    again: bool,
    events: &mut VecDeque<SourceEvent>,
) {
    use SourceAction as Do;
    for action in actions {
        let ledger = &mut owner.handover().ledger;
        match action {
            Do::Write(record @ Record::Closed { .. }) if ledger.unresumed => {
                ledger.unwritten = Some(record);
            }
            Do::Write(record) => match ledger.append(&record) {
                true => events.push_back(SourceEvent::Written(record)),
                // Its time comes with the owner's next retry.
                false if again => ledger.unwritten = Some(record),
                false => events.push_back(SourceEvent::WriteFailed(record)),
            },
            Do::Fence(generation) => {
                let host = ledger.host.clone();
                ledger.note(generation, Holder::InDoubt { host });
            }
            Do::Cede(generation) => ledger.note(generation, ledger.elsewhere()),
            Do::Unfence(generation) if generation == ledger.terms.generation => {
                let host = ledger.host.clone();
                ledger.give_back(Holder::InDoubt { host }, Holder::Here);
            }
            Do::Unfence(generation) => ledger.note(generation, Holder::Here),
            Do::Concede(generation) => ledger.concede(generation),
            Do::SendCommit(_)
            | Do::SendCancel(_)
            | Do::SendOverruled(_)
            | Do::SendDone
            | Do::Ask
            | Do::Resume
            | Do::Quit => owner.act(action).await,
        }
    }
}

/// The destination's side.
pub(crate) struct DestinationHandover {
    pub(crate) state: DestinationState,
    pub(crate) ledger: Ledger,
}

/// Whoever has the guest at the destination, and perhaps a connection.
pub(crate) trait DestinationOwner: Send {
    /// The hand-over.
    fn handover(&mut self) -> &mut DestinationHandover;
    /// Does what is not a matter of the ledger, and says what came of it.
    fn act(
        &mut self,
        action: DestinationAction,
    ) -> impl Future<Output = Option<DestinationEvent>> + Send;
}

/// Feeds the destination's hand-over, and does what it says until it asks for nothing more.
pub(crate) async fn feed_destination<O: DestinationOwner>(owner: &mut O, event: DestinationEvent) {
    let mut events = VecDeque::from([event]);
    while let Some(event) = events.pop_front() {
        let handover = owner.handover();
        let (state, actions) = step_destination(&handover.state, &event, &handover.ledger.terms);
        if state != handover.state {
            tracing::info!(migration = %handover.ledger.migration, ?state, "hand-over");
        }
        handover.state = state;
        let again = matches!(event, DestinationEvent::WriteFailed(_));
        run_destination(owner, actions, again, &mut events).await;
    }
}

/// Does what a restored hand-over begins with.
pub(crate) async fn begin_destination<O: DestinationOwner>(
    owner: &mut O,
    actions: Vec<DestinationAction>,
) {
    let mut events = VecDeque::new();
    run_destination(owner, actions, false, &mut events).await;
    while let Some(event) = events.pop_front() {
        feed_destination(owner, event).await;
    }
}

/// Tries again to write what could not be written.
pub(crate) async fn retry_destination<O: DestinationOwner>(owner: &mut O) {
    if let Some(record) = owner.handover().ledger.unwritten.take() {
        let mut events = VecDeque::new();
        let actions = vec![DestinationAction::Write(record)];
        run_destination(owner, actions, true, &mut events).await;
        while let Some(event) = events.pop_front() {
            feed_destination(owner, event).await;
        }
    }
}

async fn run_destination<O: DestinationOwner>(
    owner: &mut O,
    actions: Vec<DestinationAction>,
    again: bool,
    events: &mut VecDeque<DestinationEvent>,
) {
    use DestinationAction as Do;
    for action in actions {
        let ledger = &mut owner.handover().ledger;
        match action {
            Do::Write(record) => match ledger.append(&record) {
                true => events.push_back(DestinationEvent::Written(record)),
                // Its time comes with the owner's next retry.
                false if again => ledger.unwritten = Some(record),
                false => events.push_back(DestinationEvent::WriteFailed(record)),
            },
            Do::Own(generation) => ledger.note(generation, Holder::Here),
            Do::Yield(_) => ledger.give_back(Holder::Here, ledger.elsewhere()),
            Do::Concede(generation) => ledger.concede(generation),
            Do::Resume
            | Do::Quit
            | Do::FillMissing
            | Do::SendReady
            | Do::SendCommitted
            | Do::SendAllPresent
            | Do::SendAborted
            | Do::SendStatus
            | Do::SendClosed => events.extend(owner.act(action).await),
        }
    }
}
