//! The frame plane of a host: its networks, its peers, and what carries frames between them.
//!
//! Each network has a TAP device, a switch, and a thread that sends what the device hands over
//! ([`outbound`]). What peers send arrives at an [`Inbox`], in the task that owns the socket. One
//! thread does what is to be done at a time: keepalives, probes of the MTU, ageing ([`timer`]).
//!
//! Two locks protect a peer, one for each half of its session, so that sending and receiving do not
//! wait for each other. Where both are needed, the receiving half is locked first. The lock of a
//! switch is held for one decision, and no other lock is taken while it is.

mod config;
mod control;
mod event;
mod gateway;
mod gather;
mod inbox;
mod manage;
mod network;
mod outbound;
mod peer;
mod shared;
mod socket;
mod status;
mod timer;

pub use config::{LocalPort, NetworkConfig, PlaneConfig};
pub use event::{OpenedProbe, Place, PlaneEvent, PlaneOutputs};
pub use gateway::GatewayPlan;
pub use inbox::Inbox;
pub use manage::{NETWORKS_MAX, PEERS_MAX, Plane, PlaneError};
pub use socket::{Outlet, SendError, Way};
pub use status::{NetworkStatus, PeerStatus, PlaneCounters, PlaneStatus};
