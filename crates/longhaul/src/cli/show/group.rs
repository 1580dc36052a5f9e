//! Formats several guests that moved as a group: a line for each, and the sums.

use super::figure;
use super::live;
use crate::cli::paint::{Line, Tone};
use longhaul_api::{ApiError, Migration, Outcome, Progress, Report};
use longhaul_protocol::units::show_bytes;
use serde_json::{Value, json};

/// The indent of the values of a row.
const INDENT: usize = 11;

/// A guest whose move has ended, or was refused.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) guest: String,
    /// Its migration, if it began.
    pub(crate) migration: Option<Migration>,
    pub(crate) outcome: Outcome,
    pub(crate) exit_code: u8,
    pub(crate) reason: Option<ApiError>,
    pub(crate) report: Option<Report>,
}

/// The results of a group.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) name: String,
    pub(crate) to: String,
    pub(crate) total_ms: u64,
    pub(crate) ended: Vec<Ended>,
    /// Guests whose move did not begin.
    pub(crate) not_begun: Vec<String>,
}

/// The sums over all reports.
#[derive(Debug, Default, serde::Serialize)]
struct Sums {
    link_bytes: u64,
    memory_bytes: u64,
    disk_bytes: u64,
    /// Bytes that other guests had brought.
    shared_bytes: u64,
    downtime_ms_max: Option<f64>,
}

impl Summary {
    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for report in self.ended.iter().filter_map(|one| one.report.as_ref()) {
            sums.link_bytes += report.link_bytes.unwrap_or(0);
            sums.memory_bytes += report.memory_bytes.unwrap_or(0);
            sums.disk_bytes += report.disk_bytes.unwrap_or(0);
            sums.shared_bytes += report.bytes.shared_bytes.unwrap_or(0);
            let most = sums.downtime_ms_max.into_iter().chain(report.downtime_ms);
            sums.downtime_ms_max = most.reduce(f64::max);
        }
        sums
    }

    fn moved(&self) -> usize {
        let moved = |one: &&Ended| one.outcome == Outcome::Completed;
        self.ended.iter().filter(moved).count()
    }

    /// Returns the JSON form.
    pub(crate) fn json(&self) -> Value {
        let of_one = |one: &Ended| {
            json!({
                "guest": one.guest, "migration": one.migration.as_ref().map(|it| &it.id),
                "outcome": one.outcome, "reason": one.reason, "report": one.report,
            })
        };
        json!({
            "group": self.name, "to": self.to, "total_ms": self.total_ms, "moved": self.moved(),
            "sums": self.sums(), "not_begun": self.not_begun,
            "guests": self.ended.iter().map(of_one).collect::<Vec<_>>(),
        })
    }

    /// Returns 0 when all guests run at the destination; otherwise the worst exit code.
    pub(crate) fn exit_code(&self) -> u8 {
        let codes = self.ended.iter().map(|one| one.exit_code);
        let codes: Vec<u8> = codes
            .chain(self.not_begun.iter().map(|_| 130))
            .filter(|code| *code != 0)
            .collect();
        let worst = [4, 1, 3, 130].into_iter().find(|code| codes.contains(code));
        worst.or(codes.first().copied()).unwrap_or(0)
    }
}

/// Formats a move under way.
pub(crate) fn under_way(migration: &Migration, progress: &Progress) -> Line {
    let line = live::plain(migration, progress);
    Line::default()
        .tone(Tone::Strong, migration.guest.clone())
        .plain(format!("  {}", line.render(usize::MAX, false)))
}

/// Formats the result of a move.
pub(crate) fn ended(one: &Ended) -> Line {
    let guest = &one.guest;
    let report = one.report.as_ref();
    match (&one.migration, one.outcome) {
        (Some(migration), Outcome::Completed) => {
            let mut parts = vec![format!("{guest} runs on {}", migration.destination)];
            if let Some(downtime_ms) = report.and_then(|report| report.downtime_ms) {
                parts.push(format!("down {}", figure::precise_ms(Some(downtime_ms))));
            }
            if let Some(total_ms) = report.and_then(|report| report.total_ms) {
                parts.push(figure::ms(Some(total_ms)));
            }
            if let Some(bytes) = report.and_then(|report| report.link_bytes) {
                parts.push(format!("{} sent", show_bytes(bytes)));
            }
            Line::default()
                .tone(Tone::Good, "✓ ")
                .plain(parts.join(" · "))
        }
        (_, outcome) => {
            let why = one.reason.as_ref().map(|reason| {
                let state = reason
                    .state_of_guest
                    .iter()
                    .map(|state| format!("; {state}"));
                format!(": {}{}", reason.message, state.collect::<String>())
            });
            let (mark, tone) = match outcome {
                Outcome::Aborted => ("- ", Tone::Warn),
                _ => ("✗ ", Tone::Bad),
            };
            let how = figure::outcome(outcome);
            Line::default()
                .tone(tone, mark)
                .plain(format!("{guest} {how}{}", why.unwrap_or_default()))
        }
    }
}

