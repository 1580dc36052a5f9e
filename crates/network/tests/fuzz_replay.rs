//! Runs the fuzz targets on their seeds (`fuzz/seeds`), without a nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/reach.rs"]
mod reach;

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
