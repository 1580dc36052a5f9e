//! Tries one line: attaches to its guest, plans its move, gives one up, moves it, and moves it
//! back.

use crate::LIMIT;
use crate::line::Line;
use crate::machine::Answers;
use crate::material::Material;
use crate::qemu::Qemu;
use crate::report::{Row, Step, Verdict};
use crate::stage::{DESTINATION, SOURCE, Said, Stage, entries};
use crate::words;
use longhaul_api::{Outcome, Phase, Plan, Verdict as Check};
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::process;
use longhaul_lab::product::Finished;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The name of the guest.
const GUEST: &str = "g";
/// The rate of the move that is given up: a disk takes some seconds.
const SLOW: &str = "8mbit";
/// It is given up when it has sent this much.
const HALF_WAY_BYTES: u64 = 512 << 10;
/// The exit code of a move that was refused, and of one that was given up.
const REFUSED: i32 = 3;
const GIVEN_UP: i32 = 130;
/// How long remains of a move may take to disappear.
const CLEAR_LIMIT: Duration = Duration::from_secs(10);
/// The parts of an agent's state in which remains of a move would be.
const OF_MOVES: [&str; 4] = ["journal", "fronts", "arriving", "guests"];
/// Files there that do not belong to a move.
const LASTING: [&str; 3] = ["journal/incarnation", "qemu.log", "sent-by"];

/// A failed step, with the reason.
type Tried = Result<(), Vec<String>>;

/// A move to its end.
struct Moved {
    completed: bool,
    /// Why it failed, or what is not as it must be.
    wrong: Vec<String>,
}

/// A line on a stage.
struct Trial<'a> {
    stage: &'a Stage,
    made: &'a Material,
    qemu: &'a Qemu,
    row: &'a mut Row,
}

/// Tries a line.
///
/// # Errors
/// When the laboratory fails, or is interrupted.
pub(crate) fn run(stage: &mut Stage, line: &Line, hidden: bool) -> Result<Row, LabError> {
    let began = Instant::now();
    let mut row = Row {
        id: line.id.clone(),
        tool: line.tool.clone(),
        year: line.year,
        qemu: line.qemu.clone(),
        managers_hidden: hidden,
        expect: line.expect.clone(),
        verdict: Verdict::NotStarted,
        as_expected: false,
        plan_was_wrong: false,
        attach: Step::Skipped,
        plan: Step::Skipped,
        given_up: Step::Skipped,
        there: Step::Skipped,
        back: Step::Skipped,
        reasons: Vec::new(),
        warnings: Vec::new(),
        seconds: 0.0,
        seconds_of: BTreeMap::new(),
    };
    stage.clear()?;
    let tried = prepare_and_try(stage, line, &mut row);
    interrupt::check()?;
    match tried {
        Ok(()) => row.judge(),
        Err(error) => row.not_started(error.to_string()),
    }
    stage.clear()?;
    row.seconds = began.elapsed().as_secs_f64();
    Ok(row)
}

fn prepare_and_try(stage: &mut Stage, line: &Line, row: &mut Row) -> Result<(), LabError> {
    let made = Material::make(stage, line)?;
    let tables = [
        made.configuration(stage, line, SOURCE)?,
        made.configuration(stage, line, DESTINATION)?,
    ];
    stage.begin(&tables)?;
    let began = Instant::now();
    let qemu = Qemu::start(stage, line, &made)?;
    row.seconds_of
        .insert("start", began.elapsed().as_secs_f64());
    let mut trial = Trial {
        stage,
        made: &made,
        qemu: &qemu,
        row,
    };
    trial.all()
}

