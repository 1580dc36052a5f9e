//! Tests frames that continue each other, over connections that reorder, break, and lie.

use crate::common::{KEY, MemorySink, REGIONS, encode_with, id, literal, noise, text};
use longhaul_codec::{
    Compression, DecodeError, Decoder, EncodedFrame, Encoder, FrameError, InOrder, Limits,
};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::limits::FRAMES_EARLY_BYTES_MAX;
use proptest::prelude::*;

/// Frames of four blocks; every third repeats blocks of earlier frames, partly with noise.
fn frames(encoder: &mut Encoder, compressions: &[Compression]) -> Vec<EncodedFrame> {
    let frame = |(index, compression): (usize, &Compression)| {
        let seed = if index % 3 == 2 { index - 2 } else { index } as u64;
        let blocks: Vec<_> = (0..4)
            .map(|block| {
                let content = match block {
                    0 => noise(seed),
                    _ => text(seed * 4 + block),
                };
                let place = (index as u64 * 4 + block) % REGIONS[0].1;
                (id(0, place), content, literal(&content))
            })
            .collect();
        encode_with(encoder, index as u64 + 1, &blocks, *compression)
    };
    compressions.iter().enumerate().map(frame).collect()
}

/// Takes frames in their order of arrival. Returns the refused ones.
fn receive<'a>(
    frames: impl IntoIterator<Item = &'a EncodedFrame>,
    sink: &mut MemorySink,
) -> Result<usize, FrameError> {
    let mut decoder = Decoder::new(KEY);
    let mut in_order = InOrder::default();
    let mut decoded = 0;
    for frame in frames {
        in_order.arrived(&frame.bytes)?;
        while let Some(bytes) = in_order.next_ready() {
            match decoder.decode(bytes, &Limits::default(), sink) {
                Ok(_) => decoded += 1,
                Err(DecodeError::Frame(error)) => return Err(error),
                Err(error) => panic!("{error}"),
            }
        }
    }
    Ok(decoded)
}

fn check(sink: &MemorySink, sent: usize) {
    for index in 0..sent {
        let seed = if index % 3 == 2 { index - 2 } else { index } as u64;
        assert_eq!(sink.content(id(0, index as u64 * 4)), noise(seed));
        assert_eq!(
            sink.content(id(0, index as u64 * 4 + 1)),
            text(seed * 4 + 1)
        );
    }
}

#[test]
fn what_an_earlier_frame_brought_is_not_sent_again() {
    let frames = frames(&mut Encoder::new(), &[Compression::ZstdLong(3); 9]);
    let bytes: Vec<usize> = frames.iter().map(|frame| frame.bytes.len()).collect();
    assert!(bytes[3] > BLOCK_SIZE, "noise costs what it is: {bytes:?}");
    assert!(bytes[2] < 200 && bytes[5] < 200, "{bytes:?}");
    let mut sink = MemorySink::new();
    assert_eq!(receive(&frames, &mut sink), Ok(9));
    check(&sink, 9);
}

#[test]
fn a_frame_without_those_before_it_waits_or_is_refused() {
    let frames = frames(&mut Encoder::new(), &[Compression::ZstdLong(1); 4]);
    let mut sink = MemorySink::new();
    assert_eq!(receive(&frames[1..], &mut sink), Ok(0));
    assert_eq!(sink, MemorySink::new());
    // Twice, after its turn and before it.
    let (order, expected) = (0, 1);
    let again = receive([&frames[0], &frames[0]], &mut sink);
    assert_eq!(again, Err(FrameError::Order { order, expected }));
    let (order, expected) = (2, 0);
    let again = receive([&frames[2], &frames[2]], &mut MemorySink::new());
    assert_eq!(again, Err(FrameError::Order { order, expected }));
    // One that claims to continue a frame that never began.
    let mut first = frames[0].clone();
    first.bytes[1] = 4;
    let refused = receive([&first], &mut MemorySink::new());
    assert_eq!(refused, Err(FrameError::Payload));
}

