//! Tests failures at steps of a move end to end: exactly one copy of the guest survives.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_lab::installed::{self, QEMU_VERSIONS};
use longhaul_lab_crash::{self as crash, Options, soak};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of cases in `make test`: some minutes on two cores that run other tests too. All of
/// them: `make crash-matrix`.
const CASES: usize = 6;
/// The number of moves back and forth; `lab soak` runs more.
const MOVES: u32 = 4;
/// The seed of another choice of cases: the number that a run printed.
const SEED: &str = "LONGHAUL_CRASH_SEED";

fn seed() -> Option<u64> {
    std::env::var(SEED).ok().map(|seed| seed.parse().unwrap())
}

/// Guests under TCG share two cores badly: one test at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn all_are_installed() -> bool {
    for version in QEMU_VERSIONS {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED: {error}");
            return false;
        }
    }
    true
}

#[test]
fn whatever_fails_the_guest_is_there_once() {
    if !all_are_installed() {
        return;
    }
    let _turn = turn();
    let options = Options {
        cases: Some(CASES),
        seed: seed(),
        ..Options::default()
    };
    let cases = crash::choose(&options).unwrap();
    assert!(!cases.is_empty());
    let summary = crash::run(&cases, crash::seed(&options), &options).unwrap();
    assert!(summary.tried > 0);
    assert_eq!(
        summary.failed,
        Vec::new(),
        "{SEED}={}",
        crash::seed(&options)
    );
}

#[test]
fn a_qemu_that_converged_by_itself_never_resumes_a_released_guest() {
    if !all_are_installed() {
        return;
    }
    let _turn = turn();
    for (point, back) in [
        ("stopping:converged", "at-once"),
        ("after-record:released", "later"),
    ] {
        let name = |qemu| {
            let failure = format!("source-agent:source:{point}");
            format!("{failure}:{qemu}:late:locks-off:{back}:raw:shared:precopy")
        };
        // The name of a 7.2 case is not a prefix of a 7.2-10.0 case.
        let options = Options {
            only: vec![name("7.2"), name("10.0"), name("11.1")],
            converged: point != "stopping:converged",
            ..Options::default()
        };
        let cases = crash::choose(&options).unwrap();
        assert_eq!(cases.len(), options.only.len());
        let summary = crash::run(&cases, 1, &options).unwrap();
        assert_eq!(summary.failed, Vec::new());
    }
}

/// The matrix runs with other versions; where QEMU is held in another way, a part of it is
/// repeated.
#[test]
fn whatever_fails_a_guest_of_qemu_11_1_is_there_once() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    if !all_are_installed() {
        return;
    }
    let _turn = turn();
    let only = [
        (
            "source-agent:source:after-record:released",
            "later",
            "precopy",
        ),
        (
            "source-qemu:source:before-record:released",
            "at-once",
            "precopy",
        ),
        (
            "destination-agent:destination:before-record:ready",
            "at-once",
            "precopy",
        ),
        (
            "destination-agent:destination:after-record:committed",
            "later",
            "precopy",
        ),
        (
            "destination-qemu:destination:before-record:ready",
            "at-once",
            "precopy",
        ),
        (
            "source-agent:destination:before-send:loading",
            "at-once",
            "postcopy",
        ),
        (
            "destination-agent:source:after-receipt:missing",
            "later",
            "hybrid",
        ),
    ];
    let name = |(failure, back, memory): (&str, &str, &str)| {
        format!("{failure}:11.1:late:locks-off:{back}:raw:shared:{memory}")
    };
    let options = Options {
        only: only.map(name).to_vec(),
        ..Options::default()
    };
    let cases = crash::choose(&options).unwrap();
    assert_eq!(cases.len(), only.len());
    let summary = crash::run(&cases, 1, &options).unwrap();
    assert_eq!(summary.failed, Vec::new());
}

#[test]
fn random_moves_leave_nothing_behind() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    if !all_are_installed() {
        return;
    }
    let _turn = turn();
    let options = soak::Options {
        moves: MOVES,
        seed: seed(),
        qemu: "10.0".to_owned(),
    };
    let summary = soak::run(&options).unwrap();
    assert_eq!(summary.failure, None);
    assert_eq!(summary.undisturbed + summary.disturbed, MOVES);
}

#[test]
fn every_fail_point_has_a_place_in_the_matrix() {
    assert!(crash::points().unwrap().len() > 50);
}
