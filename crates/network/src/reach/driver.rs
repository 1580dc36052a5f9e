//! Drives the core: one task that owns all paths, and carries out their actions in order.

use super::probe::Probe;
use super::status::{self, Status};
use super::{Config, INPUTS_WAITING, Input, Outside, PEERS_MAX, Reach};
use super::{addresses, signal};
use longhaul_paths::{
    Action, Event, Leg, Local, LocalAction, LocalEvent, Paths, ServerConfig, SocketId,
};
use longhaul_protocol::HostId;
use longhaul_transport::{ARRIVALS_PER_PEER_MAX, Endpoint, Observation, RelayLeg, Way};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tracing::{debug, info, warn};

/// How often traffic is noted.
const TICK: Duration = Duration::from_millis(500);
/// Batches of QUIC in a tick that may be keep-alives and their acknowledgements, and no traffic.
const KEEP_ALIVES_MAX: u64 = 2;
/// After how many ticks interfaces are read, relay sessions asked for, and the status is renewed.
const LONG_TICK: u32 = 4;
/// How long an answer to the request for a relay session is awaited.
const RELAY_ANSWER: Duration = Duration::from_secs(3);
/// The least time between two looks at the timers.
const LEAST_SLEEP: Duration = Duration::from_millis(1);

/// Starts the paths of a host. Requires a tokio runtime.
pub fn start(endpoint: Endpoint, config: Config, outside: impl Outside) -> io::Result<Reach> {
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(|error| io::Error::other(error.to_string()))?;
    let seed = u64::from_le_bytes(seed);
    let (inputs, incoming) = mpsc::channel(INPUTS_WAITING);
    let local = Local::new(
        config.servers.clone(),
        seed,
        config.tuning.clone(),
        Duration::ZERO,
    );
    let status = Status {
        mapping: local.mapping(),
        udp: local.udp(),
        peers: Vec::new(),
        refused_signals: 0,
        refused_probes: 0,
    };
    let (shown, watched) = watch::channel(Arc::new(status));
    let mut driver = Driver {
        start: Instant::now(),
        seed,
        local,
        peers: BTreeMap::new(),
        due: BTreeSet::new(),
        dirty: BTreeSet::new(),
        servers: config.servers,
        relays: BTreeMap::new(),
        may_search: config.may_search,
        refresh: false,
        refused_signals: 0,
        refused_probes: 0,
        shown,
        endpoint,
        outside,
    };
    driver.local_event(LocalEvent::Configured(config.configured));
    driver.read_addresses();
    driver.settle();
    tokio::spawn(driver.run(incoming));
    Ok(Reach {
        inputs,
        status: watched,
    })
}

struct Driver<O> {
    start: Instant,
    seed: u64,
    local: Local,
    peers: BTreeMap<HostId, Peer>,
    /// When peers have something to do.
    due: BTreeSet<(Duration, HostId)>,
    /// Peers that may have actions.
    dirty: BTreeSet<HostId>,
    servers: Vec<ServerConfig>,
    relays: BTreeMap<HostId, Relay>,
    may_search: bool,
    /// All peers have to look at what has changed.
    refresh: bool,
    refused_signals: u64,
    refused_probes: u64,
    shown: watch::Sender<Arc<Status>>,
    endpoint: Endpoint,
    outside: O,
}

struct Peer {
    paths: Paths,
    due: Option<Duration>,
    /// Where its datagrams come from, the newest last.
    arrivals: VecDeque<(SocketId, SocketAddr)>,
    /// The batches of QUIC and of frames to it, when last looked at.
    batches: (u64, u64),
    /// When a relay session was last asked for.
    asked: Option<(HostId, Duration)>,
}

/// How a relay can be reached.
#[derive(Default)]
struct Relay {
    address: Option<SocketAddr>,
    tcp: Option<mpsc::Sender<Vec<u8>>>,
    leg: Option<RelayLeg>,
}

impl<O: Outside> Driver<O> {
    async fn run(mut self, mut incoming: mpsc::Receiver<Input>) {
        let mut observations = self.endpoint.observations();
        let mut ticks: u32 = 0;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let wait = self.next_due().saturating_sub(self.now()).max(LEAST_SLEEP);
            tokio::select! {
                input = incoming.recv() => match input {
                    Some(input) => self.input(input),
                    None => break,
                },
                Some(observation) = observations.recv() => self.observed(observation),
                () = tokio::time::sleep(wait) => {}
                _ = tick.tick() => {
                    self.note_traffic();
                    ticks = ticks.wrapping_add(1);
                    if ticks.is_multiple_of(LONG_TICK) {
                        self.tick();
                    }
                }
            }
            self.timeouts();
            self.settle();
        }
        for peer in self.peers.keys().copied().collect::<Vec<_>>() {
            self.forget(peer);
        }
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Returns when a timer is due.
    fn next_due(&self) -> Duration {
        let peers = self.due.first().map(|(at, _)| *at);
        let times = [self.local.poll_timeout(), peers];
        times.into_iter().flatten().min().unwrap_or(Duration::MAX)
    }

