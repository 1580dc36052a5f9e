//! Strategies: what travels before, at and after the switchover. A strategy is a row of
//! [`Strategy::ALL`], never a program of its own. Each region has one.
//!
//! | strategy | before the switchover | what READY promises | after |
//! |---|---|---|---|
//! | `precopy` | everything, until the stop rule applies | everything | - |
//! | `hybrid` | chunks written less often than the threshold | the list of the rest | the rest |
//! | `mirror` | everything, then each write before its completion | everything | - |
//! | `postcopy` | nothing | the list of all blocks | all blocks |
//! | `shared` | nothing | nothing: both hosts see it | - |
//!
//! After the switchover the most written chunks travel first. Memory by `hybrid` is sent once
//! before the switchover, and what is written of it again in further passes, as long as each leaves
//! clearly less; memory by `postcopy` only fills the link until the guest can be stopped,
//! with the code that the guest uses first.

/// A strategy: one row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strategy {
    /// The name that users choose it by.
    pub name: &'static str,
    /// What travels while the guest runs at the source.
    pub before: Before,
    /// What must be at the destination before it may be READY.
    pub promise: Promise,
}

/// What travels while the guest still runs at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Everything, hot blocks last, until the stop rule applies.
    UntilStopRule,
    /// Chunks to which less than this multiple of their length was written.
    BelowThreshold(u8),
    /// Everything; once that has arrived, each write before it completes.
    InStep,
    /// Nothing.
    Nothing,
}

/// What a destination has when it says READY.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Every block.
    Everything,
    /// The list of the blocks that are missing.
    List,
    /// Nothing: the region is elsewhere, and both hosts see it.
    Nothing,
}

impl Strategy {
    /// The threshold of [`Strategy::HYBRID`]. Paper 001 leaves it open; see docs/decisions/0015.
    pub const THRESHOLD: u8 = 2;

    /// Pre-copy (paper 003, section 2).
    pub const PRECOPY: Strategy = Strategy {
        name: "precopy",
        before: Before::UntilStopRule,
        promise: Promise::Everything,
    };

    /// Active push with prioritised prefetch (paper 001, section 4.3).
    pub const HYBRID: Strategy = Strategy::hybrid(Self::THRESHOLD);

    /// Asynchronous, then synchronous replication (paper 000, section 3.2).
    pub const MIRROR: Strategy = Strategy {
        name: "mirror",
        before: Before::InStep,
        promise: Promise::Everything,
    };

    /// Everything after the switchover (paper 001, section 5.2.2).
    pub const POSTCOPY: Strategy = Strategy {
        name: "postcopy",
        before: Before::Nothing,
        promise: Promise::List,
    };

    /// Nothing moves.
    pub const SHARED: Strategy = Strategy {
        name: "shared",
        before: Before::Nothing,
        promise: Promise::Nothing,
    };

    /// Every strategy.
    pub const ALL: [Strategy; 5] = [
        Self::PRECOPY,
        Self::HYBRID,
        Self::MIRROR,
        Self::POSTCOPY,
        Self::SHARED,
    ];

    /// Returns `hybrid` with another threshold.
    pub const fn hybrid(threshold: u8) -> Strategy {
        Strategy {
            name: "hybrid",
            before: Before::BelowThreshold(threshold),
            promise: Promise::List,
        }
    }
}
