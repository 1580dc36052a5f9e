//! Formats the results of `lab bench codec`: rates, ratios, and the shares of the time.

use super::rows::{Rows, at};
use super::svg::{Plot, Style};
use super::{Section, maybe, number, percent};

const STEPS: [&str; 4] = ["copy", "stage", "decide", "frame"];

pub(super) fn show(rows: &Rows<'_>, section: &mut Section) {
    section.paragraph(
        "Encoding and decoding on one core, in processor time. *Of memcpy* is the rate of \
         encoding by that of a plain copy of the same pages, measured just before. *Left* is what \
         is sent of the bytes. The inputs are described in \
         [crates/lab-bench/inputs](../../crates/lab-bench/inputs/README.md).",
    );
    for pass in ["first", "dirty"] {
        let rows = rows.with("pass", pass);
        if rows.is_empty() {
            continue;
        }
        section.heading(&format!("The {pass} pass"));
        table(&rows, section);
        let of_memcpy = |rows: &Rows<'_>| rows.median_of(rate_of_memcpy).map(|share| share * 100.0);
        section.plot(
            &format!("codec-{pass}-rate"),
            plot(
                &rows,
                format!("Rate of encoding, {pass} pass"),
                "% of memcpy",
                of_memcpy,
            ),
        );
        let left = |rows: &Rows<'_>| rows.median("ratio").map(|ratio| ratio * 100.0);
        section.plot(
            &format!("codec-{pass}-left"),
            plot(
                &rows,
                format!("What is sent, {pass} pass"),
                "% of the bytes",
                left,
            ),
        );
    }
    shares(&rows.with("pass", "first"), section);
}

fn rate_of_memcpy(row: &serde_json::Value) -> Option<f64> {
    let of = |key| at(row, key)?.as_f64();
    Some(of("encode_bytes_per_s")? / of("memcpy_bytes_per_s")?)
}

fn table(rows: &Rows<'_>, section: &mut Section) {
    let mut lines = Vec::new();
    for input in rows.all("input") {
        let rows = rows.with("input", &input);
        for pipeline in rows.all("pipeline") {
            let rows = rows.with("pipeline", &pipeline);
            lines.push(vec![
                input.clone(),
                pipeline,
                maybe(rows.median("encode_bytes_per_s"), 1e9),
                rows.median_of(rate_of_memcpy)
                    .map_or_else(|| "-".to_owned(), number),
                maybe(rows.median("decode_bytes_per_s"), 1e9),
                percent(rows.median("ratio")),
            ]);
        }
    }
    let head = [
        "input",
        "pipeline",
        "encode, GB/s",
        "of memcpy",
        "decode, GB/s",
        "left",
    ];
    section.table(&head, &lines);
}

fn plot(rows: &Rows<'_>, title: String, y: &str, value: impl Fn(&Rows<'_>) -> Option<f64>) -> Plot {
    // A mere copy is the yardstick, not a way of encoding.
    let mut pipelines = rows.all("pipeline");
    pipelines.retain(|pipeline| pipeline != "raw");
    let series = rows.all("input").into_iter().map(|input| {
        let rows = rows.with("input", &input);
        let values = pipelines
            .iter()
            .map(|pipeline| value(&rows.with("pipeline", pipeline)));
        (input, values.collect())
    });
    Plot {
        title,
        style: Style::Bars,
        y: y.to_owned(),
        x: String::new(),
        series: series.collect(),
        categories: pipelines,
        limit: None,
    }
}

/// Formats the shares of the time of Longhaul's pipelines.
fn shares(rows: &Rows<'_>, section: &mut Section) {
    let mut pipelines = rows.all("pipeline");
    pipelines.retain(|pipeline| pipeline.starts_with("longhaul-"));
    let Some(input) = rows.all("input").into_iter().next() else {
        return;
    };
    let rows = rows.with("input", &input);
    let series = STEPS.map(|step| {
        let of = |pipeline: &String| {
            let share = rows
                .with("pipeline", pipeline)
                .median(&format!("share/{step}"));
            share.map(|share| share * 100.0)
        };
        (step.to_owned(), pipelines.iter().map(of).collect())
    });
    section.plot(
        "codec-share",
        Plot {
            title: format!("Where the time of encoding goes, first pass of {input}"),
            style: Style::Stack,
            y: "% of the time".to_owned(),
            x: "copy: staging; stage: zero test, digests; decide: look-ups; frame: compression"
                .to_owned(),
            series: series.to_vec(),
            categories: pipelines,
            limit: None,
        },
    );
}
