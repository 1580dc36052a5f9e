//! The state machine of a rendezvous server.
//!
//! The owner feeds [`Input`]s, carries out [`Action`]s in their order, and calls
//! [`Server::handle`] with [`Input::Timeout`] at [`Server::next_timeout`]. Registrations,
//! introductions and relay sessions are soft state: after a restart hosts register again. Rulesets,
//! used tokens and leases are durable: nothing that depends on them is answered before
//! [`Input::Persisted`].

mod durable;
mod introduce;
mod lease;
mod realm;

pub use durable::{Durable, DurableRealm, LeaseEntry, Record};

use crate::key::RealmId;
use crate::limits::{CANDIDATES_MAX, TEXT_BYTES_MAX, TTL_S};
use crate::membership::{EnrolError, Membership, Standing};
use crate::protocol::{
    Broker, Candidate, Candidates, Have, Peer, Refused, RefusedCode, Register, ToHost, ToServer,
};
use crate::relay::{Bucket, Rate, Relay, RelayLimits};
use crate::ruleset::{NetworkId, SignedRuleset};
use crate::signed::DocumentError;
use crate::{Now, Random};
use introduce::Find;
use longhaul_protocol::HostId;
use realm::{RealmState, Write};
use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

/// A connection without a registration ends after this time.
const UNREGISTERED: Duration = Duration::from_secs(10);
/// A failed write of a ruleset is repeated after this time.
const RETRY: Duration = Duration::from_secs(1);
/// The kind of a candidate that is what the server sees: reflexive.
const REFLEXIVE: u8 = 4;
/// Its priority: RFC 8445's for a server-reflexive address of one component.
const REFLEXIVE_PRIORITY: u32 = (100 << 24) | (0xffff << 8) | 255;

/// A connection of a host or of another server. The owner numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// A write that the owner was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WriteId(pub u64);

/// What a server is.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its identity.
    pub id: HostId,
    /// The realms that it serves.
    pub realms: Vec<RealmId>,
    /// Its limits.
    pub limits: Limits,
}

/// What hosts together and alone may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most connections.
    pub connections: usize,
    /// Most connections of one host.
    pub connections_per_host: usize,
    /// Messages of one connection.
    pub messages: Rate,
    /// Most introductions that wait for other servers.
    pub finds: usize,
    /// Most of them for one host.
    pub finds_per_host: usize,
    /// Most guests with leases in one realm.
    pub leases: usize,
    /// Most of them held by one host.
    pub leases_per_host: usize,
    /// Limits of the relay.
    pub relay: RelayLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 8192,
            connections_per_host: 4,
            messages: Rate {
                per_s: 50,
                burst: 300,
            },
            finds: 1024,
            finds_per_host: 32,
            leases: 65_536,
            leases_per_host: 4096,
            relay: RelayLimits::default(),
        }
    }
}

/// Something happened.
#[derive(Debug, Clone)]
pub enum Input {
    /// A host connected. Its key is proved.
    Connected {
        /// The connection.
        conn: ConnId,
        /// The host.
        host: HostId,
        /// Where its relayed datagrams come from: its address, or over TCP a stand-in that no
        /// host has.
        observed: SocketAddr,
        /// Whether `observed` is the address of its UDP socket.
        by_udp: bool,
        /// The round trip, in milliseconds.
        rtt_ms: u16,
    },
    /// Another server is connected, whichever side dialled. Its key is proved.
    ServerConnected {
        /// The connection.
        conn: ConnId,
        /// The server.
        server: HostId,
        /// The round trip, in milliseconds.
        rtt_ms: u16,
    },
    /// The address of a connection has changed and is validated.
    Moved {
        /// The connection.
        conn: ConnId,
        /// The new address.
        observed: SocketAddr,
    },
    /// A message of a host.
    Message(ConnId, ToServer),
    /// A message of another server.
    Broker(ConnId, Broker),
    /// A connection ended.
    Closed(ConnId),
    /// A write is durable.
    Persisted(WriteId),
    /// A write failed; it may have reached the disk nevertheless.
    PersistFailed(WriteId),
    /// The time of [`Server::next_timeout`] has come.
    Timeout,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send to a host.
    Send(ConnId, ToHost),
    /// Send to another server.
    SendBroker(ConnId, Broker),
    /// End a connection, after what was sent; the reason is for people.
    Close(ConnId, String),
    /// Make a record durable, in order, and say so.
    Persist(WriteId, Record),
}

