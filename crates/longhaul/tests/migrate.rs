//! Tests `migrate` and `cancel` against a simulated agent: the output, its form, the exit codes,
//! and that Ctrl-C and a dying agent are distinguished from the end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{LIMIT, check, command, wait};
use longhaul_api::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const ID: &str = "7f3a0c11d2e3f405";

/// The simulated agent's behaviour for a watched migration.
#[derive(Clone)]
enum Part {
    /// Reports these, one after the other.
    Tell(Vec<Progress>),
    /// Reports the same until it is cancelled.
    UntilCancelled,
    /// Dies after the first report.
    Die,
}

struct Fake {
    folder: tempfile::TempDir,
    cancelled: Arc<AtomicBool>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Fake {
    fn start(part: Part) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fake = Self {
            folder,
            cancelled: Arc::default(),
            requests: Arc::default(),
        };
        let listener = UnixListener::bind(fake.socket()).unwrap();
        let (cancelled, requests) = (fake.cancelled.clone(), fake.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (part, cancelled, requests) =
                    (part.clone(), cancelled.clone(), requests.clone());
                std::thread::spawn(move || answer(stream.unwrap(), &part, &cancelled, &requests));
            }
        });
        fake
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("agent.sock")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        command(&self.socket()).args(arguments).output().unwrap()
    }

    fn check(&self, name: &str, arguments: &[&str]) {
        check(name, arguments, &self.run(arguments), self.folder.path());
    }
}

fn answer(stream: UnixStream, part: &Part, cancelled: &AtomicBool, requests: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    reader.read_line(&mut request).unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = text.trim().parse().unwrap();
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let request = request.trim_end_matches(" HTTP/1.1\r\n").to_owned();
    let text = String::from_utf8(body).unwrap();
    requests.lock().unwrap().push(format!("{request} {text}"));
    let mut out = reader.into_inner();
    match request.as_str() {
        "POST /v1/migrations" => send(&mut out, 202, &migration()),
        "GET /v1/migrations" => send(
            &mut out,
            200,
            &Migrations {
                migrations: vec![migration()],
            },
        ),
        _ if request.ends_with("/report") => send(&mut out, 200, &report()),
        _ if request.ends_with("/cancel") => {
            cancelled.store(true, Ordering::SeqCst);
            send(&mut out, 202, &migration());
        }
        _ if request.ends_with("/progress") => tell(&mut out, part, cancelled),
        other => panic!("{other}"),
    }
}

fn send(out: &mut UnixStream, status: u16, content: &impl Serialize) {
    let text = serde_json::to_string(content).unwrap();
    let length = text.len();
    // The test may have ended the command.
    let _ = write!(
        out,
        "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{text}"
    );
}

fn tell(out: &mut UnixStream, part: &Part, cancelled: &AtomicBool) {
    let _ = out.write_all(b"HTTP/1.1 200 x\r\nconnection: close\r\n\r\n");
    let mut line = |progress: &Progress| {
        let text = serde_json::to_string(progress).unwrap() + "\n";
        let _ = out.write_all(text.as_bytes());
    };
    match part {
        Part::Tell(list) => list.iter().for_each(line),
        Part::UntilCancelled => {
            let deadline = Instant::now() + LIMIT;
            while !cancelled.load(Ordering::SeqCst) && Instant::now() < deadline {
                line(&progress(Phase::Precopy, None));
                std::thread::sleep(Duration::from_millis(20));
            }
            line(&progress(Phase::Precopy, Some(Outcome::Aborted)));
        }
        Part::Die => line(&progress(Phase::Precopy, None)),
    }
}

fn migration() -> Migration {
    Migration {
        id: ID.into(),
        guest: "web-7".into(),
        side: Side::Source,
        source: "lyon-1".into(),
        destination: "paris-2".into(),
        strategy: Strategy::Precopy,
        asked: Asked {
            downtime_ms: 300,
            bandwidth_bps: None,
            verify: true,
            patience_ms: 60_000,
            early_release: false,
            keep_memory: false,
            encoding: Encoding::default(),
            convergence: Default::default(),
            group: None,
        },
        started_unix_ms: 1_800_000_000_000,
        ended_unix_ms: None,
        phase: Phase::Preparing,
        outcome: None,
        reason: None,
        doubt: None,
        progress: None,
    }
}

