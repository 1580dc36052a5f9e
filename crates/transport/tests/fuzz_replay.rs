//! Runs the fuzz targets on their seeds (`fuzz/seeds`), without a nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/datagram.rs"]
mod datagram;
#[path = "../../../fuzz/src/opening.rs"]
mod opening;
#[path = "../../../fuzz/src/rendezvous_tcp.rs"]
mod rendezvous_tcp;

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
fn openings() {
    replay("opening", opening::run);
}

#[test]
fn datagrams() {
    replay("datagram", datagram::run);
}

#[test]
fn frames_over_tcp() {
    replay("rendezvous_tcp", rendezvous_tcp::run);
}
