//! Defines a row of the bench.

use super::progress::Progress;
use super::{Case, LIMIT, System};
use crate::moves::MoveRow;
use longhaul_history::plan::SECTOR_BYTES;
use longhaul_lab::history::workload::Work;
use serde::Serialize;

/// The common fields of all benches of moves, and those of this one.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) moved: MoveRow<Parameters>,
    /// The guest's rate of work from the beginning of the move to its end, relative to a guest with
    /// the same work that was not moved.
    pub(super) throughput_vs_none: Option<f64>,
    /// How much longer it took for that work than the other, in seconds.
    pub(super) lost_s: Option<f64>,
    /// Differences in the disk's nodes, their options and the open files, before and after the
    /// move.
    pub(super) disk_changes: Option<u64>,
}

/// The parameters of the guest.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Parameters {
    /// Size of the file that is written repeatedly.
    pub(super) file_bytes: u64,
    /// Size of its disk.
    pub(super) disk_size_bytes: u64,
    /// The maximum write rate, outside of bursts.
    pub(super) write_bytes_per_s: Option<u64>,
    /// The maximum read rate.
    pub(super) read_bytes_per_s: Option<u64>,
    /// The size of a burst of writes, and the interval of bursts.
    pub(super) burst_bytes: Option<u64>,
    pub(super) burst_every_ms: Option<u64>,
    /// The number of requests under way at a time.
    pub(super) depth: u32,
    /// Bytes of pages beside it, and the number rewritten per second.
    pub(super) arena_bytes: u64,
    pub(super) pages_per_s: u64,
    /// The operation at which the move is requested.
    pub(super) began_at_operation: u64,
    /// The time limit of a move.
    pub(super) limit_ms: u64,
    pub(super) machine: String,
    pub(super) guest_memory_bytes: u64,
}

impl Parameters {
    /// Returns the parameters of a workload.
    pub(super) fn of(work: &Work) -> Self {
        let block = work.file.map_or(0, |file| file.block) * SECTOR_BYTES as u64;
        let limited = |per_s: u64| (per_s > 0).then_some(per_s * block);
        let bursts = work.burst > 0;
        Self {
            file_bytes: work.file.map_or(0, |file| file.sectors) * SECTOR_BYTES as u64,
            write_bytes_per_s: limited(work.operations_per_s),
            read_bytes_per_s: limited(work.reads_per_s),
            burst_bytes: bursts.then_some(work.burst * block),
            burst_every_ms: bursts.then_some(work.burst_every.as_millis() as u64),
            limit_ms: LIMIT.as_millis() as u64,
            ..Self::default()
        }
    }
}

impl Row {
    pub(super) fn new(
        case: &Case,
        system: System,
        parameters: Parameters,
        downtime_ms: u64,
    ) -> Self {
        let names = [system.name(), system.strategy(), case.workload.name()];
        Self {
            moved: MoveRow::new(names, parameters, case.link, case.repeat, downtime_ms),
            throughput_vs_none: None,
            lost_s: None,
            disk_changes: None,
        }
    }

    /// Compares the guest's progress with that of one that was not moved.
    pub(super) fn compare(&mut self, progress: &Progress, undisturbed: Option<&Progress>) {
        let relative = undisturbed.and_then(|it| progress.relative_to(it));
        self.throughput_vs_none = relative.map(|it| it.throughput);
        self.lost_s = relative.map(|it| it.lost_s);
    }
}

/// Returns a row as one line.
pub(super) fn show(row: &Row) -> String {
    let moved = &row.moved;
    let number = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
    };
    let megabytes = |bytes: Option<u64>| number(bytes.map(|bytes| bytes as f64 / 1e6), "MB");
    format!(
        "{:<26} {:<8} {:<7} repeat {}: {} over the link, disk {}, {}, downtime {}, throughput {}, \
         lost {}, errors {}, {}",
        moved.system,
        moved.strategy,
        moved.workload,
        moved.repeat,
        megabytes(moved.link_bytes),
        megabytes(moved.disk_bytes),
        number(moved.total_ms.map(|ms| ms / 1e3), "s"),
        number(moved.downtime_ms, "ms"),
        number(row.throughput_vs_none.map(|share| share * 100.0), "%"),
        number(row.lost_s, "s"),
        moved
            .verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
        moved.outcome,
    )
}
