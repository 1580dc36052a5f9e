//! What a member shows of its realm.

use longhaul_protocol::{HostId, StoreId};
use longhaul_realm::key::RealmId;
use longhaul_realm::membership::{Member, Standing};
use longhaul_realm::ruleset::{NetworkEntry, ServerEntry};

/// A host's view of its realm. It is replaced as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The realm.
    pub realm: RealmId,
    /// What this host is in it.
    pub standing: Standing,
    /// The version of the ruleset in force, or 0.
    pub version: u64,
    /// When the ruleset ends, in seconds since 1970, or 0.
    pub expires_s: u64,
    /// The members, this host included.
    pub members: Vec<Member>,
    /// The networks.
    pub networks: Vec<NetworkEntry>,
    /// The servers.
    pub servers: Vec<LinkState>,
    /// The arbiter that the ruleset names: the server and its store.
    pub arbiter: Option<(HostId, StoreId)>,
    /// What an operator should know, the latest last; at most 32.
    pub notices: Vec<String>,
    /// The number of refusals by servers so far, and the last one. A host that joins watches it.
    pub refused: (u64, Option<(HostId, longhaul_realm::protocol::Refused)>),
}

/// A server, as this host reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkState {
    /// Who it is, and where.
    pub server: ServerEntry,
    /// Whether this host is registered there.
    pub registered: bool,
    /// The way: `QUIC` or `TCP`, while it is connected.
    pub way: Option<&'static str>,
    /// The version of its ruleset, as it said last.
    pub version: u64,
    /// Failed tries in sequence.
    pub failures: u32,
    /// Why the last try failed.
    pub error: Option<String>,
}

impl Status {
    /// Returns whether this host is a member and registered at a server.
    pub fn is_registered(&self) -> bool {
        self.standing.is_member() && self.servers.iter().any(|server| server.registered)
    }
}
