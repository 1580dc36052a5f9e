//! Tests moves that are stopped, cut off, or lose one of their processes in any phase, end to end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, Stage, tiny};
use longhaul_api::{Outcome, Phase};
use longhaul_lab::guest::Chipset;
use std::time::{Duration, Instant};

const LINK: &str = "400mbit,4ms";
const BUSY: u64 = 500;
/// So slow that there is time for actions during the move.
const SLOW: [&str; 2] = ["--bandwidth", "40mbit"];

/// A cut that the move survives.
const CUT: Duration = Duration::from_secs(5);

#[test]
fn a_cancelled_move_leaves_the_guest_where_it_was() {
    let Some(stage) = Stage::new("cancel", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("stays", Chipset::Q35, "10.0", 1), BUSY);
    for phase in [Phase::Preparing, Phase::Precopy] {
        let mut moving = guest.migrate(&stage, 0, &SLOW);
        assert!(
            moving.wait_for_phase(phase, LIMIT),
            "{}",
            moving.so_far().why()
        );
        stage
            .product
            .agent(0)
            .unwrap()
            .run(&["cancel", "stays"])
            .unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert_eq!(
            finished.outcome,
            Some(Outcome::Aborted),
            "{}",
            finished.why()
        );
        assert_eq!(finished.exit_code, Some(130));
        guest.assert_runs_only_on(&stage, 0);
        guest.assert_nothing_on(&stage, 1);
    }
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}

#[test]
fn a_short_cut_is_ridden_out() {
    let Some(stage) = Stage::new("short cut", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("patient", Chipset::Q35, "10.0", 1), BUSY);
    let mut moving = guest.migrate(&stage, 0, &["--verify", SLOW[0], SLOW[1]]);
    assert!(
        moving.wait_for_phase(Phase::Precopy, LIMIT),
        "{}",
        moving.so_far().why()
    );
    let link = stage.lab.link(0, 1).unwrap();
    let cut_at = Instant::now();
    link.cut(CUT).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(cut_at.elapsed() > CUT, "it ended before the cut did");
    assert!(
        link.stats().unwrap().forth.dropped_cut > 0,
        "nothing was lost"
    );
    guest.assert_moved(&stage, 0, &finished);
    guest.end(&stage);
}

#[test]
fn a_cut_longer_than_patience_leaves_the_guest_where_it_was() {
    let Some(stage) = Stage::new("long cut", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut guest = stage.boot(&tiny("cut-off", Chipset::Q35, "10.0", 1), BUSY);
    let mut moving = guest.migrate(&stage, 0, &["--patience", "3s", SLOW[0], SLOW[1]]);
    assert!(
        moving.wait_for_phase(Phase::Precopy, LIMIT),
        "{}",
        moving.so_far().why()
    );
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(3600)).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert_eq!(
        finished.outcome,
        Some(Outcome::Failed),
        "{}",
        finished.why()
    );
    assert_eq!(finished.exit_code, Some(1));
    guest.assert_runs_only_on(&stage, 0);
    // The destination cleans up by itself: the link is still cut.
    guest.assert_nothing_on(&stage, 1);
    link.heal().unwrap();
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}
