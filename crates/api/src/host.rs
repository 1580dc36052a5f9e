//! Defines this host, and the hosts that it trusts.

use crate::migration::PathUse;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The host of the agent that answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Name of this host.
    pub name: String,
    /// Fingerprint of this host's key.
    pub fingerprint: String,
    /// Version of the agent.
    pub version: String,
    /// Versions of the protocol between agents that this agent speaks, the oldest first.
    pub protocol_versions: Vec<u32>,
    /// UDP address on which the agent listens for other agents.
    pub listen: Option<String>,
    /// TCP address of this API; null if it is not configured.
    pub api_listen: Option<String>,
    /// Folder of the agent's identity, trust and journals.
    pub state_folder: String,
    /// QEMUs of this host's configuration.
    pub qemus: Vec<Qemu>,
    /// Whether guests run with KVM; null if it is not known.
    pub kvm: Option<bool>,
    /// Memory of this host, in bytes.
    pub memory_total_bytes: Option<u64>,
    /// Memory that is available for more guests, in bytes.
    pub memory_free_bytes: Option<u64>,
    /// Number of guests that have a QEMU here.
    pub guests_running: Option<u32>,
    /// Folders and volumes of this host's images in which the agent may not write. Disks in them
    /// cannot move.
    #[serde(default)]
    pub not_writable: Vec<NotWritable>,
    /// Process id of the agent.
    pub pid: u32,
}

/// A folder or volume in which the agent may not write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NotWritable {
    /// Path of the folder or volume.
    pub path: String,
    /// Cause.
    pub text: String,
    /// Remedy.
    pub hint: String,
}

/// A QEMU of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Qemu {
    /// Name of the QEMU in this host's configuration.
    pub name: String,
    /// Version, such as `10.0.2`; null if it is not known.
    pub version: Option<String>,
    /// Path of the program.
    pub path: String,
}

/// A permission that a trusted host has on this one.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Permission to query this host: what it is, what it has, and which guests it could take.
    Query,
    /// Permission to send guests to this host.
    Send,
}

/// A host to trust.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Trust {
    /// Name for the host: 1 to 63 letters, digits, `-`, `_` and `.`. The first is a letter or
    /// digit.
    pub name: String,
    /// Fingerprint of the host, as its own agent shows it.
    pub fingerprint: String,
    /// UDP addresses of the host's agent, as `host:port`, the preferred one first. At least one is
    /// required.
    pub addresses: Vec<String>,
    /// Permissions of the host (default `["query"]`). With an empty list, only this host may query
    /// the other one.
    #[serde(default = "query")]
    pub may: Vec<Scope>,
    /// Whether the host replaces another one with this name (default `false`). Without it, a known
    /// name with another fingerprint is refused.
    #[serde(default)]
    pub replace: bool,
}

fn query() -> Vec<Scope> {
    vec![Scope::Query]
}

/// A trusted host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrustedHost {
    /// Name of the host on this one.
    pub name: String,
    /// Fingerprint of the host.
    pub fingerprint: String,
    /// UDP addresses of the host's agent, as `host:port`, the preferred one first.
    pub addresses: Vec<String>,
    /// Permissions of the host.
    pub may: Vec<Scope>,
}

/// The trusted hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrustedHosts {
    /// Hosts, by name.
    pub hosts: Vec<TrustedHost>,
}

/// A measurement of the link to a trusted host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// Duration of the measurement, in seconds (1 to 60, default 3).
    #[serde(default = "three")]
    pub seconds: u32,
    /// Rate limit, in bits per second (100000 to 10¹²); null for no limit.
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

/// The result of a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProbeResult {
    /// Name of the other host.
    pub host: String,
    /// Version of the other host's agent; null if it is not known.
    pub version: Option<String>,
    /// Round-trip time before anything is sent, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Round-trip time while sending, in milliseconds.
    pub rtt_loaded_ms: Option<f64>,
    /// Rate to the other host, in bits of content per second, counted by the receiver.
    pub rate_bps: Option<u64>,
    /// The same rate over the second half of the time.
    pub rate_late_bps: Option<u64>,
    /// Rate on the wire, in bits per second, headers and lost packets included.
    pub wire_rate_bps: Option<u64>,
    /// The rate in each second of the measurement, in bits of content per second.
    #[serde(default)]
    pub per_second_bps: Vec<u64>,
    /// What each network path has carried; empty if there is only one.
    #[serde(default)]
    pub paths: Vec<PathUse>,
    /// Share of packets that were lost, from 0 to 1.
    pub loss: Option<f64>,
    /// UDP address under which the other host's agent sees this one; null if it does not report it
    /// (older agents).
    pub seen_as: Option<String>,
    /// The same address as this host knows it. If it differs from `seen_as`, a NAT is between the
    /// hosts. Null if it is not known.
    pub local_address: Option<String>,
}
