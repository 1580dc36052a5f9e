//! What the journals hold.

use longhaul_protocol::{Attempt, Generation, HostId, Incarnation, MigrationId};
use serde::{Deserialize, Serialize};

/// Which end of a migration a journal belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Side {
    /// Where the guest was.
    Source,
    /// Where it goes.
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
        /// Whose journal this is.
        side: Side,
        /// The guest's name.
        guest: String,
        /// The generation that the right to run has, held by the source.
        generation: Generation,
        /// The other host.
        peer: HostId,
        /// The other host's name here.
        peer_name: String,
        /// Whether the guest is paused and shall stay so.
        paused: bool,
    },
    /// Destination: everything is here, and nothing runs without COMMIT.
    Ready {
        /// The attempt.
        attempt: Attempt,
    },
    /// Source: the guest is not resumed here any more unless the destination has ABORTED.
    Released {
        /// The attempt.
        attempt: Attempt,
        /// The generation that the destination will have.
        generation: Generation,
    },
    /// Destination: the guest belongs here. The commit point.
    Committed {
        /// The attempt.
        attempt: Attempt,
        /// The generation that it has from now on.
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
        /// Why, for people.
        reason: String,
    },
    /// Destination: committed, but `cont` failed before the guest ran. Its QEMU is quit next, and
    /// ABORTED says that it was.
    Returned {
        /// The attempt.
        attempt: Attempt,
        /// Why, for people.
        reason: String,
    },
    /// Destination: everything that the source held of the guest is durable here.
    AllPresent {
        /// The attempt.
        attempt: Attempt,
    },
    /// A person has decided where the guest runs, against what the agents know.
    Overruled {
        /// The attempt.
        attempt: Attempt,
        /// Where it runs.
        run_on: Side,
        /// The generation that it has there.
        generation: Generation,
        /// What the person said of the other side.
        because: String,
    },
    /// Nothing more is to be done for the attempt here.
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
}

impl Record {
    /// The attempt that a record belongs to.
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
            | Record::Peer { attempt, .. } => *attempt,
        }
    }
}
