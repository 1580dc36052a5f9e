//! Cuts the power below journals, rights, masks of arriving disks and tracked writes, 100000 times:
//! everything that was acknowledged must be there afterwards. Then suppresses one sync after the
//! other, which each time must be detected.
//!
//! `LONGHAUL_SEED=N` begins with the script of that seed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    missing_docs,
    unreachable_pub
)]

mod masks;
mod random;
mod script;
mod simulated;
mod tracking;

use std::collections::BTreeSet;
use std::time::Instant;

const CUTS: u64 = 100_000;
const SEED: u64 = 20_260_801;
/// Every sync that the code requests.
const SYNCS: [&str; 14] = [
    "the folder's name",
    "the journal's name",
    "the name that was found",
    "the record",
    "the records that were found",
    "the right",
    "the right's name",
    "the rights that were found",
    "the masks",
    "the masks' name",
    "the masks that changed",
    "the tracked writes",
    "the copied image",
    "the round that was found",
];

#[derive(Default)]
struct Run {
    cuts: u64,
    scripts: u64,
    syncs: BTreeSet<&'static str>,
    wrong: Vec<(u64, String)>,
}

/// Runs scripts until there were enough cuts, or the limit of failures is reached.
fn run(seed: u64, suppressed: Option<&'static str>, wrong_max: usize) -> Run {
    let mut run = Run::default();
    while run.cuts < CUTS && run.wrong.len() < wrong_max {
        let seed = seed.wrapping_add(run.scripts);
        let outcome = match run.scripts % 5 {
            3 => masks::run(seed, suppressed),
            4 => tracking::run(seed, suppressed),
            _ => script::run(seed, suppressed),
        };
        run.scripts += 1;
        run.cuts += outcome.cuts;
        run.syncs.extend(outcome.syncs);
        run.wrong.extend(outcome.wrong.map(|wrong| (seed, wrong)));
    }
    run
}

fn first_words(wrong: &str) -> String {
    wrong
        .lines()
        .take(1)
        .flat_map(|line| line.chars().take(100))
        .collect()
}

fn main() {
    let seed = std::env::var("LONGHAUL_SEED").map_or(SEED, |seed| seed.parse().unwrap());
    let began = Instant::now();
    let all = run(seed, None, 5);
    println!(
        "power cuts beneath journals, rights, masks and tracked writes: {} in {} scripts from seed \
         {seed}, {:.1} s",
        all.cuts,
        all.scripts,
        began.elapsed().as_secs_f64()
    );
    for (seed, wrong) in &all.wrong {
        println!("  wrong with seed {seed}: {wrong}");
    }
    assert!(all.wrong.is_empty(), "what was acknowledged was lost");
    assert_eq!(all.syncs, BTreeSet::from(SYNCS), "the syncs asked for");
    let mut unmissed = Vec::new();
    for sync in SYNCS {
        let without = run(seed, Some(sync), 1);
        match without.wrong.first() {
            Some((seed, wrong)) => println!(
                "  without the sync of {sync}: cut {} goes wrong (seed {seed}): {}",
                without.cuts,
                first_words(wrong)
            ),
            None => {
                println!("  without the sync of {sync}: nothing goes wrong");
                unmissed.push(sync);
            }
        }
    }
    assert!(
        unmissed.is_empty(),
        "nothing shows what {unmissed:?} are for"
    );
}
