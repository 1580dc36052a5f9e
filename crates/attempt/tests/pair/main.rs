//! Both ends of an attempt against each other, on a virtual clock, by seed.
//!
//! `LONGHAUL_SEEDS=N` runs other than 200,000 seeds, `LONGHAUL_SEED=N` runs one and prints its
//! trace, `LONGHAUL_VARIANT=NAME` runs a broken variant.

mod destination;
mod faults;
mod memory;
mod run;
mod source;
mod variant;
mod world;

use run::run;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use variant::Variant;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs seeds until one fails, and returns it.
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
fn both_ends_agree_whatever_fails() {
    if let Some(seed) = setting("LONGHAUL_SEED") {
        let name = std::env::var("LONGHAUL_VARIANT").unwrap_or_default();
        let named = |variant: &&Variant| format!("{variant:?}") == name;
        let variant = Variant::BROKEN.iter().find(named).copied();
        return print(seed, variant.unwrap_or(Variant::Genuine));
    }
    let seeds = setting("LONGHAUL_SEEDS").unwrap_or(200_000);
    if let Some((seed, failure)) = first_failure(Variant::Genuine, seeds) {
        print(seed, Variant::Genuine);
        panic!("seed {seed}: {failure}; run it again with LONGHAUL_SEED={seed}");
    }
}

#[test]
fn every_broken_variant_is_caught() {
    let mut missed = Vec::new();
    for variant in Variant::BROKEN {
        match first_failure(variant, setting("LONGHAUL_SEEDS").unwrap_or(200_000)) {
            Some((seed, failure)) => say(&format!("{variant:?}: seed {seed}: {failure}")),
            None => missed.push(variant),
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

/// The runs reach what they are for.
#[test]
fn guests_move_and_stay_and_return() {
    let seeds = 2000;
    let mut moved = 0;
    let mut stayed = 0;
    let mut restarted = 0;
    let mut again = 0;
    let mut arbitrated = [0; 2];
    let mut memory = [0; 4];
    for seed in 0..seeds {
        let world = run(seed, Variant::Genuine, false);
        moved += u32::from(world.running(world::Side::B));
        stayed += u32::from(world.running(world::Side::A));
        restarted += u32::from(world.hosts.iter().any(|host| host.agent > 1));
        again += u32::from(world.attempts > 1);
        arbitrated[0] += world.arbitrated[0];
        arbitrated[1] += world.arbitrated[1];
        let seen = world.seen;
        let of_memory = [seen.followed, seen.replaced, seen.from_file, seen.given_up];
        for (count, seen) in memory.iter_mut().zip(of_memory) {
            *count += u32::from(seen);
        }
    }
    let [followed, replaced, from_file, given_up] = memory;
    say(&format!(
        "of {seeds} runs {moved} moved, {stayed} stayed, {restarted} restarted an agent, {again} \
         tried again; the arbiter let {} move and gave {} back",
        arbitrated[1], arbitrated[0]
    ));
    say(&format!(
        "memory followed in {followed} runs; {replaced} replaced a page server, {from_file} read \
         a memory file, {given_up} gave memory up"
    ));
    assert!(followed > 300 && replaced > 20 && from_file > 0 && given_up > 20);
    assert!(arbitrated[1] > 200 && arbitrated[0] > 2);
    assert!(moved > 600 && stayed > 200 && restarted > 600 && again > 100);
}
