//! Defines the report of a migration: its predicted and its actual costs.

use crate::convergence::StopChoice;
use crate::disks::{BaseChoice, DiskChoice};
use crate::error::ApiError;
use crate::migration::{Asked, Outcome, PathUse, Phase, Side, Strategy};
use crate::plan::{Judgement, PredictedRange, Prediction};
use crate::properties::{GuestRates, Properties};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The report of a migration that has ended, or the figures so far of one that is under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// Id of the migration.
    pub id: String,
    /// Name of the guest.
    pub guest: String,
    /// This host's side.
    pub side: Side,
    /// Host that the guest leaves.
    pub source: String,
    /// Host that the guest moves to.
    pub destination: String,
    /// Strategy for the memory: the requested one, and with `auto` that which the guest was moved
    /// by, as soon as it is stopped.
    pub strategy: Strategy,
    /// Reason for the strategy, where the agent has chosen it; null otherwise.
    #[serde(default)]
    pub strategy_why: Option<String>,
    /// Requested parameters.
    pub asked: Asked,
    /// Time of the start, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Current phase, or the last one if the migration has ended.
    pub phase: Phase,
    /// Outcome; null while the migration is under way.
    pub outcome: Option<Outcome>,
    /// Reason for the outcome, and the guest's location; null if the migration completed or is
    /// under way.
    pub reason: Option<ApiError>,
    /// Prediction, made while the move began.
    pub predicted: Option<Prediction>,
    /// Whether the figures of a completed move lie in the predicted ranges; null before.
    #[serde(default)]
    pub judged: Option<Judgements>,
    /// Number of bytes sent over the link to the destination.
    pub link_bytes: Option<u64>,
    /// Number of bytes sent over the link back to the source.
    pub link_bytes_back: Option<u64>,
    /// Part of `link_bytes` of each network path; empty if there was only one.
    #[serde(default)]
    pub paths: Vec<PathUse>,
    /// Part of `link_bytes` that carried memory, in bytes.
    pub memory_bytes: Option<u64>,
    /// Part of `link_bytes` that carried disks, in bytes; null if no disk moved.
    #[serde(default)]
    pub disk_bytes: Option<u64>,
    /// Number of bytes that the destination read from its image repository, for base images of the
    /// guest's disks. They did not travel from the source. Null if no disk has a base image.
    #[serde(default)]
    pub repository_bytes: Option<u64>,
    /// Part of the realm's arbiter in the handover, as text; null if the realm names none.
    #[serde(default)]
    pub arbiter: Option<String>,
    /// Whether the arbiter could end a doubt of the handover.
    #[serde(default)]
    pub arbitrated: bool,
    /// Disks that moved.
    #[serde(default)]
    pub disks: Vec<DiskReport>,
    /// Bytes of the guest, by how they were sent.
    pub bytes: BytesByKind,
    /// Time from the start to the end, in milliseconds.
    pub total_ms: Option<u64>,
    /// Times of the phases, in their order.
    pub phases: Vec<PhaseTime>,
    /// Number of passes over the guest's memory.
    pub passes: Option<u32>,
    /// Reason for the moment of the stop; null if the guest was not stopped.
    #[serde(default)]
    pub stop: Option<StopChoice>,
    /// Time from the stop of the guest at the source until it runs at the destination, in
    /// milliseconds. The agent at the source measures it.
    pub downtime_ms: Option<f64>,
    /// Parts of the downtime.
    pub downtime: DowntimeParts,
    /// Average rate at which the guest wrote memory, in bytes per second.
    pub dirty_rate_bytes_per_s: Option<u64>,
    /// Number of interruptions of the link that the migration survived.
    pub interruptions: Option<u32>,
    /// Pages that the guest waited for while its memory followed; null if none followed, or the
    /// destination's agent was restarted meanwhile.
    #[serde(default)]
    pub faults: Option<FaultReport>,
    /// The source's memory file; null until it is complete, and if none was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_file: Option<MemoryFileReport>,
    /// Rates of the guest before, during and after the move. Each is null if it was not measured.
    #[serde(default)]
    pub guest_rates: GuestRates,
    /// Cost of the move on both hosts.
    pub cost: Cost,
    /// Result of the comparison of memory and disks; null if it was not requested or not completed.
    pub verify: Option<VerifyResult>,
    /// Offset of the guest's clock after the move; null if it is not known.
    #[serde(default)]
    pub clock: Option<GuestClock>,
    /// Hooks that ran on this host, in their order.
    #[serde(default)]
    pub hooks: Vec<HookRun>,
    /// Memory of the guest that this host has cached for its return; null if it cached none.
    #[serde(default)]
    pub kept_memory: Option<KeptMemoryReport>,
    /// Continuity, resources, robustness, predictability and transparency of the move, in figures.
    /// They follow from the other figures of the report.
    #[serde(default)]
    pub properties: Properties,
}

