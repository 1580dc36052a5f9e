//! Runs the fuzz targets on their seeds (`fuzz/seeds`), without a nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/reach.rs"]
mod reach;
#[path = "../../../fuzz/src/realm_member.rs"]
mod realm_member;

use std::path::Path;

#[test]
fn signals_and_probes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/reach");
    let mut seeds = 0;
    for seed in std::fs::read_dir(folder).unwrap() {
        let data = std::fs::read(seed.unwrap().path()).unwrap();
        reach::run(&data);
        for cut in 0..data.len() {
            reach::run(&data[..cut]);
            let mut flipped = data.clone();
            flipped[cut] ^= 0x41;
            reach::run(&flipped);
        }
        seeds += 1;
    }
    assert!(seeds > 10, "{seeds}");
}

#[test]
fn seeds_of_member_files_are_answered_damaged_or_not() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/realm_member");
    let mut seen = 0;
    for entry in std::fs::read_dir(seeds).unwrap() {
        let data = std::fs::read(entry.unwrap().path()).unwrap();
        realm_member::run(&data);
        for cut in 0..data.len() {
            realm_member::run(&data[..cut]);
            let mut flipped = data.clone();
            flipped[cut] ^= 0x41;
            realm_member::run(&flipped);
        }
        seen += 1;
    }
    assert!(seen >= 4, "{seen}");
}
