//! What all peers of a host share: its addresses, its servers, its NATs, and the pace of probes.

mod server;

pub use server::{Leg, ServerConfig};

use crate::candidate::{self, Candidate, Origin};
use crate::message::Offer;
use crate::nat::{self, Mapping};
use crate::random::Random;
use crate::tuning::{SERVERS_MAX, Tuning};
use longhaul_protocol::HostId;
use server::{Server, TcpStep};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

/// The maximum number of interfaces' addresses that are offered.
const OWN_MAX: usize = 6;
/// The maximum number of reflexive candidates.
const REFLEXIVE_MAX: usize = 4;
/// Answers of other servers that are older than this are asked for again when one has changed.
const FRESH: Duration = Duration::from_secs(3);
/// Least time between two such repetitions.
const REPEAT: Duration = Duration::from_secs(12);

/// What happens at a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalEvent {
    /// The servers of this host, as they are now. What is known of those that stay is kept.
    Servers(Vec<ServerConfig>),
    /// The addresses of the main socket on the interfaces, with its port, as they are now.
    Addresses(Vec<SocketAddr>),
    /// Addresses that an operator configured.
    Configured(Vec<SocketAddr>),
    /// The address that a port-mapping protocol got, or none any more.
    PortMapped(Option<SocketAddr>),
    /// A STUN server answered a question of [`LocalAction::Ask`].
    Observed {
        /// The question.
        id: u64,
        /// The source of the answer.
        from: SocketAddr,
        /// This host's address in the answer.
        mapped: SocketAddr,
    },
    /// The connection to a relay over TCP is open; or could not be opened, or ended.
    Tcp {
        /// The relay.
        server: HostId,
        /// Whether it is open.
        open: bool,
    },
    /// A rendezvous server has accepted this host, or does not know it any more.
    Attached {
        /// The server.
        server: HostId,
        /// Whether this host is registered there.
        attached: bool,
    },
    /// A relay is overloaded and takes no datagrams for a while.
    Refused {
        /// The relay.
        server: HostId,
        /// How long.
        wait: Duration,
    },
}

/// What a host has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalAction {
    /// Send a STUN Binding request with this transaction from the main socket.
    Ask {
        /// Names the question in [`LocalEvent::Observed`].
        id: u64,
        /// The server's address.
        address: SocketAddr,
    },
    /// Connect to a relay over TCP; [`LocalEvent::Tcp`] has the result.
    OpenTcp(HostId),
    /// Close this connection.
    CloseTcp(HostId),
    /// Call [`Paths::refresh`](crate::Paths::refresh) for each peer.
    Refresh,
}

/// Whether UDP gets through to any server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Udp {
    /// Not known yet, or no server is configured.
    Unknown,
    /// A server answers.
    Works,
    /// No server answers.
    Blocked,
}

/// What all peers of a host share.
#[derive(Debug, Clone)]
pub struct Local {
    tuning: Tuning,
    random: Random,
    own: Vec<SocketAddr>,
    configured: Vec<SocketAddr>,
    port_mapped: Option<SocketAddr>,
    servers: Vec<Server>,
    offer: Offer,
    generation: u64,
    next_question: u64,
    repeated_at: Option<Duration>,
    /// The earliest time of the next probe of this host.
    next_probe_at: Duration,
    searching: Option<HostId>,
    actions: VecDeque<LocalAction>,
}

impl Local {
    /// Begins with servers and without addresses. `seed` spreads timers.
    pub fn new(servers: Vec<ServerConfig>, seed: u64, tuning: Tuning, now: Duration) -> Self {
        let servers = servers.into_iter().take(SERVERS_MAX);
        Self {
            random: Random::new(seed),
            own: Vec::new(),
            configured: Vec::new(),
            port_mapped: None,
            servers: servers
                .map(|config| Server::new(config, now, &tuning))
                .collect(),
            tuning,
            offer: Offer::default(),
            generation: 0,
            next_question: seed,
            repeated_at: None,
            next_probe_at: Duration::ZERO,
            searching: None,
            actions: VecDeque::new(),
        }
    }

    /// Takes the next action.
    pub fn poll_action(&mut self) -> Option<LocalAction> {
        self.actions.pop_front()
    }