/// What a server counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Registrations of strangers that were refused.
    pub strangers: u64,
    /// Rulesets and enrolments that were not accepted, older ones included.
    pub documents: u64,
    /// Second uses of a token.
    pub tokens_reused: u64,
    /// Introductions made.
    pub introduced: u64,
    /// Hosts that were asked for and not found.
    pub not_found: u64,
    /// Signals without a receiver.
    pub signals_lost: u64,
    /// Connections ended or refused because of a limit.
    pub limited: u64,
    /// Leases given.
    pub leases: u64,
    /// Leases refused.
    pub leases_refused: u64,
    /// Messages of servers that are none of the realm's.
    pub foreign_servers: u64,
}

#[derive(Debug)]
struct Conn {
    host: HostId,
    observed: SocketAddr,
    by_udp: bool,
    rtt_ms: u16,
    messages: Bucket,
    /// When the connection ends unless the host registers again.
    until: Duration,
    realm: Option<RealmId>,
    candidates: Candidates,
    networks: Vec<NetworkId>,
}

#[derive(Debug)]
struct OtherServer {
    id: HostId,
    rtt_ms: u16,
    messages: Bucket,
}

/// A rendezvous server.
#[derive(Debug)]
pub struct Server {
    config: Config,
    store: crate::ruleset::StoreId,
    realms: BTreeMap<RealmId, RealmState>,
    conns: BTreeMap<ConnId, Conn>,
    others: BTreeMap<ConnId, OtherServer>,
    finds: BTreeMap<u32, Find>,
    next_find: u32,
    writes: BTreeMap<WriteId, Write>,
    next_write: u64,
    /// Writes of rulesets to repeat, by time.
    retries: Vec<(Duration, RealmId)>,
    relay: Relay,
    random: Random,
    counters: Counters,
    actions: VecDeque<Action>,
}

impl Server {
    /// Starts with what is durable. `seed` should differ at each start.
    ///
    /// # Errors
    ///
    /// If a durable document does not verify: the store is damaged or another realm's.
    pub fn new(
        config: Config,
        durable: &Durable,
        seed: u64,
        now: Now,
    ) -> Result<Self, DocumentError> {
        let mut realms = BTreeMap::new();
        for id in &config.realms {
            let mut membership = Membership::new(*id);
            let stored = durable.realms.get(id);
            if let Some(ruleset) = stored.and_then(|stored| stored.ruleset.as_ref()) {
                membership.install(ruleset.verify(*id)?, now.unix_s);
            }
            for enrolment in stored.iter().flat_map(|stored| &stored.enrolments) {
                match membership.enrol(enrolment, now.unix_s) {
                    // Those of the past are settled.
                    Ok(_) | Err(EnrolError::Void(_) | EnrolError::Full) => {}
                    Err(EnrolError::Enrolment(error)) => {
                        return Err(DocumentError::Content(error.to_string()));
                    }
                }
            }
            let leases = stored.map(|stored| stored.leases.clone());
            let state = RealmState::new(membership, leases.unwrap_or_default());
            realms.insert(*id, state);
        }
        let relay = Relay::new(config.limits.relay, now.steady);
        Ok(Self {
            config,
            store: durable.store,
            realms,
            conns: BTreeMap::new(),
            others: BTreeMap::new(),
            finds: BTreeMap::new(),
            next_find: 0,
            writes: BTreeMap::new(),
            next_write: 0,
            retries: Vec::new(),
            relay,
            random: Random::new(seed),
            counters: Counters::default(),
            actions: VecDeque::new(),
        })
    }

