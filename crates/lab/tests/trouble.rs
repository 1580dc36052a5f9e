//! End to end: moves that are stopped, cut off, or lose one of their processes at any phase.
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
use longhaul_lab::process::{kill_all, wait_until};
use std::time::{Duration, Instant};

const LINK: &str = "400mbit,4ms";
const BUSY: u64 = 500;
/// So slow that there is time to do something meanwhile.
const SLOW: [&str; 2] = ["--bandwidth", "40mbit"];

/// A cut that is ridden out.
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
    // The destination clears up by itself: the link is still cut.
    guest.assert_nothing_on(&stage, 1);
    link.heal().unwrap();
    guest.move_verified(&stage, 0);
    guest.end(&stage);
}

#[test]
fn no_kill_makes_two_guests_or_none() {
    let Some(mut stage) = Stage::new("kills", ["10.0", "10.0"], LINK) else {
        return;
    };
    let mut number = 0;
    let mut boot = |stage: &Stage| {
        number += 1;
        stage.boot(
            &tiny(&format!("kill-{number}"), Chipset::Q35, "10.0", 1),
            BUSY,
        )
    };
    let (mut guest, mut at) = (boot(&stage), 0);
    let began = Instant::now();
    for victim in Victim::ALL {
        for phase in Phase::ALL {
            eprintln!(
                "killing {victim:?} at {phase}; {} is on host {at}",
                guest.name
            );
            let place = kill(&mut stage, &mut guest, at, victim, phase);
            eprintln!("{} s: {place:?}", began.elapsed().as_secs());
            let allowed = allowed(victim, phase);
            assert!(
                allowed.contains(&place),
                "{victim:?} killed at {phase}: {place:?}"
            );
            match place {
                Place::Source => {
                    guest.assert_runs_only_on(&stage, at);
                    guest.assert_nothing_on(&stage, 1 - at);
                    guest.move_verified(&stage, at);
                    at = 1 - at;
                }
                Place::Destination => {
                    guest.assert_runs_only_on(&stage, 1 - at);
                    guest.assert_nothing_on(&stage, at);
                    at = 1 - at;
                }
                Place::Nowhere => {
                    let owner = if victim == Victim::SourceQemu {
                        at
                    } else {
                        1 - at
                    };
                    guest.assert_nothing_on(&stage, 1 - owner);
                    (guest, at) = (boot(&stage), 0);
                }
            }
        }
    }
    guest.end(&stage);
}

/// What is killed, as a crash would end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    SourceAgent,
    DestinationAgent,
    SourceQemu,
    DestinationQemu,
}

impl Victim {
    const ALL: [Self; 4] = [
        Self::SourceAgent,
        Self::DestinationAgent,
        Self::SourceQemu,
        Self::DestinationQemu,
    ];
}

/// Where the guest is in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Source,
    Destination,
    Nowhere,
}

/// Where the guest may be in the end. What was killed dies some time after the phase was seen, so
/// the short phases allow for what comes after them.
fn allowed(victim: Victim, phase: Phase) -> Vec<Place> {
    let places: &[Place] = match phase {
        // An agent that is back before it was needed was not missed.
        Phase::Preparing if victim == Victim::DestinationAgent => {
            &[Place::Source, Place::Destination]
        }
        Phase::Preparing | Phase::Precopy => &[Place::Source],
        Phase::Stopping | Phase::Loading | Phase::Verifying | Phase::HandingOver => {
            &[Place::Source, Place::Destination]
        }
        Phase::Finishing => &[Place::Destination],
    };
    let dies_with_victim = |place: &Place| match victim {
        Victim::SourceAgent | Victim::DestinationAgent => *place,
        Victim::SourceQemu if *place == Place::Source => Place::Nowhere,
        Victim::DestinationQemu if *place == Place::Destination => Place::Nowhere,
        Victim::SourceQemu | Victim::DestinationQemu => *place,
    };
    places.iter().map(dies_with_victim).collect()
}

/// Moves the guest, kills the victim when the phase is seen, starts a killed agent again, and says
/// where the guest is when all is over.
fn kill(stage: &mut Stage, guest: &mut Running, at: usize, victim: Victim, phase: Phase) -> Place {
    let source_qemu = stage.qemus(at, &guest.name);
    let mut words = vec!["--verify", "--patience", "2s"];
    if phase <= Phase::Precopy {
        words.extend(SLOW);
    }
    let mut moving = guest.migrate(stage, at, &words);
    moving.wait_for_phase(phase, LIMIT);
    match victim {
        Victim::SourceAgent => stage.product.agent_mut(at).unwrap().kill().unwrap(),
        Victim::DestinationAgent => stage.product.agent_mut(1 - at).unwrap().kill().unwrap(),
        Victim::SourceQemu => kill_all(&source_qemu).unwrap(),
        Victim::DestinationQemu => {
            // It is started while the move is prepared. What was seen is killed, not what a second
            // look finds: a process has no command line for the moment in which it becomes QEMU.
            let mut there = Vec::new();
            let seen = wait_until(LIMIT, || {
                there = stage.qemus(1 - at, &guest.name);
                !there.is_empty()
            });
            assert!(seen, "no QEMU at the destination");
            kill_all(&there).unwrap();
        }
    }
    match victim {
        Victim::SourceAgent => stage.restart(&[at]),
        Victim::DestinationAgent => stage.restart(&[1 - at]),
        Victim::SourceQemu | Victim::DestinationQemu => {}
    }
    // Whatever it said: where the guest is, counts.
    moving.finish(LIMIT).unwrap();
    guest.settled(stage);
    place(stage, guest, at)
}

fn place(stage: &Stage, guest: &Running, at: usize) -> Place {
    let mut place = None;
    let found = wait_until(LIMIT, || {
        let heard = guest.heard(stage);
        assert!(heard.len() < 2, "{} runs twice", guest.name);
        let gone = || (0..2).all(|host| stage.qemus(host, &guest.name).is_empty());
        place = match heard.first() {
            Some(host) if *host == at => Some(Place::Source),
            Some(_) => Some(Place::Destination),
            None => gone().then_some(Place::Nowhere),
        };
        place.is_some()
    });
    assert!(found, "{} neither runs nor is gone", guest.name);
    place.unwrap()
}