    /// Returns when [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Duration> {
        let times = self
            .servers
            .iter()
            .filter_map(|server| server.next_at(&self.tuning));
        times.min()
    }

    /// Takes an input.
    pub fn handle(&mut self, event: LocalEvent, now: Duration) {
        match event {
            LocalEvent::Servers(servers) => self.servers_are(servers, now),
            LocalEvent::Addresses(addresses) => self.addresses_are(addresses, now),
            LocalEvent::Configured(addresses) => self.configured = addresses,
            LocalEvent::PortMapped(address) => self.port_mapped = address,
            LocalEvent::Observed { id, from, mapped } => self.observed(id, from, mapped, now),
            LocalEvent::Tcp { server, open } => {
                let tuning = self.tuning.clone();
                if let Some(server) = self.server_mut(server) {
                    server.tcp_is(open, now, &tuning);
                    self.actions.push_back(LocalAction::Refresh);
                }
            }
            LocalEvent::Attached { server, attached } => {
                if let Some(server) = self.server_mut(server)
                    && server.attached != attached
                {
                    server.attached = attached;
                    self.actions.push_back(LocalAction::Refresh);
                }
            }
            LocalEvent::Refused { server, wait } => {
                if let Some(server) = self.server_mut(server) {
                    server.refused_until = now + wait;
                    self.actions.push_back(LocalAction::Refresh);
                }
            }
        }
        self.handle_timeout(now);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Duration) {
        let mut lost = false;
        for server in &mut self.servers {
            for observer in &mut server.observers {
                if observer.next_at <= now {
                    let id = self.next_question;
                    self.next_question = self.next_question.wrapping_add(1);
                    lost |= observer.ask(id, now, &self.tuning, &mut self.random);
                    let address = observer.address;
                    self.actions.push_back(LocalAction::Ask { id, address });
                }
            }
            let id = server.config.id;
            match server.step_tcp(now, &self.tuning) {
                Some(TcpStep::Open) => self.actions.push_back(LocalAction::OpenTcp(id)),
                Some(TcpStep::Close) => self.actions.push_back(LocalAction::CloseTcp(id)),
                None => {}
            }
        }
        if lost {
            self.actions.push_back(LocalAction::Refresh);
        }
        self.renew_offer();
    }

    /// Asks all servers now: a path died, or a peer sees another address of this host.
    pub fn check(&mut self, now: Duration) {
        for server in &mut self.servers {
            server
                .observers
                .iter_mut()
                .for_each(|observer| observer.check(now));
        }
    }

    // What peers ask for.

    /// Returns this host's addresses and NATs, as the other host is told.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Returns a number that changes with [`Self::offer`].
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns how IPv4 is mapped.
    pub fn mapping(&self) -> Mapping {
        self.offer.mapping
    }

    /// Returns whether UDP gets through to any server.
    pub fn udp(&self) -> Udp {
        let mut all = self
            .servers
            .iter()
            .flat_map(|server| &server.observers)
            .peekable();
        if all.peek().is_none() {
            return Udp::Unknown;
        }
        let mut udp = Udp::Blocked;
        for observer in all {
            if observer.is_up() {
                return Udp::Works;
            }
            if !observer.down {
                udp = Udp::Unknown;
            }
        }
        udp
    }

    /// Returns how datagrams reach a relay now, if they do.
    pub fn leg(&self, server: HostId) -> Option<Leg> {
        self.server(server).and_then(Server::leg)
    }

    /// Returns the name of a server.
    pub fn name(&self, server: HostId) -> &str {
        let known = self.server(server);
        known.map_or("an unknown server", |server| &server.config.name)
    }

    /// Returns whether a host may be reached through this server: it answers, knows this host, and
    /// is not overloaded.
    pub fn is_usable(&self, server: HostId, now: Duration) -> bool {
        self.can_introduce(server)
            && self
                .server(server)
                .is_some_and(|server| server.refused_until <= now)
    }

    /// Returns whether messages to other hosts pass through this server.
    pub(crate) fn can_introduce(&self, server: HostId) -> bool {
        self.server(server)
            .is_some_and(|s| s.config.relays && s.attached && s.leg().is_some())
    }

    /// Returns when a relay takes datagrams again.
    pub(crate) fn refused_until(&self, server: HostId) -> Option<Duration> {
        self.server(server).map(|server| server.refused_until)
    }

    /// Returns whether any server answers and knows this host.
    pub(crate) fn is_attached(&self) -> bool {
        let mut servers = self.servers.iter();
        servers.any(|server| self.can_introduce(server.config.id))
    }

    /// Returns the round trip to a server.
    pub fn round_trip(&self, server: HostId) -> Option<Duration> {
        self.server(server).and_then(Server::round_trip)
    }

    /// Returns whether this host has an address of this one's family.
    pub(crate) fn has_family_of(&self, address: SocketAddr) -> bool {
        let mut own = self.own.iter();
        own.any(|own| own.is_ipv4() == address.is_ipv4())
    }

    /// Returns the values of timers and limits.
    pub(crate) fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Permits one probe now, or says when to ask again.
    pub(crate) fn take_turn(&mut self, now: Duration) -> Result<(), Duration> {
        if self.next_probe_at > now {
            return Err(self.next_probe_at);
        }
        self.next_probe_at = now + self.tuning.host_pace;
        Ok(())
    }

    /// Permits a search for one peer at a time.
    pub(crate) fn begin_search(&mut self, peer: HostId) -> bool {
        let free = self.searching.is_none_or(|searching| searching == peer);
        if free {
            self.searching = Some(peer);
        }
        free
    }

    pub(crate) fn can_search(&self, peer: HostId) -> bool {
        self.searching.is_none_or(|searching| searching == peer)
    }

    pub(crate) fn end_search(&mut self, peer: HostId) {
        if self.searching == Some(peer) {
            self.searching = None;
        }
    }

    // Servers and addresses.

    fn server(&self, id: HostId) -> Option<&Server> {
        self.servers.iter().find(|server| server.config.id == id)
    }

    fn server_mut(&mut self, id: HostId) -> Option<&mut Server> {
        self.servers
            .iter_mut()
            .find(|server| server.config.id == id)
    }

    /// Interfaces came, went or changed: nothing that servers saw is valid.
    fn addresses_are(&mut self, mut addresses: Vec<SocketAddr>, now: Duration) {
        addresses.retain(|address| candidate::is_usable(*address));
        if addresses == self.own {
            return;
        }
        self.own = addresses;
        for server in &mut self.servers {
            server.observe_from(&self.own, now, &self.tuning);
            server.restart(now, &self.tuning);
        }
        self.actions.push_back(LocalAction::Refresh);
    }

    /// Servers came, went, or have other addresses.
    fn servers_are(&mut self, servers: Vec<ServerConfig>, now: Duration) {
        let mut known = std::mem::take(&mut self.servers);
        for config in servers.into_iter().take(SERVERS_MAX) {
            let place = known
                .iter()
                .position(|server| server.config.id == config.id);
            let mut server = match place.map(|place| known.swap_remove(place)) {
                Some(server) if server.config == config => {
                    self.servers.push(server);
                    continue;
                }
                Some(server) => server.with(config, now, &self.tuning),
                None => Server::new(config, now, &self.tuning),
            };
            server.observe_from(&self.own, now, &self.tuning);
            self.servers.push(server);
        }
        for gone in known {
            if gone.tcp_is_wanted() {
                self.actions
                    .push_back(LocalAction::CloseTcp(gone.config.id));
            }
        }
        self.actions.push_back(LocalAction::Refresh);
    }

    fn observed(&mut self, id: u64, from: SocketAddr, mapped: SocketAddr, now: Duration) {
        let mut observers = self
            .servers
            .iter_mut()
            .flat_map(|server| &mut server.observers);
        let Some(observer) = observers.find(|observer| observer.address == from) else {
            return;
        };
        let before = observer.mapped;
        let changed = observer.answered(id, mapped, now, &self.tuning, &mut self.random);
        if changed == Some(true) {
            self.actions.push_back(LocalAction::Refresh);
        }
        if before.is_some() && before != observer.mapped {
            self.rebound(from, now);
        }
    }

    /// The NAT has another mapping for one server: what others have seen before is void.
    fn rebound(&mut self, seen_by: SocketAddr, now: Duration) {
        if self.repeated_at.is_some_and(|at| now < at + REPEAT) {
            return;
        }
        self.repeated_at = Some(now);
        for observer in self
            .servers
            .iter_mut()
            .flat_map(|server| &mut server.observers)
        {
            let old = observer.answered_at.is_some_and(|at| at + FRESH <= now);
            let same_family = observer.address.is_ipv4() == seen_by.is_ipv4();
            if old && same_family && observer.address != seen_by {
                observer.mapped = None;
                observer.check(now);
            }
        }
    }

    /// Makes the offer from what is known. Its generation changes only if it does.
    fn renew_offer(&mut self) {
        let observers = self.servers.iter().flat_map(|server| &server.observers);
        let mut seen = observers
            .filter_map(|observer| Some((observer.order(), observer.mapped?)))
            .collect::<Vec<_>>();
        seen.sort();
        let ipv4 = seen.iter().map(|(_, mapped)| *mapped);
        let ipv4 = ipv4.filter(SocketAddr::is_ipv4).collect::<Vec<_>>();
        let mapping = nat::classify(&self.own, &ipv4);
        let of = |origin| move |address| Candidate { origin, address };
        let mut candidates = Vec::new();
        let own = self.own.iter().copied().take(OWN_MAX);
        candidates.extend(own.map(of(Origin::Host)));
        candidates.extend(self.configured.iter().copied().map(of(Origin::Configured)));
        candidates.extend(self.port_mapped.map(of(Origin::PortMapped)));
        // Of a symmetric NAT, the newest mappings are nearest to the next one.
        let mut reflexive = seen
            .iter()
            .rev()
            .map(|(_, mapped)| *mapped)
            .collect::<Vec<_>>();
        reflexive.dedup();
        reflexive.truncate(REFLEXIVE_MAX);
        candidates.extend(reflexive.into_iter().map(of(Origin::Reflexive)));
        if let Mapping::Dependent { step: Some(step) } = mapping
            && let Some(last) = ipv4.last()
        {
            let predicted = nat::predict(*last, step);
            candidates.extend(predicted.into_iter().map(of(Origin::Predicted)));
        }
        let offer = Offer {
            candidates: candidate::ordered(candidates),
            mapping,
            udp_blocked: self.udp() == Udp::Blocked,
        };
        if offer != self.offer {
            self.offer = offer;
            self.generation += 1;
            self.actions.push_back(LocalAction::Refresh);
        }
    }
}
