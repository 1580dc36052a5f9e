//! One run: the order of events, the faults, and what the owners of the cores do.

use crate::variant::Variant;
use crate::world::{
    Conn, END_MS, HOSTS, HostNode, Item, Node, Packet, QUIET_MS, SERVERS, ServerNode, Stored,
    World, host_id, server_id,
};
use longhaul_protocol::{Generation, HostId};
use longhaul_realm::member::{self, Kept, Member};
use longhaul_realm::protocol::{Broker, LeaseAnswer, Target};
use longhaul_realm::ruleset::{SignedRuleset, StoreId};
use longhaul_realm::server::{self, ConnId, Durable, Server, WriteId};
use longhaul_realm::signed::sign;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

fn address(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8 + 1], 7400))
}

fn number_of(id: HostId) -> Option<usize> {
    (0..HOSTS).find(|host| host_id(*host) == id)
}

impl World {
    pub(crate) fn begin(&mut self) {
        let first = self.first_ruleset(&[0, 1, 2, 3]);
        let signed = sign(&first, &self.key).unwrap().signed().clone();
        self.signed.insert(1, (first, signed.clone()));
        for server in 0..SERVERS {
            self.stores += 1;
            let mut disk = Durable::new(StoreId([server as u8; 16]));
            disk.apply(server::Record::Ruleset(signed.clone()));
            self.servers.push(ServerNode {
                core: None,
                disk,
                backup: None,
                life: 0,
                wake: 0,
            });
            self.at(0, Item::Restart(Node::Server(server)));
        }
        for host in 0..HOSTS {
            let member = host < 4;
            self.hosts.push(HostNode {
                core: None,
                disk: Kept {
                    ruleset: member.then(|| signed.clone()),
                    enrolments: Vec::new(),
                },
                started: member,
                life: 0,
                wake: 0,
                version_durable: u64::from(member),
                version: u64::from(member),
                leases: BTreeMap::new(),
                asked: BTreeSet::new(),
            });
            if member {
                self.after(0, 2000, Item::Restart(Node::Host(host)));
            }
        }
        for item in [Item::Meet, Item::Brokers, Item::Lease, Item::Ask] {
            self.after(1000, 3000, item);
        }
        self.after(10_000, 30_000, Item::Operator);
        self.after(3000, 6000, Item::Evil);
        if !self.plan.calm {
            for _ in 0..20 {
                let node = self.any_node();
                self.after(5000, QUIET_MS, Item::Crash(node));
                self.after(5000, QUIET_MS, Item::Cut);
            }
        }
    }

    fn any_node(&mut self) -> Node {
        match self.rng.below((SERVERS + HOSTS) as u64) as usize {
            server if server < SERVERS => Node::Server(server),
            host => Node::Host(host - SERVERS),
        }
    }

    pub(crate) fn run(&mut self) {
        while self.failure.is_none()
            && let Some(item) = self.next()
        {
            if self.now_ms > END_MS {
                break;
            }
            self.happen(item);
        }
        if self.failure.is_none() {
            self.check_end();
        }
    }

    fn happen(&mut self, item: Item) {
        match item {
            Item::Deliver(conn, to, packet) => self.deliver(conn, to, packet),
            Item::Ended(conn, node) => self.ended(conn, node),
            Item::Dial(host, server, life) => self.dial(host, server, life),
            Item::Wake(node, at_ms) => self.wake(node, at_ms),
            Item::Written(node, life, write, stored) => self.written(node, life, write, stored),
            Item::Crash(node) => self.crash(node),
            Item::Restart(node) => self.restart(node),
            Item::Meet => self.meet(),
            Item::Brokers => self.brokers(),
            Item::Lease => self.lease(),
            Item::Ask => self.ask(),
            Item::Cut => self.part(),
            Item::Operator => self.operator(),
            Item::Evil => {
                self.evil();
                self.after(500, 3000, Item::Evil);
            }
            Item::CheckRemoval(host, version) => self.check_removal(host, version),
        }
    }

    // Cores and their owners.

    fn tell_server(&mut self, server: usize, input: server::Input) {
        let now = self.now(Node::Server(server));
        if let Some(core) = &mut self.servers[server].core {
            core.handle(now, input);
        }
        self.drive_server(server);
    }

