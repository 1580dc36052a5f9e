//! The terms that both sides of a handover have agreed on.

use super::record::Record;
use longhaul_protocol::{Attempt, Generation, StoreId};

/// The terms of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Terms {
    /// The attempt.
    pub attempt: Attempt,
    /// The generation of the right at the source.
    pub generation: Generation,
    /// Whether the source releases the guest when it stops it, rather than when the destination is
    /// ready: this saves a round trip, and lengthens the time in which a lost connection leaves the
    /// attempt in doubt.
    pub early: bool,
    /// The store of the arbiter whose lease the destination needs, if the source releases the guest
    /// from now on. It is fixed by the record of the release.
    pub arbiter: Option<StoreId>,
}

/// The source's permission to run the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Commit {
    /// The generation of the right from now on.
    pub generation: Generation,
    /// The store that has to give the lease of this generation first.
    pub arbiter: Option<StoreId>,
}

impl Terms {
    /// Returns the generation that the destination will have.
    pub fn next(&self) -> Generation {
        Generation(self.generation.0.saturating_add(1))
    }

    /// Returns the generation of a source that an operator has given the guest back to: higher than
    /// any that the destination may have.
    pub fn after_next(&self) -> Generation {
        Generation(self.generation.0.saturating_add(2))
    }

    /// Returns the permission that follows from a release to this arbiter.
    pub(super) fn commit(&self, arbiter: Option<StoreId>) -> Commit {
        Commit {
            generation: self.next(),
            arbiter,
        }
    }

    pub(super) fn aborted(&self, reason: &str) -> Record {
        Record::Aborted {
            attempt: self.attempt,
            reason: reason.to_owned(),
        }
    }
}
