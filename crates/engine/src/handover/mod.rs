//! The hand-over: the right to run a guest is a token that exactly one journal holds.
//!
//! ```text
//! source                                destination
//!   Here                                  Receiving
//!    | postmigrate, READY received           | loaded, verified
//!    v                                       v
//!   (journal RELEASED)                    (journal READY)  --READY-->
//!   Released ----------COMMIT---------->  (journal COMMITTED) = the commit point
//!    |                                       | cont
//!   (journal DONE)  <----COMMITTED-----   Committed
//! ```
//!
//! Both sides are pure transition functions: an event goes in, the next state and the actions come
//! out, and an action that has to be durable is a [`Record`] whose arrival on disk is the next
//! event. The agents run them as they are, and so does a model checker.

mod destination;
mod record;
mod source;

pub use destination::{DestinationAction, DestinationEvent, DestinationState, step_destination};
pub use record::{Record, Side};
pub use source::{SourceAction, SourceEvent, SourceState, step_source};
