//! Tests frames as a caller sees them: encoded content is decoded unchanged, and a refused frame
//! changes nothing.

use crate::common::{
    Block, KEY, MemorySink, REGIONS, digest, encode, encode_with, id, literal, noise, text,
};
use longhaul_codec::{
    Compression, Decision, DecodeError, Decoder, EncodeError, Encoder, FRAME_VERSION, FrameError,
    Limits, Outcome,
};
use longhaul_protocol::limits::{FRAME_BLOCKS_MAX, FRAME_BYTES_MAX};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};
use proptest::prelude::*;

const ALL: [Compression; 6] = [
    Compression::Raw,
    Compression::Lz4Fast,
    Compression::Lz4,
    Compression::Zstd(-1),
    Compression::Zstd(3),
    Compression::ZstdLong(3),
];
const ZERO: Block = [0; BLOCK_SIZE];

fn decode(frame: &[u8], sink: &mut MemorySink) -> Result<Outcome, FrameError> {
    match Decoder::new(KEY).decode(frame, &Limits::default(), sink) {
        Ok(outcome) => Ok(outcome),
        Err(DecodeError::Frame(error)) => Err(error),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn each_decision_arrives() {
    for compression in ALL {
        let mut sink = MemorySink::new();
        sink.set(id(7, 39), &text(1), 1);
        sink.set(id(0, 3), &noise(3), 1);
        let reference = Decision::Reference {
            source: id(7, 39),
            digest: digest(&text(1)),
        };
        let frame = encode(
            2,
            &[
                (id(0, 0), text(2), literal(&text(2))),
                (id(0, 1), noise(1), literal(&noise(1))),
                (id(0, 2), text(2), literal(&text(2))),
                (id(0, 3), ZERO, Decision::Zero),
                (id(0, 4), noise(9), Decision::Skip),
                (id(7, 0), text(1), reference),
            ],
            compression,
        );
        assert_eq!(frame.blocks, 5);
        assert_eq!(frame.payload_bytes, 2 * BLOCK_SIZE, "the copy travels once");
        assert_eq!(frame.compression, compression);
        let outcome = decode(&frame.bytes, &mut sink).unwrap();
        assert_eq!(
            outcome,
            Outcome {
                seq: 2,
                applied: 5,
                stale: 0,
                rejected: vec![]
            }
        );
        assert_eq!(sink.applies, 1);
        assert_eq!(sink.content(id(0, 0)), text(2));
        assert_eq!(sink.content(id(0, 1)), noise(1));
        assert_eq!(sink.content(id(0, 2)), text(2));
        assert_eq!(sink.content(id(0, 3)), ZERO);
        assert_eq!(sink.content(id(0, 4)), ZERO);
        assert_eq!(sink.content(id(7, 0)), text(1));
    }
}

#[test]
fn consecutive_blocks_are_one_entry_and_one_write() {
    let blocks: Vec<_> = (0..64)
        .map(|block| (id(0, block), noise(block), literal(&noise(block))))
        .collect();
    let frame = encode(1, &blocks, Compression::Raw);
    assert_eq!(frame.bytes.len(), 20 + 4 + 64 * BLOCK_SIZE);
    let mut sink = MemorySink::new();
    decode(&frame.bytes, &mut sink).unwrap();
    assert_eq!(sink.writes, 1);

    let zeros: Vec<_> = (0..64)
        .map(|block| (id(0, block), ZERO, Decision::Zero))
        .collect();
    assert_eq!(encode(2, &zeros, Compression::Zstd(1)).bytes.len(), 24);

    // A run of references to blocks that were just written, read and written at once.
    let reference = |block| Decision::Reference {
        source: id(0, block),
        digest: digest(&noise(block)),
    };
    let copies: Vec<_> = (0..30)
        .map(|block| (id(7, block), noise(block), reference(block + 10)))
        .collect();
    let copies = copies
        .into_iter()
        .map(|(id, _, d)| (id, noise(id.block + 10), d));
    let frame = encode(3, &copies.collect::<Vec<_>>(), Compression::Zstd(1));
    assert_eq!(frame.bytes.len(), 20 + 6 + 30 * 16);
    let mut sink_writes = sink.clone();
    assert_eq!(decode(&frame.bytes, &mut sink_writes).unwrap().applied, 30);
    assert_eq!(sink_writes.writes, sink.writes + 1);
    assert_eq!(sink_writes.content(id(7, 29)), noise(39));
}

#[test]
fn incompressible_literals_are_stored_raw() {
    for compression in &ALL[..5] {
        let frame = encode(1, &[(id(0, 5), noise(5), literal(&noise(5)))], *compression);
        assert_eq!(frame.compression, Compression::Raw);
        assert_eq!(frame.stored_bytes, BLOCK_SIZE);
    }
}

#[test]
fn what_is_older_than_the_destination_is_left_out() {
    let mut sink = MemorySink::new();
    sink.set(id(0, 1), &noise(8), 9);
    let contents = [text(1), text(2), text(3)];
    let blocks: Vec<_> = (0..3)
        .map(|b| {
            (
                id(0, b),
                contents[b as usize],
                literal(&contents[b as usize]),
            )
        })
        .collect();
    let frame = encode(5, &blocks, Compression::Lz4);
    let outcome = decode(&frame.bytes, &mut sink).unwrap();
    assert_eq!(
        outcome,
        Outcome {
            seq: 5,
            applied: 2,
            stale: 1,
            rejected: vec![]
        }
    );
    assert_eq!(sink.content(id(0, 0)), text(1));
    assert_eq!(sink.content(id(0, 1)), noise(8));
    assert_eq!(sink.content(id(0, 2)), text(3));
    // The same frame again: nothing remains to be applied.
    let outcome = decode(&frame.bytes, &mut sink).unwrap();
    assert_eq!((outcome.applied, outcome.stale, sink.applies), (0, 3, 1));
}

#[test]
fn a_reference_that_does_not_hold_is_rejected_and_the_rest_applied() {
    let mut sink = MemorySink::new();
    for block in 0..10 {
        sink.set(id(7, block), &text(block), 1);
    }
    sink.set(id(7, 3), &noise(3), 2);
    sink.set(id(7, 4), &noise(4), 2);
    sink.unreadable = Some(id(7, 8));
    let reference = |block| Decision::Reference {
        source: id(7, block),
        digest: digest(&text(block)),
    };
    let blocks: Vec<_> = (0..10)
        .map(|block| (id(0, 100 + block), text(block), reference(block)))
        .collect();
    let frame = encode(3, &blocks, Compression::Raw);
    let outcome = decode(&frame.bytes, &mut sink).unwrap();
    let region = RegionId(0);
    let rejected = vec![
        (region, BlockRange::new(103, 2)),
        (region, BlockRange::new(108, 1)),
    ];
    assert_eq!(
        outcome,
        Outcome {
            seq: 3,
            applied: 7,
            stale: 0,
            rejected
        }
    );
    assert_eq!(sink.content(id(0, 102)), text(2));
    assert_eq!(
        sink.blocks.get(&id(0, 103)),
        None,
        "still open for an older version"
    );
    assert_eq!(sink.content(id(0, 105)), text(5));
}

#[test]
fn what_another_guest_holds_is_taken_where_it_holds() {
    let (other, stranger) = (MigrationId([1; 8]), MigrationId([2; 8]));
    let mut sink = MemorySink::new();
    for block in 0..4 {
        sink.shared.insert((other, id(3, block)), text(block));
    }
    // The other guest has changed the block.
    sink.shared.insert((other, id(3, 2)), noise(2));
    let shared = |migration, block| Decision::Shared {
        migration,
        source: id(3, block),
        digest: digest(&text(block)),
    };
    let mut blocks: Vec<_> = (0..4)
        .map(|block| (id(0, block), text(block), shared(other, block)))
        .collect();
    blocks.push((id(0, 4), text(0), shared(stranger, 0)));
    let frame = encode(1, &blocks, Compression::Zstd(1));
    // Each run is one entry, and needs only the digests.
    assert_eq!(frame.bytes.len(), 20 + (14 + 4 * 16) + (14 + 16));
    let outcome = decode(&frame.bytes, &mut sink).unwrap();
    let rejected = vec![
        (RegionId(0), BlockRange::new(2, 1)),
        (RegionId(0), BlockRange::new(4, 1)),
    ];
    assert_eq!((outcome.applied, outcome.rejected), (3, rejected));
    assert_eq!(sink.content(id(0, 3)), text(3));
}

#[test]
fn what_was_kept_is_taken_where_it_is_still_the_same() {
    let mut sink = MemorySink::new();
    sink.kept.insert(id(0, 0), text(0));
    sink.kept.insert(id(0, 1), noise(1));
    sink.kept.insert(id(0, 3), text(3));
    let kept = |block| Decision::Kept {
        digest: digest(&text(block)),
    };
    let blocks: Vec<_> = (0..4)
        .map(|block| (id(0, block), text(block), kept(block)))
        .collect();
    let frame = encode(1, &blocks, Compression::Zstd(1));
    assert_eq!(frame.bytes.len(), 20 + 4 + 4 * 16, "one entry");
    let outcome = decode(&frame.bytes, &mut sink).unwrap();
    let rejected = vec![(RegionId(0), BlockRange::new(1, 2))];
    assert_eq!((outcome.applied, outcome.rejected), (2, rejected));
    assert_eq!(sink.content(id(0, 3)), text(3));
    assert_eq!(sink.content(id(0, 1)), [0; BLOCK_SIZE]);
}

#[test]
fn a_run_is_taken_as_a_whole_where_it_is_still_the_same() {
    let mut sink = MemorySink::new();
    for block in 0..200 {
        sink.kept.insert(id(0, block), text(block));
    }
    sink.kept.insert(id(0, 70), noise(1));
    let run = |block| Decision::KeptRun {
        digest: digest(&text(block)),
    };
    let blocks: Vec<_> = (60..140)
        .map(|block| (id(0, block), text(block), run(block)))
        .collect();
    // Something newer is there already.
    let newer = encode(
        9,
        &[(id(0, 62), noise(2), literal(&noise(2)))],
        Compression::Raw,
    );
    decode(&newer.bytes, &mut sink).unwrap();
    let frame = encode(1, &blocks, Compression::Raw);
    assert_eq!(frame.bytes.len(), 20 + 3 * 16 + 2 * 4 + 5, "three entries");
    let outcome = decode(&frame.bytes, &mut sink).unwrap();
    let rejected = vec![(RegionId(0), BlockRange::new(64, 64))];
    assert_eq!((outcome.applied, outcome.rejected), (3 + 12, rejected));
    assert_eq!(outcome.stale, 1);
    assert_eq!(sink.content(id(0, 62)), noise(2));
    assert_eq!(sink.content(id(0, 63)), text(63));
    assert_eq!(sink.content(id(0, 70)), [0; BLOCK_SIZE]);
    assert_eq!(sink.content(id(0, 139)), text(139));
}

/// Returns content in two versions that differ in one word, with the digests of both.
fn changed(seed: u64, word: usize) -> (Block, Decision) {
    let mut content = text(seed);
    content[word * 8..][..8].fill(0xdd);
    let changed = Decision::Changed {
        digest: digest(&content),
        base: digest(&text(seed)),
    };
    (content, changed)
}

#[test]
fn a_delta_is_applied_to_what_it_was_made_against_and_to_nothing_else() {
    for compression in ALL {
        let mut encoder = Encoder::with_versions(1 << 20);
        let mut sink = MemorySink::new();
        for block in 0..6 {
            encoder.keep_version(id(0, block), &digest(&text(block)), &text(block));
            sink.set(id(0, block), &text(block), 1);
        }
        sink.set(id(0, 2), &text(9), 1);
        sink.set(id(0, 3), &text(3), 9);
        sink.unreadable = Some(id(0, 4));
        let (content, decisions): (Vec<_>, Vec<_>) = (0..6)
            .map(|block| changed(block, block as usize * 70))
            .unzip();
        let ids: Vec<_> = (0..6).map(|block| id(0, block)).collect();
        let frame = encoder
            .encode_frame(5, &ids, &content, &decisions, compression)
            .unwrap();
        assert_eq!((frame.blocks, frame.deltas, frame.duplicates), (6, 6, 0));
        assert_eq!(frame.delta_bytes, 6 * 25);
        assert_eq!(frame.payload_bytes, 6 * 25);
        let outcome = decode(&frame.bytes, &mut sink).unwrap();
        let rejected = [2, 4].map(|block| (RegionId(0), BlockRange::new(block, 1)));
        assert_eq!((outcome.applied, outcome.stale), (3, 1));
        assert_eq!(outcome.rejected, rejected);
        for block in [0, 1, 5] {
            assert_eq!(sink.content(id(0, block)), content[block as usize]);
        }
        assert_eq!(sink.content(id(0, 2)), text(9));
        assert_eq!(sink.content(id(0, 3)), text(3));
    }
}

#[test]
fn a_delta_follows_the_version_that_was_sent_last() {
    let mut encoder = Encoder::with_versions(1 << 20);
    let mut sink = MemorySink::new();
    let mut seq = 0;
    let mut send = |content: &Block, decision| {
        seq += 1;
        let content = [*content];
        let frame = encoder
            .encode_frame(seq, &[id(0, 1)], &content, &[decision], Compression::Lz4)
            .unwrap();
        assert_eq!(decode(&frame.bytes, &mut sink).unwrap().applied, 1);
        assert_eq!(sink.content(id(0, 1)), content[0]);
        frame.deltas
    };
    let again = |content: &Block, base: &Block| Decision::Changed {
        digest: digest(content),
        base: digest(base),
    };
    let [a, b, c] = [1, 2, 3].map(|word| changed(1, word).0);
    assert_eq!(send(&text(1), literal(&text(1))), 0);
    assert_eq!(send(&a, again(&a, &text(1))), 1);
    assert_eq!(send(&b, again(&b, &a)), 1);
    assert_eq!(
        send(&c, literal(&c)),
        0,
        "lost, say, and sent anew: kept up to date"
    );
    assert_eq!(send(&a, again(&a, &b)), 0, "another base than the last");
    assert_eq!(
        send(&noise(1), again(&noise(1), &a)),
        0,
        "another content altogether"
    );
    assert_eq!(send(&ZERO, Decision::Zero), 0);
    assert_eq!(send(&noise(1), again(&noise(1), &noise(1))), 0, "forgotten");
}

#[test]
fn literals_deltas_and_duplicates_share_a_payload() {
    let mut encoder = Encoder::with_versions(1 << 20);
    let mut sink = MemorySink::new();
    encoder.keep_version(id(0, 0), &digest(&text(1)), &text(1));
    encoder.keep_version(id(0, 3), &digest(&text(1)), &text(1));
    sink.set(id(0, 0), &text(1), 1);
    sink.set(id(0, 3), &text(1), 1);
    let (new, decision) = changed(1, 7);
    let content = [new, noise(1), new, new];
    let decisions = [decision, literal(&noise(1)), literal(&new), decision];
    let ids = [0, 1, 2, 3].map(|block| id(0, block));
    let frame = encoder
        .encode_frame(2, &ids, &content, &decisions, Compression::Zstd(1))
        .unwrap();
    assert_eq!((frame.deltas, frame.duplicates), (1, 1));
    assert_eq!(frame.payload_bytes, 2 * BLOCK_SIZE + 25);
    assert_eq!(decode(&frame.bytes, &mut sink).unwrap().applied, 4);
    for (id, content) in ids.iter().zip(&content) {
        assert_eq!(sink.content(*id), content);
    }
}

#[test]
fn references_read_what_was_there_before_the_frame() {
    let mut sink = MemorySink::new();
    sink.set(id(0, 0), &text(1), 1);
    sink.set(id(0, 1), &text(2), 1);
    let reference = |block, content: &Block| {
        let digest = digest(content);
        Decision::Reference {
            source: id(0, block),
            digest,
        }
    };
    let blocks = [
        (id(0, 0), text(2), reference(1, &text(2))),
        (id(0, 1), text(1), reference(0, &text(1))),
    ];
    let frame = encode(2, &blocks, Compression::Raw);
    assert_eq!(decode(&frame.bytes, &mut sink).unwrap().applied, 2);
    assert_eq!(sink.content(id(0, 0)), text(2));
    assert_eq!(sink.content(id(0, 1)), text(1));
}

#[test]
fn another_key_rejects_every_reference() {
    let mut sink = MemorySink::new();
    sink.set(id(0, 0), &text(1), 1);
    let reference = Decision::Reference {
        source: id(0, 0),
        digest: digest(&text(1)),
    };
    let frame = encode(2, &[(id(0, 1), text(1), reference)], Compression::Raw);
    let other = longhaul_codec::DigestKey([1; 32]);
    let outcome = Decoder::new(other)
        .decode(&frame.bytes, &Limits::default(), &mut sink)
        .unwrap();
    assert_eq!(outcome.rejected, [(RegionId(0), BlockRange::new(1, 1))]);
}

#[test]
fn an_error_of_the_sink_is_handed_on() {
    let mut sink = MemorySink::new();
    sink.fails = true;
    let frame = encode(
        1,
        &[(id(0, 0), text(1), literal(&text(1)))],
        Compression::Raw,
    );
    let result = Decoder::new(KEY).decode(&frame.bytes, &Limits::default(), &mut sink);
    assert!(matches!(
        result,
        Err(DecodeError::Sink("the guest's memory is gone"))
    ));
}

#[test]
fn the_encoder_keeps_to_the_limits_of_a_frame() {
    let mut encoder = Encoder::new();
    let ids: Vec<_> = (0..FRAME_BLOCKS_MAX as u64 + 1)
        .map(|block| id(0, block))
        .collect();
    let content: Vec<_> = (0..ids.len() as u64).map(noise).collect();
    let decisions: Vec<_> = content.iter().map(literal).collect();
    let mut encode = |blocks: usize| {
        let (ids, content) = (&ids[..blocks], &content[..blocks]);
        encoder.encode_frame(1, ids, content, &decisions[..blocks], Compression::Zstd(1))
    };
    assert!(matches!(
        encode(FRAME_BLOCKS_MAX + 1),
        Err(EncodeError::TooManyBlocks { blocks: 257 })
    ));
    assert!(matches!(
        encode(FRAME_BLOCKS_MAX),
        Err(EncodeError::TooLong { .. })
    ));
    let longest = encode(FRAME_BLOCKS_MAX - 1).unwrap();
    assert!(longest.bytes.len() <= FRAME_BYTES_MAX);
    assert_eq!(
        decode(&longest.bytes, &mut MemorySink::new())
            .unwrap()
            .applied,
        255
    );
    assert!(matches!(
        encoder.encode_frame(1, &ids[..1], &content[..1], &[], Compression::Raw),
        Err(EncodeError::Mismatch {
            blocks: 1,
            content: 1,
            decisions: 0
        })
    ));
}

#[test]
fn the_worst_frame_with_one_block_that_is_no_literal_still_fits() {
    // No two blocks are neighbours, and every number has its greatest length.
    let region = u16::MAX;
    let far = |block: u64| id(region, (1 << 32) - 1 - 2 * block);
    let mut blocks: Vec<_> = (0..255)
        .map(|block| (far(block), noise(block), literal(&noise(block))))
        .collect();
    let reference = Decision::Reference {
        source: far(0),
        digest: digest(&ZERO),
    };
    blocks.push((far(255), ZERO, reference));
    assert!(encode(1, &blocks, Compression::Raw).bytes.len() <= FRAME_BYTES_MAX);
}

#[test]
fn an_encoder_is_the_same_after_any_frame() {
    let blocks = |seed: u64| -> Vec<_> {
        (0..16)
            .map(|b| (id(0, b), text(seed + b % 3), literal(&text(seed + b % 3))))
            .collect()
    };
    let (mut used, mut ids, mut content, mut decisions) = (Encoder::new(), vec![], vec![], vec![]);
    for (id, block, decision) in blocks(1) {
        ids.push(id);
        content.push(block);
        decisions.push(decision);
    }
    for compression in ALL
        .into_iter()
        .chain([Compression::Zstd(1), Compression::Raw])
    {
        let again = used
            .encode_frame(4, &ids, &content, &decisions, compression)
            .unwrap();
        assert_eq!(again, encode(4, &blocks(1), compression));
    }
}

/// The treatment of one block in a random frame.
#[derive(Debug, Clone, Copy)]
enum Plan {
    Skip,
    Zero,
    Literal(u64),
    /// The source block holds the content.
    Reference(u64),
    /// The block held this before, and has changed slightly.
    Delta(u64),
    /// The source block holds other content.
    Broken(u64),
    /// The destination has a newer version.
    Stale(u64),
}

fn plan() -> impl Strategy<Value = Plan> {
    prop_oneof![
        1 => Just(Plan::Skip),
        3 => Just(Plan::Zero),
        6 => (0..6u64).prop_map(Plan::Literal),
        3 => (0..6u64).prop_map(Plan::Reference),
        3 => (0..6u64).prop_map(Plan::Delta),
        1 => (0..6u64).prop_map(Plan::Broken),
        1 => (0..6u64).prop_map(Plan::Stale),
    ]
}

fn compression() -> impl Strategy<Value = Compression> {
    prop::sample::select(&ALL)
}

/// Returns content from a small stock, so that duplicates are common; odd ones are incompressible.
fn stock(seed: u64) -> Block {
    if seed.is_multiple_of(2) {
        text(seed)
    } else {
        noise(seed)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn random_frames_arrive(
        plans in prop::collection::vec((plan(), any::<bool>()), 0..=128),
        seq in 2..u64::MAX,
        compression in compression(),
    ) {
        // The upper part of region 0 is the stock that references read.
        let mut sink = MemorySink::new();
        for seed in 0..6 {
            sink.set(id(0, 256 + seed), &stock(seed), 1);
        }
        let mut expected = sink.clone();
        let mut counts = (0, 0, 0);
        let mut blocks = Vec::new();
        let mut next = 0;
        let mut encoder = Encoder::with_versions(1 << 20);
        for (plan, gap) in plans {
            let id = id(0, next);
            next += 1 + u64::from(gap);
            let source = |seed| crate::common::id(0, 256 + seed);
            let reference = |seed, content: Block| {
                Decision::Reference { source: source(seed), digest: digest(&content) }
            };
            let (content, decision) = match plan {
                Plan::Skip => (noise(99), Decision::Skip),
                Plan::Zero => (ZERO, Decision::Zero),
                Plan::Literal(seed) | Plan::Stale(seed) => (stock(seed), literal(&stock(seed))),
                Plan::Reference(seed) => (stock(seed), reference(seed, stock(seed))),
                Plan::Delta(seed) => {
                    let mut content = stock(seed);
                    content[next as usize] ^= 1;
                    let decision = Decision::Changed {
                        digest: digest(&content),
                        base: digest(&stock(seed)),
                    };
                    encoder.keep_version(id, &digest(&stock(seed)), &stock(seed));
                    sink.set(id, &stock(seed), 1);
                    expected.set(id, &stock(seed), 1);
                    (content, decision)
                }
                Plan::Broken(seed) => (noise(50), reference(seed, noise(50))),
            };
            match plan {
                Plan::Skip => {}
                Plan::Broken(_) => counts.2 += 1,
                Plan::Stale(_) => {
                    counts.1 += 1;
                    sink.set(id, &noise(77), u64::MAX);
                    expected.set(id, &noise(77), u64::MAX);
                }
                _ => {
                    counts.0 += 1;
                    expected.set(id, &content, seq);
                }
            }
            blocks.push((id, content, decision));
        }
        let frame = encode_with(&mut encoder, seq, &blocks, compression);
        let outcome = decode(&frame.bytes, &mut sink).unwrap();
        let rejected: u64 = outcome.rejected.iter().map(|(_, range)| range.count).sum();
        prop_assert_eq!(outcome.seq, seq);
        prop_assert_eq!((outcome.applied, outcome.stale, rejected), counts);
        prop_assert_eq!(frame.blocks as u64, counts.0 + counts.1 + counts.2);
        prop_assert!(sink.blocks == expected.blocks);
    }

    #[test]
    fn any_bytes_give_an_answer_within_the_limits(
        bytes in prop::collection::vec(any::<u8>(), 0..400),
        head in prop::collection::vec(0..4u8, 0..40),
    ) {
        // Random bytes rarely pass the header: small ones after a valid version do.
        let mut sink = MemorySink::new();
        for frame in [bytes.clone(), [vec![FRAME_VERSION], head, bytes].concat()] {
            if let Ok(outcome) = decode(&frame, &mut sink) {
                prop_assert!(outcome.applied <= FRAME_BLOCKS_MAX as u64);
            }
        }
        for id in sink.blocks.keys() {
            let blocks = REGIONS.iter().find(|(region, _)| *region == id.region);
            prop_assert!(blocks.is_some_and(|(_, blocks)| id.block < *blocks));
        }
    }
}
