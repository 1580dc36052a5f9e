//! The source's side of the hand-over.

use super::record::{Record, Side};
use super::terms::Terms;
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
    /// The guest runs here again; ABORTED is being written.
    Aborting,
    /// ABORTED is being written, and the guest stands still until it is: RELEASED may be on disk.
    Returning,
    /// The guest stays here; CLOSED is being written.
    Aborted,
    /// DONE is being written.
    Finishing,
    /// The guest is at the destination, which may still need what is here.
    Done,
    /// The destination has everything, and QEMU is quit; CLOSED is being written.
    Retiring,
    /// OVERRULED is being written: a person has said that the destination is dead or fenced.
    Overruling,
    /// The guest goes on here by a person's word, and the destination has yet to hear of it.
    Overruled,
    /// Nothing more will happen.
    Closed {
        /// Whether the guest is the source's.
        here: bool,
    },
}

/// What happens to the source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// QEMU is in `postmigrate`.
    Postmigrate,
    /// The destination has everything and says so.
    Ready(Attempt),
    /// The record is on disk.
    Written(Record),
    /// The record could not be written; it may be on disk all the same.
    WriteFailed(Record),
    /// The destination has committed.
    Committed(Attempt),
    /// The destination has committed, and nothing that it needs is left here.
    AllPresent(Attempt),
    /// The destination has aborted, durably.
    PeerAborted(Attempt),
    /// A person, a limit or a failure ends the attempt.
    Abort(String),
    /// A person says that the destination is dead or fenced, and that the guest is to run here.
    Overrule(String),
    /// A connection to the destination is there, again or for the first time since a restart.
    Connected,
}

/// What the source has to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Make this durable, then report [`SourceEvent::Written`] or [`SourceEvent::WriteFailed`].
    Write(Record),
    /// Make the guest unstartable here.
    Fence(Generation),
    /// Note that the guest is the destination's, in this generation.
    Cede(Generation),
    /// Note that a person has given the guest to the destination, in this generation. A copy that
    /// runs here all the same is a conflict that a person has to hear of.
    Concede(Generation),
    /// Note that the guest is the source's, in this generation.
    Unfence(Generation),
    /// Send COMMIT.
    SendCommit(Generation),
    /// Tell the destination to give up.
    SendCancel(String),
    /// Tell the destination that a person has given the guest to the source.
    SendOverruled(Generation),
    /// Tell the destination that nothing more will be asked of it.
    SendDone,
    /// Ask the destination what became of the attempt.
    Ask,
    /// Let the guest go on here.
    Resume,
    /// Quit QEMU here: the guest runs elsewhere, and needs nothing of it.
    Quit,
}

impl SourceAction {
    /// Whether it lets the guest go on here, or says that it may: not to be done again by a person's
    /// word that is older than what the guest has done since.
    pub fn lets_go_on(&self) -> bool {
        matches!(self, Self::Resume | Self::Unfence(_))
    }
}