    fn timeouts(&mut self) {
        let now = self.now();
        if self.local.poll_timeout().is_some_and(|at| at <= now) {
            self.local.handle_timeout(now);
        }
        let due = self.due.iter().take_while(|(at, _)| *at <= now);
        for (_, id) in due.copied().collect::<Vec<_>>() {
            if let Some(peer) = self.peers.get_mut(&id) {
                peer.paths.handle_timeout(&mut self.local, now);
                self.dirty.insert(id);
            }
        }
    }

    /// Notes to which peers data is sent. What is received is not known to be authentic here: a
    /// path that data is sent on is probed every second.
    fn note_traffic(&mut self) {
        let now = self.now();
        let routes = self.endpoint.routes();
        for (id, peer) in &mut self.peers {
            let now_sent = (routes.batches(*id), self.outside.batches(*id));
            let (quic, frames) = std::mem::replace(&mut peer.batches, now_sent);
            let sent = now_sent.0.saturating_sub(quic) > KEEP_ALIVES_MAX || now_sent.1 != frames;
            if let (true, Some(way)) = (sent, peer.paths.used()) {
                peer.paths.sent(way, now);
                self.dirty.insert(*id);
            }
        }
    }

    fn tick(&mut self) {
        self.read_addresses();
        let now = self.now();
        for id in self.peers.keys().copied().collect::<Vec<_>>() {
            self.ask_for_relay(id, now);
        }
        self.show();
    }

    fn input(&mut self, input: Input) {
        match input {
            Input::Servers(servers) => {
                self.servers.clone_from(&servers);
                self.local_event(LocalEvent::Servers(servers));
                self.read_addresses();
            }
            Input::Configured(addresses) => {
                self.local_event(LocalEvent::Configured(addresses));
            }
            Input::PortMapped(address) => self.local_event(LocalEvent::PortMapped(address)),
            Input::Attached { server, address } => {
                self.relays.entry(server).or_default().address = address;
                let attached = address.is_some();
                self.local_event(LocalEvent::Attached { server, attached });
            }
            Input::Present {
                peer,
                server,
                present,
            } => self.event(peer, Event::Present { server, present }),
            Input::Forget(peer) => self.forget(peer),
            Input::Signal { from, bytes } => self.signal(from, &bytes),
            Input::RelayOpened {
                server,
                session,
                peer,
            } => {
                if self.peer(peer).is_some() {
                    self.endpoint.routes().open_session(server, session, peer);
                }
            }
            Input::RelayClosed { server, session } => {
                if let Some(peer) = self.endpoint.routes().close_session(server, session) {
                    let now = self.now();
                    self.ask_for_relay(peer, now);
                }
            }
            Input::RelayRefused { server, wait } => {
                self.local_event(LocalEvent::Refused { server, wait });
            }
            Input::Tcp { server, queue } => {
                let open = queue.is_some();
                self.relays.entry(server).or_default().tcp = queue;
                self.local_event(LocalEvent::Tcp { server, open });
            }
            Input::Probe { peer, way, payload } => self.probe(peer, way, &payload),
            Input::Traffic {
                peer,
                sent,
                received,
            } => self.traffic(peer, sent, received),
        }
    }

    fn traffic(&mut self, id: HostId, sent: Option<Way>, received: Option<Way>) {
        let now = self.now();
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        if let Some(way) = sent {
            peer.paths.sent(way, now);
        }
        if let Some(way) = received {
            peer.paths.received(way, &self.local, now);
        }
        self.dirty.insert(id);
    }

    fn local_event(&mut self, event: LocalEvent) {
        let now = self.now();
        self.local.handle(event, now);
    }

    fn observed(&mut self, observation: Observation) {
        let Observation { id, from, mapped } = observation;
        self.local_event(LocalEvent::Observed { id, from, mapped });
    }

    fn read_addresses(&mut self) {
        let servers = self.servers.iter().flat_map(|server| &server.addresses);
        let servers: Vec<SocketAddr> = servers.copied().collect();
        let socket = self.endpoint.local_address();
        match socket.and_then(|socket| addresses::addresses(socket, &servers)) {
            Ok(addresses) => self.local_event(LocalEvent::Addresses(addresses)),
            Err(error) => warn!(%error, "cannot read the addresses of this host's interfaces"),
        }
    }

