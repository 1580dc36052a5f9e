//! Several guests moved at once from one host, beside the same guests moved one after the other.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::document::{AskedLink, Document, Sense, median};
use super::{ASKED_DOWNTIME_MS, Asked};
use crate::arena::Workload;
use crate::error::LabError;
use crate::guest::Tiny;
use crate::lab::say;
use crate::link::Control;
use crate::measure;
use crate::moves::{self, Case, Load, LonghaulMover, Watched};
use crate::product::{Finished, Move};

const GUEST_MEMORY_MIB: u64 = 256;
const ARENA_BYTES: u64 = 96 << 20;
const WORKING_SET_BYTES: u64 = 32 << 20;
/// What all guests together rewrite, as a share of the link's rate.
const DIRTY_SHARE: f64 = 0.1;
/// What all moves together may take of the link, where they are limited.
const LIMITED_SHARE: f64 = 0.4;
const STRETCH: Duration = Duration::from_secs(2);
const MOVE_LIMIT: Duration = Duration::from_secs(600);

const BYTES_OF_ALONE: f64 = 0.9;
const LIMIT_TOLERANCE: f64 = 0.05;

/// Moves at the same time, or one that has the link and the destination to itself.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    system: &'static str,
    case: &'static str,
    link: AskedLink,
    workload: &'static str,
    /// How many guests moved at once.
    guests: u32,
    repeat: u32,
    outcome: String,
    link_bytes: Option<u64>,
    /// From the first command to the last guest running at the destination.
    total_ms: Option<f64>,
    asked_downtime_ms: u64,
    /// The longest of them.
    downtime_ms: Option<f64>,
    /// What all moves together may take, and the most that they took over two seconds.
    limit_bps: Option<u64>,
    highest_bps: Option<f64>,
    verify_errors: Option<u64>,
}

/// Measures, adding rows and then checks to the document.
pub(super) fn measure(
    asked: &Asked<'_>,
    longhaul: &LonghaulMover<'_>,
    document: &mut Document,
) -> Result<(), LabError> {
    let bench = Bench {
        asked,
        longhaul,
        guests: asked.options.guests,
    };
    let mut rows = Vec::new();
    let mut add = |row: Row, document: &mut Document| {
        document.add_row(&row, &show(&row));
        rows.push(row);
    };
    for repeat in 1..=asked.options.repeats() {
        for number in 0..bench.guests {
            add(bench.run("alone", number..number + 1, repeat)?, document);
        }
        for case in ["together", "limited"] {
            add(bench.run(case, 0..bench.guests, repeat)?, document);
        }
    }
    judge(&rows, document);
    Ok(())
}

struct Bench<'a> {
    asked: &'a Asked<'a>,
    longhaul: &'a LonghaulMover<'a>,
    guests: u32,
}

