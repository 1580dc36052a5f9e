//! The messages between hosts and rendezvous servers, between servers, and of gossip.
//!
//! ```text
//! host a1              server A            server B              host b1
//!   Register ------------>                    <------------ Register
//!   <----------- Registered, Ruleset, Enrolments (and to b1)
//!   Introduce(b1) ------->  Find -------------->
//!                           <------------- Found  Introduced(a1) ->
//!   <------- Introduced(b1)
//!   (waits its start)                                     (waits its start)
//!   ===================== probes cross: a direct path ====================>
//! ```
//!
//! These are the steps of paper 004, figure 3. If both hosts are registered at one server, it is
//! both A and B. The connection proves who sends a message; no message says it.

use crate::enrolment::Enrolment;
use crate::key::RealmId;
use crate::ruleset::{NetworkId, SignedRuleset, StoreId};
use longhaul_protocol::{Generation, HostId};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;

/// A message of a host to a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToServer {
    /// Registers the host in a realm: the first message. Repeated before the TTL ends.
    Register(Register),
    /// A ruleset that the server may lack. Operators publish by it too.
    Ruleset(SignedRuleset),
    /// The host uses a token: before `Register`.
    Join(Box<Enrolment>),
    /// The host's addresses have changed.
    Candidates(Candidates),
    /// The networks that have a port at this host have changed.
    Networks(Vec<NetworkId>),
    /// Asks for an introduction.
    Introduce {
        /// Names the answer.
        request: u32,
        /// To whom.
        target: Target,
    },
    /// Passes bytes to another host; the server does not read them. `paths` sends its calls so.
    Signal {
        /// The receiver.
        to: HostId,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// Asks for a relay session with another host.
    OpenRelay {
        /// Names the answer.
        request: u32,
        /// The other host.
        peer: HostId,
    },
    /// Ends a relay session.
    CloseRelay {
        /// The session.
        session: SessionId,
    },
    /// Asks for the lease of a generation of a guest, or whether the host still has it.
    AcquireLease(LeaseRequest),
    /// The host's journal says that it does not run the guest in this generation on its own.
    ReleaseLease(LeaseRequest),
    /// The host goes.
    Bye,
}

/// A message of a server to a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToHost {
    /// The host is registered.
    Registered {
        /// For how long, in seconds.
        ttl_s: u16,
        /// The host's address as the server sees it.
        observed: SocketAddr,
        /// The version of the server's ruleset.
        version: u64,
    },
    /// A ruleset, when it is newer than the one that the host named.
    Ruleset(SignedRuleset),
    /// Enrolments that no ruleset has settled.
    Enrolments(Vec<Enrolment>),
    /// The token is used, durably.
    Joined,
    /// Another host: probe it.
    Introduced {
        /// The request, or 0 if the other host asked.
        request: u32,
        /// The other host.
        peer: Peer,
        /// When to begin: milliseconds after this message arrives.
        start_ms: u16,
    },
    /// Bytes from another host.
    Signal {
        /// The sender.
        from: HostId,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// A relay session is open. The other host is told too, with request 0.
    RelayOpened {
        /// The request, or 0.
        request: u32,
        /// The session.
        session: SessionId,
        /// The other host.
        peer: HostId,
        /// Bytes a second that the server relays for it, in both directions together.
        bytes_per_s: u64,
    },
    /// A relay session is over.
    RelayClosed {
        /// The session.
        session: SessionId,
    },
    /// The answer to `AcquireLease` and `ReleaseLease`.
    Lease {
        /// The request.
        request: u32,
        /// The answer.
        answer: LeaseAnswer,
    },
    /// A request is refused, or a message without request (0).
    Refused(Refused),
    /// The server stops; dial again later.
    Bye,
}

/// A message between two servers of a realm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Broker {
    /// The version that the sender has, and the digest of its enrolments.
    Have(Have),
    /// A ruleset that the other server lacks.
    Ruleset(SignedRuleset),
    /// Enrolments that the other server may lack.
    Enrolments {
        /// The realm.
        realm: RealmId,
        /// The enrolments.
        enrolments: Vec<Enrolment>,
    },
    /// Asks for a host of the other server, on behalf of one here.
    Find {
        /// Names the answer.
        request: u32,
        /// The realm.
        realm: RealmId,
        /// The host that is asked for.
        target: Target,
        /// The host that asks.
        from: Peer,
        /// Half a round trip from the asking host to its server, in milliseconds.
        delay_ms: u16,
    },
    /// The answer: the host is here, and was told.
    Found {
        /// The request.
        request: u32,
        /// The host.
        peer: Peer,
        /// Half a round trip from the found host to its server, in milliseconds.
        delay_ms: u16,
    },
    /// The answer: the host is not registered here.
    NotHere {
        /// The request.
        request: u32,
    },
    /// Passes a signal to a host of the other server.
    Signal {
        /// The realm.
        realm: RealmId,
        /// The sender.
        from: HostId,
        /// The receiver.
        to: HostId,
        /// The bytes.
        bytes: Vec<u8>,
    },
}

