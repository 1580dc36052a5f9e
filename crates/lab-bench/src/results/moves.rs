//! Formats the results of the benches that move guests, and of those of handovers and links.

use super::rows::Rows;
use super::svg::{Plot, Style};
use super::{Section, maybe};

/// The fields that distinguish rows of moves, beside the system.
const CASE: [&str; 2] = ["workload", "parameters/dirty_rate_of_link"];

/// Formats moves of a guest's memory; the plots' files are named after the document.
pub(super) fn show(rows: &Rows<'_>, name: &str, section: &mut Section) {
    let cases = cases(rows);
    let systems = rows.all("system");
    let mut lines = Vec::new();
    for (case, rows) in &cases {
        for system in &systems {
            let all = rows.with("system", system);
            let done = all.with("outcome", "completed");
            if all.is_empty() {
                continue;
            }
            let errors: f64 = done
                .0
                .iter()
                .filter_map(|row| row["verify_errors"].as_f64())
                .sum();
            lines.push(vec![
                case.clone(),
                system.clone(),
                format!("{} of {}", done.0.len(), all.0.len()),
                maybe(done.median("link_bytes"), 1e6),
                maybe(done.median("total_ms"), 1e3),
                maybe(done.median("downtime_ms"), 1.0),
                super::number(errors),
            ]);
        }
    }
    let head = [
        "workload",
        "system",
        "completed",
        "over the link, MB",
        "total, s",
        "downtime, ms",
        "verify errors",
    ];
    section.table(&head, &lines);
    for (key, unit, file, title, y) in [
        ("link_bytes", 1e6, "bytes", "Bytes over the link", "MB"),
        ("total_ms", 1e3, "total", "Total time", "s"),
        ("downtime_ms", 1.0, "downtime", "Downtime", "ms"),
    ] {
        let series = systems.iter().map(|system| {
            let values = cases.iter().map(|(_, rows)| {
                let done = rows.with("system", system).with("outcome", "completed");
                Some(done.median(key)? / unit)
            });
            (system.clone(), values.collect())
        });
        let plot = Plot {
            title: format!("{title}, moves that completed"),
            style: Style::Bars,
            y: y.to_owned(),
            x: String::new(),
            series: series.collect(),
            categories: cases.iter().map(|(case, _)| case.clone()).collect(),
            limit: None,
        };
        section.plot(&format!("{name}-{file}"), plot);
    }
    show_responses(rows, name, section);
}

/// Formats the service of a guest's clients during its move: the first move of each system.
fn show_responses(rows: &Rows<'_>, name: &str, section: &mut Section) {
    let mut lines = Vec::new();
    let mut series = Vec::new();
    let mut first_and_last: Option<(i64, i64)> = None;
    for system in rows.all("system") {
        let served = rows.with("system", &system);
        let served = Rows(
            served
                .0
                .into_iter()
                .filter(|row| row["responses"].is_object())
                .collect(),
        );
        let Some(first) = served.0.first() else {
            continue;
        };
        lines.push(vec![
            system.clone(),
            maybe(served.median("responses/before_ms"), 1.0),
            maybe(served.median("responses/during_ms"), 1.0),
            maybe(served.median("responses/longest_gap_ms"), 1.0),
            maybe(served.median("responses/broken_connections"), 1.0),
        ]);
        let seconds = first["responses"]["per_second"].as_array();
        let seconds: Vec<(i64, Option<f64>)> = seconds
            .into_iter()
            .flatten()
            .filter_map(|second| Some((second["second"].as_i64()?, second["median_ms"].as_f64())))
            .collect();
        for (second, _) in &seconds {
            let (first, last) = first_and_last.unwrap_or((*second, *second));
            first_and_last = Some((first.min(*second), last.max(*second)));
        }
        series.push((system, seconds));
    }
    let Some((first, last)) = first_and_last else {
        return;
    };
    section.paragraph("How the guest's clients outside were served (medians of the repeats):");
    let head = [
        "system",
        "response before, ms",
        "during, ms",
        "longest time without an answer, ms",
        "broken connections",
    ];
    section.table(&head, &lines);
    let at = |seconds: &[(i64, Option<f64>)], second| {
        let found = seconds.iter().find(|(of, _)| *of == second);
        found.and_then(|(_, value)| *value)
    };
    let lines = series.iter().map(|(system, seconds)| {
        let values = (first..=last).map(|second| at(seconds, second)).collect();
        (system.clone(), values)
    });
    let plot = Plot {
        title: "Response time of each second, the first move of each system".to_owned(),
        style: Style::Lines,
        y: "ms".to_owned(),
        x: "seconds from the beginning of the move".to_owned(),
        series: lines.collect(),
        categories: (first..=last).map(|second| second.to_string()).collect(),
        limit: None,
    };
    section.plot(&format!("{name}-responses"), plot);
}

