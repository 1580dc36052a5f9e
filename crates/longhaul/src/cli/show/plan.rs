//! Formats a plan.

use super::figure::{self, byte_rate};
use super::properties;
use crate::cli::paint::{Line, Tone, columns, head, table, wrap};
use longhaul_api::{Check, Plan, Prediction, Verdict};
use longhaul_protocol::units::show_bytes;

/// The indent of texts with a title before them.
const INDENT: usize = 9;
/// The width from which warnings are inside the table.
const WIDE: usize = 100;

/// Formats the whole plan.
pub(crate) fn plan(plan: &Plan, width: usize) -> Vec<Line> {
    let mut lines = vec![headline(plan), Line::default()];
    lines.extend(checks(&plan.checks, width));
    lines.extend(state(plan));
    if !plan.predictions.is_empty() {
        lines.push(Line::default());
        lines.extend(predictions(plan, width));
        lines.push(Line::default());
        let likelihood = plan.predictions.first().and_then(likelihood);
        lines.extend(properties::of_plan(plan, likelihood, width));
    }
    lines.push(Line::default());
    let Plan {
        guest, destination, ..
    } = plan;
    lines.push(if plan.possible {
        Line::text("Nothing was changed. To go:  ").tone(
            Tone::Strong,
            format!("longhaul migrate {guest} --to {destination}"),
        )
    } else {
        Line::text(format!(
            "Nothing was changed. {guest} can move to {destination} once you fix what is marked "
        ))
        .tone(Tone::Bad, "✗")
        .plain(".")
    });
    lines
}

