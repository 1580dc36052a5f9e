//! Formats the results of `lab bench parcel`.

use super::rows::Rows;
use super::{Section, maybe, number, percent};

/// Formats a table each of exports, of replicas and of moves.
pub(super) fn show(rows: &Rows<'_>, section: &mut Section) {
    show_exports(&rows.with("workload", "export"), section);
    let having = |key: &str| {
        let has = |row: &&&serde_json::Value| row.get(key).is_some();
        Rows(rows.0.iter().filter(has).copied().collect())
    };
    show_replicas(&having("replicas"), section);
    show_moves(&having("disk_bytes_vs_changed"), section);
}

fn show_exports(rows: &Rows<'_>, section: &mut Section) {
    if rows.is_empty() {
        return;
    }
    section.paragraph(
        "Exports of an image that nobody writes, from the cold cache. All rates are bytes of the \
         image per second; that of writing is for as many bytes as the devices have afterwards.",
    );
    let head = [
        "devices",
        "reading, MB/s",
        "writing, MB/s",
        "export, MB/s",
        "with the seal, MB/s",
        "of the slower",
        "processors, s per GB",
    ];
    let mut lines = Vec::new();
    for devices in rows.all("parameters/devices") {
        let here = rows.with("parameters/devices", &devices);
        let cost = here.median_of(|row| {
            let bytes = row["parameters"]["image_bytes"].as_f64()?;
            Some(row["export_cpu_s"].as_f64()? / bytes * 1e9)
        });
        lines.push(vec![
            devices.clone(),
            maybe(here.median("read_bytes_per_s"), 1e6),
            maybe(here.median("write_image_bytes_per_s"), 1e6),
            maybe(here.median("export_bytes_per_s"), 1e6),
            maybe(here.median("sealed_bytes_per_s"), 1e6),
            percent(here.median("export_vs_slower")),
            maybe(cost, 1.0),
        ]);
    }
    section.table(&head, &lines);
}

fn show_replicas(rows: &Rows<'_>, section: &mut Section) {
    if rows.is_empty() {
        return;
    }
    section.paragraph(
        "A guest writes its disk as fast as it can, and three replicas of the disk are made. Its \
         operations per second are relative to those of a guest that is left alone.",
    );
    let head = [
        "writes",
        "system",
        "completed",
        "operations/s",
        "of one left alone",
        "in replicas",
        "of one left alone",
        "longest silence, ms",
        "a replica, s",
        "copied, MB",
        "verify errors",
    ];
    let mut lines = Vec::new();
    for workload in rows.all("workload") {
        let here = rows.with("workload", &workload);
        for system in here.all("system") {
            let own = here.with("system", &system);
            let all = own.0.iter().filter_map(|row| row["replicas"].as_array());
            let replicas = Rows(all.flatten().collect());
            let errors = own.0.iter().filter_map(|row| row["verify_errors"].as_f64());
            let completed = own.with("outcome", "completed").0.len();
            lines.push(vec![
                workload.clone(),
                system.clone(),
                format!("{completed} of {}", own.0.len()),
                maybe(own.median("work_during_per_s"), 1.0),
                percent(own.median("throughput_vs_none")),
                maybe(own.median("work_in_replicas_per_s"), 1.0),
                percent(own.median("in_replicas_vs_none")),
                maybe(own.median("longest_silence_ms"), 1.0),
                maybe(replicas.median("took_ms"), 1e3),
                maybe(replicas.median("copied_bytes"), 1e6),
                number(errors.sum()),
            ]);
        }
    }
    section.table(&head, &lines);
}

fn show_moves(rows: &Rows<'_>, section: &mut Section) {
    if rows.is_empty() {
        return;
    }
    section.paragraph(
        "Moves over the link alone, over the link after the disks went ahead in a parcel, and from \
         one image of a host to another. *Had to be sent*: the blocks that have changed since the \
         last top-up, without zeros and repetitions, compressed.",
    );
    let head = [
        "workload",
        "way",
        "completed",
        "total, s",
        "downtime, ms",
        "over the link, MB",
        "of the disk, MB",
        "had to be sent, MB",
        "rewritten, MB",
        "verify errors",
    ];
    let mut lines = Vec::new();
    for workload in rows.all("workload") {
        let here = rows.with("workload", &workload);
        for way in here.all("strategy") {
            let own = here.with("strategy", &way);
            let errors = own.0.iter().filter_map(|row| row["verify_errors"].as_f64());
            let completed = own.with("outcome", "completed").0.len();
            lines.push(vec![
                workload.clone(),
                way.clone(),
                format!("{completed} of {}", own.0.len()),
                maybe(own.median("total_ms"), 1e3),
                maybe(own.median("downtime_ms"), 1.0),
                maybe(own.median("link_bytes"), 1e6),
                maybe(own.median("disk_bytes"), 1e6),
                maybe(own.median("changed/compressed_bytes"), 1e6),
                maybe(own.median("rewritten/compressed_bytes"), 1e6),
                number(errors.sum()),
            ]);
        }
    }
    section.table(&head, &lines);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_part_has_its_table() {
        let export = json!({
            "workload": "export", "parameters": {"devices": 4, "image_bytes": 1e9},
            "read_bytes_per_s": 500e6, "write_image_bytes_per_s": 400e6,
            "export_bytes_per_s": 300e6, "sealed_bytes_per_s": 200e6, "export_vs_slower": 0.75,
            "export_cpu_s": 2.5,
        });
        let replicas = json!({
            "workload": "write_4k", "system": "longhaul", "outcome": "completed",
            "work_during_per_s": 980.0, "throughput_vs_none": 0.98, "work_in_replicas_per_s": 900.0,
            "in_replicas_vs_none": 0.9, "longest_silence_ms": 40.0, "verify_errors": 0,
            "replicas": [{"took_ms": 1500.0, "copied_bytes": 12e6}],
        });
        let moved = json!({
            "workload": "oltp", "strategy": "parcel", "outcome": "completed", "total_ms": 9000.0,
            "downtime_ms": 120.0, "link_bytes": 20e6, "disk_bytes": 2e6, "verify_errors": 0,
            "changed": {"compressed_bytes": 1.9e6}, "rewritten": {"compressed_bytes": 0.1e6},
            "disk_bytes_vs_changed": 1.05,
        });
        let mut section = Section::default();
        show(&Rows::of(&[export, replicas, moved]), &mut section);
        for expected in [
            "| 4 | 500 | 400 | 300 | 200 | 75.0 % | 2.5 |",
            "| write_4k | longhaul | 1 of 1 | 980 | 98.0 % | 900 | 90.0 % | 40 | 1.5 | 12 | 0 |",
            "| oltp | parcel | 1 of 1 | 9 | 120 | 20 | 2 | 1.9 | 0.1 | 0 |",
        ] {
            assert!(
                section.text.contains(expected),
                "{expected}\n{}",
                section.text
            );
        }
        let mut empty = Section::default();
        show(&Rows::default(), &mut empty);
        assert!(empty.text.is_empty());
    }
}
