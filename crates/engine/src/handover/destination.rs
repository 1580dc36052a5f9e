//! The destination's state machine of the handover.

use super::record::{Record, Side};
use super::terms::{Commit, Terms};
use longhaul_protocol::{Attempt, Generation, StoreId};

/// Where the right to run the guest is, as the destination knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DestinationState {
    /// No record of the attempt exists here.
    Unknown,
    /// BEGAN is being written.
    Beginning,
    /// Blocks arrive, QEMU loads, or the copies are compared.
    Receiving {
        /// A COMMIT that arrived before the data was complete: the source has released the guest
        /// early.
        commit: Option<Commit>,
    },
    /// READY is being written.
    Readying,
    /// Everything is here, and the source decides.
    Ready,
    /// COMMIT is here, which takes effect with the arbiter's lease.
    Claiming {
        /// The store that gives it.
        arbiter: StoreId,
    },
    /// The record that transfers the right to this host is being written.
    Committing,
    /// The right is here, and QEMU is being resumed.
    Committed,
    /// The guest belongs to the destination: it runs here, is paused on purpose, or has ended here.
    Running {
        /// Whether the destination durably has all data, so that the source is no longer needed.
        all_present: bool,
    },
    /// QEMU is being quit, so that ABORTED can be written.
    Aborting {
        /// Why.
        reason: String,
    },
    /// ABORTED is being written.
    Recording,
    /// `cont` failed before the guest ran; RETURNED is being written.
    Returning {
        /// Why.
        reason: String,
    },
    /// QEMU is being quit after RETURNED.
    GivingBack {
        /// Why.
        reason: String,
    },
    /// The attempt is over; the guest is at the source.
    Aborted,
    /// An operator gave the guest to the source after the right was here; the record is being
    /// written.
    Yielding,
    /// CLOSED is being written.
    Closing {
        /// Whether the guest belongs to the destination.
        here: bool,
    },
    /// Final state.
    Closed {
        /// Whether the guest belongs to the destination.
        here: bool,
    },
}

/// An input of the destination's state machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DestinationEvent {
    /// An offer was accepted, with the record of it.
    Offered(Record),
    /// All promised data is here, QEMU has loaded it, and both copies are equal if a comparison was
    /// requested.
    Loaded,
    /// The record is on disk.
    Written(Record),
    /// The record could not be written; it may be on disk nevertheless.
    WriteFailed(Record),
    /// COMMIT arrived.
    Commit(Attempt, Commit),
    /// The arbiter with this store has given this host the lease of the next generation.
    Granted(StoreId),
    /// The arbiter with this store never gives this host the lease of the next generation.
    Denied(StoreId),
    /// The source gives up, was gone for longer than its time limit, or something failed here.
    Abort(String),
    /// QEMU has ended and was reaped.
    QemuGone,
    /// QEMU was told to resume, and did or may have.
    Resumed,
    /// QEMU refused to resume, and the guest has not run.
    ResumeFailed(String),
    /// The guest needs no more data of the source, and all received data is durable.
    AllPresent,
    /// An operator gives up the guest's data that is still at the source: it never comes back.
    GiveUp(String),
    /// The source asks for the outcome of the attempt.
    Asked,
    /// An operator declares the source dead or fenced, and wants the guest to run here.
    Overrule(String),
    /// The source reports that an operator has given it the guest, in this generation.
    PeerOverruled(Generation),
    /// The source's journal is complete.
    Done,
}

/// An action that the destination's agent carries out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Make this record durable, then report [`DestinationEvent::Written`] or
    /// [`DestinationEvent::WriteFailed`].
    Write(Record),
    /// Ask the arbiter with this store for the lease of the next generation, then report
    /// [`DestinationEvent::Granted`], [`DestinationEvent::Denied`], or an abort if it does not
    /// answer.
    Claim(StoreId),
    /// Send READY.
    SendReady,
    /// Record that the right is here, in this generation.
    Own(Generation),
    /// Record that the right is at the source, in this generation.
    Yield(Generation),
    /// Record that an operator has given the guest to the source, in this generation. A copy that
    /// still runs here is a conflict that an operator has to be told of.
    Concede(Generation),
    /// Activate the disks and resume the guest, unless it was paused.
    Resume,
    /// Do without the source: missing blocks become zeros, then report
    /// [`DestinationEvent::AllPresent`].
    FillMissing,
    /// Send COMMITTED.
    SendCommitted,
    /// Send ALL-PRESENT.
    SendAllPresent,
    /// Quit QEMU if it still runs, reap it and remove its resources, then report
    /// [`DestinationEvent::QemuGone`].
    Quit,
    /// Send ABORTED.
    SendAborted,
    /// Report that the attempt is neither committed nor aborted.
    SendStatus,
    /// Send CLOSED.
    SendClosed,
}

