//! The gateway of a network: one address and MAC address at several hosts. A guest leaves by the
//! near one, and flows that began at another one go on there.

use super::flows::Carried;
use super::port::{Behind, PortConfig, PortId};
use super::{Forward, Reason, Switch, SwitchError};
use crate::address::{Address, Mac};
use crate::ethernet::{Ethernet, TYPE_ARP, TYPE_IPV4};
use crate::neighbour::{self, Neighbour};
use crate::packet::Packet;
use longhaul_protocol::HostId;
use std::time::Duration;

/// The gateway of a network, in the untagged frames.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayConfig {
    /// Its MAC address, at each host that has it.
    pub mac: Mac,
    /// Its addresses, at each host that has it.
    pub addresses: Vec<[u8; 4]>,
    /// This host.
    pub own: HostId,
    /// The port of the gateway here, if this host has it.
    pub here: Option<PortId>,
    /// The other hosts that have it. Flows that begin go to the first one, if this host has none.
    pub hosts: Vec<HostId>,
}

/// How many flows a switch remembers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Those of guests of this host.
    pub flows: usize,
    /// Those of them that go through another host's gateway.
    pub elsewhere: usize,
    /// Flows that were not remembered because a table is full.
    pub full: u64,
    /// Flows that were given up because their gateway is gone or does not answer.
    pub given_up: u64,
}

#[derive(Debug)]
pub(super) struct Gateway {
    config: GatewayConfig,
    /// The ports of all hosts' gateways.
    ports: Vec<PortId>,
}

impl Gateway {
    fn has(&self, host: HostId) -> bool {
        self.config.hosts.contains(&host) || host == self.config.own && self.config.here.is_some()
    }

    /// Returns the host whose gateway flows begin at.
    fn near(&self) -> Option<HostId> {
        match self.config.here {
            Some(_) => Some(self.config.own),
            None => self.config.hosts.first().copied(),
        }
    }

    fn has_address(&self, address: Address) -> bool {
        matches!(address, Address::V4(address) if self.config.addresses.contains(&address))
    }
}

impl Switch {
    /// Adds the port of a gateway of this host. Frames to groups do not go there.
    pub fn add_gateway(&mut self, config: PortConfig) -> Result<PortId, SwitchError> {
        self.add(Behind::Gateway, config)
    }

    /// Sets the gateway of the network, or that it has none.
    pub fn set_gateway(&mut self, config: Option<GatewayConfig>) {
        if config.is_none() {
            self.flows.clear();
        }
        self.gateway = config.map(|config| Gateway {
            config,
            ports: Vec::new(),
        });
        self.find_gateways();
    }

    /// Follows hosts that are added and removed.
    pub(super) fn find_gateways(&mut self) {
        let Some(gateway) = &mut self.gateway else {
            return;
        };
        let here = gateway
            .config
            .here
            .filter(|port| self.ports.get(*port).is_some());
        gateway.config.here = here;
        let hosts = gateway.config.hosts.iter();
        let hosts = hosts.filter_map(|host| self.ports.of_host(*host));
        gateway.ports = here.into_iter().chain(hosts).collect();
    }

    /// Returns the ports of all gateways.
    pub(super) fn gateways(&self) -> &[PortId] {
        self.gateway.as_ref().map_or(&[], |gateway| &gateway.ports)
    }

    /// Returns the MAC address of the gateway, if an address in a VLAN is the gateway's.
    pub(super) fn mac_of_gateway(&self, vlan: u16, address: Address) -> Option<Mac> {
        let gateway = self.gateway.as_ref()?;
        (vlan == 0 && gateway.has_address(address)).then_some(gateway.config.mac)
    }

    pub(super) fn is_to_gateway(&self, frame: &Ethernet<'_>) -> bool {
        let gateway = self.gateway.as_ref();
        gateway.is_some_and(|gateway| frame.vlan() == 0 && frame.to == gateway.config.mac)
    }