/// The figures of a move against the ranges predicted for them; null where there was none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Judgements {
    /// `link_bytes`.
    pub link_bytes: Option<Judgement>,
    /// `total_ms`.
    pub total_ms: Option<Judgement>,
    /// `downtime_ms`.
    pub downtime_ms: Option<Judgement>,
}

impl Report {
    /// Compares the figures with the ranges predicted for them.
    pub fn judge(&self) -> Option<Judgements> {
        let predicted = self.predicted.as_ref()?;
        let judge =
            |range: Option<PredictedRange>, figure: Option<u64>| Some(range?.judge(figure?));
        let downtime_ms = self.downtime_ms.map(|time_ms| time_ms.round() as u64);
        Some(Judgements {
            link_bytes: judge(predicted.link_bytes, self.link_bytes),
            total_ms: judge(predicted.total_ms, self.total_ms),
            downtime_ms: judge(predicted.downtime_ms, downtime_ms),
        })
    }
}

/// The pages that a guest waited for while its memory followed. A wait is the time from QEMU's
/// request for a page to the page's arrival.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FaultReport {
    /// Number of pages.
    pub pages: u64,
    /// Number of pages for each GiB of the guest's memory.
    pub pages_per_gib: f64,
    /// Median wait, in milliseconds.
    pub median_ms: f64,
    /// 99th percentile of the waits, in milliseconds.
    pub p99_ms: f64,
    /// Longest wait, in milliseconds.
    pub longest_ms: f64,
    /// Number of waits of more than 10 ms; null in reports of earlier agents.
    #[serde(default)]
    pub above_10_ms: Option<u64>,
    /// Number of waits of more than 100 ms; null in reports of earlier agents.
    #[serde(default)]
    pub above_100_ms: Option<u64>,
    /// Number of waits of more than 1000 ms; null in reports of earlier agents.
    #[serde(default)]
    pub above_1000_ms: Option<u64>,
}

/// A complete memory file: since then the source sends missing memory without the guest's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryFileReport {
    /// Size of its content that is not zero, in bytes.
    pub bytes: u64,
    /// Time from the handover until it was complete, in milliseconds; null if the agent was
    /// restarted meanwhile.
    pub complete_ms: Option<u64>,
}

/// The cached memory of a guest that left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KeptMemoryReport {
    /// Size of the cached content that is not zero, in bytes.
    pub bytes: u64,
    /// Whether all of the guest's memory is cached.
    pub whole: bool,
}

/// The offset of a guest's clock from the destination's clock. It is negative if the guest's clock
/// is behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestClock {
    /// Source of the guest's time.
    pub told_by: ClockTeller,
    /// First measured offset, in milliseconds.
    pub before_ms: i64,
    /// Final offset, in milliseconds.
    pub after_ms: i64,
    /// Whether the guest agent set the clock.
    pub set: bool,
}

/// The source of a guest's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClockTeller {
    /// The QEMU guest agent in the guest.
    GuestAgent,
    /// The machine's real-time clock, read from QEMU. Its resolution is one second.
    RealTimeClock,
}

/// A disk that moved with its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DiskReport {
    /// Name of the disk in the guest's description.
    pub name: String,
    /// Strategy of the disk.
    pub strategy: DiskChoice,
    /// Reason for the strategy, if the agent chose it; null if it was requested.
    #[serde(default)]
    pub why: Option<String>,
    /// Length of the image, in bytes.
    pub image_bytes: u64,
    /// Allocated size of the image when the move began, in bytes.
    pub allocated_bytes: u64,
    /// Id of the disk's base image, which did not move; null without one.
    #[serde(default)]
    pub base: Option<String>,
    /// Whether the guest waited for the complete base image (`whole`) or could run before (`lazy`);
    /// null without a base image.
    #[serde(default)]
    pub base_choice: Option<BaseChoice>,
}

/// A hook that ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HookRun {
    /// Step of the move, such as `released`.
    pub step: String,
    /// Run time, in milliseconds.
    pub time_ms: f64,
    /// Whether the guest was stopped while the hook ran.
    pub guest_stood_still: bool,
    /// Reason of the failure; null if the hook succeeded.
    pub error: Option<String>,
}

