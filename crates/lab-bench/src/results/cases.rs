//! Groups the rows of moves by link, workload and system, and plots their figures.

use super::rows::Rows;
use super::svg::{Plot, Style};
use super::{Section, maybe};

/// The key by which systems are compared.
pub(super) struct Case {
    pub(super) workload: String,
    pub(super) link: String,
}

/// A figure that is plotted over all cases and systems.
pub(super) struct Measure {
    /// Its key in rows.
    pub(super) key: &'static str,
    /// What its values are multiplied by.
    pub(super) scale: f64,
    /// The end of the plot's name.
    pub(super) file: &'static str,
    pub(super) title: &'static str,
    /// The name of the values, with their unit.
    pub(super) y: &'static str,
}

/// Returns the cases, and the rows of each.
pub(super) fn of<'a>(rows: &Rows<'a>) -> Vec<(Case, Rows<'a>)> {
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
pub(super) fn systems<'a>(rows: &Rows<'a>) -> Vec<(String, Rows<'a>)> {
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

/// Adds a plot of each figure; the plots' files are named after the document.
pub(super) fn plot(
    cases: &[(Case, Rows<'_>)],
    measures: &[Measure],
    name: &str,
    section: &mut Section,
) {
    let mut names: Vec<String> = Vec::new();
    for (_, rows) in cases {
        for (system, _) in systems(rows) {
            if !names.contains(&system) {
                names.push(system);
            }
        }
    }
    for measure in measures {
        let series = names.iter().map(|name| {
            let of_case = |(_, rows): &(Case, Rows<'_>)| {
                let systems = systems(rows);
                let (_, rows) = systems.iter().find(|(system, _)| system == name)?;
                Some(rows.median(measure.key)? * measure.scale)
            };
            (name.clone(), cases.iter().map(of_case).collect())
        });
        let categories = cases
            .iter()
            .map(|(case, _)| format!("{}, {}", case.workload, case.link));
        let plot = Plot {
            title: measure.title.to_owned(),
            style: Style::Bars,
            y: measure.y.to_owned(),
            x: String::new(),
            series: series.collect(),
            categories: categories.collect(),
            limit: None,
        };
        section.plot(&format!("{name}-{}", measure.file), plot);
    }
}
