//! Defines the report of a migration: its predicted and its actual costs.

use crate::convergence::StopChoice;
use crate::disks::{BaseChoice, DiskChoice};
use crate::error::ApiError;
use crate::migration::{Asked, Outcome, Phase, Side, Strategy};
use crate::plan::Prediction;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The account of a migration that has ended, or so far of one under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The migration's id.
    pub id: String,
    /// The guest.
    pub guest: String,
    /// On which side of it this host was.
    pub side: Side,
    /// The host that the guest moved from.
    pub source: String,
    /// The host that it moved to.
    pub destination: String,
    /// The strategy.
    pub strategy: Strategy,
    /// What was asked for.
    pub asked: Asked,
    /// When it began, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Where it was when it ended.
    pub phase: Phase,
    /// How it ended; null while it is under way.
    pub outcome: Option<Outcome>,
    /// Why it ended like that, and where the guest is.
    pub reason: Option<ApiError>,
    /// What was predicted when it began.
    pub predicted: Option<Prediction>,
    /// Bytes over the link to the destination.
    pub link_bytes: Option<u64>,
    /// Bytes over the link back to the source.
    pub link_bytes_back: Option<u64>,
    /// What of that carried the guest's memory.
    pub memory_bytes: Option<u64>,
    /// What of that carried the guest's disks; null where none moved.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    /// Bytes that the destination read from its repository for the base images that disks stand on,
    /// which did not
    /// come over the link from the source; null where none stands on one.
    #[serde(default)]
    pub repository_bytes: Option<u64>,
    /// The disks that moved.
    #[serde(default)]
    pub disks: Vec<DiskReport>,
    /// Bytes of the guest, by how they travelled.
    pub bytes: BytesByKind,
    /// From start to end, in milliseconds.
    pub total_ms: Option<u64>,
    /// Time of each phase that it went through, in their order.
    pub phases: Vec<PhaseTime>,
    /// Passes over the guest's memory.
    pub passes: Option<u32>,
    /// How the moment to stop the guest was chosen; null where it was not stopped.
    #[serde(default)]
    pub stop: Option<StopChoice>,
    /// From the guest's stop at the source to its start at the destination, in milliseconds, as
    /// the source's agent measured it.
    pub downtime_ms: Option<f64>,
    /// Where the downtime went.
    pub downtime: DowntimeParts,
    /// How fast the guest changed its memory, on average.
    pub dirty_rate_bytes_per_s: Option<u64>,
    /// Interruptions of the link that were ridden out.
    pub interruptions: Option<u32>,
    /// What the move cost the two hosts.
    pub cost: Cost,
    /// What the comparison of all memory and disks found, where it was asked for.
    pub verify: Option<VerifyResult>,
    /// The guest's clock after the move; null where it is not known.
    #[serde(default)]
    pub clock: Option<GuestClock>,
    /// The hooks that were run on this host, in their order.
    #[serde(default)]
    pub hooks: Vec<HookRun>,
    /// What the guest's memory held when it left this host, as far as that is kept here for when it
    /// comes back.
    #[serde(default)]
    pub kept_memory: Option<KeptMemoryReport>,
}

/// What was written to disk of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeptMemoryReport {
    /// What is not zero, in bytes.
    pub bytes: u64,
    /// Whether that is all of it.
    pub whole: bool,
}

/// The clock of a guest that runs again, against that of the host that it moved to. Negative: it is
/// behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestClock {
    /// Who told it.
    pub told_by: ClockTeller,
    /// How far it was off when it was first looked at, in milliseconds.
    pub before_ms: i64,
    /// How far it was off in the end, in milliseconds.
    pub after_ms: i64,
    /// Whether the guest agent was told to set it right.
    pub set: bool,
}

/// Who told the time of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClockTeller {
    /// The QEMU guest agent inside it.
    GuestAgent,
    /// The machine's real-time clock, which is seen from outside and to the second.
    RealTimeClock,
}

/// A disk that moved with its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskReport {
    /// Its name in the guest's description.
    pub name: String,
    /// How it moved.
    pub strategy: DiskChoice,
    /// Why so, where the agent has chosen it; null where it was asked for.
    #[serde(default)]
    pub why: Option<String>,
    /// The length of its image.
    pub image_bytes: u64,
    /// What of that took space when the move began.
    pub allocated_bytes: u64,
    /// The id of the base image that it stands on, which did not move; null where it stands on
    /// none.
    #[serde(default)]
    pub base: Option<String>,
    /// When the guest went on, where not all of that was at the destination; null where it stands
    /// on none.
    #[serde(default)]
    pub base_choice: Option<BaseChoice>,
}

