//! The destination's side of the hand-over.

use super::record::Record;
use longhaul_protocol::{Attempt, Generation};

/// Where the right to run is, as the destination knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DestinationState {
    /// Blocks arrive, QEMU loads, copies are compared.
    Receiving,
    /// READY is being written.
    Readying,
    /// Everything is here; the source decides.
    Ready,
    /// COMMITTED is being written.
    Committing,
    /// The guest is ours; QEMU is being told so.
    Committed,
    /// The guest runs here, or is paused here on purpose.
    Running,
    /// QEMU is being quit, so that ABORTED can be written.
    Aborting {
        /// Why.
        reason: String,
    },
    /// ABORTED is being written.
    Recording,
    /// The attempt is over; the guest is at the source.
    Aborted,
    /// `cont` failed before the guest ran: QEMU is being quit, so that RETURNED can be written.
    GivingBack {
        /// Why.
        reason: String,
    },
}

/// What happens to the destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationEvent {
    /// Everything promised is here, QEMU has loaded it, and both copies are equal where that was
    /// to be shown.
    Loaded,
    /// The record is on disk.
    Written(Record),
    /// The record could not be written.
    WriteFailed(String),
    /// COMMIT came.
    Commit(Attempt, Generation),
    /// The source gives up, or is gone for longer than patience, or something failed here.
    Abort(String),
    /// QEMU is gone, reaped.
    QemuGone,
    /// QEMU was told to go on, and did.
    Resumed,
    /// QEMU refused to go on, and the guest has not run.
    ResumeFailed(String),
    /// The source asks what became of the attempt.
    Asked,
}

/// What the destination has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DestinationAction {
    /// Make this durable, then report [`DestinationEvent::Written`].
    Write(Record),
    /// Send READY.
    SendReady,
    /// Activate the disks and let the guest go on, unless it was paused.
    Resume,
    /// Send COMMITTED.
    SendCommitted,
    /// Quit QEMU, if it still runs, reap it and remove what was made for it, then report [`DestinationEvent::QemuGone`].
    Quit,
    /// Send ABORTED.
    SendAborted,
    /// Say that the attempt is neither committed nor aborted.
    SendStatus,
}

/// The next state, and what is to be done, in this order. An event that does not belong to a state
/// changes nothing.
pub fn step_destination(
    state: &DestinationState,
    event: &DestinationEvent,
    attempt: Attempt,
) -> (DestinationState, Vec<DestinationAction>) {
    use DestinationAction as Do;
    use DestinationEvent as On;
    use DestinationState as Is;
    match (state, event) {
        (Is::Receiving, On::Loaded) => (Is::Readying, vec![Do::Write(Record::Ready { attempt })]),
        (Is::Readying, On::Written(Record::Ready { .. })) => (Is::Ready, vec![Do::SendReady]),
        (Is::Ready, On::Commit(of, generation)) if *of == attempt => {
            let record = Record::Committed {
                attempt,
                generation: *generation,
            };
            (Is::Committing, vec![Do::Write(record)])
        }
        (Is::Committing, On::Written(Record::Committed { .. })) => {
            (Is::Committed, vec![Do::Resume])
        }
        // What could not be written may still be on the disk: the guest is ours, or in doubt, but
        // never the source's again. The write is tried again.
        (Is::Committing, On::WriteFailed(_)) => (Is::Ready, vec![Do::SendReady]),
        (Is::Committed, On::Resumed) => (Is::Running, vec![Do::SendCommitted]),
        (Is::Committed, On::ResumeFailed(reason)) => (
            Is::GivingBack {
                reason: reason.clone(),
            },
            vec![Do::Quit],
        ),
        (Is::GivingBack { reason }, On::QemuGone) => {
            let record = Record::Returned {
                attempt,
                reason: reason.clone(),
            };
            (Is::Recording, vec![Do::Write(record)])
        }
        (Is::Receiving | Is::Readying | Is::Ready, On::Abort(reason))
        | (Is::Readying, On::WriteFailed(reason)) => (
            Is::Aborting {
                reason: reason.clone(),
            },
            vec![Do::Quit],
        ),
        // What a QEMU that ended by itself leaves behind is removed as after any other abort.
        (Is::Receiving | Is::Readying | Is::Ready, On::QemuGone) => (
            Is::Aborting {
                reason: "its QEMU ended".to_owned(),
            },
            vec![Do::Quit],
        ),
        (Is::Aborting { reason }, On::QemuGone) => {
            let record = Record::Aborted {
                attempt,
                reason: reason.clone(),
            };
            (Is::Recording, vec![Do::Write(record)])
        }
        (Is::Recording, On::Written(Record::Aborted { .. } | Record::Returned { .. })) => {
            (Is::Aborted, vec![Do::SendAborted])
        }
        (Is::Aborted, On::Asked | On::Commit(..) | On::Abort(_)) => {
            (Is::Aborted, vec![Do::SendAborted])
        }
        (Is::Ready, On::Asked) => (Is::Ready, vec![Do::SendReady]),
        (Is::Running, On::Asked | On::Commit(..)) => (Is::Running, vec![Do::SendCommitted]),
        (_, On::Asked) => (state.clone(), vec![Do::SendStatus]),
        _ => (state.clone(), vec![]),
    }
}