    fn tell_host(&mut self, host: usize, input: member::Input) {
        let now = self.now(Node::Host(host));
        if let Some(core) = &mut self.hosts[host].core {
            core.handle(now, input);
        }
        self.drive_host(host);
        self.check_host(host);
    }

    fn drive_server(&mut self, server: usize) {
        let node = Node::Server(server);
        while let Some(action) = self.servers[server]
            .core
            .as_mut()
            .and_then(Server::next_action)
        {
            match action {
                server::Action::Send(conn, message) => {
                    let evil = self.plan.evil == Some(server);
                    let message = match evil {
                        true => self.corrupt(message),
                        false => Some(message),
                    };
                    if let Some(message) = message {
                        self.transmit(self.line(conn), node, Packet::ToHost(message));
                    }
                }
                server::Action::SendBroker(conn, message) => {
                    let withheld = self.plan.evil == Some(server)
                        && matches!(message, Broker::Ruleset(_) | Broker::Enrolments { .. });
                    if !withheld {
                        self.transmit(self.line(conn), node, Packet::Broker(message));
                    }
                }
                server::Action::Close(conn, _) => self.end(self.line(conn), Some(node)),
                server::Action::Persist(write, record) => {
                    let life = self.servers[server].life;
                    self.write(node, life, write, Stored::Server(record));
                }
            }
        }
        let due = self.servers[server]
            .core
            .as_ref()
            .and_then(Server::next_timeout);
        if let Some(due) = due {
            let at = (due.as_millis() as u64).max(self.now_ms + 1);
            if self.servers[server].wake != at {
                self.servers[server].wake = at;
                self.at(at, Item::Wake(node, at));
            }
        }
    }

    fn drive_host(&mut self, host: usize) {
        let node = Node::Host(host);
        let life = self.hosts[host].life;
        while let Some(action) = self.hosts[host].core.as_mut().and_then(Member::next_action) {
            match action {
                member::Action::Connect(entry) => {
                    let server = (0..SERVERS).find(|server| server_id(*server) == entry.id);
                    self.after(5, 60, Item::Dial(host, server.unwrap(), life));
                }
                member::Action::Disconnect(server) => self.hang_up(host, server),
                member::Action::Send(server, message) => {
                    if let Some(conn) = self.line_to(host, server) {
                        self.transmit(conn, node, Packet::ToServer(message));
                    }
                }
                member::Action::Gossip(other, gossip) => {
                    let other = number_of(other).map(Node::Host);
                    let conn = other.and_then(|other| self.conn_of([node, other]));
                    if let Some(conn) = conn.filter(|_| self.variant != Variant::NoGossip) {
                        self.transmit(conn, node, Packet::Gossip(gossip));
                    }
                }
                member::Action::Persist(write, record) => {
                    self.write(node, life, write, Stored::Host(record));
                }
                member::Action::Cut(other, _) => {
                    let other = number_of(other).map(Node::Host);
                    if let Some(conn) = other.and_then(|other| self.conn_of([node, other]))
                        && self.variant != Variant::CutIgnored
                    {
                        self.done.cut += 1;
                        self.end(conn, Some(node));
                    }
                }
                member::Action::Lease(request, answer) => self.leased(host, request, answer),
                member::Action::Introduced { request, peer, .. } => {
                    self.check_introduced(host, peer.id);
                    if let Some(request) = request {
                        self.done.introduced += 1;
                        self.hosts[host].asked.remove(&request);
                    }
                }
                member::Action::RelayOpened { peer, .. } => self.check_introduced(host, peer),
                member::Action::Failed(request, failure) => {
                    self.say(|| format!("host {host}: request {request} failed: {failure}"));
                    self.done.failed += 1;
                    self.hosts[host].asked.remove(&request);
                    self.hosts[host].leases.remove(&request);
                }
                member::Action::Notice(notice) => {
                    if matches!(notice, member::Notice::TokenUsedTwice(_)) {
                        self.done.conflicts += 1;
                    }
                    self.say(|| format!("host {host}: {notice:?}"));
                }
                member::Action::Changed
                | member::Action::Signal(..)
                | member::Action::RelayClosed(..) => {}
            }
        }
        if let Some(core) = &self.hosts[host].core {
            let at = (core.next_timeout().as_millis() as u64).max(self.now_ms + 1);
            if self.hosts[host].wake != at {
                self.hosts[host].wake = at;
                self.at(at, Item::Wake(node, at));
            }
        }
    }

