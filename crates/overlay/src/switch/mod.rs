//! A switch: decides where each frame of one network goes. There is one instance for each network
//! of a host, so a frame cannot leave its network here.
//!
//! Hosts form a full mesh: a host that replicates a frame sends it to every other host itself. A
//! frame from another host goes to ports of this host only (split horizon), so there are no loops.

mod addresses;
mod announce;
mod counters;
mod flows;
mod gateway;
mod learn;
mod neighbours;
mod port;
mod table;
mod vlans;

pub use addresses::KnownAddress;
pub use announce::{Announcement, Redirect};
pub use counters::{Counters, Reason};
pub use flows::Carried;
pub use gateway::{FlowCounts, GatewayConfig};
pub use port::{Behind, Destinations, PortConfig, PortId};
pub use vlans::{VLAN_MAX, Vlans};

use crate::address::Mac;
use crate::ethernet::{BadFrame, Ethernet, TYPE_ARP, TYPE_IPV6};
use crate::hash::Keyed;
use crate::neighbour::MadeFrame;
use addresses::Addresses;
use announce::Moved;
use flows::Flows;
use gateway::Gateway;
use longhaul_protocol::HostId;
use port::{Port, Ports};
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use table::{Key, Table};

/// Most ports of a switch.
pub const PORTS_MAX: usize = 4096;
/// Most MAC addresses that are pinned, and most that are remembered as moved away.
pub const PINNED_MAX: usize = 4096;
/// Most outputs that wait to be taken. Further ones are dropped.
pub const OUTPUTS_MAX: usize = 4096;

/// The limits and times of a switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwitchConfig {
    /// How long an address is remembered after its last frame.
    pub age: Duration,
    /// Most MAC addresses that are learned, in all VLANs together.
    pub macs_max: usize,
    /// Moves of an address within `moves_window` after which it is held at its place.
    pub moves_max: u32,
    /// The time in which moves are counted.
    pub moves_window: Duration,
    /// How long an address that moved too often is held.
    pub hold: Duration,
    /// How long frames from other ports do not move an address after an announcement, and frames
    /// of a guest that left do not bring its address back: frames of the old place may arrive
    /// later.
    pub settle: Duration,
    /// Most IP addresses of stations that are remembered.
    pub addresses_max: usize,
    /// Most of them of one station.
    pub addresses_per_mac_max: u32,
    /// How long an IP address is remembered, and answered for, after its owner's last packet.
    pub address_age: Duration,
    /// Most flows through gateways that are remembered.
    pub flows_max: usize,
    /// Most of them of one guest.
    pub flows_per_guest_max: usize,
    /// A secret, random for each switch: stations cannot choose addresses that collide in tables.
    pub hash_secret: [u64; 2],
}

impl SwitchConfig {
    /// Returns the default limits with a secret.
    pub fn new(hash_secret: [u64; 2]) -> Self {
        Self {
            age: Duration::from_secs(300),
            macs_max: 16_384,
            moves_max: 5,
            moves_window: Duration::from_secs(10),
            hold: Duration::from_secs(30),
            settle: Duration::from_secs(3),
            addresses_max: 16_384,
            addresses_per_mac_max: 32,
            address_age: Duration::from_secs(120),
            flows_max: 65_536,
            flows_per_guest_max: 4096,
            hash_secret,
        }
    }
}

/// Something that the switch wants done, other than forwarding the frame at hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// A frame of the switch's own goes to one port.
    Answer {
        /// The port.
        port: PortId,
        /// The frame.
        frame: MadeFrame,
    },
    /// A frame of the switch's own goes to every port, except the one behind which its source is.
    Flood {
        /// The port that does not get it.
        except: PortId,
        /// The frame.
        frame: MadeFrame,
    },
    /// Every other host of the network is told where a guest is now.
    Announce(Announcement),
    /// A host that still sends to the old place is told where a guest is now.
    Redirect {
        /// The host.
        to: HostId,
        /// What it is told.
        redirect: Redirect,
    },
    /// Something to be logged. Each is reported once for its port, or once each time it begins.
    Report(Report),
}

