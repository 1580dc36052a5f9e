//! Defines the result of a line and of a run, and shows them.

use crate::line::Expectation;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// The longest reason in a row; the document has all of it.
const REASON_CHARS_MAX: usize = 160;

/// The result of one step of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// It was not reached.
    #[default]
    Skipped,
    /// It succeeded, and everything was as it must be.
    Ok,
    /// It was refused by name before anything began.
    Refused,
    /// It failed, or something was not as it must be.
    Failed,
}

/// The result of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It moved, was given up, and moved back.
    Moves,
    /// It moved and was given up; the way back is refused.
    MovesThere,
    /// It was refused by `attach`, or by `plan` and `migrate` alike.
    Refused,
    /// A step failed.
    Fails,
    /// QEMU did not start, or the laboratory failed.
    NotStarted,
}

/// A row: one line, and what happened with it.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The line.
    pub id: String,
    /// The program that writes such lines.
    pub tool: String,
    /// The year of its source.
    pub year: u32,
    /// The version of QEMU.
    pub qemu: String,
    /// Whether the words of managers were replaced.
    pub managers_hidden: bool,
    /// The required result.
    pub expect: Option<Expectation>,
    /// The result.
    pub verdict: Verdict,
    /// Whether it is one of the required results.
    pub as_expected: bool,
    /// Whether `plan` allowed a move that `migrate` did not complete.
    pub plan_was_wrong: bool,
    /// `guests attach`.
    pub attach: Step,
    /// `plan`.
    pub plan: Step,
    /// A move that was given up on the way.
    pub given_up: Step,
    /// The move.
    pub there: Step,
    /// The move back.
    pub back: Step,
    /// Why it was refused or failed.
    pub reasons: Vec<String>,
    /// Warnings of the plan.
    pub warnings: Vec<String>,
    /// How long all of it took.
    pub seconds: f64,
    /// How long each step took.
    pub seconds_of: BTreeMap<&'static str, f64>,
}

impl Row {
    /// Sets the verdict from the steps.
    pub(crate) fn judge(&mut self) {
        let steps = [self.attach, self.plan, self.given_up, self.there, self.back];
        self.verdict = match steps {
            _ if steps.contains(&Step::Failed) => Verdict::Fails,
            [Step::Refused, ..] | [_, Step::Refused, ..] => Verdict::Refused,
            [.., Step::Ok, Step::Ok] => Verdict::Moves,
            [.., Step::Ok, Step::Refused] => Verdict::MovesThere,
            _ => Verdict::Fails,
        };
        self.expected();
    }

    /// Sets the verdict of a line that did not come so far.
    pub(crate) fn not_started(&mut self, reason: String) {
        self.reasons.push(reason);
        self.verdict = Verdict::NotStarted;
        self.expected();
    }

    fn expected(&mut self) {
        let gives = |reason: &String| self.reasons.iter().any(|it| it.contains(reason));
        self.as_expected = match (&self.expect, self.verdict) {
            (_, Verdict::Fails | Verdict::NotStarted) => false,
            (None, _) => true,
            (Some(Expectation::Moves), verdict) => verdict == Verdict::Moves,
            (Some(Expectation::MovesThere(reason)), verdict) => {
                verdict == Verdict::MovesThere && gives(reason)
            }
            (Some(Expectation::Refused(reason)), verdict) => {
                verdict == Verdict::Refused && gives(reason)
            }
        };
    }

    /// Returns the row as a line of text.
    pub fn text(&self) -> String {
        let reasons = self.reasons.join("; ").replace('\n', " ");
        let mut reason: String = reasons.chars().take(REASON_CHARS_MAX).collect();
        if reason.len() < reasons.len() {
            reason.push_str("...");
        }
        let there = match (self.verdict, self.there) {
            (Verdict::NotStarted, _) => "not started",
            (Verdict::Refused, _) => "refused",
            (_, step) => word(step, "moved"),
        };
        let hidden = if self.managers_hidden {
            " (hidden)"
        } else {
            ""
        };
        let text = format!(
            "{:<34} {there:<11} {:<8} {:<8} {:>6.1} s  {}{reason}",
            format!("{}{hidden}", self.id),
            word(self.given_up, "undone"),
            word(self.back, "moved"),
            self.seconds,
            if self.as_expected {
                ""
            } else {
                "NOT AS EXPECTED: "
            },
        );
        text.trim_end().to_owned()
    }
}

