//! Defines migrations: their start, progress, limits and outcome.

use crate::convergence::{Convergence, Outpaced};
use crate::disks::{BaseChoice, DiskChoice};
use crate::doubt::Doubt;
use crate::encoding::Encoding;
use crate::error::ApiError;
use crate::plan::PredictedRange;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// A phase of a migration. The phases are listed in their order. All passes over the memory belong
/// to `precopy`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The checks run, and the destination starts its QEMU. Nothing has moved.
    Preparing,
    /// The source sends memory while the guest runs.
    Precopy,
    /// The guest is stopped. The source sends the last blocks and the device state.
    Stopping,
    /// QEMU at the destination loads the device state.
    Loading,
    /// Both hosts compare the guest's memory and the last changes of its disks, by digest (only
    /// with `verify`).
    Verifying,
    /// The right to run the guest changes hosts.
    HandingOver,
    /// The guest runs at the destination. The source sends missing blocks of disks, and cleans up.
    Finishing,
}

impl Phase {
    /// All phases, in their order.
    pub const ALL: [Self; 7] = [
        Self::Preparing,
        Self::Precopy,
        Self::Stopping,
        Self::Loading,
        Self::Verifying,
        Self::HandingOver,
        Self::Finishing,
    ];

    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Precopy => "precopy",
            Self::Stopping => "stopping",
            Self::Loading => "loading",
            Self::Verifying => "verifying",
            Self::HandingOver => "handing_over",
            Self::Finishing => "finishing",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The outcome of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The guest is at the destination.
    Completed,
    /// The migration was cancelled. The guest is at the source, as before.
    Aborted,
    /// The migration failed. `reason` has the cause and the guest's location.
    Failed,
    /// It is in doubt which host may run the guest, until the agents connect again. Without an
    /// operator's decision, the migration then ends by itself.
    InDoubt,
}

/// This host's side of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The guest leaves this host.
    Source,
    /// The guest moves to this host.
    Destination,
}

/// A strategy: when the guest's memory is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// All of it is sent before the switchover. Pages that the guest writes often, and all pending
    /// ones, are sent while it is stopped.
    #[default]
    Precopy,
    /// All of it is sent once before the switchover. What the guest has written since then follows
    /// while it runs at the destination: pages that it waits for first.
    Hybrid,
    /// The guest is stopped as soon as the destination can take it. Until then its memory is sent
    /// as fast as the link carries. The rest follows while it runs at the destination: pages that
    /// it waits for first.
    Postcopy,
    /// As `hybrid` if the guest writes too fast for the downtime and its memory can follow;
    /// otherwise as `precopy`.
    Auto,
}

impl Strategy {
    /// All strategies.
    pub const ALL: [Self; 4] = [Self::Precopy, Self::Hybrid, Self::Postcopy, Self::Auto];

    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
            Self::Hybrid => "hybrid",
            Self::Postcopy => "postcopy",
            Self::Auto => "auto",
        }
    }

    /// Returns whether it is the default.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL
            .into_iter()
            .find(|strategy| strategy.name() == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("it is one of {names}")
        })
    }
}

/// A migration to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartMigration {
    /// Name of the guest.
    pub guest: String,
    /// Host to move the guest to, by its trusted name.
    pub to: String,
    /// Downtime to aim for, in milliseconds (1 to 600000, default 300).
    #[serde(default = "downtime_default")]
    pub downtime_ms: u64,
    /// Rate limit, in bits per second (100000 to 10¹²); null for no limit.
    #[serde(default)]
    pub bandwidth_bps: Option<u64>,
    /// Strategy for the memory (default `precopy`).
    #[serde(default, skip_serializing_if = "Strategy::is_default")]
    pub strategy: Strategy,
    /// Whether both hosts compare all memory and all moving disks by digest before the handover
    /// (default `false`). Disks with `hybrid` or `postcopy` are compared after the switchover.
    /// Memory with one of these strategies is not compared.
    #[serde(default)]
    pub verify: bool,
    /// Time limit for an interruption of the link, in milliseconds (100 to 86400000, default
    /// 60000). Before the handover, a longer one fails the migration.
    #[serde(default = "patience_default")]
    pub patience_ms: u64,
    /// Whether the source releases the guest when it stops it, not when the destination is ready
    /// (default `false`). This saves about one round trip of downtime. If the connection fails
    /// after the stop, the guest stays stopped until the agents connect again.
    #[serde(default)]
    pub early_release: bool,
    /// Whether the migration fails unless the realm's arbiter can end a doubt (default `false`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub require_arbiter: bool,
    /// Whether the source copies memory that follows to a file, so that the death of its QEMU or a
    /// restart of the host is a pause (default `false`). Not with the strategy `precopy`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_memory: bool,
    /// Encoding of memory and disks.
    #[serde(default, skip_serializing_if = "Encoding::is_default")]
    pub encoding: Encoding,
    /// Rule for the stop of the guest, and the response if it writes too fast.
    #[serde(default)]
    pub convergence: Convergence,
    /// Strategy for local disks: those that only the source has (default `auto`).
    #[serde(default, skip_serializing_if = "DiskChoice::is_default")]
    pub disks: DiskChoice,
    /// When a guest on a base image runs at the destination: when the image is complete there, or
    /// before (default `whole`).
    #[serde(default, skip_serializing_if = "BaseChoice::is_default")]
    pub bases: BaseChoice,
    /// Name of a group: 1 to 64 letters, digits, `-`, `_` and `.`. Migrations of one group that are
    /// under way at the same time share `bandwidth_bps` equally. Null for no group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

