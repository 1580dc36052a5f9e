//! Two hosts, their agents, servers, and everything under way between them.

use crate::net::{Net, PORT, Target, Transit, server_addresses};
use crate::plan::{Fault, Plan};
use crate::random::{Rng, ms};
use crate::variant::Variant;
use longhaul_paths::{
    Action, Config, Event, Kind, Leg, Local, LocalAction, LocalEvent, Message, Offer, Paths, Route,
    ServerConfig, SocketId,
};
use longhaul_protocol::HostId;
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

pub(crate) fn server_id(server: usize) -> HostId {
    HostId([100 + server as u8; 32])
}

pub(crate) fn server_index(id: HostId) -> usize {
    usize::from(id.0[0]) - 100
}

#[derive(Debug, Clone)]
pub(crate) enum Packet {
    Probe(u64),
    Ack(u64, Option<SocketAddr>),
    Data,
}

#[derive(Debug, Clone)]
pub(crate) enum Item {
    /// A host's timers are due.
    Wake(usize),
    /// A sealed datagram, with the agents whose keys it needs.
    Datagram(usize, [u32; 2], Route, Packet),
    /// One that arrives at the receiver's NATs.
    Transit(usize, [u32; 2], Transit, Packet),
    Message(usize, Box<Message>),
    Answer(usize, u32, u64, SocketAddr, SocketAddr),
    Tcp(usize, u32, usize, bool),
    Sockets(usize, u32, Vec<SocketId>),
    Fault(Fault),
    /// Registrations are renewed, and invariants checked.
    Tick,
    Data(usize),
}

pub(crate) struct Host {
    pub(crate) local: Local,
    pub(crate) paths: Paths,
    /// Counts the agents of this host.
    pub(crate) agent: u32,
    pub(crate) tcp: [bool; 3],
    pub(crate) attached: [bool; 3],
    pub(crate) told_present: [bool; 3],
    pub(crate) wake: Option<Duration>,
    pub(crate) next_socket: u32,
    pub(crate) used: Option<Route>,
    /// Acknowledgements that really came from where the probe went.
    pub(crate) acks: BTreeMap<Route, u32>,
    pub(crate) probes: BTreeMap<u64, Route>,
    pub(crate) first_offer: Option<Offer>,
    pub(crate) sent: VecDeque<Duration>,
    pub(crate) sent_late: u32,
    pub(crate) changes: u32,
    pub(crate) demotions: u32,
    pub(crate) broken_since: Option<Duration>,
    pub(crate) data_until: Duration,
    pub(crate) replay_until: Duration,
}

pub(crate) struct Server {
    pub(crate) alive: bool,
    pub(crate) registered: [bool; 2],
    pub(crate) overloaded_until: Duration,
    pub(crate) ok_since: Option<Duration>,
}

pub(crate) struct World {
    pub(crate) now: Duration,
    pub(crate) rng: Rng,
    pub(crate) plan: Plan,
    pub(crate) variant: Variant,
    pub(crate) net: Net,
    pub(crate) hosts: [Host; 2],
    pub(crate) servers: Vec<Server>,
    pub(crate) cut_until: Duration,
    /// When an agent was last restarted.
    pub(crate) restarted_at: Option<Duration>,
    queue: BTreeMap<(Duration, u64), Item>,
    count: u64,
    spins: (Duration, u32),
    pub(crate) failure: Option<String>,
    pub(crate) trace: Option<Vec<String>>,
    pub(crate) datagrams: u64,
    pub(crate) searched: bool,
    /// The trace has every direct datagram.
    pub(crate) chatty: bool,
}

fn agent(host: usize, plan: &Plan, variant: Variant, seed: u64, now: Duration) -> (Local, Paths) {
    let servers = (0..plan.servers).map(|server| ServerConfig {
        id: server_id(server),
        name: format!("server-{server}"),
        addresses: server_addresses(server).to_vec(),
        relays: true,
        tcp: true,
    });
    let local = Local::new(servers.collect(), seed, variant.tuning(), now);
    let paths = Paths::new(Config {
        own: HostId([1 + host as u8; 32]),
        peer: HostId([2 - host as u8; 32]),
        seed: seed ^ 0x5a5a,
        may_search: true,
    });
    (local, paths)
}

