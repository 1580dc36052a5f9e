//! Tests a real guest on two real agents of one machine: started, inspected, planned, moved there
//! and back, and unharmed by agents that die. The effects of links, loads and QEMU versions on
//! moves are tested in the laboratory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, free_address};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Boots nothing: its firmware searches for a disk forever.
const GUEST: &str = "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                     memory_mib = 64\nchannels = [{ name = \"arena\" }]\n";

/// A host whose guests end with it.
struct Host(Agent);

impl std::ops::Deref for Host {
    type Target = Agent;

    fn deref(&self) -> &Agent {
        &self.0
    }
}

impl Host {
    fn start(name: &str, address: &str) -> Self {
        Self(Agent::start_configured(|folder| {
            common::host(name, address, folder)
        }))
    }

    fn refuse(&self, arguments: &[&str], expected: &str) {
        let output = self.longhaul(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {errors}");
        assert!(errors.contains(expected), "{arguments:?}: {errors}");
    }

    fn guest(&self) -> Value {
        self.json(&["guests"])["guests"][0].clone()
    }

    fn trust(&self, name: &str, other: &Self, address: &str) {
        let fingerprint = other.json(&["host"])["fingerprint"].clone();
        self.succeed(&[
            "host",
            "trust",
            name,
            fingerprint.as_str().unwrap(),
            address,
            "--may",
            "query,send",
        ]);
    }

    fn crash_and_restart(&mut self) {
        self.0.end(Signal::SIGKILL);
        self.0.restart();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // It may be elsewhere, or stopped.
        self.longhaul(&["guests", "stop", "--force", "web-7"]);
    }
}

#[test]
fn a_root_agent_does_not_run_qemu_as_root_without_being_told() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: an agent that is not root runs no QEMU as root");
        return;
    }
    let (here, there) = (free_address(), free_address());
    let lyon = Host::start("lyon-1", &here);
    let paris = Host(Agent::start_configured(|folder| {
        common::host("paris-2", &there, folder).replace("run_as = \"root\"\n", "")
    }));
    lyon.trust("paris-2", &paris, &there);
    paris.trust("lyon-1", &lyon, &here);
    let description = lyon.0.folder.path().join("web-7.toml");
    std::fs::write(&description, GUEST).unwrap();
    let description = description.display().to_string();
    paris.refuse(&["guests", "start", &description], "QEMU would run as root");
    assert_eq!(
        paris.json(&["guests"])["guests"].as_array().unwrap().len(),
        0
    );
    assert!(paris.0.log().contains("run_as"), "{}", paris.0.log());

    lyon.succeed(&["guests", "start", &description]);
    let plan = lyon.longhaul(&["plan", "web-7", "--to", "paris-2"]);
    assert_eq!(plan.status.code(), Some(3));
    let plan = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(plan.contains("QEMU would run as root"), "{plan}");
    lyon.refuse(&["migrate", "web-7", "--to", "paris-2"], "run_as");
    assert_eq!(lyon.guest()["state"], "running");
}

