//! A row of the bench.

use super::progress::Progress;
use super::{Case, LIMIT, System};
use crate::history::workload::Work;
use crate::moves::MoveRow;
use longhaul_history::plan::SECTOR_BYTES;
use serde::Serialize;

/// What all benches of moves say, and what this one does besides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Row {
    #[serde(flatten)]
    pub(super) moved: MoveRow<Parameters>,
    /// How fast the guest did its work from the beginning of the move to its end, relative to a guest that did
    /// the same without being moved.
    pub(super) throughput_vs_none: Option<f64>,
    /// How much longer it took for that work than the other, in seconds.
    pub(super) lost_s: Option<f64>,
    /// What is different of the disk's nodes, their options and the open files, before and after the move.
    pub(super) disk_changes: Option<u64>,
}

/// What the guest is and does.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Parameters {
    /// The file that is written over and over.
    pub(super) file_bytes: u64,
    /// The disk that it lies on.
    pub(super) disk_size_bytes: u64,
    /// What is written at most, outside of bursts.
    pub(super) write_bytes_per_s: Option<u64>,
    /// What is read at most.
    pub(super) read_bytes_per_s: Option<u64>,
    /// What is written at once, and how often.
    pub(super) burst_bytes: Option<u64>,
    pub(super) burst_every_ms: Option<u64>,
    /// How many requests are under way at a time.
    pub(super) depth: u32,
    /// Bytes of pages beside it, and how many are rewritten per second.
    pub(super) arena_bytes: u64,
    pub(super) pages_per_s: u64,
    /// The operation at which the move is asked for.
    pub(super) began_at_operation: u64,
    /// When a move is given up.
    pub(super) limit_ms: u64,
    pub(super) machine: String,
    pub(super) guest_memory_bytes: u64,
}

impl Parameters {
    /// What the workload says of itself.
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

    /// Notes how the guest fared beside one that was not moved.
    pub(super) fn compare(&mut self, progress: &Progress, undisturbed: Option<&Progress>) {
        let relative = undisturbed.and_then(|it| progress.relative_to(it));
        self.throughput_vs_none = relative.map(|it| it.throughput);
        self.lost_s = relative.map(|it| it.lost_s);
    }
}

/// A row in one line.
pub(super) fn show(row: &Row) -> String {
    let moved = &row.moved;
    let number = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
    };
    let megabytes = |bytes: Option<u64>| number(bytes.map(|bytes| bytes as f64 / 1e6), "MB");
    format!(
        "{:<26} {:<8} {:<7} repeat {}: {} over the link, disk {}, {}, downtime {}, throughput {}, lost {}, errors {}, {}",
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