/// Returns the next state and the actions, in their order. An event that does not belong to a state
/// changes nothing.
pub fn step_destination(
    state: &DestinationState,
    event: &DestinationEvent,
    terms: &Terms,
) -> (DestinationState, Vec<DestinationAction>) {
    use DestinationAction as Do;
    use DestinationEvent as On;
    use DestinationState as Is;
    let attempt = terms.attempt;
    let next = terms.next();
    let commit = || {
        let generation = next;
        let record = Record::Committed {
            attempt,
            generation,
        };
        (Is::Committing, vec![Do::Write(record)])
    };
    let permitted = |commit_: &Commit| match commit_.arbiter {
        None => commit(),
        Some(arbiter) => (Is::Claiming { arbiter }, vec![Do::Claim(arbiter)]),
    };
    let quit = |reason: &str| {
        let reason = reason.to_owned();
        (Is::Aborting { reason }, vec![Do::Quit])
    };
    match (state, event) {
        (Is::Unknown, On::Offered(began)) => (Is::Beginning, vec![Do::Write(began.clone())]),
        (Is::Beginning, On::Written(Record::Began { .. })) => {
            (Is::Receiving { commit: None }, vec![])
        }
        (Is::Beginning, On::WriteFailed(_)) => quit("BEGAN could not be written"),
        // A question for an unknown attempt aborts it, so that a late COMMIT is refused.
        (Is::Unknown, On::Asked | On::Abort(_) | On::PeerOverruled(_)) => {
            let reason = "the destination does not know this attempt";
            (Is::Recording, vec![Do::Write(terms.aborted(reason))])
        }
        (Is::Unknown, On::Done) => (Is::Unknown, vec![Do::SendClosed]),

        (Is::Receiving { commit: None }, On::Loaded) => {
            (Is::Readying, vec![Do::Write(Record::Ready { attempt })])
        }
        (
            Is::Receiving {
                commit: Some(commit),
            },
            On::Loaded,
        ) => permitted(commit),
        (Is::Receiving { .. }, On::Commit(of, commit))
            if *of == attempt && commit.generation == next =>
        {
            let commit = Some(*commit);
            (Is::Receiving { commit }, vec![])
        }
        (Is::Readying, On::Written(Record::Ready { .. })) => (Is::Ready, vec![Do::SendReady]),
        (Is::Readying, On::WriteFailed(_)) => quit("READY could not be written"),
        (Is::Ready, On::Asked) => (Is::Ready, vec![Do::SendReady]),
        (Is::Ready, On::Commit(of, commit)) if *of == attempt && commit.generation == next => {
            permitted(commit)
        }
        (Is::Claiming { arbiter }, On::Granted(of)) if of == arbiter => commit(),
        (Is::Claiming { arbiter }, On::Denied(of)) if of == arbiter => quit(DENIED),
        (Is::Ready | Is::Claiming { .. }, On::Overrule(because)) => {
            let record = Record::Overruled {
                attempt,
                run_on: Side::Destination,
                generation: terms.next(),
                because: because.clone(),
            };
            (Is::Committing, vec![Do::Write(record)])
        }

        (Is::Committing, On::Written(Record::Committed { .. } | Record::Overruled { .. })) => {
            (Is::Committed, vec![Do::Resume])
        }
        (Is::Committed, On::Resumed) => (
            Is::Running { all_present: false },
            // The journal is authoritative: after a crash the right is recorded again from it.
            vec![Do::SendCommitted, Do::Own(terms.next())],
        ),
        (Is::Committed, On::ResumeFailed(reason)) => {
            let record = Record::Returned {
                attempt,
                reason: reason.clone(),
            };
            let reason = reason.clone();
            (Is::Returning { reason }, vec![Do::Write(record)])
        }
        (Is::Returning { reason }, On::Written(Record::Returned { .. })) => {
            let reason = reason.clone();
            (
                Is::GivingBack { reason },
                vec![Do::Yield(terms.generation), Do::Quit],
            )
        }
        (Is::GivingBack { reason } | Is::Aborting { reason }, On::QemuGone) => {
            (Is::Recording, vec![Do::Write(terms.aborted(reason))])
        }
        (Is::Running { all_present: false }, On::AllPresent) => {
            let record = Record::AllPresent { attempt };
            (state.clone(), vec![Do::Write(record)])
        }
        (Is::Running { all_present: false }, On::GiveUp(because)) => {
            let because = because.clone();
            let record = Record::GaveUp { attempt, because };
            (state.clone(), vec![Do::Write(record)])
        }
        // The source keeps its copy until all missing blocks are zeros, durably.
        (Is::Running { all_present: false }, On::Written(Record::GaveUp { .. })) => {
            (state.clone(), vec![Do::FillMissing])
        }
        (Is::Running { .. }, On::Written(Record::AllPresent { .. })) => {
            (Is::Running { all_present: true }, vec![Do::SendAllPresent])
        }
        (Is::Running { all_present }, On::Asked | On::Commit(..) | On::Abort(_)) => {
            let answer = if *all_present {
                Do::SendAllPresent
            } else {
                Do::SendCommitted
            };
            (state.clone(), vec![answer])
        }
        (Is::Running { .. }, On::PeerOverruled(generation))
            if *generation == terms.after_next() =>
        {
            let record = Record::Overruled {
                attempt,
                run_on: Side::Source,
                generation: *generation,
                because: "the source was told so".to_owned(),
            };
            (Is::Yielding, vec![Do::Write(record)])
        }
        (Is::Yielding, On::Written(Record::Overruled { generation, .. })) => {
            (Is::Aborted, vec![Do::Concede(*generation), Do::SendAborted])
        }

        (open, On::Abort(reason)) if open.may_abort() => quit(reason),
        (open, On::PeerOverruled(_)) if open.may_abort() => {
            quit("the guest was given back to the source")
        }
        // A QEMU that ended by itself is cleaned up as after any other abort.
        (open, On::QemuGone) if open.may_abort() => quit("its QEMU ended"),
        (Is::Recording, On::Written(Record::Aborted { .. })) => {
            (Is::Aborted, vec![Do::SendAborted])
        }
        (Is::Aborted, On::Asked | On::Commit(..) | On::Abort(_) | On::PeerOverruled(_)) => {
            (Is::Aborted, vec![Do::SendAborted])
        }

        (Is::Running { all_present: true }, On::Done) => close(attempt, true),
        (Is::Aborted, On::Done) => close(attempt, false),
        (Is::Closing { here }, On::Written(Record::Closed { .. })) => {
            (Is::Closed { here: *here }, vec![Do::SendClosed])
        }
        (Is::Closed { .. }, On::Done) => (state.clone(), vec![Do::SendClosed]),
        (Is::Closed { here: true }, On::Asked) => (state.clone(), vec![Do::SendAllPresent]),
        (Is::Closed { here: false }, On::Asked) => (state.clone(), vec![Do::SendAborted]),

        // The decision stands: the record is written as soon as it can be.
        (
            Is::Committing
            | Is::Returning { .. }
            | Is::Running { .. }
            | Is::Recording
            | Is::Yielding
            | Is::Closing { .. },
            On::WriteFailed(record),
        ) => (state.clone(), vec![Do::Write(record.clone())]),
        (_, On::Asked) => (state.clone(), vec![Do::SendStatus]),
        _ => (state.clone(), vec![]),
    }
}

