//! Lives of parcels by seed: exported while the disks are written, interrupted, topped up, shipped,
//! damaged and imported. Devices and the destination are in memory.
//!
//! `LONGHAUL_PARCEL_SEED=N` lives one life and says what happens in it.

mod bench;
mod cases;
pub(crate) mod dice;
mod life;
pub(crate) mod places;
mod ship;
mod source;

use life::Life;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How often something happened in many lives: what never happens tests nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) lives: u64,
    pub(crate) killed: u64,
    pub(crate) failed: u64,
    pub(crate) given_up: u64,
    pub(crate) sealed: u64,
    pub(crate) misplaced: u64,
    pub(crate) damaged: u64,
    pub(crate) shipped: u64,
    pub(crate) imported: u64,
    pub(crate) recovered: u64,
    pub(crate) lost: u64,
    pub(crate) older: u64,
    pub(crate) not_opened: u64,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        let Self {
            lives,
            killed,
            failed,
            given_up,
            sealed,
            misplaced,
            damaged,
            shipped,
            imported,
            recovered,
            lost,
            older,
            not_opened,
        } = self;
        *lives += other.lives;
        *killed += other.killed;
        *failed += other.failed;
        *given_up += other.given_up;
        *sealed += other.sealed;
        *misplaced += other.misplaced;
        *damaged += other.damaged;
        *shipped += other.shipped;
        *imported += other.imported;
        *recovered += other.recovered;
        *lost += other.lost;
        *older += other.older;
        *not_opened += other.not_opened;
    }
}

fn live(seed: u64, says: bool) -> Counts {
    let lived = catch_unwind(AssertUnwindSafe(|| Life::new(seed, says).live()));
    lived.unwrap_or_else(|panic| {
        eprintln!("seed {seed}: to repeat it alone: LONGHAUL_PARCEL_SEED={seed}");
        resume_unwind(panic)
    })
}

/// Lives the lives of some seeds, or as many of them as there is time for.
fn live_all(seeds: Range<u64>, within: Option<Duration>) -> Counts {
    let (next, end) = (
        AtomicU64::new(seeds.start),
        within.map(|it| Instant::now() + it),
    );
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let work = || {
        let mut counts = Counts::default();
        while end.is_none_or(|end| Instant::now() < end) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                break;
            }
            counts.add(&live(seed, false));
        }
        counts
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut all = Counts::default();
        for worker in workers {
            let counts = worker.join().unwrap_or_else(|panic| resume_unwind(panic));
            all.add(&counts);
        }
        all
    })
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

#[test]
fn parcels_live_through_anything() {
    if let Some(seed) = number("LONGHAUL_PARCEL_SEED") {
        live(seed, true);
        return;
    }
    let counts = live_all(0..300, None);
    eprintln!("{counts:?}");
    let Counts {
        lives,
        killed,
        failed,
        given_up,
        sealed,
        misplaced,
        damaged,
        shipped,
        imported,
        recovered,
        lost,
        older,
        not_opened,
    } = counts;
    assert_eq!(lives, 300);
    let all = [
        killed, failed, given_up, sealed, misplaced, damaged, shipped, imported, recovered, lost,
        older, not_opened,
    ];
    assert!(all.iter().all(|count| *count > 0), "{all:?}");
}

#[test]
#[ignore = "as long as LONGHAUL_PARCEL_SECONDS says, from LONGHAUL_PARCEL_FROM on"]
fn parcels_live_for_long() {
    let seconds = number("LONGHAUL_PARCEL_SECONDS").unwrap_or(60);
    let from = number("LONGHAUL_PARCEL_FROM").unwrap_or(1_000_000);
    let counts = live_all(from..u64::MAX, Some(Duration::from_secs(seconds)));
    eprintln!("from {from}: {counts:?}");
}

#[test]
fn an_import_says_what_room_it_needs() {
    // The first seeds whose devices are not full.
    let lives = (0..20).map(|seed| Life::new(seed, false).needs_room());
    assert!(lives.filter(|needs| *needs).count() > 5);
}