/// A hook that was run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HookRun {
    /// Its step, such as `released`.
    pub step: String,
    /// How long it took, in milliseconds.
    pub time_ms: f64,
    /// Whether the guest stood still meanwhile.
    pub guest_stood_still: bool,
    /// Why it failed; null where it did not.
    pub error: Option<String>,
}

/// Bytes of the guest's blocks, by how they travelled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BytesByKind {
    /// All zero.
    pub zero_bytes: Option<u64>,
    /// The same as was sent of that block before.
    pub same_bytes: Option<u64>,
    /// The same as another block that the destination had.
    pub reference_bytes: Option<u64>,
    /// The same as a block of another guest that the destination had from the same source.
    #[serde(default)]
    pub shared_bytes: Option<u64>,
    /// Found in what the destination had kept from before.
    #[serde(default)]
    pub kept_bytes: Option<u64>,
    /// The same as another block that was sent with them.
    #[serde(default)]
    pub duplicate_bytes: Option<u64>,
    /// Sent as what had changed of them since they were sent before.
    #[serde(default)]
    pub delta_bytes: Option<u64>,
    /// What those were encoded to, before compression.
    #[serde(default)]
    pub delta_encoded_bytes: Option<u64>,
    /// Sent as they are, before compression.
    pub literal_bytes: Option<u64>,
    /// What the literal and the encoded ones were compressed to.
    pub compressed_bytes: Option<u64>,
    /// Sent again whole, since the destination did not hold what they were described by.
    #[serde(default)]
    pub rejected_bytes: Option<u64>,
    /// The state of the guest's devices, before compression.
    pub device_state_bytes: Option<u64>,
}

/// How long a phase took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseTime {
    /// The phase.
    pub phase: Phase,
    /// Its time, in milliseconds.
    pub time_ms: f64,
}

/// The parts of the downtime, in milliseconds. They follow one another.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DowntimeParts {
    /// Until QEMU had stopped the guest.
    pub stop_ms: Option<f64>,
    /// Until its last blocks were at the destination.
    pub last_pages_ms: Option<f64>,
    /// Until the state of its devices was at the destination.
    pub device_state_ms: Option<f64>,
    /// Until the destination's QEMU had loaded it.
    pub load_ms: Option<f64>,
    /// Comparing all memory and what was left of disks, where it was asked for.
    pub verify_ms: Option<f64>,
    /// Handing over the right to run, until the guest ran.
    pub commit_ms: Option<f64>,
}

/// What the move cost the two hosts, beside the link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cost {
    /// The source.
    pub source: HostCost,
    /// The destination.
    pub destination: HostCost,
}

/// What the move cost a host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostCost {
    /// CPU time of its agent during the migration, in seconds.
    pub agent_cpu_s: Option<f64>,
    /// Most memory that its agent used at once, without the guest's own.
    pub agent_peak_bytes: Option<u64>,
    /// CPU time of the guest's QEMU there during the migration, in seconds.
    pub qemu_cpu_s: Option<f64>,
}

/// What comparing all memory, and all disks that were at the destination before the guest ran
/// there, found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyResult {
    /// RAM blocks compared.
    pub regions: u32,
    /// Bytes of them.
    pub bytes: u64,
    /// Disks compared.
    #[serde(default)]
    pub disks: u32,
    /// Bytes of them; without what the guest had written at the destination before it could be
    /// compared.
    #[serde(default)]
    pub disk_bytes: u64,
    /// What of those was compared while the guest stood still; the rest had been before, and had
    /// not
    /// changed since.
    #[serde(default)]
    pub disk_bytes_stopped: u64,
    /// Disks that moved and are not compared yet: a part of them comes when the guest runs at the
    /// destination. All of them
    /// is compared then, but for what the guest has written there.
    #[serde(default)]
    pub disks_not_compared: u32,
    /// Blocks of 4096 bytes that differed.
    pub different_blocks: u64,
    /// The first difference: region, offset and count.
    pub first_difference: Option<String>,
}
