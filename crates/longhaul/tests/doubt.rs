//! Tests real moves that two real agents leave in doubt, because one of them was killed during the
//! handover: the display, the refusals, and how an operator ends the doubt on either side.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Agent, LIMIT, command, free_address};
use longhaul_engine::handover::{Record, Side};
use longhaul_protocol::{Attempt, Generation, HostId, MigrationId};
use longhaul_storage::{Journal, Journals, file_name, read_journal};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const GUEST: &str = "name = \"web-7\"\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                     memory_mib = 64\n";

const DISK_BYTES: usize = 8 << 20;

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
            let image = folder.join("data.raw");
            let images = format!("[images.data]\npath = {image:?}\nformat = \"raw\"\n");
            common::host(name, address, folder) + &images
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

    fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(i32::try_from(self.0.child.id()).unwrap())
    }

    /// Ends the guests that the agent does not end, since a journal holds them.
    fn end_qemus(&self) {
        let folder = self.0.folder.path().to_string_lossy().into_owned();
        for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let line = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line);
            let pid = process.file_name().to_string_lossy().parse();
            if let Ok(pid) = pid
                && line.contains("qemu-system")
                && line.contains(&folder)
            {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
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
        self.end_qemus();
    }
}

/// Returns a guest on lyon-1, and two agents of which one fails at these points of the first move.
fn two(lyon_fails_at: &str, paris_fails_at: &str) -> (Host, Host) {
    two_with(GUEST, lyon_fails_at, paris_fails_at)
}

fn two_with(guest: &str, lyon_fails_at: &str, paris_fails_at: &str) -> (Host, Host) {
    let (here, there) = (free_address(), free_address());
    let mut lyon = Host::start("lyon-1", &here);
    let mut paris = Host::start("paris-2", &there);
    lyon.trust("paris-2", &paris, &there);
    paris.trust("lyon-1", &lyon, &here);
    let description = lyon.0.folder.path().join("web-7.toml");
    std::fs::write(lyon.0.folder.path().join("data.raw"), vec![7; DISK_BYTES]).unwrap();
    std::fs::write(&description, guest).unwrap();
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

/// Sends a command to the guest's QEMU, as its owner does.
fn qmp(host: &Host, command: &str) {
    let socket = host.0.folder.path().join("s/guests/web-7/run/qmp");
    let mut stream = UnixStream::connect(socket).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap()).lines();
    for command in ["qmp_capabilities", command] {
        writeln!(stream, "{{\"execute\": \"{command}\"}}").unwrap();
        let answered = answers.find(|line| line.as_ref().unwrap().contains("\"return\""));
        answered.unwrap().unwrap();
    }
}

/// The owner pauses the guest while its agent is down. The next agent gives the move up, and must
/// not take that for a stop of its own.
#[test]
fn a_guest_that_its_owner_has_paused_stays_paused() {
    let (mut lyon, _paris) = two("source:after-record:began=kill", "");
    migrate(&lyon);
    lyon.wait_for_death();
    qmp(&lyon, "stop");
    lyon.0.restart();
    lyon.wait_for("free", Host::is_free);
    assert_eq!(lyon.guest_state(), "paused", "{}", lyon.0.log());
}

/// The notes of what is missing of a guest's disks are lost. That is no proof that nothing is: the
/// source must keep its images.
#[test]
fn lost_notes_are_not_taken_for_complete_disks() {
    let mut paris = Host::start("paris-2", &free_address());
    paris.0.end(Signal::SIGTERM);
    let state = paris.0.folder.path().join("s");
    let attempt = Attempt(1);
    let arrived = |id: u8, guest: &str, disks: Option<u16>| {
        let migration = MigrationId([id; 8]);
        let began = Record::Began {
            migration,
            attempt,
            side: Side::Destination,
            guest: guest.to_owned(),
            generation: Generation(6),
            peer: HostId([7; 32]),
            peer_name: "lyon-1".to_owned(),
            paused: false,
        };
        let committed = Record::Committed {
            attempt,
            generation: Generation(7),
        };
        let incomplete = disks.map(|disks| Record::Incomplete { attempt, disks });
        let journals = Journals::open(&state.join("journal")).unwrap();
        let mut journal = Journal::open(&journals, migration).unwrap();
        let records = [Some(began), incomplete, Some(committed)];
        for record in records.into_iter().flatten() {
            journal.append(&record).unwrap();
        }
        journal.path().to_owned()
    };
    let lost = arrived(1, "web-7", Some(2));
    let damaged = arrived(2, "db-1", Some(1));
    let whole = arrived(3, "ns-2", None);
    std::fs::create_dir(state.join("fronts")).unwrap();
    std::fs::write(state.join("fronts/db-1.0.note"), "{").unwrap();
    paris.0.restart();
    let has_all = |journal: &Path| {
        let entries = read_journal(journal).unwrap().entries;
        entries
            .iter()
            .any(|entry| matches!(entry.record, Record::AllPresent { .. }))
    };
    paris.wait_for("all is there", |_| has_all(&whole));
    for text in [
        "2 of the 2 disks that may lack blocks have no note",
        "db-1.0.note",
        // By then the notes were looked for more than once.
        "nothing heard from lyon-1",
    ] {
        paris.wait_for(text, |paris| {
            let shown = paris.succeed(&["migrations"]);
            let words: Vec<_> = shown.split_whitespace().collect();
            words.join(" ").contains(text)
        });
    }
    assert!(!has_all(&lost) && !has_all(&damaged), "{}", paris.0.log());
}

