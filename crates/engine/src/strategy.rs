//! Strategies: what travels before, at and after the switchover. A strategy is a row of
//! [`Strategy::ALL`], never a program of its own.

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
}

/// What a destination that says READY has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// Every block.
    Everything,
}

impl Strategy {
    /// Pre-copy (paper 003, section 2).
    pub const PRECOPY: Strategy = Strategy {
        name: "precopy",
        before: Before::UntilStopRule,
        promise: Promise::Everything,
    };

    /// Every strategy.
    pub const ALL: [Strategy; 1] = [Self::PRECOPY];
}