impl Bench<'_> {
    fn run(
        &self,
        kind: &'static str,
        numbers: std::ops::Range<u32>,
        repeat: u32,
    ) -> Result<Row, LabError> {
        let cases: Vec<Case> = numbers
            .map(|number| self.case(kind, number, repeat))
            .collect();
        let mut guests = Vec::new();
        let moved = cases
            .iter()
            .try_for_each(|case| {
                guests.push(self.longhaul.boot(case)?);
                Ok(())
            })
            .and_then(|()| self.move_all(kind, &cases, &mut guests));
        // Also those that did not get so far; the first error is the one that counts.
        let ended: Result<Vec<()>, LabError> = cases[..guests.len()]
            .iter()
            .map(|case| self.longhaul.end(case))
            .collect();
        let row = moved?;
        ended.map(|_| row)
    }

    fn case(&self, kind: &str, number: u32, repeat: u32) -> Case {
        // A guest that was moved away cannot be started anew under its name.
        let mut guest = Tiny::new(&format!("{kind}-{repeat}-{number}"));
        guest.memory_mib = GUEST_MEMORY_MIB;
        let mut guest = guest.description();
        guest.machine.clone_from(&self.asked.machine);
        let dirty_share = DIRTY_SHARE / f64::from(self.guests);
        let arena = Workload {
            content: "mix".to_owned(),
            arena_bytes: ARENA_BYTES,
            working_set_bytes: WORKING_SET_BYTES,
            pages_per_s: Case::pages_per_s(self.asked.link, dirty_share),
            write_bytes: 512,
            writers: 1,
            // What guests have in common is their system.
            seed: self.asked.options.seed.wrapping_add(u64::from(number)),
        };
        Case {
            guest,
            load: Load::Arena { arena, dirty_share },
            link: self.asked.link,
            downtime_ms: ASKED_DOWNTIME_MS,
            limit: MOVE_LIMIT,
            repeat,
        }
    }

    fn move_all(
        &self,
        kind: &'static str,
        cases: &[Case],
        guests: &mut [Watched],
    ) -> Result<Row, LabError> {
        let (lab, product) = (self.longhaul.lab, self.longhaul.product);
        let limited_bps = (self.asked.link.rate_bps as f64 * LIMITED_SHARE) as u64;
        let limit_bps = (kind == "limited").then_some(limited_bps);
        let downtime = format!("{ASKED_DOWNTIME_MS}ms");
        let each = limit_bps.map(|limit| format!("{}bit", limit / u64::from(self.guests)));
        let mut words = vec!["--downtime", downtime.as_str()];
        words.extend(each.iter().flat_map(|each| ["--bandwidth", each.as_str()]));

        let link = lab.link(0, 1)?;
        let before = link.stats()?.forth.carried_bytes;
        let began = Instant::now();
        let moves = cases
            .iter()
            .map(|case| product.migrate(0, &case.guest.name, lab.host(1)?, &words))
            .collect::<Result<Vec<Move>, LabError>>()?;
        let (highest_bps, finished) = watch(link, || finish_all(moves))?;
        let finished = finished?;
        let after = link.stats()?.forth.carried_bytes;
        let ended = finished.iter().map(|finished| finished.ended).max();
        let ended = ended.unwrap_or(began);
        let failed = finished.iter().find(|finished| !finished.completed());
        let mut row = Row {
            system: "longhaul",
            case: kind,
            link: self.asked.link.into(),
            workload: "mix",
            guests: cases.len() as u32,
            repeat: cases.first().map_or(0, |case| case.repeat),
            outcome: match failed {
                None => "completed".to_owned(),
                Some(failed) => format!("failed: {}", failed.why()),
            },
            link_bytes: Some(after - before),
            total_ms: Some(moves::ms(began, ended)),
            asked_downtime_ms: ASKED_DOWNTIME_MS,
            downtime_ms: None,
            limit_bps,
            highest_bps,
            verify_errors: None,
        };
        note_guests(&mut row, guests, [began, ended])?;
        Ok(row)
    }
}

/// Waits for all of them; one that does not end in time is a row that failed.
fn finish_all(moves: Vec<Move>) -> Result<Vec<Finished>, LabError> {
    moves
        .into_iter()
        .map(|moving| moving.finish(MOVE_LIMIT))
        .collect()
}

/// Lets every guest verify its memory.
fn note_guests(
    row: &mut Row,
    guests: &mut [Watched],
    [began, ended]: [Instant; 2],
) -> Result<(), LabError> {
    let mut errors = 0;
    for guest in guests {
        match moves::verify(&mut guest.arena)? {
            Ok(found) => errors += found,
            Err(error) => {
                row.outcome = format!("failed: after the move {error}");
                return Ok(());
            }
        }
        let observed = measure::observe(&guest.arena.beats(), began, ended);
        let downtime_ms = observed.map(|observed| observed.downtime_ms);
        row.downtime_ms = largest(row.downtime_ms, downtime_ms);
    }
    row.verify_errors = Some(errors);
    Ok(())
}

/// The most that a link carried over a stretch while something was done.
fn watch<T>(link: &Control, task: impl FnOnce() -> T) -> Result<(Option<f64>, T), LabError> {
    thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let watching = scope.spawn(move || {
            let mut highest_bps: Option<f64> = None;
            let mut last = (Instant::now(), link.stats()?.forth.carried_bytes);
            while is_done.recv_timeout(STRETCH) == Err(RecvTimeoutError::Timeout) {
                let now = (Instant::now(), link.stats()?.forth.carried_bytes);
                let seconds = (now.0 - last.0).as_secs_f64();
                let bps = (now.1 - last.1) as f64 * 8.0 / seconds;
                highest_bps = largest(highest_bps, Some(bps));
                last = now;
            }
            Ok(highest_bps)
        });
        let result = task();
        drop(done);
        let highest_bps = watching
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((highest_bps, result))
    })
}

