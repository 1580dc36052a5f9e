//! The source's state machine of the handover.

use super::record::{Record, Side};
use super::terms::{Commit, Terms};
use longhaul_protocol::{Attempt, Generation, StoreId};

/// Where the right to run the guest is, as the source knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceState {
    /// The right is here; the guest runs or can be resumed.
    Here {
        /// QEMU is in `postmigrate`: only `cont` wakes the guest.
        postmigrate: bool,
    },
    /// RELEASED is being written.
    Releasing,
    /// The guest may run at the destination: only the destination's answer resumes it here, or the
    /// lease.
    Released {
        /// The arbiter whose lease the destination needs.
        arbiter: Option<StoreId>,
    },
    /// The guest runs here again; ABORTED is being written.
    Aborting,
    /// ABORTED is being written, and the guest stays stopped until it is: RELEASED may be on disk.
    Returning,
    /// The guest stays here; CLOSED is being written.
    Aborted,
    /// DONE is being written.
    Finishing,
    /// The guest is at the destination, which may still need data from here.
    Done,
    /// The destination has all data, and QEMU has quit; CLOSED is being written.
    Retiring,
    /// OVERRULED is being written: an operator has declared the destination dead or fenced, or it
    /// can never get the lease.
    Overruling {
        /// Whether the destination had committed, so that DONE is on disk.
        done: bool,
        /// As in [`SourceState::Released`].
        arbiter: Option<StoreId>,
    },
    /// The guest runs here by a decision which the destination has yet to be told of: an operator's
    /// or the arbiter's.
    Overruled,
    /// Final state.
    Closed {
        /// Whether the guest belongs to the source.
        here: bool,
    },
}

/// An input of the source's state machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// QEMU is in `postmigrate`.
    Postmigrate,
    /// The destination reports that it has all data.
    Ready(Attempt),
    /// The record is on disk.
    Written(Record),
    /// The record could not be written; it may be on disk nevertheless.
    WriteFailed(Record),
    /// The destination has committed.
    Committed(Attempt),
    /// The destination has committed, and needs no more data from here.
    AllPresent(Attempt),
    /// The destination has aborted, durably.
    PeerAborted(Attempt),
    /// An operator, a limit or a failure ends the attempt.
    Abort(String),
    /// An operator declares the destination dead or fenced, and wants the guest to run here.
    Overrule(String),
    /// The arbiter with this store has given this host the lease of the next generation.
    Granted(StoreId),
    /// A connection to the destination exists, again or for the first time since a restart.
    Connected,
}

/// An action that the source's agent carries out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Make this record durable, then report [`SourceEvent::Written`] or
    /// [`SourceEvent::WriteFailed`].
    Write(Record),
    /// Make the guest unstartable here.
    Fence(Generation),
    /// Record that the right is at the destination, in this generation.
    Cede(Generation),
    /// Record that an operator has given the guest to the destination, in this generation. A copy
    /// that still runs here is a conflict that an operator has to be told of.
    Concede(Generation),
    /// Record that the right is at the source, in this generation.
    Unfence(Generation),
    /// Send COMMIT.
    SendCommit(Commit),
    /// Tell the destination to give up.
    SendCancel(String),
    /// Tell the destination that an operator has given the guest to the source.
    SendOverruled(Generation),
    /// Tell the destination that the source has no more questions.
    SendDone,
    /// Ask the destination for the outcome of the attempt.
    Ask,
    /// Resume the guest here.
    Resume,
    /// Quit QEMU: the guest runs at the destination, and needs no more data from here.
    Quit,
}

impl SourceAction {
    /// Returns whether the action resumes the guest here, or permits that. Such an action must not
    /// be repeated on an operator's decision that is older than the guest's last run.
    pub fn lets_go_on(&self) -> bool {
        matches!(self, Self::Resume | Self::Unfence(_))
    }
}

