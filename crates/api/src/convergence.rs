//! Defines when a guest is stopped, and the measures against one that writes faster than the link
//! carries.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which rule says when the guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopRule {
    /// As soon as the downtime that is predicted, over what is left after encoding, fits what was
    /// asked for; memory that is written again and again waits for the stop.
    #[default]
    Predicted,
    /// CloudNet's smart stop, to compare with: less is left than after each of the last 5 passes.
    Cloudnet,
    /// Xen's, to compare with: fewer than 50 pages left, 30 passes, or 3 times the memory sent.
    Xen,
    /// QEMU's, to compare with: what is left, uncompressed, fits the downtime asked for.
    Qemu,
}

/// What is done about a guest that writes too fast for the downtime asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TooFast {
    /// Stop it at the best moment, and accept a longer downtime.
    #[default]
    Accept,
    /// Slow it, step by step and up to a limit, and accept a longer downtime where that is not
    /// enough in time.
    Slow,
    /// Wait for a quieter moment, and accept a longer downtime where none comes in time.
    Wait,
}

/// How a migration comes to its end. What is as usual may be left out, and is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Convergence {
    /// The rule.
    #[serde(skip_serializing_if = "is_default")]
    pub stop_rule: StopRule,
    /// What is done about a guest that writes too fast.
    #[serde(skip_serializing_if = "is_default")]
    pub too_fast: TooFast,
    /// By how much a guest may be slowed, in percent of its time.
    #[serde(skip_serializing_if = "is_usual_share")]
    pub slow_at_most_percent: u8,
    /// How long a guest that writes too fast is slowed, or waited for, in milliseconds.
    #[serde(skip_serializing_if = "is_usual_wait")]
    pub wait_at_most_ms: u64,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn is_usual_share(percent: &u8) -> bool {
    *percent == Convergence::default().slow_at_most_percent
}

fn is_usual_wait(time_ms: &u64) -> bool {
    *time_ms == Convergence::default().wait_at_most_ms
}

impl Default for Convergence {
    fn default() -> Self {
        Self {
            stop_rule: StopRule::default(),
            too_fast: TooFast::default(),
            slow_at_most_percent: 60,
            wait_at_most_ms: 300_000,
        }
    }
}

/// A guest that writes faster than the link carries, and what becomes of that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Outpaced {
    /// What its writes take on the link, in bytes per second.
    pub written_bytes_per_s: u64,
    /// What the link carries, in bytes per second.
    pub link_bytes_per_s: u64,
    /// By how much it is slowed, in percent of its time; null where it is not.
    pub slowed_percent: Option<u8>,
    /// What happens by itself.
    pub then: String,
    /// What else could be done.
    pub choices: String,
}

/// Why a guest was stopped when it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// What the rule looks at was within what was asked for.
    WithinLimit,
    /// It would not have got better: the guest wrote too fast for the link.
    LocalMinimum,
    /// More and more was left.
    RisingTrend,
    /// It had been slowed or waited for as long as was allowed.
    WaitedEnough,
    /// As many passes as the rule allows.
    Passes,
    /// As many bytes as the rule allows.
    Bytes,
}

/// How the moment of the stop was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StopChoice {
    /// The rule.
    pub rule: StopRule,
    /// Why it was then.
    pub reason: StopReason,
    /// The downtime that was predicted in that moment, in milliseconds; null where the link was not
    /// known.
    pub predicted_ms: Option<u64>,
    /// The same with what it is unsure by, in milliseconds.
    pub predicted_at_most_ms: Option<u64>,
    /// By how much the guest was slowed, in percent of its time; null where it was not.
    pub slowed_percent: Option<u8>,
}
