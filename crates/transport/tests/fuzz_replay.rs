//! Runs the fuzz target on its seeds (`fuzz/seeds/opening`), without a nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/opening.rs"]
mod opening;

#[test]
fn openings() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/opening");
    let mut seeds = 0;
    for seed in std::fs::read_dir(folder).unwrap() {
        let data = std::fs::read(seed.unwrap().path()).unwrap();
        opening::run(&data);
        for cut in 0..data.len() {
            opening::run(&data[..cut]);
            let mut flipped = data.clone();
            flipped[cut] ^= 0x41;
            opening::run(&flipped);
        }
        seeds += 1;
    }
    assert!(seeds > 10, "{seeds}");
}
