//! Implements `lab crash-matrix`: a failure at every step of a move, after which exactly one copy
//! of the guest exists.
//!
//! [`point`] lists the steps, [`case`] the possible failures, [`cover`] chooses few significant
//! cases, [`predict`] derives the expected result from the rules of the handover; `run` runs one
//! case on a `ground`, with the guest and its `disk`.

pub mod case;
pub mod cover;
mod disk;
mod ground;
mod left;
pub mod point;
pub mod predict;
mod run;
pub mod soak;

use case::{Case, Pair, Site};
use ground::Ground;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::lab::{print, say};
use longhaul_lab::peer::qmp::Qmp;
use longhaul_lab::process::{self, own_binary};
use point::Point;
use predict::Place;
use serde_json::json;
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The approximate time of a case on two cores, including the creation of the ground.
const CASE_TIME: Duration = Duration::from_millis(4500);
/// The number of tries of a case whose point is not reached: a precondition of the point may be
/// late.
const ATTEMPTS: u32 = 3;
/// The number of cases after which a ground is replaced.
const PART_CASES: usize = 64;
/// The default maximum of a choice.
const CASES: usize = usize::MAX;

/// The options of `lab crash-matrix`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Every victim at every point with every pair of QEMUs (hours)
    #[arg(long, conflicts_with_all = ["cases", "within"])]
    pub all: bool,
    /// Only one of several parts of these cases, as `2/4`: all parts together are all of them
    #[arg(long, value_name = "K/N", requires = "all")]
    pub part: Option<Share>,
    /// The maximum number of cases, which cover as many kinds of failures, parts of a move and
    /// circumstances together as possible
    #[arg(long, value_name = "N")]
    pub cases: Option<usize>,
    /// As many cases as take about this long
    #[arg(long, value_name = "TIME", value_parser = longhaul_protocol::units::parse_duration)]
    pub within: Option<Duration>,
    /// The number of cases at a time, each with hosts of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub jobs: usize,
    /// The seed of the choice of cases [default: the date]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Only the cases whose names begin with this:
    /// VICTIM:POINT:QEMU:late|early:locks-on|locks-off:at-once|later:raw|qcow2:DISKS:MEMORY, where
    /// DISKS is shared, precopy, mirror, hybrid or postcopy, and MEMORY precopy, hybrid or postcopy
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Before the point, let QEMU complete its migration by itself, which it must never do
    #[arg(long)]
    pub converged: bool,
    /// Print the cases and run none
    #[arg(long)]
    pub list: bool,
}

/// One of several parts of a choice of cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Its number, from 1.
    number: usize,
    of: usize,
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = text.split_once('/').and_then(|(number, of)| {
            let (number, of) = (number.parse().ok()?, of.parse().ok()?);
            (1..=of).contains(&number).then_some(Self { number, of })
        });
        parsed.ok_or_else(|| format!("`{text}` is no part like 2/4, the second of four"))
    }
}

impl Share {
    /// Returns its cases: those of a site are grouped as far as possible, since creating a site
    /// takes as long as several cases.
    fn of(self, mut cases: Vec<Case>) -> Vec<Case> {
        let sites = Site::all();
        cases.sort_by_key(|case| sites.iter().position(|site| *site == case.kind.site()));
        let [from, to] = [self.number - 1, self.number].map(|part| cases.len() * part / self.of);
        cases.drain(from..to).collect()
    }
}

/// The results of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// Cases that were tried.
    pub tried: usize,
    /// The names of those that failed, with the reasons.
    pub failed: Vec<(String, String)>,
}

/// Runs the command: exit status 0 when every case is as predicted, 1 otherwise.
///
/// # Errors
/// When it cannot be run, or is interrupted.
pub fn command(options: &Options) -> Result<ExitCode, LabError> {
    let cases = choose(options)?;
    if options.list {
        let lines: String = cases.iter().map(|case| format!("{case}\n")).collect();
        print(&lines)?;
        return Ok(ExitCode::SUCCESS);
    }
    let summary = run(&cases, seed(options), options)?;
    Ok(ExitCode::from(u8::from(!summary.failed.is_empty())))
}

/// Returns the seed of the options, or the days since 1970.
pub fn seed(options: &Options) -> u64 {
    seed_or_date(options.seed)
}

fn seed_or_date(seed: Option<u64>) -> u64 {
    let days = || {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.map_or(0, |now| now.as_secs() / 86_400)
    };
    seed.unwrap_or_else(days)
}

/// Returns the points of the product beside this program.
///
/// # Errors
/// When it was not built, or has a point that the matrix has no place for.
pub fn points() -> Result<Vec<Point>, LabError> {
    let said =
        process::run(Command::new(own_binary("longhaul")?).args(["agent", "--list-fail-points"]))?;
    said.lines().map(Point::named).collect()
}

