//! What whoever drives the engine could do wrong: each breaks one rule, and the simulation has to notice.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing is wrong.
    Genuine,
    /// Source: the content of a batch is read before it is taken.
    ReadBeforeTake,
    /// Source: a write is reported before the disk has it.
    ReportBeforeData,
    /// Source: regions are called closed at the stop, before QEMU has let go of them.
    ClosedAtStop,
    /// Source: what was on its way when the connection was lost is forgotten.
    CutForgotten,
    /// Source: a mirrored write is answered before it is at the destination.
    MirrorAnswersAtOnce,
    /// Destination: what comes is written, whatever the guest has written there.
    PullOverwrites,
    /// Destination: the guest's write begins before it is said that it does.
    IntentAfterData,
    /// Destination: a write of a part of a block does not wait for the rest.
    PartAtOnce,
    /// Destination: a read does not wait.
    ReadAtOnce,
    /// Destination: frames from before the list count for what it names.
    OldContentCounts,
    /// Destination: frames of an earlier connection are taken for those of this one.
    OldConnectionCounts,
    /// Destination: masks are stored before the data is durable.
    MasksFirst,
    /// Destination: a flush is answered before the masks are stored.
    FlushBeforeMasks,
    /// Destination: READY before everything is durable.
    ReadyUnsettled,
    /// Destination: what the guest has written is not noted.
    WritesNotNoted,
    /// Destination: what has arrived is not noted.
    ArrivalsNotNoted,
    /// Destination: what is missing is not told on a new connection.
    MissingNotTold,
    /// Source: QEMU has let go of a disk before all of it is durable.
    ClosedUnflushed,
    /// Destination: an agent that is started anew does not know that a disk has failed.
    FailureForgotten,
}

impl Variant {
    pub(crate) const BROKEN: [Variant; 19] = [
        Variant::ReadBeforeTake,
        Variant::ReportBeforeData,
        Variant::ClosedAtStop,
        Variant::CutForgotten,
        Variant::MirrorAnswersAtOnce,
        Variant::PullOverwrites,
        Variant::IntentAfterData,
        Variant::PartAtOnce,
        Variant::ReadAtOnce,
        Variant::OldContentCounts,
        Variant::OldConnectionCounts,
        Variant::MasksFirst,
        Variant::FlushBeforeMasks,
        Variant::ReadyUnsettled,
        Variant::WritesNotNoted,
        Variant::ArrivalsNotNoted,
        Variant::MissingNotTold,
        Variant::ClosedUnflushed,
        Variant::FailureForgotten,
    ];
}