/// Something that an operator wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// An address moves between ports too often, and is held at its place for a while.
    Held {
        /// The address.
        mac: Mac,
        /// Its VLAN.
        vlan: u16,
        /// Where it is held.
        port: PortId,
    },
    /// A port sends more frames to all stations, groups or unknown addresses than it may.
    FloodLimited(PortId),
    /// A port used an address that is pinned elsewhere, or that is not its own.
    Spoofed {
        /// The port.
        port: PortId,
        /// The address.
        mac: Mac,
    },
    /// No more addresses are learned at a port, or at all.
    Full(PortId),
    /// Another host announces an address that is pinned here, with a newer right to its guest.
    Contested {
        /// The host.
        host: HostId,
        /// Its announcement.
        announcement: Announcement,
    },
}

/// Why a port cannot be added, or an address pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// There are [`PORTS_MAX`] ports.
    #[error("the network has {PORTS_MAX} ports here; remove some of them first")]
    TooManyPorts,
    /// The host has a port already.
    #[error("the host is in the network already")]
    KnownHost,
    /// There is no such port.
    #[error("the port is gone; add it again")]
    UnknownPort,
    /// The address is pinned to another port.
    #[error("the MAC address belongs to another port of this host; withdraw it there first")]
    PinnedElsewhere,
    /// [`PINNED_MAX`] addresses are pinned.
    #[error("{PINNED_MAX} MAC addresses are pinned here; withdraw some of them first")]
    TooManyPinned,
    /// The port leads to another host, or the address is none of a single station.
    #[error("only a station's MAC address can be pinned, to a port of this host")]
    NotPinnable,
}

#[derive(Debug, Clone, Copy)]
struct Pinned {
    port: PortId,
    generation: u64,
    /// Until then frames of the guest may come from the host that it left.
    settled: Duration,
}

/// The switch of one network on one host.
#[derive(Debug)]
pub struct Switch {
    config: SwitchConfig,
    ports: Ports,
    table: Table,
    /// The guests of this host, in every VLAN.
    pinned: HashMap<u64, Pinned, Keyed>,
    /// Guests that left this host, in every VLAN.
    moved: HashMap<u64, Moved, Keyed>,
    addresses: Addresses,
    vlans: Vlans,
    gateway: Option<Gateway>,
    /// Flows of this host's guests through gateways.
    flows: Flows,
    outputs: VecDeque<Output>,
    counters: Counters,
}

/// Where a frame goes.
#[derive(Debug, Clone, Copy)]
enum Forward {
    One(PortId),
    All,
    Local,
    /// To the gateways of all hosts.
    Gateways,
}

