//! Tests the commands against a running agent: exit codes, stdout and stderr, word for word.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, check, configure, longhaul, spawn, wait};
use nix::sys::signal::Signal;
use serde_json::Value;

const ONES: &str =
    "1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111";
const TWOS: &str =
    "2222-2222-2222-2222-2222-2222-2222-2222-2222-2222-2222-2222-2222-2222-2222-2222";

#[test]
fn this_host_is_shown() {
    let agent = Agent::start();
    agent.check("host", &["host"]);
    let output = agent.longhaul(&["host", "show", "--json"]);
    let host: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(host["name"], "lyon-1");
    assert_eq!(host["fingerprint"].as_str().unwrap().len(), 79);
    assert_eq!(
        host["qemus"][0]["version"],
        Value::Null,
        "it does not exist"
    );
    assert_eq!(host["pid"], agent.child.id());
}

#[test]
fn hosts_are_trusted_listed_and_forgotten() {
    let agent = Agent::start();
    agent.check("trust_none", &["host", "list"]);
    agent.check(
        "trust",
        &["host", "trust", "paris-2", ONES, "192.0.2.7:7400"],
    );
    agent.check(
        "trust_may_nothing",
        &[
            "host",
            "trust",
            "oslo-1",
            TWOS,
            "192.0.2.8:7400",
            "--may",
            "nothing",
        ],
    );
    agent.check("trust_list", &["host", "list"]);
    agent.check(
        "trust_changed",
        &["host", "trust", "paris-2", TWOS, "192.0.2.7:7400"],
    );
    agent.check(
        "trust_two_names",
        &["host", "trust", "rome-1", ONES, "192.0.2.7:7400"],
    );
    let output = agent.longhaul(&["--json", "host", "list"]);
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(list["hosts"][1]["name"], "paris-2");
    assert_eq!(list["hosts"][1]["fingerprint"], ONES);
    assert_eq!(list["hosts"][1]["may"], serde_json::json!(["query"]));
    agent.check("forget", &["host", "forget", "paris-2"]);
    agent.check("forget_unknown", &["host", "forget", "paris-2"]);
    agent.check("forget_json", &["host", "forget", "paris-2", "--json"]);
}

#[test]
fn wrong_trust_is_refused_with_what_to_do() {
    let agent = Agent::start();
    agent.check(
        "trust_bad_fingerprint",
        &["host", "trust", "a", "12", "192.0.2.7:7400"],
    );
    agent.check(
        "trust_bad_name",
        &["host", "trust", "../a", ONES, "192.0.2.7:7400"],
    );
    agent.check(
        "trust_bad_address",
        &["host", "trust", "a", ONES, "192.0.2.7"],
    );
    agent.check("trust_no_address", &["host", "trust", "a", ONES]);
    let output = agent.longhaul(&["--json", "host"]);
    let host: Value = serde_json::from_slice(&output.stdout).unwrap();
    let own = host["fingerprint"].as_str().unwrap();
    agent.check("trust_own", &["host", "trust", "a", own, "192.0.2.7:7400"]);
}

#[test]
fn what_is_not_known_is_named() {
    let agent = Agent::start();
    agent.check("guests_none", &["guests"]);
    agent.check("guests_start_unknown", &["guests", "start", "web-7"]);
    agent.check(
        "guests_start_no_file",
        &["guests", "start", "/nonexistent/web-7.toml"],
    );
    agent.check("guests_stop_unknown", &["guests", "stop", "web-7"]);
    agent.check("plan_unknown_guest", &["plan", "web-7", "--to", "paris-2"]);
    agent.check(
        "migrate_unknown_guest",
        &["migrate", "web-7", "--to", "paris-2"],
    );
    agent.check("probe_unknown", &["host", "probe", "paris-2"]);
    agent.check("migrations_none", &["migrations"]);
    agent.check("report_none", &["report"]);
    agent.check("report_unknown", &["report", "7f3a"]);
    agent.check("cancel_unknown", &["cancel", "7f3a"]);
    agent.check("limit_unknown", &["limit", "7f3a", "80mbit"]);
}

#[test]
fn wrong_descriptions_are_named_with_their_line() {
    let agent = Agent::start();
    let file = agent.folder.path().join("web-7.toml");
    std::fs::write(
        &file,
        "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpus = 2\n",
    )
    .unwrap();
    let path = file.display().to_string();
    let output = agent.longhaul(&["guests", "start", &path]);
    check(
        "guests_start_bad",
        &["guests", "start", "web-7.toml"],
        &output,
        agent.folder.path(),
    );
    let good = "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                memory_mib = 128\n";
    std::fs::write(&file, good).unwrap();
    let output = agent.longhaul(&["guests", "start", &path]);
    let folder = agent.folder.path();
    check(
        "guests_start_no_qemu",
        &["guests", "start", "web-7.toml"],
        &output,
        folder,
    );
}

#[test]
fn wrong_usage_is_refused_without_an_agent() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    for (name, arguments) in [
        ("usage_rate", &["limit", "7f", "80"][..]),
        (
            "usage_time",
            &["migrate", "web-7", "--to", "paris-2", "--downtime", "soon"],
        ),
        ("usage_to", &["migrate", "web-7"]),
        ("usage_api", &["--api", "paris-2:7443", "host"]),
    ] {
        let output = longhaul(&socket, arguments);
        check(name, arguments, &output, folder.path());
    }
    for shell in ["bash", "zsh", "fish"] {
        let output = longhaul(&socket, &["completions", shell]);
        assert!(output.status.success());
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(script.contains("migrate"), "{shell}");
    }
}

