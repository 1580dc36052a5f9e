//! The records of a migration's journals.

use longhaul_protocol::{Attempt, Generation, HostId, Incarnation, MigrationId, StoreId};
use serde::{Deserialize, Serialize};

/// Which end of a migration a journal belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Side {
    /// The host that the guest leaves.
    Source,
    /// The host that the guest moves to.
    Destination,
}

/// One durable step of a migration. `docs/journal.md` describes its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Record {
    /// An attempt began.
    Began {
        /// The migration.
        migration: MigrationId,
        /// Its attempt.
        attempt: Attempt,
        /// The side that this journal belongs to.
        side: Side,
        /// The guest's name.
        guest: String,
        /// The current generation of the right, held by the source.
        generation: Generation,
        /// The other host.
        peer: HostId,
        /// The other host's name in this host's configuration.
        peer_name: String,
        /// Whether the guest is paused and is to stay so.
        paused: bool,
    },
    /// Destination: all data is here, and the guest does not run without COMMIT.
    Ready {
        /// The attempt.
        attempt: Attempt,
    },
    /// Source: the guest is not resumed here unless the destination has ABORTED.
    Released {
        /// The attempt.
        attempt: Attempt,
        /// The generation that the destination will have.
        generation: Generation,
    },
    /// Destination: the right is here. The commit point.
    Committed {
        /// The attempt.
        attempt: Attempt,
        /// The generation of the right from now on.
        generation: Generation,
    },
    /// Source: the destination is known to have committed.
    Done {
        /// The attempt.
        attempt: Attempt,
    },
    /// The attempt is over and the guest belongs to the source.
    Aborted {
        /// The attempt.
        attempt: Attempt,
        /// The reason, for people.
        reason: String,
    },
    /// Destination: committed, but `cont` failed before the guest ran. QEMU is quit next, and
    /// ABORTED records that it was.
    Returned {
        /// The attempt.
        attempt: Attempt,
        /// The reason, for people.
        reason: String,
    },
    /// Destination: all of the guest's data at the source is durable here.
    AllPresent {
        /// The attempt.
        attempt: Attempt,
    },
    /// An operator has decided where the guest runs, against the agents' knowledge; or the arbiter
    /// has given it back to the source.
    Overruled {
        /// The attempt.
        attempt: Attempt,
        /// The host that it runs on.
        run_on: Side,
        /// The generation of the right there.
        generation: Generation,
        /// The operator's statement on the other side, or [`BY_ARBITER`](super::BY_ARBITER).
        because: String,
    },
    /// The attempt needs no more actions here.
    Closed {
        /// The attempt.
        attempt: Attempt,
    },
    /// Source: the journals of the destination that the attempt was offered to. Others cannot say
    /// that an attempt which they do not know was never committed.
    Peer {
        /// The attempt.
        attempt: Attempt,
        /// The incarnation of the destination's journals.
        incarnation: Incarnation,
    },
    /// Destination: disks that may lack blocks when the guest runs here. ALL-PRESENT requires that
    /// each of them was found complete.
    Incomplete {
        /// The attempt.
        attempt: Attempt,
        /// How many.
        disks: u16,
    },
    /// Destination: an operator has given up the guest's data that is still at the source, which
    /// never comes back.
    GaveUp {
        /// The attempt.
        attempt: Attempt,
        /// The operator's statement on the source.
        because: String,
    },
    /// Source: as RELEASED, and the destination commits only with the arbiter's lease. So the
    /// source may take the guest back with it.
    ReleasedToArbiter {
        /// The attempt.
        attempt: Attempt,
        /// The generation that the destination will have, and that of the lease.
        generation: Generation,
        /// The store that gives the lease.
        store: StoreId,
    },
}

impl Record {
    /// Returns the attempt that a record belongs to.
    pub fn attempt(&self) -> Attempt {
        match self {
            Record::Began { attempt, .. }
            | Record::Ready { attempt }
            | Record::Released { attempt, .. }
            | Record::Committed { attempt, .. }
            | Record::Done { attempt }
            | Record::Aborted { attempt, .. }
            | Record::Returned { attempt, .. }
            | Record::AllPresent { attempt }
            | Record::Overruled { attempt, .. }
            | Record::Closed { attempt }
            | Record::Peer { attempt, .. }
            | Record::Incomplete { attempt, .. }
            | Record::GaveUp { attempt, .. }
            | Record::ReleasedToArbiter { attempt, .. } => *attempt,
        }
    }

    /// Returns the store whose lease a released guest needs.
    pub(super) fn arbiter(&self) -> Option<StoreId> {
        match self {
            Record::ReleasedToArbiter { store, .. } => Some(*store),
            _ => None,
        }
    }

    /// Returns whether the source has released the guest with this record.
    pub fn is_release(&self) -> bool {
        matches!(
            self,
            Record::Released { .. } | Record::ReleasedToArbiter { .. }
        )
    }
}