fn largest(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).reduce(f64::max)
}

fn show(row: &Row) -> String {
    let number = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
    };
    format!(
        "{:<9} {} at once, repeat {}: {} over the link, {}, longest downtime {}, at most {} over 2 s, \
         errors {}, {}",
        row.case,
        row.guests,
        row.repeat,
        number(row.link_bytes.map(|bytes| bytes as f64 / 1e6), "MB"),
        number(row.total_ms.map(|ms| ms / 1e3), "s"),
        number(row.downtime_ms, "ms"),
        number(row.highest_bps.map(|bps| bps / 1e6), "Mbit/s"),
        row.verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
        row.outcome,
    )
}

/// Computes the checks from the rows.
fn judge(rows: &[Row], document: &mut Document) {
    let sound = |row: &&Row| row.outcome == "completed" && row.verify_errors == Some(0);
    let of = |case: &str| -> Vec<&Row> { rows.iter().filter(|row| row.case == case).collect() };
    // Of each repeat, where all of it went through.
    let ratios = of("together").into_iter().filter(sound).filter_map(|row| {
        let alone = of("alone").into_iter().filter(sound);
        let alone: Vec<&Row> = alone.filter(|other| other.repeat == row.repeat).collect();
        let bytes: u64 = alone.iter().filter_map(|row| row.link_bytes).sum();
        let whole = alone.len() == row.guests as usize && bytes > 0;
        whole.then_some(row.link_bytes? as f64 / bytes as f64)
    });
    document.add_check(
        "bytes_together_vs_alone",
        median(ratios),
        Sense::AtMost,
        BYTES_OF_ALONE,
    );
    let of_limit = of("limited")
        .into_iter()
        .filter(sound)
        .filter_map(|row| Some(row.highest_bps? / row.limit_bps? as f64));
    document.add_check(
        "highest_of_limit",
        median(of_limit),
        Sense::AtMost,
        1.0 + LIMIT_TOLERANCE,
    );
    let wrong = rows.iter().filter(|row| !sound(row)).count();
    if wrong > 0 {
        say(&format!("{wrong} rows failed or have errors"));
    }
    document.add_check("not_sound", Some(wrong as f64), Sense::AtMost, 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &'static str, guests: u32, megabytes: u64, highest_bps: f64) -> Row {
        let link: crate::link::spec::LinkSpec = "100mbit,20ms".parse().unwrap();
        Row {
            system: "longhaul",
            case,
            link: link.into(),
            workload: "mix",
            guests,
            repeat: 1,
            outcome: "completed".to_owned(),
            link_bytes: Some(megabytes * 1_000_000),
            total_ms: Some(1.0),
            asked_downtime_ms: 300,
            downtime_ms: Some(100.0),
            limit_bps: (case == "limited").then_some(40_000_000),
            highest_bps: Some(highest_bps),
            verify_errors: Some(0),
        }
    }

    fn judged(rows: &[Row]) -> Vec<(Option<f64>, bool)> {
        let mut document = Document::new("memory");
        judge(rows, &mut document);
        let document = serde_json::to_value(&document).unwrap();
        let checks = document["checks"].as_array().unwrap();
        checks
            .iter()
            .map(|check| (check["value"].as_f64(), check["holds"] == true))
            .collect()
    }

    #[test]
    fn moves_at_once_are_compared_with_as_many_alone() {
        let rows = [
            row("alone", 1, 50, 9e7),
            row("alone", 1, 50, 9e7),
            row("together", 2, 80, 9e7),
            row("limited", 2, 80, 5e7),
        ];
        let expected = [(Some(0.8), true), (Some(1.25), false), (Some(0.0), true)];
        assert_eq!(judged(&rows), expected);
        // What one of them lacks is no saving.
        let expected = [(None, false), (Some(1.25), false), (Some(0.0), true)];
        assert_eq!(judged(&rows[1..]), expected);
        let mut damaged = rows.clone();
        damaged[3].verify_errors = Some(1);
        let expected = [(Some(0.8), true), (None, false), (Some(1.0), false)];
        assert_eq!(judged(&damaged), expected);
    }

    #[test]
    fn the_busiest_stretch_is_found_also_where_there_is_none() {
        let lost = Control::at("/nonexistent/link.sock".into());
        assert!(watch(&lost, || ()).is_err());
    }
}
