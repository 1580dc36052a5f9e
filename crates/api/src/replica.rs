//! Defines replicas: copies of guests' disks that another host keeps, version by version.

use crate::doubt::OtherSide;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How many versions of a replica are kept: the last ones, and for the last hours, days and weeks
/// (in UTC, of those that have versions) the last version of each. At most 1,000 for each reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Retention {
    /// Last versions: at least 1.
    pub last: u32,
    /// Hours.
    pub hourly: u32,
    /// Days.
    pub daily: u32,
    /// Weeks, from Monday.
    pub weekly: u32,
}

/// How a guest is replicated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplicateGuest {
    /// Name of the host that keeps the replica.
    pub to: String,
    /// Time from one version to the next, in seconds: 10 to 604,800.
    pub every_s: u64,
    /// Versions that are kept there.
    pub keep: Retention,
    /// Whether the guest's file systems are not frozen at the moment of a version, also if its
    /// agent could do that (default `false`).
    #[serde(default)]
    pub no_freeze: bool,
}

/// What a replication does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReplicationState {
    /// It waits until the next version is due.
    Waiting,
    /// A version is under way.
    Running,
    /// The last version failed, and is tried again.
    Failing,
    /// The guest does not run here any more. Nothing is replicated.
    Ended,
}

/// A version of a guest's disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReplicaVersion {
    /// Its number.
    pub version: u64,
    /// When it was begun, in milliseconds of Unix time. It has everything that was written before.
    pub unix_ms: u64,
    /// Whether all disks are as they were at one moment. Only such a version can be failed over to.
    pub consistent: bool,
    /// Whether the guest's agent had frozen its file systems at that moment.
    pub frozen: bool,
}

/// The replication of a guest of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Replication {
    /// Name of the guest.
    pub guest: String,
    /// Name of the host that keeps the replica.
    pub to: String,
    /// Time from one version to the next, in seconds.
    pub every_s: u64,
    /// Versions that are kept there.
    pub keep: Retention,
    /// Whether the guest's file systems are not frozen, also if its agent could do that.
    pub no_freeze: bool,
    /// What it does.
    pub state: ReplicationState,
    /// The last version of one moment that the other host has confirmed.
    pub last: Option<ReplicaVersion>,
    /// Age of that version in seconds: what a loss of this host would cost now.
    pub behind_s: Option<u64>,
    /// The longest time that `behind_s` has been since the agent began, in seconds.
    pub longest_behind_s: Option<u64>,
    /// Bytes of the disks that may have changed since that version; null if that is not known, and
    /// all of the disks will be compared.
    pub changed_bytes: Option<u64>,
    /// Bytes of content that the last version, or the present one, has sent.
    pub sent_bytes: u64,
    /// Time that the last version took, in milliseconds.
    pub took_ms: Option<u64>,
    /// Disk that is read now, and its part that is done, from 0 to 100.
    pub reading: Option<(String, u8)>,
    /// Reason why the last version failed, was of no moment, or its file systems were not frozen.
    pub trouble: Option<String>,
}

/// The replications of this host's guests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Replications {
    /// Replications, by the names of their guests.
    pub replications: Vec<Replication>,
}

/// A replica that this host keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Replica {
    /// Name of the guest.
    pub guest: String,
    /// Name of the host that it comes from.
    pub from: String,
    /// Time from one version to the next, in seconds, as that host intends.
    pub every_s: u64,
    /// Versions that are kept.
    pub keep: Retention,
    /// Versions that can be restored, from the oldest one.
    pub versions: Vec<ReplicaVersion>,
    /// Age of the newest version of one moment in seconds: what a loss of the other host would cost
    /// now.
    pub behind_s: Option<u64>,
    /// Whether that is more than twice the intended time.
    pub late: bool,
    /// Version that an operator has failed over to, until the guest's disks are in place.
    pub failing_over_to: Option<u64>,
    /// Reason why the replica cannot be used.
    pub trouble: Option<String>,
}

/// The replicas that this host keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Replicas {
    /// Replicas, by the names of their guests.
    pub replicas: Vec<Replica>,
}

/// An operator's statement to let a guest run from its replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FailOver {
    /// Reason why the other host cannot run the guest. It ensures that no two copies run. If that
    /// host answers, `dead` is refused.
    pub other_side: OtherSide,
    /// Reason, for the log: at most 500 characters.
    pub because: String,
    /// Number of the version; the newest one of one moment if it is null.
    #[serde(default)]
    pub version: Option<u64>,
    /// Whether the guest is not started afterwards (default `false`).
    #[serde(default)]
    pub no_start: bool,
}

/// The result of a failover.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FailedOver {
    /// Name of the guest.
    pub guest: String,
    /// Version that its disks have.
    pub version: ReplicaVersion,
    /// Whether it was started.
    pub started: bool,
    /// Reason why it was not started, if it was to be.
    pub trouble: Option<String>,
    /// Images of its disks.
    pub images: Vec<String>,
}
