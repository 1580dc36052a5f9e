//! Pairs of hosts behind NATs of every kind, on a virtual clock, by seed.
//!
//! `LONGHAUL_SEEDS=N` runs other than 4,000 seeds, `LONGHAUL_SEED=N` runs one and prints its
//! trace, `LONGHAUL_VARIANT=NAME` runs a broken variant.

mod model;
mod nat;
mod net;
mod plan;
mod random;
mod run;
mod variant;
mod world;

use model::{Expected, expected};
use nat::Spec;
use plan::{BLOCKED, FULL_CONE, PORT_RESTRICTED, Plan, RESTRICTED, SEQUENTIAL, SYMMETRIC, TRAP};
use random::Rng;
use run::{run, run_plan};
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use variant::Variant;

const SEEDS: u64 = 4000;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs seeds until one fails, and returns the first one.
fn first_failure(variant: Variant, seeds: u64) -> Option<(u64, String)> {
    let next = AtomicU64::new(0);
    let failed = AtomicU64::new(u64::MAX);
    let threads = thread::available_parallelism().map_or(2, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds || failed.load(Ordering::Relaxed) < seed {
                        return;
                    }
                    if run(seed, variant, false).failure.is_some() {
                        failed.fetch_min(seed, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let seed = failed.into_inner();
    (seed != u64::MAX).then(|| (seed, run(seed, variant, false).failure.unwrap_or_default()))
}

fn print(seed: u64, variant: Variant) {
    let world = run(seed, variant, true);
    let lines = world.trace.unwrap_or_default().join("\n");
    say(&format!("{:#?}\n{lines}", world.plan));
}

fn say(text: &str) {
    let shown = writeln!(io::stderr(), "{text}");
    assert!(shown.is_ok());
}

#[test]
fn pairs_become_what_their_nats_allow() {
    let name = std::env::var("LONGHAUL_VARIANT").unwrap_or_default();
    let named = |variant: &&Variant| format!("{variant:?}") == name;
    let variant = Variant::BROKEN.iter().find(named).copied();
    let variant = variant.unwrap_or(Variant::Genuine);
    if let Some(seed) = setting("LONGHAUL_SEED") {
        return print(seed, variant);
    }
    let seeds = setting("LONGHAUL_SEEDS").unwrap_or(SEEDS);
    if let Some((seed, failure)) = first_failure(variant, seeds) {
        print(seed, variant);
        panic!("seed {seed}: {failure}; run it again with LONGHAUL_SEED={seed}");
    }
}

#[test]
fn every_broken_variant_is_caught() {
    let mut missed = Vec::new();
    for variant in Variant::BROKEN {
        match first_failure(variant, setting("LONGHAUL_SEEDS").unwrap_or(SEEDS)) {
            Some((seed, failure)) => say(&format!("{variant:?}: seed {seed}: {failure}")),
            None => missed.push(variant),
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

/// The table of NATs in `docs/paths.md`, without any fault.
#[test]
fn the_table_of_nats_holds() {
    let kinds: [(&str, Option<Spec>); 8] = [
        ("none", None),
        ("full cone", Some(FULL_CONE)),
        ("restricted", Some(RESTRICTED)),
        ("port-restricted", Some(PORT_RESTRICTED)),
        ("port-restricted, trap", Some(TRAP)),
        ("symmetric, random", Some(SYMMETRIC)),
        ("symmetric, sequential", Some(SEQUENTIAL)),
        ("UDP blocked", Some(BLOCKED)),
    ];
    for (a_name, a) in kinds {
        for (b_name, b) in kinds {
            let plan = Plan::quiet(a, b);
            let wanted = expected(&plan, plan.at);
            let world = run_plan(plan, Rng(7), Variant::Genuine, true);
            let shown = || world.trace.clone().unwrap_or_default().join("\n");
            assert_eq!(world.failure, None, "{a_name} - {b_name}\n{}", shown());
            let why = world.hosts[0].paths.why(&world.hosts[0].local);
            say(&format!("{a_name} - {b_name}: {wanted:?}, is {why}"));
        }
    }
}

/// The runs reach what they are for.
#[test]
fn pairs_are_direct_and_relayed_and_search() {
    let seeds = 400;
    let (mut direct, mut relayed, mut searched, mut datagrams) = (0, 0, 0, 0);
    for seed in 0..seeds {
        let world = run(seed, Variant::Genuine, false);
        let at = [0, 1].map(|host| world.net.places[host].site);
        let wanted = expected(&world.plan, at);
        direct += u32::from(wanted == Expected::Direct);
        relayed += u32::from(wanted == Expected::Relayed);
        searched += u32::from(world.searched);
        datagrams += world.datagrams;
    }
    say(&format!(
        "of {seeds} runs {direct} become direct, {relayed} relayed, {searched} search; {} \
         datagrams each",
        datagrams / seeds
    ));
    assert!(direct > 100 && relayed > 60 && searched > 30);
}
