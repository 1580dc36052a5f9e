//! Opens and closes networks, and takes what is known of peers.

use super::config::{LocalPort, NetworkConfig, PlaneConfig};
use super::event::{PlaneOutputs, WAITING_MAX};
use super::gateway::OpenGateway;
use super::inbox::Inbox;
use super::network::Network;
use super::outbound::Outbound;
use super::peer::{Peer, Scratch};
use super::shared::{Shared, Tables, View, lock};
use super::socket::{Outlet, Way};
use super::timer;
use crate::tap::{self, Bridge, BridgeConfig, Tap, TapError};
use longhaul_overlay::seal::{EXPORTED_BYTES, OVERHEAD_BYTES, SealError, Side, Suite};
use longhaul_overlay::session::{Keys, SessionError};
use longhaul_overlay::switch::{Redirect, Switch, SwitchError};
use longhaul_overlay::{Mac, NetworkId, SwitchConfig};
use longhaul_protocol::HostId;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// Most networks of a host.
pub const NETWORKS_MAX: usize = 256;
/// Most peers of a host.
pub const PEERS_MAX: usize = 4096;
/// Smallest MTU of a network: that of IPv6.
const MTU_MIN: u16 = 1280;
/// Longest payload of a probe, in bytes.
const PROBE_BYTES_MAX: usize = 1200 - OVERHEAD_BYTES;

/// Why something is not done.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// The network is not open.
    #[error("network {0:?} is not open on this host; open it first")]
    UnknownNetwork(NetworkId),
    /// It is open already.
    #[error("network {0:?} is open already")]
    OpenAlready(NetworkId),
    /// There are [`NETWORKS_MAX`].
    #[error("{NETWORKS_MAX} networks are open on this host; close some of them first")]
    TooManyNetworks,
    /// The id is that of no network.
    #[error("0 is no id of a network")]
    NoId,
    /// The MTU is too small.
    #[error("an MTU of {0} bytes is too small; use {MTU_MIN} or more")]
    SmallMtu(u16),
    /// The peer is not known.
    #[error("there is no connection with host {0:?} yet")]
    UnknownPeer(HostId),
    /// There are [`PEERS_MAX`].
    #[error("{PEERS_MAX} hosts are peers of this host; remove some of them first")]
    TooManyPeers,
    /// A host is no peer of itself.
    #[error("this host is no peer of itself")]
    OwnHost,
    /// The keys have the id of others in use: the peer must dial again.
    #[error("the keys of the connection collide with others; dial the peer again")]
    KeyCollision,
    /// The probe is too long.
    #[error("a probe of {0} bytes is too long; use at most {PROBE_BYTES_MAX}")]
    LongProbe(usize),
    /// See there.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// See there.
    #[error(transparent)]
    Seal(#[from] SealError),
    /// See there.
    #[error(transparent)]
    Switch(#[from] SwitchError),
    /// See there.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// A device cannot be set up.
    #[error("cannot set up the devices of network {network:?}: {error}")]
    Device {
        /// The network.
        network: NetworkId,
        /// The reason.
        error: io::Error,
    },
    /// The system refuses a thread or a random number.
    #[error("cannot start the frame plane: {0}")]
    System(io::Error),
}

/// An open network, and what ends it.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) network: Arc<Network>,
    bridge: Option<Bridge>,
    members: BTreeSet<HostId>,
    pub(super) gateway: Option<OpenGateway>,
    /// The thread ends when this is dropped.
    stop: UnixStream,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    peers: BTreeMap<HostId, Arc<Peer>>,
    pub(super) networks: BTreeMap<NetworkId, Open>,
}

/// The frame plane of this host. Networks are closed when it is dropped.
///
/// Devices are made in the network namespace of the calling thread. Opening and closing a network
/// blocks for some milliseconds; nothing else blocks.
#[derive(Debug)]
pub struct Plane {
    pub(super) shared: Arc<Shared>,
    pub(super) state: Mutex<State>,
    timer: Option<JoinHandle<()>>,
}

