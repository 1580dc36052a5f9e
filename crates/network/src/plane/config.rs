//! What can be set of the frame plane.

use crate::tap::VlanFilter;
use longhaul_overlay::offload::Offloads;
use longhaul_overlay::switch::{PortConfig, Vlans};
use longhaul_overlay::{NetworkId, SessionConfig};
use longhaul_protocol::HostId;
use std::time::Duration;

/// All offloads.
pub(crate) const ALL_OFFLOADS: Offloads = Offloads {
    checksum: true,
    tcp4: true,
    tcp6: true,
    ecn: true,
    udp: true,
};

/// What holds for all networks and peers of a host.
#[derive(Debug, Clone)]
pub struct PlaneConfig {
    /// The times and limits of pairs of hosts. Addresses do not follow datagrams by default, since
    /// the ways to peers are chosen by probes.
    pub session: SessionConfig,
    /// The offloads that TAP devices use, if the kernel has them.
    pub offloads: Offloads,
    /// Limits of the ports to this host's guests.
    pub local_port: PortConfig,
    /// Limits of the ports to other hosts.
    pub host_port: PortConfig,
    /// When a guest that runs here is announced again, after the first time.
    pub announce_again: Vec<Duration>,
}

impl Default for PlaneConfig {
    fn default() -> Self {
        Self {
            session: SessionConfig {
                roaming: false,
                ..SessionConfig::default()
            },
            offloads: ALL_OFFLOADS,
            local_port: PortConfig::LOCAL,
            host_port: PortConfig::HOST,
            announce_again: [50, 200, 600, 1500, 3000].map(Duration::from_millis).into(),
        }
    }
}

/// A network that this host is a member of.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// Its id, the same on all hosts.
    pub id: NetworkId,
    /// Its members: other hosts. This host may be one of them.
    pub members: Vec<HostId>,
    /// Largest payload of a frame, in bytes.
    pub mtu: u16,
    /// The VLANs that frames may belong to.
    pub vlans: Vlans,
    /// What its frames leave this host's guests by.
    pub port: LocalPort,
}

/// The device of a network on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalPort {
    /// A TAP device and a bridge, whose names follow from the network's id.
    Bridge(VlanFilter),
    /// A TAP device of this name, without a bridge.
    Tap(String),
}
