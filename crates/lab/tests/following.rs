//! Tests guests whose memory follows when they run at the destination (`--strategy postcopy` and
//! `hybrid`), end to end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, Running, Stage, tiny};
use longhaul_api::{Outcome, Phase};
use longhaul_lab::guest::Chipset;
use longhaul_lab::process::wait_until;
use std::thread;
use std::time::Duration;

const LINK: &str = "400mbit,4ms";
/// Some pages rewritten per second, so that the guest waits for pages that have not come.
const BUSY: u64 = 200;
/// So slow that most of the memory follows after a trouble.
const SLOW: [&str; 2] = ["--bandwidth", "24mbit"];

/// Moves a guest by a strategy, and checks that it is there, whole and undamaged.
fn moves(guest: &mut Running, stage: &Stage, from: usize, strategy: &str) {
    let moving = guest.migrate(stage, from, &["--strategy", strategy]);
    let finished = moving.finish(LIMIT).unwrap();
    guest.assert_moved(stage, from, &finished);
    let report = finished.report.as_ref().unwrap();
    assert_eq!(report.strategy.name(), strategy);
    eprintln!(
        "{strategy}: {:?}, {:?}",
        report.downtime_ms, report.downtime
    );
}

fn moves_there_and_back(version: &str, chipset: Chipset, vcpus: u32) {
    let Some(stage) = Stage::new("following", [version, version], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("follows", chipset, version, vcpus), BUSY);
    moves(&mut guest, &stage, 0, "postcopy");
    moves(&mut guest, &stage, 1, "hybrid");
    // An ordinary move needs nothing of that.
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}

/// The tests of disks move memory of all versions by these strategies, too.
fn every_case() -> bool {
    std::env::var_os("LONGHAUL_EVERY_CASE").is_some()
}

#[test]
fn memory_of_qemu_7_2_follows() {
    if every_case() {
        moves_there_and_back("7.2", Chipset::Pc, 1);
    }
}

#[test]
fn memory_of_qemu_10_follows() {
    moves_there_and_back("10.0", Chipset::Q35, 2);
}

#[test]
fn memory_of_qemu_11_1_follows() {
    if every_case() {
        moves_there_and_back("11.1", Chipset::Q35, 2);
    }
}

/// What happens while memory follows.
#[derive(Debug, Clone, Copy)]
enum Trouble {
    Cut(Duration),
    /// The source's agent is killed and restarted.
    Killed,
}

/// Moves a guest, and has troubles while its memory follows. Nobody helps.
fn survives(guest: &mut Running, stage: &mut Stage, from: usize, how: &str, troubles: &[Trouble]) {
    let words = ["--strategy", how, SLOW[0], SLOW[1]];
    let mut moving = guest.migrate(stage, from, &words);
    assert!(
        moving.wait_for_phase(Phase::Finishing, LIMIT),
        "{}",
        moving.so_far().why()
    );
    let to = 1 - from;
    let name = guest.name.clone();
    for trouble in troubles {
        assert_eq!(
            stage.qemus(from, &name).len(),
            1,
            "all of it had come: {trouble:?}"
        );
        match trouble {
            Trouble::Cut(time) => {
                stage.lab.link(0, 1).unwrap().cut(*time).unwrap();
                thread::sleep(*time);
            }
            Trouble::Killed => {
                stage.product.agent_mut(from).unwrap().kill().unwrap();
                thread::sleep(Duration::from_millis(500));
                stage.restart(&[from]);
            }
        }
    }
    let gone = wait_until(LIMIT, || stage.qemus(from, &name).is_empty());
    assert!(gone, "its memory did not follow: {troubles:?}");
    guest.assert_runs_only_on(stage, to);
    let ended = wait_until(LIMIT, || {
        let there = stage.product.latest_migration(to, &name).unwrap();
        there.is_some_and(|there| there.outcome == Some(Outcome::Completed))
    });
    assert!(ended, "{:?}", stage.product.latest_migration(to, &name));
    let there = stage.product.latest_migration(to, &name).unwrap().unwrap();
    assert!(there.reason.is_none(), "{there:?}");
    drop(moving);
}

#[test]
fn a_cut_is_a_pause_and_so_is_the_death_of_the_source_s_agent() {
    let Some(mut stage) = Stage::new("following in trouble", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("lucky", Chipset::Q35, "10.0", 2), BUSY);
    let cut = Trouble::Cut(Duration::from_secs(1));
    let kinds = [
        ("postcopy", vec![cut]),
        ("hybrid", vec![Trouble::Killed]),
        ("postcopy", vec![Trouble::Killed, cut, Trouble::Killed]),
    ];
    for (round, (how, troubles)) in kinds.iter().enumerate() {
        survives(&mut guest, &mut stage, round % 2, how, troubles);
    }
    guest.move_verified(&stage, kinds.len() % 2);
    guest.end(&stage);
}
