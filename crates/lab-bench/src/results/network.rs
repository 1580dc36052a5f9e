//! Formats the results of `lab bench network`.

use super::Section;
use super::maybe;
use super::rows::Rows;
use super::svg::{Plot, Style};

/// The case with members of a network that send nothing.
const IDLE: &str = "idle_members";

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
    let of_throughput = |case: &&String| {
        if *case == IDLE && !rows.with("case", IDLE).all("idle_hosts").is_empty() {
            return false;
        }
        let has_way = |way| !rows.with("case", case).with("way", way).is_empty();
        !case.is_empty() && (has_way("forth") || has_way("back"))
    };
    for case in cases.iter().filter(of_throughput) {
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
    idle(&rows.with("case", IDLE), section);
    service(&rows.with("case", "service"), section);
    moves(&rows.with("case", "move_times"), section);
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

/// Shows what hosts that send nothing cost the two that do.
fn idle(rows: &Rows<'_>, section: &mut Section) {
    let rows = rows.with("outcome", "completed");
    if rows.all("idle_hosts").is_empty() {
        return;
    }
    section.heading(IDLE);
    let mut lines = Vec::new();
    for hosts in rows.all("idle_hosts") {
        let of_hosts = rows.with("idle_hosts", &hosts);
        for members in of_hosts.all("idle_members") {
            let rows = of_hosts.with("idle_members", &members);
            lines.push(vec![
                hosts.clone(),
                members,
                maybe(rows.median("throughput_bps"), 1e6),
                maybe(rows.median("cpu_s_per_gb"), 1.0),
                maybe(rows.median("agents_cpu_s_per_gb"), 1.0),
                maybe(rows.median("other_agents_cpu_s"), 1.0),
            ]);
        }
    }
    let head = [
        "idle hosts",
        "of them members",
        "Mbit/s",
        "CPU s/GB",
        "of it the two agents",
        "CPU s of the other agents",
    ];
    section.table(&head, &lines);
}

/// Draws what a client saw of a guest's move, as paper 004's figures 9 and 10 do.
fn service(rows: &Rows<'_>, section: &mut Section) {
    for (workload, title, unit, per) in [
        (
            "download",
            "What a download sees of a move",
            "Mbit/s",
            125_000.0,
        ),
        (
            "requests",
            "What requests see of a move",
            "requests per second",
            1.0,
        ),
    ] {
        let rows = rows.with("workload", workload).with("outcome", "completed");
        let Some(first) = rows.0.first() else {
            continue;
        };
        section.heading(title);
        let ms = |key: &str| maybe(rows.median(key), 1.0);
        section.paragraph(&format!(
            "Medians: {} {unit} before the move, {} during it, {} after it; the longest gap {} ms, \
             the downtime {} ms.",
            maybe(rows.median("before_per_s"), per),
            maybe(rows.median("during_per_s"), per),
            maybe(rows.median("after_per_s"), per),
            ms("longest_gap_ms"),
            ms("downtime_ms"),
        ));
        let steps = first["per_s"].as_array().cloned().unwrap_or_default();
        let seconds = first["step_ms"].as_f64().unwrap_or_default() / 1e3;
        let plot = Plot {
            title: format!(
                "{title}, from {} to {} s",
                maybe(first["move_began_ms"].as_f64(), 1e3),
                maybe(first["move_ended_ms"].as_f64(), 1e3)
            ),
            style: Style::Lines,
            y: unit.to_owned(),
            x: "seconds".to_owned(),
            categories: (1..=steps.len())
                .map(|step| format!("{:.1}", step as f64 * seconds))
                .collect(),
            series: vec![(
                workload.to_owned(),
                steps
                    .iter()
                    .map(|step| Some(step.as_f64()? / per))
                    .collect(),
            )],
            limit: None,
        };
        section.plot(&format!("network-{workload}"), plot);
    }
}

/// Shows how long moves take by memory and uplink, as paper 004's table V does.
fn moves(rows: &Rows<'_>, section: &mut Section) {
    let rows = rows.with("outcome", "completed");
    if rows.is_empty() {
        return;
    }
    section.heading("How long a move takes");
    let mut lines = Vec::new();
    for memory in rows.all("memory_mib") {
        let of_memory = rows.with("memory_mib", &memory);
        for rate in of_memory.all("link/rate_bps") {
            let rows = of_memory.with("link/rate_bps", &rate);
            lines.push(vec![
                memory.clone(),
                maybe(rows.median("link/rate_bps"), 1e6),
                maybe(rows.median("link/rtt_ms"), 0.5),
                maybe(rows.median("total_ms"), 1e3),
                maybe(rows.median("downtime_ms"), 1.0),
                maybe(rows.median("link_bytes"), 1e6),
            ]);
        }
    }
    let head = [
        "memory, MiB",
        "uplink, Mbit/s",
        "round trip, ms",
        "time, s",
        "downtime, ms",
        "sent, MB",
    ];
    section.table(&head, &lines);
}
