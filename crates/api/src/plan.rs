//! Defines the plan of a migration: its checks and predicted costs, determined without changing
//! anything.

use crate::convergence::Convergence;
use crate::migration::{Asked, Strategy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which migration to plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// The guest.
    pub guest: String,
    /// The host to move it to, by the name that it is trusted under.
    pub to: String,
    /// The downtime to aim for, in milliseconds: 300 where it is left out.
    #[serde(default = "crate::migration::downtime_default")]
    pub downtime_ms: u64,
    /// Send no faster than this, in bits per second: as fast as the link takes where it is null.
    #[serde(default)]
    pub bandwidth_bps: Option<u64>,
    /// Whether the right to run would be given away when the guest is stopped.
    #[serde(default)]
    pub early_release: bool,
    /// When the guest would be stopped, and what would be done where it writes too fast.
    #[serde(default)]
    pub convergence: Convergence,
}

/// A plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// The guest.
    pub guest: String,
    /// The host that it runs on.
    pub source: String,
    /// The host that it would move to.
    pub destination: String,
    /// What was asked for.
    pub asked: Asked,
    /// Whether no check refuses.
    pub possible: bool,
    /// Version of the guest's QEMU here.
    pub qemu: Option<String>,
    /// The guest's versioned machine type.
    pub machine_type: Option<String>,
    /// `kvm` or `tcg`.
    pub accelerator: Option<String>,
    /// Number of virtual CPUs.
    pub vcpus: Option<u32>,
    /// The guest's memory.
    pub memory_bytes: Option<u64>,
    /// How much of it holds something else than zeros.
    pub memory_used_bytes: Option<u64>,
    /// How fast the guest changes its memory (each block counted once a second).
    pub dirty_rate_bytes_per_s: Option<u64>,
    /// Memory that changes again and again.
    pub hot_bytes: Option<u64>,
    /// Shortest round trip to the destination, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Rate to the destination, in bits per second.
    pub rate_bps: Option<u64>,
    /// Every check, in the order in which they were made.
    pub checks: Vec<Check>,
    /// What each strategy would cost; the one that would be taken comes first.
    pub predictions: Vec<Prediction>,
}

/// What a check found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// The migration can go, and something should be known before.
    Warn,
    /// The migration would be refused.
    Refuse,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// The check's name, for programs, such as `peer_reachable`.
    pub name: String,
    /// What it found.
    pub verdict: Verdict,
    /// The same in words.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Check {
    /// Creates a check that passed.
    pub fn ok(name: &str, message: impl Into<String>) -> Self {
        Self::new(name, Verdict::Ok, message, None)
    }

    /// Creates a check with a warning.
    pub fn warn(name: &str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(name, Verdict::Warn, message, Some(hint.into()))
    }

    /// Creates a check that refuses.
    pub fn refuse(name: &str, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(name, Verdict::Refuse, message, Some(hint.into()))
    }

    fn new(name: &str, verdict: Verdict, message: impl Into<String>, hint: Option<String>) -> Self {
        Self {
            name: name.to_owned(),
            verdict,
            message: message.into(),
            hint,
        }
    }
}

/// What a strategy is predicted to cost and to risk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// The strategy.
    pub strategy: Strategy,
    /// Bytes over the link to the destination.
    pub link_bytes: Option<u64>,
    /// From start to end, in milliseconds.
    pub total_ms: Option<u64>,
    /// How long the guest stands still, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// How long it stands still at most, in milliseconds.
    pub downtime_at_most_ms: Option<u64>,
    /// What happens when the link breaks for longer than patience.
    pub if_link_breaks: String,
    /// What happens when the source host dies.
    pub if_source_dies: String,
    /// What else is to be known, such as that the guest writes faster than the link carries.
    pub note: Option<String>,
}