impl Plane {
    /// Starts the frame plane. Returns it, what takes the datagrams of the socket, and where its
    /// reports arrive.
    pub fn new(
        config: PlaneConfig,
        outlet: impl Outlet,
        host: HostId,
    ) -> Result<(Self, Inbox, PlaneOutputs), PlaneError> {
        let (events_sender, events) = mpsc::channel(WAITING_MAX);
        let (probes_sender, probes) = mpsc::channel(WAITING_MAX);
        let outlet = Box::new(outlet);
        let shared = Shared::new(config, host, outlet, events_sender, probes_sender);
        let shared = Arc::new(shared);
        let inbox = Inbox::new(shared.clone());
        let timer = std::thread::Builder::new()
            .name("plane-timer".to_owned())
            .spawn({
                let shared = shared.clone();
                move || timer::run(&shared)
            })
            .map_err(PlaneError::System)?;
        let plane = Self {
            shared,
            state: Mutex::default(),
            timer: Some(timer),
        };
        Ok((plane, inbox, PlaneOutputs { events, probes }))
    }

    /// Takes the keys of a new control connection with a peer: what both ends exported with the
    /// label [`longhaul_overlay::seal::EXPORTER_LABEL`].
    pub fn connected(
        &self,
        peer: HostId,
        exported: &[u8; EXPORTED_BYTES],
        side: Side,
        suite: Suite,
    ) -> Result<(), PlaneError> {
        let shared = &self.shared;
        let limits = shared.config.session.keys;
        let keys = Keys::derive(shared.now(), exported, side, suite, limits)?;
        let mut state = lock(&self.state);
        let id = keys.id();
        let in_use = |peer: &Arc<Peer>| peer.incoming().session.key_ids().any(|other| other == id);
        if state.peers.values().any(in_use) {
            return Err(PlaneError::KeyCollision);
        }
        let peer = self.peer(&mut state, peer)?;
        peer.connected(shared, keys);
        self.publish(&state);
        Ok(())
    }

    /// Returns a peer, a new one if it is not known yet.
    fn peer(&self, state: &mut State, host: HostId) -> Result<Arc<Peer>, PlaneError> {
        if host == self.shared.host {
            return Err(PlaneError::OwnHost);
        }
        if let Some(peer) = state.peers.get(&host) {
            return Ok(peer.clone());
        }
        if state.peers.len() >= PEERS_MAX {
            return Err(PlaneError::TooManyPeers);
        }
        let peer = Arc::new(Peer::new(&self.shared, host));
        state.peers.insert(host, peer.clone());
        Ok(peer)
    }

    /// Sets the way to a peer; none if nothing reaches it.
    pub fn set_way(&self, peer: HostId, way: Option<Way>) -> Result<(), PlaneError> {
        let mut state = lock(&self.state);
        let known = state.peers.len();
        let peer = self.peer(&mut state, peer)?;
        peer.set_way(&self.shared, way);
        if state.peers.len() != known {
            self.publish(&state);
        }
        Ok(())
    }

    /// Returns a number that grows while frames are sent to a peer.
    pub fn batches(&self, peer: HostId) -> u64 {
        let tables = self.shared.tables();
        tables.peers.get(&peer).map_or(0, |peer| peer.batches())
    }

    /// Forgets a peer and its keys. Returns whether it was known.
    pub fn remove_peer(&self, peer: HostId) -> bool {
        let mut state = lock(&self.state);
        let removed = state.peers.remove(&peer).is_some();
        if removed {
            self.publish(&state);
        }
        removed
    }

    /// Seals a path probe (kind 7), and sends it to a peer on a way.
    pub fn seal_probe(&self, peer: HostId, way: Way, payload: &[u8]) -> Result<(), PlaneError> {
        if payload.len() > PROBE_BYTES_MAX {
            return Err(PlaneError::LongProbe(payload.len()));
        }
        let tables = self.shared.tables();
        let peer = tables.peers.get(&peer);
        let peer = peer.ok_or(SessionError::NotConnected)?;
        Ok(peer.send_probe(&self.shared, way, payload)?)
    }

