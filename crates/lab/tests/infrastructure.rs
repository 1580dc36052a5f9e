//! Tests real hosts and links in network namespaces: the behaviour of links, and that nothing of a
//! laboratory remains however it ended. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use longhaul_lab::error::LabError;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::netns::{self, Namespace};
use longhaul_lab::process::{all_with_variable, wait_until};
use longhaul_lab::registry::{LAB_VARIABLE, Record};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn plan(purpose: &str, link: &str) -> Plan {
    Plan {
        purpose: purpose.to_owned(),
        hosts: 2,
        link: link.parse().unwrap(),
        seed: 1,
    }
}

/// A laboratory held by another process.
struct Held {
    process: Child,
    record: Record,
}

impl Held {
    fn start() -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_lab"))
            .args(["up", "--bare", "--foreground", "--link", "1mbit,200ms"])
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
            .map(|host| format!("/run/netns/{}", host.namespace))
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
fn laboratories_do_not_disturb_each_other() {
    let first = Lab::create(&plan("test: first", "10mbit,20ms")).unwrap();
    let second = Lab::create(&plan("test: second", "10mbit,20ms")).unwrap();
    assert_ne!(first.id(), second.id());
    let reaches = |lab: &Lab| {
        let mut ping = Command::new("ping");
        ping.args([
            "-n",
            "-q",
            "-c",
            "3",
            "-i",
            "0.2",
            "-W",
            "10",
            lab.hosts()[1].address(),
        ]);
        lab.hosts()[0].output(&mut ping)
    };
    reaches(&first).unwrap();
    reaches(&second).unwrap();
    drop(first);
    reaches(&second).unwrap();
}

#[test]
fn a_link_is_what_was_asked_for() {
    // Slow, so that a busy machine keeps up with it.
    let asked = "5mbit,100ms,loss=10%";
    let lab = Lab::create(&plan("test: measure", asked)).unwrap();
    let measured = lab.measure_link(asked.parse().unwrap()).unwrap();
    assert!(measured.loss > 0.0, "{measured:?}");
    // A measured link does not match another specification.
    let error = lab.measure_link("5mbit,30ms,loss=10%".parse().unwrap());
    assert!(matches!(error, Err(LabError::Link(_))), "{error:?}");
}

#[test]
fn a_link_is_cut_heals_and_changes_while_it_runs() {
    let lab = Lab::create(&plan("test: cut", "10mbit,4ms")).unwrap();
    let control = lab.link(0, 1).unwrap();
    let [from, to] = [0, 1].map(|host| {
        let host = lab.host(host).unwrap();
        let address = format!("{}:7000", host.address());
        host.namespace()
            .enter(|| UdpSocket::bind(address))
            .unwrap()
            .unwrap()
    });
    let target = to.local_addr().unwrap();
    let send = |byte: u8| {
        from.send_to(&[byte], target).unwrap();
    };
    let mut buffer = [0];
    to.set_read_timeout(Some(LIMIT)).unwrap();
    send(1);
    to.recv(&mut buffer).unwrap();
    assert_eq!(buffer, [1]);

    control.cut(Duration::from_secs(3600)).unwrap();
    send(2);
    let lost = || control.stats().unwrap().forth.dropped_cut;
    assert!(wait_until(LIMIT, || lost() == 1));
    control.heal().unwrap();
    send(3);
    to.recv(&mut buffer).unwrap();
    assert_eq!(buffer, [3], "what was sent into the cut never comes");

    control
        .change("10mbit,4ms,loss=100%".parse().unwrap())
        .unwrap();
    send(4);
    assert!(wait_until(LIMIT, || control
        .stats()
        .unwrap()
        .forth
        .dropped_loss
        == 1));
    control.change("10mbit,4ms".parse().unwrap()).unwrap();
    send(5);
    to.recv(&mut buffer).unwrap();
    assert_eq!(buffer, [5]);

    let stats = control.stats().unwrap();
    // One byte in UDP, IP and Ethernet.
    assert_eq!(stats.forth.carried_bytes, 3 * (1 + 8 + 20 + 14));
    assert_eq!(stats.forth.offered_frames, 5);
    assert_eq!(stats.back.offered_frames, 0);
}
