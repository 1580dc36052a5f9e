//! Fuzzes sequences of dependent frames, some of them damaged, delayed or sent twice: applied
//! blocks equal the sent ones, and everything else is refused.

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, DecodeError, Decoder, Digest,
    DigestKey, Encoder, InOrder, Limits,
};
use longhaul_protocol::{BLOCK_SIZE, MigrationId, RegionId};
use std::convert::Infallible;

const BLOCKS: u64 = 16;
/// The maximum number of frames of one input.
const FRAMES_MAX: usize = 24;

type Block = [u8; BLOCK_SIZE];

/// Runs `data`: each frame's content, its damage on the way, and its time of arrival. Returns how
/// many frames were applied, and whether one was refused.
pub(crate) fn run(data: &[u8]) -> (usize, bool) {
    let mut bytes = data.iter().copied();
    let mut next = move || bytes.next();
    let mut encoder = Encoder::new();
    let (mut under_way, mut sent): (Vec<Vec<u8>>, Vec<Block>) = (Vec::new(), Vec::new());
    let mut damaged = false;
    while let (Some(how), true) = (next(), sent.len() < FRAMES_MAX) {
        let content = content(&sent, next().unwrap_or(0));
        let compression = match how % 8 {
            0 => Compression::Zstd(1),
            1 => Compression::Raw,
            level => Compression::ZstdLong(i32::from(level) - 3),
        };
        let id = BlockId {
            region: RegionId(0),
            block: sent.len() as u64 % BLOCKS,
        };
        let literal = Decision::Literal {
            digest: Digest([0; 16]),
        };
        let seq = sent.len() as u64 + 1;
        let frame = encoder.encode_frame(seq, &[id], &[content], &[literal], compression);
        let mut frame = frame.expect("one block fits").bytes;
        sent.push(content);
        if how & 0x10 != 0 {
            let at = usize::from(next().unwrap_or(0)) | usize::from(next().unwrap_or(0)) << 8;
            let at = at % frame.len();
            let flipped = next().unwrap_or(0);
            frame[at] ^= flipped;
            damaged |= flipped != 0;
        }
        let at = usize::from(how >> 5) % (under_way.len() + 1);
        if how & 0x08 != 0 && !under_way.is_empty() {
            under_way.push(under_way[at % under_way.len()].clone());
            damaged = true;
        }
        under_way.insert(at, frame);
    }
    receive(&under_way, &sent, damaged)
}

/// Returns the content of the next block: a copy, a slightly changed copy, or new.
fn content(sent: &[Block], choice: u8) -> Block {
    let seed = usize::from(choice);
    match sent.get(seed % (sent.len() + 1)) {
        Some(block) if seed & 1 == 0 => *block,
        Some(block) => {
            let mut block = *block;
            block[seed * 16 % BLOCK_SIZE..][..8].fill(choice);
            block
        }
        None => {
            let mut block = [choice; BLOCK_SIZE];
            let mut reader = blake3::Hasher::new().update(&[choice]).finalize_xof();
            reader.fill(&mut block[..1024]);
            block
        }
    }
}

fn receive(frames: &[Vec<u8>], sent: &[Block], damaged: bool) -> (usize, bool) {
    let mut decoder = Decoder::new(DigestKey([42; 32]));
    let mut in_order = InOrder::default();
    let mut sink = Memory {
        blocks: vec![([0; BLOCK_SIZE], 0); BLOCKS as usize],
    };
    let mut applied = 0;
    for frame in frames {
        if let Err(error) = in_order.arrived(frame) {
            assert!(damaged, "{error}");
            return (applied, true);
        }
        while let Some(frame) = in_order.next_ready() {
            let before = sink.blocks.clone();
            match decoder.decode(frame, &Limits::default(), &mut sink) {
                Ok(_) => applied += 1,
                Err(DecodeError::Frame(error)) => {
                    assert!(damaged, "{error}");
                    assert!(sink.blocks == before, "a refused frame changes nothing");
                    return (applied, true);
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    if !damaged {
        assert_eq!(applied, frames.len(), "nothing is left waiting");
        for (index, content) in sent.iter().enumerate() {
            let (held, version) = &sink.blocks[index % BLOCKS as usize];
            assert!(*version > index as u64 + 1 || held == content);
        }
    }
    (applied, false)
}

struct Memory {
    blocks: Vec<(Block, u64)>,
}

impl BlockSink for Memory {
    type Error = Infallible;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        (region == RegionId(0)).then_some(BLOCKS)
    }

    fn accepts(&self, id: BlockId, seq: u64) -> bool {
        self.blocks[id.block as usize].1 < seq
    }

    fn read(&mut self, id: BlockId, content: &mut Block) -> bool {
        *content = self.blocks[id.block as usize].0;
        true
    }

    fn read_shared(&mut self, _: MigrationId, _: BlockId, _: &mut Block) -> bool {
        false
    }

    fn apply(&mut self, seq: u64, writes: &[BlockWrite<'_>]) -> Result<(), Infallible> {
        for write in writes {
            for (index, block) in write.range.blocks().enumerate() {
                let (held, version) = &mut self.blocks[block as usize];
                *version = seq;
                match write.content {
                    Content::Zero => held.fill(0),
                    Content::Bytes(bytes) => {
                        held.copy_from_slice(&bytes[index * BLOCK_SIZE..][..BLOCK_SIZE]);
                    }
                }
            }
        }
        Ok(())
    }
}