    /// Opens a network on this host.
    pub fn open_network(&self, config: &NetworkConfig) -> Result<(), PlaneError> {
        let mut state = lock(&self.state);
        if config.id == NetworkId::NONE {
            return Err(PlaneError::NoId);
        }
        if config.mtu < MTU_MIN {
            return Err(PlaneError::SmallMtu(config.mtu));
        }
        if state.networks.contains_key(&config.id) {
            return Err(PlaneError::OpenAlready(config.id));
        }
        if state.networks.len() >= NETWORKS_MAX {
            return Err(PlaneError::TooManyNetworks);
        }
        let mut secret = [[0; 8]; 2];
        for half in &mut secret {
            getrandom::fill(half)
                .map_err(|error| PlaneError::System(io::Error::other(error.to_string())))?;
        }
        let secret = secret.map(u64::from_le_bytes);
        let mut switch = Switch::new(SwitchConfig::new(secret));
        switch.set_vlans(config.vlans.clone());
        let local = switch.add_local(self.shared.config.local_port)?;
        let members = self.add_members(&mut switch, &config.members)?;
        let (tap, bridge) = self.open_devices(config)?;
        let network = Arc::new(Network {
            id: config.id,
            mtu: config.mtu,
            bridge: bridge.as_ref().map(|bridge| bridge.name().to_owned()),
            tap,
            local,
            switch: Mutex::new(switch),
        });
        let (stop, stopped) = UnixStream::pair().map_err(PlaneError::System)?;
        let outbound = Outbound::new(self.shared.clone(), network.clone(), None);
        let thread = std::thread::Builder::new()
            .name("plane-tap".to_owned())
            .spawn(move || outbound.run(&stopped))
            .map_err(PlaneError::System)?;
        let open = Open {
            network,
            bridge,
            members,
            gateway: None,
            stop,
            thread,
        };
        state.networks.insert(config.id, open);
        self.publish(&state);
        Ok(())
    }

    /// Adds the ports of all members but this host.
    fn add_members(
        &self,
        switch: &mut Switch,
        members: &[HostId],
    ) -> Result<BTreeSet<HostId>, PlaneError> {
        let others = members.iter().filter(|host| **host != self.shared.host);
        let others: BTreeSet<HostId> = others.copied().collect();
        for host in &others {
            switch.add_host(*host, self.shared.config.host_port)?;
        }
        Ok(others)
    }

    fn open_devices(&self, config: &NetworkConfig) -> Result<(Tap, Option<Bridge>), PlaneError> {
        let network = config.id;
        let device = |error| PlaneError::Device { network, error };
        let offloads = self.shared.config.offloads;
        let filter = match &config.port {
            LocalPort::Tap(name) => {
                let tap = Tap::open(name, offloads)?;
                tap::set_up_alone(name, config.mtu).map_err(device)?;
                return Ok((tap, None));
            }
            LocalPort::Bridge(filter) => filter.clone(),
        };
        let bridge_config = BridgeConfig {
            network,
            mtu: config.mtu,
            vlans: filter,
        };
        let tap = Tap::open(&tap::names(network).1, offloads)?;
        let bridge = Bridge::open(&bridge_config).and_then(|bridge| {
            let attached = bridge.attach(&bridge_config);
            if attached.is_err() {
                tap::remove(tap.name())?;
                bridge.remove()?;
            }
            attached.map(|()| bridge)
        });
        match bridge {
            Ok(bridge) => Ok((tap, Some(bridge))),
            Err(error) => {
                // Programs that are just being started may hold the device for a moment.
                tap::remove(tap.name()).map_err(device)?;
                Err(device(error))
            }
        }
    }

    /// Replaces the members of a network. Frames of hosts that are none any more are dropped from
    /// then on.
    pub fn set_members(&self, network: NetworkId, members: &[HostId]) -> Result<(), PlaneError> {
        let mut state = lock(&self.state);
        let open = state.networks.get_mut(&network);
        let open = open.ok_or(PlaneError::UnknownNetwork(network))?;
        let others = members.iter().filter(|host| **host != self.shared.host);
        let others: BTreeSet<HostId> = others.copied().collect();
        let mut result = Ok(());
        {
            let mut switch = lock(&open.network.switch);
            let now = self.shared.now();
            for gone in open.members.difference(&others) {
                let port = switch.host_port(*gone);
                port.map(|port| switch.remove(now, port));
            }
            let mut kept: BTreeSet<HostId> = open.members.intersection(&others).copied().collect();
            for new in others.difference(&open.members) {
                match switch.add_host(*new, self.shared.config.host_port) {
                    Ok(_) => _ = kept.insert(*new),
                    Err(error) => result = Err(error.into()),
                }
            }
            open.members = kept;
        }
        self.publish(&state);
        result
    }

