//! Defines migrations: requesting one, watching it, changing it.

use crate::convergence::{Convergence, Outpaced};
use crate::disks::{BaseChoice, DiskChoice};
use crate::doubt::Doubt;
use crate::encoding::Encoding;
use crate::error::ApiError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Where a migration is. The order of [`Phase::ALL`] is the order in which they come; passes of
/// memory repeat within [`Phase::Precopy`].
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Checks are made, the destination's QEMU is started and compared; nothing has moved.
    Preparing,
    /// Memory is sent while the guest runs.
    Precopy,
    /// The guest is frozen; the last blocks and the device state are sent.
    Stopping,
    /// The destination's QEMU loads the device state.
    Loading,
    /// Both sides hash the guest's memory and compare (only with `verify`).
    Verifying,
    /// The right to run the guest changes hands.
    HandingOver,
    /// The guest runs at the destination; the source cleans up.
    Finishing,
}

impl Phase {
    /// Every phase, in the order in which they come.
    pub const ALL: [Self; 7] = [
        Self::Preparing,
        Self::Precopy,
        Self::Stopping,
        Self::Loading,
        Self::Verifying,
        Self::HandingOver,
        Self::Finishing,
    ];

    /// Its name, as in JSON.
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

/// How a migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The guest runs at the destination.
    Completed,
    /// Somebody asked to stop; the guest runs at the source as if nothing had been.
    Aborted,
    /// It could not be done; `reason` says why and where the guest is.
    Failed,
    /// Who may run the guest is in doubt until the two agents have met; it resolves by itself.
    InDoubt,
}

/// On which side of a migration this host is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// The guest moves away from here.
    Source,
    /// The guest moves to here.
    Destination,
}

/// Which state goes before, during and after the switchover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// Everything before it, hot memory last; what is left while the guest stands still.
    Precopy,
}

impl Strategy {
    /// Its name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Precopy => "precopy",
        }
    }
}

/// A migration to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartMigration {
    /// The guest.
    pub guest: String,
    /// The host to move it to, by the name that it is trusted under.
    pub to: String,
    /// The downtime to aim for, in milliseconds: 300 where it is left out.
    #[serde(default = "downtime_default")]
    pub downtime_ms: u64,
    /// Send no faster than this, in bits per second: as fast as the link takes where it is null.
    #[serde(default)]
    pub bandwidth_bps: Option<u64>,
    /// Whether both sides hash all memory and all disks that move before the guest is handed over,
    /// and
    /// compare.
    #[serde(default)]
    pub verify: bool,
    /// How long an interruption of the link is ridden out, in milliseconds: 60000 where it is
    /// left out.
    #[serde(default = "patience_default")]
    pub patience_ms: u64,
    /// Whether the right to run is given away when the guest is stopped, not when the destination
    /// is ready: about one round trip less of downtime, and a longer time in doubt.
    #[serde(default)]
    pub early_release: bool,
    /// How memory is encoded.
    #[serde(default, skip_serializing_if = "Encoding::is_default")]
    pub encoding: Encoding,
    /// When the guest is stopped, and what is done where it writes too fast.
    #[serde(default)]
    pub convergence: Convergence,
    /// How the disks move that are on the source host alone.
    #[serde(default, skip_serializing_if = "DiskChoice::is_default")]
    pub disks: DiskChoice,
    /// When the guest goes on at a destination that does not have all of the base images that its
    /// disks stand on.
    #[serde(default, skip_serializing_if = "BaseChoice::is_default")]
    pub bases: BaseChoice,
    /// The name of a group, of up to 64 letters, digits, `-`, `_` and `.`: moves of one name that
    /// are under
    /// way at the same time share `bandwidth_bps` equally.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

pub(crate) fn downtime_default() -> u64 {
    300
}

fn patience_default() -> u64 {
    60_000
}

/// What was asked of a migration; by default, what is said of one of which that is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Asked {
    /// The downtime to aim for, in milliseconds.
    pub downtime_ms: u64,
    /// Send no faster than this, in bits per second.
    pub bandwidth_bps: Option<u64>,
    /// Whether both sides hash all memory and all disks that move, and compare.
    pub verify: bool,
    /// How long an interruption of the link is ridden out, in milliseconds.
    pub patience_ms: u64,
    /// Whether the right to run is given away when the guest is stopped.
    #[serde(default)]
    pub early_release: bool,
    /// How memory is encoded, as far as it was asked for.
    #[serde(default)]
    pub encoding: Encoding,
    /// When the guest is stopped, and what is done where it writes too fast.
    #[serde(default)]
    pub convergence: Convergence,
    /// The group that it moves with; null where it moves by itself.
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
            encoding: start.encoding.clone(),
            convergence: start.convergence,
            group: start.group.clone(),
        }
    }
}

