//! Formats the results of `lab bench redundancy`: figures of CloudNet's paper, with Longhaul's
//! values.

use super::rows::Rows;
use super::svg::{Plot, Style};
use super::{Section, maybe, percent};

pub(super) fn show(rows: &Rows<'_>, moves: &Rows<'_>, section: &mut Section) {
    section.paragraph(
        "The figures are those of Wood and others, *CloudNet: Dynamic Pooling of Cloud Resources \
         by Live WAN Migration of Virtual Machines* (VEE 2011), made again from our inputs with \
         an encoder and decoder written after that paper (`crates/cloudnet`), its cache of 100 \
         MB. Longhaul finds redundancy in whole pages only, and leaves the rest to compression.",
    );
    let of = |figure: u32| rows.with("figure", &figure.to_string());
    lines(
        &of(5),
        section,
        "redundancy-figure-5",
        "Figure 5: redundancy by blocks a page, first pass",
        "blocks a page",
    );
    bars(&of(7), section);
    optimisations(&of(8), section);
    moved(moves, section);
    kinds(&of(10), section);
    lines(
        &of(14),
        section,
        "redundancy-figure-14",
        "Figure 14: blocks and Rabin fingerprints, all that is sent",
        "blocks or fingerprints a page",
    );
}

/// Draws shares by a number, a line for each input and system; values without a number are
/// horizontal lines.
fn lines(rows: &Rows<'_>, section: &mut Section, file: &str, title: &str, x: &str) {
    if rows.is_empty() {
        return;
    }
    section.heading(title);
    let all = rows.all("x");
    let numbers: Vec<String> = all
        .iter()
        .filter(|x| x.parse::<u32>().is_ok())
        .cloned()
        .collect();
    let mut series = Vec::new();
    let mut cells = Vec::new();
    for input in rows.all("input") {
        let rows = rows.with("input", &input);
        for system in rows.all("system") {
            let rows = rows.with("system", &system);
            for other in rows.all("x").iter().filter(|x| !numbers.contains(x)) {
                let value = rows.with("x", other).median("share");
                let name = format!("{input}, {system}, {other}");
                cells.push(cell(&name, std::iter::repeat_n(value, numbers.len())));
                let values = vec![value.map(|value| value * 100.0); numbers.len()];
                series.push((name, values));
            }
            let values: Vec<Option<f64>> = numbers
                .iter()
                .map(|x| rows.with("x", x).median("share"))
                .collect();
            if values.iter().any(Option::is_some) {
                let name = format!("{input}, {system}");
                cells.push(cell(&name, values.iter().copied()));
                let values = values.into_iter().map(|value| Some(value? * 100.0));
                series.push((name, values.collect()));
            }
        }
    }
    let head: Vec<&str> = std::iter::once(x)
        .chain(numbers.iter().map(String::as_str))
        .collect();
    section.table(&head, &cells);
    let plot = Plot {
        title: title.to_owned(),
        style: Style::Lines,
        y: "% of the bytes that is redundant".to_owned(),
        x: x.to_owned(),
        categories: numbers.clone(),
        series,
        limit: None,
    };
    section.plot(file, plot);
}

fn cell(name: &str, values: impl Iterator<Item = Option<f64>>) -> Vec<String> {
    std::iter::once(name.to_owned())
        .chain(values.map(percent))
        .collect()
}

/// Draws the sizes of deltas, a plot for each input.
fn bars(rows: &Rows<'_>, section: &mut Section) {
    if rows.is_empty() {
        return;
    }
    section.heading("Figure 7: sizes of deltas");
    section.paragraph(
        "CloudNet's deltas are the XOR with the page's last version, run-length encoded; \
         Longhaul's are new values of 8-byte words and a mask, shown before they are compressed.",
    );
    for input in rows.all("input") {
        let rows = rows.with("input", &input);
        let categories = rows.all("x");
        let series = rows.all("system").into_iter().map(|system| {
            let rows = rows.with("system", &system);
            let share = |x: &String| Some(rows.with("x", x).median("share")? * 100.0);
            (system, categories.iter().map(share).collect())
        });
        let plot = Plot {
            title: format!("Figure 7: sizes of deltas, {input}"),
            style: Style::Bars,
            y: "% of the dirty pages".to_owned(),
            x: "bytes, at most".to_owned(),
            series: series.collect(),
            categories,
            limit: None,
        };
        section.plot(&format!("redundancy-figure-7-{}", file_name(&input)), plot);
    }
}

