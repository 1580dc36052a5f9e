//! Shows how peers are reached, and why not better.

use longhaul_paths::{Leg, Local, Mapping, Paths, State, Udp};
use longhaul_protocol::HostId;
use longhaul_transport::Way;
use std::time::Duration;

/// How this host reaches others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// How the NATs before this host map IPv4.
    pub mapping: Mapping,
    /// Whether UDP gets through to any server.
    pub udp: Udp,
    /// The peers, by their ids.
    pub peers: Vec<PeerStatus>,
    /// Signals of other hosts that were malformed.
    pub refused_signals: u64,
    /// Probes of other hosts that were authentic and malformed.
    pub refused_probes: u64,
}

/// How one peer is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStatus {
    /// The peer.
    pub peer: HostId,
    /// The way that is used.
    pub way: Option<Way>,
    /// How the relay is reached, if one is used.
    pub leg: Option<Leg>,
    /// The round trip on the way that is used.
    pub round_trip: Option<Duration>,
    /// What prevents a better way, with the numbers of the moment.
    pub state: State,
}

impl PeerStatus {
    /// Returns how the peer is reached, as a sentence without a full stop.
    pub fn text(&self) -> String {
        let state = self.state.clone();
        longhaul_paths::Reason { state }.to_string()
    }
}

pub(super) fn peer(peer: HostId, paths: &Paths, local: &Local) -> PeerStatus {
    let way = paths.used();
    PeerStatus {
        peer,
        way,
        leg: match way {
            Some(Way::Relayed { server }) => local.leg(server),
            _ => None,
        },
        round_trip: way.and_then(|way| paths.round_trip(way)),
        state: paths.why(local).state,
    }
}
