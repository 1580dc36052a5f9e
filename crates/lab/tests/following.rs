//! Tests guests whose memory follows when they run at the destination (`--strategy postcopy` and
//! `hybrid`), end to end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, Running, Stage, tiny, workload};
use longhaul_api::{Consequence, Guest, Migration, Outcome, Phase, Report};
use longhaul_lab::arena::Workload;
use longhaul_lab::guest::{Chipset, Tiny};
use longhaul_lab::installed;
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::process::{kill_all, wait_until};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

const LINK: &str = "400mbit,4ms";
/// Some pages rewritten per second, so that the guest waits for pages that have not come.
const BUSY: u64 = 200;
/// The memory of the smallest guest.
const MEMORY_BYTES: u64 = 128 << 20;
/// The link before that, with `hybrid`.
const WHILE_RUNNING: &str = "20mbit,4ms";
/// Pages rewritten per second meanwhile. Further passes cannot send that many.
const BUSIER: u64 = 20_000;
/// The link while memory follows: so slow that most of it follows after the first trouble.
const NARROW: &str = "1mbit,4ms";
/// How long what must come before the next trouble is to take.
const PART: Duration = Duration::from_secs(4);
/// The time between two changes of the link's rate. The destination updates the number of missing
/// blocks in the same interval.
const LOOK: Duration = Duration::from_millis(500);
/// The slowest link: on a slower one a new connection takes too long.
const SLOWEST_BPS: u64 = 128_000;
/// The fastest one: a third of the missing memory takes seconds on it.
const FASTEST_BPS: u64 = 8_000_000;
const RTT: Duration = Duration::from_millis(4);

/// The command that QEMU's monitor needs before any other.
const CAPABILITIES: &str = r#"{"execute": "qmp_capabilities"}"#;
/// How long QEMU may take to say something: also while its main loop waits for pages that come.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long QEMU says nothing while its main loop waits for a page that does not come.
const SILENCE: Duration = Duration::from_secs(2);

/// Boots a guest that rewrites whole pages with what cannot be compressed. So much of its memory is
/// missing at the first trouble, and each block of it takes its time.
fn boot_busier(stage: &Stage, tiny: &Tiny) -> Running {
    let busier = Workload {
        content: "random".to_owned(),
        write_bytes: 4096,
        ..workload(tiny, BUSIER)
    };
    stage.boot_with(tiny, &busier)
}

/// Moves a guest by a strategy, and checks that it is there, whole and undamaged.
fn moves(guest: &mut Running, stage: &Stage, from: usize, strategy: &str) {
    let moving = guest.migrate(stage, from, &["--strategy", strategy]);
    let finished = moving.finish(LIMIT).unwrap();
    guest.assert_moved(stage, from, &finished);
    if strategy == "postcopy" {
        assert!(code_ahead(stage, from) > 100, "its code is not found");
    }
    let report = finished.report.as_ref().unwrap();
    assert_eq!(report.strategy.name(), strategy);
    eprintln!(
        "{strategy}: {:?}, {:?}",
        report.downtime_ms, report.downtime
    );
    has_properties(stage, from, report);
}

/// Checks that the report of a guest whose memory followed has its five properties in figures.
fn has_properties(stage: &Stage, from: usize, report: &Report) {
    let properties = &report.properties;
    let stalls = properties.continuity.stalls;
    assert!(
        stalls.is_some_and(|stalls| stalls.above_10_ms > 0),
        "{stalls:?}"
    );
    let cost = &properties.resources.cost.destination;
    assert!(cost.page_server_cpu_s.is_some(), "{cost:?}");
    let phases = &properties.robustness.phases;
    let last = phases.last().map(|risks| risks.if_source_dies.consequence);
    assert_eq!(last, Some(Consequence::Lost), "{phases:?}");
    // The destination may measure on for a moment.
    let mut seen = properties.transparency;
    let known = wait_until(LIMIT, || {
        let latest: Report = stage.product.ask(from, &["report", &report.id]).unwrap();
        seen = latest.properties.transparency;
        seen.before.is_some() && seen.during.is_some() && seen.after.is_some()
    });
    assert!(known, "{seen:?}");
}