fn progress(phase: Phase, outcome: Option<Outcome>) -> Progress {
    let moves = phase > Phase::Preparing;
    Progress {
        id: ID.into(),
        elapsed_ms: 2_000 * (phase as u64 + 1),
        phase,
        pass: moves.then_some(2),
        regions: vec![RegionProgress {
            name: "pc.ram".into(),
            blocks_total: if moves { 65_536 } else { 0 },
            blocks_settled: if moves { 40_000 } else { 0 },
            blocks_pending: if moves { 25_536 } else { 0 },
            disk: false,
            strategy: None,
            why: None,
            waiting: None,
            unreadable_byte: None,
        }],
        link: LinkProgress {
            rate_bps: moves.then_some(91_000_000),
            rtt_ms: None,
            sent_bytes: if moves { 30 << 20 } else { 0 },
            guest_bytes: None,
            limit_bps: None,
            interrupted_ms: None,
            paths: Vec::new(),
        },
        dirty_rate_bytes_per_s: None,
        predicted_downtime_ms: moves.then_some(80),
        outpaced: None,
        awaits_bases: false,
        trouble: None,
        remaining_ms: moves.then_some(PredictedRange {
            low: 2_000,
            likely: 3_000,
            high: 5_000,
        }),
        outcome,
        reason: None,
    }
}

fn report() -> Report {
    Report {
        id: ID.into(),
        guest: "web-7".into(),
        side: Side::Source,
        source: "lyon-1".into(),
        destination: "paris-2".into(),
        strategy: Strategy::Precopy,
        strategy_why: None,
        asked: migration().asked,
        started_unix_ms: 1_800_000_000_000,
        phase: Phase::Finishing,
        outcome: Some(Outcome::Completed),
        reason: None,
        predicted: None,
        judged: None,
        link_bytes: Some(38 << 20),
        link_bytes_back: None,
        paths: Vec::new(),
        memory_bytes: Some(37 << 20),
        disk_bytes: None,
        repository_bytes: None,
        arbiter: None,
        disks: Vec::new(),
        bytes: BytesByKind::default(),
        total_ms: Some(14_000),
        phases: Vec::new(),
        passes: None,
        stop: None,
        downtime_ms: Some(63.6),
        downtime: DowntimeParts::default(),
        dirty_rate_bytes_per_s: None,
        interruptions: None,
        cost: Cost::default(),
        verify: Some(VerifyResult {
            regions: 5,
            bytes: 256 << 20,
            disks: 0,
            disk_bytes: 0,
            disk_bytes_stopped: 0,
            disks_not_compared: 0,
            different_blocks: 0,
            first_difference: None,
        }),
        clock: None,
        hooks: Vec::new(),
        memory_file: None,
        kept_memory: None,
        faults: None,
        arbitrated: false,
        guest_rates: GuestRates::default(),
        properties: Properties::default(),
    }
}

/// Returns all phases, then the outcome in the last of them.
fn up_to(last: Phase, outcome: Outcome, reason: Option<ApiError>) -> Part {
    let mut list: Vec<Progress> = Phase::ALL
        .into_iter()
        .filter(|phase| *phase <= last)
        .map(|phase| progress(phase, None))
        .collect();
    let mut end = progress(last, Some(outcome));
    end.reason = reason;
    list.push(end);
    Part::Tell(list)
}

