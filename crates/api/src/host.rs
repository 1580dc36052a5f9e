//! Defines this host, and the hosts that it trusts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The host whose agent answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// The name that this host goes by.
    pub name: String,
    /// Its fingerprint, for people to compare.
    pub fingerprint: String,
    /// The agent's version.
    pub version: String,
    /// Versions of the protocol between agents that it speaks, newest first.
    pub protocol_versions: Vec<u32>,
    /// The UDP address on which it listens for other agents.
    pub listen: Option<String>,
    /// The TCP address on which it serves this API, where it does.
    pub api_listen: Option<String>,
    /// The folder that holds its identity, trust and journal.
    pub state_folder: String,
    /// The QEMUs that it can run guests with.
    pub qemus: Vec<Qemu>,
    /// Whether guests can really run with KVM here.
    pub kvm: Option<bool>,
    /// Memory of this host.
    pub memory_total_bytes: Option<u64>,
    /// Memory that is available to further guests.
    pub memory_free_bytes: Option<u64>,
    /// Guests that run here.
    pub guests_running: Option<u32>,
    /// Folders and volumes of this host's images in which the agent may not write: disks there
    /// cannot move.
    #[serde(default)]
    pub not_writable: Vec<NotWritable>,
    /// Process id of the agent.
    pub pid: u32,
}

/// A folder or volume in which the agent may not write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NotWritable {
    /// The folder or volume.
    pub path: String,
    /// What is wrong.
    pub text: String,
    /// What to do about it.
    pub hint: String,
}

/// A QEMU of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Qemu {
    /// The name by which this host's configuration calls it.
    pub name: String,
    /// Its version, such as `10.0.2`; null where it could not be asked.
    pub version: Option<String>,
    /// The program.
    pub path: String,
}

/// What a trusted host may ask of this one.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// It may ask what this host is and has.
    Query,
    /// It may send guests here.
    Send,
}

/// A host to trust from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// The name to call it by here.
    pub name: String,
    /// Its fingerprint, as its own agent shows it.
    pub fingerprint: String,
    /// Where it may be reached: UDP addresses, `host:port` each, tried in this order.
    pub addresses: Vec<String>,
    /// What it may ask of this host: `query` where it is left out.
    #[serde(default = "query")]
    pub may: Vec<Scope>,
    /// Whether it may take the place of another host that is trusted under that name.
    #[serde(default)]
    pub replace: bool,
}

fn query() -> Vec<Scope> {
    vec![Scope::Query]
}

/// A host that is trusted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrustedHost {
    /// The name that it is called by here.
    pub name: String,
    /// Its fingerprint.
    pub fingerprint: String,
    /// Where it may be reached: UDP addresses, `host:port` each, tried in this order.
    pub addresses: Vec<String>,
    /// What it may ask of this host.
    pub may: Vec<Scope>,
}

/// The trusted hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrustedHosts {
    /// By name.
    pub hosts: Vec<TrustedHost>,
}

/// A measurement of the link to a trusted host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// How long to send, in seconds (1 to 60): 3 where it is left out.
    #[serde(default = "three")]
    pub seconds: u32,
    /// Send no faster than this, in bits per second: as fast as the link takes where it is null.
    #[serde(default)]
    pub bandwidth_bps: Option<u64>,
}

fn three() -> u32 {
    3
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            seconds: three(),
            bandwidth_bps: None,
        }
    }
}

/// What a probe measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProbeResult {
    /// The host's name here.
    pub host: String,
    /// The version of its agent.
    pub version: Option<String>,
    /// Round trip before anything was sent, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Round trip while sending, in milliseconds.
    pub rtt_loaded_ms: Option<f64>,
    /// Rate from this host to that one, in bits per second of content, as the other side
    /// counted it.
    pub rate_bps: Option<u64>,
    /// The same over the second half of the time.
    pub rate_late_bps: Option<u64>,
    /// Rate on the wire, in bits per second: with headers, and with what was lost.
    pub wire_rate_bps: Option<u64>,
    /// Share of the packets that were lost, from 0 to 1.
    pub loss: Option<f64>,
}
