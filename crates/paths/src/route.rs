//! The ways on which datagrams travel to the other host.

use longhaul_protocol::HostId;
use std::fmt;
use std::net::SocketAddr;

/// A UDP socket of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u32);

impl SocketId {
    /// The socket of the agent, which also carries QUIC and STUN. All others are opened for a
    /// search and belong to one peer.
    pub const MAIN: Self = Self(0);
}

/// A way to the other host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// Datagrams go to the other host itself.
    Direct {
        /// The socket of this host.
        socket: SocketId,
        /// The other host's address, as this host sees it. IPv4 addresses are not mapped to IPv6.
        address: SocketAddr,
    },
    /// Datagrams go through a relay. [`Local::leg`](crate::Local::leg) says whether they reach it
    /// over UDP or TCP.
    Relayed {
        /// The relay.
        server: HostId,
    },
}

impl Route {
    /// Returns whether datagrams go to the other host itself.
    pub fn is_direct(&self) -> bool {
        matches!(self, Self::Direct { .. })
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Direct { socket, address } if *socket == SocketId::MAIN => write!(f, "{address}"),
            Self::Direct { socket, address } => write!(f, "{address} from socket {}", socket.0),
            Self::Relayed { server } => write!(f, "relay {server:?}"),
        }
    }
}
