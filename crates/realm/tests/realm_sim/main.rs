//! A realm's hosts and servers on a virtual clock, by seed, with restarts, partitions, failing
//! disks and a server that somebody has broken into.
//!
//! `LONGHAUL_SEEDS=N` runs other than 60 seeds, `LONGHAUL_SEED=N` runs one and prints its trace,
//! `LONGHAUL_VARIANT=NAME` runs a broken variant.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod check;
mod evil;
mod operator;
mod run;
mod variant;
mod world;

use std::io::{self, Write};
use variant::Variant;
use world::World;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn say(text: &str) {
    assert!(writeln!(io::stderr(), "{text}").is_ok());
}

fn run(seed: u64, variant: Variant, traced: bool) -> World {
    let mut world = World::new(seed, variant, traced);
    world.run();
    world
}

fn print(seed: u64, variant: Variant) {
    let world = run(seed, variant, true);
    say(&format!("{:#?}\n{}", world.plan, world.trace.join("\n")));
    say(&format!("seed {seed}: {:?}", world.failure));
}

#[test]
fn nobody_becomes_or_stays_a_member_whatever_fails() {
    if let Some(seed) = setting("LONGHAUL_SEED") {
        let name = std::env::var("LONGHAUL_VARIANT").unwrap_or_default();
        let named = |variant: &&Variant| format!("{variant:?}") == name;
        let variant = Variant::BROKEN.iter().find(named).copied();
        return print(seed, variant.unwrap_or(Variant::Genuine));
    }
    let mut done = world::Done::default();
    let seeds = setting("LONGHAUL_SEEDS").unwrap_or(60);
    for seed in 0..seeds {
        let world = run(seed, Variant::Genuine, false);
        if let Some(failure) = world.failure {
            print(seed, Variant::Genuine);
            panic!("seed {seed}: {failure}; run it again with LONGHAUL_SEED={seed}");
        }
        done.add(&world.done);
    }
    say(&format!("{seeds} runs: {done:?}"));
    // The runs reach what they are for.
    let per_run = |count: u64| count * 2 >= seeds;
    assert!(per_run(done.removed) && per_run(done.joined) && per_run(done.granted));
    assert!(per_run(done.introduced) && per_run(done.crashes) && per_run(done.cut));
    assert!(done.refused > 0 && done.conflicts > 0 && done.forged > seeds);
}

#[test]
fn every_broken_variant_is_caught() {
    let mut missed = Vec::new();
    for variant in Variant::BROKEN {
        let seeds = setting("LONGHAUL_SEEDS").unwrap_or(60);
        let failed = |seed| run(seed, variant, false).failure.map(|text| (seed, text));
        match (0..seeds).find_map(failed) {
            Some((seed, failure)) => say(&format!("{variant:?}: seed {seed}: {failure}")),
            None => missed.push(variant),
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
