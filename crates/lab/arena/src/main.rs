//! Implements the arena: the workload inside the laboratory's guests, which rewrites pages and
//! verifies them.
//!
//! It speaks lines of JSON over the virtio-serial port `arena` and sends heartbeats.
//! Run as process 1 it is the whole of the `tiny` guest; in other guests it is a service.

mod content;
mod init;
mod json;
mod load;
mod net;
mod page;
mod pages;
mod port;
mod sys;
mod work;

use content::Content;
use json::{Line, Object};
use load::Load;
use port::Port;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use work::{Answer, Plan, Shared, Work};

/// The default interval of heartbeats in milliseconds.
const BEAT_MS: u64 = 5;
const BEAT_MS_MAX: u64 = 1000;
const RETRY: Duration = Duration::from_millis(20);
const PORT_NAME: &str = "arena";
/// The file that asks a workload to stop and verify itself.
const STOP_FILE: &str = "/run/workload-stop";

fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::set_up();
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match Options::parse(&arguments) {
        Ok(Options {
            root: Some(device), ..
        }) => {
            init::say(&init::enter(&device));
            ExitCode::from(2)
        }
        Ok(options) => Arena::new(options).serve(),
        Err(problem) => {
            init::say(&problem);
            ExitCode::from(2)
        }
    }
}

/// The options of the command line.
struct Options {
    port: Option<PathBuf>,
    /// The initial arena, where the command line describes one.
    plan: Option<Plan>,
    /// The guest's root disk, where the arena only loads its drivers.
    root: Option<String>,
    /// The folder of programs that can run beside the arena.
    workloads: Option<PathBuf>,
    /// The interval of heartbeats.
    beat: Duration,
    /// The address of the guest's network card, where clients are served.
    address: Option<net::Address>,
    /// A server that it calls.
    calls: Option<net::Calls>,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self, String> {
        let mut options = Self {
            port: None,
            plan: None,
            root: None,
            workloads: None,
            beat: Duration::from_millis(BEAT_MS),
            address: None,
            calls: None,
        };
        // UEFI firmware adds a word for the kernel to the end of its command line.
        let words = arguments.iter().filter(|word| !word.starts_with("initrd="));
        let words: Vec<&String> = words.collect();
        for pair in words.chunks(2) {
            let [name, value] = pair else {
                return Err(format!(
                    "usage: arena [--OPTION VALUE]...; {} has no value",
                    pair[0]
                ));
            };
            match name.as_str() {
                "--port" => options.port = Some(PathBuf::from(value)),
                "--root" => options.root = Some((*value).clone()),
                "--workloads" => options.workloads = Some(PathBuf::from(value)),
                "--beat-ms" => options.beat = beat(value)?,
                "--address" => {
                    let address = net::Address::parse(value);
                    let address = address.ok_or(format!("{value} is no ADDRESS/PREFIX"))?;
                    options.address = Some(address);
                }
                "--calls" => {
                    let calls = net::Calls::parse(value);
                    let calls = calls.ok_or(format!("{value} is no GATEWAY,ADDRESS:PORT"))?;
                    options.calls = Some(calls);
                }
                _ => options.plan(name, value)?,
            }
        }
        Ok(options)
    }

    /// Adds a word of the plan.
    fn plan(&mut self, name: &str, value: &str) -> Result<(), String> {
        let key = name.trim_start_matches('-').replace('-', "_");
        let line = match value.parse::<u64>() {
            Ok(number) => Line::new().number(&key, number),
            Err(_) => Line::new().text(&key, value),
        };
        let object = Object::parse(&line.finish()).unwrap_or_default();
        let plan = self.plan.take().unwrap_or_default();
        self.plan = Some(planned(plan, &object)?);
        Ok(())
    }
}

fn beat(value: &str) -> Result<Duration, String> {
    match value.parse() {
        Ok(ms @ 1..=BEAT_MS_MAX) => Ok(Duration::from_millis(ms)),
        _ => Err(format!("beat-ms is 1 to {BEAT_MS_MAX}, not {value}")),
    }
}

