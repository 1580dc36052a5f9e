//! Formats the results of `lab bench strategies`.

use super::cases::{self, Measure, systems};
use super::rows::{Rows, at};
use super::{Section, maybe, number, percent};
use serde_json::Value;

/// Formats a table, and a plot of each measure over all workloads and links.
pub(super) fn show(rows: &Rows<'_>, name: &str, section: &mut Section) {
    section.paragraph(
        "A workload is named by the rate at which the guest writes whole pages (`max`: as fast \
         as it can) and the part of its memory that it writes. A move ends when no content is \
         missing at the destination. The downtime is the longest time without a heartbeat; that \
         of the switchover is the part until the first one from the destination. The guest's \
         work is relative to that before the move, and the 10 s begin with the stop at the \
         source. A move that has not switched over after a minute is forced to.",
    );
    let cases = cases::of(rows);
    let head = [
        "workload",
        "link",
        "system",
        "completed",
        "forced",
        "over the link, MB",
        "total, s",
        "downtime, ms",
        "of the switchover, ms",
        "work during the move",
        "work in the 10 s after the switchover",
        "verify errors",
    ];
    let mut lines = Vec::new();
    for (case, rows) in &cases {
        for (system, rows) in systems(rows) {
            let [completed, forced] =
                ["completed", "forced"].map(|outcome| rows.with("outcome", outcome).0.len());
            let work = |key: &str| percent(rows.median_of(|row| of_before(row, key)));
            let errors = rows
                .0
                .iter()
                .filter_map(|row| row["verify_errors"].as_f64());
            lines.push(vec![
                case.workload.clone(),
                case.link.clone(),
                system,
                format!("{completed} of {}", rows.0.len()),
                forced.to_string(),
                maybe(rows.median("link_bytes"), 1e6),
                maybe(rows.median("total_ms"), 1e3),
                maybe(rows.median("downtime_ms"), 1.0),
                maybe(rows.median("switchover_ms"), 1.0),
                work("work_during_per_s"),
                work("work_after_switchover_per_s"),
                number(errors.sum()),
            ]);
        }
    }
    section.table(&head, &lines);
    let measures = [
        Measure {
            key: "downtime_ms",
            scale: 1.0,
            file: "downtime",
            title: "Downtime",
            y: "ms",
        },
        Measure {
            key: "total_ms",
            scale: 1e-3,
            file: "total",
            title: "Total time",
            y: "s",
        },
        Measure {
            key: "work_after_switchover_per_s",
            scale: 1.0,
            file: "work",
            title: "The guest's work in the 10 s after the switchover",
            y: "pages per second",
        },
    ];
    cases::plot(&cases, &measures, name, section);
}

/// Returns a row's work relative to that before the move.
fn of_before(row: &Value, key: &str) -> Option<f64> {
    let before = at(row, "work_before_per_s")?.as_f64()?;
    Some(at(row, key)?.as_f64()? / before)
}
