//! Formats the five properties of a move: continuity, resources, robustness, predictability and
//! transparency.

use super::figure::{self, UNKNOWN};
use crate::cli::paint::{Line, Tone, wrap};
use longhaul_api::{
    Compared, Consequence, Continuity, GuestRate, HostCost, Judgement, LostWork, PhaseRisks, Plan,
    Predictability, Report, Resources, Risk, Robustness, Transparency,
};
use longhaul_protocol::units::show_bytes;

/// The column of what is said of a property.
pub(crate) const COLUMN: usize = 16;

/// The hosts and the guest that a text is about.
struct Names<'a> {
    source: &'a str,
    destination: &'a str,
}

/// Formats the properties of a move that has ended, or of one under way.
pub(crate) fn of_report(report: &Report, width: usize) -> Vec<Line> {
    let properties = &report.properties;
    let names = Names {
        source: &report.source,
        destination: &report.destination,
    };
    let mut robustness = survived(&properties.robustness);
    robustness.extend(risks(&properties.robustness.phases, &names));
    let rows = [
        ("continuity", continuity(&properties.continuity)),
        ("resources", resources(&properties.resources, &names)),
        ("robustness", robustness),
        ("predictability", compared(&properties.predictability)),
        ("transparency", transparency(&properties.transparency)),
    ];
    lines(rows, width)
}

/// Formats what is known of a planned move. `likelihood` explains its ranges.
pub(crate) fn of_plan(plan: &Plan, likelihood: Option<String>, width: usize) -> Vec<Line> {
    let properties = &plan.properties;
    let names = Names {
        source: &plan.source,
        destination: &plan.destination,
    };
    let Predictability {
        link_bytes,
        downtime_ms,
        ..
    } = &properties.predictability;
    let downtime = downtime_ms.map(|of| {
        let ms = |time_ms| figure::ms(Some(time_ms));
        format!("{} of downtime", figure::range(Some(of.predicted), ms))
    });
    let waits = plan.predictions.first().and_then(|it| it.stalls.as_ref());
    let waits = waits.map_or("no other waits", |_| "waits for pages: see below");
    let bytes = link_bytes.map(|of| {
        let range = figure::range(Some(of.predicted), show_bytes);
        format!("{range} over the link")
    });
    let memory = plan.memory_bytes.map(|bytes| {
        let (bytes, host) = (show_bytes(bytes), &plan.destination);
        format!("{bytes} of memory at {host}")
    });
    let used = properties.transparency.before.map(|rate| {
        let of = plan
            .vcpus
            .map_or_else(String::new, |of| format!(" of {of}"));
        format!("it now uses {:.2}{of} vCPUs", rate.vcpu_s_per_s)
    });
    let one = |text: Option<String>| vec![text.unwrap_or_else(|| UNKNOWN.to_owned())];
    let rows = [
        (
            "continuity",
            parts([downtime, Some(waits.to_owned())].into_iter().flatten()),
        ),
        ("resources", parts([bytes, memory].into_iter().flatten())),
        ("robustness", risks(&properties.robustness.phases, &names)),
        ("predictability", one(likelihood)),
        ("transparency", one(used)),
    ];
    lines(rows, width)
}

/// Formats the guest's part of the end of a move in one line, if it was measured.
pub(crate) fn end(report: &Report) -> Option<Line> {
    let properties = &report.properties;
    let before = properties.transparency.before?;
    let mut said = format!("  vCPUs {}", rates(&properties.transparency, before));
    let Continuity {
        lost_work, stalls, ..
    } = properties.continuity;
    if let Some(LostWork { total_s, .. }) = lost_work {
        said.push_str(&format!(" · about {} of work lost", seconds(total_s)));
    }
    if report.faults.is_some()
        && let Some(stalls) = stalls
    {
        let count = stalls.above_100_ms;
        said.push_str(&format!(" · {count} stalls above 100 ms"));
    }
    Some(Line::text(said))
}

/// Writes each property's name before its first line. What does not fit is wrapped.
fn lines(rows: [(&str, Vec<String>); 5], width: usize) -> Vec<Line> {
    let room = width.saturating_sub(COLUMN).max(20);
    let mut lines = Vec::new();
    for (name, texts) in rows {
        let pieces = texts.iter().flat_map(|text| wrap(text, room));
        for (index, piece) in pieces.enumerate() {
            let line = match index {
                0 => Line::default().tone(Tone::Faint, name),
                _ => Line::default(),
            };
            lines.push(line.column(COLUMN).plain(piece));
        }
    }
    lines
}