    /// Returns a peer, and makes it one if there is room.
    fn peer(&mut self, id: HostId) -> Option<&mut Peer> {
        if !self.peers.contains_key(&id) {
            if self.peers.len() >= PEERS_MAX {
                debug!(peer = %id, "there are {PEERS_MAX} peers already");
                return None;
            }
            self.seed = self
                .seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let paths = Paths::new(longhaul_paths::Config {
                own: self.endpoint.host_id(),
                peer: id,
                seed: self.seed,
                may_search: self.may_search,
            });
            self.endpoint.routes().peer_address(id);
            let peer = Peer {
                paths,
                due: None,
                arrivals: VecDeque::new(),
                batches: (0, 0),
                asked: None,
            };
            self.peers.insert(id, peer);
        }
        self.peers.get_mut(&id)
    }

    fn event(&mut self, id: HostId, event: Event) {
        let now = self.now();
        if self.peer(id).is_none() {
            return;
        }
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.paths.handle(event, &mut self.local, now);
            self.dirty.insert(id);
        }
    }

    fn forget(&mut self, id: HostId) {
        let now = self.now();
        let Some(mut peer) = self.peers.remove(&id) else {
            return;
        };
        peer.paths.close(&mut self.local, now);
        while let Some(action) = peer.paths.poll_action() {
            if let Action::CloseSockets(sockets) = action {
                self.close_sockets(&sockets);
            }
        }
        if let Some(at) = peer.due {
            self.due.remove(&(at, id));
        }
        self.dirty.remove(&id);
        self.endpoint.routes().forget(id);
    }

    fn signal(&mut self, from: HostId, bytes: &[u8]) {
        match signal::decode(bytes) {
            Ok(message) => self.event(from, Event::Message(message)),
            Err(error) => {
                self.refused_signals += 1;
                debug!(peer = %from, %error, "a signal is refused");
            }
        }
    }

    fn probe(&mut self, id: HostId, way: Way, payload: &[u8]) {
        let probe = match Probe::decode(payload) {
            Ok(probe) => probe,
            Err(error) => {
                self.refused_probes += 1;
                return debug!(peer = %id, %error, "a probe is refused");
            }
        };
        if let Way::Direct { socket, address } = way {
            // A connection that knows the host by this address would lose its datagrams. So the
            // address is no path as long as it lives.
            if socket == SocketId::MAIN && self.endpoint.is_connected_at(id, address) {
                return debug!(peer = %id, %address, "a connection without a realm is there");
            }
            self.arrived(id, socket, address);
        }
        self.event(
            id,
            match probe {
                Probe::Probe { id } => Event::Probe { id, on: way },
                Probe::Ack { id, observed } => Event::Ack {
                    id,
                    on: way,
                    observed,
                },
            },
        );
    }

    /// Notes an address from which a peer's datagrams come.
    fn arrived(&mut self, id: HostId, socket: SocketId, address: SocketAddr) {
        let routes = self.endpoint.routes().clone();
        let Some(peer) = self.peer(id) else {
            return;
        };
        let arrival = (socket, address);
        if peer.arrivals.back() != Some(&arrival) {
            peer.arrivals.retain(|other| *other != arrival);
            peer.arrivals.push_back(arrival);
            if peer.arrivals.len() > ARRIVALS_PER_PEER_MAX
                && let Some((socket, address)) = peer.arrivals.pop_front()
            {
                routes.remove_arrival(socket, address);
            }
        }
        // Also if it is known: another peer may have had the address in between.
        routes.add_arrival(id, socket, address);
    }

    /// Carries out all actions, and sets the timers.
    fn settle(&mut self) {
        loop {
            while let Some(action) = self.local.poll_action() {
                self.local_action(action);
            }
            if std::mem::take(&mut self.refresh) {
                let now = self.now();
                for (id, peer) in &mut self.peers {
                    peer.paths.refresh(&mut self.local, now);
                    self.dirty.insert(*id);
                }
                continue;
            }
            let Some(id) = self.dirty.pop_first() else {
                break;
            };
            while let Some(action) = self
                .peers
                .get_mut(&id)
                .and_then(|peer| peer.paths.poll_action())
            {
                self.action(id, action);
            }
            self.schedule(id);
        }
        self.renew_legs();
    }

    fn schedule(&mut self, id: HostId) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let due = peer.paths.poll_timeout(&self.local);
        if peer.due == due {
            return;
        }
        if let Some(at) = std::mem::replace(&mut peer.due, due) {
            self.due.remove(&(at, id));
        }
        self.due.extend(due.map(|at| (at, id)));
    }

    fn local_action(&mut self, action: LocalAction) {
        match action {
            LocalAction::Ask { id, address } => {
                // Without a route the server counts as silent.
                if let Err(error) = self.endpoint.ask(id, address) {
                    debug!(%address, %error, "cannot ask a server for this host's address");
                }
            }
            LocalAction::OpenTcp(server) => self.outside.open_tcp(server),
            LocalAction::CloseTcp(server) => {
                if let Some(relay) = self.relays.get_mut(&server) {
                    relay.tcp = None;
                }
                self.outside.close_tcp(server);
            }
            LocalAction::Refresh => self.refresh = true,
        }
    }

    fn action(&mut self, id: HostId, action: Action) {
        match action {
            Action::Signal { message, via } => {
                let (kind, plan, round) = (&message.kind, &message.plan, message.round);
                debug!(peer = %id, ?kind, ?plan, round, %via, "signals");
                self.outside.signal(id, via, signal::encode(&message));
            }
            Action::Probe { id: probe, on } => self.send(id, on, Probe::Probe { id: probe }),
            Action::Ack {
                id: probe,
                on,
                observed,
            } => {
                let ack = Probe::Ack {
                    id: probe,
                    observed,
                };
                self.send(id, on, ack);
            }
            Action::Use(way) => self.use_way(id, way),
            Action::OpenSockets { count } => {
                debug!(peer = %id, count, "opens sockets for a search");
                let sockets = self.open_sockets(count);
                self.event(id, Event::Sockets(sockets));
            }
            Action::CloseSockets(sockets) => {
                debug!(peer = %id, count = sockets.len(), "closes sockets of a search");
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.arrivals
                        .retain(|(socket, _)| !sockets.contains(socket));
                }
                self.close_sockets(&sockets);
            }
        }
    }

    fn send(&mut self, id: HostId, way: Way, probe: Probe) {
        // A relay may not be reached yet where it is to be probed.
        self.renew_legs();
        if !self.outside.seal_probe(id, way, &probe.encode()) {
            debug!(peer = %id, %way, "a probe is lost: there are no keys, or no way yet");
        }
    }

    fn use_way(&mut self, id: HostId, way: Option<Way>) {
        let now = self.now();
        self.renew_legs();
        self.endpoint.routes().set_way(id, way);
        if let Some(peer) = self.peers.get(&id) {
            info!(peer = %id, "{}", peer.paths.why(&self.local));
        }
        self.ask_for_relay(id, now);
        self.outside.used(id, way);
        self.show();
    }

    /// Asks for the relay session that a peer's way needs, if it is missing.
    fn ask_for_relay(&mut self, id: HostId, now: Duration) {
        let Some(peer) = self.peers.get_mut(&id) else {
            return;
        };
        let Some(Way::Relayed { server }) = peer.paths.used() else {
            return;
        };
        let waits = |(asked, at): (HostId, Duration)| asked == server && now < at + RELAY_ANSWER;
        let open = self.endpoint.routes().session(server, id).is_some();
        if open || peer.asked.is_some_and(waits) {
            return;
        }
        peer.asked = Some((server, now));
        self.outside.open_relay(server, id);
    }

    /// Opens sockets for a search: all, or none.
    fn open_sockets(&self, count: u16) -> Vec<SocketId> {
        let mut sockets = Vec::new();
        for _ in 0..count {
            match self.endpoint.open_socket() {
                Ok(socket) => sockets.push(socket),
                Err(error) => {
                    warn!(%error, "cannot open {count} sockets to search a port of a NAT");
                    self.close_sockets(&sockets);
                    return Vec::new();
                }
            }
        }
        sockets
    }

    fn close_sockets(&self, sockets: &[SocketId]) {
        for socket in sockets {
            self.endpoint.close_socket(*socket);
        }
    }

    /// Tells the routes how each relay is reached, where that has changed.
    fn renew_legs(&mut self) {
        let routes = self.endpoint.routes();
        for (server, relay) in &mut self.relays {
            let leg = match self.local.leg(*server) {
                Some(Leg::Tcp) => relay.tcp.clone().map(RelayLeg::Tcp),
                _ => relay.address.map(RelayLeg::Udp),
            };
            let same = match (&relay.leg, &leg) {
                (Some(RelayLeg::Udp(old)), Some(RelayLeg::Udp(new))) => old == new,
                (Some(RelayLeg::Tcp(old)), Some(RelayLeg::Tcp(new))) => old.same_channel(new),
                (None, None) => true,
                _ => false,
            };
            if !same {
                routes.set_server(*server, leg.clone());
                relay.leg = leg;
            }
        }
    }

    fn show(&self) {
        let peers = self.peers.iter();
        let peers = peers.map(|(id, peer)| status::peer(*id, &peer.paths, &self.local));
        let status = Status {
            mapping: self.local.mapping(),
            udp: self.local.udp(),
            peers: peers.collect(),
            refused_signals: self.refused_signals,
            refused_probes: self.refused_probes,
        };
        self.shown.send_if_modified(|shown| {
            let changed = **shown != status;
            if changed {
                *shown = Arc::new(status);
            }
            changed
        });
    }
}