/// Returns the selected cases.
///
/// # Errors
/// When there are none, or the points cannot be determined.
pub fn choose(options: &Options) -> Result<Vec<Case>, LabError> {
    let points = points()?;
    if !options.only.is_empty() {
        let wanted = |case: &Case| {
            let name = case.to_string();
            options.only.iter().any(|only| name.starts_with(only))
        };
        let mut cases = case::universe_of(&points, &Pair::ALL);
        cases.retain(wanted);
        if cases.is_empty() {
            let only = options.only.join(", ");
            let hint = "hint: lab crash-matrix --all --list";
            return Err(LabError::Which(format!("there is no case {only} ({hint})")));
        }
        return Ok(cases);
    }
    let universe = case::universe(&points);
    if options.all {
        let all = case::all(universe);
        return Ok(match options.part {
            Some(share) => share.of(all),
            None => all,
        });
    }
    let most = match (options.cases, options.within) {
        (Some(cases), _) => cases,
        (_, Some(time)) => (time.as_secs_f64() / CASE_TIME.as_secs_f64()) as usize,
        _ => CASES,
    };
    let cover = cover::pairwise(&universe, seed(options), most.max(1));
    say(&format!(
        "crash matrix: seed {}, {} of {} cases, {} of {} pairs of traits, {} of {} of all \
         properties",
        seed(options),
        cover.cases.len(),
        universe.len(),
        cover.traits.pairs,
        cover.traits.of,
        cover.properties.pairs,
        cover.properties.of
    ));
    Ok(cover.cases)
}

/// Runs cases, with a line each on the standard error, those on the same ground one after the
/// other, as many grounds at a time as there are jobs. If the time is limited, each ground has its
/// share of it, and the cases beyond it are skipped.
///
/// # Errors
/// When hosts or guests cannot be made, or it is interrupted.
pub fn run(cases: &[Case], seed: u64, options: &Options) -> Result<Summary, LabError> {
    let began = Instant::now();
    let jobs = options.jobs.max(1);
    // The last ones take about as long for every job.
    let at_once = PART_CASES.min(cases.len().div_ceil(2 * jobs)).max(1);
    let mut parts: Vec<Part<'_>> = Site::all()
        .into_iter()
        .flat_map(|site| {
            let stands = |case: &&Case| case.kind.site() == site;
            let cases: Vec<&Case> = cases.iter().filter(stands).collect();
            let parts = cases.chunks(at_once).map(<[_]>::to_vec);
            parts.map(|cases| Part { site, cases }).collect::<Vec<_>>()
        })
        .collect();
    // If the time is too short for all, the skipped cases vary.
    let first = (seed % parts.len().max(1) as u64) as usize;
    parts.rotate_left(first);
    let work = Work {
        parts: Mutex::new(parts.into()),
        tried: AtomicUsize::new(0),
        of: cases.len(),
        seed,
        converged: options.converged,
        jobs,
        end: options.within.map(|within| began + within),
    };
    let failed = thread::scope(|scope| {
        let lanes: Vec<_> = (0..jobs).map(|_| scope.spawn(|| work.lane())).collect();
        let mut failed = Vec::new();
        for lane in lanes {
            failed.extend(lane.join().map_err(|_| broken_lane())??);
        }
        Ok::<_, LabError>(failed)
    })?;
    let summary = Summary {
        tried: work.tried.into_inner(),
        failed,
    };
    say(&format!(
        "crash matrix: {} cases, {} failed, {} not tried for want of time, {} s",
        summary.tried,
        summary.failed.len(),
        cases.len() - summary.tried,
        began.elapsed().as_secs()
    ));
    for (name, _) in &summary.failed {
        say(&format!(
            "to repeat it alone: lab crash-matrix --only {name}"
        ));
    }
    Ok(summary)
}

/// Cases that run on one ground one after the other.
struct Part<'a> {
    site: Site,
    cases: Vec<&'a Case>,
}

/// The work shared by several jobs.
struct Work<'a> {
    parts: Mutex<VecDeque<Part<'a>>>,
    tried: AtomicUsize,
    of: usize,
    seed: u64,
    converged: bool,
    jobs: usize,
    /// The time after which nothing more is begun.
    end: Option<Instant>,
}

impl<'a> Work<'a> {
    /// Runs parts until there are none left; returns the failures.
    fn lane(&self) -> Result<Vec<(String, String)>, LabError> {
        let mut failed = Vec::new();
        while let Some((part, until)) = self.next() {
            self.part(&part, until, &mut failed)?;
        }
        Ok(failed)
    }

    /// Returns the next part, and the end of its share of the time.
    fn next(&self) -> Option<(Part<'a>, Option<Instant>)> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let rounds = parts.len().div_ceil(self.jobs) as u32;
        let part = parts.pop_front()?;
        let now = Instant::now();
        let until = self.end.map(|end| now + (end - now) / rounds);
        Some((part, until))
    }