    fn wake(&mut self, node: Node, at_ms: u64) {
        match node {
            Node::Server(server) if self.servers[server].wake == at_ms => {
                self.servers[server].wake = 0;
                self.tell_server(server, server::Input::Timeout);
            }
            Node::Host(host) if self.hosts[host].wake == at_ms => {
                self.hosts[host].wake = 0;
                if self.variant != Variant::NoTimeouts || self.now_ms < 20_000 {
                    self.tell_host(host, member::Input::Timeout);
                }
            }
            _ => {}
        }
    }

    // Connections.

    fn line_to(&self, host: usize, server: HostId) -> Option<u64> {
        let server = (0..SERVERS).find(|number| server_id(*number) == server)?;
        self.conn_of([Node::Host(host), Node::Server(server)])
    }

    fn hang_up(&mut self, host: usize, server: HostId) {
        if let Some(conn) = self.line_to(host, server) {
            self.end(conn, Some(Node::Host(host)));
        }
    }

    fn dial(&mut self, host: usize, server: usize, life: u64) {
        if self.hosts[host].life != life || !self.is_up(Node::Host(host)) {
            return;
        }
        let ends = [Node::Host(host), Node::Server(server)];
        if !self.reach(ends) {
            return self.tell_host(host, member::Input::Disconnected(server_id(server)));
        }
        let conn = self.connect(ends);
        let input = server::Input::Connected {
            conn: ConnId(conn),
            host: host_id(host),
            observed: address(host),
            by_udp: true,
            rtt_ms: 60,
        };
        self.tell_server(server, input);
        self.tell_host(host, member::Input::Connected(server_id(server)));
    }

    /// An operator's tool gives a ruleset to a server.
    pub(crate) fn upload(&mut self, server: usize, ruleset: SignedRuleset) {
        let conn = self.connect([Node::Host(HOSTS), Node::Server(server)]);
        let input = server::Input::Connected {
            conn: ConnId(conn),
            host: HostId([250; 32]),
            observed: address(100),
            by_udp: true,
            rtt_ms: 60,
        };
        self.tell_server(server, input);
        let message = longhaul_realm::protocol::ToServer::Ruleset(ruleset);
        self.tell_server(server, server::Input::Message(ConnId(conn), message));
        self.tell_server(server, server::Input::Closed(ConnId(conn)));
        self.conns[conn as usize].alive = false;
    }

    fn deliver(&mut self, conn: u64, to: Node, packet: Packet) {
        let line = &self.conns[conn as usize];
        if !line.alive || !self.is_up(to) {
            return;
        }
        let from = line.ends[usize::from(line.ends[0] == to)];
        match (from, to, packet) {
            (_, Node::Server(server), Packet::ToServer(message)) => {
                self.tell_server(server, server::Input::Message(ConnId(conn), message));
            }
            (_, Node::Server(server), Packet::Broker(message)) => {
                self.tell_server(server, server::Input::Broker(ConnId(conn), message));
            }
            (Node::Server(server), Node::Host(host), Packet::ToHost(message)) => {
                self.tell_host(host, member::Input::Message(server_id(server), message));
            }
            (Node::Host(other), Node::Host(host), Packet::Gossip(gossip)) => {
                self.tell_host(host, member::Input::Gossip(host_id(other), gossip));
            }
            _ => panic!("a packet at the wrong end"),
        }
    }

    fn ended(&mut self, conn: u64, node: Node) {
        if !self.is_up(node) {
            return;
        }
        let Conn { ends, .. } = self.conns[conn as usize];
        let other = ends[usize::from(ends[0] == node)];
        // What belongs to an earlier connection is noticed late.
        let replaced = self.conn_of(ends).is_some();
        match (node, other) {
            (Node::Server(server), _) => {
                self.tell_server(server, server::Input::Closed(ConnId(conn)));
            }
            (Node::Host(host), Node::Server(server)) if !replaced => {
                self.tell_host(host, member::Input::Disconnected(server_id(server)));
            }
            (Node::Host(host), Node::Host(other)) if !replaced => {
                self.tell_host(host, member::Input::PeerDisconnected(host_id(other)));
            }
            (Node::Host(_), _) => {}
        }
    }