impl DestinationState {
    /// The state that a journal's records lead to, and what an agent that was restarted does first.
    pub fn restore(records: &[Record]) -> (DestinationState, Vec<DestinationAction>) {
        let interrupted = || "the destination's agent was restarted".to_owned();
        match records.last() {
            Some(Record::Committed { .. }) => {
                (DestinationState::Committed, vec![DestinationAction::Resume])
            }
            Some(Record::Ready { .. }) => (DestinationState::Ready, vec![]),
            Some(Record::Aborted { .. } | Record::Returned { .. }) => {
                (DestinationState::Aborted, vec![])
            }
            Some(Record::Done { .. }) => (DestinationState::Running, vec![]),
            Some(Record::Began { .. } | Record::Released { .. }) | None => {
                let reason = interrupted();
                (
                    DestinationState::Aborting { reason },
                    vec![DestinationAction::Quit],
                )
            }
        }
    }

    /// Whether the guest belongs here.
    pub fn owns_guest(&self) -> bool {
        matches!(self, Self::Committed | Self::Running)
    }

    /// Whether nothing more will happen by itself.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Running | Self::Aborted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: Attempt = Attempt(2);

    fn run(events: &[DestinationEvent]) -> (DestinationState, Vec<DestinationAction>) {
        let mut all = Vec::new();
        let mut state = DestinationState::Receiving;
        for event in events {
            let (next, actions) = step_destination(&state, event, ATTEMPT);
            state = next;
            all.extend(actions);
        }
        (state, all)
    }

    fn committed() -> Record {
        Record::Committed {
            attempt: ATTEMPT,
            generation: Generation(3),
        }
    }

    #[test]
    fn the_guest_runs_only_after_the_record() {
        let ready = Record::Ready { attempt: ATTEMPT };
        let commit = DestinationEvent::Commit(ATTEMPT, Generation(3));
        let mut events = vec![
            DestinationEvent::Loaded,
            DestinationEvent::Written(ready),
            commit,
        ];
        let (state, actions) = run(&events);
        assert_eq!(state, DestinationState::Committing);
        assert!(!actions.contains(&DestinationAction::Resume));
        events.push(DestinationEvent::Written(committed()));
        events.push(DestinationEvent::Resumed);
        let (state, actions) = run(&events);
        assert_eq!(state, DestinationState::Running);
        assert_eq!(actions.last(), Some(&DestinationAction::SendCommitted));
    }

    #[test]
    fn an_aborted_attempt_refuses_a_late_commit() {
        let aborted = Record::Aborted {
            attempt: ATTEMPT,
            reason: "x".into(),
        };
        let (state, actions) = run(&[
            DestinationEvent::Abort("x".into()),
            DestinationEvent::QemuGone,
            DestinationEvent::Written(aborted),
            DestinationEvent::Commit(ATTEMPT, Generation(3)),
        ]);
        assert_eq!(state, DestinationState::Aborted);
        assert_eq!(actions.last(), Some(&DestinationAction::SendAborted));
        assert!(!actions.contains(&DestinationAction::Resume));
    }

    #[test]
    fn a_qemu_that_ends_by_itself_is_cleared_away_before_the_abort_is_recorded() {
        for before in [
            DestinationState::Receiving,
            DestinationState::Readying,
            DestinationState::Ready,
        ] {
            let (next, actions) = step_destination(&before, &DestinationEvent::QemuGone, ATTEMPT);
            assert_eq!(actions, [DestinationAction::Quit]);
            let (next, actions) = step_destination(&next, &DestinationEvent::QemuGone, ATTEMPT);
            assert_eq!(next, DestinationState::Recording);
            assert!(matches!(
                actions[..],
                [DestinationAction::Write(Record::Aborted { .. })]
            ));
        }
    }

    #[test]
    fn once_committing_nothing_aborts() {
        let state = DestinationState::Committing;
        let event = DestinationEvent::Abort("cancelled".into());
        assert_eq!(step_destination(&state, &event, ATTEMPT), (state, vec![]));
    }

    #[test]
    fn a_commit_for_another_attempt_is_ignored() {
        let event = DestinationEvent::Commit(Attempt(1), Generation(3));
        let (next, actions) = step_destination(&DestinationState::Ready, &event, ATTEMPT);
        assert_eq!((next, actions), (DestinationState::Ready, vec![]));
    }

    #[test]
    fn a_restarted_agent_repeats_what_its_journal_says() {
        let (state, actions) = DestinationState::restore(&[committed()]);
        assert_eq!(state, DestinationState::Committed);
        assert_eq!(actions, [DestinationAction::Resume]);
    }
}
