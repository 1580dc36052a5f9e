//! The source's side of the hand-over.

use super::record::Record;
use longhaul_protocol::{Attempt, Generation};

/// Where the right to run is, as the source knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceState {
    /// The guest is ours; it runs, or can be made to.
    Here {
        /// QEMU is in `postmigrate`: only `cont` wakes the guest.
        postmigrate: bool,
    },
    /// RELEASED is being written.
    Releasing,
    /// The guest may be at the destination: only its word resumes it here.
    Released,
    /// DONE is being written.
    Finishing,
    /// The guest is at the destination.
    Done,
    /// The destination has aborted after RELEASED; that is being written.
    Returning,
    /// The guest stays here.
    Aborted,
}

/// What happens to the source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceEvent {
    /// QEMU is in `postmigrate`.
    Postmigrate,
    /// The destination has everything and says so.
    Ready(Attempt),
    /// The record is on disk.
    Written(Record),
    /// The record could not be written.
    WriteFailed(String),
    /// The destination has committed.
    Committed(Attempt),
    /// The destination has aborted, durably.
    PeerAborted(Attempt),
    /// A person, a limit or a failure ends the attempt.
    Abort(String),
    /// The agent was restarted, or a connection to the destination is there again.
    Connected,
}

/// What the source has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceAction {
    /// Make this durable, then report [`SourceEvent::Written`].
    Write(Record),
    /// Make the guest unstartable here.
    Fence(Generation),
    /// Let it be started here again.
    Unfence,
    /// Send COMMIT.
    SendCommit(Generation),
    /// Tell the destination to give up.
    SendCancel(String),
    /// Tell the destination that DONE is written.
    SendDone,
    /// Ask the destination what became of the attempt.
    Ask,
    /// Let the guest go on here.
    Resume,
    /// Quit QEMU here: the guest runs elsewhere.
    Quit,
}

/// The next state, and what is to be done, in this order. An event that does not belong to a state
/// changes nothing.
pub fn step_source(
    state: &SourceState,
    event: &SourceEvent,
    attempt: Attempt,
    next: Generation,
) -> (SourceState, Vec<SourceAction>) {
    use SourceAction as Do;
    use SourceEvent as On;
    use SourceState as Is;
    let aborted = |reason: &str| Record::Aborted {
        attempt,
        reason: reason.to_owned(),
    };
    match (state, event) {
        (Is::Here { .. }, On::Postmigrate) => (Is::Here { postmigrate: true }, vec![]),
        (Is::Here { postmigrate: true }, On::Ready(of)) if *of == attempt => {
            let released = Record::Released {
                attempt,
                generation: next,
            };
            (Is::Releasing, vec![Do::Write(released)])
        }
        // COMMIT was never sent, so the destination cannot run the guest.
        (Is::Here { .. }, On::Abort(reason))
        | (Is::Releasing, On::WriteFailed(reason) | On::Abort(reason)) => {
            let actions = vec![
                Do::SendCancel(reason.clone()),
                Do::Resume,
                Do::Write(aborted(reason)),
            ];
            (Is::Aborted, actions)
        }
        (Is::Here { .. }, On::PeerAborted(of)) if *of == attempt => {
            let reason = "the destination gave up";
            (Is::Aborted, vec![Do::Resume, Do::Write(aborted(reason))])
        }
        (Is::Releasing, On::Written(Record::Released { .. })) => {
            (Is::Released, vec![Do::Fence(next), Do::SendCommit(next)])
        }
        (Is::Released, On::Connected) => (Is::Released, vec![Do::Fence(next), Do::Ask]),
        // READY again after a reconnection: COMMIT was lost.
        (Is::Released, On::Ready(of)) if *of == attempt => {
            (Is::Released, vec![Do::SendCommit(next)])
        }
        (Is::Released, On::Committed(of)) if *of == attempt => {
            (Is::Finishing, vec![Do::Write(Record::Done { attempt })])
        }
        (Is::Released, On::PeerAborted(of)) if *of == attempt => {
            let reason = "the destination gave up after the release";
            (Is::Returning, vec![Do::Write(aborted(reason))])
        }
        (Is::Returning, On::Written(Record::Aborted { .. })) => {
            (Is::Aborted, vec![Do::Unfence, Do::Resume])
        }
        (Is::Finishing, On::Written(Record::Done { .. })) => {
            (Is::Done, vec![Do::SendDone, Do::Quit])
        }
        (Is::Done, On::Connected) => (Is::Done, vec![Do::SendDone, Do::Quit]),
        _ => (state.clone(), vec![]),
    }
}