    /// Closes a network: removes its TAP device, and its bridge unless guests are ports of it.
    /// Returns whether the bridge is gone too.
    pub fn close_network(&self, network: NetworkId) -> Result<bool, PlaneError> {
        let mut state = lock(&self.state);
        let open = state.networks.remove(&network);
        let open = open.ok_or(PlaneError::UnknownNetwork(network))?;
        self.publish(&state);
        drop(state);
        let Open {
            network: closed,
            bridge,
            gateway,
            stop,
            thread,
            ..
        } = open;
        if let Some(gateway) = gateway {
            gateway.close(network)?;
        }
        drop(stop);
        if thread.join().is_err() {
            tracing::error!(?network, "the thread of the TAP device panicked");
        }
        // The device may exist until the task of the socket has seen the new tables.
        let device = |error| PlaneError::Device { network, error };
        tap::remove(closed.tap.name()).map_err(device)?;
        bridge.map_or(Ok(true), |bridge| bridge.remove().map_err(device))
    }

    /// Returns the networks that are open.
    pub fn networks(&self) -> Vec<NetworkId> {
        lock(&self.state).networks.keys().copied().collect()
    }

    pub(super) fn view(&self, network: NetworkId) -> Result<Arc<View>, PlaneError> {
        let tables = self.shared.tables();
        let view = tables.networks.get(&network).cloned();
        view.ok_or(PlaneError::UnknownNetwork(network))
    }

    /// Pins a guest's MAC address to this host, since it runs here. `generation` is that of the
    /// right to run it. The bridge learns where it is from the guest itself: QEMU announces it.
    pub fn pin(&self, network: NetworkId, mac: Mac, generation: u64) -> Result<(), PlaneError> {
        let view = self.view(network)?;
        let now = self.shared.now();
        lock(&view.network.switch).pin(now, view.network.local, mac, generation)?;
        Ok(())
    }

    /// Announces a guest that is pinned here to other hosts and to stations, now and a few times
    /// later. Returns `false` if it is not pinned.
    pub fn announce(&self, network: NetworkId, mac: Mac) -> Result<bool, PlaneError> {
        let view = self.view(network)?;
        if !lock(&view.network.switch).announce(mac) {
            return Ok(false);
        }
        let now = self.shared.now();
        let times = self.shared.config.announce_again.iter();
        let times = times.map(|later| now + *later);
        self.shared.alarm.repeat(network, mac, times);
        view.run_outputs(&self.shared, &mut Scratch::new());
        Ok(true)
    }

    /// Removes the pin of a guest that moved to another host. What other hosts still send here for
    /// it is dropped, and they are told.
    pub fn withdraw(&self, network: NetworkId, redirect: Redirect) -> Result<(), PlaneError> {
        let view = self.view(network)?;
        let none = std::iter::empty();
        self.shared.alarm.repeat(network, redirect.mac, none);
        lock(&view.network.switch).withdraw(self.shared.now(), redirect);
        Ok(())
    }

    /// Removes the pin of a guest that stopped here and did not move. Returns whether it was
    /// pinned.
    pub fn unpin(&self, network: NetworkId, mac: Mac) -> Result<bool, PlaneError> {
        let view = self.view(network)?;
        let none = std::iter::empty();
        self.shared.alarm.repeat(network, mac, none);
        Ok(lock(&view.network.switch).unpin(mac))
    }

    /// Replaces the tables of all threads.
    pub(super) fn publish(&self, state: &State) {
        let peers: HashMap<HostId, Arc<Peer>> = state
            .peers
            .iter()
            .map(|(host, peer)| (*host, peer.clone()))
            .collect();
        let mut keys = HashMap::new();
        for peer in state.peers.values() {
            let incoming = peer.incoming();
            keys.extend(incoming.session.key_ids().map(|id| (id, peer.clone())));
        }
        let networks = state.networks.iter().map(|(id, open)| {
            let switch = lock(&open.network.switch);
            let member = |host: &HostId| {
                let port = switch.host_port(*host)?;
                Some((port, *host, peers.get(host).cloned()))
            };
            let view = View {
                network: open.network.clone(),
                gateway: open.gateway.as_ref().map(|gateway| gateway.device.clone()),
                members: open.members.iter().filter_map(member).collect(),
            };
            (*id, Arc::new(view))
        });
        self.shared.set_tables(Tables {
            networks: networks.collect(),
            keys,
            peers,
        });
        self.shared.alarm.at_latest(self.shared.now());
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        for network in self.networks() {
            if let Err(error) = self.close_network(network) {
                tracing::warn!(?network, %error, "cannot close a network");
            }
        }
        self.shared.alarm.stop();
        if let Some(timer) = self.timer.take()
            && timer.join().is_err()
        {
            tracing::error!("the timer of the frame plane panicked");
        }
    }
}
