//! What both sides of a hand-over have agreed on.

use super::record::Record;
use longhaul_protocol::{Attempt, Generation};

/// The terms of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The attempt.
    pub attempt: Attempt,
    /// The generation that the right to run has at the source.
    pub generation: Generation,
    /// The source releases the guest when it stops it, not when the destination is ready: one round
    /// trip less, and a longer time in which a cut leaves doubt.
    pub early: bool,
}

impl Terms {
    /// The generation that the destination will have.
    pub fn next(&self) -> Generation {
        Generation(self.generation.0.saturating_add(1))
    }

    /// The generation of a source that a person has given the guest back to: above all that the
    /// destination may have.
    pub fn after_next(&self) -> Generation {
        Generation(self.generation.0.saturating_add(2))
    }

    pub(super) fn aborted(&self, reason: &str) -> Record {
        Record::Aborted {
            attempt: self.attempt,
            reason: reason.to_owned(),
        }
    }
}