/// Returns the next state and the actions, in their order. An event that does not belong to a state
/// changes nothing.
pub fn step_source(
    state: &SourceState,
    event: &SourceEvent,
    terms: &Terms,
) -> (SourceState, Vec<SourceAction>) {
    use SourceAction as Do;
    use SourceEvent as On;
    use SourceState as Is;
    let attempt = terms.attempt;
    let next = terms.next();
    let stays = |reason: &str| Do::Write(terms.aborted(reason));
    let release = || {
        let generation = next;
        Do::Write(match terms.arbiter {
            None => Record::Released {
                attempt,
                generation,
            },
            Some(store) => Record::ReleasedToArbiter {
                attempt,
                generation,
                store,
            },
        })
    };
    let overrule = |done, arbiter, because: &str| {
        let record = Record::Overruled {
            attempt,
            run_on: Side::Source,
            generation: terms.after_next(),
            because: because.to_owned(),
        };
        (Is::Overruling { done, arbiter }, vec![Do::Write(record)])
    };
    let closed = || Do::Write(Record::Closed { attempt });
    match (state, event) {
        (Is::Here { .. }, On::Postmigrate) if terms.early => (Is::Releasing, vec![release()]),
        (Is::Here { .. }, On::Postmigrate) => (Is::Here { postmigrate: true }, vec![]),
        (Is::Here { postmigrate: true }, On::Ready(of)) if *of == attempt => {
            (Is::Releasing, vec![release()])
        }
        // COMMIT was never sent, so the destination cannot run the guest.
        (Is::Here { .. }, On::Abort(reason)) => {
            let actions = vec![Do::SendCancel(reason.clone()), Do::Resume, stays(reason)];
            (Is::Aborting, actions)
        }
        (Is::Here { .. }, On::PeerAborted(of)) if *of == attempt => {
            (Is::Aborting, vec![Do::Resume, stays(PEER_GAVE_UP)])
        }
        (Is::Aborting, On::Written(Record::Aborted { .. })) => (Is::Aborted, vec![closed()]),

        (Is::Releasing, On::Written(record)) if record.is_release() => {
            let arbiter = record.arbiter();
            let commit = terms.commit(arbiter);
            // The journal is authoritative: after a crash the fence is made again from it.
            let actions = vec![Do::SendCommit(commit), Do::Fence(next)];
            (Is::Released { arbiter }, actions)
        }
        // A restarted agent may nevertheless find RELEASED, and then follows it: the guest is
        // resumed only when ABORTED contradicts it.
        (Is::Releasing, On::WriteFailed(_)) => {
            let reason = "RELEASED could not be written";
            let actions = vec![Do::SendCancel(reason.to_owned()), stays(reason)];
            (Is::Returning, actions)
        }
        (Is::Released { .. }, On::Connected) => (state.clone(), vec![Do::Fence(next), Do::Ask]),
        // The destination decides: it may have committed.
        (Is::Released { .. }, On::Abort(reason)) => {
            (state.clone(), vec![Do::SendCancel(reason.clone())])
        }
        // READY after a reconnection: COMMIT was lost. The release is as it was recorded.
        (Is::Released { arbiter }, On::Ready(of)) if *of == attempt => {
            (state.clone(), vec![Do::SendCommit(terms.commit(*arbiter))])
        }
        // The destination can never have the lease any more, and so never commits.
        (
            Is::Released {
                arbiter: Some(store),
            },
            On::Granted(of),
        ) if of == store => overrule(false, Some(*store), BY_ARBITER),
        (Is::Released { .. }, On::Committed(of) | On::AllPresent(of)) if *of == attempt => {
            (Is::Finishing, vec![Do::Write(Record::Done { attempt })])
        }
        (Is::Released { .. }, On::PeerAborted(of)) if *of == attempt => {
            (Is::Returning, vec![stays(PEER_GAVE_UP)])
        }
        (Is::Returning, On::Written(Record::Aborted { .. })) => {
            (Is::Aborted, back_here(terms.generation, closed()))
        }
        // Where the destination had committed, the operator gives up what the guest did there.
        (Is::Released { arbiter }, On::Overrule(because)) => overrule(false, *arbiter, because),
        (Is::Done, On::Overrule(because)) => overrule(true, None, because),
        (Is::Overruling { .. }, On::Written(Record::Overruled { .. })) => {
            (Is::Overruled, reclaim(terms.after_next()))
        }
        // The record may be on disk: the operator or the arbiter is asked again, and nothing is
        // resumed.
        (
            Is::Overruling {
                done: false,
                arbiter,
            },
            On::WriteFailed(_),
        ) => (Is::Released { arbiter: *arbiter }, vec![]),
        // DONE takes its place before the copy here can be retired.
        (Is::Overruling { done: true, .. }, On::WriteFailed(_)) => {
            (Is::Finishing, vec![Do::Write(Record::Done { attempt })])
        }
        (Is::Overruled, On::Connected) => {
            (Is::Overruled, vec![Do::SendOverruled(terms.after_next())])
        }
        (Is::Overruled, On::PeerAborted(of)) if *of == attempt => (Is::Aborted, vec![closed()]),

        (Is::Finishing, On::Written(Record::Done { .. })) => (Is::Done, vec![Do::Cede(next)]),
        (Is::Done, On::Connected) => (Is::Done, vec![Do::Ask]),
        (Is::Done, On::AllPresent(of)) if *of == attempt => {
            (Is::Retiring, vec![Do::Quit, closed()])
        }

        // DONE lets the destination forget the attempt: it is sent only after the destination has
        // said that the guest is not its own.
        (Is::Aborted, On::Written(Record::Closed { .. })) => {
            let actions = vec![Do::SendCancel(KEPT.to_owned())];
            (Is::Closed { here: true }, actions)
        }
        (Is::Closed { here: true }, On::PeerAborted(of)) if *of == attempt => {
            (state.clone(), vec![Do::SendDone])
        }
        (Is::Retiring, On::Written(Record::Closed { .. })) => {
            (Is::Closed { here: false }, vec![Do::SendDone])
        }
        // An operator declared the source dead and let the destination run the guest.
        (Is::Aborting | Is::Aborted, On::Committed(of) | On::AllPresent(of)) if *of == attempt => {
            (state.clone(), vec![Do::Concede(next)])
        }
        (Is::Closed { here: true }, On::Committed(of) | On::AllPresent(of)) if *of == attempt => {
            (state.clone(), vec![Do::Concede(next), Do::SendDone])
        }
        (Is::Aborting | Is::Aborted | Is::Closed { here: true }, On::Connected) => {
            (state.clone(), vec![Do::SendCancel(KEPT.to_owned())])
        }
        (Is::Closed { here: false }, On::Connected) => (state.clone(), vec![Do::SendDone]),
        // The decision stands: the record is written as soon as it can be.
        (
            Is::Aborting | Is::Returning | Is::Aborted | Is::Finishing | Is::Retiring,
            On::WriteFailed(record),
        ) => (state.clone(), vec![Do::Write(record.clone())]),
        _ => (state.clone(), vec![]),
    }
}

