//! Lists outcomes that must occur in some run, so that the properties do not hold vacuously.

/// An outcome of some run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Both journals were closed, the guest at the destination.
    Committed,
    /// The source gave up before RELEASED.
    AbortedBeforeRelease,
    /// The guest returned to the source after RELEASED.
    AbortedAfterRelease,
    /// `cont` failed, and the guest was given back.
    Returned,
    /// An operator gave the guest to the source.
    OverruledToSource,
    /// An operator took the guest back from a destination that had committed.
    TakenBack,
    /// An operator gave the guest to the destination.
    OverruledToDestination,
    /// One side learned that an operator had given the guest to the other.
    Conceded,
    /// A COMMIT arrived at a destination that had aborted.
    LateCommitRefused,
    /// A guest that already ran was ordered to run.
    ContTwice,
    /// A guest went on because its migration's socket was lost.
    WokeByItself,
    /// RELEASED could not be written, and was on disk nevertheless after a restart.
    ReleasedByFailedWrite,
    /// A restarted source ordered a destination that waits for blocks to give up.
    NobodySends,
    /// A second attempt moved back to the guest's first host.
    WentBack,
    /// An attempt unknown to the destination was aborted by a question.
    AbortedUnknown,
    /// COMMIT arrived before all content.
    CommittedEarly,
    /// The source could not write its first records, and did not offer the guest.
    NeverOffered,
    /// QEMU refused to resume the guest at the source.
    NotResumed,
    /// An operator gave up what only a dead source had.
    GivenUp,
    /// An operator took the right back from a host that never returns.
    Reclaimed,
    /// The destination committed with the arbiter's lease.
    CommittedWithLease,
    /// The destination gave up, because the source had the lease.
    LeaseDenied,
    /// The source took the guest back with the arbiter's lease.
    GivenBackByArbiter,
    /// All memory followed the guest.
    MemoryFollowed,
    /// A new page server took the place of one that was killed.
    ServedAgain,
    /// Memory was read from its file, because the source's QEMU had ended.
    ReadFromFile,
    /// The destination was told that memory is lost.
    SaidLost,
    /// An operator gave up missing memory.
    MemoryGivenUp,
    /// An operator took a guest back whose memory was missing at the destination.
    MemoryTakenBack,
}

impl Outcome {
    /// All outcomes.
    pub const ALL: [Outcome; 29] = [
        Outcome::Committed,
        Outcome::AbortedBeforeRelease,
        Outcome::AbortedAfterRelease,
        Outcome::Returned,
        Outcome::OverruledToSource,
        Outcome::TakenBack,
        Outcome::OverruledToDestination,
        Outcome::Conceded,
        Outcome::LateCommitRefused,
        Outcome::ContTwice,
        Outcome::WokeByItself,
        Outcome::ReleasedByFailedWrite,
        Outcome::NobodySends,
        Outcome::WentBack,
        Outcome::AbortedUnknown,
        Outcome::CommittedEarly,
        Outcome::NeverOffered,
        Outcome::NotResumed,
        Outcome::GivenUp,
        Outcome::Reclaimed,
        Outcome::CommittedWithLease,
        Outcome::LeaseDenied,
        Outcome::GivenBackByArbiter,
        Outcome::MemoryFollowed,
        Outcome::ServedAgain,
        Outcome::ReadFromFile,
        Outcome::SaidLost,
        Outcome::MemoryGivenUp,
        Outcome::MemoryTakenBack,
    ];

    /// Returns a short description.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Committed => "committed, both journals closed",
            Outcome::AbortedBeforeRelease => "aborted before RELEASED",
            Outcome::AbortedAfterRelease => "aborted after RELEASED",
            Outcome::Returned => "returned after a failed cont",
            Outcome::OverruledToSource => "given to the source by a person",
            Outcome::TakenBack => "taken back by a person after the commit",
            Outcome::OverruledToDestination => "given to the destination by a person",
            Outcome::Conceded => "a person's word heard by the other side",
            Outcome::LateCommitRefused => "a late COMMIT refused",
            Outcome::ContTwice => "cont repeated on a guest that runs",
            Outcome::WokeByItself => "a guest woken by a lost socket",
            Outcome::ReleasedByFailedWrite => "RELEASED on disk though its write failed",
            Outcome::NobodySends => "a waiting destination told that nobody sends",
            Outcome::WentBack => "moved there and back again",
            Outcome::AbortedUnknown => "an unknown attempt aborted by a question",
            Outcome::CommittedEarly => "COMMIT before everything was there",
            Outcome::NeverOffered => "not offered, because its records could not be written",
            Outcome::NotResumed => "not resumed at the source at first",
            Outcome::GivenUp => "missing blocks given up by a person",
            Outcome::Reclaimed => "the right taken back from a host that never returns",
            Outcome::CommittedWithLease => "committed with the arbiter's lease",
            Outcome::LeaseDenied => "given up because the source had the lease",
            Outcome::GivenBackByArbiter => "given back to the source by the arbiter",
            Outcome::MemoryFollowed => "all memory followed",
            Outcome::ServedAgain => "a killed page server replaced",
            Outcome::ReadFromFile => "memory read from its file",
            Outcome::SaidLost => "memory said to be lost",
            Outcome::MemoryGivenUp => "missing memory given up by a person",
            Outcome::MemoryTakenBack => "taken back by a person while memory was missing",
        }
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// The outcomes seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes(u32);

impl Outcomes {
    /// Adds an outcome.
    pub fn add(&mut self, outcome: Outcome) {
        self.0 |= outcome.bit();
    }

    /// Adds all outcomes of another run.
    pub fn join(&mut self, other: Outcomes) {
        self.0 |= other.0;
    }

    /// Returns whether it was seen.
    pub fn has(self, outcome: Outcome) -> bool {
        self.0 & outcome.bit() != 0
    }
}