#[test]
fn a_new_connection_begins_anew() {
    let mut encoder = Encoder::new();
    let compressions = [Compression::ZstdLong(3); 6];
    let mut sink = MemorySink::new();
    for _ in 0..3 {
        let sent = frames(&mut encoder, &compressions);
        encoder.forget_frames();
        sink.blocks.clear();
        assert_eq!(receive(&sent, &mut sink), Ok(6));
        check(&sink, 6);
    }
}

#[test]
fn another_level_begins_anew_when_enough_was_sent() {
    let mut encoder = Encoder::new();
    let blocks: Vec<_> = (0..128)
        .map(|block| (id(0, block), noise(block), literal(&noise(block))))
        .collect();
    let mut made = Vec::new();
    for seq in 0..80 {
        let compression = Compression::ZstdLong(if seq < 2 { 1 } else { 3 });
        made.push(encode_with(&mut encoder, seq + 1, &blocks, compression));
    }
    let young = made
        .iter()
        .take_while(|frame| frame.compression == Compression::ZstdLong(1));
    let young = young.count();
    assert!((30..40).contains(&young), "{young}");
    let after = &made[young..];
    assert!(
        after
            .iter()
            .all(|frame| frame.compression == Compression::ZstdLong(3))
    );
    assert!(
        after[0].bytes.len() > 128 * BLOCK_SIZE,
        "nothing is known any more"
    );
    assert!(after[1].bytes.len() < 1000);
    assert_eq!(receive(&made, &mut MemorySink::new()), Ok(80));
}

#[test]
fn what_comes_early_is_limited() {
    let mut encoder = Encoder::new();
    let blocks: Vec<_> = (0..255)
        .map(|block| (id(0, block), noise(block), literal(&noise(block))))
        .collect();
    let mut frame = encode_with(&mut encoder, 1, &blocks, Compression::ZstdLong(1));
    let mut in_order = InOrder::default();
    let mut kept = 0;
    let error = loop {
        kept += 1;
        frame.bytes[20..24].copy_from_slice(&u32::to_le_bytes(kept));
        if let Err(error) = in_order.arrived(frame.bytes.clone()) {
            break error;
        }
    };
    assert!(matches!(error, FrameError::TooEarly { .. }), "{error}");
    assert_eq!(
        kept as usize,
        FRAMES_EARLY_BYTES_MAX / frame.bytes.len() + 1
    );
    assert!(in_order.next_ready().is_none());
}

#[test]
fn every_flipped_bit_of_a_frame_that_goes_on_gives_an_answer() {
    let frames = frames(&mut Encoder::new(), &[Compression::ZstdLong(3); 3]);
    let mut refusals = 0;
    for bit in 0..frames[2].bytes.len() * 8 {
        let mut damaged = frames.clone();
        damaged[2].bytes[bit / 8] ^= 1 << (bit % 8);
        let mut sink = MemorySink::new();
        let ended = receive(&damaged, &mut sink);
        refusals += usize::from(ended.is_err());
        if ended.is_err() {
            assert!(sink.blocks.len() == 8, "a refused frame changes nothing");
        }
    }
    assert!(refusals > 100, "{refusals}");
}

proptest! {
    #[test]
    fn in_any_order_the_same_arrives(
        order in Just((0..24).collect::<Vec<usize>>()).prop_shuffle(),
        kinds in prop::collection::vec(0..4, 24),
    ) {
        let compressions: Vec<_> = kinds
            .iter()
            .map(|kind| match kind {
                0 => Compression::Raw,
                1 => Compression::Zstd(1),
                _ => Compression::ZstdLong(1),
            })
            .collect();
        let frames = frames(&mut Encoder::new(), &compressions);
        let mut sink = MemorySink::new();
        prop_assert_eq!(receive(order.iter().map(|index| &frames[*index]), &mut sink), Ok(24));
        check(&sink, 24);
    }
}
