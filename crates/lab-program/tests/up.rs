//! Tests `lab up`: nothing of a laboratory remains however it ended. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use longhaul_lab::netns::{self, Namespace};
use longhaul_lab::process::{all_with_variable, wait_until};
use longhaul_lab::registry::{LAB_VARIABLE, Record};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// A laboratory held by another process.
struct Held {
    process: Child,
    record: Record,
}

impl Held {
    fn start() -> Self {
        Self::start_with(&["--bare", "--link", "1mbit,200ms"])
    }

    fn start_with(arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(["up", "--foreground"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let record = serde_json::from_str(&line).expect("a laboratory");
        Self { process, record }
    }

    fn end_by(&mut self, signal: Signal) {
        let pid = i32::try_from(self.process.id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
        self.process.wait().unwrap();
    }

    /// Returns its remains on this machine.
    fn remains(&self) -> Vec<String> {
        let record = &self.record;
        let mut remains: Vec<String> = record
            .hosts
            .iter()
            .map(|host| &host.namespace)
            .chain(&record.routers)
            .map(|namespace| format!("/run/netns/{namespace}"))
            .chain([
                format!("/run/longhaul-lab/{}", record.id),
                record.data.display().to_string(),
            ])
            .filter(|path| Path::new(path).exists())
            .collect();
        let pids = all_with_variable(LAB_VARIABLE, &record.id).unwrap();
        remains.extend(pids.iter().map(|pid| format!("process {pid}")));
        remains
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_killed_laboratory_is_removed_by_the_next_one() {
    let mut killed = Held::start();
    let host = &killed.record.hosts[0].namespace;
    // A process that outlives its owner, like a guest's QEMU; without the variable, as there.
    let mut guest = Namespace::open(host)
        .unwrap()
        .spawn(netns::command("sleep").arg("600"))
        .unwrap();
    assert!(killed.remains().len() >= 5, "{:?}", killed.remains());
    killed.end_by(Signal::SIGKILL);
    assert!(guest.try_wait().unwrap().is_none(), "the guest goes on");

    let mut next = Held::start();
    assert!(
        wait_until(LIMIT, || killed.remains().is_empty()),
        "{:?}",
        killed.remains()
    );
    assert!(wait_until(LIMIT, || guest.try_wait().unwrap().is_some()));
    // The next one is unaffected.
    assert!(next.remains().len() >= 5, "{:?}", next.remains());
    next.end_by(Signal::SIGTERM);
    assert!(next.remains().is_empty(), "{:?}", next.remains());
}

#[test]
fn ctrl_c_leaves_nothing() {
    let mut held = Held::start();
    // The laboratory's own signal handling must not be inherited by its processes.
    let started = all_with_variable(LAB_VARIABLE, &held.record.id).unwrap();
    assert!(!started.is_empty());
    for pid in started {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let blocked = status
            .lines()
            .find(|line| line.starts_with("SigBlk:"))
            .unwrap();
        assert_eq!(blocked, "SigBlk:\t0000000000000000", "process {pid}");
    }
    held.end_by(Signal::SIGINT);
    assert!(held.remains().is_empty(), "{:?}", held.remains());
}

#[test]
fn sites_behind_nats_are_shown_with_what_they_reach_and_removed() {
    let kinds = "port-restricted,2*symmetric,no-udp";
    let mut held = Held::start_with(&["--bare", "--nat", kinds, "--link", "10mbit,4ms"]);
    let record = held.record.clone();
    let names: Vec<&str> = record.hosts.iter().map(|host| host.name.as_str()).collect();
    let expected = ["lyon-1", "paris-1", "paris-2", "oslo-1", "rv-1", "client"];
    assert_eq!(names, expected);
    let reach = record.reach.join("\n");
    for line in [
        "lyon-1: 203.0.113.1:",
        "one port for all far ends; filters by the far end's address and port",
        "paris-2: 203.0.113.2:",
        "another port by the far end's address and port",
        "oslo-1: no UDP gets through",
        "lyon - paris: direct after a birthday search",
        "lyon - oslo: relayed by a server over TCP",
    ] {
        assert!(reach.contains(line), "{line}: {reach}");
    }
    assert!(record.routers.len() >= 6, "{:?}", record.routers);
    held.end_by(Signal::SIGTERM);
    assert!(held.remains().is_empty(), "{:?}", held.remains());
}

#[test]
fn agents_of_sites_join_a_realm_with_a_network() {
    let mut held = Held::start_with(&["--nat", "port-restricted,none", "--link", "10mbit,4ms"]);
    let record = held.record.clone();
    let product = Path::new(env!("CARGO_BIN_EXE_lab")).with_file_name("longhaul");
    for host in &record.hosts[..2] {
        let mut command = Command::new(&product);
        command.arg("--socket").arg(host.api.as_ref().unwrap());
        let said = command.args(["--json", "host", "realm"]).output().unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.contains("\"name\": \"clients\""), "{said}");
    }
    let clients = record.clients.expect("clients of the network");
    assert!(Path::new("/run/netns").join(clients).exists());
    let reach = record.reach.join("\n");
    assert!(reach.contains("members of network clients"), "{reach}");
    held.end_by(Signal::SIGTERM);
    assert!(held.remains().is_empty(), "{:?}", held.remains());
}
