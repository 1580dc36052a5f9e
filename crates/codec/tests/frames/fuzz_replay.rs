//! What the fuzzer is given to start with, and what it found, replayed without it.

#[path = "../../../../fuzz/src/frame_decode.rs"]
mod frame_decode;

use crate::common::{encode, id, literal, noise, text};
use longhaul_codec::{Compression, Decision};
use std::fs;

#[test]
fn every_seed_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/frame_decode");
    let mut seeds = 0;
    for entry in fs::read_dir(folder).unwrap() {
        frame_decode::run(&fs::read(entry.unwrap().path()).unwrap());
        seeds += 1;
    }
    assert!(seeds > 10, "{seeds}");
}

#[test]
fn real_frames_pass() {
    let reference = Decision::Reference {
        source: id(0, 7),
        digest: literal_digest(7),
    };
    for compression in [Compression::Raw, Compression::Lz4, Compression::Zstd(1)] {
        let blocks = [
            (id(0, 4), text(1), literal(&text(1))),
            (id(0, 5), noise(1), literal(&noise(1))),
            (id(0, 7), text(1), literal(&text(1))),
            (id(0, 8), [7; 4096], reference),
            (id(3, (1 << 32) - 1), [0; 4096], Decision::Zero),
        ];
        frame_decode::run(&encode(9, &blocks, compression).bytes);
    }
}

/// The digest of what the fuzz target's destination holds in a block, under its key.
fn literal_digest(block: u8) -> longhaul_codec::Digest {
    longhaul_codec::Hasher::new(longhaul_codec::DigestKey([42; 32])).digest(&[block; 4096])
}