impl World {
    pub(crate) fn new(plan: Plan, mut rng: Rng, variant: Variant, traced: bool) -> Self {
        let hosts = [0, 1].map(|host| {
            let (local, paths) = agent(host, &plan, variant, rng.next(), Duration::ZERO);
            Host {
                local,
                paths,
                agent: 1,
                tcp: [false; 3],
                attached: [false; 3],
                told_present: [false; 3],
                wake: None,
                next_socket: 1,
                used: None,
                acks: BTreeMap::new(),
                probes: BTreeMap::new(),
                first_offer: None,
                sent: VecDeque::new(),
                sent_late: 0,
                changes: 0,
                demotions: 0,
                broken_since: None,
                data_until: Duration::ZERO,
                replay_until: if rng.one_in(4) {
                    ms(5000)
                } else {
                    Duration::ZERO
                },
            }
        });
        let server = |_| Server {
            alive: true,
            registered: [false; 2],
            overloaded_until: Duration::ZERO,
            ok_since: None,
        };
        let mut world = Self {
            now: Duration::ZERO,
            net: Net::new(&plan),
            servers: (0..plan.servers).map(server).collect(),
            rng,
            variant,
            hosts,
            cut_until: Duration::ZERO,
            restarted_at: None,
            queue: BTreeMap::new(),
            count: 0,
            spins: (Duration::ZERO, 0),
            failure: None,
            trace: traced.then(Vec::new),
            datagrams: 0,
            searched: false,
            chatty: std::env::var_os("LONGHAUL_DATAGRAMS").is_some(),
            plan,
        };
        for (at, fault) in world.plan.faults.clone() {
            world.at(at, Item::Fault(fault));
        }
        for host in 0..2 {
            world.net.open(host, SocketId::MAIN, PORT);
            let addresses = world.net.places[host].addresses();
            world.tell_local(host, LocalEvent::Addresses(addresses));
        }
        world.at(ms(100), Item::Tick);
        world
    }

    // Time.

    pub(crate) fn at(&mut self, time: Duration, item: Item) {
        self.count += 1;
        self.queue.insert((time.max(self.now), self.count), item);
    }

