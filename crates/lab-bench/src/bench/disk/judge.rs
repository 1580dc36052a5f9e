//! Computes the checks from the rows of one run.

use super::row::Row;
use crate::bench::document::{Document, Sense, median};
use crate::peer::mirror::CopyMode;
use longhaul_lab::history::workload::Workload;
use longhaul_lab::link::spec::LinkSpec;

/// The strategy of the checks, and the one that corresponds to QEMU's write-blocking mirror.
const STRATEGY: &str = "hybrid";
const MIRROR: &str = "mirror";
const OF_BACKGROUND: f64 = 0.2;
const OF_WRITE_BLOCKING: f64 = 0.5;
const THROUGHPUT: f64 = 0.75;

/// Adds the checks that the rows allow: under IOR, at this link.
pub(super) fn judge(rows: &[Row], link: LinkSpec, document: &mut Document) {
    let here: Vec<&Row> = rows
        .iter()
        .filter(|row| row.moved.workload == Workload::Ior.name() && row.moved.link == link.into())
        .collect();
    let of_strategy = |strategy: &str| {
        let ours = here.iter().copied();
        let ours = ours.filter(|row| row.moved.system == "longhaul");
        ours.filter(|row| row.moved.strategy == strategy)
            .collect::<Vec<&Row>>()
    };
    let own = of_strategy(STRATEGY);
    let mirrors = [CopyMode::Background, CopyMode::WriteBlocking].map(|mode| {
        let of_mode = here.iter().filter(|row| row.moved.system == mode.system());
        of_mode.copied().collect::<Vec<&Row>>()
    });
    if !own.is_empty() {
        compare(&own, &mirrors, document);
    }
    let (mirrored, [_, blocking]) = (of_strategy(MIRROR), &mirrors);
    if !mirrored.is_empty() && !blocking.is_empty() {
        compare_mirrors(&mirrored, blocking, document);
    }
    judge_own(rows, document);
}

fn compare(own: &[&Row], mirrors: &[Vec<&Row>; 2], document: &mut Document) {
    let ours = |value: fn(&Row) -> Option<f64>| {
        // Of our own rows, only completed moves count.
        let done = own.iter().filter(|row| row.moved.is_completed());
        median(done.filter_map(|row| value(row)))
    };
    let ratio = |theirs: &[&Row], value: fn(&Row) -> Option<f64>| {
        Some(ours(value)? / of_peer(theirs, value)?)
    };
    let [background, blocking] = mirrors;
    if !background.is_empty() {
        let name = "total_ms_vs_qemu_mirror.ior";
        document.add_check(name, ratio(background, time), Sense::AtMost, OF_BACKGROUND);
        let name = "bytes_vs_qemu_mirror.ior";
        document.add_check(name, ratio(background, bytes), Sense::AtMost, OF_BACKGROUND);
    }
    if !blocking.is_empty() {
        let name = "total_ms_vs_qemu_mirror_write_blocking.ior";
        document.add_check(
            name,
            ratio(blocking, time),
            Sense::AtMost,
            OF_WRITE_BLOCKING,
        );
    }
    let own_throughput = ours(throughput);
    document.add_check(
        "throughput_vs_none.ior",
        own_throughput,
        Sense::AtLeast,
        THROUGHPUT,
    );
    let theirs = mirrors.iter().filter(|rows| !rows.is_empty());
    for theirs in theirs {
        let name = theirs.first().map_or("", |row| &row.moved.system);
        let name = format!("throughput_vs_{}.ior", name.replace('-', "_"));
        document.add_check(&name, ratio(theirs, throughput), Sense::AtLeast, 1.0);
    }
}

/// Compares Longhaul's mirror with QEMU's write-blocking one, for the move and for the guest.
fn compare_mirrors(ours: &[&Row], theirs: &[&Row], document: &mut Document) {
    let ratio = |value: fn(&Row) -> Option<f64>| {
        let done = ours.iter().filter(|row| row.moved.is_completed());
        Some(median(done.filter_map(|row| value(row)))? / of_peer(theirs, value)?)
    };
    let name = "mirror_total_ms_vs_qemu_mirror_write_blocking.ior";
    document.add_check(name, ratio(time), Sense::AtMost, 1.0);
    let name = "mirror_throughput_vs_qemu_mirror_write_blocking.ior";
    document.add_check(name, ratio(throughput), Sense::AtLeast, 1.0);
}

fn time(row: &Row) -> Option<f64> {
    row.moved.total_ms
}

fn bytes(row: &Row) -> Option<f64> {
    row.moved.link_bytes.map(|bytes| bytes as f64)
}

fn throughput(row: &Row) -> Option<f64> {
    row.throughput_vs_none
}

/// Returns a baseline's value. Its performance until the move was given up counts; errors in its
/// guest do not.
fn of_peer(rows: &[&Row], value: fn(&Row) -> Option<f64>) -> Option<f64> {
    let sound = rows.iter().filter(|row| row.moved.verify_errors == Some(0));
    median(sound.filter_map(|row| value(row)))
}

