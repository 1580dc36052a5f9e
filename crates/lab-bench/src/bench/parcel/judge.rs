//! Computes the checks from the rows of one run.

use super::consolidation::{LONGHAUL, SNAPSHOT, WORKLOADS};
use super::courier::{LINK, PARCEL, Row, WORKLOADS as MOVED};
use super::row::{ConsolidationRow, ExportRow};
use crate::bench::document::{Document, Sense, median};

const EXPORT: f64 = 0.8;
const THROUGHPUT: f64 = 0.9;
const DISK_BYTES: f64 = 1.1;

/// Adds the checks of exports, for each number of devices.
pub(super) fn judge_exports(rows: &[ExportRow], document: &mut Document) {
    let mut numbers: Vec<usize> = rows.iter().map(|row| row.parameters.devices).collect();
    numbers.sort_unstable();
    numbers.dedup();
    for devices in numbers {
        let here = rows.iter().filter(|row| row.parameters.devices == devices);
        let value = median(here.filter_map(|row| row.export_vs_slower));
        let name = format!("export_vs_slower_of_read_and_write.{devices}_devices");
        document.add_check(&name, value, Sense::AtLeast, EXPORT);
    }
}

/// Adds the checks of replicas, for each size of writes.
pub(super) fn judge_consolidations(rows: &[ConsolidationRow], document: &mut Document) {
    for (workload, _) in WORKLOADS {
        let of = |system: &str| {
            let rows = rows.iter().filter(|row| row.workload == workload);
            let rows = rows.filter(|row| row.system == system);
            rows.collect::<Vec<_>>()
        };
        let (own, theirs) = (of(LONGHAUL), of(SNAPSHOT));
        if own.is_empty() {
            continue;
        }
        let completed = own.iter().filter(|row| row.outcome == "completed");
        let ours = median(completed.filter_map(|row| row.in_replicas_vs_none));
        let name = format!("work_in_replicas_vs_none.{workload}");
        document.add_check(&name, ours, Sense::AtLeast, THROUGHPUT);
        if !theirs.is_empty() {
            // What the guest did until a replica was given up counts.
            let sound = theirs.iter().filter(|row| row.verify_errors == Some(0));
            let theirs = median(sound.filter_map(|row| row.in_replicas_vs_none));
            let ratio = ours.zip(theirs).map(|(ours, theirs)| ours / theirs);
            let name = format!("work_in_replicas_vs_qemu_snapshot.{workload}");
            document.add_check(&name, ratio, Sense::AtLeast, 1.0);
        }
    }
    let own: Vec<_> = rows.iter().filter(|row| row.system == LONGHAUL).collect();
    if own.is_empty() {
        return;
    }
    // An unknown value is as bad as a wrong one.
    let errors = own.iter().map(|row| match row.verify_errors {
        Some(errors) => errors as f64,
        None => f64::NAN,
    });
    let replicas = own.iter().flat_map(|row| &row.replicas);
    let not = replicas.filter(|it| it.is_consistent != Some(true)).count();
    let failed = own.iter().filter(|row| row.outcome != "completed").count();
    for (name, value) in [
        ("verify_errors.consolidation", errors.sum()),
        ("not_completed.consolidation", failed as f64),
        ("replicas_of_no_moment.consolidation", not as f64),
    ] {
        document.add_check(name, Some(value), Sense::AtMost, 0.0);
    }
}

