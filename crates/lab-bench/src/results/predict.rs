//! Formats the results of `lab bench predict`.

use super::rows::{Rows, at};
use super::{Section, maybe, number};
use serde_json::Value;

/// Who predicts, with the key of its figures in a row.
const PREDICTIONS: [(&str, &str); 2] = [("move", "move_predicted"), ("plan", "plan_predicted")];
/// The figures, with their unit in the document's.
const FIGURES: [(&str, f64); 3] = [("data", 1e6), ("time", 1e3), ("downtime", 1.0)];

/// Formats a table with a line for each prediction.
pub(super) fn show(rows: &Rows<'_>, section: &mut Section) {
    section.paragraph(
        "A prediction is shown as its middle and its range, with the result below. A move \
         predicts while it begins; a plan is made right before the move. The first move over a \
         link has no plan, since a plan would measure the link for it.",
    );
    let head = [
        "workload",
        "link",
        "way",
        "by",
        "data, MB",
        "time, s",
        "downtime, ms",
    ];
    let mut lines = Vec::new();
    for row in &rows.0 {
        for (by, key) in PREDICTIONS {
            let predicted = row.get(key).filter(|predicted| predicted.is_object());
            let Some(predicted) = predicted else {
                continue;
            };
            let text = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            let mut line = vec![text("workload"), link(row), text("way"), by.to_owned()];
            line.extend(FIGURES.map(|(name, unit)| figure(&predicted[name], unit)));
            lines.push(line);
        }
    }
    section.table(&head, &lines);
}

/// Formats the link of a row.
fn link(row: &Value) -> String {
    let of = |key: &str| at(row, key).and_then(Value::as_f64);
    let loss = of("link/loss").filter(|loss| *loss > 0.0);
    let loss = loss.map_or_else(String::new, |loss| format!(", {} %", number(loss * 100.0)));
    format!(
        "{} Mbit/s, {} ms{loss}",
        maybe(of("link/rate_bps"), 1e6),
        maybe(of("link/rtt_ms"), 1.0)
    )
}

/// Formats a range and the result; one that lies outside is bold.
fn figure(figure: &Value, unit: f64) -> String {
    let of = |key: &str| at(figure, key).and_then(Value::as_f64);
    let ends = of("predicted/low").zip(of("predicted/high"));
    let was = of("was");
    let is_inside = ends.zip(was).is_some_and(|((low, high), was)| {
        let was = was.round();
        (low..=high).contains(&was)
    });
    let result = maybe(was, unit);
    let result = if is_inside {
        result
    } else {
        format!("**{result}**")
    };
    let range = ends.map_or_else(
        || "nothing".to_owned(),
        |(low, high)| {
            let likely = maybe(of("predicted/likely"), unit);
            format!(
                "{likely} ({} to {})",
                number(low / unit),
                number(high / unit)
            )
        },
    );
    format!("{range}: {result}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_prediction_is_a_line_and_what_is_outside_is_bold() {
        let range = |low, likely, high, was| {
            let predicted = json!({"low": low, "likely": likely, "high": high});
            json!({"predicted": predicted, "was": was})
        };
        let rows = [json!({
            "workload": "idle",
            "way": "there",
            "link": {"rate_bps": 50_000_000, "rtt_ms": 300.0, "loss": 0.005},
            "move_predicted": {
                "data": range(10_000_000, 20_000_000, 30_000_000, 30_000_000.4),
                "time": range(1000, 2000, 3000, 3001.0),
                "downtime": {"predicted": null, "was": 7.0},
            },
            "plan_predicted": null,
        })];
        let mut section = Section::default();
        show(&Rows::of(&rows), &mut section);
        let line = section.text.trim_end().lines().last().unwrap();
        assert_eq!(
            line,
            "| idle | 50 Mbit/s, 300 ms, 0.5 % | there | move | 20 (10 to 30): 30 | \
             2 (1 to 3): **3** | nothing: **7** |"
        );
    }
}