    /// Takes an input.
    pub fn handle(&mut self, now: Now, input: Input) {
        match input {
            Input::Connected {
                conn,
                host,
                observed,
                by_udp,
                rtt_ms,
            } => self.connected(now, conn, host, (observed, by_udp), rtt_ms),
            Input::ServerConnected {
                conn,
                server,
                rtt_ms,
            } => self.server_connected(now, conn, server, rtt_ms),
            Input::Moved { conn, observed } => self.moved(conn, observed),
            Input::Message(conn, message) => self.message(now, conn, message),
            Input::Broker(conn, message) => self.broker(now, conn, message),
            Input::Closed(conn) => self.closed(conn),
            Input::Persisted(write) => self.written(now, write, true),
            Input::PersistFailed(write) => self.written(now, write, false),
            Input::Timeout => self.timeout(now),
        }
    }

    /// Returns the next thing to do.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns when [`Input::Timeout`] is due.
    pub fn next_timeout(&self) -> Option<Duration> {
        let conns = self.conns.values().map(|conn| conn.until);
        let finds = self.finds.values().map(|find| find.until);
        let retries = self.retries.iter().map(|(at, _)| *at);
        conns
            .chain(finds)
            .chain(retries)
            .chain(self.relay.next_expiry())
            .min()
    }

    /// Judges a datagram for the relay: where it goes, unchanged, or `None` to drop it.
    pub fn forward(&mut self, now: Now, from: SocketAddr, datagram: &[u8]) -> Option<SocketAddr> {
        self.relay.forward(from, datagram, now.steady)
    }

    /// Returns the counters, without those of the relay.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the relay, for its counters.
    pub fn relay(&self) -> &Relay {
        &self.relay
    }

    /// Returns what the server knows of the members of a realm.
    pub fn membership(&self, realm: RealmId) -> Option<&Membership> {
        self.realms.get(&realm).map(|state| &state.membership)
    }

    /// Returns the other servers to be connected to: those of all rulesets. Of two servers, the one
    /// with the lower id dials.
    pub fn servers(&self) -> Vec<crate::ruleset::ServerEntry> {
        let rulesets = self.realms.values().filter_map(|r| r.membership.ruleset());
        let mut servers: Vec<_> = rulesets.flat_map(|r| r.servers.clone()).collect();
        servers.retain(|server| server.id != self.config.id);
        servers.sort_by_key(|server| server.id);
        servers.dedup_by_key(|server| server.id);
        servers
    }

    fn connected(
        &mut self,
        now: Now,
        conn: ConnId,
        host: HostId,
        (observed, by_udp): (SocketAddr, bool),
        rtt_ms: u16,
    ) {
        let limits = self.config.limits;
        let of_host = self.conns.values().filter(|other| other.host == host);
        if self.conns.len() >= limits.connections || of_host.count() >= limits.connections_per_host
        {
            self.counters.limited += 1;
            let text = "too many connections: end others of this host, or try later";
            return self.actions.push_back(Action::Close(conn, text.to_owned()));
        }
        let entry = Conn {
            host,
            observed,
            by_udp,
            rtt_ms,
            messages: Bucket::new(limits.messages, now.steady),
            until: now.steady + UNREGISTERED,
            realm: None,
            candidates: Candidates::default(),
            networks: Vec::new(),
        };
        self.conns.insert(conn, entry);
    }

