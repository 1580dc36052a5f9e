//! Implements `longhaul doctor --self-test`: two agents of its own on this machine, and a guest
//! that checks its memory while it is moved back and forth between them. Everything is removed
//! afterwards.

mod guest;

use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use guest::Findings;
use longhaul_api::{
    Client, ClientError, ErrorCode, Outcome, Report, StartGuest, StartMigration, Trust,
};
use longhaul_hypervisor::guest::{Found, find_all};
use longhaul_migration::host::config::Config;
use longhaul_protocol::units::show_bytes;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use std::net::UdpSocket;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{sleep, timeout};

const GUEST: &str = "self-test";
const MEMORY_MIB: u64 = 64;
/// The time limit for an agent to answer, and to query its emulators.
const START_WITHIN: Duration = Duration::from_secs(120);
/// The time limit of one move.
const MOVE_WITHIN: Duration = Duration::from_secs(300);
/// The time limit for the guest's progress.
const PASS_WITHIN: Duration = Duration::from_secs(60);
const END_WITHIN: Duration = Duration::from_secs(25);

/// One move and its results.
#[derive(Debug, Serialize)]
struct Moved {
    number: u32,
    from: &'static str,
    to: &'static str,
    downtime_ms: Option<f64>,
    link_bytes: Option<u64>,
    total_ms: Option<u64>,
    compared_bytes: u64,
    guest_passes: u32,
}

/// Runs the test; returns 0 when every move was good.
pub(super) async fn run(output: &Output, config: &Config, moves: u32) -> Result<u8, CliError> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut hosts = Hosts::make(config).map_err(failed)?;
    let done = tokio::select! {
        done = hosts.test(output, moves) => Some(done),
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
        _ = hang_up.recv() => None,
    };
    let logs = done
        .as_ref()
        .is_some_and(Result::is_err)
        .then(|| hosts.logs());
    let left = hosts.end().await;
    let result = match done {
        None => Ok(130),
        Some(Ok(())) => Ok(0),
        Some(Err(error)) => {
            output.aside(&[Line::text(logs.unwrap_or_default())]);
            Err(failed(error))
        }
    };
    match left {
        Ok(()) => result,
        Err(left) => Err(failed(format!("something is left over: {left}"))),
    }
}

fn failed(text: String) -> CliError {
    CliError::failed("self_test", format!("the self-test failed: {text}"))
}

/// The two agents and their folder.
struct Hosts {
    folder: PathBuf,
    agents: Vec<Agent>,
}

struct Agent {
    name: &'static str,
    state: PathBuf,
    address: String,
    client: Client,
    child: Child,
}

impl Hosts {
    fn make(config: &Config) -> Result<Self, String> {
        let folder = std::env::temp_dir().join(format!("lh-test-{}", std::process::id()));
        std::fs::DirBuilder::new()
            .mode(0o711)
            .create(&folder)
            .map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
        let mut hosts = Self {
            folder,
            agents: Vec::new(),
        };
        for name in ["here", "there"] {
            match hosts.start(config, name) {
                Ok(agent) => hosts.agents.push(agent),
                Err(error) => {
                    hosts.agents.iter_mut().for_each(Agent::kill);
                    let removed = std::fs::remove_dir_all(&hosts.folder);
                    let left = removed.map_or_else(|e| format!("; {e}"), |()| String::new());
                    return Err(format!("{error}{left}"));
                }
            }
        }
        Ok(hosts)
    }