    fn part(
        &self,
        part: &Part<'_>,
        until: Option<Instant>,
        failed: &mut Vec<(String, String)>,
    ) -> Result<(), LabError> {
        let mut ground = None;
        for case in &part.cases {
            if until.is_some_and(|until| Instant::now() > until) {
                break;
            }
            let number = self.tried.fetch_add(1, Ordering::Relaxed) + 1;
            for attempts_left in (0..ATTEMPTS).rev() {
                let mut used = match ground.take() {
                    Some(ground) => ground,
                    None => Ground::make(part.site, self.seed)?,
                };
                match attempt(&mut used, case, (number, self.of), self.converged)? {
                    Some(failure) if failure.missed && attempts_left > 0 => continue,
                    Some(failure) => failed.push((case.to_string(), failure.why)),
                    None if used.is_worn() => {}
                    None => ground = Some(used),
                }
                break;
            }
        }
        Ok(())
    }
}

fn broken_lane() -> LabError {
    LabError::Which("a lane of the crash matrix broke".to_owned())
}

/// Runs a case and prints its line; returns the reason of a failure. After a failure the ground is
/// of no more use.
fn attempt(
    ground: &mut Ground,
    case: &Case,
    (number, of): (usize, usize),
    converged: bool,
) -> Result<Option<run::Failed>, LabError> {
    let logs = [ground.log_bytes(0)?, ground.log_bytes(1)?];
    let began = Instant::now();
    let tried = run::run(ground, case, converged);
    longhaul_lab::interrupt::check()?;
    let seconds = began.elapsed().as_secs_f64();
    match tried {
        Ok(place) => {
            say(&format!(
                "{number:>4}/{of} {seconds:>5.1} s  {case}: {place:?}"
            ));
            let only_forth = ground.site.pair == Pair::OldToNew && place == Place::Destination;
            if only_forth {
                ground.end()?;
            }
            if (only_forth || place == Place::Nowhere) && !ground.is_worn() {
                ground.boot()?;
            }
            Ok(None)
        }
        Err(failed) => {
            let what = if failed.missed { "missed" } else { "FAILED" };
            say(&format!(
                "{number:>4}/{of} {seconds:>5.1} s  {case}: {what}: {}",
                failed.why
            ));
            let folder = keep_logs(ground, case, logs)?;
            say(&format!("           its logs: {}", folder.display()));
            Ok(Some(failed))
        }
    }
}

/// Returns a QEMU's report of its guest, with the registers twice, which shows whether it executes
/// anything.
fn state_of_qemu(monitor: &Path) -> String {
    let ask = |text: &mut String| {
        let mut qmp = Qmp::connect(monitor)?;
        let registers = json!({"command-line": "info registers"});
        let questions = [
            ("query-status", json!({})),
            ("query-chardev", json!({})),
            ("human-monitor-command", registers.clone()),
            ("human-monitor-command", registers),
        ];
        for (command, arguments) in questions {
            let answer = qmp.execute(command, &arguments)?;
            let answer = answer
                .as_str()
                .map_or_else(|| answer.to_string(), str::to_owned);
            text.push_str(&format!("{command}\n{answer}\n"));
        }
        Ok::<_, LabError>(())
    };
    let mut text = String::new();
    if let Err(error) = ask(&mut text) {
        text.push_str(&format!("it does not answer: {error}\n"));
    }
    text
}

/// Copies the log of both agents since the case began.
fn keep_logs(ground: &Ground, case: &Case, from: [u64; 2]) -> Result<PathBuf, LabError> {
    let folder = std::env::temp_dir()
        .join("longhaul-crash")
        .join(case.to_string().replace(':', "_"));
    let keeping = || format!("keep logs in {}", folder.display());
    fs::create_dir_all(&folder).during(keeping)?;
    for (host, from) in from.into_iter().enumerate() {
        let agent = ground.product.agent(host)?;
        let role = if host == ground.at {
            "source"
        } else {
            "destination"
        };
        let name = format!("{}-{role}.log", agent.name());
        fs::write(folder.join(name), ground.log_since(host, from)?).during(keeping)?;
        let qemu = ground.qemu_log(host)?;
        if qemu.exists() {
            let name = format!("{}-qemu.log", agent.name());
            fs::copy(&qemu, folder.join(name)).during(keeping)?;
        }
        let monitor = ground.monitor(host)?;
        if monitor.exists() {
            let name = format!("{}-qemu-state.txt", agent.name());
            fs::write(folder.join(name), state_of_qemu(&monitor)).during(keeping)?;
        }
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_are_the_whole() {
        let cases = case::universe(&Point::all().take(12).collect::<Vec<_>>());
        let mut together = Vec::new();
        for text in ["1/3", "2/3", "3/3"] {
            let part = text.parse::<Share>().unwrap().of(cases.clone());
            assert!(part.len() >= cases.len() / 3);
            let mut sites: Vec<_> = part.iter().map(|case| case.kind.site()).collect();
            sites.dedup();
            assert!(sites.len() <= Site::all().len() / 3 + 2, "{sites:?}");
            together.extend(part);
        }
        assert_eq!(together.len(), cases.len());
        assert!(cases.iter().all(|case| together.contains(case)));
        for wrong in ["0/3", "4/3", "1", "1/0", "/", "a/b"] {
            let error = wrong.parse::<Share>().unwrap_err();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
