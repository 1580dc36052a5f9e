//! Strategies: what travels before, at and after the switchover. A strategy is a row of
//! [`Strategy::ALL`], never a program of its own. Each region has one.
//!
//! | strategy | before the switchover | what READY promises | after |
//! |---|---|---|---|
//! | `precopy` | everything, until the stop rule speaks | everything | - |
//! | `hybrid` | chunks written fewer times than the threshold | the list of what is left | what is left, most written first |
//! | `mirror` | everything, then each write before it is answered | everything | - |
//! | `postcopy` | nothing | the list of everything | everything, most written first |
//! | `shared` | nothing | nothing: both hosts see it | - |

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strategy {
    /// The name that people choose it by.
    pub name: &'static str,
    /// What travels while the guest runs at the source.
    pub before: Before,
    /// What must be at the destination before it may be READY.
    pub promise: Promise,
}

/// What travels while the guest still runs at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Everything, hot blocks last, until the stop rule speaks.
    UntilStopRule,
    /// Chunks to which less than so many times their length was written.
    BelowThreshold(u8),
    /// Everything; once that is there, each write before it is answered.
    InStep,
    /// Nothing.
    Nothing,
}

/// What a destination that says READY has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Every block.
    Everything,
    /// The list of what is still at the source.
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

    /// Active push, prioritised prefetch (paper 001, section 4.3).
    pub const HYBRID: Strategy = Strategy::hybrid(Self::THRESHOLD);

    /// Asynchronous, then synchronous replication (paper 000, section 3.2).
    pub const MIRROR: Strategy = Strategy {
        name: "mirror",
        before: Before::InStep,
        promise: Promise::Everything,
    };

    /// Everything afterwards (paper 001, section 5.2.2).
    pub const POSTCOPY: Strategy = Strategy {
        name: "postcopy",
        before: Before::Nothing,
        promise: Promise::List,
    };

    /// Nothing is moved.
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

    /// `hybrid` with a threshold of one's own.
    pub const fn hybrid(threshold: u8) -> Strategy {
        Strategy {
            name: "hybrid",
            before: Before::BelowThreshold(threshold),
            promise: Promise::List,
        }
    }
}
