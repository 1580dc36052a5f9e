//! Defines the plan of a migration: its checks and predicted costs. Planning changes nothing.

use crate::convergence::Convergence;
use crate::migration::{Asked, Strategy};
use crate::properties::Properties;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

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
    /// Whether the source would copy memory that follows to a file (default `false`). Not with the
    /// strategy `precopy`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_memory: bool,
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
    /// Continuity, resources, robustness, predictability and transparency of the move, as far as
    /// they are known before it begins.
    #[serde(default)]
    pub properties: Properties,
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

/// A predicted figure as a range. `likely` is its middle: the figure is expected to be above it as
/// often as below.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PredictedRange {
    /// Lower end.
    pub low: u64,
    /// Middle.
    pub likely: u64,
    /// Upper end.
    pub high: u64,
}

/// How a figure compares with the range that was predicted for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Judgement {
    /// The figure lies in the range, ends included.
    Inside,
    /// The figure is below the range.
    Below,
    /// The figure is above the range.
    Above,
}

impl PredictedRange {
    /// Compares a figure with the range.
    pub fn judge(&self, figure: u64) -> Judgement {
        match figure {
            figure if figure < self.low => Judgement::Below,
            figure if figure > self.high => Judgement::Above,
            _ => Judgement::Inside,
        }
    }
}

/// The predicted cost and risk of a strategy. Each figure is null if nothing is known about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Prediction {
    /// Strategy.
    pub strategy: Strategy,
    /// How likely each figure lies in its range, in percent.
    #[serde(default)]
    pub likelihood_percent: u8,
    /// Number of bytes over the link to the destination.
    #[serde(deserialize_with = "range_or_figure")]
    pub link_bytes: Option<PredictedRange>,
    /// Time from the start to the end, in milliseconds.
    #[serde(deserialize_with = "range_or_figure")]
    pub total_ms: Option<PredictedRange>,
    /// Downtime, in milliseconds: the time for which QEMU is stopped.
    #[serde(deserialize_with = "range_or_figure")]
    pub downtime_ms: Option<PredictedRange>,
    /// What the guest may wait for after the switchover, as text; null if all of its memory is at
    /// the destination by then.
    #[serde(default)]
    pub stalls: Option<String>,
    /// Number of earlier moves by whose outcomes the ranges are corrected.
    #[serde(default)]
    pub learned_from: u32,
    /// Consequence of an interruption of the link that is longer than `patience_ms`, as text.
    pub if_link_breaks: String,
    /// Consequence of a failure of the source, as text.
    pub if_source_dies: String,
    /// Warning, such as that the guest writes faster than the link carries; null without one.
    pub note: Option<String>,
}

/// Reads a range, or the single figure of an earlier agent.
pub(crate) fn range_or_figure<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<PredictedRange>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Stored {
        Range(PredictedRange),
        Figure(u64),
    }
    let stored = Option::<Stored>::deserialize(deserializer)?;
    Ok(stored.map(|stored| match stored {
        Stored::Range(range) => range,
        Stored::Figure(figure) => PredictedRange {
            low: figure,
            likely: figure,
            high: figure,
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_at_an_end_of_a_range_is_inside() {
        let range = PredictedRange {
            low: 10,
            likely: 15,
            high: 20,
        };
        let judged = [9, 10, 20, 21].map(|figure| range.judge(figure));
        assert_eq!(
            judged,
            [
                Judgement::Below,
                Judgement::Inside,
                Judgement::Inside,
                Judgement::Above
            ]
        );
    }

    #[test]
    fn a_report_of_an_earlier_agent_has_single_figures() {
        let text = r#"{"strategy": "precopy", "link_bytes": 7, "total_ms": null,
            "downtime_ms": 3, "downtime_at_most_ms": 9, "if_link_breaks": "", "if_source_dies": "",
            "note": null}"#;
        let old: Prediction = serde_json::from_str(text).unwrap();
        let figure = |figure| PredictedRange {
            low: figure,
            likely: figure,
            high: figure,
        };
        assert_eq!(old.link_bytes, Some(figure(7)));
        assert_eq!((old.total_ms, old.downtime_ms), (None, Some(figure(3))));
        let text = serde_json::to_string(&old).unwrap();
        assert_eq!(serde_json::from_str::<Prediction>(&text).unwrap(), old);
    }
}
