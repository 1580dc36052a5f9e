//! The source side of a migration: planning, preparing, and attempts until the guest has left.

pub(crate) mod acks;
pub(crate) mod attempt;
pub(crate) mod blockers;
pub(crate) mod connect;
pub(crate) mod convergence;
pub(crate) mod disk_graph;
pub(crate) mod drain;
pub(crate) mod exports;
pub(crate) mod files;
pub(crate) mod local_disks;
pub(crate) mod plan;
pub(crate) mod prepare;
pub(crate) mod qemu;
pub(crate) mod recovered;
pub(crate) mod retained_qemu;
pub(crate) mod sender;
pub(crate) mod tracking;
pub(crate) mod verify;
pub(crate) mod write_tracker;
