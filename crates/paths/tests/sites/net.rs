//! Networks, NATs and firewalls between hosts and servers, and how datagrams pass through them.

use crate::nat::Nat;
use crate::plan::Plan;
use crate::random::Rng;
use longhaul_paths::SocketId;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

pub(crate) const INTERNET: usize = 0;
const CARRIER: usize = 1;
const SHARED_LAN: usize = 2;
/// The network of site 0; others follow.
const SITES: usize = 3;
pub(crate) const PORT: u16 = 7000;
const STUN_PORT: u16 = 3478;
/// How long a firewall remembers a flow.
const FIREWALL: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    Host(usize, SocketId),
    Server(usize),
}

/// A datagram between the NATs of its sender and those of its receiver.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transit {
    network: usize,
    from: SocketAddr,
    to: SocketAddr,
}

/// A host's place in the networks.
#[derive(Debug, Default)]
pub(crate) struct Place {
    pub(crate) site: usize,
    /// Networks with the host's address there, the default one first.
    pub(crate) ipv4: Vec<(usize, Ipv4Addr)>,
    pub(crate) ipv6: Option<Ipv6Addr>,
    firewall: bool,
    flows: BTreeMap<(SocketAddr, SocketAddr), Duration>,
    pub(crate) sockets: BTreeMap<u16, SocketId>,
    pub(crate) ports: BTreeMap<SocketId, u16>,
}

impl Place {
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        let ipv4 = self.ipv4.iter().map(|(_, ip)| IpAddr::V4(*ip));
        let all = ipv4.chain(self.ipv6.map(IpAddr::V6));
        all.map(|ip| SocketAddr::new(ip, PORT)).collect()
    }

    fn note(&mut self, from: SocketAddr, to: SocketAddr, now: Duration) {
        if self.firewall {
            self.flows.insert((from, to), now);
        }
    }

    fn admits(&self, own: SocketAddr, from: SocketAddr, now: Duration) -> bool {
        let flow = self.flows.get(&(own, from));
        !self.firewall || flow.is_some_and(|at| now < *at + FIREWALL)
    }
}

pub(crate) struct Net {
    pub(crate) places: [Place; 2],
    pub(crate) nats: Vec<Nat>,
    pub(crate) blocked: [bool; 4],
    blocks_here: [bool; 2],
}

pub(crate) fn server_addresses(server: usize) -> [SocketAddr; 2] {
    let ipv4 = Ipv4Addr::new(198, 51, 100, 1 + server as u8);
    let ipv6 = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 1 + server as u16);
    [
        SocketAddr::from((ipv4, STUN_PORT)),
        SocketAddr::from((ipv6, STUN_PORT)),
    ]
}

fn server_of(address: SocketAddr) -> Option<usize> {
    (0..3).find(|server| server_addresses(*server).contains(&address))
}

impl Net {
    pub(crate) fn new(plan: &Plan) -> Self {
        let mut nats = Vec::new();
        for (index, site) in plan.sites.iter().enumerate() {
            if let Some(spec) = site.nat {
                let outside = if site.is_behind_carrier() {
                    CARRIER
                } else {
                    INTERNET
                };
                let ip = match outside {
                    CARRIER => Ipv4Addr::new(100, 64, 0, 10 + index as u8),
                    _ => Ipv4Addr::new(203, 0, 113, 10 + index as u8),
                };
                nats.push(Nat::new(spec, ip, SITES + index, outside));
            }
        }
        let ip = Ipv4Addr::new(203, 0, 113, 1);
        nats.push(Nat::new(plan.carrier, ip, CARRIER, INTERNET));
        let mut net = Self {
            places: Default::default(),
            nats,
            blocked: plan
                .sites
                .map(|site| site.nat.is_some_and(|nat| nat.blocks_udp)),
            blocks_here: [false; 2],
        };
        for host in 0..2 {
            net.attach(host, plan.at[host], plan);
        }
        net
    }

    /// Puts a host into a site. Its sockets stay.
    pub(crate) fn attach(&mut self, host: usize, site: usize, plan: &Plan) {
        let spec = &plan.sites[site];
        let place = &mut self.places[host];
        place.site = site;
        place.flows.clear();
        place.ipv4.clear();
        if spec.ipv4 {
            // All sites use the same private addresses: those of others are somebody else's here.
            let ip = match spec.nat {
                Some(_) => Ipv4Addr::new(192, 168, 1, 2 + host as u8 * (site == 0) as u8),
                None => Ipv4Addr::new(203, 0, 113, 100 + 2 * site as u8 + host as u8),
            };
            let network = if spec.nat.is_some() {
                SITES + site
            } else {
                INTERNET
            };
            place.ipv4.push((network, ip));
        }
        if plan.shared_lan {
            place
                .ipv4
                .push((SHARED_LAN, Ipv4Addr::new(10, 9, 0, 2 + host as u8)));
        }
        let segments = [0x2001, 0xdb8, site as u16, 0, 0, 0, 0, 2 + host as u16];
        place.ipv6 = spec.ipv6.then(|| Ipv6Addr::from(segments));
        place.firewall = spec.firewall;
        self.blocks_here[host] = self.blocked[site];
    }

