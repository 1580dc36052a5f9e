//! Tests realms with real processes: the operator's commands, rendezvous servers, agents.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, LIMIT, check, free_address, longhaul};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

/// An operator's folder.
struct Operator {
    folder: tempfile::TempDir,
}

impl Operator {
    /// Makes a realm. Returns its id too.
    fn create() -> (Self, String) {
        let folder = tempfile::tempdir().unwrap();
        let operator = Self { folder };
        let made = operator.json(&["realm", "create", "acme"]);
        let id = made["id"].as_str().unwrap().to_owned();
        (operator, id)
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let path = self.folder.path().join("realm");
        let nobody = self.folder.path().join("no-agent.sock");
        let arguments = [arguments, &["--folder", path.to_str().unwrap()]].concat();
        longhaul(&nobody, &arguments)
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.run(&[&["--json"], arguments].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {errors}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn invite(&self, name: &str) -> String {
        let invited = self.json(&["host", "invite", name, "--site", "lab"]);
        invited["token"].as_str().unwrap().to_owned()
    }

    fn add(&self, server: &Server) {
        let tcp = format!("tcp/{}", server.tcp);
        self.json(&[
            "realm",
            "add-server",
            &server.fingerprint,
            &server.udp,
            &tcp,
        ]);
    }
}

/// A rendezvous server.
struct Server {
    folder: tempfile::TempDir,
    child: Child,
    realm: String,
    fingerprint: String,
    udp: String,
    tcp: String,
}

fn spawn_server(folder: &Path, realm: &str, udp: &str, tcp: &str) -> Child {
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"))
        .unwrap();
    Command::new(env!("CARGO_BIN_EXE_longhaul"))
        .args([
            "rendezvous",
            "--listen",
            udp,
            "--listen-tcp",
            tcp,
            "--realm",
            realm,
            "--state",
        ])
        .arg(folder.join("state"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Server {
    fn start(realm: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (udp, tcp) = (free_address(), free_address());
        let child = spawn_server(folder.path(), realm, &udp, &tcp);
        let mut server = Self {
            folder,
            child,
            realm: realm.to_owned(),
            fingerprint: String::new(),
            udp,
            tcp,
        };
        server.wait_until_ready(1);
        let log = server.log();
        let (_, rest) = log.split_once("fingerprint=").unwrap();
        server.fingerprint = rest.split_whitespace().next().unwrap().to_owned();
        server
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Returns the version of the ruleset with which it started last.
    fn version_at_start(&self) -> u64 {
        let log = self.log();
        let line = log
            .lines()
            .rfind(|line| line.contains("serves a realm"))
            .unwrap();
        let (_, version) = line.split_once("version=").unwrap();
        version.split_whitespace().next().unwrap().parse().unwrap()
    }

    fn starts(&self) -> usize {
        self.log().matches(" is ready").count()
    }

    fn wait_until_ready(&mut self, starts: usize) {
        let deadline = Instant::now() + LIMIT;
        while self.starts() < starts {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the server ended ({status}): {}", self.log());
            }
            assert!(Instant::now() < deadline, "no server: {}", self.log());
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Ends it at once, as a loss of power does to a process.
    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        let starts = self.starts();
        self.child = spawn_server(self.folder.path(), &self.realm, &self.udp, &self.tcp);
        self.wait_until_ready(starts + 1);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn realm_of(agent: &Agent) -> Value {
    agent.json(&["host", "realm"])["realm"].clone()
}

/// Waits until an agent sees its realm so.
fn until(agent: &Agent, what: &str, is: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + LIMIT;
    loop {
        let realm = realm_of(agent);
        if is(&realm) {
            return realm;
        }
        assert!(
            Instant::now() < deadline,
            "{what}: {realm:#}\n{}",
            agent.log()
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn registered(realm: &Value) -> bool {
    let servers = realm["servers"].as_array();
    servers.is_some_and(|servers| {
        !servers.is_empty() && servers.iter().all(|server| server["registered"] == true)
    })
}

#[test]
fn a_host_joins_with_one_line_is_listed_and_removed() {
    let (operator, id) = Operator::create();
    let server = Server::start(&id);
    operator.add(&server);
    operator.json(&["network", "create", "blue"]);
    let published = operator.json(&["realm", "publish"]);
    assert_eq!(
        (&published["version"], &published["joined"]),
        (&1.into(), &Value::Array(vec![]))
    );

    let token = operator.invite("paris-1");
    let (paris, oslo) = (Agent::start(), Agent::start());
    let joined = paris.json(&["host", "join", &token]);
    assert_eq!(joined["realm"]["name"], "paris-1");
    assert_eq!(joined["realm"]["standing"], "pending");
    assert_eq!(joined["realm"]["id"].as_str(), Some(&id[..]));
    // Once: another host gets nothing, and stays as it was.
    let refused = oslo.longhaul(&["host", "join", &token]);
    let errors = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{errors}");
    assert!(errors.contains("another host used this token"), "{errors}");
    assert_eq!(realm_of(&oslo), Value::Null);
    let again = paris.longhaul(&["host", "join", &operator.invite("paris-2")]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("longhaul host leave"));

    oslo.json(&["host", "join", &operator.invite("oslo-1")]);
    let published = operator.json(&["realm", "publish"]);
    assert_eq!(
        published["joined"],
        serde_json::json!(["oslo-1", "paris-1"])
    );
    operator.json(&["network", "add", "blue", "paris-1", "oslo-1"]);
    assert_eq!(operator.json(&["realm", "publish"])["version"], 3);
    let is_listed = |realm: &Value| realm["version"] == 3 && realm["standing"] == "member";
    let realm = until(&paris, "listed", is_listed);
    assert_eq!(realm["networks"][0]["members"].as_array().unwrap().len(), 2);
    until(&oslo, "listed", is_listed);
    // Nothing has changed: no new version.
    assert_eq!(operator.json(&["realm", "publish"])["version"], 3);

    operator.json(&["host", "remove", "oslo-1"]);
    operator.json(&["realm", "publish"]);
    let realm = until(&paris, "one member", |realm| realm["version"] == 4);
    assert_eq!(realm["members"].as_array().unwrap().len(), 1);
    until(&oslo, "refused", |realm| !registered(realm));
    // It gives the server its own ruleset once before it believes that.
    let is_said = |realm: &Value| realm["notices"].to_string().contains("removed");
    until(&oslo, "says why", is_said);
    oslo.json(&["host", "leave"]);
    assert_eq!(realm_of(&oslo), Value::Null);
}

#[test]
fn an_agent_takes_part_again_after_a_restart_and_goes_on_without_servers() {
    let (operator, id) = Operator::create();
    let mut servers = [Server::start(&id), Server::start(&id)];
    servers.iter().for_each(|server| operator.add(server));
    operator.json(&["realm", "publish"]);
    let mut paris = Agent::start();
    paris.json(&["host", "join", &operator.invite("paris-1")]);
    until(&paris, "registered at both", registered);

    // One of two servers is killed: the other goes on, also with new versions.
    servers[0].kill();
    until(&paris, "one server", |realm| !registered(realm));
    let published = operator.json(&["realm", "publish"]);
    assert_eq!(published["joined"], serde_json::json!(["paris-1"]));
    let errors: Vec<&Value> = published["servers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|server| &server["error"])
        .collect();
    assert_eq!(
        errors.iter().filter(|error| error.is_null()).count(),
        1,
        "{errors:?}"
    );
    until(&paris, "version 2", |realm| realm["version"] == 2);
    servers[0].restart();
    let at_both = |realm: &Value| {
        registered(realm)
            && realm["servers"]
                .as_array()
                .unwrap()
                .iter()
                .all(|one| one["version"] == 2)
    };
    until(&paris, "version 2 at both servers", at_both);

    // None is left, and the agent restarts: it is a member by what it has.
    servers.iter_mut().for_each(Server::kill);
    paris.end(nix::sys::signal::Signal::SIGTERM);
    paris.restart();
    let realm = until(&paris, "a member", |realm| realm["standing"] == "member");
    assert!(!registered(&realm));
    let not_reached = |realm: &Value| {
        let servers = realm["servers"].as_array().unwrap();
        servers.iter().all(|server| server["error"].is_string())
    };
    until(&paris, "says that no server is reached", not_reached);
    servers.iter_mut().for_each(Server::restart);
    until(&paris, "registered at both", registered);
}

#[test]
fn what_a_killed_server_acknowledged_is_there_and_a_backup_is_whole() {
    let (operator, id) = Operator::create();
    let mut server = Server::start(&id);
    operator.add(&server);
    operator.json(&["realm", "publish"]);
    for round in 0..6 {
        // A version that a server has acknowledged survives its end, whenever that comes.
        operator.json(&["network", "create", &format!("net-{round}")]);
        let mut publishing = Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["realm", "publish", "--json", "--folder"])
            .arg(operator.folder.path().join("realm"))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        if round % 2 == 0 {
            // In the middle of it.
            std::thread::sleep(std::time::Duration::from_millis(40 * round)); // at any time
            server.kill();
            publishing.kill().unwrap();
            publishing.wait().unwrap();
            server.restart();
        } else {
            let done = publishing.wait_with_output().unwrap();
            let done: Value = serde_json::from_slice(&done.stdout).unwrap();
            assert_eq!(done["servers"][0]["error"], Value::Null);
            server.kill();
            server.restart();
            assert_eq!(done["version"], server.version_at_start());
        }
    }
    let state = server.folder.path().join("state");
    let copy = server.folder.path().join("copy.db");
    let backup = |to: &Path| {
        Command::new(env!("CARGO_BIN_EXE_longhaul"))
            .args(["rendezvous", "backup", "--state"])
            .args([&state, to])
            .output()
            .unwrap()
    };
    let output = backup(&copy);
    assert!(output.status.success(), "{output:?}");
    let again = backup(&copy);
    assert!(String::from_utf8_lossy(&again.stderr).contains("name another file"));
    // Restored, it serves with the same key and another store.
    server.kill();
    let store = state.join("rendezvous.db");
    for companion in ["-wal", "-shm"] {
        let _ = std::fs::remove_file(state.join(format!("rendezvous.db{companion}")));
    }
    std::fs::rename(&copy, &store).unwrap();
    server.restart();
    assert!(
        server.log().contains("restored from a backup"),
        "{}",
        server.log()
    );
    assert_eq!(
        operator.json(&["realm", "publish"])["servers"][0]["error"],
        Value::Null
    );
    // Damaged, it is refused with what to do, and left alone.
    server.kill();
    let _ = std::fs::remove_file(state.join("rendezvous.db-wal"));
    let mut bytes = std::fs::read(&store).unwrap();
    bytes
        .iter_mut()
        .skip(4096)
        .take(8192)
        .for_each(|byte| *byte ^= 0x55);
    std::fs::write(&store, &bytes).unwrap();
    let mut broken = spawn_server(server.folder.path(), &id, &server.udp, &server.tcp);
    assert!(!common::wait(&mut broken).success());
    assert!(
        server.log().contains("restore a backup"),
        "{}",
        server.log()
    );
    assert_eq!(std::fs::read(&store).unwrap(), bytes);
}

#[test]
fn two_servers_do_not_share_a_folder_and_need_a_realm() {
    let (_, id) = Operator::create();
    let server = Server::start(&id);
    let (udp, tcp) = (free_address(), free_address());
    let mut second = spawn_server(server.folder.path(), &id, &udp, &tcp);
    assert!(!common::wait(&mut second).success());
    assert!(
        server.log().contains("another rendezvous server uses"),
        "{}",
        server.log()
    );
    let output = Command::new(env!("CARGO_BIN_EXE_longhaul"))
        .args(["rendezvous", "--listen", &udp])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--realm ID"));
}

#[test]
fn the_operators_commands_say_what_they_did() {
    let folder = tempfile::tempdir().unwrap();
    let realm = folder.path().join("realm");
    let nobody = folder.path().join("agent.sock");
    let mut id = String::new();
    let mut run = |name: &str, arguments: &[&str]| {
        let with = [arguments, &["--folder", realm.to_str().unwrap()]].concat();
        let mut output = longhaul(&nobody, &with);
        let text = String::from_utf8(output.stdout).unwrap();
        if let Some((_, rest)) = text.split_once("  id ") {
            id = rest.split_whitespace().next().unwrap().to_owned();
        }
        let text = match id.is_empty() {
            true => text,
            false => text.replace(&id, "[REALM]"),
        };
        let hidden = |word: &str| match word.starts_with("lhjoin1") {
            true => "[TOKEN]".to_owned(),
            false => word.to_owned(),
        };
        let line = |line: &str| {
            let words: Vec<String> = line.split(' ').map(hidden).collect();
            words.join(" ") + "\n"
        };
        output.stdout = text.lines().map(line).collect::<String>().into_bytes();
        check(name, arguments, &output, folder.path());
    };
    let ones = "1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111-1111";
    run("realm_none", &["realm", "show"]);
    run("realm_create", &["realm", "create", "acme"]);
    run("realm_create_again", &["realm", "create", "acme"]);
    run("realm_publish_no_server", &["realm", "publish"]);
    run("invite_no_server", &["host", "invite", "paris-1"]);
    run(
        "realm_add_server",
        &["realm", "add-server", ones, "rendezvous.example:7401"],
    );
    run(
        "realm_add_server_bad",
        &["realm", "add-server", ones, "rendezvous.example"],
    );
    run("network_none", &["network", "list"]);
    run(
        "network_create",
        &["network", "create", "blue", "--vlans", "10-19"],
    );
    run(
        "network_create_bad",
        &["network", "create", "red", "--vlans", "20-10"],
    );
    run(
        "network_add_unknown",
        &["network", "add", "blue", "paris-1"],
    );
    let mut gateway = |name: &str, words: &[&str]| {
        run(name, &[&["network", "gateway", "blue"], words].concat());
    };
    gateway("network_gateway_none_yet", &["--none"]);
    gateway("network_gateway_no_address", &[]);
    gateway("network_gateway_bad", &["--address", "10.0.0.0/24"]);
    gateway("network_gateway_ipv6", &["--address", "fd00::1/64"]);
    gateway(
        "network_gateway_site",
        &["--address", "10.0.0.1/24", "--site", "atlantis"],
    );
    gateway("network_gateway", &["--address", "10.0.0.1/24"]);
    run("network_list", &["network"]);
    run(
        "invite",
        &["host", "invite", "paris-1", "--network", "blue"],
    );
    run("invite_bad_name", &["host", "invite", "no name"]);
    run(
        "invite_too_long",
        &["host", "invite", "oslo-1", "--expires", "1000h"],
    );
    run("host_remove_unknown", &["host", "remove", "paris-1"]);
    run("realm_sign", &["realm", "sign"]);
    run("realm_show", &["realm", "show"]);
}

#[test]
fn an_agent_without_a_realm_says_how_to_join_one() {
    let agent = Agent::start();
    agent.check("host_realm_none", &["host", "realm"]);
    agent.check("host_join_no_token", &["host", "join", "abc"]);
    agent.check("host_join_damaged", &["host", "join", "lhjoin1abcdefgh"]);
    agent.check("host_leave_none", &["host", "leave"]);
}
