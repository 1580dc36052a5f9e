//! Defines broken variants of the handover: each wraps the functions under test and changes one
//! thing. A model that misses one of them proves nothing.

use longhaul_engine::handover::{
    Commit, DestinationAction, DestinationEvent, DestinationState, Record, SourceAction,
    SourceEvent, SourceState, Terms, step_destination, step_source,
};

/// The fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Nothing: the functions as they are.
    Genuine,
    /// COMMITTED takes effect without being durable.
    CommitWithoutJournal,
    /// A time-out in Released resumes the guest.
    ResumeOnTimeout,
    /// READY releases a guest that may still wake by itself.
    ReleaseBeforePostmigrate,
    /// READY is taken for COMMITTED.
    ReadyMeansCommitted,
    /// ABORTED is sent first, and made durable afterwards.
    AbortedToldFirst,
    /// A failed write of RELEASED resumes the guest at once.
    ResumeAfterFailedRelease,
    /// A question about an unknown attempt is answered without a record.
    UnknownWithoutRecord,
    /// The source retires its copy when it hears COMMITTED.
    RetireOnCommitted,
    /// A source restarted in Released resumes.
    RestartResumes,
    /// The destination aborts after its commit point when it is asked to.
    AbortAfterCommit,
    /// The destination resumes a copy when COMMIT arrives, whatever content is still missing.
    CommitBeforeLoaded,
    /// A destination that has aborted accepts a late COMMIT.
    CommitAfterAbort,
    /// `cont` failed, and the source is informed without RETURNED and ABORTED being durable.
    ReturnWithoutRecord,
    /// A source that an operator gave the guest to does not inform the destination.
    OverruleUntold,
    /// Agent: a restarted destination takes any error of `cont` for proof that the guest never ran.
    RefusalAfterRestart,
    /// Agent: a destination restarted in Ready does not check whether its QEMU still exists.
    ReadyUnseen,
    /// Agent: an offer of a known attempt is accepted again.
    KnownOfferAccepted,
    /// Agent: an offer is accepted that arrives after both sides have closed its attempt.
    ClosedOfferAccepted,
    /// Agent: a guest is resumed although its owner had paused it.
    PausedStarted,
    /// A source that has kept the guest lets the destination forget before it has its answer.
    DoneAtOnce,
    /// A source restarted after ABORTED assumes that the guest goes on already.
    AbortedNotResumed,
    /// Agent: while a copy of the guest exists, it is not noted that an operator gave the guest
    /// away.
    ConcedeUnlessHere,
    /// Agent: a restart resumes a guest by an operator's statement that is older than the guest.
    OverruledAgain,
    /// Agent: a host that has lost its journals is believed when it does not know the attempt.
    OtherJournals,
    /// Agent: another machine in the place of the destination is believed.
    OtherIdentity,
    /// Agent: the source does not record the destination's incarnation before the offer.
    PeerUnwritten,
    /// Agent: the source offers the guest before BEGAN is durable.
    OfferBeforeBegan,
    /// Agent: a restart resumes the guest of an attempt that was never offered, whatever became of
    /// the guest since.
    BeganResumes,
    /// Agent: the source's journal is closed although the guest could not be resumed.
    ClosedUnresumed,
    /// An operator cannot take the guest back after the commit.
    NotTakenBack,
    /// OVERRULED that could not be written stays on disk while the copy is retired.
    OverruledLeft,
    /// Agent: the destination does without missing blocks because their source is gone for long.
    GivenUpUnasked,
    /// A destination restarted after GAVE-UP does not go on with it.
    GivenUpOnce,
    /// Agent: the right is taken back although the other host may return.
    ReclaimedUnasked,
    /// The destination commits without the lease that COMMIT asks for.
    LeaseSkipped,
    /// COMMIT is repeated without the arbiter that the release names.
    CommitRepeatedPlain,
    /// The source takes a guest back with the lease that was not released to the arbiter.
    PlainReleaseClaimed,
    /// Agent: an arbiter that does not answer the source counts as its consent.
    UnansweredTaken,
    /// Agent: a source without the guest's memory takes it back with the lease.
    ClaimedWithoutGuest,
    /// The arbiter gives a lease to both: a store restored from a backup that kept its id.
    GivenTwice,
    /// An operator lets the destination run a guest that the arbiter gave back.
    OverruledArbiter,
    /// Agent: the source ends its QEMU when the guest runs at the destination, although memory is
    /// missing there.
    QemuEndedEarly,
    /// A restarted source in Done resumes.
    DoneResumes,
    /// Agent: the destination takes the end of the page server for the end of QEMU's post-copy.
    ServerEndIsWhole,
    /// Agent: what a page server that was killed had taken is not asked for again.
    AcknowledgedForgotten,
    /// Agent: missing memory that is given up becomes zeros, and the guest goes on.
    MemoryZeroed,
    /// Agent: the source sends from a memory file that is not complete.
    IncompleteFileUsed,
    /// Agent: the memory file has what the destination lacks when it is copied.
    FileOfMissing,
    /// Agent: a restarted source removes a complete memory file.
    FileSwept,
    /// Agent: a source whose QEMU has ended does not open the memory file.
    FileNotOpened,
    /// Agent: a source that cannot read memory does not say so.
    LossUnsaid,
}

