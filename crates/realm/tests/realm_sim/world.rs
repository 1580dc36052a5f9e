//! The simulated world: nodes, disks, connections, the queue of events.

use crate::variant::Variant;
use longhaul_protocol::{Generation, HostId};
use longhaul_realm::Now;
use longhaul_realm::enrolment::{Enrolment, TokenId};
use longhaul_realm::key::{RealmId, SigningKey};
use longhaul_realm::member::{self, Kept, Member};
use longhaul_realm::protocol::{Broker, Gossip, ToHost, ToServer};
use longhaul_realm::ruleset::{Ruleset, SignedRuleset, StoreId};
use longhaul_realm::server::{self, ConnId, Durable, Server, WriteId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const START_S: u64 = 1_800_000_000;
/// Faults end here.
pub(crate) const QUIET_MS: u64 = 500_000;
/// A run ends here: longer than the longest wait of a retry later.
pub(crate) const END_MS: u64 = 700_000;
pub(crate) const SERVERS: usize = 2;
/// Two of them join by tokens, the last one is a thief of a token.
pub(crate) const HOSTS: usize = 7;

/// SplitMix64.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(crate) fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What a run is about, from its seed.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Whether nothing fails: then removals are in force within seconds.
    pub(crate) calm: bool,
    /// The server that somebody has broken into. It is never the arbiter.
    pub(crate) evil: Option<usize>,
    /// The host that reaches no honest server.
    pub(crate) cut_off: Option<usize>,
    /// One of this number of writes fails; 0 for none.
    pub(crate) writes_fail: u64,
    /// Whether two hosts use one token.
    pub(crate) thief: bool,
    /// Whether the arbiter moves to the other server.
    pub(crate) arbiter_moves: bool,
    /// Whether the arbiter's store is restored from a backup.
    pub(crate) restored: bool,
    /// How far each host's clock is off, in seconds.
    pub(crate) clocks: Vec<i64>,
}