pub(crate) fn downtime_default() -> u64 {
    300
}

fn patience_default() -> u64 {
    60_000
}

/// The parameters of a migration. Those that this host does not know are 0, null, `false` or the
/// default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Asked {
    /// Downtime to aim for, in milliseconds.
    pub downtime_ms: u64,
    /// Rate limit, in bits per second; null for no limit.
    pub bandwidth_bps: Option<u64>,
    /// Whether both hosts compare all memory and all moving disks.
    pub verify: bool,
    /// Time limit for an interruption of the link, in milliseconds.
    pub patience_ms: u64,
    /// Whether the source releases the guest when it stops it.
    #[serde(default)]
    pub early_release: bool,
    /// Whether the source copies memory that follows to a file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_memory: bool,
    /// Requested encoding.
    #[serde(default)]
    pub encoding: Encoding,
    /// Rule for the stop of the guest, and the response if it writes too fast.
    #[serde(default)]
    pub convergence: Convergence,
    /// Name of the migration's group; null if it has none.
    #[serde(default)]
    pub group: Option<String>,
}

impl From<&StartMigration> for Asked {
    fn from(start: &StartMigration) -> Self {
        Self {
            downtime_ms: start.downtime_ms,
            bandwidth_bps: start.bandwidth_bps,
            verify: start.verify,
            patience_ms: start.patience_ms,
            early_release: start.early_release,
            keep_memory: start.keep_memory,
            encoding: start.encoding.clone(),
            convergence: start.convergence,
            group: start.group.clone(),
        }
    }
}

/// A new rate limit for a migration that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Rate limit, in bits per second (100000 to 10¹²); null for no limit.
    pub bandwidth_bps: Option<u64>,
}

/// A migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Migration {
    /// Id of the migration: 16 hexadecimal digits.
    pub id: String,
    /// Name of the guest.
    pub guest: String,
    /// This host's side.
    pub side: Side,
    /// Host that the guest leaves.
    pub source: String,
    /// Host that the guest moves to.
    pub destination: String,
    /// Strategy for the memory.
    pub strategy: Strategy,
    /// Requested parameters.
    pub asked: Asked,
    /// Time of the start, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Time of the end, in milliseconds since 1970; null while the migration is under way or in
    /// doubt.
    pub ended_unix_ms: Option<u64>,
    /// Current phase, or the last one if the migration has ended.
    pub phase: Phase,
    /// Outcome; null while the migration is under way.
    pub outcome: Option<Outcome>,
    /// Reason for the outcome, and the guest's location; null if the migration completed or is
    /// under way.
    pub reason: Option<ApiError>,
    /// State of a migration that needs the other host, which does not answer; null otherwise.
    #[serde(default)]
    pub doubt: Option<Doubt>,
    /// Latest progress; null if the agent does not have it.
    pub progress: Option<Progress>,
}

/// The migrations from and to this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Migrations {
    /// Migrations, the newest first.
    pub migrations: Vec<Migration>,
}

