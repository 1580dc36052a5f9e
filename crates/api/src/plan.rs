//! Defines the plan of a migration: its checks and predicted costs. Planning changes nothing.

use crate::convergence::Convergence;
use crate::migration::{Asked, Strategy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A migration to plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// Name of the guest.
    pub guest: String,
    /// Host to move the guest to, by its trusted name.
    pub to: String,
    /// Downtime to aim for, in milliseconds (1 to 600000, default 300).
    #[serde(default = "crate::migration::downtime_default")]
    pub downtime_ms: u64,
    /// Rate limit, in bits per second (100000 to 10¹²); null for no limit.
    #[serde(default)]
    pub bandwidth_bps: Option<u64>,
    /// Strategy for the memory (default `precopy`).
    #[serde(default, skip_serializing_if = "Strategy::is_default")]
    pub strategy: Strategy,
    /// Whether the source would release the guest when it stops it (default `false`).
    #[serde(default)]
    pub early_release: bool,
    /// Whether the migration would fail without the realm's arbiter (default `false`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_arbiter: bool,
    /// Rule for the stop of the guest, and the response if it writes too fast.
    #[serde(default)]
    pub convergence: Convergence,
}

/// The plan of a migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Plan {
    /// Name of the guest.
    pub guest: String,
    /// Host of the guest.
    pub source: String,
    /// Host that the guest would move to.
    pub destination: String,
    /// Requested parameters.
    pub asked: Asked,
    /// Whether the migration is possible: no check refuses it.
    pub possible: bool,
    /// Version of the guest's QEMU at the source.
    pub qemu: Option<String>,
    /// Versioned machine type of the guest.
    pub machine_type: Option<String>,
    /// Accelerator of the guest: `kvm` or `tcg`.
    pub accelerator: Option<String>,
    /// Number of virtual CPUs.
    pub vcpus: Option<u32>,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Part of the memory that is not zero, in bytes, estimated from a sample.
    pub memory_used_bytes: Option<u64>,
    /// Rate at which the guest writes memory, in bytes per second. A block counts once per second,
    /// however often it is written.
    pub dirty_rate_bytes_per_s: Option<u64>,
    /// Size of memory that the guest writes often, in bytes.
    pub hot_bytes: Option<u64>,
    /// Shortest round-trip time to the destination, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Rate to the destination, in bits per second.
    pub rate_bps: Option<u64>,
    /// Checks, in the order in which they were made.
    pub checks: Vec<Check>,
    /// Predicted costs of each strategy. The first is the one that would be used.
    pub predictions: Vec<Prediction>,
}

/// The verdict of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The check passed.
    Ok,
    /// The migration is possible. The message has a warning.
    Warn,
    /// The migration would be refused.
    Refuse,
}

/// A check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    /// Name of the check, for programs, such as `destination`.
    pub name: String,
    /// Verdict.
    pub verdict: Verdict,
    /// Finding, as text.
    pub message: String,
    /// Remedy; null if none is needed.
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

/// The predicted cost and risk of a strategy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// Strategy.
    pub strategy: Strategy,
    /// Number of bytes over the link to the destination.
    pub link_bytes: Option<u64>,
    /// Time from the start to the end, in milliseconds.
    pub total_ms: Option<u64>,
    /// Downtime, in milliseconds.
    pub downtime_ms: Option<u64>,
    /// Upper bound of the downtime, in milliseconds.
    pub downtime_at_most_ms: Option<u64>,
    /// Consequence of an interruption of the link that is longer than `patience_ms`, as text.
    pub if_link_breaks: String,
    /// Consequence of a failure of the source, as text.
    pub if_source_dies: String,
    /// Warning, such as that the guest writes faster than the link carries; null without one.
    pub note: Option<String>,
}
