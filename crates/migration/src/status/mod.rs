//! The status of migrations: progress, outcomes, reports and failures.

pub(crate) mod archive;
pub(crate) mod changes;
pub(crate) mod events;
pub(crate) mod failure;
pub(crate) mod faults;
pub(crate) mod guest_clock;
pub(crate) mod guest_rate;
pub(crate) mod held;
pub(crate) mod hooks;
pub(crate) mod in_doubt;
pub(crate) mod migration;
pub(crate) mod paths;
pub(crate) mod predictions;
pub(crate) mod registry;
pub(crate) mod time;
pub(crate) mod usage;