/// Returns the plan with the changes in `object`.
fn planned(mut plan: Plan, object: &Object) -> Result<Plan, String> {
    if let Some(name) = object.text("content") {
        plan.content =
            Content::named(name).ok_or(format!("content is random, text or mix, not {name}"))?;
    }
    for (key, field) in [
        ("arena_bytes", &mut plan.arena_bytes),
        ("pages_per_s", &mut plan.pages_per_s),
        ("working_set_bytes", &mut plan.working_set_bytes),
        ("hot_bytes", &mut plan.hot_bytes),
        ("hot_percent", &mut plan.hot_percent),
        ("write_bytes", &mut plan.write_bytes),
        ("verify_pages_per_s", &mut plan.verify_pages_per_s),
        ("writers", &mut plan.writers),
        ("seed", &mut plan.seed),
    ] {
        if let Some(number) = object.number(key) {
            *field = number;
        }
    }
    if plan.writers > 64 {
        return Err(format!("writers is at most 64, not {}", plan.writers));
    }
    Ok(plan)
}

/// The thread that answers the laboratory.
struct Arena {
    options: Options,
    work: Option<Work>,
    load: Option<Load>,
    /// Number of the `check` command that waits for the workload to end, if there is one.
    check_id: Option<u64>,
    idle: Shared,
    beat: u64,
    started: Instant,
}

impl Arena {
    fn new(mut options: Options) -> Self {
        let work = options
            .plan
            .take()
            .and_then(|plan| Work::start(plan, 0).ok());
        Self {
            options,
            work,
            load: None,
            check_id: None,
            idle: Shared::default(),
            beat: 0,
            started: Instant::now(),
        }
    }

    fn serve(mut self) -> ExitCode {
        if let Some(address) = self.options.address {
            net::serve(address, self.options.calls);
        }
        loop {
            match self.open_port().and_then(|mut port| self.speak(&mut port)) {
                Ok(()) => return ExitCode::SUCCESS,
                Err(error) => {
                    init::say(&format!("port {PORT_NAME}: {error}; trying again"));
                    thread::sleep(RETRY);
                }
            }
        }
    }

    fn open_port(&self) -> std::io::Result<Port> {
        loop {
            match self.options.port.clone().or_else(|| Port::find(PORT_NAME)) {
                Some(path) => return Port::open(&path),
                None => thread::sleep(RETRY),
            }
        }
    }

    /// Answers and sends heartbeats until the port fails or `quit` is requested.
    fn speak(&mut self, port: &mut Port) -> std::io::Result<()> {
        let mut next = Instant::now();
        loop {
            for line in port.read_lines()? {
                if let Some(answer) = self.obey(&line) {
                    port.send(&answer);
                }
                if self.options.port.is_some() && line.contains("\"quit\"") {
                    return port.flush();
                }
            }
            self.report_events(port);
            self.beat += 1;
            port.send_or_drop(&self.heartbeat())?;
            // After a pause of the guest the rhythm restarts instead of catching up.
            next = (next + self.options.beat).max(Instant::now());
            thread::sleep(next.saturating_duration_since(Instant::now()));
        }
    }

    fn heartbeat(&self) -> String {
        self.counters(Line::new().number("beat", self.beat))
    }

    fn counters(&self, line: Line) -> String {
        let shared = self.work.as_ref().map_or(&self.idle, |work| &work.shared);
        let clock_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let line = match &self.load {
            Some(load) => line.number("work", load.work()),
            None => line,
        };
        line.number("clock_us", clock_us)
            .number("writes", shared.writes.load(Ordering::Relaxed))
            .number("verified", shared.verified.load(Ordering::Relaxed))
            .number("errors", shared.errors.load(Ordering::Relaxed))
            .finish()
    }

    fn report_events(&mut self, port: &mut Port) {
        if let (Some(load), Some(id)) = (&self.load, self.check_id)
            && let Some(first) = load.ended()
        {
            let line = Line::new().number("answer", id);
            let line = line.number("found_errors", load.errors());
            port.send(&line.text("first_error", &first).finish());
            self.check_id = None;
        }
        let Some(work) = &self.work else { return };
        while let Some(fault) = work.shared.take_fault() {
            port.send(
                &Line::new()
                    .number("fault", fault.page as u64)
                    .text("expected", &fault.mismatch.expected)
                    .text("found", &fault.mismatch.found)
                    .finish(),
            );
        }
        while let Some(answer) = work.shared.take_answer() {
            port.send(&match answer {
                Answer::Started { id, pages } => Line::new()
                    .number("answer", id)
                    .number("pages", pages)
                    .finish(),
                Answer::Verified { id, pages, errors } => Line::new()
                    .number("answer", id)
                    .number("pages", pages)
                    .number("found_errors", errors)
                    .finish(),
            });
        }
    }