impl Trial<'_> {
    fn all(&mut self) -> Result<(), LabError> {
        let before = Answers::of(&self.qemu.socket)?;
        if !self.timed("attach", Self::attach)? || !self.timed("plan", |it| it.plan(SOURCE))? {
            return Ok(());
        }
        let unsaid: Vec<String> = before
            .passing_bitmaps()
            .into_iter()
            .filter(|name| {
                !self
                    .row
                    .warnings
                    .iter()
                    .any(|warning| warning.contains(name))
            })
            .collect();
        let given_up = self.timed("given up", |it| it.give_up(&before))?;
        self.row.given_up = self.step("given up", given_up);
        if self.row.there == Step::Failed {
            self.row.plan_was_wrong = true;
            return Ok(());
        }
        let there = self.timed("there", |it| it.move_to(DESTINATION, &before))?;
        self.row.plan_was_wrong = !there.completed;
        let lost = unsaid
            .iter()
            .map(|name| format!("bitmap {name} is lost without a warning"));
        let wrong = there.wrong.into_iter().chain(lost).collect();
        self.row.there = self.step("there", verdict(wrong));
        if !there.completed {
            return Ok(());
        }
        let back = self.timed("back", |it| it.move_to(SOURCE, &before))?;
        // A plan of this move only shows whether its failure could be known.
        if !back.completed && !self.plan(DESTINATION)? {
            self.row.back = std::mem::replace(&mut self.row.plan, Step::Ok);
            return Ok(());
        }
        self.row.plan_was_wrong = !back.completed;
        self.row.back = self.step("back", verdict(back.wrong));
        Ok(())
    }

    /// Carries out a step, and notes how long it took.
    fn timed<T>(
        &mut self,
        name: &'static str,
        step: impl FnOnce(&mut Self) -> Result<T, LabError>,
    ) -> Result<T, LabError> {
        let began = Instant::now();
        let done = step(self);
        let took = began.elapsed().as_secs_f64();
        self.row.seconds_of.insert(name, took);
        done
    }

    fn step(&mut self, name: &str, tried: Tried) -> Step {
        match tried {
            Ok(()) => Step::Ok,
            Err(reasons) => {
                let named = reasons.iter().map(|reason| format!("{name}: {reason}"));
                self.row.reasons.extend(named);
                Step::Failed
            }
        }
    }

    fn attach(&mut self) -> Result<bool, LabError> {
        let socket = self.qemu.socket.display().to_string();
        let words = ["--json", "guests", "attach", GUEST, "--qmp", &socket];
        let said = self.stage.say(SOURCE, &words, LIMIT)?;
        let attached = said.status.is_some_and(|status| status.success());
        self.row.attach = match attached {
            true => Step::Ok,
            false => self.refused("attach", &said),
        };
        Ok(attached)
    }

    /// Notes why the product refused something; an error without a reason is a failure.
    fn refused(&mut self, name: &str, said: &Said) -> Step {
        let reasons = words::reasons(&said.out, &said.err);
        let named = said.status.and_then(|status| status.code()) == Some(REFUSED);
        self.row
            .reasons
            .extend(reasons.iter().map(|reason| format!("{name}: {reason}")));
        match named && reasons.iter().all(|reason| !reason.is_empty()) {
            true => Step::Refused,
            false => Step::Failed,
        }
    }

    /// Plans a move from a host; one that is not possible must be refused by `migrate` as well.
    fn plan(&mut self, from: usize) -> Result<bool, LabError> {
        let to = self.stage.host(1 - from)?.name();
        let words = ["--json", "plan", GUEST, "--to", to];
        let said = self.stage.say(from, &words, LIMIT)?;
        let Ok(plan) = words::parse::<Plan>("plan", &said.out) else {
            self.row.plan = self.refused("plan", &said);
            return Ok(false);
        };
        let checks = |verdict: Check| {
            let checks = plan
                .checks
                .iter()
                .filter(move |check| check.verdict == verdict);
            checks
                .map(|check| check.message.clone())
                .collect::<Vec<_>>()
        };
        if from == SOURCE {
            self.row.warnings = checks(Check::Warn);
        }
        if plan.possible {
            self.row.plan = Step::Ok;
            return Ok(true);
        }
        let hintless = plan.checks.iter().filter(|check| {
            check.verdict == Check::Refuse && check.hint.as_ref().is_none_or(String::is_empty)
        });
        let hintless: Vec<String> = hintless
            .map(|check| format!("no hint: {}", check.message))
            .collect();
        let reasons = checks(Check::Refuse);
        self.row
            .reasons
            .extend(reasons.into_iter().map(|reason| format!("plan: {reason}")));
        self.row.plan = Step::Refused;
        let files = self.files()?;
        let finished = self.migrate(from, &[])?;
        let mut wrong = hintless;
        if finished.exit_code != Some(REFUSED) {
            wrong.push(format!(
                "plan refuses, and migrate does not: {}",
                finished.why()
            ));
        }
        wrong.extend(changed_files(&files, &self.files()?));
        if !wrong.is_empty() {
            self.row.plan = Step::Failed;
            self.row.reasons.extend(wrong);
        }
        Ok(false)
    }

    fn migrate(&self, from: usize, more: &[&str]) -> Result<Finished, LabError> {
        let to = self.stage.host(1 - from)?;
        self.stage
            .product
            .migrate_within(from, GUEST, to, more, LIMIT)
    }

    /// Begins a move, gives it up on the way, and compares everything with the state before.
    fn give_up(&mut self, before: &Answers) -> Result<Tried, LabError> {
        let files = self.files()?;
        let processes = self.processes()?;
        let to = self.stage.host(DESTINATION)?;
        let more = ["--bandwidth", SLOW];
        let link = self.stage.lab.link(SOURCE, DESTINATION)?;
        let sent = || link.stats().map(|stats| stats.forth.carried_bytes);
        let until = sent()? + HALF_WAY_BYTES;
        let mut moving = self.stage.product.migrate(SOURCE, GUEST, to, &more)?;
        if moving.wait_for_phase(Phase::Precopy, LIMIT) {
            process::wait_until(LIMIT, || {
                moving.has_ended() || sent().is_ok_and(|sent| sent > until)
            });
            let said = self.stage.say(SOURCE, &["cancel", GUEST], LIMIT)?;
            if !said.status.is_some_and(|status| status.success()) {
                return Ok(Err(words::reasons(&said.out, &said.err)));
            }
        }
        let finished = moving.finish(LIMIT)?;
        let mut wrong = Vec::new();
        if finished.exit_code != Some(GIVEN_UP) || finished.outcome != Some(Outcome::Aborted) {
            wrong.extend(words::of_move(&finished));
            // It failed by itself: to try it again shows nothing new.
            self.row.there = Step::Failed;
        }
        let mut remains = Vec::new();
        process::wait_until(CLEAR_LIMIT, || {
            remains = self
                .remains(&files, &processes)
                .unwrap_or_else(|error| vec![error.to_string()]);
            remains.is_empty() || interrupt::requested()
        });
        wrong.extend(remains);
        match Answers::of(&self.qemu.socket) {
            Ok(after) => wrong.extend(before.changes(&after)),
            Err(error) => wrong.push(error.to_string()),
        }
        Ok(verdict(wrong))
    }

    /// Returns how the files and processes of both hosts differ from earlier ones.
    fn remains(
        &self,
        files: &BTreeMap<String, String>,
        processes: &[Vec<i32>],
    ) -> Result<Vec<String>, LabError> {
        let mut found = changed_files(files, &self.files()?);
        let now = self.processes()?;
        if now != processes {
            let commands: Vec<String> = now.iter().flatten().map(|pid| command(*pid)).collect();
            found.push(format!(
                "processes {processes:?} became {now:?}: {commands:?}"
            ));
        }
        Ok(found)
    }

    /// Moves the guest to a host, and checks it there.
    fn move_to(&mut self, to: usize, before: &Answers) -> Result<Moved, LabError> {
        let from = 1 - to;
        let finished = self.migrate(from, &["--verify"])?;
        if !finished.completed() {
            let mut wrong = words::of_move(&finished);
            wrong.extend(self.status_after_failure(from, before));
            return Ok(Moved {
                completed: false,
                wrong,
            });
        }
        let mut wrong = Vec::new();
        let report = finished.report.as_deref();
        match report.and_then(|report| report.verify.as_ref()) {
            Some(verify) if verify.different_blocks == 0 => {}
            Some(verify) => wrong.push(format!("{} blocks differ", verify.different_blocks)),
            None => wrong.push("nothing was verified".to_owned()),
        }
        let source_ended = || {
            let rest = self.stage.of_guests(from).unwrap_or_default();
            let started = from == SOURCE && self.qemu.process.is_alive();
            !started
                && rest
                    .iter()
                    .all(|pid| !command(*pid).contains("qemu-system"))
        };
        if !process::wait_until(CLEAR_LIMIT, source_ended) {
            wrong.push("the source's QEMU did not end".to_owned());
        }
        match Answers::of(&self.monitor(to)?) {
            Ok(after) => {
                if after.status != before.status {
                    wrong.push(format!("{} became {}", before.status, after.status));
                }
                wrong.extend(before.other_machine(&after));
            }
            Err(error) => wrong.push(error.to_string()),
        }
        for image in self.made.images.iter().filter(|image| image.local) {
            if image.of_firmware {
                // The firmware writes to them as soon as the guest runs there.
                if !image.paths[to].exists() {
                    wrong.push(format!("{} is missing", image.paths[to].display()));
                }
                continue;
            }
            wrong.extend(self.different(image.format, &image.paths, from)?);
        }
        Ok(Moved {
            completed: true,
            wrong,
        })
    }

    /// Returns what is wrong with the guest at the source after a failed move.
    fn status_after_failure(&self, from: usize, before: &Answers) -> Option<String> {
        let socket = match from {
            SOURCE => Ok(self.qemu.socket.clone()),
            _ => self.monitor(from),
        };
        match socket.and_then(|socket| Answers::of(&socket)) {
            Ok(answers) if answers.status == before.status => None,
            Ok(answers) => Some(format!("the guest is {}", answers.status)),
            Err(error) => Some(format!("the guest does not answer: {error}")),
        }
    }

    fn monitor(&self, host: usize) -> Result<PathBuf, LabError> {
        Ok(self
            .stage
            .state(host)?
            .join("guests")
            .join(GUEST)
            .join("run/qmp"))
    }

    /// Returns how an image that moved differs from the one that was set aside.
    fn different(
        &self,
        format: &str,
        paths: &[PathBuf; 2],
        from: usize,
    ) -> Result<Option<String>, LabError> {
        let here = &paths[1 - from];
        let mut aside = paths[from].clone().into_os_string();
        aside.push(".moved");
        let aside = PathBuf::from(aside);
        // A volume keeps its name.
        let there = if aside.exists() { &aside } else { &paths[from] };
        let mut command = Command::new("qemu-img");
        command
            .args(["compare", "-U", "-f", format, "-F", format])
            .arg(there)
            .arg(here);
        Ok(match process::run(&mut command) {
            Ok(_) => None,
            Err(LabError::Command { message, .. }) => {
                Some(format!("{} differs: {message}", here.display()))
            }
            Err(error) => return Err(error),
        })
    }

    /// Returns the images of both hosts with their sizes, and the files of moves.
    fn files(&self) -> Result<BTreeMap<String, String>, LabError> {
        let mut found = BTreeMap::new();
        for host in 0..2 {
            list(&self.stage.images(host)?, &mut found)?;
            let state = self.stage.state(host)?;
            for folder in OF_MOVES {
                list(&state.join(folder), &mut found)?;
            }
        }
        found.retain(|path, _| !LASTING.iter().any(|name| path.ends_with(name)));
        Ok(found)
    }

    /// Returns the processes of both hosts besides the agents.
    fn processes(&self) -> Result<Vec<Vec<i32>>, LabError> {
        (0..2).map(|host| self.stage.of_guests(host)).collect()
    }
}