/// The destination has committed and said so, and died before it could say that it has everything.
fn taken_back(restart: bool) {
    let folder = tempfile::tempdir().unwrap();
    let held = folder.path().join("held");
    let point = format!(
        "destination:before-send:all-present=hold:{}",
        held.display()
    );
    let (mut lyon, mut paris) = two("", &point);
    std::thread::scope(|scope| {
        let moving = scope.spawn(|| migrate(&lyon));
        paris.wait_for("held", |_| held.exists());
        lyon.wait_for("done", |lyon| lyon.0.log().contains("state=Done"));
        paris.0.end(Signal::SIGKILL);
        lyon.wait_for("disconnected", |lyon| lyon.doubt()["record"] == "done");
        match restart {
            // Its client ends with it.
            true => drop(nix::sys::signal::kill(lyon.pid(), Signal::SIGKILL)),
            false => take_back(&lyon),
        }
        moving.join().unwrap();
    });
    if restart {
        lyon.wait_for_death();
        lyon.0.restart();
        lyon.wait_for("disconnected", |lyon| lyon.doubt()["record"] == "done");
        take_back(&lyon);
    }
    // The destination hears of it, and its copy can be ended.
    paris.0.restart();
    paris.wait_for("given away", |paris| paris.guest_state() == "elsewhere");
    paris.wait_for("free", Host::is_free);
    paris.succeed(&["guests", "stop", "--force", "web-7"]);
    assert_eq!(lyon.guest_state(), "running");
    lyon.wait_for("free", Host::is_free);
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    assert_eq!(paris.guest_state(), "running");
}

