//! What the frame plane says of itself.

use super::manage::Plane;
use super::shared::lock;
use super::socket::Way;
use crate::tap::TapCounters;
use longhaul_overlay::NetworkId;
use longhaul_overlay::fragment::ReassemblyCounters;
use longhaul_overlay::offload::Offloads;
use longhaul_overlay::session::SessionCounters;
use longhaul_overlay::switch::{Counters, FlowCounts};
use longhaul_protocol::HostId;

/// All networks and peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlaneStatus {
    /// In the order of their ids.
    pub networks: Vec<NetworkStatus>,
    /// In the order of their ids.
    pub peers: Vec<PeerStatus>,
    /// What concerns all of them.
    pub counters: PlaneCounters,
}

/// A network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkStatus {
    /// Its id.
    pub id: NetworkId,
    /// Its bridge, if it has one.
    pub bridge: Option<String>,
    /// Its TAP device.
    pub tap: String,
    /// Largest payload of a frame, in bytes.
    pub mtu: u16,
    /// Other hosts.
    pub members: Vec<HostId>,
    /// Offloads that the TAP device uses.
    pub offloads: Offloads,
    /// Learned MAC addresses.
    pub macs: usize,
    /// Known IP addresses of stations.
    pub addresses: usize,
    /// What the TAP device counted.
    pub device: TapCounters,
    /// What the switch counted.
    pub switch: Counters,
    /// The flows through gateways.
    pub flows: FlowCounts,
    /// The device of the gateway, if this host has it, and what it counted.
    pub gateway: Option<(String, TapCounters)>,
}

/// A peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStatus {
    /// Its id.
    pub host: HostId,
    /// Whether there are keys.
    pub connected: bool,
    /// Where its datagrams go.
    pub way: Option<Way>,
    /// The largest datagram that passes, as a UDP payload in bytes.
    pub mtu_bytes: usize,
    /// Whether nothing was received of it for a while.
    pub silent: bool,
    /// What its session counted.
    pub session: SessionCounters,
    /// What became of fragments.
    pub fragments: ReassemblyCounters,
}

/// What the plane counted of all networks and peers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PlaneCounters {
    /// Datagrams that were received under unknown keys.
    pub unknown_keys: u64,
    /// Datagrams of networks that their sender is no member of here. They were dropped.
    pub foreign: u64,
    /// Frames that were dropped since there is no connection with a member, or no way to it.
    pub not_connected: u64,
    /// Batches that were dropped since the socket had no room.
    pub full: u64,
    /// Batches that were dropped for another reason.
    pub unsent: u64,
    /// Frames that were dropped since they can neither be cut nor split.
    pub uncuttable: u64,
    /// Batches that were sent.
    pub batches: u64,
    /// Frames and segments that were received.
    pub segments: u64,
    /// Frames and super-frames that they became.
    pub merged: u64,
    /// Events and probes that nobody took in time.
    pub reports_lost: u64,
}

impl Plane {
    /// Returns the state of all networks and peers.
    pub fn status(&self) -> PlaneStatus {
        let tables = self.shared.tables();
        let mut networks: Vec<NetworkStatus> = tables
            .networks
            .values()
            .map(|view| {
                let network = &view.network;
                let (switch, (macs, addresses), flows) = {
                    let switch = lock(&network.switch);
                    (
                        switch.counters().clone(),
                        switch.sizes(),
                        switch.flow_counts(),
                    )
                };
                let gateway = view.gateway.as_ref();
                NetworkStatus {
                    id: network.id,
                    bridge: network.bridge.clone(),
                    tap: network.tap.name().to_owned(),
                    mtu: network.mtu,
                    members: view.members.iter().map(|(_, host, _)| *host).collect(),
                    offloads: network.tap.offloads(),
                    macs,
                    addresses,
                    device: network.tap.counters(),
                    switch,
                    flows,
                    gateway: gateway
                        .map(|gateway| (gateway.tap.name().to_owned(), gateway.tap.counters())),
                }
            })
            .collect();
        networks.sort_by_key(|network| network.id);
        let mut peers: Vec<PeerStatus> = tables.peers.values().map(|peer| peer.status()).collect();
        peers.sort_by_key(|peer| peer.host);
        PlaneStatus {
            networks,
            peers,
            counters: self.shared.counters(),
        }
    }
}
