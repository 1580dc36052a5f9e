//! The host's side of its realm: drives `longhaul_realm::member` with connections, files and
//! timers.
//!
//! ```text
//! servers ◀── QUIC, or TLS over TCP ──▶ links ──┐
//! other hosts ◀── gossip on channels ──▶ gossip ┼──▶ driver: Member ──▶ events (reach, plane)
//! requests (introduce, relay, lease) ───────────┘      │  └──▶ members in the trust store
//!                                                      └──▶ file, one thread
//! ```
//!
//! One task owns the state machine. Everything else hands it inputs over a queue.

mod driver;
mod file;
mod gossip;
mod link;
mod status;
#[cfg(test)]
mod tests;

pub(crate) use driver::cut;
pub use driver::{Handle, Options, start};
pub use file::{FILE_BYTES_MAX, FileError, MEMBER_FILE, Stored};
pub use gossip::{GOSSIP_CHANNEL, GossipError, suite_of};
pub use link::connect_server;
pub use status::{LinkState, Status};

use bytes::Bytes;
use longhaul_protocol::{Generation, HostId};
use longhaul_realm::member::Failure;
use longhaul_realm::membership::Why;
use longhaul_realm::protocol::{LeaseAnswer, Peer, SessionId};
use longhaul_realm::signed::DocumentError;
use longhaul_realm::token::TokenError;
use std::net::SocketAddr;
use tokio::sync::mpsc;

/// The arbiter's answer to a question for a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acquired {
    /// This host has it, for ever.
    Granted,
    /// This host never gets it.
    Denied {
        /// The generation of the guest's latest lease.
        latest: Generation,
        /// The host that has that one.
        holder: HostId,
    },
}

/// How relayed datagrams reach a server.
#[derive(Debug)]
pub enum Leg {
    /// Over UDP, from the host's main socket, to this address.
    Udp(SocketAddr),
    /// In the connection over TCP: whole relayed datagrams, with their headers.
    Tcp {
        /// To the server. When it is full, the datagram is to be dropped.
        send: mpsc::Sender<Vec<u8>>,
        /// From the server.
        receive: mpsc::Receiver<Bytes>,
    },
}

/// What other parts of the agent do or know.
#[derive(Debug)]
pub enum Event {
    /// Members, networks or permissions have changed: see [`Handle::status`].
    Changed,
    /// A server is connected.
    ServerUp(HostId, Leg),
    /// A server is not connected any more.
    ServerDown(HostId),
    /// Another host's addresses: probe them after `start_ms`.
    Introduced {
        /// The request, if this host asked.
        request: Option<u32>,
        /// The server that introduced it.
        server: HostId,
        /// The other host, a member.
        peer: Peer,
        /// When to begin, in milliseconds.
        start_ms: u16,
    },
    /// Bytes of another host, a member.
    Signal(HostId, Vec<u8>),
    /// A relay session is open.
    RelayOpened {
        /// The request, if this host asked.
        request: Option<u32>,
        /// The relay.
        server: HostId,
        /// The session there.
        session: SessionId,
        /// The other host, a member.
        peer: HostId,
        /// Bytes a second that the server relays for it.
        bytes_per_s: u64,
    },
    /// A relay session is over.
    RelayClosed(HostId, SessionId),
    /// The arbiter's answer.
    Lease(u32, LeaseAnswer),
    /// A request failed.
    Failed(u32, Failure),
    /// A host is no member any more. Its connections are ended.
    Cut(HostId, Why),
}

/// Why a host's side of a realm does not start.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The token.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// A document does not verify.
    #[error(
        "the member file has a document that its realm did not sign: {0}; move the file away and \
         join again"
    )]
    Document(#[from] DocumentError),
    /// The system.
    #[error("{0}")]
    System(#[from] std::io::Error),
    /// The system gives no random numbers.
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}