fn take_back(lyon: &Host) {
    let shown = lyon.succeed(&["migrations"]);
    for text in ["disconnected", "which belongs to paris-2", "wrote DONE"] {
        assert!(shown.contains(text), "no {text:?} in {shown}");
    }
    assert_eq!(lyon.guest_state(), "elsewhere");
    let reclaim = [
        "guests",
        "reclaim",
        "web-7",
        "--other-side",
        "dead",
        "--because",
        "x",
    ];
    lyon.fail(&[&reclaim[..], &["--yes"]].concat(), 3, "longhaul resolve");
    let resolve = ["resolve", "web-7", "--yes", "--run-on"];
    let with = |more: &[&'static str]| [&resolve[..], more].concat();
    lyon.fail(&with(&["source"]), 2, "--other-side dead");
    let there = with(&["destination", "--other-side", "dead"]);
    lyon.fail(&there, 3, "belongs to paris-2 already");
    lyon.succeed(&with(&["source", "--other-side", "dead"]));
    lyon.wait_for("running", |lyon| lyon.guest_state() == "running");
}

#[test]
fn a_guest_is_taken_back_from_a_destination_that_never_returns() {
    taken_back(false);
}

#[test]
fn a_guest_is_taken_back_from_a_destination_that_never_returns_after_a_restart() {
    taken_back(true);
}

#[test]
fn the_right_is_reclaimed_from_a_host_that_died_after_the_move() {
    let (lyon, mut paris) = two("", "");
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    lyon.wait_for("free", Host::is_free);
    let reclaim = |more: &[&'static str]| {
        let all = ["guests", "reclaim", "web-7", "--because", "it burnt down"];
        [&all[..], more].concat()
    };
    let dead = reclaim(&["--other-side", "dead", "--yes"]);
    lyon.fail(&dead, 3, "its agent answers");
    lyon.fail(&reclaim(&["--other-side", "dead"]), 2, "add --yes");
    lyon.fail(
        &["guests", "start", "web-7"],
        3,
        "longhaul guests reclaim web-7",
    );
    paris.0.end(Signal::SIGKILL);
    let done = lyon.succeed(&dead);
    assert!(done.contains("generation 4"), "{done}");
    lyon.fail(&dead, 3, "belongs to this host already");
    lyon.succeed(&["guests", "start", "web-7"]);
    assert_eq!(lyon.guest_state(), "running");
}

#[test]
fn a_guest_that_stands_paused_is_resumed() {
    use std::io::{Read, Write};
    let (lyon, _paris) = two("", "");
    let resume = ["guests", "resume", "web-7"];
    lyon.fail(&resume, 3, "runs already");
    let socket = lyon.0.folder.path().join("s/guests/web-7/run/qmp");
    let mut qmp = std::os::unix::net::UnixStream::connect(socket).unwrap();
    qmp.write_all(b"{\"execute\":\"qmp_capabilities\"}{\"execute\":\"stop\"}")
        .unwrap();
    let mut answers = String::new();
    while answers.matches("\"return\"").count() < 2 {
        let mut bytes = [0; 4096];
        let count = qmp.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "{answers}");
        answers.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
    drop(qmp);
    lyon.wait_for("paused", |lyon| lyon.guest_state() == "paused");
    lyon.succeed(&resume);
    assert_eq!(lyon.guest_state(), "running");
    lyon.succeed(&["migrate", "web-7", "--to", "paris-2"]);
    lyon.wait_for("elsewhere", |lyon| lyon.guest_state() == "elsewhere");
    lyon.fail(&resume, 3, "was moved to paris-2");
}

/// The source died for good while the destination had yet to fetch the disk. The destination's
/// agent was restarted before, and may die again.
fn gives_up(restarted_with: Option<&str>) {
    let disk = format!("{GUEST}[[disks]]\nname = \"vda\"\nimage = \"data\"\n");
    let (mut lyon, mut paris) = two_with(&disk, "source:after-receipt:committed=kill", "");
    let migrate = ["migrate", "web-7", "--to", "paris-2", "--disks", "postcopy"];
    let output = lyon.longhaul(&migrate);
    assert!(!output.status.success(), "{output:?}");
    lyon.wait_for_death();
    if let Some(points) = restarted_with {
        paris.kill_and_restart(points);
    }
    paris.wait_for("disconnected", |paris| {
        paris.doubt()["record"] == "committed"
    });
    let shown = paris.succeed(&["migrations"]);
    for text in ["disconnected", "bytes of disk vda", "--give-up-missing"] {
        assert!(shown.contains(text), "no {text:?} in {shown}");
    }
    paris.fail(
        &["guests", "stop", "--force", "web-7"],
        3,
        "still being fetched",
    );
    let resolve = ["resolve", "web-7", "--yes", "--run-on"];
    let with = |more: &[&'static str]| [&resolve[..], more].concat();
    let dead = ["destination", "--other-side", "dead"];
    paris.fail(&with(&dead), 2, "--give-up-missing");
    paris.fail(
        &with(&["source", "--other-side", "dead"]),
        3,
        "runs on paris-2",
    );
    let give_up = with(&[&dead[..], &["--give-up-missing"]].concat());
    match restarted_with.is_some_and(|points| !points.is_empty()) {
        true => {
            assert!(!paris.longhaul(&give_up).status.success());
            paris.wait_for_death();
            paris.0.restart();
        }
        false => drop(paris.succeed(&give_up)),
    }
    paris.wait_for("free", Host::is_free);
    assert_eq!(paris.guest_state(), "running");
    let image = std::fs::read(paris.0.folder.path().join("data.raw")).unwrap();
    assert!(image.iter().all(|byte| *byte == 0));
    paris.succeed(&["guests", "stop", "--force", "web-7"]);

    // A source that returns nevertheless sets its image aside, with everything in it.
    lyon.0.restart();
    lyon.wait_for("free", Host::is_free);
    assert_eq!(lyon.guest_state(), "elsewhere");
    let aside = std::fs::read(lyon.0.folder.path().join("data.raw.moved")).unwrap();
    assert!(aside.iter().all(|byte| *byte == 7));
}

#[test]
fn blocks_of_a_source_that_never_returns_are_given_up() {
    gives_up(None);
}

#[test]
fn blocks_of_a_source_that_never_returns_are_given_up_after_a_restart() {
    gives_up(Some(""));
}

#[test]
fn an_agent_that_died_after_it_gave_up_blocks_goes_on_with_it() {
    gives_up(Some("destination:after-record:gave-up=kill"));
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