impl Switch {
    /// Returns a switch without ports.
    pub fn new(config: SwitchConfig) -> Self {
        let keyed = Keyed::new(config.hash_secret);
        Self {
            config,
            ports: Ports::default(),
            table: Table::new(config.age, keyed),
            pinned: HashMap::with_hasher(keyed),
            moved: HashMap::with_hasher(keyed),
            addresses: Addresses::new(
                keyed,
                config.addresses_max,
                config.addresses_per_mac_max,
                config.address_age,
            ),
            vlans: Vlans::all(),
            gateway: None,
            flows: Flows::new(keyed, config.flows_max, config.flows_per_guest_max),
            outputs: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Adds a port of this host.
    pub fn add_local(&mut self, config: PortConfig) -> Result<PortId, SwitchError> {
        self.add(Behind::Local, config)
    }

    /// Adds a host of the network.
    pub fn add_host(&mut self, host: HostId, config: PortConfig) -> Result<PortId, SwitchError> {
        if self.ports.of_host(host).is_some() {
            return Err(SwitchError::KnownHost);
        }
        self.add(Behind::Host(host), config)
    }

    fn add(&mut self, behind: Behind, config: PortConfig) -> Result<PortId, SwitchError> {
        if self.ports.all().len() >= PORTS_MAX {
            return Err(SwitchError::TooManyPorts);
        }
        let port = self.ports.add(behind, config);
        self.find_gateways();
        Ok(port)
    }

    /// Sets the VLANs that frames may belong to: all of them at first.
    pub fn set_vlans(&mut self, vlans: Vlans) {
        self.vlans = vlans;
    }

    /// Removes a port, with the addresses behind it. Returns `false` if there is no such port.
    pub fn remove(&mut self, now: Duration, port: PortId) -> bool {
        if self.ports.get(port).is_none() {
            return false;
        }
        self.sweep_table(now, Some(port));
        self.ports.remove(port);
        self.pinned.retain(|_, pinned| pinned.port != port);
        self.find_gateways();
        true
    }

    /// Returns what is behind a port.
    pub fn behind(&self, port: PortId) -> Option<Behind> {
        self.ports.behind(port)
    }

    /// Returns the port of a host.
    pub fn host_port(&self, host: HostId) -> Option<PortId> {
        self.ports.of_host(host)
    }

    /// Returns all ports, those of this host and other hosts.
    pub fn ports(&self) -> &[PortId] {
        self.ports.all()
    }

    /// Returns where a station is, if that is known.
    pub fn place(&self, now: Duration, vlan: u16, mac: Mac) -> Option<PortId> {
        self.lookup(now, Key::new(vlan, mac), mac)
    }

    /// Returns what was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Returns the numbers of learned MAC addresses and of known IP addresses.
    pub fn sizes(&self) -> (usize, usize) {
        (self.table.len(), self.addresses.len())
    }

    /// Whether [`Self::poll`] has an output.
    #[inline]
    pub fn has_outputs(&self) -> bool {
        !self.outputs.is_empty()
    }

    /// Takes the next output. Call it after each other call until there is none.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Returns the ports in the order of [`Output::Flood`].
    pub fn flood(&self, except: PortId) -> Destinations<'_> {
        Destinations::many(self.ports.all(), except)
    }

    fn output(&mut self, output: Output) {
        if self.outputs.len() < OUTPUTS_MAX {
            self.outputs.push_back(output);
        } else {
            self.counters.outputs_lost += 1;
        }
    }

    /// Forgets what is too old. To be called every 10 seconds or so.
    pub fn tick(&mut self, now: Duration) {
        self.sweep_table(now, None);
        self.addresses.sweep(now);
        self.flows.sweep(now);
        self.moved.retain(|_, moved| moved.until > now);
    }

    fn sweep_table(&mut self, now: Duration, gone: Option<PortId>) {
        let Self { ports, table, .. } = self;
        table.sweep(now, gone, |port| {
            if let Some(port) = ports.get_mut(port) {
                port.macs -= 1;
            }
        });
    }

    /// Takes a frame that came from a port, without a virtio header. Returns where it goes; nowhere
    /// if it is dropped, which is counted.
    pub fn frame(&mut self, now: Duration, from: PortId, frame: &[u8]) -> Destinations<'_> {
        self.counters.frames += 1;
        match self.decide(now, from, frame) {
            Ok(Forward::One(port)) => Destinations::one(port),
            Ok(Forward::All) => Destinations::many(self.ports.all(), from),
            Ok(Forward::Local) => Destinations::many(self.ports.local(), from),
            Ok(Forward::Gateways) => Destinations::many(self.gateways(), from),
            Err(reason) => {
                self.counters.add(reason);
                Destinations::none()
            }
        }
    }

