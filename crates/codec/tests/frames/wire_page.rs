//! Tests that the codec writes and reads the examples of `docs/wire.md`, section 4.

use crate::common::{Block, encode, id, literal};
use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, Decoder, Digest, DigestKey,
    Encoder, Hasher, Limits, Outcome,
};
use longhaul_protocol::limits::{FRAME_BLOCKS_MAX, FRAME_BYTES_MAX};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};

const PAGE: &str = include_str!("../../../../docs/wire.md");
const KEY: DigestKey = DigestKey([42; 32]);
const STARS: Block = [0x2a; BLOCK_SIZE];
/// The migration of another guest from the same source.
const OTHER: MigrationId = MigrationId(*b"neighbor");

/// Returns the bytes of an example: hexadecimal, with comments after `#`.
fn example(name: &str) -> Vec<u8> {
    let fence = format!("```frame {name}\n");
    let (_, rest) = PAGE
        .split_once(&fence)
        .unwrap_or_else(|| panic!("no example {name}"));
    let (lines, _) = rest.split_once("```").unwrap();
    let bytes = lines.lines().filter_map(|line| line.split('#').next());
    let bytes = bytes.flat_map(str::split_whitespace);
    bytes
        .map(|byte| u8::from_str_radix(byte, 16).unwrap())
        .collect()
}

/// A destination that records applied blocks. Its block 300 of region 0 holds stars, as do block 16
/// of another guest and the known content of block 7 of region 1.
#[derive(Default)]
struct Notes {
    writes: Vec<(u16, BlockRange, Option<Vec<u8>>)>,
}

impl BlockSink for Notes {
    type Error = std::convert::Infallible;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        [1024, 8].get(usize::from(region.0)).copied()
    }

    fn accepts(&self, _: BlockId, _: u64) -> bool {
        true
    }

    fn read(&mut self, source: BlockId, content: &mut Block) -> bool {
        *content = STARS;
        source == id(0, 300)
    }

    fn read_shared(&mut self, of: MigrationId, source: BlockId, content: &mut Block) -> bool {
        *content = STARS;
        (of, source) == (OTHER, id(0, 16))
    }

    fn read_kept(&mut self, source: BlockId, of: Option<&Digest>, content: &mut Block) -> bool {
        *content = STARS;
        let is_it = |of: &Digest| source == id(1, 7) && *of == digest(&STARS);
        of.map_or(source.region == RegionId(1), is_it)
    }

    fn apply(&mut self, _: u64, writes: &[BlockWrite<'_>]) -> Result<(), Self::Error> {
        self.writes.extend(writes.iter().map(|write| {
            let content = match write.content {
                Content::Zero => None,
                Content::Bytes(bytes) => Some(bytes.to_vec()),
            };
            (write.region.0, write.range, content)
        }));
        Ok(())
    }
}

fn decode(frame: &[u8]) -> (Outcome, Notes) {
    let mut notes = Notes::default();
    let outcome = Decoder::new(KEY)
        .decode(frame, &Limits::default(), &mut notes)
        .unwrap();
    assert!(outcome.rejected.is_empty(), "{outcome:?}");
    (outcome, notes)
}

fn digest(content: &Block) -> Digest {
    Hasher::new(KEY).digest(content)
}

#[test]
fn zeros() {
    let frame = example("zeros");
    let blocks: Vec<_> = (256..512)
        .map(|block| (id(0, block), [0; BLOCK_SIZE], Decision::Zero))
        .collect();
    assert_eq!(encode(1, &blocks, Compression::Raw).bytes, frame);
    let (outcome, notes) = decode(&frame);
    assert_eq!((outcome.seq, outcome.applied), (1, 256));
    assert_eq!(notes.writes, [(0, BlockRange::new(256, 256), None)]);
}

#[test]
fn reference() {
    let frame = example("reference");
    let reference = Decision::Reference {
        source: id(0, 300),
        digest: digest(&STARS),
    };
    assert_eq!(
        encode(261, &[(id(1, 7), STARS, reference)], Compression::Raw).bytes,
        frame
    );
    let (outcome, notes) = decode(&frame);
    assert_eq!((outcome.seq, outcome.applied), (261, 1));
    assert_eq!(
        notes.writes,
        [(1, BlockRange::new(7, 1), Some(STARS.to_vec()))]
    );
}

