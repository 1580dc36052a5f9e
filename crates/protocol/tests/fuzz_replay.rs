//! Runs the fuzz target on its seeds (`fuzz/seeds/message`), so that it needs no nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/message.rs"]
mod message;

#[test]
fn messages() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/message");
    let mut seeds = 0;
    for seed in std::fs::read_dir(folder).unwrap() {
        let data = std::fs::read(seed.unwrap().path()).unwrap();
        message::run(&data);
        for cut in 0..data.len() {
            message::run(&data[..cut]);
            let mut flipped = data.clone();
            flipped[cut] ^= 0x41;
            message::run(&flipped);
        }
        seeds += 1;
    }
    assert!(seeds > 10, "{seeds}");
}
