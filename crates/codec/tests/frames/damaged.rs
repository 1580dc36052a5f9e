//! Tests frames that a faulty or hostile peer could send.

use crate::common::{KEY, MemorySink, digest, encode, id, literal, noise, text};
use longhaul_codec::{
    Compression, Decision, DecodeError, Decoder, FRAME_VERSION, FrameError, Limits, Outcome,
};
use longhaul_protocol::{BLOCK_SIZE, RegionId};

fn decode_within(
    frame: &[u8],
    limits: &Limits,
    sink: &mut MemorySink,
) -> Result<Outcome, FrameError> {
    match Decoder::new(KEY).decode(frame, limits, sink) {
        Ok(outcome) => Ok(outcome),
        Err(DecodeError::Frame(error)) => Err(error),
        Err(other) => panic!("{other}"),
    }
}

/// Decodes a frame that must be refused, and checks that the destination is unchanged.
fn refused(frame: &[u8]) -> FrameError {
    let mut sink = MemorySink::new();
    let error = decode_within(frame, &Limits::default(), &mut sink).unwrap_err();
    assert_eq!(sink, MemorySink::new(), "{error}");
    error
}

/// Returns a frame with every kind of entry.
fn sample(compression: Compression) -> Vec<u8> {
    let reference = Decision::Reference {
        source: id(7, 2),
        digest: digest(&noise(7)),
    };
    let blocks = [
        (id(0, 0), text(1), literal(&text(1))),
        (id(0, 200), text(2), literal(&text(2))),
        (id(0, 201), text(1), literal(&text(1))),
        (id(7, 1), noise(7), reference),
        (id(7, 5), [0; BLOCK_SIZE], Decision::Zero),
    ];
    encode(77, &blocks, compression).bytes
}

fn header(compression: u8, entries: u16, payload: u32, stored: u32) -> Vec<u8> {
    let mut frame = vec![FRAME_VERSION, compression];
    frame.extend_from_slice(&entries.to_le_bytes());
    frame.extend_from_slice(&payload.to_le_bytes());
    frame.extend_from_slice(&5u64.to_le_bytes());
    frame.extend_from_slice(&stored.to_le_bytes());
    frame
}

/// Returns a frame of literals from block 0 of region 0 on, with a payload that may contradict the
/// header.
fn literals(compression: u8, blocks: u8, payload: u32, stored: &[u8]) -> Vec<u8> {
    let mut frame = header(compression, 1, payload, stored.len() as u32);
    frame.extend_from_slice(&[1, 0, 0, blocks]);
    frame.extend_from_slice(stored);
    frame
}

fn entries(count: u16, entries: &[u8]) -> Vec<u8> {
    [header(0, count, 0, 0), entries.to_vec()].concat()
}

#[test]
fn every_truncation_is_refused() {
    for compression in [
        Compression::Lz4,
        Compression::Zstd(1),
        Compression::ZstdLong(1),
    ] {
        let frame = sample(compression);
        for length in 0..frame.len() {
            refused(&frame[..length]);
        }
    }
    let raw = sample(Compression::Raw);
    for length in (0..200).chain(raw.len() - 200..raw.len()) {
        refused(&raw[..length]);
    }
}

#[test]
fn every_flipped_bit_gives_an_answer() {
    for compression in [
        Compression::Lz4,
        Compression::Zstd(1),
        Compression::ZstdLong(1),
    ] {
        let frame = sample(compression);
        let mut refusals = 0;
        for bit in 0..frame.len() * 8 {
            let mut damaged = frame.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let mut sink = MemorySink::new();
            match decode_within(&damaged, &Limits::default(), &mut sink) {
                Ok(outcome) => assert!(outcome.applied <= 256),
                Err(_) => {
                    refusals += 1;
                    assert_eq!(sink, MemorySink::new());
                }
            }
        }
        assert!(refusals > 100, "{refusals}");
    }
}

#[test]
fn a_flipped_bit_in_a_digest_or_a_referenced_block_rejects_the_block() {
    let frame = sample(Compression::Zstd(1));
    let digest = digest(&noise(7)).0;
    let at = frame
        .windows(16)
        .position(|window| window == digest)
        .unwrap();
    let mut sink = MemorySink::new();
    sink.set(id(7, 2), &noise(7), 1);
    let applied = decode_within(&frame, &Limits::default(), &mut sink.clone()).unwrap();
    assert_eq!((applied.applied, applied.rejected.len()), (5, 0));
    for bit in 0..128 {
        let mut damaged = frame.clone();
        damaged[at + bit / 8] ^= 1 << (bit % 8);
        let outcome = decode_within(&damaged, &Limits::default(), &mut sink.clone()).unwrap();
        assert_eq!(
            (outcome.applied, outcome.rejected.len()),
            (4, 1),
            "bit {bit}"
        );
    }
}

