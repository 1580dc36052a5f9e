//! Runs the fuzz targets on their seeds (`fuzz/seeds`), without a nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/guest_texts.rs"]
mod guest_texts;
#[path = "../../../fuzz/src/page_server.rs"]
mod page_server;

/// Runs a target on each of its seeds, cut and changed at every byte.
fn replay(target: &str, run: fn(&[u8])) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds");
    let mut seeds = 0;
    for seed in std::fs::read_dir(format!("{folder}/{target}")).unwrap() {
        let data = std::fs::read(seed.unwrap().path()).unwrap();
        run(&data);
        for cut in 0..data.len() {
            run(&data[..cut]);
            let mut flipped = data.clone();
            flipped[cut] ^= 0x41;
            run(&flipped);
        }
        seeds += 1;
    }
    assert!(seeds > 10, "{seeds}");
}

#[test]
fn guest_texts() {
    replay("guest_texts", guest_texts::run);
}

#[test]
fn page_server() {
    replay("page_server", page_server::run);
}