/// The progress of a migration: one line of a watched migration. The last line has an outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Progress {
    /// Id of the migration.
    pub id: String,
    /// Time since the start, in milliseconds.
    pub elapsed_ms: u64,
    /// Current phase.
    pub phase: Phase,
    /// Number of the current pass over the guest's memory, from 1; null before the first.
    pub pass: Option<u32>,
    /// Progress of each region.
    pub regions: Vec<RegionProgress>,
    /// State of the link.
    pub link: LinkProgress,
    /// Rate at which the guest writes memory, in bytes per second.
    pub dirty_rate_bytes_per_s: Option<u64>,
    /// Predicted downtime if the guest were stopped now, in milliseconds.
    pub predicted_downtime_ms: Option<u64>,
    /// State of a guest that writes faster than the link carries; null otherwise.
    #[serde(default)]
    pub outpaced: Option<Outpaced>,
    /// Whether the destination may still lack base images of the guest's disks. The guest is not
    /// stopped before it has them.
    #[serde(default)]
    pub awaits_bases: bool,
    /// Reason why the destination cannot fetch missing blocks of disks, or an error in fetched
    /// blocks; null without one.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Estimated time until everything is sent, in milliseconds; null while the rate of the link is
    /// not known.
    #[serde(deserialize_with = "crate::plan::range_or_figure")]
    pub remaining_ms: Option<PredictedRange>,
    /// Outcome; null while the migration is under way.
    pub outcome: Option<Outcome>,
    /// Reason for the outcome, and the guest's location; null if the migration completed or is
    /// under way.
    pub reason: Option<ApiError>,
}

/// The progress of a region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegionProgress {
    /// Name of the region, such as `pc.ram`. For a disk, its name in the guest's description.
    pub name: String,
    /// Size of the region, in blocks of 4096 bytes.
    pub blocks_total: u64,
    /// Number of blocks whose newest content is at the destination.
    pub blocks_settled: u64,
    /// Number of blocks that are pending, or missing at the destination.
    pub blocks_pending: u64,
    /// Whether the region is a disk.
    #[serde(default)]
    pub disk: bool,
    /// Strategy of a disk; null for memory, or if it is not known.
    #[serde(default)]
    pub strategy: Option<DiskChoice>,
    /// Reason for the strategy, if the agent has chosen it; null otherwise.
    #[serde(default)]
    pub why: Option<String>,
    /// Number of the guest's requests that wait for missing blocks of the disk; null for memory,
    /// and at the source.
    #[serde(default)]
    pub waiting: Option<u64>,
    /// Offset of the first pending block of the disk that the source cannot read, in bytes; null if
    /// it can read all.
    #[serde(default)]
    pub unreadable_byte: Option<u64>,
}

/// The use of the link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkProgress {
    /// Current rate of delivery, in bits per second.
    pub rate_bps: Option<u64>,
    /// Round-trip time, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Number of bytes sent to the destination.
    pub sent_bytes: u64,
    /// Size of the guest's blocks that these bytes describe, in bytes.
    pub guest_bytes: Option<u64>,
    /// Rate limit of the migration, in bits per second; null without one.
    pub limit_bps: Option<u64>,
    /// Time since the last sign of the other host, in milliseconds; null while the hosts are
    /// connected.
    pub interrupted_ms: Option<u64>,
    /// What each network path has carried; empty if there is only one.
    #[serde(default)]
    pub paths: Vec<PathUse>,
}

/// The use of a network path to the other host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PathUse {
    /// Address of the other host.
    pub to: String,
    /// Address of this host; null if the system chooses it.
    pub from: Option<String>,
    /// Number of bytes sent over it.
    pub sent_bytes: u64,
    /// Whether it carries data now, or did at the end.
    pub up: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_listed_in_their_order_and_named_as_in_json() {
        assert!(Phase::ALL.is_sorted());
        for phase in Phase::ALL {
            let json = serde_json::to_string(&phase).unwrap();
            assert_eq!(json, format!("\"{}\"", phase.name()));
        }
        let schema = schemars::schema_for!(Phase);
        let known = schema.get("oneOf").and_then(|list| list.as_array());
        assert_eq!(known.map(Vec::len), Some(Phase::ALL.len()));
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        let start: StartMigration = serde_json::from_str(r#"{"guest":"a","to":"b"}"#).unwrap();
        let asked = Asked::from(&start);
        assert_eq!(asked.downtime_ms, 300);
        assert_eq!(asked.patience_ms, 60_000);
        assert_eq!(asked.bandwidth_bps, None);
        assert!(!asked.verify && !asked.early_release && !asked.keep_memory);
        let unknown = serde_json::from_str::<StartMigration>(r#"{"guest":"a","to":"b","x":1}"#);
        assert!(unknown.is_err());
    }
}
