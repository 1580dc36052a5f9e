//! Defines when a guest is stopped, and the responses to one that writes faster than the link
//! carries.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The rule that decides when to stop the guest. All but `predicted` exist for comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopRule {
    /// Stop when the predicted downtime of the pending data, after encoding, is within the
    /// requested downtime. Pages that the guest writes often are sent after the stop.
    #[default]
    Predicted,
    /// CloudNet's rule: stop when less is pending than after each of the last 5 passes, or when the
    /// pending data grows in each of them.
    Cloudnet,
    /// Xen's rule: stop when fewer than 50 pages are pending, after 30 passes, or when more than 3
    /// times the memory was sent.
    Xen,
    /// QEMU's rule: stop when the pending data, uncompressed, fits the requested downtime, or when
    /// `wait_at_most_ms` has passed.
    Qemu,
}

/// The response to a guest that writes too fast for the requested downtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TooFast {
    /// Stop the guest at the best moment, with a longer downtime.
    #[default]
    Accept,
    /// Slow the guest in steps, up to a limit. If that does not suffice in time, accept a longer
    /// downtime.
    Slow,
    /// Wait until the guest writes less. If it does not in time, accept a longer downtime.
    Wait,
}

/// The convergence of a migration. Requests may omit fields, and answers omit fields that have
/// their default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Convergence {
    /// Rule that decides when to stop the guest (default `predicted`).
    #[serde(skip_serializing_if = "is_default")]
    pub stop_rule: StopRule,
    /// Response to a guest that writes too fast (default `accept`).
    #[serde(skip_serializing_if = "is_default")]
    pub too_fast: TooFast,
    /// Maximum share of the guest's time that `slow` takes, in percent (1 to 99, default 60).
    #[serde(skip_serializing_if = "is_usual_share")]
    pub slow_at_most_percent: u8,
    /// Time limit for `slow` and `wait`, in milliseconds (default 300000). With the `qemu` rule it
    /// always applies.
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

/// A guest that writes faster than the link carries, and the consequences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Outpaced {
    /// Rate that the guest's writes need on the link, in bytes per second.
    pub written_bytes_per_s: u64,
    /// Rate of the link, in bytes per second.
    pub link_bytes_per_s: u64,
    /// Share of the guest's time that is taken to slow it, in percent; null if it is not slowed.
    pub slowed_percent: Option<u8>,
    /// Next step without an operator's decision, as text.
    pub then: String,
    /// Alternatives, as text.
    pub choices: String,
}

/// The reason for the moment of the stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The prediction, or the rule's measure, was within the limit.
    WithinLimit,
    /// No improvement was expected: the guest wrote too fast for the link.
    LocalMinimum,
    /// The pending data grew with each pass.
    RisingTrend,
    /// The time limit for slowing or waiting had passed.
    WaitedEnough,
    /// The rule's limit on passes was reached.
    Passes,
    /// The rule's limit on bytes was reached.
    Bytes,
}

/// The choice of the moment of the stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StopChoice {
    /// Rule that decided.
    pub rule: StopRule,
    /// Reason for the moment.
    pub reason: StopReason,
    /// Predicted downtime at that moment, in milliseconds; null if the rate of the link was not
    /// known.
    pub predicted_ms: Option<u64>,
    /// Upper bound of this prediction, in milliseconds.
    pub predicted_at_most_ms: Option<u64>,
    /// Share of the guest's time that was taken to slow it, in percent; null if it was not slowed.
    pub slowed_percent: Option<u8>,
}