/// Draws the savings of the optimisations.
fn optimisations(rows: &Rows<'_>, section: &mut Section) {
    if rows.is_empty() {
        return;
    }
    section.heading("Figure 8: what each optimisation saves");
    section.paragraph(
        "A replay of a first and a dirty pass over each input. *Data* is all that is sent, *last \
         pass* what is sent of the dirty pass and so what the guest waits for, both less than \
         what is sent without optimisation.",
    );
    for quantity in rows.all("x") {
        let rows = rows.with("x", &quantity);
        let systems = rows.all("system");
        let series = rows.all("input").into_iter().map(|input| {
            let rows = rows.with("input", &input);
            let saved = |system: &String| {
                let share = rows.with("system", system).median("share")?;
                // A negative value would hang below the axis.
                Some((1.0 - share).max(0.0) * 100.0)
            };
            (input, systems.iter().map(saved).collect())
        });
        let plot = Plot {
            title: format!("Figure 8: less {quantity}"),
            style: Style::Bars,
            y: "% saved".to_owned(),
            x: String::new(),
            series: series.collect(),
            categories: systems,
            limit: None,
        };
        section.plot(
            &format!("redundancy-figure-8-{}", file_name(&quantity)),
            plot,
        );
    }
}

/// Draws the same for moves: Longhaul's bytes relative to those of QEMU's default pre-copy.
fn moved(rows: &Rows<'_>, section: &mut Section) {
    let mut cells = Vec::new();
    let rows = rows.with("outcome", "completed");
    for workload in rows.all("workload") {
        let rows = rows.with("workload", &workload);
        let shares = rows.all("parameters/dirty_rate_of_link");
        // A workload of real programs has no rate of its own.
        let mut cases = vec![("-".to_owned(), rows.clone())];
        if !shares.is_empty() {
            let of = |share: String| {
                let rows = rows.with("parameters/dirty_rate_of_link", &share);
                (maybe(share.parse().ok(), 1.0), rows)
            };
            cases = shares.into_iter().map(of).collect();
        }
        for (share, rows) in cases {
            let saved = |key: &str| {
                let of = |system| rows.with("system", system).median(key);
                Some(1.0 - of("longhaul")? / of("qemu-default")?)
            };
            let values = ["link_bytes", "total_ms", "downtime_ms"].map(|key| percent(saved(key)));
            if values.iter().any(|value| value != "-") {
                let [bytes, total, pause] = values;
                cells.push(vec![workload.clone(), share, bytes, total, pause]);
            }
        }
    }
    if cells.is_empty() {
        return;
    }
    section.paragraph(
        "In moves (the bench `memory`), Longhaul against QEMU's default pre-copy, both completed:",
    );
    let head = [
        "workload",
        "dirty rate of link",
        "less data",
        "less total time",
        "less pause time",
    ];
    section.table(&head, &cells);
}

/// Draws the kinds of redundancy, a bar for each input and system.
fn kinds(rows: &Rows<'_>, section: &mut Section) {
    if rows.is_empty() {
        return;
    }
    section.heading("Figure 10: kinds of redundancy");
    let inputs = rows.all("input");
    let systems = rows.all("system");
    let bars: Vec<(&String, &String)> = inputs
        .iter()
        .flat_map(|input| systems.iter().map(move |system| (input, system)))
        .collect();
    let share = |(input, system): &(&String, &String), kind: &str| {
        let rows = rows.with("input", input).with("system", system);
        rows.with("x", kind).median("share")
    };
    let kinds = rows.all("x");
    let lines: Vec<Vec<String>> = bars
        .iter()
        .map(|bar| {
            let name = format!("{}, {}", bar.0, bar.1);
            cell(&name, kinds.iter().map(|kind| share(bar, kind)))
        })
        .collect();
    let head: Vec<&str> = std::iter::once("of the bytes")
        .chain(kinds.iter().map(String::as_str))
        .collect();
    section.table(&head, &lines);
    let series = kinds.iter().map(|kind| {
        let values = bars.iter().map(|bar| Some(share(bar, kind)? * 100.0));
        (kind.clone(), values.collect())
    });
    let plot = Plot {
        title: "Figure 10: kinds of redundancy, first pass, blocks of 1 KiB".to_owned(),
        style: Style::Stack,
        y: "% of the bytes".to_owned(),
        x: String::new(),
        series: series.collect(),
        categories: bars
            .iter()
            .map(|(input, system)| format!("{input} {system}"))
            .collect(),
        limit: None,
    };
    section.plot("redundancy-figure-10", plot);
}

/// Returns a name as part of a file's.
fn file_name(name: &str) -> String {
    let kept = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    name.chars().map(kept).collect()
}