fn verdict(wrong: Vec<String>) -> Tried {
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(wrong),
    }
}

fn command(pid: i32) -> String {
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words = words.split(|byte| *byte == 0).take(3);
    let words: Vec<_> = words.map(String::from_utf8_lossy).collect();
    words.join(" ")
}

/// Adds the files below a folder, each with its size.
fn list(folder: &Path, found: &mut BTreeMap<String, String>) -> Result<(), LabError> {
    for path in entries(folder)? {
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        let size = match metadata.is_file() {
            true => format!("{} bytes", metadata.len()),
            false => "no file".to_owned(),
        };
        found.insert(path.display().to_string(), size);
        if metadata.is_dir() {
            list(&path, found)?;
        }
    }
    Ok(())
}

fn changed_files(
    before: &BTreeMap<String, String>,
    after: &BTreeMap<String, String>,
) -> Vec<String> {
    let gone = before.iter().filter(|(path, _)| !after.contains_key(*path));
    let gone = gone.map(|(path, _)| format!("{path} is gone"));
    let other = after
        .iter()
        .filter_map(|(path, size)| match before.get(path) {
            None => Some(format!("{path} is new")),
            Some(old) if old != size => Some(format!("{path}: {old} became {size}")),
            Some(_) => None,
        });
    gone.chain(other).collect()
}
