//! Measures the guest `tiny` at five dirty rates.

use super::super::document::{Document, Sense, median};
use super::{ASKED_DOWNTIME_MS, Asked, Movers, System, counts, judge_own, ratio};
use crate::moves::{Case, Load, MoveRow};
use crate::peer::PeerSystem;
use longhaul_lab::arena::Workload;
use longhaul_lab::error::LabError;
use longhaul_lab::guest::Tiny;
use std::time::Duration;

/// The dirty rates of the checks, as shares of the link's rate.
const BAR_SHARES: [f64; 4] = [0.0, 0.1, 0.3, 0.6];
/// A dirty rate with which sending whole pages cannot converge on any link.
const FASTER_THAN_LINK: f64 = 1.5;
const QUICK_SHARES: [f64; 2] = [0.0, 0.3];
const GUEST_MEMORY_MIB: u64 = 256;
const ARENA_BYTES: u64 = 96 << 20;
const WORKING_SET_BYTES: u64 = 32 << 20;
const LIMIT: Duration = Duration::from_secs(120);
/// How long a move that cannot converge is observed.
const HOPELESS_LIMIT: Duration = Duration::from_secs(60);

const BYTES_LIMIT: f64 = 0.6;
const RANDOM_BYTES_LIMIT: f64 = 1.02;
const DOWNTIME_OF_QEMU: f64 = 1.1;

/// Runs the bench, adding rows and then checks to the document.
pub(super) fn measure(
    asked: &Asked<'_>,
    systems: &[System],
    movers: &Movers<'_>,
    document: &mut Document,
) -> Result<(), LabError> {
    let mut rows = Vec::new();
    for case in cases(asked) {
        for system in systems {
            // Sending whole pages can never catch up: one run shows it.
            let hopeless = case.load.dirty_share().is_some_and(|share| share > 1.0);
            if hopeless && case.repeat > 1 && *system != System::Longhaul {
                continue;
            }
            rows.push(movers.add_row(&case, *system, document)?);
        }
    }
    if systems.contains(&System::Longhaul) && systems.contains(&System::Peer(PeerSystem::Default)) {
        judge(&rows, document);
    }
    Ok(())
}

fn cases(asked: &Asked<'_>) -> Vec<Case> {
    let options = asked.options;
    let mut kinds: Vec<(&str, f64)> = if options.quick {
        QUICK_SHARES.map(|share| ("mix", share)).to_vec()
    } else {
        BAR_SHARES
            .into_iter()
            .chain([FASTER_THAN_LINK])
            .map(|share| ("mix", share))
            .collect()
    };
    kinds.push(("random", 0.0));
    kinds.retain(|(content, share)| {
        // Every dirty rate of a content, or one of them, named as in the checks.
        options.wants_workload(content) || options.wants_workload(&format!("{content}_{share}"))
    });
    let mut cases = Vec::new();
    for repeat in 1..=options.repeats() {
        for (content, share) in &kinds {
            // A guest that was moved away cannot be started again under its name.
            let mut guest = Tiny::new(&format!("bench-{}", cases.len() + 1));
            guest.memory_mib = GUEST_MEMORY_MIB;
            let mut guest = guest.description();
            guest.machine.clone_from(&asked.machine);
            let arena = Workload {
                content: (*content).to_owned(),
                arena_bytes: ARENA_BYTES,
                working_set_bytes: WORKING_SET_BYTES,
                pages_per_s: Case::pages_per_s(asked.link, *share),
                write_bytes: 512,
                writers: 1,
                verify_pages_per_s: 1000,
                seed: options.seed.wrapping_add(u64::from(repeat)),
            };
            cases.push(Case {
                guest,
                load: Load::Arena {
                    name: (*content).to_owned(),
                    arena,
                    dirty_share: Some(*share),
                },
                link: asked.link,
                downtime_ms: ASKED_DOWNTIME_MS,
                limit: if *share > 1.0 { HOPELESS_LIMIT } else { LIMIT },
                force_after: None,
                observe: Duration::ZERO,
                repeat,
            });
        }
    }
    cases
}

