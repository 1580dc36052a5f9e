//! Fuzzes frames between a source and a destination whose content may differ from the source's
//! record: accepted blocks arrive unchanged, and rejected ones change nothing.

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, Decoder, Digest, DigestKey,
    Encoder, Hasher, Limits, Staged,
};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};
use std::collections::BTreeSet;
use std::convert::Infallible;

const KEY: DigestKey = DigestKey([42; 32]);
const BLOCKS: usize = 24;
/// The maximum number of rounds of one input.
const ROUNDS_MAX: usize = 12;

type Block = [u8; BLOCK_SIZE];

/// Runs `data`: each round writes to blocks, damages the destination, and sends the written blocks.
/// Returns how many blocks were to travel as references or might as deltas, and how many were
/// rejected.
pub(crate) fn run(data: &[u8]) -> (usize, usize) {
    let (mut built_on, mut all_rejected) = (0, 0);
    let mut bytes = Bytes(data);
    let mut source = Source::new(bytes.next());
    let mut sink = Memory {
        blocks: vec![[0; BLOCK_SIZE]; BLOCKS],
        other: vec![[0; BLOCK_SIZE]; BLOCKS],
    };
    let mut decoder = Decoder::new(KEY);
    for round in 0..ROUNDS_MAX {
        if bytes.0.is_empty() {
            break;
        }
        let written = source.write(&mut bytes);
        let damaged = sink.damage(&mut bytes);
        let before = sink.blocks.clone();
        sink.other.clone_from(&before);
        let (frame, decisions) = source.frame(round as u64 + 1, &written, bytes.next());
        let outcome = decoder.decode(&frame, &Limits::default(), &mut sink);
        let outcome = outcome.expect("a frame that was encoded is sound");
        let rejected: BTreeSet<usize> = outcome.rejected.iter().flat_map(blocks).collect();
        all_rejected += rejected.len();
        let builds = |decision: &&Decision| {
            matches!(
                decision,
                Decision::Reference { .. }
                    | Decision::Shared { .. }
                    | Decision::Kept { .. }
                    | Decision::KeptRun { .. }
                    | Decision::Changed { .. }
            )
        };
        built_on += decisions.iter().filter(builds).count();
        for (&block, decision) in written.iter().zip(&decisions) {
            if rejected.contains(&block) {
                assert!(
                    sink.blocks[block] == before[block],
                    "a rejected block keeps its content"
                );
                match decision {
                    Decision::Reference { source, .. } | Decision::Shared { source, .. } => {
                        assert!(
                            damaged.contains(&(source.block as usize)),
                            "what holds is used"
                        );
                    }
                    // A fingerprint may miss a change, once in 16 million. The kept content is
                    // unknown.
                    Decision::Changed { .. } | Decision::Kept { .. } | Decision::KeptRun { .. } => {
                    }
                    other => panic!("{other:?} cannot be rejected"),
                }
                source.held[block] = None;
            } else if *decision != Decision::Skip {
                assert!(
                    sink.blocks[block] == source.memory[block],
                    "what arrives is what was sent"
                );
            }
        }
        source.settle(&written, &rejected);
        // Another party reports the loss to the source: these blocks are sent whole again.
        for block in damaged {
            source.held[block] = None;
        }
    }
    (built_on, all_rejected)
}

fn blocks((_, range): &(RegionId, BlockRange)) -> impl Iterator<Item = usize> + use<> {
    range.blocks().map(|block| block as usize)
}