/// Bytes of the guest's blocks, by how they were sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BytesByKind {
    /// Bytes that are zero.
    pub zero_bytes: Option<u64>,
    /// Bytes of blocks that are unchanged since they were last sent.
    pub same_bytes: Option<u64>,
    /// Bytes of blocks whose content the destination had elsewhere in the guest's memory or disks.
    pub reference_bytes: Option<u64>,
    /// Bytes of blocks whose content the destination had from another guest that moved from the
    /// same source at the same time.
    #[serde(default)]
    pub shared_bytes: Option<u64>,
    /// Bytes of blocks whose content the destination had before: in its memory cache of the guest,
    /// in an old image, or in its content index.
    #[serde(default)]
    pub kept_bytes: Option<u64>,
    /// Bytes of blocks that equal another block sent with them.
    #[serde(default)]
    pub duplicate_bytes: Option<u64>,
    /// Bytes of blocks of which only the changes were sent.
    #[serde(default)]
    pub delta_bytes: Option<u64>,
    /// Size of these changes before compression, in bytes.
    #[serde(default)]
    pub delta_encoded_bytes: Option<u64>,
    /// Bytes of blocks that were sent in full, before compression.
    pub literal_bytes: Option<u64>,
    /// Size of the full blocks and the changes after compression, in bytes.
    pub compressed_bytes: Option<u64>,
    /// Bytes of blocks that were sent again in full, because the destination did not have the
    /// content that a reference named.
    #[serde(default)]
    pub rejected_bytes: Option<u64>,
    /// Size of the device state before compression, in bytes.
    pub device_state_bytes: Option<u64>,
}

/// The time of a phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PhaseTime {
    /// Phase.
    pub phase: Phase,
    /// Duration, in milliseconds.
    pub time_ms: f64,
}

/// The parts of the downtime, in milliseconds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DowntimeParts {
    /// Time until QEMU at the source has stopped the guest.
    pub stop_ms: Option<f64>,
    /// Time to send the last blocks and the device state.
    pub last_pages_ms: Option<f64>,
    /// Time until QEMU at the source has written the device state.
    pub device_state_ms: Option<f64>,
    /// Time until QEMU at the destination has loaded the device state, from the arrival of the last
    /// block.
    pub load_ms: Option<f64>,
    /// Time of the comparison of memory and disks; null if it was not requested.
    pub verify_ms: Option<f64>,
    /// Time of the handover, until the guest runs at the destination.
    pub commit_ms: Option<f64>,
}

/// The cost of a move on both hosts, besides the link.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cost {
    /// Cost at the source.
    pub source: HostCost,
    /// Cost at the destination.
    pub destination: HostCost,
}

/// The cost of a move on one host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostCost {
    /// CPU time of the agent during the migration, in seconds. It includes the agent's other work
    /// in that time.
    pub agent_cpu_s: Option<f64>,
    /// Peak of the agent's memory during the migration, in bytes, without the guest's memory.
    pub agent_peak_bytes: Option<u64>,
    /// CPU time of the guest's QEMU on this host since it started, in seconds.
    pub qemu_cpu_s: Option<f64>,
    /// CPU time of the page server until QEMU had all memory, in seconds; null where no memory
    /// followed to this host.
    #[serde(default)]
    pub page_server_cpu_s: Option<f64>,
}

/// The result of a comparison of both copies. It covers the memory, and each disk that is complete
/// at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VerifyResult {
    /// Number of RAM blocks compared; 0 if the agent was restarted after their comparison.
    pub regions: u32,
    /// Size of these RAM blocks, in bytes.
    pub bytes: u64,
    /// Number of disks compared.
    #[serde(default)]
    pub disks: u32,
    /// Compared size of these disks, in bytes, without blocks that the guest wrote at the
    /// destination before they could be compared.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Part of `disk_bytes` that was compared while the guest was stopped. The other blocks had
    /// been compared before, and did not change.
    #[serde(default)]
    pub disk_bytes_stopped: u64,
    /// Number of moved disks that are not compared yet, because the destination fetches blocks of
    /// them after the switchover. They are compared when no block is missing, except blocks that
    /// the guest has written there.
    #[serde(default)]
    pub disks_not_compared: u32,
    /// Number of blocks of 4096 bytes that differ.
    pub different_blocks: u64,
    /// Region and offset of the first difference; null if there is none.
    pub first_difference: Option<String>,
}
