//! Broken variants: each changes one thing of what surrounds the cores, or of what they say. A run
//! that misses one of them proves nothing.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing is changed.
    Genuine,
    /// A host that has lost its journals is believed when it does not know the attempt.
    OtherJournals,
    /// A guest can begin another attempt before the records of the last one are written.
    NameFreedEarly,
    /// A guest that could not be resumed is forgotten.
    ResumeForgotten,
    /// Time limits and retries wait until no message has come for a while.
    TimeoutsStarve,
    /// A try to connect goes on after the attempt is over.
    RedialGoesOn,
    /// An offer is accepted after its attempt is closed.
    ClosedOfferAccepted,
    /// It is noted that nothing of a guest remains before its exports are ended.
    ExportsEndLate,
    /// The source's records are not durable.
    SourceRecordsVolatile,
    /// The destination's records are not durable.
    DestinationRecordsVolatile,
    /// The limit of a running guest is applied to a stopped one.
    PatienceWhileStopped,
    /// A guest in doubt is resumed.
    DoubtResumes,
    /// The source's copy goes when the guest runs at the destination.
    RetiredOnCommit,
    /// ALL-PRESENT does not wait until blocks are durable.
    PresentBeforeDurable,
    /// Frames of an earlier connection are applied.
    OldFramesApplied,
    /// QEMU loads when the number of frames is announced, not when they are applied.
    AnnouncementSuffices,
    /// Who may run the guest is not noted.
    RightsNotNoted,
    /// A restarted destination in Ready does not look whether its QEMU exists.
    ReadyUnseen,
    /// A source does not take the guest back from a destination that committed and never returns.
    NoWayBackAfterCommit,
    /// A restarted source does not send the rest of the disks.
    NoDrainAfterRestart,
    /// The arbiter gives a lease to both hosts.
    LeaseGivenTwice,
    /// The destination takes the arbiter's answer for given.
    LeaseSkipped,
    /// The destination takes the end of the page server for the end of QEMU's post-copy.
    ServerEndIsWhole,
    /// What a page server that was killed had acknowledged is not asked for again.
    AcknowledgedForgotten,
    /// Missing memory that is given up becomes zeros, and the guest goes on.
    MemoryZeroed,
    /// The source sends from a memory file that is not complete.
    IncompleteFileUsed,
    /// The memory file has what was not acknowledged when it was copied.
    FileOfMissing,
    /// A restarted source in Done resumes the guest.
    DoneResumes,
    /// A source that cannot read memory does not say so.
    LossUnsaid,
    /// Nobody starts another page server.
    ServerNotReplaced,
}

impl Variant {
    pub(crate) const BROKEN: [Variant; 29] = [
        Variant::OtherJournals,
        Variant::NameFreedEarly,
        Variant::ResumeForgotten,
        Variant::TimeoutsStarve,
        Variant::RedialGoesOn,
        Variant::ClosedOfferAccepted,
        Variant::ExportsEndLate,
        Variant::SourceRecordsVolatile,
        Variant::DestinationRecordsVolatile,
        Variant::PatienceWhileStopped,
        Variant::DoubtResumes,
        Variant::RetiredOnCommit,
        Variant::PresentBeforeDurable,
        Variant::OldFramesApplied,
        Variant::AnnouncementSuffices,
        Variant::RightsNotNoted,
        Variant::ReadyUnseen,
        Variant::NoDrainAfterRestart,
        Variant::NoWayBackAfterCommit,
        Variant::LeaseGivenTwice,
        Variant::LeaseSkipped,
        Variant::ServerEndIsWhole,
        Variant::AcknowledgedForgotten,
        Variant::MemoryZeroed,
        Variant::IncompleteFileUsed,
        Variant::FileOfMissing,
        Variant::DoneResumes,
        Variant::LossUnsaid,
        Variant::ServerNotReplaced,
    ];
}
