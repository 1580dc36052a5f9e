//! Formats the results of `lab bench network`.

use super::Section;
use super::maybe;
use super::rows::Rows;

/// Formats a table for each case.
pub(super) fn show(rows: &Rows<'_>, section: &mut Section) {
    section.paragraph(
        "Medians. Processor time is that of the whole machine for a gigabyte that arrives: both \
         ends, the kernel, and on emulated links the emulator. BBR and CUBIC are the congestion \
         controls of the TCP that is measured inside.",
    );
    let versions: Vec<String> = rows
        .all("system")
        .into_iter()
        .filter_map(|system| {
            let version = rows.with("system", &system).all("version").pop()?;
            Some(format!("{system}: {version}"))
        })
        .collect();
    if !versions.is_empty() {
        section.paragraph(&format!("Versions: {}.", versions.join(", ")));
    }
    let cases = rows.all("case");
    for case in cases.iter().filter(|case| !case.is_empty()) {
        section.heading(case);
        let of_case = rows.with("case", case);
        let mut lines = Vec::new();
        for system in of_case.all("system") {
            let of_system = of_case.with("system", &system);
            let trips = of_system.with("outcome", "completed");
            for way in ["forth", "back"] {
                for congestion in ["bbr", "cubic"] {
                    let rows = of_system.with("way", way).with("congestion", congestion);
                    if rows.is_empty() {
                        continue;
                    }
                    lines.push(vec![
                        system.clone(),
                        format!("{way}, {}", congestion.to_uppercase()),
                        maybe(rows.median("throughput_bps"), 1e6),
                        maybe(rows.median("cpu_s_per_gb"), 1.0),
                        maybe(trips.median("latency_us/p50"), 1.0),
                        maybe(trips.median("latency_us/p99"), 1.0),
                    ]);
                }
            }
        }
        let head = [
            "system",
            "direction",
            "Mbit/s",
            "CPU s/GB",
            "round trip, us",
            "99 of 100 within, us",
        ];
        section.table(&head, &lines);
    }
    let others: Vec<String> = rows
        .all("outcome")
        .into_iter()
        .filter(|outcome| outcome != "completed")
        .flat_map(|outcome| {
            let of = rows.with("outcome", &outcome);
            let systems = of.all("system").into_iter();
            systems.map(move |system| format!("{system}: {outcome}"))
        })
        .collect();
    if !others.is_empty() {
        section.paragraph(&format!("Not measured: {}.", others.join("; ")));
    }
}