/// Computes the checks from the rows.
fn judge(rows: &[MoveRow], document: &mut Document) {
    let mut kinds: Vec<(String, f64)> = Vec::new();
    for row in rows {
        let share = row.parameters.dirty_rate_of_link.unwrap_or(0.0);
        let kind = (row.workload.clone(), share);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    for (workload, share) in kinds {
        let of = |system: &str| -> Vec<&MoveRow> {
            let of_kind = rows.iter().filter(|row| {
                row.workload == workload && row.parameters.dirty_rate_of_link == Some(share)
            });
            of_kind
                .filter(|row| row.system == system && counts(row))
                .collect()
        };
        let (longhaul, peer) = (of("longhaul"), of(PeerSystem::Default.name()));
        let bytes = ratio(&longhaul, &peer, |row| {
            row.link_bytes.map(|bytes| bytes as f64)
        });
        if workload == "random" {
            let name = "bytes_vs_qemu_default.random";
            document.add_check(name, bytes, Sense::AtMost, RANDOM_BYTES_LIMIT);
            continue;
        }
        if share > 1.0 {
            let name = format!("downtime_vs_announced.{workload}_{share}");
            let value = median(longhaul.iter().filter_map(|row| of_announced(row)));
            document.add_check(&name, value, Sense::AtMost, DOWNTIME_OF_QEMU);
            continue;
        }
        let name = format!("bytes_vs_qemu_default.{workload}_{share}");
        document.add_check(&name, bytes, Sense::AtMost, BYTES_LIMIT);
        let downtime = |rows: &[&MoveRow]| median(rows.iter().filter_map(|row| row.downtime_ms));
        let qemu_ms = downtime(&peer).map_or(0.0, |ms| ms * DOWNTIME_OF_QEMU);
        let limit_ms = qemu_ms.max(ASKED_DOWNTIME_MS as f64);
        let name = format!("downtime_ms.{workload}_{share}");
        document.add_check(&name, downtime(&longhaul), Sense::AtMost, limit_ms);
    }
    judge_own(rows, document);
}

/// Returns the downtime as a share of the longest announced or requested one.
fn of_announced(row: &MoveRow) -> Option<f64> {
    let predicted = row
        .predicted
        .downtime_at_most_ms
        .or(row.predicted.downtime_ms)?;
    Some(row.downtime_ms? / predicted.max(row.asked_downtime_ms as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(system: &str, workload: &str, share: f64, bytes: u64, downtime_ms: f64) -> MoveRow {
        let link = super::super::LINK.parse().unwrap();
        let arena = Workload {
            content: workload.to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: WORKING_SET_BYTES,
            pages_per_s: Case::pages_per_s(link, share),
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 1000,
            seed: 1,
        };
        let case = Case {
            guest: Tiny::new("g").description(),
            load: Load::Arena {
                name: workload.to_owned(),
                arena,
                dirty_share: Some(share),
            },
            link,
            downtime_ms: ASKED_DOWNTIME_MS,
            limit: LIMIT,
            force_after: None,
            observe: Duration::ZERO,
            repeat: 1,
        };
        let mut row = MoveRow::of(&case, system, "precopy");
        row.outcome = "completed".to_owned();
        row.link_bytes = Some(bytes);
        row.downtime_ms = Some(downtime_ms);
        row.verify_errors = Some(0);
        row
    }

    fn judged(rows: &[MoveRow]) -> Vec<(String, Option<f64>, f64, bool)> {
        let mut document = Document::new("memory");
        judge(rows, &mut document);
        let value = serde_json::to_value(&document).unwrap();
        let checks = value["checks"].as_array().unwrap().iter();
        checks
            .map(|check| {
                let name = check["name"].as_str().unwrap().to_owned();
                let limit = check["limit"].as_f64().unwrap();
                (
                    name,
                    check["value"].as_f64(),
                    limit,
                    check["holds"].as_bool().unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn the_bars_are_computed_from_medians_of_rows_that_count() {
        let mut damaged = row("qemu-default", "mix", 0.3, 1, 1.0);
        damaged.verify_errors = Some(4);
        let mut late = row("longhaul", "mix", 1.5, 90, 900.0);
        late.predicted.downtime_at_most_ms = Some(1000.0);
        let rows = [
            row("longhaul", "mix", 0.3, 50, 400.0),
            row("longhaul", "mix", 0.3, 40, 100.0),
            row("longhaul", "mix", 0.3, 60, 200.0),
            row("qemu-default", "mix", 0.3, 100, 500.0),
            damaged,
            row("longhaul", "random", 0.0, 103, 100.0),
            row("qemu-default", "random", 0.0, 100, 100.0),
            late,
        ];
        let checks = judged(&rows);
        let of = |name: &str| checks.iter().find(|check| check.0 == name).unwrap().clone();
        let bytes = of("bytes_vs_qemu_default.mix_0.3");
        assert_eq!((bytes.1, bytes.3), (Some(0.5), true));
        let downtime = of("downtime_ms.mix_0.3");
        assert_eq!((downtime.1, downtime.3), (Some(200.0), true));
        assert!((downtime.2 - 550.0).abs() < 1e-9);
        assert!(!of("bytes_vs_qemu_default.random").3);
        assert_eq!(of("downtime_vs_announced.mix_1.5").1, Some(0.9));
        assert!(of("verify_errors.longhaul").3);
    }

    #[test]
    fn what_went_wrong_is_never_passed_over() {
        let mut silent = row("longhaul", "mix", 0.0, 10, 1.0);
        silent.outcome = "failed: it broke".to_owned();
        silent.verify_errors = None;
        let checks = judged(&[silent, row("qemu-default", "mix", 0.0, 100, 100.0)]);
        assert!(checks.iter().all(|check| !check.3), "{checks:?}");
        assert_eq!(checks.len(), 4);
    }
}