#[test]
fn a_completed_migration() {
    let fake = Fake::start(up_to(Phase::Finishing, Outcome::Completed, None));
    fake.check(
        "migrate",
        &[
            "migrate",
            "web-7",
            "--to",
            "paris-2",
            "--verify",
            "--bandwidth",
            "80mbit",
        ],
    );
    let requests = fake.requests.lock().unwrap().clone();
    assert_eq!(
        requests[0],
        "POST /v1/migrations {\"guest\":\"web-7\",\"to\":\"paris-2\",\"downtime_ms\":300,\
         \"bandwidth_bps\":80000000,\"verify\":true,\"patience_ms\":60000,\"early_release\":false,\
         \"convergence\":{}}"
    );
}

#[test]
fn a_completed_migration_as_json() {
    let fake = Fake::start(up_to(Phase::Finishing, Outcome::Completed, None));
    let output = fake.run(&["migrate", "web-7", "--to", "paris-2", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 1 + Phase::ALL.len() + 1 + 1);
    assert_eq!(lines[0]["migration"]["id"], ID);
    assert_eq!(lines[1]["progress"]["phase"], "preparing");
    assert_eq!(lines[lines.len() - 2]["progress"]["outcome"], "completed");
    let given: Report = serde_json::from_value(lines[lines.len() - 1]["report"].clone()).unwrap();
    assert_eq!(given, report());
}

#[test]
fn migrations_that_do_not_complete() {
    let refused = ApiError::new(
        ErrorCode::Refused,
        "paris-2 cannot run web-7: it has QEMU 7.2.22, and the guest's machine type pc-q35-10.0 \
         needs 10.0 or newer",
    )
    .hint("install QEMU 10.0 on paris-2 (Debian: bookworm-backports)")
    .state_of_guest("nothing was moved; web-7 runs on lyon-1");
    let fake = Fake::start(up_to(Phase::Preparing, Outcome::Failed, Some(refused)));
    fake.check("migrate_refused", &["migrate", "web-7", "--to", "paris-2"]);

    let failed = ApiError::new(
        ErrorCode::PeerUnreachable,
        "nothing was heard from paris-2 for 60 s",
    )
    .hint("try again when the link is back, or with a longer --patience")
    .state_of_guest("web-7 runs on lyon-1");
    let fake = Fake::start(up_to(Phase::Precopy, Outcome::Failed, Some(failed)));
    fake.check("migrate_failed", &["migrate", "web-7", "--to", "paris-2"]);

    let fake = Fake::start(up_to(Phase::HandingOver, Outcome::InDoubt, None));
    fake.check("migrate_in_doubt", &["migrate", "web-7", "--to", "paris-2"]);

    let fake = Fake::start(up_to(Phase::Precopy, Outcome::Aborted, None));
    fake.check("migrate_stopped", &["migrate", "web-7", "--to", "paris-2"]);
}

#[test]
fn an_agent_that_dies_leaves_a_word_on_how_to_find_out() {
    let fake = Fake::start(Part::Die);
    fake.check(
        "migrate_agent_died",
        &["migrate", "web-7", "--to", "paris-2"],
    );
}

#[test]
fn a_signal_stops_the_migration_and_waits_for_its_end() {
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let fake = Fake::start(Part::UntilCancelled);
        let mut child = command(&fake.socket())
            .args(["migrate", "web-7", "--to", "paris-2"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The first line says that the migration is being watched.
        let mut first = String::new();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        stderr.read_line(&mut first).unwrap();
        assert!(first.contains("memory 61 %"), "{first}");
        assert!(!fake.cancelled.load(Ordering::SeqCst));
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        let status = wait(&mut child);
        assert_eq!(status.code(), Some(130), "{signal}");
        assert!(fake.cancelled.load(Ordering::SeqCst));
        let mut text = String::new();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert!(text.contains("web-7 runs on lyon-1"), "{text}");
    }
}

#[test]
fn cancel_finds_the_migration_by_its_guest() {
    let fake = Fake::start(Part::UntilCancelled);
    let output = fake.run(&["cancel", "web-7"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let requests = fake.requests.lock().unwrap().clone();
    assert!(
        requests.contains(&format!("POST /v1/migrations/{ID}/cancel ")),
        "{requests:?}"
    );
}