#[test]
fn an_agent_that_is_not_there_is_said_to_be() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let output = longhaul(&socket, &["guests"]);
    check("no_agent", &["guests"], &output, folder.path());
    let output = longhaul(&socket, &["guests", "--json"]);
    check(
        "no_agent_json",
        &["guests", "--json"],
        &output,
        folder.path(),
    );
    // The socket of a dead agent.
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let output = longhaul(&socket, &["guests"]);
    check("dead_agent", &["guests"], &output, folder.path());
}

#[test]
fn an_agent_that_talks_nonsense_is_said_to() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("agent.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        assert!(stream.read(&mut buffer).unwrap() > 0);
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
            .unwrap();
    });
    let output = longhaul(&socket, &["guests"]);
    check("nonsense", &["guests"], &output, folder.path());
}

/// Starts an agent that answers one request with these lines, and goes away.
fn tell_once(folder: &std::path::Path, lines: String) {
    let listener = std::os::unix::net::UnixListener::bind(folder.join("agent.sock")).unwrap();
    std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let mut buffer = [0; 4096];
        assert!(stream.read(&mut buffer).unwrap() > 0);
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
        stream
            .write_all((head.to_owned() + &lines).as_bytes())
            .unwrap();
    });
}

#[test]
fn events_are_followed_until_the_agent_goes_away() {
    let event = |sequence: u64, what: Value| {
        let mut event = serde_json::json!({
            "sequence": sequence,
            "unix_ms": 1_800_000_000_000 + sequence,
        });
        let fields = what.as_object().unwrap().clone();
        event.as_object_mut().unwrap().extend(fields);
        event.to_string() + "\n"
    };
    let snapshot = event(
        7,
        serde_json::json!({ "event": "snapshot", "lagged": false }),
    );
    let current = |sequence| event(sequence, serde_json::json!({ "event": "current" }));
    let reserved = serde_json::json!({
        "event": "guest_reserved", "guest": "web-7", "by": "agent", "migration": null,
    });
    let released = serde_json::json!({ "event": "guest_released", "guest": "web-7" });
    let lines = [
        snapshot,
        current(7),
        event(8, reserved),
        event(9, released),
        current(9),
        current(9),
    ];
    for (name, arguments) in [
        ("events", &["events"][..]),
        ("events_json", &["events", "--json"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        tell_once(folder.path(), lines.concat());
        let output = longhaul(&folder.path().join("agent.sock"), arguments);
        check(name, arguments, &output, folder.path());
    }
}

#[test]
fn ctrl_c_ends_the_following_of_events() {
    use std::io::BufRead;
    let agent = Agent::start();
    let mut child = common::command(&agent.socket())
        .args(["events", "--json"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let events = lines.map(|line| {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        event["event"].as_str().unwrap().to_owned()
    });
    let state: Vec<_> = events.take(2).collect();
    assert_eq!(state, ["snapshot", "current"]);
    let pid = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
    nix::sys::signal::kill(pid, Signal::SIGINT).unwrap();
    assert_eq!(wait(&mut child).code(), Some(130));
}

#[test]
fn an_agent_stops_when_told_and_starts_after_a_crash_as_the_same() {
    let mut agent = Agent::start();
    let fingerprint = |agent: &Agent| {
        let output = agent.longhaul(&["--json", "host"]);
        let host: Value = serde_json::from_slice(&output.stdout).unwrap();
        host["fingerprint"].as_str().unwrap().to_owned()
    };
    let before = fingerprint(&agent);
    agent.longhaul(&["host", "trust", "paris-2", ONES, "192.0.2.7:7400"]);
    agent.end(Signal::SIGKILL);
    assert!(agent.socket().exists(), "as a crash leaves it");
    agent.restart();
    assert_eq!(fingerprint(&agent), before);
    let hosts = agent.longhaul(&["host", "list"]);
    assert!(String::from_utf8_lossy(&hosts.stdout).contains("paris-2"));
    let status = agent.end(Signal::SIGTERM);
    assert_eq!(status.code(), Some(0), "{}", agent.log());
    assert!(!agent.socket().exists());
}

#[test]
fn an_agent_that_cannot_start_says_why() {
    let agent = Agent::start();
    let folder = agent.folder.path();
    let config = folder.join("agent.toml").display().to_string();
    let second = longhaul(&folder.join("other.sock"), &["agent", "--config", &config]);
    check(
        "agent_twice",
        &["agent", "--config", "agent.toml"],
        &second,
        folder,
    );

    let folder = tempfile::tempdir().unwrap();
    let start = |name: &str, more: &str| {
        configure(folder.path(), more);
        let config = folder.path().join("agent.toml").display().to_string();
        let output = longhaul(
            &folder.path().join("no.sock"),
            &["agent", "--config", &config],
        );
        check(
            name,
            &["agent", "--config", "agent.toml"],
            &output,
            folder.path(),
        );
    };
    start("agent_unknown_key", "listne = \"127.0.0.1:0\"");
    start(
        "agent_bad_network",
        "networks = { office = { bridge = \"not a bridge\" } }",
    );
    let output = longhaul(
        &folder.path().join("no.sock"),
        &["agent", "--config", "/nonexistent"],
    );
    check(
        "agent_no_config",
        &["agent", "--config", "/nonexistent"],
        &output,
        folder.path(),
    );

    configure(folder.path(), "");
    let socket = folder.path().join("agent.sock");
    std::fs::write(&socket, "precious").unwrap();
    let mut child = spawn(folder.path());
    assert_eq!(wait(&mut child).code(), Some(1));
    assert_eq!(std::fs::read(&socket).unwrap(), b"precious");
}