impl SourceState {
    /// The state that a journal's records lead to, for an agent that was restarted.
    pub fn restore(records: &[Record]) -> SourceState {
        records.iter().fold(
            SourceState::Here { postmigrate: false },
            |state, record| match record {
                Record::Released { .. } => SourceState::Released,
                Record::Done { .. } => SourceState::Done,
                Record::Aborted { .. } => SourceState::Aborted,
                Record::Began { .. } => SourceState::Here { postmigrate: false },
                Record::Ready { .. } | Record::Committed { .. } | Record::Returned { .. } => state,
            },
        )
    }

    /// Whether nothing more will happen.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Done | Self::Aborted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: Attempt = Attempt(1);
    const NEXT: Generation = Generation(5);

    fn run(events: &[SourceEvent]) -> (SourceState, Vec<SourceAction>) {
        let mut all = Vec::new();
        let mut state = SourceState::Here { postmigrate: false };
        for event in events {
            let (next, actions) = step_source(&state, event, ATTEMPT, NEXT);
            state = next;
            all.extend(actions);
        }
        (state, all)
    }

    fn released() -> Record {
        Record::Released {
            attempt: ATTEMPT,
            generation: NEXT,
        }
    }

    #[test]
    fn nothing_is_released_before_postmigrate() {
        let (state, actions) = run(&[SourceEvent::Ready(ATTEMPT)]);
        assert_eq!(
            (state, actions),
            (SourceState::Here { postmigrate: false }, vec![])
        );
    }

    #[test]
    fn a_move_goes_through() {
        let done = Record::Done { attempt: ATTEMPT };
        let (state, actions) = run(&[
            SourceEvent::Postmigrate,
            SourceEvent::Ready(ATTEMPT),
            SourceEvent::Written(released()),
            SourceEvent::Committed(ATTEMPT),
            SourceEvent::Written(done.clone()),
        ]);
        assert_eq!(state, SourceState::Done);
        let expected = [
            SourceAction::Write(released()),
            SourceAction::Fence(NEXT),
            SourceAction::SendCommit(NEXT),
            SourceAction::Write(done),
            SourceAction::SendDone,
            SourceAction::Quit,
        ];
        assert_eq!(actions, expected);
    }

    #[test]
    fn after_release_only_the_destination_gives_the_guest_back() {
        let events = [
            SourceEvent::Postmigrate,
            SourceEvent::Ready(ATTEMPT),
            SourceEvent::Written(released()),
        ];
        let (state, _) = run(&events);
        for event in [
            SourceEvent::Abort("cancelled".into()),
            SourceEvent::WriteFailed("full".into()),
            SourceEvent::Connected,
            SourceEvent::PeerAborted(Attempt(9)),
        ] {
            let (next, actions) = step_source(&state, &event, ATTEMPT, NEXT);
            assert_eq!(next, SourceState::Released, "{event:?}");
            assert!(!actions.contains(&SourceAction::Resume), "{event:?}");
        }
        let (next, actions) =
            step_source(&state, &SourceEvent::PeerAborted(ATTEMPT), ATTEMPT, NEXT);
        assert_eq!(next, SourceState::Returning);
        assert!(
            !actions.contains(&SourceAction::Resume),
            "the record comes first"
        );
    }

    #[test]
    fn a_release_that_could_not_be_written_is_no_release() {
        let (state, actions) = run(&[
            SourceEvent::Postmigrate,
            SourceEvent::Ready(ATTEMPT),
            SourceEvent::WriteFailed("disk full".into()),
        ]);
        assert_eq!(state, SourceState::Aborted);
        assert!(actions.contains(&SourceAction::Resume));
        assert!(
            !actions
                .iter()
                .any(|action| matches!(action, SourceAction::SendCommit(_)))
        );
    }
}
