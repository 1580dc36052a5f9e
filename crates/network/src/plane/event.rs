//! What the frame plane reports: events for an operator, and opened path probes.

use super::socket::Way;
use longhaul_overlay::offload::Offloads;
use longhaul_overlay::switch::Announcement;
use longhaul_overlay::{Mac, NetworkId};
use longhaul_protocol::HostId;
use std::fmt;
use tokio::sync::mpsc;

/// Most events, and most probes, that wait to be taken. Further ones are dropped and counted.
pub(super) const WAITING_MAX: usize = 256;

/// Where the plane's events and probes arrive.
#[derive(Debug)]
pub struct PlaneOutputs {
    /// Events. They are logged too.
    pub events: mpsc::Receiver<PlaneEvent>,
    /// Path probes of peers.
    pub probes: mpsc::Receiver<OpenedProbe>,
}

/// An authentic path probe (kind 7).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenedProbe {
    /// Who sent it.
    pub peer: HostId,
    /// The way on which it came.
    pub way: Way,
    /// What it says.
    pub payload: Vec<u8>,
}

/// What is behind a port of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Guests of this host.
    Here,
    /// Another host.
    Host(HostId),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here => f.write_str("this host"),
            Self::Host(host) => write!(f, "host {host:?}"),
        }
    }
}

/// Something that an operator wants to know. Each is reported once, or once each time it begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlaneEvent {
    /// Nothing was received of a peer for a while.
    Silent(HostId),
    /// Something was received of it again.
    Heard(HostId),
    /// A peer sends from another address.
    Roamed {
        /// The peer.
        peer: HostId,
        /// Its way from now on.
        to: Way,
    },
    /// The path to a peer carries datagrams of this size now.
    Mtu {
        /// The peer.
        peer: HostId,
        /// The UDP payload, in bytes.
        bytes: u16,
        /// Whether a larger size was used before, and no longer passes.
        black_hole: bool,
    },
    /// The keys of a peer's connection are used up: a new control connection is needed.
    Exhausted(HostId),
    /// A peer sends frames of a network that it is no member of here. They are dropped.
    Foreign {
        /// The peer.
        peer: HostId,
        /// The network.
        network: NetworkId,
    },
    /// Datagrams to a peer cannot be sent.
    Unsent {
        /// The peer.
        peer: HostId,
        /// The system's error.
        error: String,
    },
    /// The kernel refused frames with an offload, which is not used any more.
    OffloadOff {
        /// The network.
        network: NetworkId,
        /// What is in use now.
        offloads: Offloads,
    },
    /// The TAP device of a network cannot be read any more: someone has removed it.
    TapLost {
        /// The network.
        network: NetworkId,
        /// The system's error.
        error: String,
    },
    /// An address moves too often, and is held at its place for a while.
    Held {
        /// The network.
        network: NetworkId,
        /// The address.
        mac: Mac,
        /// Its VLAN.
        vlan: u16,
        /// Where it is held.
        place: Place,
    },
    /// More frames to all stations, groups or unknown addresses come from a place than may.
    FloodLimited {
        /// The network.
        network: NetworkId,
        /// The place.
        place: Place,
    },
    /// Someone used an address that is pinned elsewhere, or is not its own.
    Spoofed {
        /// The network.
        network: NetworkId,
        /// Where.
        place: Place,
        /// The address.
        mac: Mac,
    },
    /// No more addresses are learned at a place.
    Full {
        /// The network.
        network: NetworkId,
        /// The place.
        place: Place,
    },
    /// Another host announces an address that is pinned here, with a newer right to its guest.
    Contested {
        /// The network.
        network: NetworkId,
        /// The host.
        host: HostId,
        /// Its announcement.
        announcement: Announcement,
    },
}

impl PlaneEvent {
    pub(super) fn log(&self) {
        use tracing::{debug, info, warn};
        match self {
            Self::Silent(peer) => info!(?peer, "nothing arrives on the frame plane"),
            Self::Heard(peer) => info!(?peer, "something arrives on the frame plane again"),
            Self::Roamed { peer, to } => info!(?peer, %to, "the peer has another address"),
            Self::Mtu {
                peer,
                bytes,
                black_hole: false,
            } => debug!(?peer, bytes, "the path carries longer datagrams"),
            Self::Mtu { peer, bytes, .. } => {
                warn!(?peer, bytes, "the path no longer carries long datagrams");
            }
            Self::Exhausted(peer) => {
                warn!(
                    ?peer,
                    "keys are used up; a new connection to the peer is needed"
                );
            }
            Self::Foreign { peer, network } => {
                warn!(
                    ?peer,
                    ?network,
                    "frames of a network that the peer is no member of"
                );
            }
            Self::Unsent { peer, error } => warn!(?peer, error, "cannot send frames"),
            Self::OffloadOff { network, offloads } => {
                warn!(
                    ?network,
                    ?offloads,
                    "the kernel refuses frames; it is used with less offloads"
                );
            }
            Self::TapLost { network, error } => {
                warn!(
                    ?network,
                    error, "the TAP device is lost; open the network again"
                );
            }
            Self::Held {
                network,
                mac,
                vlan,
                place,
            } => warn!(?network, %mac, vlan, %place, "an address moves too often; it is held"),
            Self::FloodLimited { network, place } => {
                warn!(?network, %place, "too many broadcasts; some are dropped");
            }
            Self::Spoofed {
                network,
                place,
                mac,
            } => warn!(?network, %place, %mac, "frames with the address of another guest"),
            Self::Full { network, place } => {
                warn!(?network, %place, "no more addresses are learned");
            }
            Self::Contested {
                network,
                host,
                announcement,
            } => warn!(
                ?network,
                ?host,
                mac = %announcement.mac,
                generation = announcement.generation,
                "another host claims a guest of this host with a newer right"
            ),
        }
    }
}