/// Moves a guest with memory above 4 GiB.
fn moves_there_and_back(version: &str, chipset: Chipset, vcpus: u32) {
    let Some(stage) = Stage::new("following", [version, version], LINK) else {
        return;
    };
    let mut large = tiny("follows", chipset, version, vcpus);
    // These leave a hole below 4 GiB. Linux uses the highest memory first: there the arena is.
    large.memory_mib = match chipset {
        Chipset::Q35 => 3 * 1024,
        Chipset::Pc => 4 * 1024,
    };
    let mut guest = stage.boot(&large, BUSY);
    moves(&mut guest, &stage, 0, "postcopy");
    moves(&mut guest, &stage, 1, "hybrid");
    guest.end(&stage);
}

#[test]
fn memory_of_qemu_7_2_follows() {
    if !installed::is_its_day(0, 3) {
        return;
    }
    moves_there_and_back("7.2", Chipset::Q35, 2);
}

#[test]
fn memory_of_qemu_10_follows() {
    if !installed::is_its_day(1, 3) {
        return;
    }
    moves_there_and_back("10.0", Chipset::Pc, 1);
}

#[test]
fn memory_of_qemu_11_1_follows() {
    if !installed::is_its_day(2, 3) {
        return;
    }
    moves_there_and_back("11.1", Chipset::Q35, 2);
}

/// What happens while memory follows.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    Cut(Duration),
    /// The source's agent is killed and restarted.
    Killed,
    /// The destination's agent is killed and restarted.
    DestinationKilled,
    /// Both agents are killed and restarted.
    BothKilled,
    /// The page server is killed.
    ServerKilled,
    /// The link is cut until QEMU waits for a page and answers no command. Then the destination's
    /// agent is killed, and restarted when the link is back.
    Stuck,
    /// Nothing, until this share of what was missing at first has come.
    Until(f64),
    /// Nothing, until the source's memory file is complete.
    Kept,
    /// The source's QEMU is killed.
    QemuKilled,
    /// The source's agent and its QEMU are killed, and the agent is restarted: as if the host was.
    HostRestarted,
}

/// Returns the page servers on a host.
fn page_servers(stage: &Stage, host: usize) -> Vec<i32> {
    let namespace = stage.lab.host(host).unwrap().namespace();
    let is_one = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0)
            .any(|word| word == b"page-server")
    };
    let processes = namespace.processes().unwrap();
    processes.into_iter().filter(is_one).collect()
}

/// Returns how many blocks of a guest's memory are missing at its destination.
fn missing(stage: &Stage, host: usize, guest: &str) -> u64 {
    let there = stage.product.latest_migration(host, guest).unwrap();
    let progress = there.and_then(|there| there.progress);
    let regions = progress.map_or(Vec::new(), |progress| progress.regions);
    regions.iter().map(|region| region.blocks_pending).sum()
}

fn state(stage: &Stage, host: usize) -> PathBuf {
    stage.lab.host(host).unwrap().folder().join("state")
}

/// A client of a QEMU's control socket that does not wait for ever.
struct Impatient(BufReader<UnixStream>);