fn headline(plan: &Plan) -> Line {
    let about: Vec<String> = [
        plan.qemu.as_ref().map(|qemu| format!("QEMU {qemu}")),
        plan.machine_type.clone(),
        plan.accelerator.clone(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let mut line = Line::default()
        .tone(Tone::Strong, plan.guest.clone())
        .plain(format!(" · runs on {}", plan.source));
    if !about.is_empty() {
        line = line.plain(format!(" ({})", about.join(", ")));
    }
    if let Some(vcpus) = plan.vcpus {
        line = line.plain(format!(" · {vcpus} vCPU"));
    }
    if let Some(memory) = plan.memory_bytes {
        line = line.plain(format!(" · memory {}", show_bytes(memory)));
        if let Some(used) = plan.memory_used_bytes {
            line = line.plain(format!(" ({} used)", show_bytes(used)));
        }
    }
    line
}

fn checks(checks: &[Check], width: usize) -> Vec<Line> {
    let column = INDENT + width.saturating_sub(INDENT) / 2;
    let half = column - INDENT;
    let mut lines: Vec<Line> = Vec::new();
    let mut open: Option<Line> = None;
    for check in checks {
        let (tone, sign) = match check.verdict {
            Verdict::Ok => (Tone::Good, "✓"),
            Verdict::Warn => (Tone::Warn, "!"),
            Verdict::Refuse => (Tone::Bad, "✗"),
        };
        let fits = check.verdict == Verdict::Ok && columns(&check.message) + 3 < half;
        if fits && let Some(line) = open.take() {
            let line = line.column(column).tone(tone, sign);
            lines.push(line.plain(format!(" {}", check.message)));
            continue;
        }
        lines.extend(open.take());
        let room = width.saturating_sub(INDENT + 2).max(20);
        let mut pieces = wrap(&check.message, room).into_iter();
        let first = pieces.next().unwrap_or_default();
        let line = Line::text(" ".repeat(INDENT))
            .tone(tone, sign)
            .plain(format!(" {first}"));
        if fits {
            open = Some(line);
            continue;
        }
        lines.push(line);
        let indented = |text: String| Line::text(format!("{}{text}", " ".repeat(INDENT + 2)));
        lines.extend(pieces.map(indented));
        if let Some(hint) = &check.hint {
            lines.extend(
                wrap(&format!("hint: {hint}"), room)
                    .into_iter()
                    .map(indented),
            );
        }
    }
    lines.extend(open);
    title("checks", lines)
}

/// Writes a title into the indent of the first line.
fn title(title: &str, mut lines: Vec<Line>) -> Vec<Line> {
    if let Some(first) = lines.first_mut() {
        *first = first.clone().titled(title);
    }
    lines
}

fn state(plan: &Plan) -> Vec<Line> {
    let mut lines = Vec::new();
    if let Some(rate) = plan.dirty_rate_bytes_per_s {
        let hot = plan.hot_bytes.map_or(String::new(), |hot| {
            format!(" (hot set about {})", show_bytes(hot))
        });
        lines.push(Line::text(format!(
            "{}writes {} to memory{hot}",
            " ".repeat(INDENT),
            byte_rate(rate)
        )));
    }
    let mut lines = title("state", lines);
    if plan.rtt_ms.is_some() || plan.rate_bps.is_some() {
        let link = Line::text(format!(
            "{}{} round trip, {}",
            " ".repeat(INDENT),
            figure::precise_ms(plan.rtt_ms),
            figure::bit_rate(plan.rate_bps)
        ));
        lines.extend(title("link", vec![link]));
    }
    lines
}

/// Explains the ranges, if there are any.
fn likelihood(prediction: &Prediction) -> Option<String> {
    let Prediction {
        link_bytes,
        likelihood_percent,
        learned_from,
        ..
    } = prediction;
    link_bytes.as_ref()?;
    let learned = match learned_from {
        0 => "without an earlier move to learn from".to_owned(),
        1 => "corrected by 1 earlier move".to_owned(),
        count => format!("corrected by {count} earlier moves"),
    };
    Some(format!(
        "{likelihood_percent} of 100 moves are inside each range; {learned}"
    ))
}

fn predictions(plan: &Plan, width: usize) -> Vec<Line> {
    let wide = width >= WIDE;
    let dies = format!("if {} dies", plan.source);
    let mut names = vec!["strategy", "data", "time", "downtime"];
    match wide {
        true => names.extend(["if the link breaks", &dies]),
        false => names = vec!["strategy", "", "predicted"],
    }
    let figures = |prediction: &Prediction| {
        [
            figure::strategy(prediction.strategy).to_owned(),
            figure::range(prediction.link_bytes, |bytes| figure::bytes(Some(bytes))),
            figure::range(prediction.total_ms, |time_ms| figure::ms(Some(time_ms))),
            figure::range(prediction.downtime_ms, |time_ms| figure::ms(Some(time_ms))),
        ]
    };
    let taken: usize = (0..4.min(names.len()))
        .map(|index| {
            let cells = plan.predictions.iter().map(|p| columns(&figures(p)[index]));
            cells.chain([columns(names[index])]).max().unwrap_or(0) + 3
        })
        .sum();
    let room = width.saturating_sub(taken + 3) / 2;
    let mut rows = vec![head(&names)];
    let mut below: Vec<Line> = Vec::new();
    for prediction in &plan.predictions {
        let [strategy, data, time, downtime] = figures(prediction).map(Line::text);
        let breaks = wrap(&prediction.if_link_breaks, room.max(20));
        let dead = wrap(&prediction.if_source_dies, room.max(20));
        if wide {
            let mut cells = vec![strategy, data, time, downtime];
            cells.extend([&breaks, &dead].map(|text| Line::text(text[0].clone())));
            rows.push(cells);
            for index in 1..breaks.len().max(dead.len()) {
                let mut cells = vec![Line::default(); 4];
                let piece = |text: &[String]| text.get(index).cloned().unwrap_or_default();
                cells.extend([piece(&breaks), piece(&dead)].map(Line::text));
                rows.push(cells);
            }
        } else {
            let empty = Line::default;
            rows.push(vec![strategy, Line::text("data"), data]);
            rows.push(vec![empty(), Line::text("time"), time]);
            rows.push(vec![empty(), Line::text("downtime"), downtime]);
            for (what, text) in [
                ("if the link breaks", &prediction.if_link_breaks),
                (dies.as_str(), &prediction.if_source_dies),
            ] {
                let text = format!("{what}: {text}");
                let pieces = wrap(&text, width.saturating_sub(4).max(20));
                below.extend(
                    pieces
                        .into_iter()
                        .map(|text| Line::text(format!("  {text}"))),
                );
            }
        }
        for warning in prediction.stalls.iter().chain(&prediction.note) {
            let pieces = wrap(warning, width.saturating_sub(4).max(20));
            below.extend(pieces.into_iter().enumerate().map(|(index, text)| {
                Line::default()
                    .tone(Tone::Warn, if index == 0 { "! " } else { "  " })
                    .plain(text)
            }));
        }
    }
    let mut lines = table(rows);
    lines.extend(below);
    lines
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_hypervisor::tested;

    #[test]
    fn a_plan_that_can_go() {
        golden::check_lines("plan", &plan(&sample::plan(), 140), 140);
        golden::check_lines("plan_narrow", &plan(&sample::plan(), 80), 80);
    }

    #[test]
    fn a_plan_between_qemus_that_are_newer_than_those_that_are_tested() {
        let mut newer = sample::plan();
        for host in ["lyon-1", "paris-2"] {
            let text = tested::warning("12.0.1", host).unwrap();
            newer
                .checks
                .push(Check::warn("qemu", text, tested::hint(host)));
        }
        golden::check_lines("plan_untested", &plan(&newer, 110), 110);
    }

    #[test]
    fn a_plan_that_is_refused() {
        let mut refused = sample::plan();
        refused.possible = false;
        refused.predictions.clear();
        refused.memory_used_bytes = None;
        refused.dirty_rate_bytes_per_s = None;
        refused.checks[1] = Check::refuse(
            "machine_type",
            "paris-2 has QEMU 7.2.22, and the guest's machine type pc-q35-10.0 needs 10.0 or newer",
            "install QEMU 10.0 on paris-2 (Debian: bookworm-backports), or restart the guest with \
             machine pc-q35-7.2",
        );
        golden::check_lines("plan_refused", &plan(&refused, 110), 110);
    }
}
