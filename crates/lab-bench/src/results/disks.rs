//! Formats the results of `lab bench disk`.

use super::rows::Rows;
use super::svg::{Plot, Style};
use super::{Section, maybe, number, percent};

/// Formats a table for each link, and a plot of each measure over all workloads and links.
pub(super) fn show(rows: &Rows<'_>, name: &str, section: &mut Section) {
    section.paragraph(
        "A move ends when the source may be deleted. The guest's throughput is that of the whole \
         move, its drain included, relative to a guest that did the same work and was not moved; \
         lost is how much longer it took for that. A move that was given up stands here with the \
         time until then.",
    );
    let cases = cases(rows);
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
    let mut names: Vec<String> = Vec::new();
    for (_, rows) in &cases {
        for (system, _) in systems(rows) {
            if !names.contains(&system) {
                names.push(system);
            }
        }
    }
    for (key, unit, file, title, y) in [
        (
            "total_ms",
            1e-3,
            "total",
            "Time until the source may be deleted",
            "s",
        ),
        ("link_bytes", 1e-6, "bytes", "Bytes over the link", "MB"),
        (
            "throughput_vs_none",
            100.0,
            "throughput",
            "The guest's throughput during the move",
            "% of a guest's that is not moved",
        ),
    ] {
        let series = names.iter().map(|name| {
            let of_case = |(_, rows): &(Case, Rows<'_>)| {
                let systems = systems(rows);
                let (_, rows) = systems.iter().find(|(system, _)| system == name)?;
                Some(rows.median(key)? * unit)
            };
            (name.clone(), cases.iter().map(of_case).collect())
        });
        let categories = cases
            .iter()
            .map(|(case, _)| format!("{}, {}", case.workload, case.link));
        let plot = Plot {
            title: title.to_owned(),
            style: Style::Bars,
            y: y.to_owned(),
            x: String::new(),
            series: series.collect(),
            categories: categories.collect(),
            limit: None,
        };
        section.plot(&format!("{name}-{file}"), plot);
    }
}

/// The key by which systems are compared.
struct Case {
    workload: String,
    link: String,
}

fn cases<'a>(rows: &Rows<'a>) -> Vec<(Case, Rows<'a>)> {
    let mut cases = Vec::new();
    for rate in rows.all("link/rate_bps") {
        let of_rate = rows.with("link/rate_bps", &rate);
        for rtt in of_rate.all("link/rtt_ms") {
            let of_link = of_rate.with("link/rtt_ms", &rtt);
            for workload in of_link.all("workload") {
                let of_workload = of_link.with("workload", &workload);
                let value = |text: &str| text.parse::<f64>().ok();
                let link = format!(
                    "{} Mbit/s, {} ms",
                    maybe(value(&rate), 1e6),
                    maybe(value(&rtt), 1.0)
                );
                cases.push((Case { workload, link }, of_workload));
            }
        }
    }
    cases
}

/// Returns the systems: by name, and by strategy for those with several.
fn systems<'a>(rows: &Rows<'a>) -> Vec<(String, Rows<'a>)> {
    let mut systems = Vec::new();
    for system in rows.all("system") {
        let of_system = rows.with("system", &system);
        let strategies = of_system.all("strategy");
        for strategy in &strategies {
            let name = match system.as_str() {
                "longhaul" => format!("longhaul {strategy}"),
                _ => system.clone(),
            };
            systems.push((name, of_system.with("strategy", strategy)));
        }
    }
    systems
}