/// Checks all of Longhaul's own rows: nothing damaged, nothing failed, disks unchanged.
fn judge_own(rows: &[Row], document: &mut Document) {
    let own: Vec<&Row> = rows
        .iter()
        .filter(|row| row.moved.system == "longhaul")
        .collect();
    if own.is_empty() {
        return;
    }
    // An unknown value is as bad as a wrong one.
    let sum = |value: fn(&Row) -> Option<u64>| {
        let values = own.iter().map(|row| value(row));
        values
            .map(|value| value.map_or(f64::NAN, |value| value as f64))
            .sum()
    };
    let errors = sum(|row| row.moved.verify_errors);
    let failed = sum(|row| Some(u64::from(!row.moved.is_completed())));
    let changes = sum(|row| row.disk_changes);
    for (name, value) in [
        ("verify_errors.longhaul", errors),
        ("not_completed.longhaul", failed),
        ("disk_changes.longhaul", changes),
    ] {
        document.add_check(name, Some(value), Sense::AtMost, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::row::Parameters;
    use super::*;
    use crate::moves::MoveRow;

    fn row(system: &str, strategy: &str, total_s: f64, megabytes: u64, throughput: f64) -> Row {
        let link = "200mbit,1ms".parse().unwrap();
        let names = [system, strategy, "ior"];
        let mut moved = MoveRow::new(names, Parameters::default(), link, 1, 300);
        moved.outcome = "completed".to_owned();
        moved.total_ms = Some(total_s * 1000.0);
        moved.link_bytes = Some(megabytes * 1_000_000);
        moved.verify_errors = Some(0);
        Row {
            moved,
            throughput_vs_none: Some(throughput),
            lost_s: None,
            disk_changes: Some(0),
        }
    }

    fn judged(rows: &[Row]) -> Vec<(String, Option<f64>, bool)> {
        let mut document = Document::new("disk");
        judge(rows, "200mbit,1ms".parse().unwrap(), &mut document);
        let value = serde_json::to_value(&document).unwrap();
        let checks = value["checks"].as_array().unwrap().iter();
        let check = |check: &serde_json::Value| {
            let name = check["name"].as_str().unwrap().to_owned();
            let holds = check["holds"].as_bool().unwrap();
            (name, check["value"].as_f64(), holds)
        };
        checks.map(check).collect()
    }

    #[test]
    fn the_bars_are_computed_from_rows_that_count() {
        let mut given_up = row("qemu-mirror", "mirror", 120.0, 2000, 0.7);
        given_up.moved.outcome = "failed: it had not converged".to_owned();
        let mut damaged = row("qemu-mirror", "mirror", 1.0, 1, 0.1);
        damaged.moved.verify_errors = Some(3);
        let mut elsewhere = row("longhaul", "hybrid", 1.0, 1, 1.0);
        elsewhere.moved.link = "100mbit,20ms".parse::<LinkSpec>().unwrap().into();
        let mut failed = row("longhaul", "hybrid", 1.0, 1, 1.0);
        failed.moved.outcome = "failed: it broke".to_owned();
        failed.disk_changes = None;
        let mut rows = vec![
            given_up,
            damaged,
            elsewhere,
            row("qemu-mirror-write-blocking", "mirror", 30.0, 500, 0.3),
            row("longhaul", "hybrid", 12.0, 250, 0.8),
            row("longhaul", "mirror", 24.0, 500, 0.33),
        ];
        let checks = judged(&rows);
        let of = |checks: &[(String, Option<f64>, bool)], name: &str| {
            let found = checks.iter().find(|check| check.0 == name).unwrap();
            (found.1, found.2)
        };
        assert_eq!(
            of(&checks, "total_ms_vs_qemu_mirror.ior"),
            (Some(0.1), true)
        );
        assert_eq!(of(&checks, "bytes_vs_qemu_mirror.ior").0, Some(0.125));
        let blocking = of(&checks, "total_ms_vs_qemu_mirror_write_blocking.ior");
        assert_eq!(blocking, (Some(0.4), true));
        assert_eq!(of(&checks, "throughput_vs_none.ior"), (Some(0.8), true));
        let mirror = of(&checks, "mirror_total_ms_vs_qemu_mirror_write_blocking.ior");
        assert_eq!(mirror, (Some(0.8), true));
        let mirror = of(
            &checks,
            "mirror_throughput_vs_qemu_mirror_write_blocking.ior",
        );
        assert!(mirror.1, "{mirror:?}");
        assert!(of(&checks, "throughput_vs_qemu_mirror.ior").1);
        assert!(checks.iter().all(|check| check.2), "{checks:?}");
        rows.push(failed);
        let checks = judged(&rows);
        assert!(!of(&checks, "not_completed.longhaul").1);
        assert!(!of(&checks, "disk_changes.longhaul").1);
        // Without Longhaul there is nothing to judge.
        assert!(judged(&rows[..2]).is_empty());
    }
}