    /// Executes a command line; returns its immediate answer, if there is one.
    fn obey(&mut self, line: &str) -> Option<String> {
        let command = Object::parse(line)?;
        let id = command.number("id").unwrap_or(0);
        match self.try_obey(&command, id) {
            Ok(true) => Some(self.counters(Line::new().number("answer", id))),
            Ok(false) => None,
            Err(problem) => Some(
                Line::new()
                    .number("answer", id)
                    .text("error", &problem)
                    .finish(),
            ),
        }
    }

    /// Returns `Ok(true)` where the command is done, `Ok(false)` where the answer follows.
    fn try_obey(&mut self, command: &Object, id: u64) -> Result<bool, String> {
        let name = command.text("command").unwrap_or_default();
        if name == "start" {
            let plan = planned(Plan::default(), command)?;
            self.work = None;
            self.work = Some(Work::start(plan, id).map_err(|error| error.to_string())?);
            return Ok(false);
        }
        match name {
            "report" | "quit" => return Ok(true),
            "workload" => {
                let folder = self.options.workloads.as_ref();
                let folder = folder.ok_or("this guest has no workloads")?;
                if self
                    .load
                    .as_ref()
                    .is_some_and(|load| load.ended().is_none())
                {
                    return Err("another workload is running".to_owned());
                }
                let program = command.text("name").ok_or("name is missing")?;
                self.load = Some(Load::start(folder, program, STOP_FILE.into())?);
                return Ok(true);
            }
            "check" => {
                self.load
                    .as_ref()
                    .ok_or("no workload was started")?
                    .stop()?;
                self.check_id = Some(id);
                return Ok(false);
            }
            _ => {}
        }
        let work = self.work.as_ref().ok_or("no arena was started")?;
        match name {
            "rate" => {
                let rate = command
                    .number("pages_per_s")
                    .ok_or("pages_per_s is missing")?;
                work.shared.pages_per_s.store(rate, Ordering::Relaxed);
                Ok(true)
            }
            "stop" => {
                work.shared.pages_per_s.store(0, Ordering::Relaxed);
                Ok(true)
            }
            "verify" if id == 0 => Err("verify needs an id".to_owned()),
            "verify" if work.verify(id) => Ok(false),
            "verify" => Err("another verify is under way".to_owned()),
            other => Err(format!("unknown command {other}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arena {
        Arena::new(Options {
            port: None,
            plan: None,
            root: None,
            workloads: None,
            beat: Duration::from_millis(BEAT_MS),
            address: None,
            calls: None,
        })
    }

    #[test]
    fn options_become_a_plan() {
        let arguments = [
            "--content",
            "text",
            "--arena-bytes",
            "8192",
            "--pages-per-s",
            "5",
        ];
        let options = Options::parse(&arguments.map(str::to_owned)).unwrap();
        assert_eq!((options.root, options.workloads), (None, None));
        let plan = options.plan.unwrap();
        assert_eq!(
            (plan.content, plan.arena_bytes, plan.pages_per_s),
            (Content::Text, 8192, 5)
        );
        assert!(Options::parse(&["--content".to_owned()]).is_err());
        assert!(Options::parse(&["--content", "noise"].map(str::to_owned)).is_err());
    }

    #[test]
    fn commands_need_an_arena() {
        let mut arena = arena();
        assert!(arena.obey("not json").is_none());
        let answer = arena.obey(r#"{"id":4,"command":"verify"}"#).unwrap();
        assert!(answer.contains("no arena was started"), "{answer}");
        assert!(
            arena
                .obey(r#"{"id":5,"command":"start","arena_bytes":40960}"#)
                .is_none()
        );
        let answer = arena
            .obey(r#"{"id":6,"command":"rate","pages_per_s":100}"#)
            .unwrap();
        assert!(answer.starts_with("{\"answer\":6,"), "{answer}");
        for (command, refusal) in [
            (r#"{"command":"workload","name":"idle"}"#, "no workloads"),
            (r#"{"command":"check"}"#, "no workload was started"),
        ] {
            let answer = arena.obey(command).unwrap();
            assert!(answer.contains(refusal), "{answer}");
        }
        let answer = arena.obey(r#"{"id":7,"command":"dance"}"#).unwrap();
        assert!(answer.contains("unknown command dance"), "{answer}");
    }
}
