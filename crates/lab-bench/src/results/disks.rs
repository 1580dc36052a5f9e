//! Formats the results of `lab bench disk`.

use super::cases::{self, Measure, systems};
use super::rows::Rows;
use super::{Section, maybe, number, percent};

/// Formats a table for each link, and a plot of each measure over all workloads and links.
pub(super) fn show(rows: &Rows<'_>, name: &str, section: &mut Section) {
    section.paragraph(
        "A move ends when the source may be deleted. The guest's throughput is that of the whole \
         move, its drain included, relative to a guest that did the same work and was not moved; \
         lost is how much longer it took for that. A move that was given up stands here with the \
         time until then.",
    );
    let cases = cases::of(rows);
    let head = [
        "workload",
        "link",
        "system",
        "completed",
        "over the link, MB",
        "of the disk, MB",
        "total, s",
        "downtime, ms",
        "guest's throughput",
        "lost, s",
        "verify errors",
    ];
    let mut lines = Vec::new();
    for (case, rows) in &cases {
        for (system, rows) in systems(rows) {
            let moves = rows.0.len() - rows.with("outcome", "not moved").0.len();
            let completed = match moves {
                0 => "-".to_owned(),
                _ => format!("{} of {moves}", rows.with("outcome", "completed").0.len()),
            };
            let errors = rows
                .0
                .iter()
                .filter_map(|row| row["verify_errors"].as_f64());
            lines.push(vec![
                case.workload.clone(),
                case.link.clone(),
                system,
                completed,
                maybe(rows.median("link_bytes"), 1e6),
                maybe(rows.median("disk_bytes"), 1e6),
                maybe(rows.median("total_ms"), 1e3),
                maybe(rows.median("downtime_ms"), 1.0),
                percent(rows.median("throughput_vs_none")),
                maybe(rows.median("lost_s"), 1.0),
                number(errors.sum()),
            ]);
        }
    }
    section.table(&head, &lines);
    let measures = [
        Measure {
            key: "total_ms",
            scale: 1e-3,
            file: "total",
            title: "Time until the source may be deleted",
            y: "s",
        },
        Measure {
            key: "link_bytes",
            scale: 1e-6,
            file: "bytes",
            title: "Bytes over the link",
            y: "MB",
        },
        Measure {
            key: "throughput_vs_none",
            scale: 100.0,
            file: "throughput",
            title: "The guest's throughput during the move",
            y: "% of a guest's that is not moved",
        },
    ];
    cases::plot(&cases, &measures, name, section);
}