fn word(step: Step, ok: &'static str) -> &'static str {
    match step {
        Step::Skipped => "-",
        Step::Ok => ok,
        Step::Refused => "refused",
        Step::Failed => "FAILED",
    }
}

/// Returns the heading of the rows.
pub fn heading() -> String {
    format!(
        "{:<34} {:<11} {:<8} {:<8} {:>8}  {}",
        "line", "there", "given up", "back", "time", "reason"
    )
}

/// The counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// All lines.
    pub lines: usize,
    /// Those that moved, were given up, and moved back.
    pub move_and_return: usize,
    /// Those that moved and were given up, and whose way back is refused.
    pub move_there: usize,
    /// Those that were refused by name.
    pub refused: usize,
    /// Those of which a step failed.
    pub fail: usize,
    /// Those whose plan allowed a move that did not complete.
    pub plan_was_wrong: usize,
    /// Those that did not start.
    pub not_started: usize,
    /// Those whose result is not the required one.
    pub not_as_expected: usize,
}

impl Summary {
    /// Counts rows.
    pub fn of(rows: &[Row]) -> Self {
        let count = |holds: &dyn Fn(&Row) -> bool| rows.iter().filter(|row| holds(row)).count();
        let verdict = |verdict: Verdict| count(&|row: &Row| row.verdict == verdict);
        Self {
            lines: rows.len(),
            move_and_return: verdict(Verdict::Moves),
            move_there: verdict(Verdict::MovesThere),
            refused: verdict(Verdict::Refused),
            fail: verdict(Verdict::Fails),
            plan_was_wrong: count(&|row| row.plan_was_wrong),
            not_started: verdict(Verdict::NotStarted),
            not_as_expected: count(&|row| !row.as_expected),
        }
    }

    /// Returns the summary as a line of text.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{} lines: {} move and come back, {} move there only, {} are refused, {} fail",
            self.lines, self.move_and_return, self.move_there, self.refused, self.fail
        );
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            " (plan allowed {} of the moves that failed), {} did not start; {} not as expected",
            self.plan_was_wrong, self.not_started, self.not_as_expected
        );
        text
    }
}

/// The document of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Document {
    /// The counts.
    pub summary: Summary,
    /// The results, in the order of the lines.
    pub rows: Vec<Row>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(expect: Option<&str>, steps: [Step; 5], reason: &str) -> Row {
        let [attach, plan, given_up, there, back] = steps;
        let mut row = Row {
            id: "a".to_owned(),
            tool: "script".to_owned(),
            year: 2026,
            qemu: "10.0".to_owned(),
            managers_hidden: false,
            expect: expect.and_then(|text| text.parse().ok()),
            verdict: Verdict::NotStarted,
            as_expected: false,
            plan_was_wrong: false,
            attach,
            plan,
            given_up,
            there,
            back,
            reasons: vec![reason.to_owned()],
            warnings: Vec::new(),
            seconds: 1.0,
            seconds_of: BTreeMap::new(),
        };
        row.judge();
        row
    }

    use Step::{Failed, Ok, Refused, Skipped};

    #[test]
    fn a_line_moves_only_if_every_step_succeeds() {
        let verdict = |steps| row(None, steps, "").verdict;
        assert_eq!(verdict([Ok, Ok, Ok, Ok, Ok]), Verdict::Moves);
        assert_eq!(verdict([Ok, Ok, Ok, Ok, Refused]), Verdict::MovesThere);
        assert_eq!(verdict([Ok, Ok, Failed, Ok, Ok]), Verdict::Fails);
        assert_eq!(verdict([Ok, Ok, Ok, Skipped, Skipped]), Verdict::Fails);
        let rest = [Skipped; 3];
        assert_eq!(
            verdict([Refused, Skipped, rest[0], rest[1], rest[2]]),
            Verdict::Refused
        );
        assert_eq!(
            verdict([Ok, Refused, rest[0], rest[1], rest[2]]),
            Verdict::Refused
        );
        assert_eq!(
            verdict([Ok, Refused, rest[0], Failed, rest[2]]),
            Verdict::Fails
        );
    }

    #[test]
    fn an_expectation_names_the_reason() {
        let refused = [Refused, Skipped, Skipped, Skipped, Skipped];
        assert!(row(None, refused, "a TPM").as_expected);
        assert!(row(Some("refused:TPM"), refused, "a TPM").as_expected);
        assert!(!row(Some("refused:folder"), refused, "a TPM").as_expected);
        assert!(!row(Some("moves"), refused, "a TPM").as_expected);
        assert!(!row(Some("refused:TPM"), [Ok; 5], "").as_expected);
        assert!(!row(None, [Ok, Ok, Ok, Failed, Skipped], "").as_expected);
        let there = [Ok, Ok, Ok, Ok, Refused];
        assert!(row(Some("moves-there:exists"), there, "it exists").as_expected);
        assert!(!row(Some("moves"), there, "it exists").as_expected);
    }
}