#[derive(Debug, Clone)]
pub(crate) enum Packet {
    ToServer(ToServer),
    ToHost(ToHost),
    Broker(Broker),
    Gossip(Gossip),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Node {
    Server(usize),
    Host(usize),
}

pub(crate) enum Item {
    Deliver(u64, Node, Packet),
    Ended(u64, Node),
    Dial(usize, usize, u64),
    Wake(Node, u64),
    Written(Node, u64, WriteId, Stored),
    Crash(Node),
    Restart(Node),
    Meet,
    Brokers,
    Lease,
    Ask,
    Cut,
    Operator,
    Evil,
    CheckRemoval(usize, u64),
}

pub(crate) enum Stored {
    Server(server::Record),
    Host(member::Record),
}

/// A connection of two nodes.
pub(crate) struct Conn {
    pub(crate) ends: [Node; 2],
    pub(crate) alive: bool,
    pub(crate) since_ms: u64,
    last: [u64; 2],
}

pub(crate) struct ServerNode {
    pub(crate) core: Option<Server>,
    pub(crate) disk: Durable,
    pub(crate) backup: Option<Durable>,
    /// Counts starts: what belongs to an earlier one is void.
    pub(crate) life: u64,
    pub(crate) wake: u64,
}

pub(crate) struct HostNode {
    pub(crate) core: Option<Member>,
    pub(crate) disk: Kept,
    pub(crate) started: bool,
    pub(crate) life: u64,
    pub(crate) wake: u64,
    /// The version that the disk has confirmed.
    pub(crate) version_durable: u64,
    pub(crate) version: u64,
    pub(crate) leases: BTreeMap<u32, (String, Generation, bool)>,
    pub(crate) asked: BTreeSet<u32>,
}

/// What happened, to see that runs reach something.
#[derive(Debug, Default, Clone)]
pub(crate) struct Done {
    pub(crate) removed: u64,
    pub(crate) joined: u64,
    pub(crate) granted: u64,
    pub(crate) refused: u64,
    pub(crate) introduced: u64,
    pub(crate) failed: u64,
    pub(crate) conflicts: u64,
    pub(crate) crashes: u64,
    pub(crate) cut: u64,
    pub(crate) forged: u64,
}

impl Done {
    pub(crate) fn add(&mut self, other: &Done) {
        self.removed += other.removed;
        self.joined += other.joined;
        self.granted += other.granted;
        self.refused += other.refused;
        self.introduced += other.introduced;
        self.failed += other.failed;
        self.conflicts += other.conflicts;
        self.crashes += other.crashes;
        self.cut += other.cut;
        self.forged += other.forged;
    }
}

pub(crate) struct World {
    pub(crate) variant: Variant,
    pub(crate) plan: Plan,
    pub(crate) rng: Rng,
    pub(crate) now_ms: u64,
    queue: BTreeMap<(u64, u64), Item>,
    number: u64,
    pub(crate) servers: Vec<ServerNode>,
    pub(crate) hosts: Vec<HostNode>,
    pub(crate) conns: Vec<Conn>,
    /// Pairs that cannot reach each other until then.
    pub(crate) parted: BTreeMap<[Node; 2], u64>,
    pub(crate) key: SigningKey,
    pub(crate) realm: RealmId,
    /// All that the operator signed, by version.
    pub(crate) signed: BTreeMap<u64, (Ruleset, SignedRuleset)>,
    /// All enrolments that holders of tokens signed.
    pub(crate) enrolled: BTreeSet<(TokenId, HostId)>,
    pub(crate) seen_enrolments: Vec<Enrolment>,
    /// When the last write of a node is over: writes are in order.
    pub(crate) written_ms: BTreeMap<Node, u64>,
    pub(crate) secret: Option<[u8; 32]>,
    /// The version that removed a host.
    pub(crate) removed: BTreeMap<HostId, u64>,
    /// The store that both ends of a handover agreed on.
    pub(crate) agreed: BTreeMap<(String, Generation), StoreId>,
    pub(crate) granted: BTreeMap<(String, Generation), usize>,
    pub(crate) failure: Option<String>,
    pub(crate) trace: Vec<String>,
    pub(crate) traced: bool,
    pub(crate) done: Done,
    pub(crate) stores: u8,
}

pub(crate) fn host_id(host: usize) -> HostId {
    HostId([host as u8 + 1; 32])
}

pub(crate) fn server_id(server: usize) -> HostId {
    HostId([server as u8 + 100; 32])
}

/// A host of the attacker's.
pub(crate) fn evil_id() -> HostId {
    HostId([66; 32])
}

impl World {
    pub(crate) fn new(seed: u64, variant: Variant, traced: bool) -> Self {
        let mut rng = Rng(seed.wrapping_mul(0x5851_f42d_4c95_7f2d));
        let evil = rng.one_in(2).then_some(1);
        let calm = rng.one_in(2);
        let plan = Plan {
            calm,
            evil,
            cut_off: rng.one_in(4).then(|| rng.below(3) as usize + 1),
            writes_fail: if calm {
                0
            } else {
                [0, 4, 10, 30][rng.below(4) as usize]
            },
            thief: rng.one_in(3),
            arbiter_moves: evil.is_none() && rng.one_in(3),
            restored: !calm && rng.one_in(2),
            clocks: (0..HOSTS).map(|_| rng.below(200) as i64 - 100).collect(),
        };
        let key = SigningKey::from_seed(&[1; 32]).unwrap();
        let realm = key.public().realm();
        let mut world = Self {
            variant,
            plan,
            rng,
            now_ms: 0,
            queue: BTreeMap::new(),
            number: 0,
            servers: Vec::new(),
            hosts: Vec::new(),
            conns: Vec::new(),
            parted: BTreeMap::new(),
            key,
            realm,
            signed: BTreeMap::new(),
            enrolled: BTreeSet::new(),
            seen_enrolments: Vec::new(),
            written_ms: BTreeMap::new(),
            secret: None,
            removed: BTreeMap::new(),
            agreed: BTreeMap::new(),
            granted: BTreeMap::new(),
            failure: None,
            trace: Vec::new(),
            traced,
            done: Done::default(),
            stores: 0,
        };
        world.begin();
        world
    }

    pub(crate) fn say(&mut self, text: impl FnOnce() -> String) {
        if self.traced {
            let line = format!("{:>9} {}", self.now_ms, text());
            self.trace.push(line);
        }
    }

    pub(crate) fn fail(&mut self, text: &str) {
        self.say(|| format!("FAILURE: {text}"));
        self.failure.get_or_insert(text.to_owned());
    }

