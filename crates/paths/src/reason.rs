//! Why a peer is reached as it is, in plain sentences.

use crate::local::{Local, Udp};
use crate::paths::Paths;
use crate::route::Route;
use std::fmt;
use std::net::SocketAddr;

/// What prevents a direct path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Obstacle {
    /// Nothing was tried yet.
    NotTried,
    /// A round is under way.
    Trying,
    /// A search is under way.
    Searching,
    /// The other host does not answer calls.
    NoAnswer,
    /// A direct path died, and no other was found yet.
    Died,
    /// Probes of one side or both were not acknowledged.
    NotPunched,
    /// No sockets can be opened for a search.
    NoSockets,
    /// No server answers this host over UDP.
    UdpBlockedHere,
    /// No server answers the other host over UDP.
    UdpBlockedThere,
    /// One has only IPv4, the other one only IPv6.
    NoCommonFamily,
    /// Both hosts are behind one NAT, and not in one local network.
    NoHairpin,
    /// Both NATs are symmetric.
    BothDependent,
}

impl Obstacle {
    /// Returns whether only new facts can remove it.
    pub fn is_lasting(self) -> bool {
        use Obstacle as Is;
        matches!(
            self,
            Is::UdpBlockedHere
                | Is::UdpBlockedThere
                | Is::NoCommonFamily
                | Is::NoHairpin
                | Is::BothDependent
        )
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotTried => "a direct path was not tried yet",
            Self::Trying => "a direct path is being tried",
            Self::Searching => "a port of the symmetric NAT is being searched",
            Self::NoAnswer => "the other host does not answer calls for a direct path",
            Self::Died => "the direct path died",
            Self::NotPunched => "no probe got through the NATs or firewalls",
            Self::NoSockets => "no sockets can be opened to search a port",
            Self::UdpBlockedHere => "UDP is blocked here",
            Self::UdpBlockedThere => "UDP is blocked at the other host",
            Self::NoCommonFamily => "one host has only IPv4, the other one only IPv6",
            Self::NoHairpin => "both are behind one NAT, which does not let them reach each other",
            Self::BothDependent => "both NATs map each destination to another port",
        })
    }
}

/// How a peer is reached now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Directly.
    Direct {
        /// The other host's address, as this host sees it.
        address: SocketAddr,
    },
    /// Through a relay.
    Relayed {
        /// The relay's name.
        server: String,
        /// Datagrams reach it over TCP.
        tcp: bool,
        /// What prevents a direct path.
        obstacle: Obstacle,
    },
    /// Not at all: no server answers.
    NoServer,
    /// Not at all: no server that answers knows the other host.
    PeerUnknown,
    /// Not at all: all relays are overloaded.
    Overloaded,
}

/// How a peer is reached, as a sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// How it is reached.
    pub state: State,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            State::Direct { address } => write!(f, "direct to {address}"),
            State::Relayed {
                server,
                tcp,
                obstacle,
            } => {
                let over = if *tcp { " over TCP" } else { "" };
                write!(f, "relayed by {server}{over}: {obstacle}")
            }
            State::NoServer => f.write_str("waits: no rendezvous server answers"),
            State::PeerUnknown => {
                f.write_str("waits: the host is not registered at a rendezvous that answers")
            }
            State::Overloaded => f.write_str("waits: the relay is overloaded"),
        }
    }
}

impl Paths {
    /// Returns how the peer is reached, and why not better.
    pub fn why(&self, local: &Local) -> Reason {
        let state = match self.used() {
            Some(Route::Direct { address, .. }) => State::Direct { address },
            Some(Route::Relayed { server }) => State::Relayed {
                server: local.name(server).to_owned(),
                tcp: local.leg(server) == Some(crate::Leg::Tcp),
                obstacle: match self.obstacle(local) {
                    Obstacle::NotTried if local.udp() == Udp::Blocked => Obstacle::UdpBlockedHere,
                    obstacle => obstacle,
                },
            },
            None if !local.is_attached() => State::NoServer,
            None if self.is_present(local) => State::Overloaded,
            None => State::PeerUnknown,
        };
        Reason { state }
    }
}
