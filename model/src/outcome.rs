//! What has to happen in some run, so that the properties do not hold for want of trying.

/// Something that is seen in some run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Both journals were closed, the guest at the destination.
    Committed,
    /// The source gave up before RELEASED.
    AbortedBeforeRelease,
    /// The guest came back to the source after RELEASED.
    AbortedAfterRelease,
    /// `cont` failed, and the guest was given back.
    Returned,
    /// A person gave the guest to the source.
    OverruledToSource,
    /// A person gave the guest to the destination.
    OverruledToDestination,
    /// One side learned that a person had given the guest to the other.
    Conceded,
    /// A COMMIT came to a destination that had aborted.
    LateCommitRefused,
    /// A guest that ran already was told to run.
    ContTwice,
    /// A guest went on because its migration's socket was lost.
    WokeByItself,
    /// RELEASED could not be written, and was on disk all the same after a restart.
    ReleasedByFailedWrite,
    /// A restarted source told a destination that waits for blocks to give up.
    NobodySends,
    /// A second attempt went back to where the guest had come from.
    WentBack,
    /// An attempt that the destination had never heard of was aborted by being asked for.
    AbortedUnknown,
    /// COMMIT came before everything was there.
    CommittedEarly,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Outcome; 15] = [
        Outcome::Committed,
        Outcome::AbortedBeforeRelease,
        Outcome::AbortedAfterRelease,
        Outcome::Returned,
        Outcome::OverruledToSource,
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
    ];

    /// What happens, in a few words.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Committed => "committed, both journals closed",
            Outcome::AbortedBeforeRelease => "aborted before RELEASED",
            Outcome::AbortedAfterRelease => "aborted after RELEASED",
            Outcome::Returned => "returned after a failed cont",
            Outcome::OverruledToSource => "given to the source by a person",
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
        }
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// Which of them were seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes(u32);

impl Outcomes {
    /// Notes one.
    pub fn add(&mut self, outcome: Outcome) {
        self.0 |= outcome.bit();
    }

    /// Notes all that another run has seen.
    pub fn join(&mut self, other: Outcomes) {
        self.0 |= other.0;
    }

    /// Whether it was seen.
    pub fn has(self, outcome: Outcome) -> bool {
        self.0 & outcome.bit() != 0
    }
}