    fn server_connected(&mut self, now: Now, conn: ConnId, server: HostId, rtt_ms: u16) {
        let known = |state: &RealmState| {
            let ruleset = state.membership.ruleset();
            ruleset.is_some_and(|ruleset| ruleset.server(server).is_some())
        };
        let shared = self.realms.iter().filter(|(_, state)| known(state));
        let shared: Vec<Have> = shared.map(|(_, state)| state.have()).collect();
        if shared.is_empty() {
            self.counters.foreign_servers += 1;
            let text = "no realm here has this server";
            return self.actions.push_back(Action::Close(conn, text.to_owned()));
        }
        let mut messages = self.config.limits.messages;
        messages.per_s *= 20;
        messages.burst *= 20;
        let other = OtherServer {
            id: server,
            rtt_ms,
            messages: Bucket::new(messages, now.steady),
        };
        self.others.insert(conn, other);
        let haves = shared.into_iter().map(Broker::Have);
        let sends = haves.map(|have| Action::SendBroker(conn, have));
        self.actions.extend(sends);
    }

    fn moved(&mut self, conn: ConnId, observed: SocketAddr) {
        if let Some(entry) = self.conns.get_mut(&conn) {
            entry.observed = observed;
            if entry.realm.is_some() {
                self.relay.moved(entry.host, Some(observed));
            }
        }
    }

    fn message(&mut self, now: Now, conn: ConnId, message: ToServer) {
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        let cost = match &message {
            ToServer::Ruleset(ruleset) => cost(ruleset),
            _ => 1,
        };
        if !entry.messages.take(cost, now.steady) {
            self.counters.limited += 1;
            return self.end(conn, "too many messages: wait, then connect again");
        }
        match message {
            ToServer::Register(register) => self.register(now, conn, register),
            ToServer::Join(enrolment) => self.join(now, conn, &enrolment),
            ToServer::Ruleset(ruleset) => self.ruleset(Some(conn), &ruleset),
            ToServer::Bye => self.end(conn, "done"),
            other => {
                let Some(realm) = self.conns.get(&conn).and_then(|entry| entry.realm) else {
                    let text = "register first";
                    return self.refuse(conn, 0, RefusedCode::NotAMember, text, None);
                };
                self.registered(now, conn, realm, other);
            }
        }
    }

    /// A message of a host with a registration.
    fn registered(&mut self, now: Now, conn: ConnId, realm: RealmId, message: ToServer) {
        match message {
            ToServer::Candidates(candidates) => {
                if let Some(entry) = self.conns.get_mut(&conn) {
                    entry.candidates = candidates;
                }
            }
            ToServer::Networks(networks) => {
                if let Some(entry) = self.conns.get_mut(&conn) {
                    entry.networks = networks;
                }
            }
            ToServer::Introduce { request, target } => {
                self.introduce(now, conn, realm, request, &target);
            }
            ToServer::Signal { to, bytes } => self.signal(now, conn, realm, to, bytes),
            ToServer::OpenRelay { request, peer } => {
                self.open_relay(now, conn, realm, request, peer);
            }
            ToServer::CloseRelay { session } => self.close_relay(conn, session),
            ToServer::AcquireLease(lease) => self.acquire(now, conn, realm, lease),
            ToServer::ReleaseLease(lease) => self.release(now, conn, realm, lease),
            ToServer::Register(_) | ToServer::Join(_) | ToServer::Ruleset(_) | ToServer::Bye => {}
        }
    }

    fn register(&mut self, now: Now, conn: ConnId, register: Register) {
        let Some(state) = self.realms.get_mut(&register.realm) else {
            let text = "this server does not serve the realm";
            return self.refuse(conn, 0, RefusedCode::UnknownRealm, text, None);
        };
        let Some(entry) = self.conns.get_mut(&conn) else {
            return;
        };
        if entry.realm.is_some_and(|realm| realm != register.realm) {
            return self.end(conn, "one connection is for one realm");
        }
        // An expired ruleset is no reason to refuse: the next one comes over this connection.
        if let Standing::Stranger(why) = state.membership.standing(entry.host, now.unix_s) {
            self.counters.strangers += 1;
            let hint = "ask the realm's operator for a token, or to list this host";
            let text = why.to_string();
            return self.refuse(conn, 0, RefusedCode::NotAMember, &text, Some(hint));
        }
        let ttl_s = register.ttl_s.clamp(*TTL_S.start(), *TTL_S.end());
        entry.until = now.steady + Duration::from_secs(ttl_s.into());
        entry.realm = Some(register.realm);
        entry.candidates = register.candidates;
        entry.networks = register.networks;
        let (host, observed) = (entry.host, entry.observed);
        let have = state.have();
        let replaced = state.registered.insert(host, conn);
        let mut answers = vec![ToHost::Registered {
            ttl_s,
            observed,
            version: have.version,
        }];
        if let Some(ruleset) = state.membership.verified()
            && register.version < have.version
        {
            answers.push(ToHost::Ruleset(ruleset.signed().clone()));
        }
        if register.enrolments != have.enrolments {
            answers.push(ToHost::Enrolments(state.enrolments()));
        }
        self.relay.moved(host, Some(observed));
        let sends = answers.into_iter().map(|answer| Action::Send(conn, answer));
        self.actions.extend(sends);
        if let Some(old) = replaced.filter(|old| *old != conn) {
            self.end(old, "the host has connected again");
        }
    }

