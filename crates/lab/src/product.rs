//! Drives Longhaul in the laboratory from outside: agents on the hosts, guests on the agents, and
//! moves by its own command line.

use crate::agent::{self, Agent, run_as_own_user};
use crate::error::{During, LabError};
use crate::guest::{KERNEL_NAME, KernelFiles};
use crate::installed;
use crate::interrupt;
use crate::lab::{Host, Lab};
use crate::process;
use longhaul_api::{Guest, Guests, Migration, Outcome, Phase, Progress, Report};
use longhaul_protocol::guest::GuestDescription;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// How long a wait for events of a move blocks before it checks for an interrupt.
const SLICE: Duration = Duration::from_millis(100);
/// The number of lines at the end of each agent's log shown when a test fails.
const LOG_LINES: usize = 80;

/// The settings of the agents' configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The preferred QEMU of each host: a version such as `7.2`, or a path.
    pub qemus: Vec<String>,
    /// `auto`, `kvm` or `tcg`.
    pub accelerator: String,
}

/// The accelerator that an agent has found since this machine's start, `kvm` or `tcg`. Where KVM
/// hangs, to find that out takes each agent some seconds of a processor.
const FOUND_ACCELERATOR: &str = "/run/longhaul-lab/accelerator";

impl Settings {
    /// Returns the accelerator, as an earlier agent found it if that is left to the agents.
    fn accelerator(&self) -> String {
        let found = match self.accelerator.as_str() {
            "auto" => fs::read_to_string(FOUND_ACCELERATOR).ok(),
            _ => None,
        };
        let known = found.filter(|found| ["kvm", "tcg"].contains(&found.as_str()));
        known.unwrap_or_else(|| self.accelerator.clone())
    }

    /// Returns the tables of the configuration of a host, by its index.
    fn table(&self, index: usize, files: &KernelFiles) -> Result<toml::Table, LabError> {
        let text = |path: &Path| toml::Value::from(path.display().to_string());
        let table = |pairs: Vec<(&str, toml::Value)>| {
            pairs
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect::<toml::Table>()
        };
        let label = self
            .qemus
            .get(index)
            .or(self.qemus.last())
            .cloned()
            .unwrap_or_default();
        let emulators = table(vec![("preferred", text(&installed::qemu(&label)?))]);
        let mut qemu = table(vec![
            ("default", "preferred".into()),
            ("accelerator", self.accelerator().into()),
            ("emulators", emulators.into()),
        ]);
        run_as_own_user(&mut qemu);
        let kernel = table(vec![
            ("kernel", text(&files.kernel)),
            ("initrd", text(&files.initramfs)),
        ]);
        let kernels = table(vec![(KERNEL_NAME, kernel.into())]);
        Ok(table(vec![
            ("qemu", qemu.into()),
            ("kernels", kernels.into()),
        ]))
    }
}

/// Agents on all hosts of a laboratory.
#[derive(Debug)]
pub struct Product {
    agents: Vec<Agent>,
}

impl Product {
    /// Starts an agent on every host; each trusts every other.
    ///
    /// # Errors
    /// When an agent does not start.
    pub fn start(
        lab: &mut Lab,
        files: &KernelFiles,
        settings: &Settings,
    ) -> Result<Self, LabError> {
        Self::start_with(lab, files, settings, &toml::Table::new())
    }

    /// As [`Self::start`], with more tables in the configuration of every host.
    ///
    /// # Errors
    /// When an agent does not start.
    pub fn start_with(
        lab: &mut Lab,
        files: &KernelFiles,
        settings: &Settings,
        more: &toml::Table,
    ) -> Result<Self, LabError> {
        Self::start_each_with(lab, files, settings, |_| more.clone())
    }

    /// As [`Self::start_with`], with each host's own tables, by the host's index.
    ///
    /// # Errors
    /// When an agent does not start.
    pub fn start_each_with(
        lab: &mut Lab,
        files: &KernelFiles,
        settings: &Settings,
        more: impl Fn(usize) -> toml::Table,
    ) -> Result<Self, LabError> {
        let agents = agent::start_each(lab, |index| {
            let mut table = settings.table(index, files)?;
            table.extend(more(index));
            Ok(table)
        })?;
        let product = Self { agents };
        if settings.accelerator() == "auto" {
            let found = if product.has_kvm(0)? { "kvm" } else { "tcg" };
            fs::write(FOUND_ACCELERATOR, found).during(|| format!("write {FOUND_ACCELERATOR}"))?;
        }
        Ok(product)
    }

