//! Names the network paths to a host, and what each has carried.

use std::net::{IpAddr, SocketAddr};

/// The maximum number of configured paths to one host.
pub const PATHS_MAX: usize = 7;

/// A network path to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathTo {
    /// The host's address.
    pub to: SocketAddr,
    /// The address of this host from which datagrams are sent; `None` leaves that to the system.
    pub from: Option<IpAddr>,
}

/// What a network path has carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathTraffic {
    /// The path.
    pub path: PathTo,
    /// Whether the path carries data now.
    pub is_up: bool,
    /// Bytes sent, with IP and UDP headers and lost packets.
    pub sent_bytes: u64,
    /// Bytes received, with IP and UDP headers.
    pub received_bytes: u64,
}