    /// Ends a connection.
    fn end(&mut self, conn: ConnId, reason: &str) {
        self.closed(conn);
        let reason = reason.to_owned();
        self.actions.push_back(Action::Close(conn, reason));
    }

    /// Forgets a connection.
    fn closed(&mut self, conn: ConnId) {
        if self.others.remove(&conn).is_some() {
            return self.lost_server(conn);
        }
        let Some(entry) = self.conns.remove(&conn) else {
            return;
        };
        self.finds.retain(|_, find| find.conn != conn);
        let state = entry.realm.and_then(|realm| self.realms.get_mut(&realm));
        if let Some(state) = state
            && state.registered.get(&entry.host) == Some(&conn)
        {
            state.registered.remove(&entry.host);
            // Its sessions wait for it to come back, until they are idle for too long.
            self.relay.moved(entry.host, None);
        }
    }

    fn refuse(
        &mut self,
        conn: ConnId,
        request: u32,
        code: RefusedCode,
        text: &str,
        hint: Option<&str>,
    ) {
        let refused = Refused {
            request,
            code,
            text: cut(text),
            hint: hint.map(cut),
        };
        let refused = ToHost::Refused(refused);
        self.actions.push_back(Action::Send(conn, refused));
    }

    fn timeout(&mut self, now: Now) {
        let late = self.conns.iter().filter(|(_, c)| c.until <= now.steady);
        let late: Vec<ConnId> = late.map(|(conn, _)| *conn).collect();
        for conn in late {
            self.end(conn, "the registration was not renewed");
        }
        self.finds_end(now);
        for (session, ends) in self.relay.expire(now.steady) {
            self.tell_relay_closed(session, ends);
        }
        let due = self.retries.iter().filter(|(at, _)| *at <= now.steady);
        let due: Vec<RealmId> = due.map(|(_, realm)| *realm).collect();
        self.retries.retain(|(at, _)| *at > now.steady);
        due.into_iter()
            .for_each(|realm| self.write_ruleset_again(realm));
    }

    /// What an introduction says of a host.
    fn peer(conn: &Conn) -> Peer {
        let mut candidates = conn.candidates.clone();
        let known = |candidate: &Candidate| candidate.address == conn.observed;
        if conn.by_udp && !candidates.candidates.iter().any(known) {
            candidates.candidates.truncate(CANDIDATES_MAX - 1);
            candidates.candidates.push(Candidate {
                kind: REFLEXIVE,
                address: conn.observed,
                priority: REFLEXIVE_PRIORITY,
            });
        }
        Peer {
            id: conn.host,
            candidates,
            networks: conn.networks.clone(),
        }
    }
}

/// Returns how many messages a ruleset counts for: to verify a long one takes time.
fn cost(ruleset: &SignedRuleset) -> u64 {
    1 + ruleset.bytes.len() as u64 / 4096
}

/// Cuts a text to its limit.
fn cut(text: &str) -> String {
    let mut end = text.len().min(TEXT_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests;