impl Impatient {
    fn connect(stage: &Stage, host: usize, guest: &str) -> Self {
        let path = state(stage, host).join("guests").join(guest);
        let socket = UnixStream::connect(path.join("run/qmp")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(BufReader::new(socket))
    }

    /// Returns whether QEMU says something now.
    fn hears(&mut self) -> bool {
        let read = self.0.read_line(&mut String::new());
        read.is_ok_and(|bytes| bytes > 0)
    }

    /// Checks that QEMU does not answer a command now.
    fn is_not_answered(&mut self, command: &str) {
        let socket = self.0.get_ref();
        socket.set_read_timeout(Some(SILENCE)).unwrap();
        assert!(!self.is_answered(command), "no page is missing: {command}");
    }

    /// Returns whether QEMU answers a command.
    fn is_answered(&mut self, command: &str) -> bool {
        let line = format!("{command}\n");
        self.0.get_mut().write_all(line.as_bytes()).unwrap();
        self.hears()
    }
}

/// Lets QEMU's main loop read all of the guest's memory, as a device would. It holds QEMU's lock,
/// and waits for each page that is missing.
fn wait_for_memory(stage: &Stage, host: usize, guest: &str, bytes: u64) {
    let mut monitor = Impatient::connect(stage, host, guest);
    assert!(monitor.hears());
    if !monitor.is_answered(CAPABILITIES) {
        // The guest itself has made it wait.
        return;
    }
    let arguments = format!(r#"{{"val": 0, "size": {bytes}, "filename": "/dev/null"}}"#);
    let command = format!(r#"{{"execute": "pmemsave", "arguments": {arguments}}}"#);
    monitor.is_not_answered(&command);
}

impl Trouble {
    /// Happens to the drain of a guest; `first` is how much was missing when that was first seen.
    fn happens(self, guest: &Running, stage: &mut Stage, from: usize, first: &mut u64) {
        let to = 1 - from;
        match self {
            Self::Until(share) => has_come(share, guest, stage, from, first),
            Self::Cut(time) => {
                stage.lab.link(0, 1).unwrap().cut(time).unwrap();
                thread::sleep(time);
            }
            Self::Killed => restart(stage, &[from]),
            Self::DestinationKilled => restart(stage, &[to]),
            Self::BothKilled => restart(stage, &[from, to]),
            Self::ServerKilled => {
                // An agent that was restarted leaves the monitor alone. A guest that is stopped
                // waits for no page, so QEMU's main loop does not either.
                restart(stage, &[to]);
                let mut monitor = Impatient::connect(stage, to, &guest.name);
                assert!(monitor.hears());
                assert!(monitor.is_answered(CAPABILITIES), "QEMU waits for a page");
                assert!(monitor.is_answered(r#"{"execute": "stop"}"#));
                drop(monitor);
                let servers = page_servers(stage, to);
                assert_eq!(servers.len(), 1, "{servers:?}");
                kill_all(&servers).unwrap();
                let replaced = wait_until(LIMIT, || {
                    let new = page_servers(stage, to);
                    new.len() == 1 && new != servers
                });
                assert!(replaced, "nobody started another page server");
                let mut monitor = Impatient::connect(stage, to, &guest.name);
                assert!(monitor.hears());
                assert!(monitor.is_answered(CAPABILITIES));
                assert!(monitor.is_answered(r#"{"execute": "cont"}"#));
            }
            Self::Stuck => {
                stage.lab.link(0, 1).unwrap().cut(LIMIT).unwrap();
                stage.product.agent_mut(to).unwrap().kill().unwrap();
                wait_for_memory(stage, to, &guest.name, MEMORY_BYTES);
                stage.restart(&[to]);
                let mut monitor = Impatient::connect(stage, to, &guest.name);
                // QEMU greets without its lock.
                assert!(monitor.hears());
                monitor.is_not_answered(CAPABILITIES);
                drop(monitor);
                stage.lab.link(0, 1).unwrap().heal().unwrap();
            }
            Self::Kept => {
                let report = || stage.product.ask::<Report>(from, &["report"]).unwrap();
                let complete = wait_until(LIMIT, || report().memory_file.is_some());
                assert!(complete, "its memory is not kept");
                let file = report().memory_file.unwrap();
                eprintln!("{file:?}");
                assert!(file.bytes > 1 << 20, "{file:?}");
            }
            Self::QemuKilled => kill_qemu(stage, from, &guest.name),
            Self::HostRestarted => {
                stage.product.agent_mut(from).unwrap().kill().unwrap();
                kill_qemu(stage, from, &guest.name);
                stage.restart(&[from]);
            }
        }
    }
}

/// Waits until a share of what was missing at first has come, about as long as `PART`. How many
/// blocks the link carries is only known when it has carried some: most are whole, but some are
/// deltas. So the link is slow at first, and its rate follows what comes.
fn has_come(share: f64, guest: &Running, stage: &Stage, from: usize, first: &mut u64) {
    let left = || missing(stage, 1 - from, &guest.name);
    let is_over = || stage.qemus(from, &guest.name).is_empty();
    let mut rate = SLOWEST_BPS;
    set_rate(stage, rate);
    if *first == 0 {
        // The destination shows it a little later.
        let is_shown = wait_until(LIMIT, || {
            *first = left();
            *first > 0 || is_over()
        });
        assert!(is_shown && *first > 0, "nothing is missing");
    }
    let most = (*first as f64 * (1.0 - share)) as u64;
    let mut last = left();
    let (mut seen, mut since) = (last, Instant::now());
    let comes = wait_until(LIMIT, || {
        last = left();
        if since.elapsed() > LOOK {
            let came = seen.saturating_sub(last) as f64;
            let wanted = last.saturating_sub(most) as f64 * LOOK.div_duration_f64(PART);
            let new = match came / wanted {
                part if part > 1.0 => rate / 2,
                part if part < 0.25 => rate * 2,
                _ => rate,
            };
            rate = new.clamp(SLOWEST_BPS, FASTEST_BPS);
            set_rate(stage, rate);
            (seen, since) = (last, Instant::now());
        }
        (1..=most).contains(&last) || is_over()
    });
    assert!(comes, "{last} of {first} blocks do not come");
    // Little comes until the trouble, and while it lasts.
    set_rate(stage, SLOWEST_BPS);
    eprintln!("{last} of {first} blocks are missing");
}

fn set_rate(stage: &Stage, rate_bps: u64) {
    let link = LinkSpec::new(rate_bps, RTT);
    stage.lab.link(0, 1).unwrap().change(link).unwrap();
}

/// Kills the source's stopped QEMU, while memory is missing at the destination.
fn kill_qemu(stage: &Stage, from: usize, guest: &str) {
    let qemus = stage.qemus(from, guest);
    assert_eq!(qemus.len(), 1);
    // The destination shows it a little later.
    let is_missing = wait_until(LIMIT, || missing(stage, 1 - from, guest) > 0);
    assert!(is_missing, "nothing is missing");
    kill_all(&qemus).unwrap();
    let left = missing(stage, 1 - from, guest);
    assert!(left > 0, "all of it had come");
    eprintln!("{left} blocks are missing");
}

fn restart(stage: &mut Stage, hosts: &[usize]) {
    for host in hosts {
        stage.product.agent_mut(*host).unwrap().kill().unwrap();
    }
    stage.restart(hosts);
}

/// Moves a guest, and has troubles while its memory follows. Nobody helps.
fn survives(guest: &mut Running, stage: &mut Stage, from: usize, how: &str, troubles: &[Trouble]) {
    eprintln!("{how}: {troubles:?}");
    let change = |stage: &Stage, link: &str| {
        let link = link.parse().unwrap();
        stage.lab.link(0, 1).unwrap().change(link).unwrap();
    };
    if how == "hybrid" {
        change(stage, WHILE_RUNNING);
    }
    let mut words = vec!["--strategy", how];
    let keeps = |trouble: &Trouble| matches!(trouble, Trouble::Kept);
    words.extend(troubles.iter().any(keeps).then_some("--keep-memory"));
    let mut moving = guest.migrate(stage, from, &words);
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        moving.so_far().why()
    );
    change(stage, NARROW);
    if how == "postcopy" {
        assert!(code_ahead(stage, from) > 100, "its code is not found");
    }
    let mut first = 0;
    for trouble in troubles {
        assert_eq!(
            stage.qemus(from, &guest.name).len(),
            1,
            "all of it had come: {trouble:?}"
        );
        trouble.happens(guest, stage, from, &mut first);
    }
    change(stage, LINK);
    has_followed(guest, stage, from);
}

/// Returns how many blocks of code went ahead of a guest's memory in the last move from a host.
fn code_ahead(stage: &Stage, from: usize) -> u64 {
    let agent = stage.product.agent(from).unwrap();
    let log = fs::read_to_string(agent.log()).unwrap();
    let mut lines = log.lines().filter(|line| line.contains("goes ahead"));
    let said = lines
        .next_back()
        .and_then(|line| line.split_once("blocks="));
    let blocks = said.and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    blocks.unwrap_or(0)
}

/// Returns these troubles, each when as much more has come: the first at once.
fn spread(troubles: &[Trouble]) -> Vec<Trouble> {
    let parts = troubles.len() as f64;
    let each = troubles.iter().enumerate();
    let each = each.flat_map(|(n, trouble)| [Trouble::Until(n as f64 / parts), *trouble]);
    each.skip(1).collect()
}

/// Waits until all memory of a guest has followed. Checks that the guest runs at the destination
/// alone, and that no page server, note or memory file is left.
fn has_followed(guest: &mut Running, stage: &Stage, from: usize) {
    let (to, name) = (1 - from, guest.name.clone());
    let gone = wait_until(LIMIT, || stage.qemus(from, &name).is_empty());
    assert!(gone, "its memory did not follow");
    guest.assert_runs_only_on(stage, to);
    let ended = wait_until(LIMIT, || {
        let there = stage.product.latest_migration(to, &name).unwrap();
        there.is_some_and(|there| there.outcome == Some(Outcome::Completed))
    });
    assert!(ended, "{:?}", stage.product.latest_migration(to, &name));
    let there = stage.product.latest_migration(to, &name).unwrap().unwrap();
    assert!(there.reason.is_none(), "{there:?}");
    is_clean(stage, from);
    is_clean(stage, to);
}

/// Checks that no page server, note or memory file is left on a host.
fn is_clean(stage: &Stage, host: usize) {
    let following = state(stage, host).join("following");
    let clean = wait_until(LIMIT, || {
        let left = fs::read_dir(&following).map_or(0, Iterator::count);
        left == 0 && page_servers(stage, host).is_empty()
    });
    assert!(clean, "something is left in {}", following.display());
}

/// Each trouble comes at each of three points of a drain: at once, when a third of what was missing
/// has come, and when two thirds have.
fn troubles_at_three_points(version: &str, chipset: Chipset, how: &str) {
    let Some(mut stage) = Stage::new("following in trouble", [version, version], LINK) else {
        return;
    };
    let mut guest = boot_busier(&stage, &tiny("lucky", chipset, version, 2));
    let mut troubles = [
        Trouble::Cut(Duration::from_secs(1)),
        Trouble::Killed,
        Trouble::DestinationKilled,
    ];
    for round in 0..troubles.len() {
        survives(&mut guest, &mut stage, round % 2, how, &spread(&troubles));
        troubles.rotate_left(1);
    }
    guest.move_verified(&stage, troubles.len() % 2);
    guest.end(&stage);
}

#[test]
fn a_cut_and_the_death_of_either_agent_are_a_pause_of_postcopy() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    troubles_at_three_points("10.0", Chipset::Q35, "postcopy");
}

#[test]
fn a_cut_and_the_death_of_either_agent_are_a_pause_of_hybrid() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    troubles_at_three_points("7.2", Chipset::Pc, "hybrid");
}

/// Cuts the link for some time at three points of a drain.
fn is_cut_three_times(how: &str, time: Duration) {
    let Some(mut stage) = Stage::beside_others("following late", ["11.1", "11.1"], LINK) else {
        return;
    };
    let mut guest = boot_busier(&stage, &tiny("patient", Chipset::Pc, "11.1", 1));
    let cuts = spread(&[Trouble::Cut(time); 3]);
    survives(&mut guest, &mut stage, 0, how, &cuts);
    guest.end(&stage);
}

fn both_are_cut_three_times(time: Duration) {
    thread::scope(|scope| {
        for how in ["postcopy", "hybrid"] {
            scope.spawn(move || is_cut_three_times(how, time));
        }
    });
}

#[test]
fn a_cut_of_half_a_minute_is_a_pause() {
    both_are_cut_three_times(Duration::from_secs(30));
}

#[test]
#[ignore = "it waits for a quarter of an hour"]
fn a_cut_of_five_minutes_is_a_pause() {
    both_are_cut_three_times(Duration::from_secs(300));
}

#[test]
#[ignore = "some minutes; three points of a drain are always tested"]
fn an_agent_may_end_at_ten_points_of_a_drain() {
    let Some(mut stage) = Stage::new("following with deaths", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = boot_busier(&stage, &tiny("often", Chipset::Q35, "10.0", 2));
    let mut from = 0;
    for how in ["postcopy", "hybrid"] {
        for death in [Trouble::Killed, Trouble::DestinationKilled] {
            survives(&mut guest, &mut stage, from, how, &spread(&[death; 10]));
            from = 1 - from;
        }
    }
    guest.end(&stage);
}

#[test]
fn the_destination_s_agent_may_end_while_its_guest_waits() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::new("following to a bad agent", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("held", Chipset::Q35, "10.0", 2), BUSY);
    let troubles = [
        Trouble::DestinationKilled,
        Trouble::DestinationKilled,
        Trouble::Stuck,
        Trouble::BothKilled,
    ];
    survives(&mut guest, &mut stage, 0, "postcopy", &troubles);
    guest.move_verified(&stage, 1);
    guest.end(&stage);
}

#[test]
fn the_destination_s_agent_may_end_before_its_guest_runs() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    let Some(mut stage) = Stage::new("following too early", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("early", Chipset::Q35, "10.0", 2), BUSY);
    let points = ["after-receipt:commit", "after-record:committed"];
    for (round, point) in points.iter().enumerate() {
        eprintln!("{point}");
        let (from, to) = (round % 2, 1 - round % 2);
        let fails = format!("destination:{point}=kill");
        let host = stage.lab.host(to).unwrap();
        let agent = stage.product.agent_mut(to).unwrap();
        agent.restart_to_fail(host, &fails).unwrap();
        let _moving = guest.migrate(&stage, from, &["--strategy", "postcopy"]);
        let agent = stage.product.agent_mut(to).unwrap();
        assert!(wait_until(LIMIT, || agent.has_ended()), "it was not killed");
        assert_eq!(page_servers(&stage, to).len(), 1);
        stage.restart(&[to]);
        has_followed(&mut guest, &stage, from);
    }
    guest.move_verified(&stage, points.len() % 2);
    guest.end(&stage);
}

#[test]
fn a_page_server_that_is_killed_is_replaced() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(mut stage) = Stage::new("following to a bad server", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("paused", Chipset::Q35, "10.0", 2), BUSY);
    let troubles = [Trouble::ServerKilled, Trouble::DestinationKilled];
    survives(&mut guest, &mut stage, 0, "postcopy", &troubles);
    guest.move_verified(&stage, 1);
    guest.end(&stage);
}

/// The source's agent lives on, so the agents are connected all the time.
#[test]
fn lost_memory_is_said_and_given_up_by_an_operator() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    let Some(stage) = Stage::new("following from nowhere", ["10.0", "10.0"], LINK) else {
        return;
    };
    let guest = stage.boot(&tiny("lost", Chipset::Q35, "10.0", 1), BUSY);
    let words = ["--strategy", "postcopy", "--bandwidth", "40mbit"];
    let mut moving = guest.migrate(&stage, 0, &words);
    let follows = moving.wait_for_phase(Phase::Finishing, LIMIT);
    assert!(follows, "{}", moving.so_far().why());
    kill_qemu(&stage, 0, &guest.name);
    let there = || stage.product.latest_migration(1, &guest.name).unwrap();
    let doubt = || there().and_then(|there| there.doubt);
    assert!(
        wait_until(LIMIT, || doubt().is_some()),
        "its loss is not said: {:?}",
        there()
    );
    let doubt = doubt().unwrap();
    assert_eq!(doubt.reachable, Some(true), "{doubt:?}");
    assert!(doubt.here.contains("has lost"), "{doubt:?}");

    let mut words = vec!["resolve", &guest.name, "--yes", "--run-on", "destination"];
    words.extend(["--other-side", "dead", "--give-up-missing"]);
    stage.product.ask::<Migration>(1, &words).unwrap();
    for host in 0..2 {
        let ended = wait_until(LIMIT, || {
            let it = stage.product.latest_migration(host, &guest.name).unwrap();
            it.is_some_and(|it| it.outcome == Some(Outcome::Completed))
        });
        let left = stage.product.latest_migration(host, &guest.name);
        assert!(ended, "{left:?}");
    }
    let start = ["guests", "start", &guest.name];
    stage.product.ask::<Guest>(1, &start).unwrap();
    assert!(stage.qemus(0, &guest.name).is_empty());
    guest.end(&stage);
}

/// A guest whose missing memory is lost ends only with its QEMU. Nothing is needed for it then.
#[test]
fn a_guest_that_ends_needs_no_memory() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    let Some(stage) = Stage::new("following in vain", ["10.0", "10.0"], LINK) else {
        return;
    };
    let guest = stage.boot(&tiny("lost", Chipset::Q35, "10.0", 2), BUSY);
    let mut moving = guest.migrate(
        &stage,
        0,
        &["--strategy", "postcopy", "--bandwidth", "40mbit"],
    );
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        moving.so_far().why()
    );
    kill_qemu(&stage, 0, &guest.name);
    let there = || stage.product.latest_migration(1, &guest.name).unwrap();
    let is_lost = wait_until(LIMIT, || {
        let trouble = there().and_then(|there| there.progress?.trouble);
        trouble.is_some_and(|trouble| trouble.contains("the source has lost"))
    });
    assert!(is_lost, "{:?}", there());
    kill_all(&stage.qemus(1, &guest.name)).unwrap();
    let ended = wait_until(LIMIT, || there().is_some_and(|it| it.outcome.is_some()));
    assert!(ended, "{:?}", there());
    let there = there().unwrap();
    assert!(there.progress.unwrap().trouble.is_none());
    for host in 0..2 {
        assert!(wait_until(LIMIT, || stage
            .qemus(host, &guest.name)
            .is_empty()));
        is_clean(&stage, host);
    }
}

#[test]
fn a_memory_file_outlives_the_source_s_qemu() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    let Some(mut stage) = Stage::new("following from a file", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("kept", Chipset::Q35, "10.0", 2), BUSY);
    let rounds = [
        vec![Trouble::Kept, Trouble::QemuKilled],
        // The copy begins again.
        vec![Trouble::Killed, Trouble::Kept, Trouble::HostRestarted],
    ];
    for (round, troubles) in rounds.iter().enumerate() {
        survives(&mut guest, &mut stage, round % 2, "postcopy", troubles);
    }
    guest.move_verified(&stage, rounds.len() % 2);
    guest.end(&stage);
}