const DENIED: &str = "the arbiter gave the lease to another host";

fn close(attempt: Attempt, here: bool) -> (DestinationState, Vec<DestinationAction>) {
    let record = Record::Closed { attempt };
    let actions = vec![DestinationAction::Write(record)];
    (DestinationState::Closing { here }, actions)
}

impl DestinationState {
    /// Returns the state that the journal's records of an attempt lead to, and the first actions of
    /// a restarted agent.
    pub fn restore(
        records: &[Record],
        terms: &Terms,
    ) -> (DestinationState, Vec<DestinationAction>) {
        use DestinationAction as Do;
        match records.last() {
            None => (Self::Unknown, vec![]),
            Some(
                Record::Committed { .. }
                | Record::Overruled {
                    run_on: Side::Destination,
                    ..
                },
            ) => (Self::Committed, vec![Do::Own(terms.next()), Do::Resume]),
            // QEMU has loaded everything, and outlives its agent.
            Some(Record::Ready { .. }) => (Self::Ready, vec![]),
            // Where the right is may not have been noted yet.
            Some(Record::AllPresent { .. }) => {
                let actions = vec![Do::Own(terms.next())];
                (Self::Running { all_present: true }, actions)
            }
            Some(Record::GaveUp { .. }) => {
                let actions = vec![Do::Own(terms.next()), Do::FillMissing];
                (Self::Running { all_present: false }, actions)
            }
            Some(Record::Aborted { .. }) => (Self::Aborted, vec![]),
            Some(Record::Returned { reason, .. }) => {
                let reason = reason.clone();
                let actions = vec![Do::Yield(terms.generation), Do::Quit];
                (Self::GivingBack { reason }, actions)
            }
            Some(Record::Overruled {
                run_on: Side::Source,
                generation,
                ..
            }) => (Self::Aborted, vec![Do::Concede(*generation)]),
            Some(Record::Closed { .. }) => {
                // ABORTED, and a record that overrules ALL-PRESENT, directly follow the record that
                // matters.
                let before = records.iter().rev().nth(1);
                let here = matches!(before, Some(Record::AllPresent { .. }));
                (Self::Closed { here }, vec![])
            }
            // Peer, Done and Released belong to the source's journals.
            Some(
                Record::Began { .. }
                | Record::Incomplete { .. }
                | Record::Peer { .. }
                | Record::Released { .. }
                | Record::ReleasedToArbiter { .. }
                | Record::Done { .. },
            ) => {
                let reason = "the destination's agent was restarted".to_owned();
                (Self::Aborting { reason }, vec![Do::Quit])
            }
        }
    }