    /// Returns a host's agent.
    ///
    /// # Errors
    /// When there is no such host.
    pub fn agent(&self, host: usize) -> Result<&Agent, LabError> {
        self.agents.get(host).ok_or_else(|| no_host(host))
    }

    /// Returns a host's agent, to kill and restart it.
    ///
    /// # Errors
    /// When there is no such host.
    pub fn agent_mut(&mut self, host: usize) -> Result<&mut Agent, LabError> {
        self.agents.get_mut(host).ok_or_else(|| no_host(host))
    }

    /// Returns the ends of all agents' logs, for what is printed when a test fails.
    pub fn ends_of_logs(&self) -> String {
        let end = |agent: &Agent| {
            let log = fs::read_to_string(agent.log()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
            format!("-- {} said last:\n{}\n", agent.name(), last.join("\n"))
        };
        self.agents.iter().map(end).collect()
    }

    /// Returns whether guests of a host run with KVM.
    ///
    /// # Errors
    /// When its agent does not answer.
    pub fn has_kvm(&self, host: usize) -> Result<bool, LabError> {
        let host: longhaul_api::Host = self.ask(host, &["host"])?;
        Ok(host.kvm == Some(true))
    }

    /// Starts a guest on a host.
    ///
    /// # Errors
    /// When the agent refuses.
    pub fn start_guest(
        &self,
        lab: &Lab,
        host: usize,
        description: &GuestDescription,
    ) -> Result<Guest, LabError> {
        let text = toml::to_string(description).map_err(|error| LabError::Answer {
            what: "the guest's description".to_owned(),
            message: error.to_string(),
        })?;
        let path = lab
            .host(host)?
            .folder()
            .join(format!("{}.toml", description.name));
        fs::write(&path, text).during(|| format!("write {}", path.display()))?;
        self.ask(host, &["guests", "start", &path.display().to_string()])
    }

    /// Ends a guest's QEMU at once.
    ///
    /// # Errors
    /// When the agent refuses.
    pub fn stop_guest(&self, host: usize, name: &str) -> Result<(), LabError> {
        self.agent(host)?
            .run(&["guests", "stop", "--force", name])
            .map(drop)
    }

    /// Returns a host's data about a guest; `None` where the guest is unknown.
    ///
    /// # Errors
    /// When its agent does not answer.
    pub fn guest(&self, host: usize, name: &str) -> Result<Option<Guest>, LabError> {
        let guests: Guests = self.ask(host, &["guests"])?;
        Ok(guests.guests.into_iter().find(|guest| guest.name == name))
    }

    /// Returns the latest migration of a guest in a host's list.
    ///
    /// # Errors
    /// When its agent does not answer.
    pub fn latest_migration(&self, host: usize, name: &str) -> Result<Option<Migration>, LabError> {
        let list: longhaul_api::Migrations = self.ask(host, &["migrations"])?;
        Ok(list
            .migrations
            .into_iter()
            .find(|migration| migration.guest == name))
    }

    /// Runs a command of the product's whose output is one JSON document.
    ///
    /// # Errors
    /// When it fails.
    pub fn ask<T: DeserializeOwned>(&self, host: usize, words: &[&str]) -> Result<T, LabError> {
        let agent = self.agent(host)?;
        let mut command = agent.command()?;
        command.arg("--json").args(words);
        let said = process::run(&mut command)?;
        serde_json::from_str(&said).map_err(|error| LabError::Answer {
            what: format!("`longhaul {}` on {}", words.join(" "), agent.name()),
            message: format!("{error}: {}", said.trim()),
        })
    }

    /// Starts to move a guest from a host; `more` are further options of the command line.
    ///
    /// # Errors
    /// When the command cannot be started.
    pub fn migrate(
        &self,
        host: usize,
        name: &str,
        to: &Host,
        more: &[&str],
    ) -> Result<Move, LabError> {
        let mut command = self.agent(host)?.command()?;
        command
            .args(["--json", "migrate", name, "--to", to.name()])
            .args(more);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let began = Instant::now();
        let mut process = command.spawn().during(|| format!("move {name}"))?;
        let (sender, events) = channel();
        if let Some(stdout) = process.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // The receiver may be gone.
                    let _ = sender.send((Instant::now(), Event::of(&line)));
                }
            });
        }
        Ok(Move {
            process,
            events,
            began,
            progress: None,
            finished: Finished::new(began),
        })
    }

    /// As [`Self::migrate`], to the end; a move that exceeds its limit is cancelled, and counts as
    /// failed.
    ///
    /// # Errors
    /// When the command cannot be started.
    pub fn migrate_within(
        &self,
        host: usize,
        name: &str,
        to: &Host,
        more: &[&str],
        limit: Duration,
    ) -> Result<Finished, LabError> {
        let moving = self.migrate(host, name, to, more)?;
        let mut given_up = Finished::new(moving.began);
        match moving.finish(limit) {
            Err(LabError::Answer { message, .. }) => {
                given_up.said.push(message);
                if let Err(error) = self.agent(host)?.run(&["cancel", name]) {
                    given_up.said.push(error.to_string());
                }
                given_up.ended = Instant::now();
                Ok(given_up)
            }
            ended => ended,
        }
    }

    /// Moves a guest to the end with the product's own display on this terminal.
    ///
    /// # Errors
    /// When the command cannot be run.
    pub fn migrate_shown(
        &self,
        host: usize,
        name: &str,
        to: &Host,
        more: &[&str],
    ) -> Result<Finished, LabError> {
        let mut command = self.agent(host)?.command()?;
        command
            .args(["migrate", name, "--to", to.name()])
            .args(more);
        let mut finished = Finished::new(Instant::now());
        let status = command.status().during(|| format!("move {name}"))?;
        finished.ended = Instant::now();
        interrupt::check()?;
        finished.exit_code = status.code();
        if !status.success() {
            finished.said.push("it said why above".to_owned());
            return Ok(finished);
        }
        let report: Report = self.ask(host, &["report"])?;
        finished.outcome = report.outcome;
        finished.report = Some(Box::new(report));
        Ok(finished)
    }
}

