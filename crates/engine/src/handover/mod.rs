//! The handover: the protocol by which exactly one journal holds the right to run a guest.
//!
//! ```text
//! source                                  destination
//!   Here                                    Receiving
//!    | postmigrate, READY received             | loaded, verified
//!    v                                         v
//!   (journal RELEASED)                      (journal READY)  --READY-->
//!   Released -----------COMMIT----------->  (journal COMMITTED) = the commit point
//!    |                                         | cont
//!   (journal DONE)  <----COMMITTED-------   Running
//!    |                                         | nothing is needed of the source
//!    |             <----ALL-PRESENT------   (journal ALL-PRESENT)
//!    | QEMU quits
//!   (journal CLOSED) ------DONE---------->  (journal CLOSED)
//! ```
//!
//! With an early release, RELEASED is written and COMMIT sent when the guest stops; the destination
//! commits when all data has arrived.
//!
//! With an arbiter, the release and COMMIT name its store. The destination then writes COMMITTED
//! only with the lease of the next generation, and a source in doubt that gets this lease itself
//! takes the guest back.
//!
//! Both sides are pure transition functions: an event goes in, the next state and the actions come
//! out, and an action that has to be durable is a [`Record`] whose arrival on disk is the next
//! event. `restore` says where a restarted agent continues. The agents run these functions
//! unchanged, and so does the model checker in `model/`; `docs/handover.md` has the proof.

mod destination;
mod record;
mod source;
mod terms;

pub use destination::{DestinationAction, DestinationEvent, DestinationState, step_destination};
pub use record::{Record, Side};
pub use source::{BY_ARBITER, SourceAction, SourceEvent, SourceState, step_source};
pub use terms::{Commit, Terms};