#[test]
fn shared() {
    let frame = example("shared");
    let shared = |block| Decision::Shared {
        migration: OTHER,
        source: id(0, block),
        digest: digest(&STARS),
    };
    let ours = encode(263, &[(id(1, 7), STARS, shared(16))], Compression::Raw).bytes;
    assert_eq!(ours, frame);
    let (outcome, notes) = decode(&frame);
    assert_eq!((outcome.seq, outcome.applied), (263, 1));
    let stars = Some(STARS.to_vec());
    assert_eq!(notes.writes, [(1, BlockRange::new(7, 1), stars)]);
}

#[test]
fn kept() {
    let frame = example("kept");
    let kept = Decision::Kept {
        digest: digest(&STARS),
    };
    let ours = encode(264, &[(id(1, 7), STARS, kept)], Compression::Raw).bytes;
    assert_eq!(ours, frame);
    let (outcome, notes) = decode(&frame);
    assert_eq!((outcome.seq, outcome.applied), (264, 1));
    let stars = Some(STARS.to_vec());
    assert_eq!(notes.writes, [(1, BlockRange::new(7, 1), stars)]);
}

#[test]
fn kept_run() {
    let frame = example("kept run");
    let run = Decision::KeptRun {
        digest: digest(&STARS),
    };
    let blocks = [5, 6, 7].map(|block| (id(1, block), STARS, run));
    let ours = encode(265, &blocks, Compression::Raw).bytes;
    assert_eq!(ours, frame);
    let (outcome, notes) = decode(&frame);
    assert_eq!((outcome.seq, outcome.applied), (265, 3));
    let stars = Some(STARS.repeat(3));
    assert_eq!(notes.writes, [(1, BlockRange::new(5, 3), stars)]);
}

#[test]
fn delta() {
    let frame = example("delta");
    let mut content = STARS;
    content[..16].copy_from_slice(b"longhaul moves a");
    let mut encoder = Encoder::with_versions(1 << 20);
    encoder.keep_version(id(0, 300), &digest(&STARS), &STARS);
    let changed = Decision::Changed {
        digest: digest(&content),
        base: digest(&STARS),
    };
    let ours = encoder.encode_frame(262, &[id(0, 300)], &[content], &[changed], Compression::Raw);
    assert_eq!(ours.unwrap().bytes, frame);
    let (outcome, notes) = decode(&frame);
    assert_eq!((outcome.seq, outcome.applied), (262, 1));
    assert_eq!(
        notes.writes,
        [(0, BlockRange::new(300, 1), Some(content.to_vec()))]
    );
}

#[test]
fn in_order() {
    let mut content = STARS;
    content[..16].copy_from_slice(b"longhaul moves a");
    let mut decoder = Decoder::new(KEY);
    for (name, seq, block) in [("first in order", 264, 0), ("second in order", 265, 5)] {
        let mut notes = Notes::default();
        let decoded = decoder.decode(&example(name), &Limits::default(), &mut notes);
        assert_eq!(decoded.unwrap().seq, seq);
        assert_eq!(
            notes.writes,
            [(0, BlockRange::new(block, 1), Some(content.to_vec()))]
        );
    }
}

#[test]
fn duplicates() {
    let frame = example("duplicates");
    let blocks = [0, 1, 3].map(|block| (id(0, block), STARS, literal(&STARS)));
    let ours = encode(2, &blocks, Compression::Lz4).bytes;
    // Two compressors may differ only in the payload and its stored length.
    assert_eq!(ours[..16], frame[..16]);
    assert_eq!(ours[20..34], frame[20..34]);
    for frame in [frame, ours] {
        let (outcome, notes) = decode(&frame);
        assert_eq!((outcome.seq, outcome.applied), (2, 3));
        let ranges: Vec<_> = notes
            .writes
            .iter()
            .map(|(_, range, _)| range.start)
            .collect();
        assert_eq!(ranges, [0, 1, 3]);
        assert!(
            notes
                .writes
                .iter()
                .all(|(.., content)| content.as_deref() == Some(&STARS))
        );
    }
}

#[test]
fn limits_are_those_of_the_page() {
    assert!(PAGE.contains(&format!("| frame | {FRAME_BYTES_MAX} bytes |")));
    assert!(PAGE.contains(&format!(
        "| blocks described by a frame | {FRAME_BLOCKS_MAX} |"
    )));
}
