//! The source side of a migration: planning, preparing, and attempts until the guest has left.

pub(crate) mod acks;
pub(crate) mod arbiter;
pub(crate) mod attempt;
pub(crate) mod blockers;
pub(crate) mod candidate;
pub(crate) mod checks;
pub(crate) mod companion;
pub(crate) mod connect;
pub(crate) mod convergence;
pub(crate) mod departed;
pub(crate) mod described;
pub(crate) mod disk_graph;
pub(crate) mod drain;
pub(crate) mod expected_use;
pub(crate) mod exports;
pub(crate) mod files;
pub(crate) mod known_content;
pub(crate) mod late_rate;
pub(crate) mod left_memory;
pub(crate) mod local_disks;
pub(crate) mod losses;
pub(crate) mod memory_copy;
pub(crate) mod memory_file;
pub(crate) mod memory_strategy;
pub(crate) mod plan;
pub(crate) mod prediction;
pub(crate) mod prepare;
pub(crate) mod qemu;
pub(crate) mod recovered;
pub(crate) mod reply;
pub(crate) mod retained_qemu;
pub(crate) mod sample;
pub(crate) mod sender;
pub(crate) mod tracking;
pub(crate) mod verified_ranges;
pub(crate) mod verify;
pub(crate) mod write_tracker;

use crate::context::Context;
use crate::source::companion::{About, Companions, List};
use std::ops::Deref;
use std::sync::Arc;

/// The attempts that have this host as their source.
pub(crate) struct Source {
    pub(crate) context: Arc<Context>,
    /// Creates the companions of each guest.
    companions: List,
}

impl Source {
    /// Creates the companions of a guest.
    pub(crate) fn companions(&self, about: &About) -> Companions {
        Companions::new((self.companions)(about))
    }

    /// Creates the source's side.
    pub(crate) fn new(context: Arc<Context>, companions: List) -> Self {
        Self {
            context,
            companions,
        }
    }
}

impl Deref for Source {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}