/// The reason in OVERRULED where the arbiter decided, and no operator.
pub const BY_ARBITER: &str = "the arbiter gave the lease to the source";

const PEER_GAVE_UP: &str = "the destination gave up";
const KEPT: &str = "the source has kept the guest";

fn back_here(generation: Generation, closed: SourceAction) -> Vec<SourceAction> {
    vec![
        SourceAction::Unfence(generation),
        SourceAction::Resume,
        closed,
    ]
}

fn reclaim(generation: Generation) -> Vec<SourceAction> {
    vec![
        SourceAction::Unfence(generation),
        SourceAction::Resume,
        SourceAction::SendOverruled(generation),
    ]
}

impl SourceState {
    /// Returns the state that the journal's records of an attempt lead to, and the first actions of
    /// a restarted agent.
    pub fn restore(records: &[Record], terms: &Terms) -> (SourceState, Vec<SourceAction>) {
        use SourceAction as Do;
        let attempt = terms.attempt;
        let closed = || Do::Write(Record::Closed { attempt });
        match records.last() {
            Some(record @ (Record::Released { .. } | Record::ReleasedToArbiter { .. })) => {
                let arbiter = record.arbiter();
                (Self::Released { arbiter }, vec![Do::Fence(terms.next())])
            }
            Some(Record::Overruled { .. }) => (Self::Overruled, reclaim(terms.after_next())),
            Some(Record::Done { .. }) => (Self::Done, vec![Do::Cede(terms.next())]),
            Some(Record::Aborted { .. }) if overruled(records) => (Self::Aborted, vec![closed()]),
            // The guest may still be stopped: after a failed write of RELEASED, ABORTED comes
            // first, and the record of the release may be gone.
            Some(Record::Aborted { .. }) => (Self::Aborted, back_here(terms.generation, closed())),
            Some(Record::Closed { .. }) => {
                let done = |record: &Record| matches!(record, Record::Done { .. });
                let here = overruled(records) || !records.iter().any(done);
                (Self::Closed { here }, vec![])
            }
            // The other records belong to the destination's journals.
            Some(
                Record::Began { .. }
                | Record::Peer { .. }
                | Record::Incomplete { .. }
                | Record::Ready { .. }
                | Record::Committed { .. }
                | Record::AllPresent { .. }
                | Record::Returned { .. }
                | Record::GaveUp { .. },
            )
            | None => {
                let record = terms.aborted("the source's agent was restarted");
                (Self::Aborting, vec![Do::Resume, Do::Write(record)])
            }
        }
    }

