//! Defines the realm of a host: its members, networks and rendezvous servers.

use crate::host::Scope;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The use of a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinRealm {
    /// Text of the token, as the operator of the realm gave it.
    pub token: String,
}

/// The realm of this host, if it has one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RealmStatus {
    /// Realm; null if this host joined none.
    pub realm: Option<Realm>,
}

/// A realm as this host sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Realm {
    /// Id of the realm: the SHA-256 digest of its key.
    pub id: String,
    /// Name of this host in the realm; null if it is no member.
    pub name: Option<String>,
    /// What this host is in the realm.
    pub standing: RealmStanding,
    /// Why this host is not a member; null if it is.
    pub reason: Option<String>,
    /// Version of the ruleset in force, or 0.
    pub version: u64,
    /// When the ruleset ends, in seconds since 1970; null without a ruleset.
    pub expires_s: Option<u64>,
    /// Members, this host included.
    pub members: Vec<RealmMember>,
    /// Networks.
    pub networks: Vec<RealmNetwork>,
    /// Rendezvous servers.
    pub servers: Vec<RealmServer>,
    /// What an operator should know, the latest last.
    pub notices: Vec<String>,
}

/// What a host is in a realm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RealmStanding {
    /// A member.
    Member,
    /// A member by a token, until a ruleset lists it.
    Pending,
    /// A member of a ruleset that has ended: what is connected stays for a day.
    Expired,
    /// Not a member.
    Stranger,
}

/// A member of a realm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RealmMember {
    /// Name of the host in the realm.
    pub name: String,
    /// Fingerprint of the host.
    pub fingerprint: String,
    /// Site of the host.
    pub site: String,
    /// Permissions of the host at other members.
    pub may: Vec<Scope>,
    /// Whether it is a member by a token, and in no ruleset yet.
    pub pending: bool,
    /// How it is reached; null while nothing is to be sent to it.
    pub path: Option<HostPath>,
}

/// How a host is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostPath {
    /// Kind of the path that datagrams take; null if there is none.
    pub kind: Option<PathKind>,
    /// Round trip on it, in microseconds; null if it was not measured yet.
    pub round_trip_us: Option<u64>,
    /// How the host is reached, and what prevents a better path.
    pub text: String,
}

/// A kind of path to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PathKind {
    /// Datagrams go to the host itself.
    Direct,
    /// Datagrams go through a rendezvous server.
    Relayed,
}

/// A network of a realm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RealmNetwork {
    /// Name of the network.
    pub name: String,
    /// Id of the network: 16 hexadecimal digits.
    pub id: String,
    /// Names of the hosts that may have a port in it.
    pub members: Vec<String>,
    /// Largest payload of a frame, in bytes.
    pub mtu: u32,
    /// Bridge of the network on this host; null if this host has no port in it.
    pub bridge: Option<String>,
    /// Why this host, a member, has no port in it; null if it has one.
    pub error: Option<String>,
    /// Gateway of the network; null if it has none, or this host is no member.
    pub gateway: Option<RealmGateway>,
}

/// The gateway of a network, as this host uses it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RealmGateway {
    /// Addresses of the gateway, each with the bits of its prefix: `10.0.0.1/24`.
    pub addresses: Vec<String>,
    /// MAC address of the gateway.
    pub mac: String,
    /// Names of the hosts that have it.
    pub hosts: Vec<String>,
    /// Device of the gateway on this host; null if this host does not have it.
    pub device: Option<String>,
    /// Name of the host whose gateway new flows of guests here leave by; null if there is none.
    pub near: Option<String>,
    /// Flows of guests here through gateways.
    pub flows: u64,
    /// Those of them that go through another host's gateway.
    pub elsewhere: u64,
    /// Flows that could not be remembered, and would not survive a move.
    pub forgotten: u64,
    /// Flows that were given up because their gateway is gone.
    pub given_up: u64,
    /// Frames that were dropped because they pretended to come from the gateway.
    pub spoofed: u64,
    /// Why the gateway does not work here; null if it does.
    pub error: Option<String>,
}

/// A rendezvous server of a realm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RealmServer {
    /// Fingerprint of the server.
    pub fingerprint: String,
    /// Addresses of the server.
    pub addresses: Vec<String>,
    /// Whether this host is registered there.
    pub registered: bool,
    /// Way to the server, while it is connected: `QUIC` or `TCP`.
    pub way: Option<String>,
    /// Version of the server's ruleset, as it said last, or 0.
    pub version: u64,
    /// Why the last try to connect failed; null if it did not.
    pub error: Option<String>,
}