    pub(crate) fn at(&mut self, at_ms: u64, item: Item) {
        self.number += 1;
        self.queue
            .insert((at_ms.max(self.now_ms), self.number), item);
    }

    pub(crate) fn after(&mut self, from_ms: u64, to_ms: u64, item: Item) {
        let delay = self.rng.between(from_ms, to_ms);
        self.at(self.now_ms + delay, item);
    }

    /// A write of a node, after those before it.
    pub(crate) fn write(&mut self, node: Node, life: u64, write: WriteId, stored: Stored) {
        let at = self.now_ms + self.rng.between(1, 20);
        let last = self.written_ms.entry(node).or_default();
        *last = (*last).max(at);
        let at = *last;
        self.at(at, Item::Written(node, life, write, stored));
    }

    pub(crate) fn next(&mut self) -> Option<Item> {
        let ((at, _), item) = self.queue.pop_first()?;
        self.now_ms = at;
        Some(item)
    }

    /// The time as a node has it.
    pub(crate) fn now(&self, node: Node) -> Now {
        let skew = match node {
            Node::Host(host) => self.plan.clocks[host],
            Node::Server(_) => 0,
        };
        Now {
            steady: Duration::from_millis(self.now_ms),
            unix_s: (START_S + self.now_ms / 1000).saturating_add_signed(skew),
        }
    }

    pub(crate) fn true_s(&self) -> u64 {
        START_S + self.now_ms / 1000
    }

    pub(crate) fn is_up(&self, node: Node) -> bool {
        match node {
            Node::Server(server) => self.servers[server].core.is_some(),
            Node::Host(host) => self.hosts[host].core.is_some(),
        }
    }

    pub(crate) fn reach(&self, ends: [Node; 2]) -> bool {
        let parted = self
            .parted
            .get(&ends)
            .is_some_and(|until| *until > self.now_ms);
        let cut_off =
            |node| matches!((node, self.plan.cut_off), (Node::Host(a), Some(b)) if a == b);
        let honest = |node| matches!(node, Node::Server(server) if self.plan.evil != Some(server));
        let never = ends.iter().any(|node| cut_off(*node)) && ends.iter().any(|node| honest(*node));
        !parted && !never && ends.iter().all(|node| self.is_up(*node))
    }

    pub(crate) fn connect(&mut self, ends: [Node; 2]) -> u64 {
        self.conns.push(Conn {
            ends,
            alive: true,
            since_ms: self.now_ms,
            last: [self.now_ms; 2],
        });
        self.conns.len() as u64 - 1
    }

    /// The living connection of two nodes.
    pub(crate) fn conn_of(&self, ends: [Node; 2]) -> Option<u64> {
        let is_it =
            |conn: &Conn| conn.alive && (conn.ends == ends || conn.ends == [ends[1], ends[0]]);
        self.conns.iter().rposition(is_it).map(|at| at as u64)
    }

    pub(crate) fn transmit(&mut self, conn: u64, from: Node, packet: Packet) {
        let delay = self.rng.between(5, 60);
        let now = self.now_ms;
        let line = &mut self.conns[conn as usize];
        if !line.alive {
            return;
        }
        let to = usize::from(line.ends[0] == from);
        line.last[to] = line.last[to].max(now + delay);
        let (at, node) = (line.last[to], line.ends[to]);
        self.at(at, Item::Deliver(conn, node, packet));
    }

    /// Ends a connection; both ends notice, except `by`.
    pub(crate) fn end(&mut self, conn: u64, by: Option<Node>) {
        let line = &mut self.conns[conn as usize];
        if !line.alive {
            return;
        }
        line.alive = false;
        let ends = line.ends;
        for (node, last) in ends.into_iter().zip(line.last) {
            if Some(node) != by {
                self.at(last + 1, Item::Ended(conn, node));
            }
        }
    }

    pub(crate) fn end_all(&mut self, dead: impl Fn(&[Node; 2]) -> bool, by: Option<Node>) {
        for conn in 0..self.conns.len() {
            if self.conns[conn].alive && dead(&self.conns[conn].ends) {
                self.end(conn as u64, by);
            }
        }
    }

    pub(crate) fn line(&self, conn: ConnId) -> u64 {
        conn.0
    }
}