/// Returns the cases of moves, and the rows of each.
fn cases<'a>(rows: &Rows<'a>) -> Vec<(String, Rows<'a>)> {
    let [workload, share] = CASE;
    let mut cases = Vec::new();
    for name in rows.all(workload) {
        let rows = rows.with(workload, &name);
        let shares = rows.all(share);
        for value in &shares {
            let rows = rows.with(share, value);
            // A workload without a rate of its own is one case.
            let case = match value.parse() {
                Ok(value) if shares.len() > 1 || value > 0.0 => {
                    format!("{name}, dirtied at {} of the link", super::number(value))
                }
                _ => name.clone(),
            };
            cases.push((case, rows));
        }
        if shares.is_empty() {
            cases.push((name, rows));
        }
    }
    cases
}

/// Formats the agents' memory, and the savings of guests that move at once.
pub(super) fn show_agents(rows: &Rows<'_>, section: &mut Section) {
    let line = |system: String| {
        let all = rows.with("system", &system);
        let done = all.with("outcome", "completed");
        vec![
            system,
            format!("{} of {}", done.0.len(), all.0.len()),
            maybe(done.median("link_bytes"), 1e6),
            maybe(done.median("shared_bytes"), 1e6),
            maybe(done.median("total_ms"), 1e3),
            maybe(done.median("agent_peak_bytes/source"), 1e6),
            maybe(done.median("agent_peak_bytes/destination"), 1e6),
        ]
    };
    let lines: Vec<_> = rows.all("system").into_iter().map(line).collect();
    let head = [
        "system",
        "completed",
        "over the link, MB",
        "memory in other guests, MB",
        "total, s",
        "source's agent, MB",
        "destination's agent, MB",
    ];
    section.table(&head, &lines);
}

/// Formats moves of an idle guest.
pub(super) fn show_handover(rows: &Rows<'_>, section: &mut Section) {
    let mut lines = Vec::new();
    let releases = rows.all("release");
    for release in &releases {
        let all = rows.with("release", release);
        let done = all.with("outcome", "completed");
        lines.push(vec![
            release.clone(),
            format!("{} of {}", done.0.len(), all.0.len()),
            maybe(done.median("downtime_ms"), 1.0),
            maybe(done.median("sync_ms"), 1.0),
        ]);
    }
    let head = [
        "release",
        "completed",
        "downtime, ms",
        "an append made durable, ms",
    ];
    section.table(&head, &lines);
}

/// Formats the data path compared with TCP.
pub(super) fn show_link(rows: &Rows<'_>, section: &mut Section) {
    let (cases, systems) = (rows.all("case"), rows.all("system"));
    let mut lines = Vec::new();
    for case in &cases {
        for system in &systems {
            let rows = rows.with("case", case).with("system", system);
            if rows.is_empty() {
                continue;
            }
            lines.push(vec![
                case.clone(),
                system.clone(),
                maybe(rows.median("throughput_bps"), 1e6),
                maybe(rows.median("cpu_s_per_gb"), 1.0),
                maybe(rows.median("latency_us/p50"), 1e3),
                maybe(rows.median("latency_us/p99"), 1e3),
            ]);
        }
    }
    let head = [
        "case",
        "system",
        "Mbit/s",
        "CPU s per GB",
        "round trip p50, ms",
        "p99, ms",
    ];
    section.table(&head, &lines);
    let of_link = |case: &String, system: &String| {
        let rows = rows.with("case", case).with("system", system);
        let share = rows.median("throughput_bps")? / rows.median("link/rate_bps")?;
        Some(share * 100.0)
    };
    let series = systems.iter().map(|system| {
        let values = cases.iter().map(|case| of_link(case, system));
        (system.clone(), values.collect())
    });
    section.plot(
        "link-throughput",
        Plot {
            title: "Payload on the link".to_owned(),
            style: Style::Bars,
            y: "% of the link's rate".to_owned(),
            x: String::new(),
            series: series.collect(),
            categories: cases.clone(),
            limit: None,
        },
    );
}