    /// Hosts connect to each other, as far as both allow it.
    fn meet(&mut self) {
        self.after(300, 1500, Item::Meet);
        let (a, b) = (self.rng.below(7) as usize, self.rng.below(7) as usize);
        let ends = [Node::Host(a), Node::Host(b)];
        if a == b || !self.reach(ends) || self.conn_of(ends).is_some() {
            return;
        }
        let allows = |from: usize, to: usize| {
            let core = self.hosts[from].core.as_ref().unwrap();
            let now = self.now(Node::Host(from));
            core.may_connect(host_id(to), now).is_member()
        };
        if allows(a, b) && allows(b, a) {
            self.connect(ends);
            self.tell_host(a, member::Input::PeerConnected(host_id(b)));
            self.tell_host(b, member::Input::PeerConnected(host_id(a)));
        }
    }

    fn brokers(&mut self) {
        self.after(500, 2000, Item::Brokers);
        let ends = [Node::Server(0), Node::Server(1)];
        if !self.reach(ends) || self.conn_of(ends).is_some() {
            return;
        }
        let conn = self.connect(ends);
        for (server, other) in [(0, 1), (1, 0)] {
            let input = server::Input::ServerConnected {
                conn: ConnId(conn),
                server: server_id(other),
                rtt_ms: 60,
            };
            self.tell_server(server, input);
        }
    }

    // Requests.

    fn ask(&mut self) {
        self.after(500, 4000, Item::Ask);
        let (host, other) = (self.rng.below(7) as usize, self.rng.below(7) as usize);
        if self.is_up(Node::Host(host)) && self.now_ms < END_MS - 40_000 {
            let request = self.rng.next() as u32;
            self.hosts[host].asked.insert(request);
            let target = match self.rng.one_in(2) {
                true => Target::Id(host_id(other)),
                false => Target::Name(format!("host-{other}")),
            };
            let input = match self.rng.one_in(4) {
                true => member::Input::OpenRelay {
                    request,
                    server: server_id(self.rng.below(SERVERS as u64) as usize),
                    peer: host_id(other),
                },
                false => member::Input::Introduce(request, target),
            };
            let relay = matches!(input, member::Input::OpenRelay { .. });
            if relay {
                self.hosts[host].asked.remove(&request);
            }
            self.tell_host(host, input);
        }
    }

    /// Hosts want leases of two guests; generations grow slowly.
    fn lease(&mut self) {
        self.after(200, 1000, Item::Lease);
        let host = self.rng.below(4) as usize;
        let guest = format!("guest-{}", self.rng.below(2));
        let generation = Generation(1 + self.now_ms / 30_000 + self.rng.below(2));
        let ruleset = self.hosts[host]
            .core
            .as_ref()
            .and_then(|c| c.membership().ruleset());
        let Some(arbiter) = ruleset.and_then(|ruleset| ruleset.arbiter) else {
            return;
        };
        let handover = (guest.clone(), generation);
        let agreed = *self.agreed.entry(handover).or_insert(arbiter.store);
        let store = match self.variant {
            Variant::StoreOfTheDay => arbiter.store,
            _ => agreed,
        };
        let request = self.rng.next() as u32;
        let acquire = !self.rng.one_in(4);
        let leases = &mut self.hosts[host].leases;
        leases.insert(request, (guest.clone(), generation, acquire));
        let input = match acquire {
            true => member::Input::AcquireLease(request, store, guest, generation),
            false => member::Input::ReleaseLease(request, store, guest, generation),
        };
        self.tell_host(host, input);
    }

    fn leased(&mut self, host: usize, request: u32, answer: LeaseAnswer) {
        let Some((guest, generation, _)) = self.hosts[host].leases.remove(&request) else {
            return self.fail("a lease that nobody asked for");
        };
        match answer {
            LeaseAnswer::Granted { .. } => {
                self.done.granted += 1;
                let has = *self.granted.entry((guest, generation)).or_insert(host);
                if has != host {
                    self.fail("one lease was given to two hosts");
                }
            }
            LeaseAnswer::Refused { .. } => self.done.refused += 1,
            LeaseAnswer::Released => {}
        }
    }