    fn decide(&mut self, now: Duration, from: PortId, frame: &[u8]) -> Result<Forward, Reason> {
        let Some(port) = self.ports.get(from) else {
            return Err(Reason::UnknownPort);
        };
        let (here, only_own_mac) = (port.is_here(), port.config.only_own_mac);
        let frame = Ethernet::parse(frame).map_err(|bad| match bad {
            BadFrame::Malformed => Reason::Malformed,
            BadFrame::Oversized => Reason::Oversized,
        })?;
        if frame.from.is_group() || frame.from == Mac::ZERO {
            return Err(Reason::BadSource);
        }
        if frame.to.is_link_local() {
            return Err(Reason::LinkLocal);
        }
        let vlan = frame.vlan();
        if !self.vlans.has(vlan) {
            return Err(Reason::Vlan);
        }
        let gateway = self.sending_gateway(from, &frame)?;
        match self.pinned.get(&frame.from.number()) {
            // It is at many places.
            _ if gateway.is_some() => {}
            Some(pinned) if pinned.port == from => {}
            // Sent before the guest moved here: forwarded, and not learned.
            Some(pinned) if !here && now < pinned.settled => {}
            Some(_) => return Err(self.spoofed(from, frame.from, Reason::Spoofed)),
            None if only_own_mac => {
                return Err(self.spoofed(from, frame.from, Reason::NotOwnMac));
            }
            None => self.learn(now, from, vlan, frame.from),
        }
        if self.is_to_gateway(&frame) {
            return self.forward_to_gateway(now, from, &frame);
        }
        self.forward(now, (from, here), &frame, gateway)
    }

    /// Decides where a frame goes that may be forwarded, and is not for the gateway. `gateway` is
    /// the host whose gateway sends it, if one does.
    fn forward(
        &mut self,
        now: Duration,
        (from, here): (PortId, bool),
        frame: &Ethernet<'_>,
        gateway: Option<HostId>,
    ) -> Result<Forward, Reason> {
        let speaks = matches!(frame.kind, TYPE_ARP | TYPE_IPV6) && gateway.is_none();
        if frame.to.is_group() {
            self.may_flood(now, from, frame.to)?;
            if speaks && self.snoop(now, from, frame) {
                return Err(Reason::Answered);
            }
        } else {
            if speaks {
                self.snoop(now, from, frame);
            }
            let key = Key::new(frame.vlan(), frame.to);
            let place = self.lookup(now, key, frame.to);
            let is_local = place.and_then(|to| self.ports.get(to)).map(Port::is_local);
            match (place, is_local) {
                (Some(to), _) if to == from => return Err(Reason::SamePort),
                (Some(to), Some(local)) if here || local => {
                    if let Some(gateway) = gateway.filter(|_| local) {
                        self.note_answer(now, gateway, frame);
                    }
                    return Ok(Forward::One(to));
                }
                (Some(_), _) => return Err(self.misdirected(now, from, frame.to)),
                (None, _) if !here && self.moved.contains_key(&frame.to.number()) => {
                    return Err(self.misdirected(now, from, frame.to));
                }
                (None, _) => self.may_flood(now, from, Mac::BROADCAST)?,
            }
        }
        self.counters.replicated += 1;
        Ok(if here { Forward::All } else { Forward::Local })
    }

    /// Returns where frames to a station go.
    #[inline]
    fn lookup(&self, now: Duration, key: Key, mac: Mac) -> Option<PortId> {
        if let Some(port) = self.table.port(key, now) {
            return Some(port);
        }
        if let Some(pinned) = self.pinned.get(&mac.number()) {
            return Some(pinned.port);
        }
        let moved = self.moved.get(&mac.number())?;
        self.ports
            .of_host(moved.now_at)
            .filter(|_| moved.until > now)
    }

    /// Takes a frame to a group out of the port's allowance.
    fn may_flood(&mut self, now: Duration, from: PortId, to: Mac) -> Result<(), Reason> {
        let Some(port) = self.ports.get_mut(from) else {
            return Err(Reason::UnknownPort);
        };
        let (bucket, reason) = if to == Mac::BROADCAST {
            (&mut port.flood, Reason::FloodLimit)
        } else {
            (&mut port.multicast, Reason::MulticastLimit)
        };
        if bucket.take(now) {
            return Ok(());
        }
        if !std::mem::replace(&mut port.reported.flood, true) {
            self.output(Output::Report(Report::FloodLimited(from)));
        }
        Err(reason)
    }

    fn spoofed(&mut self, port: PortId, mac: Mac, reason: Reason) -> Reason {
        let reported = self.ports.get_mut(port).map(|port| &mut port.reported);
        if reported.is_some_and(|reported| !std::mem::replace(&mut reported.spoofed, true)) {
            self.output(Output::Report(Report::Spoofed { port, mac }));
        }
        reason
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
