//! Tests real moves that two real agents leave in doubt, because one of them was killed during the
//! handover: the display, the refusals, and how an operator ends the doubt on either side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, LIMIT, command, free_address};
use longhaul_storage::{file_name, read_journal};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

const GUEST: &str = "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                     memory_mib = 64\n";

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

    fn fail(&self, arguments: &[&str], code: i32, expected: &str) {
        let output = self.longhaul(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert!(errors.contains(expected), "{arguments:?}: {errors}");
    }

    fn guest_state(&self) -> String {
        let state = self.json(&["guests"])["guests"][0]["state"].clone();
        state.as_str().unwrap_or("unknown").to_owned()
    }

    /// Returns whether the guest is in no move any more.
    fn is_free(&self) -> bool {
        self.json(&["guests"])["guests"][0]["migration"].is_null()
    }

    fn doubt(&self) -> Value {
        self.json(&["migrations"])["migrations"][0]["doubt"].clone()
    }

    fn wait_for(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let until = Instant::now() + LIMIT;
        while !holds(self) {
            assert!(Instant::now() < until, "{what}: {}", self.0.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn trust(&self, name: &str, other: &Self, address: &str) {
        let fingerprint = other.json(&["host"])["fingerprint"].clone();
        let fingerprint = fingerprint.as_str().unwrap();
        let trust = ["host", "trust", name, fingerprint, address];
        self.succeed(&[&trust[..], &["--may", "query,send"]].concat());
    }

    fn kill_and_restart(&mut self, points: &str) {
        self.0.end(Signal::SIGKILL);
        self.0.restart_failing_at(points);
    }

    /// Waits until the agent has died at its fail point.
    fn wait_for_death(&mut self) {
        assert!(!common::wait(&mut self.0.child).success());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.0.child.try_wait().is_ok_and(|status| status.is_some()) {
            self.0.restart();
        }
        // A test ends a copy in doubt itself.
        self.longhaul(&["resolve", "web-7", "--run-on", "source", "--yes"]);
        self.longhaul(&["guests", "stop", "--force", "web-7"]);
    }
}

/// Returns a guest on lyon-1, and two agents of which one fails at these points of the first move.
fn two(lyon_fails_at: &str, paris_fails_at: &str) -> (Host, Host) {
    let (here, there) = (free_address(), free_address());
    let mut lyon = Host::start("lyon-1", &here);
    let mut paris = Host::start("paris-2", &there);
    lyon.trust("paris-2", &paris, &there);
    paris.trust("lyon-1", &lyon, &here);
    let description = lyon.0.folder.path().join("web-7.toml");
    std::fs::write(&description, GUEST).unwrap();
    lyon.succeed(&["guests", "start", &description.display().to_string()]);
    match lyon_fails_at {
        "" => paris.kill_and_restart(paris_fails_at),
        points => lyon.kill_and_restart(points),
    }
    (lyon, paris)
}

/// Moves the guest, until one agent dies.
fn migrate(lyon: &Host) {
    let child = command(&lyon.0.socket())
        .args(["migrate", "web-7", "--to", "paris-2", "--patience", "100ms"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{errors}");
}

/// After a restart another part of the agent handles the doubt.
fn the_source_ends_it(restart: bool) {
    let (mut lyon, mut paris) = two("", "destination:before-record:committed=kill");
    migrate(&lyon);
    paris.wait_for_death();
    if restart {
        lyon.kill_and_restart("");
    }
    lyon.wait_for("in doubt", |lyon| !lyon.doubt().is_null());
    assert_eq!(lyon.guest_state(), "in_doubt");
    let doubt = lyon.doubt();
    assert_eq!(doubt["record"], "released", "{doubt}");
    lyon.wait_for("asked", |lyon| lyon.doubt()["reachable"] == false);
    let shown = lyon.succeed(&["migrations"]);
    for text in [
        "in doubt",
        "lyon-1 wrote RELEASED (generation 2)",
        "it does not answer",
        "--run-on source --other-side dead|fenced",
        "on paris-2: longhaul resolve",
    ] {
        assert!(shown.contains(text), "no {text:?} in {shown}");
    }
    lyon.fail(&["guests", "start", "web-7"], 4, "handed to paris-2");

    let resolve = ["resolve", "web-7", "--run-on"];
    let with = |more: &[&'static str]| [&resolve[..], more].concat();
    lyon.fail(&with(&["source", "--yes"]), 2, "--other-side dead");
    lyon.fail(
        &with(&["destination", "--other-side", "dead", "--yes"]),
        3,
        "on paris-2: longhaul resolve",
    );
    lyon.fail(&with(&["source", "--other-side", "dead"]), 2, "add --yes");
    assert_eq!(lyon.guest_state(), "in_doubt");
    let output = lyon.longhaul(&with(&[
        "source",
        "--other-side",
        "dead",
        "--because",
        "it burnt down",
        "--yes",
    ]));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{told}\n{}", lyon.0.log());
    assert!(told.contains("at stake"), "{told}");
    let done = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(done.contains("web-7 runs on lyon-1"), "{done}");
    lyon.wait_for("running", |lyon| lyon.guest_state() == "running");
    lyon.fail(
        &with(&["source", "--other-side", "dead", "--yes"]),
        3,
        "nothing is in doubt",
    );

    // The restarted agents learn of it.
    paris.0.restart();
    paris.wait_for("given up", |paris| {
        !["running", "moving_in", "in_doubt"].contains(&paris.guest_state().as_str())
    });
    assert_eq!(lyon.guest_state(), "running");
    paris.wait_for("free", Host::is_free);
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    assert_eq!(paris.guest_state(), "running");
}

#[test]
fn the_source_goes_on_by_a_persons_word() {
    the_source_ends_it(false);
}

#[test]
fn the_source_goes_on_by_a_persons_word_after_a_restart() {
    the_source_ends_it(true);
}

fn the_destination_ends_it(restart: bool) {
    let (mut lyon, mut paris) = two("source:after-record:released=kill", "");
    migrate(&lyon);
    lyon.wait_for_death();
    if restart {
        paris.kill_and_restart("");
    }
    paris.wait_for("in doubt", |paris| !paris.doubt().is_null());
    let doubt = paris.doubt();
    assert_eq!(doubt["record"], "ready", "{doubt}");
    assert_ne!(paris.guest_state(), "running");
    let resolve = ["resolve", "web-7", "--run-on", "destination", "--yes"];
    paris.fail(&resolve, 2, "--other-side dead");
    paris.succeed(&[&resolve[..], &["--other-side", "fenced"]].concat());
    paris.wait_for("running", |paris| paris.guest_state() == "running");

    lyon.0.restart();
    lyon.wait_for("given away", |lyon| {
        lyon.guest_state() == "elsewhere" && lyon.is_free()
    });
    assert_eq!(paris.guest_state(), "running");
    paris.succeed(&["migrate", "web-7", "--to", "lyon-1"]);
    assert_eq!(lyon.guest_state(), "running");
}

#[test]
fn the_destination_goes_on_by_a_persons_word() {
    the_destination_ends_it(false);
}

#[test]
fn the_destination_goes_on_by_a_persons_word_after_a_restart() {
    the_destination_ends_it(true);
}

#[test]
fn the_destination_may_always_give_up() {
    let (mut lyon, mut paris) = two("source:after-record:released=kill", "");
    migrate(&lyon);
    lyon.wait_for_death();
    paris.kill_and_restart("");
    paris.wait_for("in doubt", |paris| !paris.doubt().is_null());
    paris.succeed(&["resolve", "web-7", "--run-on", "source", "--yes"]);
    paris.wait_for("gone", |paris| paris.guest_state() == "unknown");
    lyon.0.restart();
    lyon.wait_for("back", |lyon| lyon.guest_state() == "running");
}

/// The destination has committed, and died before it could say so. What answers in its place must
/// not
/// be believed when it says that it does not know the attempt: the guest runs there.
fn committed_and_dead() -> (Host, Host) {
    let (lyon, mut paris) = two("", "destination:after-record:committed=kill");
    migrate(&lyon);
    paris.wait_for_death();
    lyon.wait_for("in doubt", |lyon| lyon.guest_state() == "in_doubt");
    (lyon, paris)
}

impl Host {
    /// Waits until the other host was asked, and did not answer for this reason.
    fn wait_for_silence(&self, because: &str) {
        self.wait_for(because, |host| {
            let doubt = host.doubt();
            let why = doubt["unreachable_because"].as_str().unwrap_or_default();
            why.contains(because)
        });
        assert_eq!(self.guest_state(), "in_doubt", "{}", self.0.log());
    }
}

#[test]
fn a_destination_without_its_journals_is_not_believed() {
    for restart in [false, true] {
        let (mut lyon, mut paris) = committed_and_dead();
        let (journals, aside) = (
            paris.0.folder.path().join("s/journal"),
            paris.0.folder.path().join("s/aside"),
        );
        std::fs::rename(&journals, &aside).unwrap();
        paris.0.restart();
        if restart {
            lyon.kill_and_restart("");
        }
        lyon.wait_for_silence("its journals are not those");

        // Its journals again, it tells where the guest is.
        paris.0.end(Signal::SIGTERM);
        std::fs::remove_dir_all(&journals).unwrap();
        std::fs::rename(&aside, &journals).unwrap();
        paris.0.restart();
        lyon.wait_for("elsewhere", |lyon| lyon.guest_state() == "elsewhere");
        assert_eq!(paris.guest_state(), "running");
        lyon.wait_for("free", Host::is_free);
        // A host that no guest needs may go.
        lyon.succeed(&["host", "forget", "paris-2"]);
    }
}

#[test]
fn another_host_of_the_same_name_is_not_believed() {
    let (mut lyon, mut paris) = committed_and_dead();
    let address = free_address();
    let other = Host::start("paris-2", &address);
    let id = |host: &Host| {
        host.json(&["host"])["fingerprint"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let (here, now) = (id(&lyon), id(&other));
    other.succeed(&["host", "trust", "lyon-1", &here, "127.0.0.1:1"]);
    let replace = ["host", "trust", "paris-2", &now, &address, "--replace"];
    lyon.fail(&replace, 3, "still needs paris-2");
    lyon.fail(&["host", "forget", "paris-2"], 3, "still needs paris-2");

    // Written into the file by hand.
    let trust = lyon.0.folder.path().join("s/trust.toml");
    let text = std::fs::read_to_string(&trust).unwrap();
    let known = text
        .lines()
        .find(|line| line.contains('-') && line.contains("fingerprint"));
    let known = known.unwrap().split('"').nth(1).unwrap().to_owned();
    lyon.0.end(Signal::SIGTERM);
    std::fs::write(&trust, text.replace(&known, &now)).unwrap();
    lyon.0.restart();
    lyon.wait_for_silence("is not trusted here");

    lyon.0.end(Signal::SIGTERM);
    std::fs::write(&trust, text).unwrap();
    lyon.0.restart();
    paris.0.restart();
    lyon.wait_for("elsewhere", |lyon| lyon.guest_state() == "elsewhere");
    assert_eq!(paris.guest_state(), "running");
}

/// QEMU does not answer when the guest is to go on at the source: that is tried until it does.
#[test]
fn a_guest_whose_qemu_is_silent_goes_on_when_it_answers_again() {
    let folder = tempfile::tempdir().unwrap();
    let held = folder.path().join("held");
    let points = format!(
        "source:after-receipt:ready=hold:{},source:before-record:released=fail",
        held.display()
    );
    let (lyon, paris) = two(&points, "");
    let pid = lyon.json(&["guests"])["guests"][0]["pid"].as_i64().unwrap();
    let qemu = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| migrate(&lyon));
        lyon.wait_for("held", |_| held.exists());
        nix::sys::signal::kill(qemu, Signal::SIGSTOP).unwrap();
        std::fs::remove_file(&held).unwrap();
        lyon.wait_for("not resumed", |lyon| {
            lyon.0.log().contains("could not be resumed")
        });
        moving.join().unwrap();
    });
    // Nothing else may begin with a guest that is in the middle of this.
    lyon.fail(
        &["migrate", "web-7", "--to", "paris-2"],
        3,
        "is moving already",
    );
    nix::sys::signal::kill(qemu, Signal::SIGCONT).unwrap();
    lyon.wait_for("running", |lyon| {
        lyon.guest_state() == "running" && lyon.is_free()
    });
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    assert_eq!(paris.guest_state(), "running");
}

/// Returns the only journal of a host, and its migration.
fn journal(host: &Host) -> (PathBuf, String) {
    let folder = host.0.folder.path().join("s/journal");
    let ids = longhaul_storage::list_journals(&folder).unwrap();
    assert_eq!(ids.len(), 1);
    (folder.join(file_name(ids[0])), ids[0].to_string())
}

#[test]
fn a_damaged_journal_holds_its_guest_and_no_other() {
    let (lyon, mut paris) = two("", "destination:after-record:committed=kill");
    migrate(&lyon);
    paris.wait_for_death();
    let (path, id) = journal(&paris);
    let ready = read_journal(&path).unwrap().entries[1].offset as usize;
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[ready + 20] ^= 1;
    std::fs::write(&path, &bytes).unwrap();

    paris.0.restart();
    paris.fail(&["guests", "stop", "--force", "web-7"], 4, "web-7 is held");
    assert_eq!(paris.guest_state(), "in_doubt");
    let other = paris.0.folder.path().join("db-1.toml");
    std::fs::write(&other, GUEST.replace("web-7", "db-1")).unwrap();
    paris.succeed(&["guests", "start", &other.display().to_string()]);
    paris.succeed(&["guests", "stop", "--force", "db-1"]);
    let says = |what: &'static str| {
        move |lyon: &Host| {
            let why = lyon.doubt()["unreachable_because"].clone();
            why.as_str().is_some_and(|why| why.contains(what))
        }
    };
    lyon.wait_for("an answer that decides nothing", says("cannot be used"));

    let state = paris.0.folder.path().join("s").display().to_string();
    let set_aside = ["journal", "set-aside", &id, "--state", &state];
    paris.fail(&set_aside, 1, "no agent may run");
    paris.0.end(Signal::SIGTERM);
    let belongs = ["--belongs", "here", "--because", "a test"];
    paris.succeed(&[&set_aside[..], &belongs].concat());
    assert!(!path.exists());
    assert_eq!(
        std::fs::read(path.with_extension("damaged")).unwrap(),
        bytes
    );
    assert!(path.with_extension("tombstone").exists());

    // The guest is free here, and the attempt is not taken for an unknown one.
    paris.0.restart();
    lyon.wait_for("another answer that decides nothing", says("set aside"));
    assert_eq!(lyon.guest_state(), "in_doubt");
    assert!(!path.exists(), "nothing is recorded of it any more");
    paris.succeed(&["guests", "stop", "--force", "web-7"]);
    let resolve = ["resolve", "web-7", "--run-on", "source", "--yes"];
    lyon.succeed(&[&resolve[..], &["--other-side", "fenced"]].concat());
    assert_eq!(lyon.guest_state(), "running");
}

#[test]
fn a_journal_that_does_not_name_its_guest_holds_all_until_it_is_set_aside() {
    let (mut lyon, mut paris) = two("", "destination:before-record:committed=kill");
    migrate(&lyon);
    paris.wait_for_death();
    let (path, id) = journal(&paris);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&path, &bytes).unwrap();

    paris.0.restart();
    let other = paris.0.folder.path().join("db-1.toml");
    std::fs::write(&other, GUEST.replace("web-7", "db-1")).unwrap();
    let start = ["guests", "start", &other.display().to_string()];
    paris.fail(&start, 4, "does not say whose it is");
    paris.0.end(Signal::SIGTERM);
    let state = paris.0.folder.path().join("s").display().to_string();
    let set_aside = ["journal", "set-aside", &id, "--state", &state];
    let there = ["--guest", "web-7", "--belongs", "there"];
    paris.fail(&[&set_aside[..], &there].concat(), 2, "--other-host");
    let there = [&there[..], &["--other-host", "lyon-1"]].concat();
    paris.succeed(&[&set_aside[..], &there].concat());
    paris.0.restart();
    paris.succeed(&start);
    paris.succeed(&["guests", "stop", "--force", "db-1"]);

    // The source's journal is sound, and is given up too.
    let (_, id) = journal(&lyon);
    let state = lyon.0.folder.path().join("s").display().to_string();
    let set_aside = ["journal", "set-aside", &id, "--state", &state];
    lyon.0.end(Signal::SIGTERM);
    lyon.fail(
        &[&set_aside[..], &["--belongs", "here"]].concat(),
        2,
        "is sound",
    );
    let here = ["--although-sound", "--belongs", "here"];
    lyon.succeed(&[&set_aside[..], &here].concat());
    lyon.0.restart();
    lyon.succeed(&["guests", "stop", "--force", "web-7"]);
    // The copy that waited there is nobody's.
    let guests = paris.json(&["guests"])["guests"].clone();
    let mut guests = guests.as_array().unwrap().iter();
    let copy = guests.find(|guest| guest["name"] == "web-7").unwrap();
    let pid = nix::unistd::Pid::from_raw(copy["pid"].as_i64().unwrap() as i32);
    nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
}