    fn start(&self, config: &Config, name: &'static str) -> Result<Agent, String> {
        let cannot = |what: &str, error: &dyn std::fmt::Display| format!("cannot {what}: {error}");
        let folder = self.folder.join(name);
        std::fs::create_dir(&folder).map_err(|error| cannot("make a folder", &error))?;
        let firmware = folder.join("guest.bin");
        std::fs::write(&firmware, guest::image())
            .map_err(|error| cannot("write the guest", &error))?;
        let free = UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let address = free
            .map_err(|error| cannot("listen on this machine", &error))?
            .to_string();
        let state = folder.join("s");
        let socket = folder.join("api");
        let text = configuration(config, name, &state, &address, &socket, &firmware);
        let file = folder.join("agent.toml");
        std::fs::write(&file, text).map_err(|error| cannot("write a configuration", &error))?;
        let log = std::fs::File::create(folder.join("log"))
            .map_err(|error| cannot("make a log", &error))?;
        let program =
            std::env::current_exe().map_err(|error| cannot("find this program", &error))?;
        let child = Command::new(program)
            .args(["agent", "--config"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C is handled by this process, which then ends them in order.
            .process_group(0)
            .spawn()
            .map_err(|error| cannot("start an agent", &error))?;
        Ok(Agent {
            name,
            state,
            address,
            client: Client::unix(&socket),
            child,
        })
    }

    async fn test(&mut self, output: &Output, moves: u32) -> Result<(), String> {
        for agent in &mut self.agents {
            agent.wait().await?;
        }
        let [here, there] = &self.agents[..] else {
            return Err("there are not two agents".to_owned());
        };
        here.trust(there).await?;
        there.trust(here).await?;
        let host = here.client.host().await.map_err(text)?;
        let start = StartGuest::Description(self.description(here).await?);
        let started = here.client.start_guest(&start).await.map_err(text)?;
        let with = started.accelerator.unwrap_or_else(|| "?".to_owned());
        let qemu = started.qemu.unwrap_or_else(|| "?".to_owned());
        if !output.json {
            output
                .lines(&[Line::text(format!(
                    "{moves} moves of a guest of {MEMORY_MIB} MiB that checks its memory: QEMU \
                     {qemu}, {with}, longhaul {}",
                    host.version
                ))])
                .map_err(text)?;
        }
        let mut last = here.gets_on(0).await?;
        let mut worst: f64 = 0.0;
        for number in 1..=moves {
            let (from, to) = match number % 2 {
                1 => (here, there),
                _ => (there, here),
            };
            let report = from.move_to(to).await?;
            last = to.gets_on(last.passes).await?;
            worst = worst.max(report.downtime_ms.unwrap_or_default());
            let moved = moved(number, from, to, &report, last)?;
            show(output, &moved, moves).map_err(text)?;
        }
        summary(output, moves, worst).map_err(text)
    }

    async fn description(&self, here: &Agent) -> Result<String, String> {
        // The newest of the types that every supported QEMU has.
        let host = here.client.host().await.map_err(text)?;
        if host.qemus.is_empty() {
            return Err("this host has no QEMU: longhaul doctor says more".to_owned());
        }
        Ok(format!(
            "name = {GUEST:?}\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
             memory_mib = {MEMORY_MIB}\nfirmware = {GUEST:?}\n"
        ))
    }

    /// Returns the end of the agents' logs.
    fn logs(&self) -> String {
        let end = |agent: &Agent| {
            let log = agent.state.with_file_name("log");
            let log = std::fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().rev().take(12).collect();
            let lines: Vec<&str> = lines.into_iter().rev().collect();
            format!(
                "the agent `{}` said last:\n{}\n",
                agent.name,
                lines.join("\n")
            )
        };
        self.agents.iter().map(end).collect()
    }

    /// Ends agents and guests, and removes the folder.
    async fn end(mut self) -> Result<(), String> {
        for agent in &mut self.agents {
            agent.end().await;
        }
        let mut left = Vec::new();
        for agent in &self.agents {
            for found in find_all(&agent.state).unwrap_or_default() {
                let stopped = match found {
                    Found::Running(guest) | Found::Ended(guest) => guest.stop(None).await,
                    Found::Damaged { .. } => Ok(()),
                };
                left.extend(stopped.err().map(|error| error.to_string()));
            }
        }
        let removed = std::fs::remove_dir_all(&self.folder);
        left.extend(
            removed
                .err()
                .map(|e| format!("{}: {e}", self.folder.display())),
        );
        match left.is_empty() {
            true => Ok(()),
            false => Err(left.join("; ")),
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn configuration(
    config: &Config,
    name: &str,
    state: &Path,
    address: &str,
    socket: &Path,
    firmware: &Path,
) -> String {
    let qemu = &config.hypervisor.qemu;
    let accelerator = format!("{:?}", qemu.accelerator).to_lowercase();
    let default = qemu.default.as_ref();
    let default = default.map_or(String::new(), |label| format!("default = {label:?}\n"));
    let emulators: String = qemu
        .emulators
        .iter()
        .map(|(label, path)| format!("{label:?} = {path:?}\n"))
        .collect();
    // The test's own guest: its folders are this command's.
    let run_as = match nix::unistd::geteuid().is_root() {
        true => "run_as = \"root\"\n",
        false => "",
    };
    format!(
        "name = {name:?}\nstate = {state:?}\nlisten = {address:?}\napi.socket = {socket:?}\n\
         [qemu]\naccelerator = {accelerator:?}\n{run_as}{default}[qemu.emulators]\n{emulators}\
         [firmware]\n{GUEST} = {firmware:?}\n"
    )
}

impl Agent {
    async fn wait(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + START_WITHIN;
        loop {
            // The answer waits for the agent's query of its emulators, too.
            match timeout(START_WITHIN, self.client.host()).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) if Instant::now() > deadline => return Err(text(error)),
                Ok(Err(_)) => {}
                Err(_) => return Err(format!("the agent `{}` does not answer", self.name)),
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("the agent `{}` ended: {status}", self.name));
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    async fn trust(&self, other: &Self) -> Result<(), String> {
        let host = other.client.host().await.map_err(text)?;
        let trust = Trust {
            name: other.name.to_owned(),
            fingerprint: host.fingerprint,
            addresses: vec![other.address.clone()],
            may: vec![longhaul_api::Scope::Query, longhaul_api::Scope::Send],
            replace: false,
        };
        self.client.trust(&trust).await.map(|_| ()).map_err(text)
    }

    async fn move_to(&self, to: &Self) -> Result<Report, String> {
        let start = StartMigration {
            guest: GUEST.to_owned(),
            to: to.name.to_owned(),
            downtime_ms: 300,
            bandwidth_bps: None,
            strategy: Default::default(),
            verify: true,
            patience_ms: 60_000,
            early_release: false,
            require_arbiter: false,
            keep_memory: false,
            encoding: Default::default(),
            convergence: Default::default(),
            disks: Default::default(),
            bases: Default::default(),
            group: None,
        };
        let id = self.begin(&start).await?;
        let ended = async {
            let mut watch = self.client.watch(&id).await.map_err(text)?;
            while let Some(progress) = watch.next().await {
                if progress.map_err(text)?.outcome.is_some() {
                    break;
                }
            }
            self.client.report(&id).await.map_err(text)
        };
        let late = || format!("a move took longer than {} s", MOVE_WITHIN.as_secs());
        timeout(MOVE_WITHIN, ended).await.map_err(|_| late())?
    }

    /// Begins a move; the last one may still be closing.
    async fn begin(&self, start: &StartMigration) -> Result<String, String> {
        let deadline = Instant::now() + PASS_WITHIN;
        loop {
            match self.client.migrate(start).await {
                Ok(migration) => return Ok(migration.id),
                Err(ClientError::Api(error))
                    if error.code == ErrorCode::GuestBusy && Instant::now() < deadline => {}
                Err(error) => return Err(text(error)),
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the guest has checked its memory again.
    async fn gets_on(&self, passes: u32) -> Result<Findings, String> {
        let socket = self.state.join("guests").join(GUEST).join("run/qmp");
        let deadline = Instant::now() + PASS_WITHIN;
        loop {
            let found = guest::findings(&socket).await;
            match found {
                Ok(found) if found.errors > 0 => {
                    let (place, wanted, is) = found.first;
                    return Err(format!(
                        "the guest's memory is not what it wrote: {} words, the first at \
                         {place:#x} ({is:#x} instead of {wanted:#x})",
                        found.errors
                    ));
                }
                // Two more, so that one began and ended here.
                Ok(found) if found.checks && found.passes.wrapping_sub(passes) >= 2 => {
                    return Ok(found);
                }
                Err(error) if Instant::now() > deadline => return Err(error),
                Ok(_) if Instant::now() > deadline => {
                    let (host, seconds) = (self.name, PASS_WITHIN.as_secs());
                    return Err(format!("the guest is stopped at `{host}` for {seconds} s"));
                }
                Ok(_) | Err(_) => sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn end(&mut self) {
        let id = i32::try_from(self.child.id()).map(Pid::from_raw);
        let asked = id.is_ok_and(|id| kill(id, Signal::SIGTERM).is_ok());
        let deadline = Instant::now() + END_WITHIN;
        while asked && Instant::now() < deadline {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
        self.kill();
    }

    fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn moved(
    number: u32,
    from: &Agent,
    to: &Agent,
    report: &Report,
    found: Findings,
) -> Result<Moved, String> {
    if report.outcome != Some(Outcome::Completed) {
        let reason = report.reason.as_ref();
        let reason = reason.map_or("no reason is known", |error| &error.message);
        return Err(format!("move {number} ended: {reason}"));
    }
    let verify = report.verify.as_ref();
    let verify = verify.filter(|verify| verify.different_blocks == 0);
    let Some(verify) = verify else {
        return Err(format!(
            "move {number} was not compared, or has differences"
        ));
    };
    Ok(Moved {
        number,
        from: from.name,
        to: to.name,
        downtime_ms: report.downtime_ms,
        link_bytes: report.link_bytes,
        total_ms: report.total_ms,
        compared_bytes: verify.bytes,
        guest_passes: found.passes,
    })
}

fn show(output: &Output, moved: &Moved, moves: u32) -> std::io::Result<()> {
    if output.json {
        return output.json_line(&serde_json::json!({ "move": moved }));
    }
    let Moved {
        number, from, to, ..
    } = moved;
    let downtime = moved.downtime_ms.unwrap_or_default();
    let link = show_bytes(moved.link_bytes.unwrap_or_default());
    let compared = show_bytes(moved.compared_bytes);
    let text = format!(
        "move {number:>2}/{moves} {from} → {to}: downtime {downtime:.0} ms, {link} sent, \
         {compared} compared equal, the guest found no error in {} passes",
        moved.guest_passes
    );
    output.lines(&[Line::default().tone(Tone::Good, "✓ ").plain(text)])
}

fn summary(output: &Output, moves: u32, worst: f64) -> std::io::Result<()> {
    if output.json {
        return output.json_line(&serde_json::json!({
            "summary": { "moves": moves, "verified": moves, "downtime_ms_max": worst }
        }));
    }
    let text = format!("{moves} of {moves} moves verified; the longest downtime was {worst:.0} ms");
    output.lines(&[Line::default().tone(Tone::Good, "✓ ").plain(text)])
}