/// Formats the summary of all moves.
pub(crate) fn summary(summary: &Summary) -> Vec<Line> {
    let sums = summary.sums();
    let row = |name: &str, text: String| {
        Line::text("  ")
            .tone(Tone::Faint, name)
            .column(INDENT)
            .plain(text)
    };
    let all = summary.ended.len() + summary.not_begun.len();
    let mut lines: Vec<Line> = summary.ended.iter().map(ended).collect();
    lines.extend(summary.not_begun.iter().map(|guest| {
        Line::default()
            .tone(Tone::Warn, "- ")
            .plain(format!("{guest} was not begun"))
    }));
    let mut moved = vec![
        format!("{} of {all} guests run on {}", summary.moved(), summary.to),
        figure::ms(Some(summary.total_ms)),
    ];
    if let Some(most) = sums.downtime_ms_max {
        moved.push(format!("down {} at most", figure::precise_ms(Some(most))));
    }
    lines.push(row("group", moved.join(" · ")));
    let mut data = vec![
        format!("{} sent", show_bytes(sums.link_bytes)),
        format!("memory {}", show_bytes(sums.memory_bytes)),
    ];
    if sums.disk_bytes > 0 {
        data.push(format!("disks {}", show_bytes(sums.disk_bytes)));
    }
    if sums.shared_bytes > 0 {
        data.push(format!(
            "found in other guests {}",
            show_bytes(sums.shared_bytes)
        ));
    }
    lines.push(row("data", data.join(" · ")));
    lines
}

#[cfg(test)]
mod tests {
    use super::super::sample;
    use super::*;
    use crate::cli::paint::golden;
    use longhaul_api::ErrorCode;

    fn of(outcomes: &[(Outcome, u8)]) -> Summary {
        let one = |(n, (outcome, exit_code)): (usize, &(Outcome, u8))| {
            let mut migration = sample::migration();
            migration.guest = format!("web-{n}");
            let completed = *outcome == Outcome::Completed;
            let reason = ApiError::new(ErrorCode::Internal, "the destination lost power");
            Ended {
                guest: migration.guest.clone(),
                migration: Some(migration),
                outcome: *outcome,
                exit_code: *exit_code,
                reason: (!completed).then(|| reason.state_of_guest("it runs on lyon-1")),
                report: completed.then(sample::report),
            }
        };
        Summary {
            name: "night".into(),
            to: "paris-2".into(),
            total_ms: 92_000,
            ended: outcomes.iter().enumerate().map(one).collect(),
            not_begun: Vec::new(),
        }
    }

    #[test]
    fn a_group_has_a_line_of_each_and_the_sums() {
        let mut mixed = of(&[
            (Outcome::Completed, 0),
            (Outcome::Completed, 0),
            (Outcome::Failed, 1),
        ]);
        mixed.not_begun.push("web-9".into());
        golden::check_lines("group", &summary(&mixed), 120);
        assert_eq!(mixed.json()["sums"]["link_bytes"], 2 * (587u64 << 20));
    }

    #[test]
    fn the_exit_code_is_that_of_the_guest_that_is_worst_off() {
        let code = |codes: &[u8]| {
            let ends: Vec<_> = codes.iter().map(|code| (Outcome::Failed, *code)).collect();
            of(&ends).exit_code()
        };
        assert_eq!(of(&[(Outcome::Completed, 0)]).exit_code(), 0);
        assert_eq!(code(&[130, 1, 0]), 1);
        assert_eq!(code(&[1, 4, 3]), 4);
        assert_eq!(code(&[3, 130]), 3);
        let mut waited = of(&[(Outcome::Completed, 0)]);
        waited.not_begun.push("web-9".into());
        assert_eq!(waited.exit_code(), 130);
    }
}