/// A message between two hosts of a realm, on their own connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Gossip {
    /// What the sender has. Sent when a connection begins, and when it changes.
    Have(Have),
    /// A ruleset that the other host lacks.
    Ruleset(SignedRuleset),
    /// Enrolments that the other host may lack.
    Enrolments(Vec<Enrolment>),
    /// Bytes of the sender for the receiver, as in [`ToServer::Signal`].
    Signal(Vec<u8>),
}

/// What a host or server has of a realm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Have {
    /// The realm.
    pub realm: RealmId,
    /// The version of its ruleset, or 0.
    pub version: u64,
    /// The digest of its enrolments
    /// ([`Membership::enrolments_digest`](crate::membership::Membership::enrolments_digest)).
    pub enrolments: u64,
}

/// A registration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    /// The realm.
    pub realm: RealmId,
    /// The wanted life, in seconds. The server may shorten it.
    pub ttl_s: u16,
    /// The host's addresses.
    pub candidates: Candidates,
    /// The networks that have a port at this host.
    pub networks: Vec<NetworkId>,
    /// The version of the host's ruleset, or 0.
    pub version: u64,
    /// The digest of its enrolments.
    pub enrolments: u64,
}

/// The addresses of a host, the best first.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Candidates {
    /// The addresses.
    pub candidates: Vec<Candidate>,
    /// How the host's NAT maps: 0 unknown, 1 no NAT, 2 independent of the far end, 3 dependent on
    /// it (symmetric), 4 no UDP. Others count as 0.
    pub nat: u8,
}

/// An address under which a host may answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Where it comes from: 0 the host, 1 configured, 2 port-mapped, 3 peer-reflexive, 4 reflexive,
    /// 5 predicted. Receivers drop others.
    pub kind: u8,
    /// The address.
    pub address: SocketAddr,
    /// Higher is better (RFC 8445, section 5.1.2.1).
    pub priority: u32,
}

/// A host as an introduction gives it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Its identity.
    pub id: HostId,
    /// Its addresses, the one that its server sees included.
    pub candidates: Candidates,
    /// The networks that have a port there.
    pub networks: Vec<NetworkId>,
}

/// A host to be found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Target {
    /// By identity.
    Id(HostId),
    /// By its name in the realm.
    Name(String),
}

/// A relay session, at one server. Never reused while it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u32);

/// Names a lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// Names the answer.
    pub request: u32,
    /// The lease store that both ends of the handover agreed on.
    pub store: StoreId,
    /// The guest, by name.
    pub guest: String,
    /// The generation of its right.
    pub generation: Generation,
}

/// What an arbiter says of a lease. It is durable before it is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseAnswer {
    /// The host has it, for ever.
    Granted {
        /// The lease of the guest before this one.
        before: Option<Lease>,
    },
    /// The host has released it.
    Released,
    /// Another host has it, or had it, or the guest is in a later generation.
    Refused {
        /// The guest's latest lease.
        latest: Lease,
    },
}

/// One generation of a guest, given to one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The generation.
    pub generation: Generation,
    /// The host that it was given to.
    pub holder: HostId,
    /// Whether the holder said that it does not run the guest in it on its own.
    pub released: bool,
}

/// Why something was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The request, or 0.
    pub request: u32,
    /// The reason, for programs.
    pub code: RefusedCode,
    /// The reason, for people.
    pub text: String,
    /// What to do.
    pub hint: Option<String>,
}

/// Why something was refused, for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RefusedCode {
    /// The realm is not served here.
    UnknownRealm,
    /// The host is no member.
    NotAMember,
    /// The other host is not registered at any server that answers, or is no member.
    NotHere,
    /// A limit of the server.
    Limit,
    /// The document was not accepted.
    Document,
    /// Another host used the token.
    TokenUsed,
    /// The server gives no leases, or not from this store.
    NotArbiter,
    /// The server cannot write; try again.
    Storage,
}