/// A new limit for a migration under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Send no faster than this, in bits per second: as fast as the link takes where it is null.
    pub bandwidth_bps: Option<u64>,
}

/// A migration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Migration {
    /// Its id: 16 hexadecimal digits.
    pub id: String,
    /// The guest.
    pub guest: String,
    /// On which side of it this host is.
    pub side: Side,
    /// The host that the guest moves from.
    pub source: String,
    /// The host that it moves to.
    pub destination: String,
    /// The strategy.
    pub strategy: Strategy,
    /// What was asked for.
    pub asked: Asked,
    /// When it began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// When it ended, in milliseconds since 1970; null while it is under way.
    pub ended_unix_ms: Option<u64>,
    /// Where it is, or was when it ended.
    pub phase: Phase,
    /// How it ended; null while it is under way.
    pub outcome: Option<Outcome>,
    /// Why it ended like that, and where the guest is.
    pub reason: Option<ApiError>,
    /// What is known while it is in doubt who may run the guest; null otherwise.
    #[serde(default)]
    pub doubt: Option<Doubt>,
    /// The latest progress, as long as the agent remembers it.
    pub progress: Option<Progress>,
}

/// Migrations of this host, the newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Migrations {
    /// The newest first.
    pub migrations: Vec<Migration>,
}

/// Where a migration is at one moment: one line of a watched migration. The last line has an
/// outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Progress {
    /// The migration's id.
    pub id: String,
    /// Time since it began, in milliseconds.
    pub elapsed_ms: u64,
    /// Where it is.
    pub phase: Phase,
    /// The pass over the guest's memory, from 1; null before the first.
    pub pass: Option<u32>,
    /// What is moved, by region.
    pub regions: Vec<RegionProgress>,
    /// The link.
    pub link: LinkProgress,
    /// How fast the guest changes its memory.
    pub dirty_rate_bytes_per_s: Option<u64>,
    /// What the downtime would be if the guest were stopped now, in milliseconds.
    pub predicted_downtime_ms: Option<u64>,
    /// Where the guest writes faster than the link carries: what becomes of that; null otherwise.
    #[serde(default)]
    pub outpaced: Option<Outpaced>,
    /// Whether the destination may still have to get the base images that the guest's disks stand
    /// on: the guest is not
    /// stopped before it has them.
    #[serde(default)]
    pub awaits_bases: bool,
    /// What keeps what is left of the guest's disks from being taken at the destination, where it
    /// runs, or what is wrong
    /// with what came; null where nothing is.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Time until the guest runs at the destination, in milliseconds.
    pub remaining_ms: Option<u64>,
    /// How it ended; null while it is under way.
    pub outcome: Option<Outcome>,
    /// Why it ended like that, and where the guest is.
    pub reason: Option<ApiError>,
}

/// Where a region is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RegionProgress {
    /// The region's name, such as `pc.ram`.
    pub name: String,
    /// Its size, in blocks of 4096 bytes.
    pub blocks_total: u64,
    /// Blocks whose newest content is at the destination.
    pub blocks_settled: u64,
    /// Blocks that are still to be sent.
    pub blocks_pending: u64,
    /// Whether it is a disk, by the name that the guest's description has for it.
    #[serde(default)]
    pub disk: bool,
    /// How a disk moves; null for memory.
    #[serde(default)]
    pub strategy: Option<DiskChoice>,
    /// Why so, where the agent has chosen it; null otherwise.
    #[serde(default)]
    pub why: Option<String>,
    /// Requests of the guest that wait for a part of a disk that is yet to come; null where this
    /// side does not
    /// see them.
    #[serde(default)]
    pub waiting: Option<u64>,
    /// Where the source cannot read what is left of a disk: the first byte of the first such block;
    /// null where it
    /// can.
    #[serde(default)]
    pub unreadable_byte: Option<u64>,
}

/// How the link is used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkProgress {
    /// Rate at which it is used now, in bits per second.
    pub rate_bps: Option<u64>,
    /// Round trip, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// Bytes sent to the destination so far.
    pub sent_bytes: u64,
    /// Bytes of the guest that those stand for.
    pub guest_bytes: Option<u64>,
    /// The limit that holds now, in bits per second.
    pub limit_bps: Option<u64>,
    /// For how long the destination has not been heard of, in milliseconds; null while it is.
    pub interrupted_ms: Option<u64>,
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
        assert!(!asked.verify && !asked.early_release);
        let unknown = serde_json::from_str::<StartMigration>(r#"{"guest":"a","to":"b","x":1}"#);
        assert!(unknown.is_err());
    }
}