    /// Returns whether the guest belongs to this host.
    pub fn owns_guest(&self) -> bool {
        matches!(
            self,
            Self::Committed
                | Self::Running { .. }
                | Self::Closing { here: true }
                | Self::Closed { here: true }
        )
    }

    /// Returns whether the destination alone can end the attempt.
    pub fn may_abort(&self) -> bool {
        matches!(
            self,
            Self::Receiving { .. } | Self::Readying | Self::Ready | Self::Claiming { .. }
        )
    }

    /// Returns whether the guest's place is decided, even if records or messages are outstanding.
    pub fn is_settled(&self) -> bool {
        matches!(
            self,
            Self::Running { .. } | Self::Aborted | Self::Closing { .. } | Self::Closed { .. }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERMS: Terms = Terms {
        attempt: Attempt(2),
        generation: Generation(2),
        early: false,
        arbiter: None,
    };
    const STORE: StoreId = StoreId([6; 16]);
    const NEXT: Generation = Generation(3);
    const ATTEMPT: Attempt = TERMS.attempt;
    const COMMIT: Commit = Commit {
        generation: NEXT,
        arbiter: None,
    };

    /// Runs from the beginning, with every record written at once.
    fn run(events: &[DestinationEvent]) -> (DestinationState, Vec<DestinationAction>) {
        let mut all = Vec::new();
        let mut state = DestinationState::Receiving { commit: None };
        let mut events: Vec<_> = events.iter().rev().cloned().collect();
        while let Some(event) = events.pop() {
            let (next, actions) = step_destination(&state, &event, &TERMS);
            state = next;
            let written = actions.iter().find_map(|action| match action {
                DestinationAction::Write(record) => Some(DestinationEvent::Written(record.clone())),
                _ => None,
            });
            events.extend(written);
            all.extend(actions);
        }
        (state, all)
    }

    fn committed() -> Record {
        Record::Committed {
            attempt: ATTEMPT,
            generation: NEXT,
        }
    }

    fn place(actions: &[DestinationAction], wanted: &DestinationAction) -> usize {
        let place = actions.iter().position(|action| action == wanted);
        place.unwrap_or_else(|| panic!("{wanted:?} is missing in {actions:?}"))
    }

    #[test]
    fn a_persons_word_has_the_generation_after_the_next() {
        let running = DestinationState::Running { all_present: false };
        let told = |generation| {
            let event = DestinationEvent::PeerOverruled(Generation(generation));
            step_destination(&running, &event, &TERMS)
        };
        let (state, actions) = told(TERMS.after_next().0);
        assert_eq!((state, actions.len()), (DestinationState::Yielding, 1));
        // Noted here, it would keep every later copy of the guest away.
        for generation in [u64::MAX, TERMS.next().0, TERMS.generation.0, 0] {
            assert_eq!(told(generation), (running.clone(), vec![]), "{generation}");
        }
    }

    #[test]
    fn the_guest_runs_only_after_the_record() {
        let commit = DestinationEvent::Commit(ATTEMPT, COMMIT);
        let (state, actions) = run(&[
            DestinationEvent::Loaded,
            commit,
            DestinationEvent::Resumed,
            DestinationEvent::AllPresent,
            DestinationEvent::Done,
        ]);
        assert_eq!(state, DestinationState::Closed { here: true });
        let wrote = place(&actions, &DestinationAction::Write(committed()));
        assert!(wrote < place(&actions, &DestinationAction::Resume));
        let present = DestinationAction::Write(Record::AllPresent { attempt: ATTEMPT });
        assert!(place(&actions, &present) < place(&actions, &DestinationAction::SendAllPresent));
    }

    #[test]
    fn an_early_commit_waits_for_everything_to_be_here() {
        let commit = DestinationEvent::Commit(ATTEMPT, COMMIT);
        let (state, actions) = run(std::slice::from_ref(&commit));
        assert_eq!(
            state,
            DestinationState::Receiving {
                commit: Some(COMMIT)
            }
        );
        assert_eq!(actions, []);
        let (state, actions) = run(&[commit, DestinationEvent::Loaded]);
        assert_eq!(state, DestinationState::Committed);
        assert!(!actions.contains(&DestinationAction::SendReady));
        assert_eq!(actions.last(), Some(&DestinationAction::Resume));
    }

    #[test]
    fn an_aborted_attempt_refuses_a_late_commit() {
        let (state, actions) = run(&[
            DestinationEvent::Abort("x".into()),
            DestinationEvent::QemuGone,
            DestinationEvent::Commit(ATTEMPT, COMMIT),
        ]);
        assert_eq!(state, DestinationState::Aborted);
        assert_eq!(actions.last(), Some(&DestinationAction::SendAborted));
        assert!(!actions.contains(&DestinationAction::Resume));
    }

    #[test]
    fn a_qemu_that_ends_by_itself_is_cleared_away_before_the_abort_is_recorded() {
        for before in [
            DestinationState::Receiving { commit: None },
            DestinationState::Readying,
            DestinationState::Ready,
        ] {
            let (next, actions) = step_destination(&before, &DestinationEvent::QemuGone, &TERMS);
            assert_eq!(actions, [DestinationAction::Quit]);
            let (next, actions) = step_destination(&next, &DestinationEvent::QemuGone, &TERMS);
            assert_eq!(next, DestinationState::Recording);
            assert!(matches!(
                actions[..],
                [DestinationAction::Write(Record::Aborted { .. })]
            ));
        }
    }

    #[test]
    fn a_commit_that_could_not_be_written_is_written_again_and_never_aborted() {
        let state = DestinationState::Committing;
        let event = DestinationEvent::Abort("cancelled".into());
        assert_eq!(
            step_destination(&state, &event, &TERMS),
            (state.clone(), vec![])
        );
        let failed = DestinationEvent::WriteFailed(committed());
        let again = vec![DestinationAction::Write(committed())];
        assert_eq!(step_destination(&state, &failed, &TERMS), (state, again));
    }

    #[test]
    fn a_commit_for_another_attempt_or_generation_is_ignored() {
        for (attempt, generation) in [(Attempt(1), NEXT), (ATTEMPT, Generation(9))] {
            let commit = Commit {
                generation,
                ..COMMIT
            };
            let event = DestinationEvent::Commit(attempt, commit);
            let (next, actions) = step_destination(&DestinationState::Ready, &event, &TERMS);
            assert_eq!((next, actions), (DestinationState::Ready, vec![]));
        }
    }

    #[test]
    fn a_commit_with_an_arbiter_takes_effect_with_its_lease_only() {
        let commit = Commit {
            arbiter: Some(STORE),
            ..COMMIT
        };
        let commit = DestinationEvent::Commit(ATTEMPT, commit);
        let claims = DestinationState::Claiming { arbiter: STORE };
        for ready in [
            vec![DestinationEvent::Loaded, commit.clone()],
            vec![commit.clone(), DestinationEvent::Loaded],
        ] {
            let (state, actions) = run(&ready);
            assert_eq!(state, claims);
            assert_eq!(actions.last(), Some(&DestinationAction::Claim(STORE)));
        }
        let hear = |event: &DestinationEvent| step_destination(&claims, event, &TERMS);
        let (state, actions) = hear(&DestinationEvent::Granted(STORE));
        let committed = vec![DestinationAction::Write(committed())];
        assert_eq!((state, actions), (DestinationState::Committing, committed));
        for ends in [
            DestinationEvent::Denied(STORE),
            DestinationEvent::Abort("no answer".into()),
            DestinationEvent::PeerOverruled(TERMS.after_next()),
        ] {
            let (state, actions) = hear(&ends);
            assert!(
                matches!(state, DestinationState::Aborting { .. }),
                "{ends:?}"
            );
            assert_eq!(actions, [DestinationAction::Quit]);
        }
        let another = StoreId([7; 16]);
        for nothing in [
            DestinationEvent::Granted(another),
            DestinationEvent::Denied(another),
            DestinationEvent::Commit(ATTEMPT, COMMIT),
            commit,
        ] {
            assert_eq!(hear(&nothing), (claims.clone(), vec![]), "{nothing:?}");
        }
        // A restarted agent needs COMMIT and the lease again.
        let ready = Record::Ready { attempt: ATTEMPT };
        let (state, _) = DestinationState::restore(&[ready], &TERMS);
        assert_eq!(state, DestinationState::Ready);
        let (state, actions) = step_destination(&state, &DestinationEvent::Granted(STORE), &TERMS);
        assert_eq!((state, actions), (DestinationState::Ready, vec![]));
    }

    #[test]
    fn an_attempt_that_nobody_knows_is_aborted_by_being_asked_for() {
        let (state, actions) = DestinationState::restore(&[], &TERMS);
        assert_eq!((&state, actions), (&DestinationState::Unknown, vec![]));
        let (state, actions) = step_destination(&state, &DestinationEvent::Asked, &TERMS);
        assert_eq!(state, DestinationState::Recording);
        assert!(matches!(
            actions[..],
            [DestinationAction::Write(Record::Aborted { .. })]
        ));
    }

    #[test]
    fn a_restarted_agent_repeats_what_its_journal_says() {
        let (state, actions) = DestinationState::restore(&[committed()], &TERMS);
        assert_eq!(state, DestinationState::Committed);
        assert_eq!(actions.last(), Some(&DestinationAction::Resume));
    }

    #[test]
    fn incomplete_disks_change_nothing_before_the_commit() {
        let incomplete = Record::Incomplete {
            attempt: ATTEMPT,
            disks: 2,
        };
        let restore = |records: &[Record]| DestinationState::restore(records, &TERMS);
        let (state, actions) = restore(std::slice::from_ref(&incomplete));
        assert!(matches!(state, DestinationState::Aborting { .. }));
        assert_eq!(actions, [DestinationAction::Quit]);
        let (state, _) = restore(&[incomplete, committed()]);
        assert_eq!(state, DestinationState::Committed);
    }

    #[test]
    fn a_person_cannot_commit_what_is_not_all_here() {
        let event = DestinationEvent::Overrule("the source burnt down".into());
        let receiving = DestinationState::Receiving { commit: None };
        let (next, actions) = step_destination(&receiving, &event, &TERMS);
        assert_eq!((next, actions), (receiving, vec![]));
        let (next, actions) = step_destination(&DestinationState::Ready, &event, &TERMS);
        assert_eq!(next, DestinationState::Committing);
        assert!(matches!(
            actions[..],
            [DestinationAction::Write(Record::Overruled { .. })]
        ));
    }

    #[test]
    fn missing_data_is_given_up_by_an_operator_only() {
        let running = DestinationState::Running { all_present: false };
        let event = DestinationEvent::GiveUp("the source burnt down".into());
        let (state, actions) = step_destination(&running, &event, &TERMS);
        assert_eq!(state, running);
        let [DestinationAction::Write(record)] = &actions[..] else {
            panic!("{actions:?}");
        };
        let written = DestinationEvent::Written(record.clone());
        let (state, actions) = step_destination(&state, &written, &TERMS);
        assert_eq!(state, running);
        assert_eq!(actions, [DestinationAction::FillMissing]);
        // The source is not told that it may go before the blocks are filled.
        let (_, actions) = step_destination(&state, &DestinationEvent::Asked, &TERMS);
        assert_eq!(actions, [DestinationAction::SendCommitted]);
        // A restarted agent goes on with it.
        let committed = Record::Committed {
            attempt: ATTEMPT,
            generation: NEXT,
        };
        let (state, actions) = DestinationState::restore(&[committed, record.clone()], &TERMS);
        assert_eq!(state, running);
        assert!(actions.contains(&DestinationAction::FillMissing));
        for state in [DestinationState::Ready, DestinationState::Committed] {
            let (next, actions) = step_destination(&state, &event, &TERMS);
            assert_eq!((next, actions), (state, vec![]));
        }
    }
}