impl Variant {
    /// The variants that must be caught.
    pub const BROKEN: [Variant; 51] = [
        Variant::CommitWithoutJournal,
        Variant::ResumeOnTimeout,
        Variant::ReleaseBeforePostmigrate,
        Variant::ReadyMeansCommitted,
        Variant::AbortedToldFirst,
        Variant::ResumeAfterFailedRelease,
        Variant::UnknownWithoutRecord,
        Variant::RetireOnCommitted,
        Variant::RestartResumes,
        Variant::AbortAfterCommit,
        Variant::CommitBeforeLoaded,
        Variant::CommitAfterAbort,
        Variant::ReturnWithoutRecord,
        Variant::OverruleUntold,
        Variant::RefusalAfterRestart,
        Variant::ReadyUnseen,
        Variant::KnownOfferAccepted,
        Variant::ClosedOfferAccepted,
        Variant::PausedStarted,
        Variant::DoneAtOnce,
        Variant::AbortedNotResumed,
        Variant::ConcedeUnlessHere,
        Variant::OverruledAgain,
        Variant::OtherJournals,
        Variant::OtherIdentity,
        Variant::PeerUnwritten,
        Variant::OfferBeforeBegan,
        Variant::BeganResumes,
        Variant::ClosedUnresumed,
        Variant::NotTakenBack,
        Variant::OverruledLeft,
        Variant::GivenUpUnasked,
        Variant::GivenUpOnce,
        Variant::ReclaimedUnasked,
        Variant::LeaseSkipped,
        Variant::CommitRepeatedPlain,
        Variant::PlainReleaseClaimed,
        Variant::UnansweredTaken,
        Variant::ClaimedWithoutGuest,
        Variant::GivenTwice,
        Variant::OverruledArbiter,
        Variant::QemuEndedEarly,
        Variant::DoneResumes,
        Variant::ServerEndIsWhole,
        Variant::AcknowledgedForgotten,
        Variant::MemoryZeroed,
        Variant::IncompleteFileUsed,
        Variant::FileOfMissing,
        Variant::FileSwept,
        Variant::FileNotOpened,
        Variant::LossUnsaid,
    ];