#[test]
fn headers_are_checked() {
    assert_eq!(refused(&[]), FrameError::Truncated);
    assert_eq!(refused(&[FRAME_VERSION]), FrameError::Truncated);
    assert_eq!(refused(&[1; 64]), FrameError::Version(1));
    assert_eq!(refused(&header(5, 0, 0, 0)), FrameError::Compression(5));
    assert_eq!(refused(&header(0, 0, 0, 1)), FrameError::Truncated);
    assert_eq!(refused(&header(0, 0, 0, u32::MAX)), FrameError::Truncated);
    assert_eq!(refused(&header(0, 1, 0, 0)), FrameError::Truncated);
    assert_eq!(
        refused(&entries(0, &[0])),
        FrameError::Trailing { bytes: 1 }
    );
    let declared = u64::from(u32::MAX);
    let lie = FrameError::PayloadLength {
        declared,
        least: 0,
        most: 0,
    };
    assert_eq!(refused(&header(2, 0, u32::MAX, 0)), lie);
}

#[test]
fn entries_are_checked() {
    assert_eq!(refused(&entries(1, &[8, 0, 0, 1])), FrameError::Kind(8));
    assert_eq!(refused(&entries(1, &[0, 0, 0, 0])), FrameError::Empty);
    assert_eq!(
        refused(&entries(1, &[0, 1, 0, 1])),
        FrameError::UnknownRegion(RegionId(1))
    );
    assert_eq!(
        refused(&entries(1, &[0, 0x80, 0x80, 4, 0, 1])),
        FrameError::Number
    );
    assert_eq!(
        refused(&entries(1, &[0, 0x80, 0, 0, 1])),
        FrameError::Number,
        "written too long"
    );
    let huge = [&[0, 0], &[0xff; 9][..], &[1, 1]].concat();
    let beyond = |start, count| FrameError::BeyondRegion {
        region: RegionId(7),
        start,
        count,
        blocks: 40,
    };
    assert!(matches!(
        refused(&entries(1, &huge)),
        FrameError::BeyondRegion { .. }
    ));
    let huger = [&[0, 0], &[0xff; 9][..], &[2, 1]].concat();
    assert_eq!(refused(&entries(1, &huger)), FrameError::Number);
    let endless = [&[0, 0], &[0xff; 11][..]].concat();
    assert_eq!(refused(&entries(1, &endless)), FrameError::Number);
    assert_eq!(refused(&entries(1, &[0, 7, 39, 2])), beyond(39, 2));
    assert_eq!(refused(&entries(1, &[0, 7, 40, 1])), beyond(40, 1));
    let source = [&[3, 0, 0, 1, 7, 40][..], &[0; 16]].concat();
    assert_eq!(refused(&entries(1, &source)), beyond(40, 1));
    let source = [&[3, 0, 0, 1, 8, 0][..], &[0; 16]].concat();
    assert_eq!(
        refused(&entries(1, &source)),
        FrameError::UnknownRegion(RegionId(8))
    );
    let cut = [&[3, 0, 0, 2, 7, 0][..], &[0; 31]].concat();
    assert_eq!(refused(&entries(1, &cut)), FrameError::Truncated);
    let cut = [&[4, 0, 0, 2][..], &[0; 31]].concat();
    assert_eq!(refused(&entries(1, &cut)), FrameError::Truncated);
    let forward = [2, 0, 0, 1, 0];
    assert_eq!(refused(&entries(1, &forward)), FrameError::UnknownLiteral);
}

#[test]
fn a_duplicate_reaches_only_earlier_literals() {
    let frame = |duplicate: [u8; 5]| {
        let mut frame = header(0, 2, 2 * 4096, 2 * 4096);
        frame.extend_from_slice(&[1, 0, 0, 2]);
        frame.extend_from_slice(&duplicate);
        frame.extend_from_slice(&[7; 2 * 4096]);
        frame
    };
    assert_eq!(refused(&frame([2, 0, 9, 2, 1])), FrameError::UnknownLiteral);
    assert_eq!(refused(&frame([2, 0, 9, 1, 2])), FrameError::UnknownLiteral);
    let outcome = decode_within(
        &frame([2, 0, 9, 2, 0]),
        &Limits::default(),
        &mut MemorySink::new(),
    );
    assert_eq!(outcome.unwrap().applied, 4);
}

/// Returns a frame of deltas of blocks 0 to `count` of region 7, whose payload is `deltas`.
fn deltas(count: u8, deltas: &[u8]) -> Vec<u8> {
    let mut frame = header(0, 1, deltas.len() as u32, deltas.len() as u32);
    frame.extend_from_slice(&[4, 7, 0, count]);
    let mut content = [0; BLOCK_SIZE];
    content[..16].fill(9);
    frame.extend(digest(&content).0.repeat(usize::from(count)));
    frame.extend_from_slice(deltas);
    frame
}