/// Adds the checks of moves, for each workload.
pub(super) fn judge_moves(rows: &[Row], document: &mut Document) {
    for workload in MOVED {
        let of = |way: &str| {
            let rows = rows.iter().filter(|row| row.moved.workload == workload);
            let rows = rows.filter(|row| row.moved.strategy == way && row.moved.is_completed());
            rows.collect::<Vec<_>>()
        };
        let (link, parcel) = (of(LINK), of(PARCEL));
        let total = |rows: &[&Row]| median(rows.iter().filter_map(|row| row.moved.total_ms));
        if let (Some(ours), Some(alone)) = (total(&parcel), total(&link)) {
            let name = format!("total_ms_of_parcel_vs_link.{workload}");
            document.add_check(&name, Some(ours / alone), Sense::AtMost, 1.0);
        }
        // Of an idle guest nothing has to be sent.
        let ratios = |of: fn(&Row) -> Option<f64>| median(parcel.iter().filter_map(|row| of(row)));
        let checks = [
            ("changed", ratios(|row| row.disk_bytes_vs_changed)),
            // A block that was rewritten during the move may have to be sent again.
            ("changes", ratios(|row| row.disk_bytes_vs_changes)),
        ];
        for (what, ratio) in checks {
            if let Some(ratio) = ratio {
                let name = format!("disk_bytes_vs_{what}.{workload}");
                document.add_check(&name, Some(ratio), Sense::AtMost, DISK_BYTES);
            }
        }
    }
    let own: Vec<_> = rows
        .iter()
        .filter(|it| it.moved.system == LONGHAUL)
        .collect();
    if own.is_empty() {
        return;
    }
    let errors = own.iter().map(|row| match row.moved.verify_errors {
        Some(errors) => errors as f64,
        None => f64::NAN,
    });
    let failed = own.iter().filter(|row| !row.moved.is_completed()).count();
    let name = "verify_errors.moves";
    document.add_check(name, Some(errors.sum()), Sense::AtMost, 0.0);
    let name = "not_completed.moves";
    document.add_check(name, Some(failed as f64), Sense::AtMost, 0.0);
}

#[cfg(test)]
mod tests {
    use super::super::courier::Parameters;
    use super::super::row::{ConsolidationParameters, ExportParameters, Replica};
    use super::*;
    use crate::moves::MoveRow;

    fn checks(document: &Document) -> Vec<(String, Option<f64>, bool)> {
        let value = serde_json::to_value(document).unwrap();
        let checks = value["checks"].as_array().unwrap().iter();
        let check = |check: &serde_json::Value| {
            let name = check["name"].as_str().unwrap().to_owned();
            let holds = check["holds"].as_bool().unwrap();
            (name, check["value"].as_f64(), holds)
        };
        checks.map(check).collect()
    }

    fn export(devices: usize, [read, write, export]: [f64; 3]) -> ExportRow {
        let mut row = ExportRow {
            workload: "export".to_owned(),
            system: "longhaul".to_owned(),
            parameters: ExportParameters {
                image_bytes: 1_000_000_000,
                content: "",
                devices,
                parity: 0,
                block_bytes: 1 << 20,
            },
            repeat: 1,
            outcome: "completed".to_owned(),
            device_bytes: Some(500_000_000),
            read_ms: Some(read),
            write_ms: Some(write),
            both_ms: None,
            export_ms: Some(export),
            seal_ms: Some(1000.0),
            export_cpu_s: None,
            read_bytes_per_s: None,
            device_write_bytes_per_s: None,
            write_image_bytes_per_s: None,
            export_bytes_per_s: None,
            sealed_bytes_per_s: None,
            export_vs_slower: None,
            export_vs_both: None,
        };
        row.compute();
        row
    }

    #[test]
    fn an_export_is_compared_with_the_slower_side_in_bytes_of_the_image() {
        let row = export(1, [2000.0, 4000.0, 5000.0]);
        assert_eq!(row.write_image_bytes_per_s, Some(250e6));
        assert_eq!(row.device_write_bytes_per_s, Some(125e6));
        assert_eq!(row.export_vs_slower, Some(0.8));
        let mut document = Document::new("parcel");
        let slow = export(4, [10_000.0, 4000.0, 20_000.0]);
        judge_exports(&[row, slow], &mut document);
        let name = |devices| format!("export_vs_slower_of_read_and_write.{devices}_devices");
        let expected = [(name(1), Some(0.8), true), (name(4), Some(0.5), false)];
        assert_eq!(checks(&document), expected);
    }