    pub(crate) fn next(&mut self) -> Option<Item> {
        let ((time, _), item) = self.queue.pop_first()?;
        self.now = time;
        self.spins = match self.spins {
            (at, spins) if at == time => (at, spins + 1),
            _ => (time, 0),
        };
        if self.spins.1 > 5000 {
            self.fail("time does not go on");
        }
        Some(item)
    }

    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        let now = self.now.as_secs_f64();
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:9.4} {}", text()));
        }
    }

    pub(crate) fn fail(&mut self, text: &str) {
        if self.failure.is_none() {
            self.note(|| format!("FAILED: {text}"));
            self.failure = Some(format!("{:.3} s: {text}", self.now.as_secs_f64()));
        }
    }

    pub(crate) fn delay(&mut self, host: usize) -> Duration {
        let site = self.net.places[host].site;
        let jitter = self.rng.below(1000 * self.plan.jitter_ms);
        ms(self.plan.sites[site].delay_ms) + Duration::from_micros(jitter)
    }

    pub(crate) fn server_delay(&mut self, host: usize, server: usize) -> Duration {
        self.delay(host) + ms(self.plan.server_delay_ms[server])
    }

    fn is_lost(&mut self) -> bool {
        self.rng.below(1000) < self.plan.loss_permille
    }

    // The cores.

    pub(crate) fn tell_local(&mut self, host: usize, event: LocalEvent) {
        let now = self.now;
        self.hosts[host].local.handle(event, now);
        self.act(host);
    }

    pub(crate) fn tell(&mut self, host: usize, event: Event) {
        let now = self.now;
        let it = &mut self.hosts[host];
        it.paths.handle(event, &mut it.local, now);
        self.act(host);
    }

    pub(crate) fn wake(&mut self, host: usize) {
        let now = self.now;
        let it = &mut self.hosts[host];
        if it.wake.is_some_and(|at| at <= now) {
            it.wake = None;
        }
        if it.local.poll_timeout().is_some_and(|at| at <= now) {
            it.local.handle_timeout(now);
        }
        if it.paths.poll_timeout(&it.local).is_some_and(|at| at <= now) {
            it.paths.handle_timeout(&mut it.local, now);
        }
        self.act(host);
    }

    /// Carries out all actions of a host, and sets its timer.
    pub(crate) fn act(&mut self, host: usize) {
        let now = self.now;
        loop {
            if let Some(action) = self.hosts[host].local.poll_action() {
                self.local_action(host, action);
            } else if let Some(action) = self.hosts[host].paths.poll_action() {
                self.action(host, action);
            } else {
                break;
            }
        }
        let it = &mut self.hosts[host];
        if it.paths.outstanding() > longhaul_paths::tuning::PROBES_MAX
            || it.paths.pairs() > longhaul_paths::tuning::PAIRS_MAX
        {
            self.fail("a table has no bound");
            return;
        }
        let times = [it.local.poll_timeout(), it.paths.poll_timeout(&it.local)];
        let Some(due) = times.into_iter().flatten().min() else {
            return;
        };
        if it.wake.is_none_or(|at| due < at) {
            let due = due.max(now);
            it.wake = Some(due);
            self.at(due, Item::Wake(host));
        }
    }

    fn local_action(&mut self, host: usize, action: LocalAction) {
        match action {
            LocalAction::Ask { id, address } => {
                self.count_datagram(host);
                let rng = &mut self.rng.clone();
                let sent = self
                    .net
                    .depart(host, SocketId::MAIN, address, self.now, Some(rng));
                self.rng = rng.clone();
                let passed = sent.and_then(|transit| self.net.arrive(transit, self.now, true));
                if let Some((Target::Server(server), mapped)) = passed
                    && server < self.servers.len()
                    && self.servers[server].alive
                    && !self.is_lost()
                {
                    let time = self.now + self.server_delay(host, server) * 2;
                    let agent = self.hosts[host].agent;
                    self.at(time, Item::Answer(host, agent, id, address, mapped));
                }
            }
            LocalAction::OpenTcp(id) => {
                if self.variant == Variant::NoTcp {
                    return;
                }
                let server = server_index(id);
                let alive = self.servers[server].alive;
                let time = self.now + self.server_delay(host, server) * 4;
                let time = if alive { time } else { time + ms(3000) };
                let agent = self.hosts[host].agent;
                self.at(time, Item::Tcp(host, agent, server, alive));
            }
            LocalAction::CloseTcp(id) => self.hosts[host].tcp[server_index(id)] = false,
            LocalAction::Refresh => {
                let it = &mut self.hosts[host];
                it.paths.refresh(&mut it.local, self.now);
            }
        }
    }

    fn action(&mut self, host: usize, action: Action) {
        if let Action::Use(_) | Action::Signal { .. } = &action {
            self.note(|| format!("{host}: {action:?}"));
        }
        match action {
            Action::Signal { message, via } => self.signal(host, message, via),
            Action::Probe { id, on } => {
                self.hosts[host].probes.insert(id, on);
                self.send(host, on, Packet::Probe(id));
            }
            Action::Ack { id, on, observed } => self.send(host, on, Packet::Ack(id, observed)),
            Action::Use(used) => self.used(host, used),
            Action::OpenSockets { count } => {
                self.searched = true;
                let count = match self.variant {
                    Variant::NoSearch => 0,
                    _ => u32::from(count),
                };
                let it = &mut self.hosts[host];
                let first = it.next_socket;
                it.next_socket += count;
                let agent = it.agent;
                let sockets = (first..first + count).map(SocketId).collect::<Vec<_>>();
                for socket in &sockets {
                    let port = 20_000 + (socket.0 % 40_000) as u16;
                    self.net.open(host, *socket, port);
                }
                self.at(self.now + ms(20), Item::Sockets(host, agent, sockets));
            }
            Action::CloseSockets(sockets) => {
                if self.variant != Variant::SocketsStayOpen {
                    for socket in sockets {
                        self.net.close(host, socket);
                    }
                }
            }
        }
    }

    fn signal(&mut self, host: usize, mut message: Message, via: Route) {
        let it = &mut self.hosts[host];
        if self.variant == Variant::NewsIgnored && self.now > ms(3000) {
            message.offer = it.first_offer.get_or_insert(message.offer).clone();
        }
        let other = 1 - host;
        let delay = match via {
            Route::Relayed { server } => {
                let server = server_index(server);
                if !self.passes_server(host, server) {
                    return;
                }
                self.server_delay(host, server) + self.server_delay(other, server)
            }
            Route::Direct { .. } => {
                if !self.works(host, via) {
                    return;
                }
                self.delay(host) + self.delay(other)
            }
        };
        let late = match (self.variant, message.kind) {
            (Variant::NoSharedStart, Kind::Answer { .. }) => ms(300),
            _ => Duration::ZERO,
        };
        if !self.is_lost() {
            self.at(
                self.now + delay + late,
                Item::Message(other, Box::new(message)),
            );
        }
    }

    /// Returns whether a server passes something on from this host to the other one.
    pub(crate) fn passes_server(&mut self, host: usize, server: usize) -> bool {
        let state = &self.servers[server];
        if !state.alive || state.registered != [true; 2] {
            return false;
        }
        [host, 1 - host]
            .into_iter()
            .all(|host| self.reaches(host, server))
    }

    /// Returns whether a host has a way to a server that works in both directions.
    fn reaches(&mut self, host: usize, server: usize) -> bool {
        match self.hosts[host].local.leg(server_id(server)) {
            None => false,
            Some(Leg::Tcp) => self.hosts[host].tcp[server],
            Some(Leg::Udp) => server_addresses(server).into_iter().any(|address| {
                let passed = self.net.peek(host, SocketId::MAIN, address, self.now);
                passed.is_some_and(|(target, _)| target == Target::Server(server))
            }),
        }
    }

    pub(crate) fn count_datagram(&mut self, host: usize) {
        let now = self.now;
        self.datagrams += 1;
        let it = &mut self.hosts[host];
        it.sent_late += 1;
        it.sent.push_back(now);
        while it.sent.front().is_some_and(|at| *at + ms(1000) < now) {
            it.sent.pop_front();
        }
        if it.sent.len() > crate::run::RATE_MAX {
            self.fail("more datagrams in a second than allowed");
        }
    }

    /// Sends a sealed datagram.
    pub(crate) fn send(&mut self, host: usize, on: Route, packet: Packet) {
        if !matches!(packet, Packet::Data) {
            self.count_datagram(host);
        }
        let other = 1 - host;
        let keys = [self.hosts[0].agent, self.hosts[1].agent];
        match on {
            Route::Relayed { server } => {
                let index = server_index(server);
                let overloaded = self.now < self.servers[index].overloaded_until;
                if overloaded || !self.passes_server(host, index) || self.is_lost() {
                    return;
                }
                let delay = self.server_delay(host, index) + self.server_delay(other, index);
                self.at(self.now + delay, Item::Datagram(other, keys, on, packet));
            }
            Route::Direct { socket, address } => {
                let rng = &mut self.rng.clone();
                let sent = self.net.depart(host, socket, address, self.now, Some(rng));
                self.rng = rng.clone();
                if self.chatty {
                    self.note(|| format!("{host}: {packet:?} to {on}: {sent:?}"));
                }
                let Some(transit) = sent else {
                    return;
                };
                if self.is_lost() || self.now < self.cut_until {
                    return;
                }
                let delay = match self.net.are_near(address) {
                    true => ms(1),
                    false => self.delay(host) + self.delay(other),
                };
                self.at(self.now + delay, Item::Transit(host, keys, transit, packet));
            }
        }
    }

    /// Returns whether a way works now, in both directions.
    pub(crate) fn works(&mut self, host: usize, on: Route) -> bool {
        match on {
            Route::Relayed { server } => {
                let index = server_index(server);
                self.now >= self.servers[index].overloaded_until && self.passes_server(host, index)
            }
            Route::Direct { socket, address } => {
                let there = self.net.peek(host, socket, address, self.now);
                let Some((Target::Host(to, at), from)) = there else {
                    return false;
                };
                let back = self.net.peek(to, at, from, self.now);
                let returns = back.is_some_and(|(target, _)| target == Target::Host(host, socket));
                to != host && returns && self.now >= self.cut_until
            }
        }
    }

    pub(crate) fn restart(&mut self, host: usize) {
        let seed = self.rng.next();
        let (local, paths) = agent(host, &self.plan, self.variant, seed, self.now);
        self.restarted_at = Some(self.now);
        let it = &mut self.hosts[host];
        it.local = local;
        it.paths = paths;
        it.agent += 1;
        it.tcp = [false; 3];
        it.attached = [false; 3];
        it.told_present = [false; 3];
        it.used = None;
        it.acks.clear();
        it.probes.clear();
        it.first_offer = None;
        it.broken_since = None;
        it.wake = None;
        let open = self.net.places[host]
            .ports
            .keys()
            .copied()
            .collect::<Vec<_>>();
        for socket in open {
            if socket != SocketId::MAIN {
                self.net.close(host, socket);
            }
        }
        for server in &mut self.servers {
            server.registered[host] = false;
        }
        let addresses = self.net.places[host].addresses();
        self.tell_local(host, LocalEvent::Addresses(addresses));
    }
}