fn parts(parts: impl IntoIterator<Item = String>) -> Vec<String> {
    let parts: Vec<String> = parts.into_iter().collect();
    match parts.is_empty() {
        true => vec![UNKNOWN.to_owned()],
        false => vec![parts.join(" · ")],
    }
}

fn seconds(time_s: f64) -> String {
    match time_s < 9.995 {
        true => format!("{time_s:.2} s"),
        false => format!("{time_s:.0} s"),
    }
}

fn continuity(continuity: &Continuity) -> Vec<String> {
    let downtime = continuity.downtime_ms;
    let downtime = downtime.map(|time| format!("down {}", figure::precise_ms(Some(time))));
    let stalls = continuity.stalls.map(|stalls| {
        format!(
            "stalls: {} above 10 ms, {} above 100 ms, {} above 1 s, longest {}",
            stalls.above_10_ms,
            stalls.above_100_ms,
            stalls.above_1000_ms,
            figure::precise_ms(Some(stalls.longest_ms))
        )
    });
    let lost = continuity.lost_work.map(|lost| {
        let of = [
            ("copying", lost.copying_s),
            ("stopped", lost.stopped_s),
            ("after", lost.after_s),
        ];
        let of = of.into_iter();
        let of = of.filter_map(|(name, time_s)| Some(format!("{name} {}", seconds(time_s?))));
        let of = of.collect::<Vec<_>>().join(", ");
        format!("about {} of work lost ({of})", seconds(lost.total_s))
    });
    parts([downtime, stalls, lost].into_iter().flatten())
}

fn resources(resources: &Resources, names: &Names<'_>) -> Vec<String> {
    let all = resources.link_bytes.map(|bytes| {
        let back = resources.link_bytes_back.unwrap_or(0);
        format!("link {}, back {}", show_bytes(bytes), show_bytes(back))
    });
    let costs = [
        cost(&resources.cost.source, names.source),
        cost(&resources.cost.destination, names.destination),
    ];
    parts([all].into_iter().chain(costs).flatten())
}

fn cost(cost: &HostCost, host: &str) -> Option<String> {
    let cpu = cost.agent_cpu_s.map(|cpu_s| format!("{cpu_s:.1} CPU s"));
    let memory = cost.agent_peak_bytes;
    let memory = memory.map(|bytes| format!("{} memory", show_bytes(bytes)));
    let server = cost.page_server_cpu_s;
    let server = server.map(|cpu_s| format!("{cpu_s:.1} CPU s of its page server"));
    let figures: Vec<String> = [memory, cpu, server].into_iter().flatten().collect();
    (!figures.is_empty()).then(|| format!("{host}: {}", figures.join(", ")))
}

fn survived(robustness: &Robustness) -> Vec<String> {
    match robustness.interruptions {
        None => Vec::new(),
        Some(0) => vec!["the link was not interrupted".to_owned()],
        Some(1) => vec!["the link was interrupted once, and ridden out".to_owned()],
        Some(times) => vec![format!(
            "the link was interrupted {times} times, and ridden out"
        )],
    }
}

/// Formats what each failure means, phase by phase.
fn risks(phases: &[PhaseRisks], names: &Names<'_>) -> Vec<String> {
    type Pick = fn(&PhaseRisks) -> &Risk;
    if phases.is_empty() {
        return Vec::new();
    }
    let failures: [(String, Pick); 3] = [
        ("link cut".to_owned(), |risks| &risks.if_link_is_cut),
        (format!("{} lost", names.source), |risks| {
            &risks.if_source_dies
        }),
        (format!("{} lost", names.destination), |risks| {
            &risks.if_destination_dies
        }),
    ];
    let said = failures.into_iter().map(|(failure, pick)| {
        let same =
            |one: &PhaseRisks, next: &PhaseRisks| pick(one).consequence == pick(next).consequence;
        let groups = phases
            .chunk_by(same)
            .map(|group| group_of(group, pick, names));
        let groups: Vec<String> = groups.collect();
        format!("{failure}: {}", groups.join(" · "))
    });
    said.collect()
}

fn group_of(group: &[PhaseRisks], pick: fn(&PhaseRisks) -> &Risk, names: &Names<'_>) -> String {
    let [Some(first), Some(last)] = [group.first(), group.last()] else {
        return String::new();
    };
    let [from, to] = [first, last].map(|risks| figure::phase(risks.phase));
    let means = meaning(pick(first).consequence, names);
    match from == to {
        true => format!("{from} – {means}"),
        false => format!("{from} to {to} – {means}"),
    }
}

