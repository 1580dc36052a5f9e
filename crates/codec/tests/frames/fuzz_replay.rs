//! Replays the fuzzer's seeds and its findings without the fuzzer.

#[path = "../../../../fuzz/src/frame_decode.rs"]
mod frame_decode;
#[path = "../../../../fuzz/src/frame_exchange.rs"]
mod frame_exchange;
#[path = "../../../../fuzz/src/frame_order.rs"]
mod frame_order;

use crate::common::{encode_with, id, literal, noise, text};
use longhaul_codec::{Compression, Decision, Encoder};
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
fn every_exchange_passes() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/seeds/frame_exchange"
    );
    let (mut built_on, mut rejected) = (0, 0);
    for entry in fs::read_dir(folder).unwrap() {
        let exchange = frame_exchange::run(&fs::read(entry.unwrap().path()).unwrap());
        built_on += exchange.0;
        rejected += exchange.1;
    }
    assert!(built_on > 20, "{built_on}");
    assert!(rejected >= 3, "{rejected}");
}

#[test]
fn every_order_passes() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/frame_order");
    let (mut applied, mut refused) = (0, 0);
    for entry in fs::read_dir(folder).unwrap() {
        let order = frame_order::run(&fs::read(entry.unwrap().path()).unwrap());
        applied += order.0;
        refused += usize::from(order.1);
    }
    assert!(applied > 50, "{applied}");
    assert!(refused >= 3, "{refused}");
}

#[test]
fn real_frames_pass() {
    let reference = Decision::Reference {
        source: id(0, 7),
        digest: held(7),
    };
    let mut encoder = Encoder::with_versions(1 << 20);
    encoder.keep_version(id(0, 10), &held(10), &[10; 4096]);
    let mut changed = [10; 4096];
    changed[77] = 7;
    let delta = Decision::Changed {
        digest: literal_digest(&changed),
        base: held(10),
    };
    for compression in [
        Compression::Raw,
        Compression::Lz4,
        Compression::Zstd(1),
        Compression::ZstdLong(1),
    ] {
        let blocks = [
            (id(0, 4), text(1), literal(&text(1))),
            (id(0, 5), noise(1), literal(&noise(1))),
            (id(0, 7), text(1), literal(&text(1))),
            (id(0, 8), [7; 4096], reference),
            (id(0, 10), changed, delta),
            (id(3, (1 << 32) - 1), [0; 4096], Decision::Zero),
        ];
        encoder.keep_version(id(0, 10), &held(10), &[10; 4096]);
        encoder.forget_frames();
        let frame = encode_with(&mut encoder, 9, &blocks, compression);
        assert_eq!(frame.deltas, 1);
        frame_decode::run(&frame.bytes);
    }
}

/// Returns the digest of a block in the fuzz target's destination.
fn held(block: u8) -> longhaul_codec::Digest {
    literal_digest(&[block; 4096])
}

/// Returns a digest under the fuzz target's key.
fn literal_digest(content: &[u8; 4096]) -> longhaul_codec::Digest {
    longhaul_codec::Hasher::new(longhaul_codec::DigestKey([42; 32])).digest(content)
}
