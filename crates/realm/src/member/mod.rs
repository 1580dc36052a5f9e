//! The state machine of a host towards its realm: servers, other hosts, and what it is told.
//!
//! The owner feeds [`Input`]s, carries out [`Action`]s in their order, and calls
//! [`Member::handle`] with [`Input::Timeout`] at [`Member::next_timeout`]. Nothing that a server
//! says is believed, except which addresses another host has: members, networks and servers come
//! from what the realm signed. Without servers, what is connected goes on, and new requests wait.

mod documents;
mod links;
mod requests;

use crate::enrolment::Enrolment;
use crate::key::RealmId;
use crate::limits::CANDIDATES_MAX;
use crate::membership::{Membership, Standing, Why};
use crate::protocol::{
    Candidates, Gossip, Have, LeaseAnswer, Peer, Refused, SessionId, Target, ToHost, ToServer,
};
use crate::relay::{Bucket, Rate};
use crate::ruleset::{NetworkId, ServerEntry, SignedRuleset, StoreId, VerifiedRuleset};
use crate::server::WriteId;
use crate::signed::DocumentError;
use crate::{Now, Random};
use links::Link;
use longhaul_protocol::{Generation, HostId};
use requests::Pending;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How often members are checked against the wall clock.
const CHECK: Duration = Duration::from_secs(30);
/// A failed write of a ruleset is repeated after this time.
const RETRY: Duration = Duration::from_secs(1);
/// Gossip of one host beyond this is dropped.
const GOSSIP: Rate = Rate {
    per_s: 20,
    burst: 100,
};

/// What a host is.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its identity.
    pub host: HostId,
    /// The realm.
    pub realm: RealmId,
    /// The servers of its token, until a ruleset names some.
    pub servers: Vec<ServerEntry>,
    /// The wanted life of a registration, in seconds.
    pub ttl_s: u16,
}

/// What a host keeps over restarts.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Kept {
    /// The ruleset in force.
    pub ruleset: Option<SignedRuleset>,
    /// Enrolments. The host's own one is put here before the first start.
    pub enrolments: Vec<Enrolment>,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Replaces the ruleset.
    Ruleset(SignedRuleset),
    /// Adds an enrolment.
    Enrolment(Box<Enrolment>),
}

impl Kept {
    /// Applies a write.
    pub fn apply(&mut self, record: Record) {
        match record {
            Record::Ruleset(ruleset) => self.ruleset = Some(ruleset),
            Record::Enrolment(enrolment) if self.enrolments.contains(&enrolment) => {}
            Record::Enrolment(enrolment) => self.enrolments.push(*enrolment),
        }
    }
}

/// Something happened.
#[derive(Debug, Clone)]
pub enum Input {
    /// A connection to a server stands; its key is the expected one.
    Connected(HostId),
    /// A connection to a server could not be made, or has ended.
    Disconnected(HostId),
    /// A message of a server.
    Message(HostId, ToHost),
    /// Another host is connected; its key is proved.
    PeerConnected(HostId),
    /// Another host is not connected any more.
    PeerDisconnected(HostId),
    /// Gossip of another host.
    Gossip(HostId, Gossip),
    /// This host's addresses.
    Candidates(Candidates),
    /// The networks that have a port here.
    Networks(Vec<NetworkId>),
    /// Asks for an introduction. The number names the answer.
    Introduce(u32, Target),
    /// Passes bytes to another host through the servers, or on its own connection without any.
    Signal(HostId, Vec<u8>),
    /// Passes bytes to another host on its own connection, or through the servers without one.
    SignalDirect(HostId, Vec<u8>),
    /// Asks a server for a relay session with another host.
    OpenRelay {
        /// Names the answer.
        request: u32,
        /// The relay.
        server: HostId,
        /// The other host.
        peer: HostId,
    },
    /// Ends a relay session at a server.
    CloseRelay(HostId, SessionId),
    /// Asks for the lease of a guest in a generation, from the store that both ends of the
    /// handover agreed on when it began: that of the ruleset's arbiter then.
    AcquireLease(u32, StoreId, String, Generation),
    /// Releases the lease of a guest in a generation.
    ReleaseLease(u32, StoreId, String, Generation),
    /// A write is durable.
    Persisted(WriteId),
    /// A write failed.
    PersistFailed(WriteId),
    /// The time of [`Member::next_timeout`] has come.
    Timeout,
}