/// The next state, and what is to be done, in this order. An event that does not belong to a state
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
        Do::Write(Record::Released {
            attempt,
            generation,
        })
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

        (Is::Releasing, On::Written(Record::Released { .. })) => {
            // The journal is what counts: the fence is made again from it after a crash.
            (Is::Released, vec![Do::SendCommit(next), Do::Fence(next)])
        }
        // An agent that is restarted may find RELEASED all the same, and then goes by it: the guest
        // is resumed only when ABORTED is there to say otherwise.
        (Is::Releasing, On::WriteFailed(_)) => {
            let reason = "RELEASED could not be written";
            let actions = vec![Do::SendCancel(reason.to_owned()), stays(reason)];
            (Is::Returning, actions)
        }
        (Is::Released, On::Connected) => (Is::Released, vec![Do::Fence(next), Do::Ask]),
        // The destination decides: it may have committed.
        (Is::Released, On::Abort(reason)) => (Is::Released, vec![Do::SendCancel(reason.clone())]),
        // READY after a reconnection: COMMIT was lost.
        (Is::Released, On::Ready(of)) if *of == attempt => {
            (Is::Released, vec![Do::SendCommit(next)])
        }
        (Is::Released, On::Committed(of) | On::AllPresent(of)) if *of == attempt => {
            (Is::Finishing, vec![Do::Write(Record::Done { attempt })])
        }
        (Is::Released, On::PeerAborted(of)) if *of == attempt => {
            (Is::Returning, vec![stays(PEER_GAVE_UP)])
        }
        (Is::Returning, On::Written(Record::Aborted { .. })) => {
            (Is::Aborted, back_here(terms.generation, closed()))
        }
        (Is::Released, On::Overrule(because)) => {
            let record = Record::Overruled {
                attempt,
                run_on: Side::Source,
                generation: terms.after_next(),
                because: because.clone(),
            };
            (Is::Overruling, vec![Do::Write(record)])
        }
        (Is::Overruling, On::Written(Record::Overruled { .. })) => {
            (Is::Overruled, reclaim(terms.after_next()))
        }
        // It may be on disk: a person is asked again, nothing is resumed.
        (Is::Overruling, On::WriteFailed(_)) => (Is::Released, vec![]),
        (Is::Overruled, On::Connected) => {
            (Is::Overruled, vec![Do::SendOverruled(terms.after_next())])
        }
        (Is::Overruled, On::PeerAborted(of)) if *of == attempt => (Is::Aborted, vec![closed()]),

        (Is::Finishing, On::Written(Record::Done { .. })) => (Is::Done, vec![Do::Cede(next)]),
        (Is::Done, On::Connected) => (Is::Done, vec![Do::Ask]),
        (Is::Done, On::AllPresent(of)) if *of == attempt => {
            (Is::Retiring, vec![Do::Quit, closed()])
        }

        // DONE lets the destination forget: not before it has said that the guest is not its own.
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
        // A person has let the destination run it, who took the source for dead.
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
        // What was decided stays decided: it is written as soon as it can be.
        (
            Is::Aborting | Is::Returning | Is::Aborted | Is::Finishing | Is::Retiring,
            On::WriteFailed(record),
        ) => (state.clone(), vec![Do::Write(record.clone())]),
        _ => (state.clone(), vec![]),
    }
}

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
    /// The state that a journal's records of an attempt lead to, and what an agent that was
    /// restarted does first.
    pub fn restore(records: &[Record], terms: &Terms) -> (SourceState, Vec<SourceAction>) {
        use SourceAction as Do;
        let attempt = terms.attempt;
        let closed = || Do::Write(Record::Closed { attempt });
        match records.last() {
            Some(Record::Released { .. }) => (Self::Released, vec![Do::Fence(terms.next())]),
            Some(Record::Overruled { .. }) => (Self::Overruled, reclaim(terms.after_next())),
            Some(Record::Done { .. }) => (Self::Done, vec![Do::Cede(terms.next())]),
            Some(Record::Aborted { .. }) if overruled(records) => (Self::Aborted, vec![closed()]),
            // It may stand still yet: after a RELEASED whose write failed, ABORTED comes first, and the
            // record of the release may be gone.
            Some(Record::Aborted { .. }) => (Self::Aborted, back_here(terms.generation, closed())),
            Some(Record::Closed { .. }) => {
                let done = |record: &Record| matches!(record, Record::Done { .. });
                let here = !records.iter().any(done);
                (Self::Closed { here }, vec![])
            }
            // What follows belongs to the destination's journals.
            Some(
                Record::Began { .. }
                | Record::Peer { .. }
                | Record::Ready { .. }
                | Record::Committed { .. }
                | Record::AllPresent { .. }
                | Record::Returned { .. },
            )
            | None => {
                let record = terms.aborted("the source's agent was restarted");
                (Self::Aborting, vec![Do::Resume, Do::Write(record)])
            }
        }
    }

    /// Whether nothing more will happen.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Closed { .. })
    }

    /// Whether the guest's place is decided, whatever has yet to be written or said.
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

    /// Whether the guest stays at the source, whatever the destination says.
    pub fn keeps_guest(&self) -> bool {
        use SourceState as Is;
        matches!(
            self,
            Is::Aborting | Is::Aborted | Is::Overruled | Is::Closed { here: true }
        )
    }

    /// Whether the attempt can be ended by the source alone.
    pub fn may_abort(&self) -> bool {
        matches!(self, Self::Here { .. })
    }

    /// Whether only the destination's word, or a person's, decides.
    pub fn in_doubt(&self) -> bool {
        matches!(self, Self::Released | Self::Overruling)
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
    };

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
            SourceAction::SendCommit(NEXT),
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
        assert_eq!(state, SourceState::Released);
        assert!(actions.contains(&SourceAction::SendCommit(NEXT)));
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
            assert_eq!(next, SourceState::Released, "{event:?}");
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
        // A RELEASED whose write failed may be there or not.
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
        // A person gave the guest to the destination.
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
        let (state, actions) = step_source(&SourceState::Released, &event, &TERMS);
        assert_eq!(state, SourceState::Overruling);
        let [SourceAction::Write(record)] = &actions[..] else {
            panic!("{actions:?}");
        };
        let (state, actions) = step_source(&state, &SourceEvent::Written(record.clone()), &TERMS);
        assert_eq!(state, SourceState::Overruled);
        assert!(actions.contains(&SourceAction::Resume));
    }
}