    pub(crate) fn open(&mut self, host: usize, socket: SocketId, port: u16) {
        self.places[host].sockets.insert(port, socket);
        self.places[host].ports.insert(socket, port);
    }

    pub(crate) fn close(&mut self, host: usize, socket: SocketId) {
        if let Some(port) = self.places[host].ports.remove(&socket) {
            self.places[host].sockets.remove(&port);
        }
    }

    /// Returns who gets a datagram, and from which address, if nothing changes on its way. Only
    /// mappings count that exist.
    pub(crate) fn peek(
        &mut self,
        host: usize,
        socket: SocketId,
        to: SocketAddr,
        now: Duration,
    ) -> Option<(Target, SocketAddr)> {
        let transit = self.depart(host, socket, to, now, None)?;
        self.arrive(transit, now, false)
    }

    /// Sends a datagram out of a host and its NATs. Without `rng` nothing is changed.
    pub(crate) fn depart(
        &mut self,
        host: usize,
        socket: SocketId,
        to: SocketAddr,
        now: Duration,
        mut rng: Option<&mut Rng>,
    ) -> Option<Transit> {
        let port = *self.places[host].ports.get(&socket)?;
        let real = rng.is_some();
        if let IpAddr::V6(ip) = to.ip() {
            let from = SocketAddr::from((self.places[host].ipv6?, port));
            let target = self.places.iter().position(|place| place.ipv6 == Some(ip));
            let site = self.places[host].site;
            let inside = target.is_some_and(|target| self.places[target].site == site);
            if !inside && self.blocks_here[host] {
                return None;
            }
            if real {
                self.places[host].note(from, to, now);
            }
            let network = if inside { SITES + site } else { INTERNET };
            return Some(Transit { network, from, to });
        }
        let place = &self.places[host];
        let on_link = place
            .ipv4
            .iter()
            .find(|(network, _)| *network != INTERNET && self.owner(*network, to.ip()).is_some());
        let (mut network, ip) = *on_link.or(place.ipv4.first())?;
        let mut from = SocketAddr::from((ip, port));
        if network == INTERNET && real {
            self.places[host].note(from, to, now);
        }
        loop {
            let here = self.owner(network, to.ip()).is_some() || self.inward(network, to).is_some();
            if here || network == INTERNET {
                return Some(Transit { network, from, to });
            }
            let gateway = self.nats.iter_mut().find(|nat| nat.inside == network)?;
            if IpAddr::V4(gateway.ip) == to.ip() && !gateway.spec.hairpin {
                return None;
            }
            from = gateway.outbound(from, to, now, rng.as_deref_mut())?;
            network = gateway.outside;
        }
    }

    /// Takes a datagram in through NATs and firewalls.
    pub(crate) fn arrive(
        &mut self,
        transit: Transit,
        now: Duration,
        real: bool,
    ) -> Option<(Target, SocketAddr)> {
        let Transit {
            mut network,
            from,
            mut to,
        } = transit;
        while let Some(index) = self.inward(network, to) {
            to = self.nats[index].inbound(to.port(), from, now, real)?;
            network = self.nats[index].inside;
        }
        if network == INTERNET
            && let Some(server) = server_of(to)
        {
            return Some((Target::Server(server), from));
        }
        let target = match to.ip() {
            IpAddr::V4(_) => self.owner(network, to.ip())?,
            IpAddr::V6(ip) => self
                .places
                .iter()
                .position(|place| place.ipv6 == Some(ip))?,
        };
        let place = &self.places[target];
        if network == INTERNET {
            let blocked = to.is_ipv6() && self.blocks_here[target];
            if blocked || !place.admits(to, from, now) {
                return None;
            }
        }
        let socket = place.sockets.get(&to.port())?;
        Some((Target::Host(target, *socket), from))
    }

    fn inward(&self, network: usize, to: SocketAddr) -> Option<usize> {
        let mut nats = self.nats.iter();
        nats.position(|nat| nat.outside == network && IpAddr::V4(nat.ip) == to.ip())
    }

    fn owner(&self, network: usize, ip: IpAddr) -> Option<usize> {
        let owns = |place: &Place| {
            let mut own = place.ipv4.iter();
            own.any(|(at, own)| *at == network && IpAddr::V4(*own) == ip)
        };
        self.places.iter().position(owns)
    }

    /// Returns whether both hosts are in one local network.
    pub(crate) fn are_near(&self, to: SocketAddr) -> bool {
        let shared = self.places[0]
            .ipv4
            .iter()
            .any(|(net, _)| *net == SHARED_LAN);
        let [near, ..] = match to.ip() {
            IpAddr::V4(ip) => ip.octets().map(|octet| octet == 10),
            IpAddr::V6(_) => [false; 4],
        };
        self.places[0].site == self.places[1].site || shared && near
    }
}