/// Something to do or to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Connect to a server.
    Connect(ServerEntry),
    /// End the connection to a server.
    Disconnect(HostId),
    /// Send to a server.
    Send(HostId, ToServer),
    /// Send to another host, if it is connected.
    Gossip(HostId, Gossip),
    /// Make a record durable, in order, and say so.
    Persist(WriteId, Record),
    /// [`Member::membership`] has changed: members, networks, permissions.
    Changed,
    /// End all connections with a host: it is no member any more.
    Cut(HostId, Why),
    /// Another host's addresses: probe them after `start_ms`.
    Introduced {
        /// The request, if this host asked.
        request: Option<u32>,
        /// The server that introduced it.
        server: HostId,
        /// The other host, a member.
        peer: Peer,
        /// When to begin, in milliseconds.
        start_ms: u16,
    },
    /// Bytes of another host, a member.
    Signal(HostId, Vec<u8>),
    /// A relay session is open.
    RelayOpened {
        /// The request, if this host asked.
        request: Option<u32>,
        /// The relay.
        server: HostId,
        /// The session there.
        session: SessionId,
        /// The other host, a member.
        peer: HostId,
        /// Bytes a second that the server relays for it.
        bytes_per_s: u64,
    },
    /// A relay session is over.
    RelayClosed(HostId, SessionId),
    /// The arbiter's answer.
    Lease(u32, LeaseAnswer),
    /// A request failed.
    Failed(u32, Failure),
    /// Something that an operator should know.
    Notice(Notice),
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The target is no member.
    #[error("no member of the realm has that name or id")]
    NoMember,
    /// No server is registered with.
    #[error("no rendezvous server is reached: what is connected goes on, new connections wait")]
    NoServer,
    /// The realm has no arbiter, or another one than the handover began with.
    #[error("the realm has no arbiter, or another one than when the handover began")]
    NoArbiter,
    /// The arbiter is not reached.
    #[error("the realm's arbiter is not reached")]
    ArbiterUnreachable,
    /// Too many requests wait.
    #[error("too many requests wait for rendezvous servers")]
    TooMany,
    /// No answer came in time.
    #[error("no rendezvous server answered in time")]
    TimedOut,
    /// The last server that was asked refused.
    #[error("{}{}", .0.text, .0.hint.as_ref().map_or(String::new(), |hint| format!("; {hint}")))]
    Refused(Refused),
}

/// Something that an operator should know. Each is reported when it begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A ruleset was issued later than this host's clock says, by this many seconds.
    ClockBehind(u64),
    /// A document was not accepted, from this server or host.
    Document(HostId, String),
    /// A server refused this host.
    Refused(HostId, Refused),
    /// Two hosts use one token: neither is enrolled.
    TokenUsedTwice(Vec<HostId>),
    /// A server named a host that is no member.
    Stranger(HostId, HostId),
    /// The disk does not take the ruleset.
    Storage,
}

/// A connection to a server, for status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkStatus {
    /// The server.
    pub server: HostId,
    /// Whether this host is registered there.
    pub registered: bool,
    /// The version of the server's ruleset, as it said last.
    pub version: u64,
    /// Failed tries in sequence.
    pub failures: u32,
}

#[derive(Debug)]
enum Write {
    Ruleset(Box<VerifiedRuleset>),
    Other,
}

/// A host's side of a realm.
#[derive(Debug)]
pub struct Member {
    config: Config,
    membership: Membership,
    links: BTreeMap<HostId, Link>,
    peers: BTreeMap<HostId, Bucket>,
    candidates: Candidates,
    networks: Vec<NetworkId>,
    pending: BTreeMap<u32, Pending>,
    next_request: u32,
    writes: BTreeMap<WriteId, Write>,
    next_write: u64,
    version_writing: u64,
    retry_at: Option<Duration>,
    check_at: Duration,
    random: Random,
    actions: VecDeque<Action>,
}

impl Member {
    /// Starts with what is kept. `seed` must differ between hosts and starts: it spreads retries.
    ///
    /// # Errors
    ///
    /// If a kept document does not verify: the store is damaged or another realm's.
    pub fn new(config: Config, kept: &Kept, seed: u64, now: Now) -> Result<Self, DocumentError> {
        let mut membership = Membership::new(config.realm);
        if let Some(ruleset) = &kept.ruleset {
            membership.install(ruleset.verify(config.realm)?, now.unix_s);
        }
        for enrolment in &kept.enrolments {
            // Those of the past are settled.
            let _ = membership.enrol(enrolment, now.unix_s);
        }
        let mut member = Self {
            config,
            membership,
            links: BTreeMap::new(),
            peers: BTreeMap::new(),
            candidates: Candidates::default(),
            networks: Vec::new(),
            pending: BTreeMap::new(),
            next_request: 1,
            writes: BTreeMap::new(),
            next_write: 0,
            version_writing: 0,
            retry_at: None,
            check_at: now.steady + CHECK,
            random: Random::new(seed),
            actions: VecDeque::new(),
        };
        member.follow_servers(now);
        Ok(member)
    }