    // Disks and faults.

    fn written(&mut self, node: Node, life: u64, write: WriteId, stored: Stored) {
        let fails = self.plan.writes_fail > 0
            && self.now_ms < QUIET_MS
            && self.rng.one_in(self.plan.writes_fail);
        let reaches = !fails || self.rng.one_in(2);
        match (node, stored) {
            (Node::Server(server), Stored::Server(record)) if self.servers[server].life == life => {
                if reaches && self.variant != Variant::ServerRecordsVolatile {
                    self.servers[server].disk.apply(record);
                }
                self.tell_server(
                    server,
                    match fails {
                        true => server::Input::PersistFailed(write),
                        false => server::Input::Persisted(write),
                    },
                );
            }
            (Node::Host(host), Stored::Host(record)) if self.hosts[host].life == life => {
                if let (false, member::Record::Ruleset(ruleset)) = (fails, &record) {
                    let content = ruleset.verify(self.realm).unwrap().content().version;
                    let durable = &mut self.hosts[host].version_durable;
                    *durable = (*durable).max(content);
                }
                if reaches && self.variant != Variant::HostRecordsVolatile {
                    self.hosts[host].disk.apply(record);
                }
                self.tell_host(
                    host,
                    match fails {
                        true => member::Input::PersistFailed(write),
                        false => member::Input::Persisted(write),
                    },
                );
            }
            _ => {}
        }
    }

    fn crash(&mut self, node: Node) {
        if !self.is_up(node) {
            return;
        }
        self.done.crashes += 1;
        self.say(|| format!("{node:?} crashes"));
        match node {
            Node::Server(server) => {
                let restored = server == 0 && self.plan.restored && self.now_ms > 150_000;
                let place = &mut self.servers[server];
                place.core = None;
                place.life += 1;
                if server == 0 && place.backup.is_none() {
                    place.backup = Some(place.disk.clone());
                } else if let Some(backup) = place.backup.clone().filter(|_| restored) {
                    self.plan.restored = false;
                    place.disk = backup;
                    if self.variant != Variant::BackupKeepsStore {
                        self.stores += 1;
                        place.disk.store = StoreId([self.stores; 16]);
                    }
                    self.say(|| "its store is restored from a backup".to_owned());
                }
            }
            Node::Host(host) => {
                self.hosts[host].core = None;
                self.hosts[host].life += 1;
                self.hosts[host].leases.clear();
                self.hosts[host].asked.clear();
            }
        }
        self.end_all(|ends| ends.contains(&node), Some(node));
        self.after(100, 20_000, Item::Restart(node));
    }

    fn restart(&mut self, node: Node) {
        if self.is_up(node) {
            return;
        }
        self.say(|| format!("{node:?} starts"));
        let (now, seed) = (self.now(node), self.rng.next());
        match node {
            Node::Server(server) => {
                let config = server::Config {
                    id: server_id(server),
                    realms: vec![self.realm],
                    limits: server::Limits::default(),
                };
                let core = Server::new(config, &self.servers[server].disk, seed, now);
                self.servers[server].core = Some(core.unwrap());
                self.drive_server(server);
            }
            Node::Host(host) => {
                let config = member::Config {
                    host: host_id(host),
                    realm: self.realm,
                    servers: crate::operator::servers(),
                    ttl_s: 60,
                };
                let core = Member::new(config, &self.hosts[host].disk, seed, now).unwrap();
                let version = core.membership().version();
                self.hosts[host].core = Some(core);
                self.hosts[host].version = version;
                if version < self.hosts[host].version_durable {
                    self.fail("a restart put an older ruleset in force");
                }
                self.drive_host(host);
            }
        }
    }

    /// Two nodes do not reach each other for a while.
    fn part(&mut self) {
        let (a, b) = (self.any_node(), self.any_node());
        let until = self.now_ms + self.rng.between(1000, 60_000);
        self.say(|| format!("{a:?} and {b:?} are parted until {until}"));
        for ends in [[a, b], [b, a]] {
            self.parted.insert(ends, until);
        }
        self.end_all(|ends| ends.contains(&a) && ends.contains(&b), None);
    }
}
