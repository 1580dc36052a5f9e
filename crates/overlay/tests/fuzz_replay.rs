//! Replays the fuzzer's seeds and its findings without the fuzzer.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../../../fuzz/src/overlay_datagram.rs"]
mod overlay_datagram;
#[path = "../../../fuzz/src/overlay_frame.rs"]
mod overlay_frame;

use proptest::prelude::*;
use std::fs;

fn seeds(name: &str) -> Vec<Vec<u8>> {
    let folder = format!("{}/../../fuzz/seeds/{name}", env!("CARGO_MANIFEST_DIR"));
    let entries = fs::read_dir(folder).unwrap();
    entries
        .map(|entry| fs::read(entry.unwrap().path()).unwrap())
        .collect()
}

#[test]
fn every_frame_passes() {
    let mut sum = overlay_frame::Done::default();
    for seed in seeds("overlay_frame") {
        let done = overlay_frame::run(&seed);
        sum.forwarded += done.forwarded;
        sum.outputs += done.outputs;
        sum.cut += done.cut;
        sum.short += done.short;
        sum.merged += done.merged;
    }
    assert!(sum.forwarded > 20 && sum.outputs > 10, "{sum:?}");
    assert!(sum.cut > 10 && sum.short > 3 && sum.merged > 10, "{sum:?}");
}

#[test]
fn every_datagram_passes() {
    let (mut authentic, mut held) = (0, 0);
    for seed in seeds("overlay_datagram") {
        let done = overlay_datagram::run(&seed);
        authentic += done.0;
        held += done.1;
    }
    assert!(authentic > 20 && held > 10, "{authentic} {held}");
}

proptest! {
    /// Seeds with random changes, as a fuzzer makes them.
    #[test]
    fn changed_seeds_pass(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
        cut in any::<prop::sample::Index>(),
    ) {
        for name in ["overlay_frame", "overlay_datagram"] {
            let seeds = seeds(name);
            let mut seed = seeds[which.index(seeds.len())].clone();
            if seed.is_empty() {
                continue;
            }
            for (at, byte) in &changes {
                let at = at.index(seed.len());
                seed[at] = *byte;
            }
            if changes.len().is_multiple_of(3) {
                seed.truncate(cut.index(seed.len()));
            }
            if name == "overlay_frame" {
                overlay_frame::run(&seed);
            } else {
                overlay_datagram::run(&seed);
            }
        }
    }
}