    /// Returns the host whose gateway sends a frame, if one does. Drops what only pretends that.
    pub(super) fn sending_gateway(
        &mut self,
        from: PortId,
        frame: &Ethernet<'_>,
    ) -> Result<Option<HostId>, Reason> {
        let behind = self.ports.behind(from);
        let Some(gateway) = &self.gateway else {
            return match behind {
                Some(Behind::Gateway) => Err(Reason::NoGateway),
                _ => Ok(None),
            };
        };
        let is_its_mac = frame.vlan() == 0 && frame.from == gateway.config.mac;
        let sender = match behind {
            Some(Behind::Gateway) if is_its_mac => Some(gateway.config.own),
            Some(Behind::Host(host)) if is_its_mac && gateway.config.hosts.contains(&host) => {
                Some(host)
            }
            Some(Behind::Gateway) => None,
            _ if is_its_mac => None,
            _ if pretends(gateway, frame) => None,
            _ => return Ok(None),
        };
        match sender {
            Some(host) => Ok(Some(host)),
            None => Err(self.spoofed(from, frame.from, Reason::GatewaySpoofed)),
        }
    }

    /// Decides where a frame to the gateway goes.
    pub(super) fn forward_to_gateway(
        &mut self,
        now: Duration,
        from: PortId,
        frame: &Ethernet<'_>,
    ) -> Result<Forward, Reason> {
        let is_local = self.ports.get(from).is_some_and(|port| port.is_local());
        if is_local && frame.kind == TYPE_ARP {
            if self.snoop(now, from, frame) {
                return Err(Reason::Answered);
            }
            // The answer to a gateway: which of them asked is not known.
            self.may_flood(now, from, Mac::BROADCAST)?;
            return Ok(Forward::Gateways);
        }
        let Some(gateway) = &self.gateway else {
            return Err(Reason::NoGateway);
        };
        if !is_local {
            // Only the gateway of this host can be meant.
            let here = gateway.config.here.filter(|here| *here != from);
            return here.map(Forward::One).ok_or(Reason::NoGateway);
        }
        let near = gateway.near();
        let packet = match frame.kind {
            TYPE_IPV4 => Packet::read(frame.payload),
            _ => None,
        };
        let chosen = match packet {
            Some(packet) => {
                let has = |host| gateway.has(host);
                self.flows.outbound(now, frame.from, &packet, near, has)
            }
            None => near,
        };
        let port = chosen.and_then(|host| match host == gateway.config.own {
            true => gateway.config.here,
            false => self.ports.of_host(host),
        });
        port.map(Forward::One).ok_or(Reason::NoGateway)
    }

    /// Notes what a gateway sends to a guest of this host.
    pub(super) fn note_answer(&mut self, now: Duration, gateway: HostId, frame: &Ethernet<'_>) {
        if frame.kind == TYPE_IPV4
            && let Some(packet) = Packet::read(frame.payload)
        {
            self.flows.inbound(now, frame.to, &packet, gateway);
        }
    }

    /// Returns the flows of a guest through gateways, those of which something was seen last
    /// first. They move along with the guest.
    pub fn flows_of(&self, now: Duration, mac: Mac) -> Vec<Carried> {
        self.flows.of(now, mac)
    }

    /// Adds the flows of a guest that has come from another host. Those through hosts that do not
    /// have the gateway are left out.
    pub fn add_flows(&mut self, now: Duration, mac: Mac, flows: &[Carried]) {
        let Some(gateway) = &self.gateway else {
            return;
        };
        for carried in flows.iter().filter(|carried| gateway.has(carried.1)) {
            self.flows.add(now, mac, *carried);
        }
    }

    /// Returns how many flows are remembered.
    pub fn flow_counts(&self) -> FlowCounts {
        let own = self.gateway.as_ref().map(|gateway| gateway.config.own);
        let (flows, elsewhere) = own.map_or((0, 0), |own| self.flows.sizes(own));
        let counted = self.flows.counted;
        FlowCounts {
            flows,
            elsewhere,
            full: counted.full,
            given_up: counted.given_up,
        }
    }
}

/// Whether a station that is no gateway uses the address of the gateway.
fn pretends(gateway: &Gateway, frame: &Ethernet<'_>) -> bool {
    if frame.vlan() != 0 {
        return false;
    }
    let address = match frame.kind {
        TYPE_ARP => match neighbour::parse(frame) {
            Some(Neighbour::Tells { address, .. } | Neighbour::Asks { address, .. }) => address,
            Some(Neighbour::Probes { .. }) | None => return false,
        },
        TYPE_IPV4 => match frame.payload.get(12..16).and_then(<[u8]>::first_chunk) {
            Some(address) => Address::V4(*address),
            None => return false,
        },
        _ => return false,
    };
    gateway.has_address(address)
}

#[cfg(test)]
mod tests;