#[test]
fn a_guest_moves_there_and_back_and_outlives_its_agents() {
    let (here, there) = (free_address(), free_address());
    let mut lyon = Host::start("lyon-1", &here);
    let mut paris = Host::start("paris-2", &there);
    lyon.trust("paris-2", &paris, &there);
    paris.trust("lyon-1", &lyon, &here);
    let description = lyon.0.folder.path().join("web-7.toml");
    std::fs::write(&description, GUEST).unwrap();

    lyon.succeed(&["guests", "start", &description.display().to_string()]);
    let started = lyon.guest();
    assert_eq!(started["state"], "running", "{started}");
    assert_eq!(started["accelerator"], "tcg");
    assert_eq!(started["memory_bytes"], 64 << 20);
    assert!(Path::new(started["channels"]["arena"].as_str().unwrap()).exists());
    lyon.refuse(&["guests", "start", "web-7"], "runs here already");

    let plan = lyon.json(&["plan", "web-7", "--to", "paris-2"]);
    assert_eq!(plan["possible"], true, "{plan}");
    let predicted = &plan["predictions"][0];
    assert!(predicted["link_bytes"]["likely"].is_u64(), "{plan}");
    assert!(plan["dirty_rate_bytes_per_s"].is_u64(), "{plan}");
    assert_eq!(
        lyon.guest()["pid"],
        started["pid"],
        "a plan leaves the guest alone"
    );

    lyon.succeed(&["migrate", "web-7", "--to", "paris-2", "--verify"]);
    assert_eq!(lyon.guest()["state"], "elsewhere");
    lyon.refuse(&["guests", "start", "web-7"], "moved to paris-2");
    lyon.refuse(&["guests", "stop", "web-7"], "moved to paris-2");
    lyon.refuse(&["migrate", "web-7", "--to", "paris-2"], "moved to paris-2");
    let moved = paris.guest();
    assert_eq!(moved["state"], "running", "{moved}");
    let report = lyon.json(&["report"]);
    assert_eq!(report["outcome"], "completed");
    assert_eq!(report["verify"]["different_blocks"], 0, "{report}");
    assert!(report["downtime_ms"].is_f64(), "{report}");
    assert!(
        report["predicted"]["link_bytes"]["likely"].is_u64(),
        "{report}"
    );
    for report in [&report, &paris.json(&["report"])] {
        let clock = &report["clock"];
        assert_eq!(clock["told_by"], "real_time_clock", "{report}");
        assert!(clock["before_ms"].is_i64(), "{report}");
    }

    lyon.crash_and_restart();
    paris.crash_and_restart();
    assert_eq!(lyon.guest()["state"], "elsewhere");
    let after = paris.guest();
    assert_eq!(
        (&after["pid"], &after["state"]),
        (&moved["pid"], &moved["state"])
    );

    paris.succeed(&["migrate", "web-7", "--to", "lyon-1"]);
    assert_eq!(lyon.guest()["state"], "running");
    assert!(lyon.guest()["generation"].as_u64() > after["generation"].as_u64());
    let migrations = lyon.json(&["migrations"]);
    assert_eq!(migrations["migrations"].as_array().unwrap().len(), 2);

    // The agent stops, and the guest does not.
    let pid = lyon.guest()["pid"].clone();
    assert_eq!(lyon.0.end(Signal::SIGTERM).code(), Some(0));
    lyon.0.restart();
    assert_eq!(lyon.guest()["pid"], pid);
    lyon.succeed(&["guests", "stop", "--force", "web-7"]);
    assert_eq!(lyon.guest()["state"], "stopped");
    lyon.succeed(&["guests", "start", "web-7"]);
    assert_eq!(lyon.guest()["state"], "running", "its description was kept");
}

/// Returns what is discovered of a process.
fn discovered(host: &Host, pid: u32) -> Value {
    let found = host.json(&["guests", "discover"]);
    let mut found = found["guests"].as_array().unwrap().iter();
    let one = found.find(|guest| guest["pid"] == pid);
    one.unwrap_or_else(|| panic!("{pid} is missing")).clone()
}

#[test]
fn every_qemu_is_discovered_and_a_control_socket_in_use_is_left_alone() {
    let here = free_address();
    let lyon = Host::start("lyon-1", &here);
    let description = lyon.0.folder.path().join("web-7.toml");
    std::fs::write(&description, GUEST).unwrap();
    lyon.succeed(&["guests", "start", &description.display().to_string()]);
    let own = lyon.guest()["pid"].as_u64().unwrap();
    let own = discovered(&lyon, u32::try_from(own).unwrap());
    assert_eq!(own["owner"], "longhaul", "{own}");
    assert_eq!(own["guest"], "web-7");
    assert_eq!(own["attachable"], Value::Null, "it was not asked");
    let paris = Host::start("paris-2", &free_address());
    let seen = discovered(&paris, u32::try_from(own["pid"].as_u64().unwrap()).unwrap());
    assert_eq!(seen["owner"], "longhaul", "{seen}");
    assert_eq!(seen["guest"], Value::Null, "another agent's");
    assert_eq!(seen["attachable"], Value::Null, "it was asked");

    let socket = lyon.0.folder.path().join("by-hand.qmp");
    let mut qemu = Command::new("qemu-system-x86_64")
        .args(["-name", "by-hand", "-M", "q35", "-m", "64", "-nodefaults"])
        .args(["-display", "none", "-S", "-accel", "tcg", "-qmp"])
        .arg(format!("unix:{},server=on,wait=off", socket.display()))
        .spawn()
        .unwrap();
    let looks = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        socket.exists()
    });
    assert!(looks);
    let mut found = discovered(&lyon, qemu.id());
    // An agent of another test may be asking it.
    let limit = Instant::now() + Duration::from_secs(60);
    while found["sockets"][0]["state"] == "busy" && Instant::now() < limit {
        found = discovered(&lyon, qemu.id());
    }
    assert_eq!(found["name"], "by-hand", "{found}");
    assert_eq!(found["owner"], "other");
    assert_eq!(found["sockets"][0]["state"], "free", "{found}");
    let obstacles = found["obstacles"].as_array().unwrap();
    assert_eq!(found["attachable"], obstacles.is_empty(), "{found}");

    let client = UnixStream::connect(&socket).unwrap();
    let busy = discovered(&lyon, qemu.id());
    assert_eq!(busy["sockets"][0]["state"], "busy", "{busy}");
    assert_eq!(busy["attachable"], Value::Null);
    drop(client);
    qemu.kill().unwrap();
    qemu.wait().unwrap();
}
