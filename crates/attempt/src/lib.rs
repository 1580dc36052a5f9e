//! The life of an attempt at each of its ends.
//!
//! ```text
//! messages, connections, -> handle(event, now) -> poll_action() -> records, messages,
//! results of actions        handle_timeout(now)   poll_timeout()   dialling, the guest
//! ```
//!
//! [`Source`] and [`Destination`] decide; they do no I/O and have no clock. The handover
//! (`longhaul_engine::handover`) says who may run the guest. Around it these types keep what an
//! attempt needs besides: connections and their epochs, dialling again, time limits, the order of
//! messages, records that could not be written and are tried again. After a restart of an agent the
//! same types go on from the records.
//!
//! The owner carries out the actions in their order and reports the result of each that has one.
//! Times are durations since any fixed moment.

pub mod destination;
mod durable;
pub mod source;

pub use destination::Destination;
pub use source::Source;
