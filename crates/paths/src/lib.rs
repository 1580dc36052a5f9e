//! The paths between this host and others: candidates, hole punching, relays.
//!
//! ```text
//! STUN answers, addresses, servers ->  Local  -> STUN questions, TCP to relays, "refresh"
//! messages, probes, acknowledgements -> Paths -> messages, probes, acknowledgements, "use this"
//! ```
//!
//! [`Local`] is what all peers of a host share; there is one [`Paths`] for each peer. Both decide;
//! they do no I/O and have no clock. A peer is reached through a relay from the first moment, and
//! directly as soon as probes were acknowledged. `docs/paths.md` has the states, the timers, and
//! the table of NATs.
//!
//! Probes and acknowledgements are sealed with the keys of the connection between both hosts. The
//! owner passes on only what it has authenticated; the source address of an authentic datagram is
//! no proof of anything, since it can be captured and sent again from elsewhere. So an address is
//! used only when a probe *to* it was acknowledged *from* it.
//!
//! The owner carries out the actions in their order. After each input and each timeout it takes
//! all actions and asks for the next timeout. Times are durations since any fixed moment.

pub mod candidate;
mod local;
pub mod message;
pub mod nat;
mod paths;
mod random;
mod reason;
mod route;
pub mod tuning;

pub use candidate::{Candidate, Origin};
pub use local::{Leg, Local, LocalAction, LocalEvent, ServerConfig, Udp};
pub use message::{Kind, Message, Offer, Plan};
pub use nat::Mapping;
pub use paths::{Action, Config, Event, Paths};
pub use reason::{Obstacle, Reason, State};
pub use route::{Route, SocketId};
pub use tuning::Tuning;
