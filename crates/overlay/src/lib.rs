//! The core of a *network*, an Ethernet segment that spans hosts: its switch and its frame plane.
//!
//! [`switch`] decides where a frame of one network goes: to ports of this host and to other hosts.
//! [`offload`] cuts super-frames for a path and merges them again.
//! [`fragment`] splits frames that cannot be cut, [`control`] has the messages between hosts.
//! [`seal`] seals and opens the datagrams between two hosts; [`session`] is such a pair of hosts.
//! `docs/frame-plane.md` is the normative description.
//!
//! Nothing here does I/O or reads a clock. Times are durations since any fixed instant, the same
//! for all calls; they never decrease.

pub mod address;
mod bucket;
mod checksum;
pub mod control;
pub mod ethernet;
pub mod fragment;
mod hash;
pub mod neighbour;
pub mod offload;
mod packet;
pub mod seal;
pub mod session;
pub mod switch;

pub use address::{Address, Mac, NetworkId};
pub use bucket::Rate;
pub use session::{Session, SessionConfig};
pub use switch::{Switch, SwitchConfig};
