//! Faulty owners of the engine: each variant breaks one rule, and the simulation has to detect it.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// No rule is broken.
    Genuine,
    /// Source: the content of a batch is read before it is taken.
    ReadBeforeTake,
    /// Source: a write is reported before the disk has it.
    ReportBeforeData,
    /// Source: regions are reported closed at the stop, before QEMU has closed them.
    ClosedAtStop,
    /// Source: frames in flight are forgotten when the connection is lost.
    CutForgotten,
    /// Source: a mirrored write completes before it is at the destination.
    MirrorAnswersAtOnce,
    /// Destination: arriving blocks are written over the guest's writes.
    PullOverwrites,
    /// Destination: the guest's write begins before it is announced.
    IntentAfterData,
    /// Destination: a write of a part of a block does not wait for the other part.
    PartAtOnce,
    /// Destination: a read does not wait.
    ReadAtOnce,
    /// Destination: frames from before the list count for the blocks that it names.
    OldContentCounts,
    /// Destination: frames of an earlier connection count for this one.
    OldConnectionCounts,
    /// Destination: masks are stored before the data is durable.
    MasksFirst,
    /// Destination: a flush completes before the masks are stored.
    FlushBeforeMasks,
    /// Destination: READY before everything is durable.
    ReadyUnsettled,
    /// Destination: the guest's writes are not recorded.
    WritesNotNoted,
    /// Destination: arrivals are not recorded.
    ArrivalsNotNoted,
    /// Destination: missing blocks are not reported on a new connection.
    MissingNotTold,
    /// Source: QEMU has closed a disk before all of it is durable.
    ClosedUnflushed,
    /// Destination: a restarted agent does not know that a disk has failed.
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