fn meaning(consequence: Consequence, names: &Names<'_>) -> String {
    let source = names.source;
    match consequence {
        Consequence::RunsOn => "runs on".to_owned(),
        Consequence::Stays => format!("stays at {source}"),
        Consequence::Retry => "runs on, and connects again".to_owned(),
        Consequence::Returns => format!("continues at {source}"),
        Consequence::Pause => "waits for the link".to_owned(),
        Consequence::Decision => "an operator decides".to_owned(),
        Consequence::AsWithoutMove => "as without a move".to_owned(),
        Consequence::TakenBack => format!("back at {source}, as it was"),
        Consequence::Lost => "lost".to_owned(),
    }
}

fn compared(predictability: &Predictability) -> Vec<String> {
    let figures = [
        ("data", predictability.link_bytes),
        ("time", predictability.total_ms),
        ("downtime", predictability.downtime_ms),
    ];
    let ratio = |(name, of): &(&str, Option<Compared>)| {
        let ratio = of.as_ref()?.was_to_likely?;
        Some(format!("{name} {ratio:.2}"))
    };
    let ratios: Vec<String> = figures.iter().filter_map(ratio).collect();
    if ratios.is_empty() {
        return parts(None);
    }
    let judged = figures.iter().filter_map(|(_, of)| of.as_ref()?.judged);
    let (all, inside) = judged.fold((0, 0), |(all, inside), judged| {
        (all + 1, inside + i32::from(judged == Judgement::Inside))
    });
    let inside = (all > 0).then(|| format!("{inside} of {all} inside their ranges"));
    let ratios = format!("{} of what was likely", ratios.join(", "));
    parts([Some(ratios), inside].into_iter().flatten())
}

fn transparency(transparency: &Transparency) -> Vec<String> {
    let Some(before) = transparency.before else {
        let after = transparency.after;
        return parts(after.map(|rate| format!("used {} vCPUs after", vcpus(Some(rate)))));
    };
    let used = format!("used vCPUs: {}", rates(transparency, before));
    let slowed = transparency.slowed_percent;
    let slowed = slowed.map(|percent| format!("slowed by {percent} %"));
    let whole = before.whole_process;
    let whole = whole.then(|| "with all of QEMU's threads".to_owned());
    parts([Some(used), slowed, whole].into_iter().flatten())
}

fn rates(transparency: &Transparency, before: GuestRate) -> String {
    let mut said = format!("{} before", vcpus(Some(before)));
    let later = [
        ("while copied", transparency.during),
        ("after", transparency.after),
    ];
    for (when, rate) in later {
        if rate.is_some() {
            said.push_str(&format!(", {} {when}", vcpus(rate)));
        }
    }
    said
}

fn vcpus(rate: Option<GuestRate>) -> String {
    rate.map_or_else(
        || UNKNOWN.to_owned(),
        |rate| format!("{:.2}", rate.vcpu_s_per_s),
    )
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::{FaultReport, Follows, Properties, Strategy};

    #[test]
    fn the_properties_of_a_move_by_post_copy() {
        let mut report = sample::report();
        report.strategy = Strategy::Postcopy;
        report.faults = Some(FaultReport {
            pages: 312,
            pages_per_gib: 78.0,
            median_ms: 21.4,
            p99_ms: 144.0,
            longest_ms: 195.2,
            above_10_ms: Some(290),
            above_100_ms: Some(12),
            above_1000_ms: Some(0),
        });
        report.cost.destination.page_server_cpu_s = Some(0.31);
        report.properties = Properties::of(&report);
        let mut lines = of_report(&report, 140);
        lines.extend(end(&report));
        golden::check_lines("properties_postcopy", &lines, 140);
    }

    #[test]
    fn what_is_not_known_is_not_said() {
        let mut report = sample::report();
        report.guest_rates = Default::default();
        report.predicted = None;
        report.downtime_ms = None;
        report.link_bytes = None;
        report.cost = Default::default();
        report.properties = Properties::of(&report);
        assert_eq!(end(&report), None);
        golden::check_lines("properties_unknown", &of_report(&report, 110), 110);
    }

    #[test]
    fn a_plan_of_a_move_by_an_unknown_strategy_names_the_worst() {
        let mut plan = sample::plan();
        plan.properties = Properties::planned(&plan, None, Follows::Perhaps, true);
        golden::check_lines("properties_auto", &of_plan(&plan, None, 110), 110);
    }
}