    /// Returns a short description of the fault.
    pub fn name(self) -> &'static str {
        match self {
            Variant::Genuine => "none",
            Variant::CommitWithoutJournal => "commit without journal",
            Variant::ResumeOnTimeout => "resume on a time-out in Released",
            Variant::ReleaseBeforePostmigrate => "release before postmigrate",
            Variant::ReadyMeansCommitted => "READY treated as COMMITTED",
            Variant::AbortedToldFirst => "ABORTED told before it is durable",
            Variant::ResumeAfterFailedRelease => "resume at once after a failed RELEASED",
            Variant::UnknownWithoutRecord => "unknown attempts answered without a record",
            Variant::RetireOnCommitted => "retire on COMMITTED, not on ALL-PRESENT",
            Variant::RestartResumes => "a restart in Released resumes",
            Variant::AbortAfterCommit => "abort after the commit point",
            Variant::CommitBeforeLoaded => "commit before everything is there",
            Variant::CommitAfterAbort => "a late COMMIT accepted after ABORTED",
            Variant::ReturnWithoutRecord => "given back without a record",
            Variant::OverruleUntold => "a person's word is not passed on",
            Variant::RefusalAfterRestart => "an error of a second cont gives the guest back",
            Variant::ReadyUnseen => "restarted in Ready without a look for QEMU",
            Variant::KnownOfferAccepted => "a known attempt is accepted again",
            Variant::ClosedOfferAccepted => "an attempt is accepted that was closed",
            Variant::PausedStarted => "a paused guest is started",
            Variant::DoneAtOnce => "DONE before the destination has said a word",
            Variant::AbortedNotResumed => "a restart after ABORTED does not resume",
            Variant::ConcedeUnlessHere => "a person's word not noted while a copy is here",
            Variant::OverruledAgain => "a person's word followed again after a later move",
            Variant::OtherJournals => "a host without its journals is believed",
            Variant::OtherIdentity => "another machine is believed",
            Variant::PeerUnwritten => "the destination's journals are not named before the offer",
            Variant::OfferBeforeBegan => "offered before BEGAN is durable",
            Variant::BeganResumes => "a restart resumes a guest that another attempt has away",
            Variant::ClosedUnresumed => "closed while the guest is not resumed",
            Variant::NotTakenBack => "not taken back from a host that never returns",
            Variant::OverruledLeft => "a failed OVERRULED left on disk while the copy is retired",
            Variant::GivenUpUnasked => "missing blocks given up without a person's word",
            Variant::GivenUpOnce => "a restart after GAVE-UP does not go on with it",
            Variant::ReclaimedUnasked => "the right taken back from a host that returns",
            Variant::LeaseSkipped => "committed without the lease",
            Variant::CommitRepeatedPlain => "COMMIT repeated without its arbiter",
            Variant::PlainReleaseClaimed => "a plain release ended with a lease",
            Variant::UnansweredTaken => "no answer of the arbiter taken for consent",
            Variant::ClaimedWithoutGuest => "given back to a source without the guest",
            Variant::GivenTwice => "one lease given twice",
            Variant::OverruledArbiter => "a person overrules the arbiter",
            Variant::QemuEndedEarly => "the source's QEMU ended while memory is missing",
            Variant::DoneResumes => "a restart in Done resumes",
            Variant::ServerEndIsWhole => "a page server's end taken for all memory",
            Variant::AcknowledgedForgotten => "a killed page server's pages not asked for again",
            Variant::MemoryZeroed => "missing memory given up as zeros",
            Variant::IncompleteFileUsed => "an incomplete memory file used",
            Variant::FileOfMissing => "a memory file without what was acknowledged",
            Variant::FileSwept => "a memory file removed at the agent's start",
            Variant::FileNotOpened => "a complete memory file not used",
            Variant::LossUnsaid => "lost memory not said",
        }
    }

    /// Returns the variant's answer in place of the source's function; `None` where it changes
    /// nothing.
    pub(crate) fn source(
        self,
        state: &SourceState,
        event: &SourceEvent,
        terms: &Terms,
    ) -> Option<(SourceState, Vec<SourceAction>)> {
        use SourceEvent as On;
        use SourceState as Is;
        let then = |state: &SourceState, event| step_source(state, &event, terms);
        Some(match (self, state, event) {
            (Self::ResumeOnTimeout, Is::Released { .. }, On::Abort(_)) => {
                let (state, mut actions) = step_source(state, event, terms);
                actions.push(SourceAction::Resume);
                (state, actions)
            }
            (Self::ReleaseBeforePostmigrate, Is::Here { postmigrate: false }, On::Ready(_)) => {
                step_source(&Is::Here { postmigrate: true }, event, terms)
            }
            (Self::ReadyMeansCommitted, Is::Released { .. }, On::Ready(of)) => {
                then(state, On::Committed(*of))
            }
            (Self::ResumeAfterFailedRelease, Is::Releasing, On::WriteFailed(_)) => {
                then(&Is::Here { postmigrate: true }, On::Abort(String::new()))
            }
            (Self::RetireOnCommitted, Is::Done, On::Committed(of)) => {
                then(state, On::AllPresent(*of))
            }
            (Self::DoneAtOnce, Is::Aborted, On::Written(_))
            | (Self::DoneAtOnce, Is::Closed { here: true }, On::Connected) => {
                let (state, mut actions) = step_source(state, event, terms);
                actions.push(SourceAction::SendDone);
                (state, actions)
            }
            (Self::NotTakenBack, Is::Done, On::Overrule(_)) => (Is::Done, vec![]),
            (Self::OverruledLeft, Is::Overruling { done: true, .. }, On::WriteFailed(_)) => {
                (Is::Done, vec![])
            }
            (Self::CommitRepeatedPlain, Is::Released { .. }, On::Ready(_)) => {
                let (_, actions) = then(&Is::Released { arbiter: None }, event.clone());
                (state.clone(), actions)
            }
            (Self::PlainReleaseClaimed, Is::Released { .. }, On::Granted(store)) => {
                let arbiter = Some(*store);
                then(&Is::Released { arbiter }, event.clone())
            }
            (Self::OverruleUntold, Is::Overruled, On::Connected) => (Is::Overruled, vec![]),
            (Self::OverruleUntold, Is::Overruling { .. }, On::Written(_)) => {
                let (state, mut actions) = step_source(state, event, terms);
                actions.retain(|action| !matches!(action, SourceAction::SendOverruled(_)));
                (state, actions)
            }
            _ => return None,
        })
    }

    pub(crate) fn restored_source(
        self,
        restored: (SourceState, Vec<SourceAction>),
    ) -> (SourceState, Vec<SourceAction>) {
        let (state, mut actions) = restored;
        if self == Self::AbortedNotResumed && state == SourceState::Aborted {
            actions.retain(|action| *action != SourceAction::Resume);
        }
        if self == Self::DoneResumes && state == SourceState::Done {
            actions.push(SourceAction::Resume);
        }
        if self == Self::RestartResumes && matches!(state, SourceState::Released { .. }) {
            actions.push(SourceAction::Resume);
        }
        (state, actions)
    }

    pub(crate) fn restored_destination(
        self,
        restored: (DestinationState, Vec<DestinationAction>),
    ) -> (DestinationState, Vec<DestinationAction>) {
        let (state, mut actions) = restored;
        if self == Self::GivenUpOnce {
            actions.retain(|action| *action != DestinationAction::FillMissing);
        }
        (state, actions)
    }

    /// Returns the variant's answer in place of the destination's function; `None` where it changes
    /// nothing.
    pub(crate) fn destination(
        self,
        state: &DestinationState,
        event: &DestinationEvent,
        terms: &Terms,
    ) -> Option<(DestinationState, Vec<DestinationAction>)> {
        use DestinationAction as Do;
        use DestinationEvent as On;
        use DestinationState as Is;
        let then = |state: &DestinationState, event: &On| step_destination(state, event, terms);
        Some(match (self, state, event) {
            (Self::AbortedToldFirst, Is::Ready, On::Abort(_)) => {
                let (state, mut actions) = then(state, event);
                actions.insert(0, Do::SendAborted);
                (state, actions)
            }
            (Self::UnknownWithoutRecord, Is::Unknown, On::Asked | On::Abort(_)) => {
                (Is::Unknown, vec![Do::SendAborted])
            }
            (Self::LeaseSkipped, Is::Ready | Is::Receiving { .. }, On::Commit(of, commit)) => {
                let arbiter = None;
                then(state, &On::Commit(*of, Commit { arbiter, ..*commit }))
            }
            (Self::AbortAfterCommit, Is::Running { .. }, On::Abort(_)) => then(&Is::Ready, event),
            (Self::CommitBeforeLoaded, Is::Receiving { .. }, On::Commit(..)) => {
                then(&Is::Ready, event)
            }
            (Self::CommitAfterAbort, Is::Aborting { .. }, On::Commit(..)) => {
                then(&Is::Ready, event)
            }
            (Self::ReturnWithoutRecord, Is::Committed, On::ResumeFailed(_)) => {
                (Is::Aborted, vec![Do::Quit, Do::SendAborted])
            }
            (Self::CommitAfterAbort, Is::Aborted, On::Commit(..)) => then(&Is::Ready, event),
            (Self::CommitAfterAbort, Is::Ready, On::Abort(_)) => {
                // The copy is kept for later.
                let attempt = terms.attempt;
                let aborted = Record::Aborted {
                    attempt,
                    reason: String::new(),
                };
                (Is::Recording, vec![Do::Write(aborted)])
            }
            _ => return None,
        })
    }

    /// Returns whether a record's write is only pretended.
    pub(crate) fn skips(self, record: &Record) -> bool {
        self == Self::CommitWithoutJournal && matches!(record, Record::Committed { .. })
    }
}