#[test]
fn deltas_fill_the_payload_exactly() {
    let one = [&[1, 0, 0, 0, 0, 0, 0, 0, 3][..], &[9; 16]].concat();
    let two = one.repeat(2);
    let mut sink = MemorySink::new();
    let outcome = decode_within(&deltas(2, &two), &Limits::default(), &mut sink).unwrap();
    assert_eq!((outcome.applied, outcome.rejected.len()), (2, 0));
    assert_eq!(sink.content(id(7, 1))[..17], [&[9; 16][..], &[0]].concat());
    for cut in 1..16 {
        let cut = &two[..two.len() - cut];
        assert_eq!(refused(&deltas(2, cut)), FrameError::Delta);
    }
    let longer = [&two[..], &[0]].concat();
    assert_eq!(refused(&deltas(2, &longer)), FrameError::Delta);
    let mut no_words = two.clone();
    no_words[8] = 0;
    assert_eq!(refused(&deltas(2, &no_words)), FrameError::Delta);
    let length = |declared, least, most| FrameError::PayloadLength {
        declared,
        least,
        most,
    };
    assert_eq!(refused(&deltas(1, &[])), length(0, 8, 4096));
    assert_eq!(refused(&deltas(1, &[0; 7])), length(7, 8, 4096));
    assert_eq!(refused(&deltas(1, &[0; 4097])), length(4097, 8, 4096));
    let full = [&[0xff; 7][..], &[0x7f], &[0xff; 62], &[3], &[0; 498 * 8]].concat();
    assert_eq!(
        refused(&deltas(1, &full[..full.len() - 1])),
        FrameError::Delta
    );
    let mut sink = MemorySink::new();
    let outcome = decode_within(&deltas(1, &full), &Limits::default(), &mut sink).unwrap();
    assert_eq!(
        (outcome.applied, outcome.rejected.len()),
        (0, 1),
        "something else"
    );
}

#[test]
fn limits_are_kept() {
    let mut frame = entries(2, &[0, 0, 0, 3, 0, 0, 9, 2]);
    let limits = Limits {
        frame_bytes: frame.len(),
        frame_blocks: 5,
    };
    let mut sink = MemorySink::new();
    assert_eq!(
        decode_within(&frame, &limits, &mut sink).unwrap().applied,
        5
    );
    let fewer = Limits {
        frame_blocks: 4,
        ..limits
    };
    let error = decode_within(&frame, &fewer, &mut sink).unwrap_err();
    assert_eq!(error, FrameError::TooManyBlocks { limit: 4 });
    frame.push(0);
    let error = decode_within(&frame, &limits, &mut sink).unwrap_err();
    assert_eq!(
        error,
        FrameError::TooLong {
            bytes: frame.len(),
            limit: frame.len() - 1
        }
    );
    // 300 zero blocks fit the region, but not one frame: 0xac 0x02 is 300.
    let error = refused(&entries(1, &[0, 0, 0, 0xac, 2]));
    assert_eq!(error, FrameError::TooManyBlocks { limit: 256 });
    let many = [0, 0, 0, 1].repeat(257);
    assert_eq!(
        refused(&entries(257, &many)),
        FrameError::TooManyBlocks { limit: 256 }
    );
}

#[test]
fn bombs_do_not_go_off() {
    let zeros = vec![0; 64 << 20];
    let bomb = zstd::bulk::compress(&zeros, 19).unwrap();
    assert!(bomb.len() < 64 << 10);
    assert_eq!(refused(&literals(2, 1, 4096, &bomb)), FrameError::Payload);
    assert_eq!(
        refused(&literals(2, 1, zeros.len() as u32, &bomb)),
        FrameError::PayloadLength {
            declared: 64 << 20,
            least: 4096,
            most: 4096,
        }
    );
    let bomb = lz4_flex::block::compress(&zeros[..4 << 20]);
    assert!(bomb.len() < 64 << 10);
    assert_eq!(refused(&literals(1, 1, 4096, &bomb)), FrameError::Payload);
}

#[test]
fn a_payload_of_another_length_is_refused() {
    for blocks in [1, 3] {
        let content = text(1).repeat(blocks);
        let stored = [
            (0, content.clone()),
            (1, lz4_flex::block::compress(&content)),
            (2, zstd::bulk::compress(&content, 1).unwrap()),
        ];
        for (compression, stored) in stored {
            let lie = literals(compression, 2, 2 * 4096, &stored);
            assert_eq!(refused(&lie), FrameError::Payload, "{compression} {blocks}");
            let truth = literals(compression, blocks as u8, content.len() as u32, &stored);
            let mut sink = MemorySink::new();
            assert!(decode_within(&truth, &Limits::default(), &mut sink).is_ok());
        }
    }
    // Content is declared, but none is stored.
    for compression in 0..3 {
        assert_eq!(
            refused(&literals(compression, 1, 4096, &[])),
            FrameError::Payload
        );
    }
}