fn no_host(host: usize) -> LabError {
    LabError::Which(format!("this laboratory has no agent {host}"))
}

/// Returns the socket of a guest's channel on a host, even before the guest is there.
pub fn channel_socket(host: &Host, guest: &str, channel: &str) -> PathBuf {
    host.folder()
        .join(format!("state/guests/{guest}/run/channel-{channel}"))
}

/// A line that `longhaul --json migrate` prints.
#[derive(Debug, Clone)]
pub enum Event {
    /// It began.
    Migration(Box<Migration>),
    /// Its progress.
    Progress(Box<Progress>),
    /// Its report.
    Report(Option<Box<Report>>),
    /// An error, or anything else.
    Other(Value),
}

impl Event {
    fn of(line: &str) -> Self {
        let mut value: Value = serde_json::from_str(line).unwrap_or_else(|_| line.into());
        let mut take = |key: &str| value.get_mut(key).map(Value::take);
        if let Some(Ok(migration)) = take("migration").map(serde_json::from_value) {
            return Self::Migration(migration);
        }
        if let Some(Ok(progress)) = take("progress").map(serde_json::from_value) {
            return Self::Progress(progress);
        }
        if let Some(Ok(report)) = take("report").map(serde_json::from_value) {
            return Self::Report(report);
        }
        Self::Other(value)
    }
}

/// A move under way. Dropping this ends the command; the move belongs to the agents.
#[derive(Debug)]
pub struct Move {
    process: Child,
    events: Receiver<(Instant, Event)>,
    began: Instant,
    /// The last one seen.
    progress: Option<Box<Progress>>,
    finished: Finished,
}

/// The end of a move.
#[derive(Debug, Clone)]
pub struct Finished {
    /// The time of the request.
    pub began: Instant,
    /// The time of the outcome.
    pub ended: Instant,
    /// The command's exit code, where it has one.
    pub exit_code: Option<i32>,
    /// The outcome, if the agent reported it.
    pub outcome: Option<Outcome>,
    /// The agent's report.
    pub report: Option<Box<Report>>,
    /// Further output: errors.
    pub said: Vec<String>,
    /// Every observed phase, with its time.
    pub phases: Vec<(Instant, Phase)>,
    /// The last prediction while the guest still ran at the source.
    pub last_prediction_ms: Option<u64>,
    /// Whether interruptions of the link were shown.
    pub interruption_seen: bool,
}