    fn guest(system: &str, during: f64, in_replicas: f64) -> ConsolidationRow {
        let replica = Replica {
            began_ms: 0.0,
            took_ms: Some(1.0),
            copied_bytes: None,
            is_consistent: (system == LONGHAUL).then_some(true),
            work_per_s: None,
            longest_silence_ms: 0.0,
        };
        let mut row = ConsolidationRow {
            workload: WORKLOADS[0].0.to_owned(),
            system: system.to_owned(),
            parameters: ConsolidationParameters::default(),
            repeat: 1,
            outcome: "completed".to_owned(),
            work_before_per_s: None,
            work_during_per_s: Some(during),
            work_in_replicas_per_s: Some(in_replicas),
            throughput_vs_none: None,
            in_replicas_vs_none: None,
            longest_silence_ms: None,
            first_copy_ms: None,
            replicas: vec![replica],
            operations_per_second: Vec::new(),
            verify_errors: Some(0),
        };
        row.compare(Some(1000.0));
        row
    }

    fn moved(way: &str, total_ms: f64, disk_bytes: u64) -> Row {
        let link = "20mbit,20ms".parse().unwrap();
        let names = [LONGHAUL, way, "oltp"];
        let mut moved = MoveRow::new(names, Parameters::default(), link, 1, 300);
        moved.outcome = "completed".to_owned();
        moved.total_ms = Some(total_ms);
        moved.disk_bytes = Some(disk_bytes);
        moved.verify_errors = Some(0);
        let is_ahead = way == PARCEL;
        Row {
            moved,
            ahead: None,
            changed: None,
            rewritten: None,
            disk_bytes_vs_changed: is_ahead.then_some(disk_bytes as f64 / 1e6),
            disk_bytes_vs_changes: is_ahead.then_some(disk_bytes as f64 / 1.1e6),
        }
    }

    #[test]
    fn a_move_after_a_parcel_is_compared_with_the_link_and_with_what_had_to_be_sent() {
        let mut rows = vec![
            moved(LINK, 20e3, 30_000_000),
            moved(PARCEL, 10e3, 1_050_000),
        ];
        let mut document = Document::new("parcel");
        judge_moves(&rows, &mut document);
        let values: Vec<_> = checks(&document).iter().map(|check| check.1).collect();
        let changes = 1_050_000.0 / 1.1e6;
        assert_eq!(values, [0.5, 1.05, changes, 0.0, 0.0].map(Some));
        assert!(document.holds());
        let mut failed = moved(PARCEL, 1.0, 1);
        failed.moved.outcome = "failed: it broke".to_owned();
        failed.moved.verify_errors = None;
        rows.push(failed);
        rows[1].disk_bytes_vs_changed = Some(1.2);
        let mut document = Document::new("parcel");
        judge_moves(&rows, &mut document);
        let held: Vec<_> = checks(&document).iter().map(|check| check.2).collect();
        assert_eq!(held, [true, false, true, false, false]);
    }

    #[test]
    fn replicas_are_compared_with_a_guest_left_alone_and_with_snapshots() {
        let mut given_up = guest(SNAPSHOT, 900.0, 460.0);
        given_up.outcome = "failed: it had no end".to_owned();
        let mut rows = vec![guest(LONGHAUL, 980.0, 920.0), given_up];
        let mut document = Document::new("parcel");
        judge_consolidations(&rows, &mut document);
        let checked = checks(&document);
        assert!(document.holds(), "{checked:?}");
        let values: Vec<_> = checked.iter().map(|check| check.1).collect();
        assert_eq!(values, [0.92, 2.0, 0.0, 0.0, 0.0].map(Some));

        let mut slow = guest(LONGHAUL, 700.0, 400.0);
        slow.verify_errors = None;
        slow.replicas[0].is_consistent = Some(false);
        rows[0] = slow;
        let mut document = Document::new("parcel");
        judge_consolidations(&rows, &mut document);
        let held: Vec<_> = checks(&document).iter().map(|check| check.2).collect();
        assert_eq!(held, [false, false, false, true, false]);
        // Without Longhaul there is nothing to judge.
        let mut document = Document::new("parcel");
        judge_consolidations(&rows[1..], &mut document);
        assert!(checks(&document).is_empty());
    }
}