    /// Takes an input.
    pub fn handle(&mut self, now: Now, input: Input) {
        match input {
            Input::Connected(server) => self.connected(now, server),
            Input::Disconnected(server) => self.disconnected(now, server),
            Input::Message(server, message) => self.message(now, server, message),
            Input::PeerConnected(host) => self.peer_connected(now, host),
            Input::PeerDisconnected(host) => {
                self.peers.remove(&host);
            }
            Input::Gossip(host, gossip) => self.gossip(now, host, gossip),
            Input::Candidates(mut candidates) => {
                candidates.candidates.truncate(CANDIDATES_MAX);
                self.candidates = candidates.clone();
                self.tell_servers(&ToServer::Candidates(candidates));
            }
            Input::Networks(networks) => {
                self.networks = networks.clone();
                self.tell_servers(&ToServer::Networks(networks));
            }
            Input::Introduce(request, target) => self.introduce(now, request, target),
            Input::Signal(to, bytes) => self.signal(to, bytes),
            Input::SignalDirect(to, bytes) => self.signal_direct(to, bytes),
            Input::OpenRelay {
                request,
                server,
                peer,
            } => self.open_relay(now, request, server, peer),
            Input::CloseRelay(server, session) => {
                self.send(server, ToServer::CloseRelay { session });
            }
            Input::AcquireLease(request, store, guest, generation) => {
                self.lease(now, request, store, guest, generation, true);
            }
            Input::ReleaseLease(request, store, guest, generation) => {
                self.lease(now, request, store, guest, generation, false);
            }
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
    pub fn next_timeout(&self) -> Duration {
        let links = self.links.values().filter_map(Link::due);
        let pending = self.pending.values().map(|pending| pending.until);
        links
            .chain(pending)
            .chain(self.retry_at)
            .fold(self.check_at, Duration::min)
    }

    /// Returns who is a member, and the ruleset.
    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Returns whether a new connection with a host may be made now, and as whom.
    pub fn may_connect(&self, host: HostId, now: Now) -> Standing {
        self.membership.standing(host, now.unix_s)
    }

    /// Returns what has to be kept, without what is settled: an owner may write it in place of all
    /// records that were durable before.
    pub fn kept(&self) -> Kept {
        let enrolments = self.membership.enrolments();
        Kept {
            ruleset: self.membership.verified().map(|r| r.signed().clone()),
            enrolments: enrolments.map(|one| one.enrolment().clone()).collect(),
        }
    }

    /// Returns the state of each server.
    pub fn links(&self) -> Vec<LinkStatus> {
        let status = |(server, link): (&HostId, &Link)| LinkStatus {
            server: *server,
            registered: link.is_registered(),
            version: link.version,
            failures: link.failures,
        };
        self.links.iter().map(status).collect()
    }

    fn have(&self) -> Have {
        Have {
            realm: self.config.realm,
            version: self.membership.version(),
            enrolments: self.membership.enrolments_digest(),
        }
    }

    fn act(&mut self, action: Action) {
        self.actions.push_back(action);
    }

    fn notice(&mut self, notice: Notice) {
        self.act(Action::Notice(notice));
    }

    fn timeout(&mut self, now: Now) {
        self.links_due(now);
        self.pending_due(now);
        if self.retry_at.is_some_and(|at| at <= now.steady) {
            self.retry_at = None;
            self.write_again();
        }
        if self.check_at <= now.steady {
            self.check_at = now.steady + CHECK;
            self.cut_strangers(now);
        }
    }

    fn message(&mut self, now: Now, server: HostId, message: ToHost) {
        if !self.links.get(&server).is_some_and(Link::is_up) {
            return;
        }
        match message {
            ToHost::Registered { ttl_s, version, .. } => {
                self.is_registered(now, server, ttl_s, version);
            }
            ToHost::Ruleset(ruleset) => self.ruleset(server, &ruleset),
            ToHost::Enrolments(enrolments) => self.enrolments(now, server, &enrolments),
            ToHost::Joined => self.register(now, server),
            ToHost::Introduced {
                request,
                peer,
                start_ms,
            } => self.introduced(now, server, request, peer, start_ms),
            ToHost::Signal { from, bytes } => {
                if self.is_member(now, server, from) {
                    self.act(Action::Signal(from, bytes));
                }
            }
            ToHost::RelayOpened {
                request,
                session,
                peer,
                bytes_per_s,
            } => self.relay_opened(now, server, request, session, peer, bytes_per_s),
            ToHost::RelayClosed { session } => self.act(Action::RelayClosed(server, session)),
            ToHost::Lease { request, answer } => self.lease_answered(server, request, answer),
            ToHost::Refused(refused) => self.refused(now, server, refused),
            ToHost::Bye => {
                self.act(Action::Disconnect(server));
                self.disconnected(now, server);
            }
        }
    }

    /// Returns whether a host that a server named is a member.
    fn is_member(&mut self, now: Now, server: HostId, host: HostId) -> bool {
        let standing = self.membership.standing(host, now.unix_s);
        if !standing.is_member() {
            self.notice(Notice::Stranger(server, host));
        }
        standing.is_member()
    }
}

#[cfg(test)]
mod tests;