impl Finished {
    fn new(began: Instant) -> Self {
        Self {
            began,
            ended: began,
            exit_code: None,
            outcome: None,
            report: None,
            said: Vec::new(),
            phases: Vec::new(),
            last_prediction_ms: None,
            interruption_seen: false,
        }
    }

    /// Returns whether the guest was moved.
    pub fn completed(&self) -> bool {
        self.exit_code == Some(0) && self.outcome == Some(Outcome::Completed)
    }

    /// Returns why it was not moved, as text.
    pub fn why(&self) -> String {
        match self.said.as_slice() {
            [] => format!("outcome {:?}, exit code {:?}", self.outcome, self.exit_code),
            said => said.join(" | "),
        }
    }
}

impl Move {
    /// Waits until the move is in that phase or a later one; returns false if it ended before, or
    /// did not reach it in time.
    pub fn wait_for_phase(&mut self, phase: Phase, limit: Duration) -> bool {
        self.wait_until(limit, |finished| {
            finished
                .phases
                .last()
                .is_some_and(|(_, seen)| *seen >= phase)
        })
    }

    /// Waits until a condition holds for the known state; returns false if the move ended before.
    pub fn wait_until(
        &mut self,
        limit: Duration,
        mut holds: impl FnMut(&Finished) -> bool,
    ) -> bool {
        let deadline = Instant::now() + limit;
        while !holds(&self.finished) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok((at, event)) => self.note(at, event),
                Err(_) => return false,
            }
        }
        self.finished.outcome.is_none()
    }

    /// Waits until the command has ended.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn finish(mut self, limit: Duration) -> Result<Finished, LabError> {
        let deadline = Instant::now() + limit;
        loop {
            interrupt::check()?;
            match self.events.recv_timeout(SLICE) {
                Ok((at, event)) => self.note(at, event),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(LabError::Answer {
                        what: "a move".to_owned(),
                        message: format!(
                            "it had not ended after {} s: {}",
                            limit.as_secs(),
                            self.seen()
                        ),
                    });
                }
            }
        }
        let status = self
            .process
            .wait()
            .during(|| "wait for a move".to_owned())?;
        if let Some(stderr) = self.process.stderr.take() {
            let lines = BufReader::new(stderr).lines().map_while(Result::ok);
            self.finished
                .said
                .extend(lines.filter(|line| !line.trim().is_empty()));
        }
        self.finished.exit_code = status.code();
        if self.finished.ended == self.began {
            self.finished.ended = Instant::now();
        }
        Ok(self.finished.clone())
    }

    /// Returns whether the command has ended.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Returns the id of the migration and its known state so far.
    pub fn so_far(&self) -> &Finished {
        &self.finished
    }

    /// Returns all that was seen of it, to find out why it does not end.
    fn seen(&self) -> String {
        let since = |at: &Instant| at.saturating_duration_since(self.began).as_secs_f64();
        let phases = self.finished.phases.iter();
        let phases: Vec<String> = phases
            .map(|(at, phase)| format!("{phase:?} at {:.1} s", since(at)))
            .collect();
        format!(
            "{}; said {:?}; last {:?}",
            phases.join(", "),
            self.finished.said,
            self.progress
        )
    }

    fn note(&mut self, at: Instant, event: Event) {
        if let Event::Progress(progress) = &event {
            self.progress = Some(progress.clone());
        }
        let finished = &mut self.finished;
        match event {
            Event::Migration(migration) => finished.phases.push((at, migration.phase)),
            Event::Progress(progress) => {
                if finished
                    .phases
                    .last()
                    .is_none_or(|(_, last)| *last != progress.phase)
                {
                    finished.phases.push((at, progress.phase));
                }
                if progress.phase == Phase::Precopy && progress.predicted_downtime_ms.is_some() {
                    finished.last_prediction_ms = progress.predicted_downtime_ms;
                }
                finished.interruption_seen |= progress.link.interrupted_ms.is_some();
                if progress.outcome.is_some() {
                    finished.outcome = progress.outcome;
                    finished.ended = at;
                }
            }
            Event::Report(report) => finished.report = report,
            Event::Other(value) => finished.said.push(value.to_string()),
        }
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        // It has ended already after a success.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