fn id(block: usize) -> BlockId {
    BlockId {
        region: RegionId(0),
        block: block as u64,
    }
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((byte, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *byte
    }

    fn block(&mut self) -> usize {
        usize::from(self.next()) % BLOCKS
    }
}

struct Source {
    memory: Vec<Block>,
    /// Digests of the destination's known content.
    held: Vec<Option<Digest>>,
    digests: Vec<Option<Digest>>,
    hasher: Hasher,
    encoder: Encoder,
}

impl Source {
    /// `room` is the memory for deltas: none, or enough for a part of the blocks.
    fn new(room: u8) -> Self {
        Self {
            memory: vec![[0; BLOCK_SIZE]; BLOCKS],
            held: vec![None; BLOCKS],
            digests: vec![None; BLOCKS],
            hasher: Hasher::new(KEY),
            encoder: Encoder::for_guest(BLOCKS, usize::from(room) * 100),
        }
    }

    fn write(&mut self, bytes: &mut Bytes<'_>) -> Vec<usize> {
        let mut written = BTreeSet::new();
        for _ in 0..bytes.next() % 16 {
            let block = bytes.block();
            written.insert(block);
            match bytes.next() % 5 {
                0 => self.memory[block].fill(0),
                1 => self.memory[block].fill(bytes.next()),
                2 => self.memory[block] = self.memory[bytes.block()],
                3 => {
                    let seed = bytes.next();
                    let mut reader = blake3::Hasher::new().update(&[seed]).finalize_xof();
                    reader.fill(&mut self.memory[block]);
                }
                _ => {
                    let at = usize::from(bytes.next()) * 16 + usize::from(bytes.next() % 16);
                    let length = usize::from(bytes.next());
                    let end = BLOCK_SIZE.min(at + length + 1);
                    self.memory[block][at..end].fill(bytes.next());
                }
            }
        }
        written.into_iter().collect()
    }

    fn frame(&mut self, seq: u64, written: &[usize], how: u8) -> (Vec<u8>, Vec<Decision>) {
        let content: Vec<Block> = written.iter().map(|block| self.memory[*block]).collect();
        let mut staged = Vec::new();
        self.hasher.stage(&content, &mut staged);
        let mut decisions = Vec::new();
        for (&block, staged) in written.iter().zip(&staged) {
            let Staged::Content(digest) = *staged else {
                self.digests[block] = None;
                decisions.push(Decision::Zero);
                continue;
            };
            self.digests[block] = Some(digest);
            let elsewhere = self.held.iter().position(|held| *held == Some(digest));
            decisions.push(match (self.held[block], elsewhere) {
                (Some(held), _) if held == digest => Decision::Skip,
                (_, Some(other)) if how & 1 == 0 => Decision::Reference {
                    source: id(other),
                    digest,
                },
                (_, Some(other)) if how & 0x40 != 0 => Decision::Shared {
                    migration: OTHER,
                    source: id(other),
                    digest,
                },
                _ if how & 0x28 == 0x28 => Decision::KeptRun { digest },
                _ if how & 0x20 != 0 => Decision::Kept { digest },
                (Some(base), _) => Decision::Changed { digest, base },
                (None, _) => Decision::Literal { digest },
            });
        }
        let compression = match how / 2 % 4 {
            _ if how & 0x10 != 0 => Compression::ZstdLong(1),
            0 => Compression::Raw,
            1 => Compression::Lz4,
            2 => Compression::Zstd(1),
            _ => Compression::Lz4Fast,
        };
        let ids: Vec<_> = written.iter().map(|block| id(*block)).collect();
        let frame = self
            .encoder
            .encode_frame(seq, &ids, &content, &decisions, compression);
        (frame.expect("so few blocks fit").bytes, decisions)
    }

    fn settle(&mut self, written: &[usize], rejected: &BTreeSet<usize>) {
        for block in written.iter().filter(|block| !rejected.contains(block)) {
            self.held[*block] = self.digests[*block];
        }
    }
}

/// The migration of another guest, whose content equals the destination's at the beginning of the
/// round.
const OTHER: MigrationId = MigrationId([9; 8]);

struct Memory {
    blocks: Vec<Block>,
    other: Vec<Block>,
}

impl Memory {
    fn damage(&mut self, bytes: &mut Bytes<'_>) -> BTreeSet<usize> {
        let mut damaged = BTreeSet::new();
        for _ in 0..bytes.next() % 4 {
            let block = bytes.block();
            damaged.insert(block);
            self.blocks[block][usize::from(bytes.next()) * 16] ^= bytes.next() | 1;
        }
        damaged
    }
}

impl BlockSink for Memory {
    type Error = Infallible;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        (region == RegionId(0)).then_some(BLOCKS as u64)
    }

    fn accepts(&self, _: BlockId, _: u64) -> bool {
        true
    }

    fn read(&mut self, id: BlockId, content: &mut Block) -> bool {
        *content = self.blocks[id.block as usize];
        true
    }

    fn read_shared(&mut self, migration: MigrationId, id: BlockId, content: &mut Block) -> bool {
        *content = self.other[id.block as usize];
        migration == OTHER
    }

    fn read_kept(&mut self, id: BlockId, _: Option<&Digest>, content: &mut Block) -> bool {
        *content = self.other[id.block as usize];
        true
    }

    fn apply(&mut self, _: u64, writes: &[BlockWrite<'_>]) -> Result<(), Infallible> {
        for write in writes {
            let range = write.range.start as usize..write.range.end() as usize;
            let target = self.blocks[range].as_flattened_mut();
            match write.content {
                Content::Zero => target.fill(0),
                Content::Bytes(bytes) => target.copy_from_slice(bytes),
            }
        }
        Ok(())
    }
}