    /// Returns whether the state is final.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// Returns whether the guest's place is decided, even if records or messages are outstanding.
    pub fn is_settled(&self) -> bool {
        use SourceState as Is;
        matches!(
            self,
            Is::Aborting
                | Is::Aborted
                | Is::Done
                | Is::Retiring
                | Is::Overruled
                | Is::Closed { .. }
        )
    }

    /// Returns whether the guest stays at the source, whatever the destination answers.
    pub fn keeps_guest(&self) -> bool {
        use SourceState as Is;
        matches!(
            self,
            Is::Aborting | Is::Aborted | Is::Overruled | Is::Closed { here: true }
        )
    }

    /// Returns whether the source alone can end the attempt.
    pub fn may_abort(&self) -> bool {
        matches!(self, Self::Here { .. })
    }

    /// Returns whether only the destination's answer, or an operator, decides.
    pub fn in_doubt(&self) -> bool {
        matches!(
            self,
            Self::Released { .. } | Self::Overruling { done: false, .. }
        )
    }
}

fn overruled(records: &[Record]) -> bool {
    records
        .iter()
        .any(|record| matches!(record, Record::Overruled { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: Attempt = Attempt(1);
    const NEXT: Generation = Generation(5);
    const TERMS: Terms = Terms {
        attempt: ATTEMPT,
        generation: Generation(4),
        early: false,
        arbiter: None,
    };
    const STORE: StoreId = StoreId([6; 16]);
    const RELEASED: SourceState = SourceState::Released { arbiter: None };

    /// Runs from the beginning, with every record written at once.
    fn run(events: &[SourceEvent], terms: &Terms) -> (SourceState, Vec<SourceAction>) {
        let mut all = Vec::new();
        let mut state = SourceState::Here { postmigrate: false };
        let mut events: Vec<_> = events.iter().rev().cloned().collect();
        while let Some(event) = events.pop() {
            let (next, actions) = step_source(&state, &event, terms);
            state = next;
            let written = actions.iter().find_map(|action| match action {
                SourceAction::Write(record) => Some(SourceEvent::Written(record.clone())),
                _ => None,
            });
            events.extend(written);
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
        let (state, actions) = run(&[SourceEvent::Ready(ATTEMPT)], &TERMS);
        assert_eq!(
            (state, actions),
            (SourceState::Here { postmigrate: false }, vec![])
        );
    }

    #[test]
    fn a_move_goes_through() {
        let events = [
            SourceEvent::Postmigrate,
            SourceEvent::Ready(ATTEMPT),
            SourceEvent::Committed(ATTEMPT),
            SourceEvent::AllPresent(ATTEMPT),
        ];
        let (state, actions) = run(&events, &TERMS);
        assert_eq!(state, SourceState::Closed { here: false });
        let expected = [
            SourceAction::Write(released()),
            SourceAction::SendCommit(TERMS.commit(None)),
            SourceAction::Fence(NEXT),
            SourceAction::Write(Record::Done { attempt: ATTEMPT }),
            SourceAction::Cede(NEXT),
            SourceAction::Quit,
            SourceAction::Write(Record::Closed { attempt: ATTEMPT }),
            SourceAction::SendDone,
        ];
        assert_eq!(actions, expected);
    }

    #[test]
    fn an_early_release_does_not_wait_for_ready() {
        let early = Terms {
            early: true,
            ..TERMS
        };
        let (state, actions) = run(&[SourceEvent::Postmigrate], &early);
        assert_eq!(state, RELEASED);
        assert!(actions.contains(&SourceAction::SendCommit(TERMS.commit(None))));
    }

    #[test]
    fn after_release_only_the_destination_gives_the_guest_back() {
        let events = [SourceEvent::Postmigrate, SourceEvent::Ready(ATTEMPT)];
        let (state, _) = run(&events, &TERMS);
        for event in [
            SourceEvent::Abort("cancelled".into()),
            SourceEvent::WriteFailed(released()),
            SourceEvent::Connected,
            SourceEvent::PeerAborted(Attempt(9)),
        ] {
            let (next, actions) = step_source(&state, &event, &TERMS);
            assert_eq!(next, RELEASED, "{event:?}");
            assert!(!actions.contains(&SourceAction::Resume), "{event:?}");
        }
        let (next, actions) = step_source(&state, &SourceEvent::PeerAborted(ATTEMPT), &TERMS);
        assert_eq!(next, SourceState::Returning);
        assert!(
            !actions.contains(&SourceAction::Resume),
            "the record comes first"
        );
    }

    #[test]
    fn after_a_release_that_could_not_be_written_the_guest_waits_for_the_record_of_the_abort() {
        let failed = SourceEvent::WriteFailed(released());
        let (state, actions) = step_source(&SourceState::Releasing, &failed, &TERMS);
        assert_eq!(state, SourceState::Returning);
        assert!(!actions.contains(&SourceAction::Resume));
        let aborted = SourceEvent::Written(TERMS.aborted("x"));
        let (state, actions) = step_source(&state, &aborted, &TERMS);
        assert_eq!(state, SourceState::Aborted);
        assert!(actions.contains(&SourceAction::Resume));
    }

    #[test]
    fn a_restarted_agent_finishes_what_an_abort_after_the_release_began() {
        // A RELEASED whose write failed may or may not be on disk.
        for records in [
            vec![released(), TERMS.aborted("x")],
            vec![TERMS.aborted("x")],
        ] {
            let (state, actions) = SourceState::restore(&records, &TERMS);
            assert_eq!(state, SourceState::Aborted);
            assert!(actions.contains(&SourceAction::Resume));
        }
    }

    #[test]
    fn a_destination_may_forget_only_what_the_source_has_heard() {
        let closed = SourceState::Closed { here: true };
        let written = SourceEvent::Written(Record::Closed { attempt: ATTEMPT });
        let (state, actions) = step_source(&SourceState::Aborted, &written, &TERMS);
        assert_eq!(state, closed);
        assert!(!actions.contains(&SourceAction::SendDone));
        let (state, actions) = step_source(&state, &SourceEvent::Connected, &TERMS);
        assert_eq!(state, closed);
        assert!(!actions.contains(&SourceAction::SendDone));
        // An operator gave the guest to the destination.
        let (_, actions) = step_source(&state, &SourceEvent::AllPresent(ATTEMPT), &TERMS);
        let expected = [SourceAction::Concede(NEXT), SourceAction::SendDone];
        assert_eq!(actions, expected);
        let (_, actions) = step_source(&state, &SourceEvent::PeerAborted(ATTEMPT), &TERMS);
        assert_eq!(actions, [SourceAction::SendDone]);
    }

    #[test]
    fn a_person_overrules_only_doubt() {
        let event = SourceEvent::Overrule("the destination burnt down".into());
        let here = SourceState::Here { postmigrate: true };
        assert_eq!(step_source(&here, &event, &TERMS), (here, vec![]));
        let (state, actions) = step_source(&RELEASED, &event, &TERMS);
        assert_eq!(
            state,
            SourceState::Overruling {
                done: false,
                arbiter: None,
            }
        );
        let [SourceAction::Write(record)] = &actions[..] else {
            panic!("{actions:?}");
        };
        let (state, actions) = step_source(&state, &SourceEvent::Written(record.clone()), &TERMS);
        assert_eq!(state, SourceState::Overruled);
        assert!(actions.contains(&SourceAction::Resume));
    }

    #[test]
    fn a_person_takes_the_guest_back_from_a_destination_that_had_committed() {
        let event = SourceEvent::Overrule("the destination burnt down".into());
        let (state, actions) = step_source(&SourceState::Done, &event, &TERMS);
        assert_eq!(
            state,
            SourceState::Overruling {
                done: true,
                arbiter: None,
            }
        );
        let [SourceAction::Write(record)] = &actions[..] else {
            panic!("{actions:?}");
        };
        // OVERRULED may be on disk: DONE replaces it before the copy can be retired.
        let failed = SourceEvent::WriteFailed(record.clone());
        let (back, actions) = step_source(&state, &failed, &TERMS);
        assert_eq!(back, SourceState::Finishing);
        let done = Record::Done { attempt: ATTEMPT };
        assert_eq!(actions, [SourceAction::Write(done.clone())]);

        let (state, actions) = step_source(&state, &SourceEvent::Written(record.clone()), &TERMS);
        assert_eq!(state, SourceState::Overruled);
        assert_eq!(actions, reclaim(Generation(6)));
        let (state, _) = step_source(&state, &SourceEvent::PeerAborted(ATTEMPT), &TERMS);
        assert_eq!(state, SourceState::Aborted);
        let closed = Record::Closed { attempt: ATTEMPT };
        let records = [released(), done, record.clone(), closed];
        let (state, _) = SourceState::restore(&records, &TERMS);
        assert_eq!(state, SourceState::Closed { here: true });
    }

    #[test]
    fn a_release_to_an_arbiter_ends_with_its_lease_too() {
        let terms = Terms {
            arbiter: Some(STORE),
            ..TERMS
        };
        let events = [SourceEvent::Postmigrate, SourceEvent::Ready(ATTEMPT)];
        let (state, actions) = run(&events, &terms);
        let arbiter = Some(STORE);
        assert_eq!(state, SourceState::Released { arbiter });
        let commit = SourceAction::SendCommit(terms.commit(arbiter));
        assert!(actions.contains(&commit));
        let record = Record::ReleasedToArbiter {
            attempt: ATTEMPT,
            generation: NEXT,
            store: STORE,
        };
        // The record decides, whatever the agent knows of arbiters afterwards.
        let (restored, _) = SourceState::restore(std::slice::from_ref(&record), &TERMS);
        assert_eq!(restored, state);
        let (_, actions) = step_source(&restored, &SourceEvent::Ready(ATTEMPT), &TERMS);
        assert_eq!(actions, [commit]);

        let granted = SourceEvent::Granted(STORE);
        let (overruling, actions) = step_source(&state, &granted, &TERMS);
        let [SourceAction::Write(record)] = &actions[..] else {
            panic!("{actions:?}");
        };
        let failed = SourceEvent::WriteFailed(record.clone());
        assert_eq!(step_source(&overruling, &failed, &TERMS), (state, vec![]));
        let written = SourceEvent::Written(record.clone());
        let (state, actions) = step_source(&overruling, &written, &TERMS);
        assert_eq!(state, SourceState::Overruled);
        assert!(actions.contains(&SourceAction::Resume));
    }

    #[test]
    fn no_other_lease_ends_doubt() {
        let ends = |arbiter, of| {
            let state = SourceState::Released { arbiter };
            let answer = step_source(&state, &SourceEvent::Granted(of), &TERMS);
            answer != (state, vec![])
        };
        assert!(ends(Some(STORE), STORE));
        assert!(!ends(Some(STORE), StoreId([7; 16])));
        // The destination needs no lease.
        assert!(!ends(None, STORE));
    }
}
