//! Implements connections with rendezvous servers: over QUIC, or over TLS and TCP where UDP is
//! blocked.
//!
//! ```text
//! host                                              server
//! endpoint.connect_rendezvous(..)         ------>   server.accept() -> RendezvousLink
//!   -> RendezvousLink { handle, sender, receiver }
//! endpoint.connect_rendezvous_tcp(..)     ------>   the same, with relayed datagrams in between
//! ```
//!
//! Both sides prove their keys. Relayed datagrams (`docs/rendezvous.md`, 4.4) do not pass through
//! QUIC: the server judges and forwards them where it receives them.

mod connect;
mod link;
mod server;
mod socket;
mod tcp;
#[cfg(test)]
mod tests;

pub use link::{Received, RendezvousHandle, RendezvousLink, RendezvousReceiver, RendezvousSender};
pub use server::{RendezvousConfig, RendezvousServer};
pub use socket::{Relay, RelaySender};
pub use tcp::{TcpFrames, TcpFramesError, frame_header};

use crate::Hello;
use longhaul_realm::limits::{MESSAGE_BYTES_MAX, RELAY_DATAGRAM_BYTES_MAX};
use longhaul_realm::wire::{VERSION, VERSION_OLDEST};

/// The protocol on a rendezvous connection: what the Hello negotiates, and its limits.
#[derive(Debug, Clone)]
pub struct RendezvousProtocol {
    /// What this side speaks.
    pub hello: Hello,
    /// The largest message, in bytes.
    pub message_bytes_max: usize,
    /// The largest relayed datagram, in bytes.
    pub datagram_bytes_max: usize,
}

impl RendezvousProtocol {
    /// The protocol as this version speaks it. `software` is the program's name and version.
    pub fn new(software: String) -> Self {
        Self {
            hello: Hello {
                version_min: VERSION_OLDEST,
                version_max: VERSION,
                software,
                incarnation: None,
            },
            message_bytes_max: MESSAGE_BYTES_MAX,
            datagram_bytes_max: RELAY_DATAGRAM_BYTES_MAX,
        }
    }
}
