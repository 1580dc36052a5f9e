//! Runs Longhaul's own pipelines: staging, digests, decisions, frames; and decoding.

use std::collections::HashMap;
use std::convert::Infallible;
use std::hash::BuildHasherDefault;

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, Decoder, Digest, DigestKey,
    EncodedFrame, Encoder, Hasher, Limits, Staged,
};
use longhaul_protocol::{BLOCK_SIZE, MigrationId, RegionId};

use super::measure::{Clock, Cost};
use super::{Block, Pipeline, wrong};
use longhaul_lab::error::LabError;

const FRAME_BLOCKS: usize = 64;
/// The source's memory for earlier versions: an agent's default for a guest of 2 GiB.
const VERSIONS_BYTES: usize = 28 << 20;
const GUEST_BLOCKS: usize = (2 << 30) / BLOCK_SIZE;

/// A source and its knowledge of the destination.
pub(super) struct Longhaul {
    compression: Compression,
    hasher: Hasher,
    encoder: Encoder,
    decoder: Decoder,
    index: Index,
    /// Number of this migration's first block: consecutive migrations have different blocks.
    base: usize,
    seq: u64,
    staging: Vec<Block>,
    staged: Vec<Staged>,
    decisions: Vec<Decision>,
}

impl Longhaul {
    /// Creates a migration of a memory of `blocks` blocks.
    pub(super) fn new(compression: Compression, blocks: usize) -> Self {
        let key = DigestKey([7; 32]);
        let mut encoder = Encoder::for_guest(GUEST_BLOCKS, VERSIONS_BYTES);
        // Other blocks, so that their memory is allocated before anything is measured.
        for index in (GUEST_BLOCKS..2 * GUEST_BLOCKS).step_by(4) {
            encoder.keep_version(block(index), &Digest([1; 16]), &[0; BLOCK_SIZE]);
        }
        Self {
            compression,
            hasher: Hasher::new(key),
            encoder,
            decoder: Decoder::new(key),
            index: Index::new(blocks),
            base: 0,
            seq: 0,
            staging: vec![[0; BLOCK_SIZE]; FRAME_BLOCKS],
            staged: Vec::new(),
            decisions: Vec::new(),
        }
    }

    /// Stages, decides, encodes and decodes one frame.
    fn frame(
        &mut self,
        first: usize,
        blocks: &[Block],
        sink: &mut Memory<'_>,
        cost: &mut Cost,
    ) -> Result<(), LabError> {
        self.seq += 1;
        let mut clock = Clock::start()?;
        let staging = &mut self.staging[..blocks.len()];
        staging.copy_from_slice(blocks);
        clock.lap(&mut cost.copy)?;
        self.staged.clear();
        self.hasher.stage(staging, &mut self.staged);
        clock.lap(&mut cost.stage)?;
        let mut ids = [block(0); FRAME_BLOCKS];
        for (id, index) in ids.iter_mut().zip(first..) {
            *id = block(self.base + index);
        }
        self.decisions.clear();
        let decided = self.staged.iter().zip(first..);
        self.decisions
            .extend(decided.map(|(staged, index)| self.index.decide(*staged, index, self.base)));
        self.index.sent();
        clock.lap(&mut cost.decide)?;
        let ids = &ids[..blocks.len()];
        let EncodedFrame { bytes, .. } = self
            .encoder
            .encode_frame(self.seq, ids, staging, &self.decisions, self.compression)
            .map_err(|error| wrong(&error))?;
        clock.lap(&mut cost.frame)?;
        cost.sent += bytes.len();
        let outcome = self
            .decoder
            .decode(&bytes, &Limits::default(), sink)
            .map_err(|error| wrong(&error))?;
        clock.lap(&mut cost.decode)?;
        match outcome.rejected.is_empty() {
            true => Ok(()),
            false => Err(wrong(&"a reference did not hold")),
        }
    }
}

impl Pipeline for Longhaul {
    fn clear(&mut self) {
        let blocks = self.index.held.len();
        self.base += blocks;
        self.index = Index::new(blocks);
    }

    fn send(
        &mut self,
        first: usize,
        blocks: &[Block],
        destination: &mut [Block],
    ) -> Result<Cost, LabError> {
        let mut cost = Cost {
            bytes: size_of_val(blocks),
            ..Cost::default()
        };
        let mut sink = Memory {
            blocks: destination,
            base: self.base,
        };
        for (index, blocks) in blocks.chunks(FRAME_BLOCKS).enumerate() {
            self.frame(first + index * FRAME_BLOCKS, blocks, &mut sink, &mut cost)?;
        }
        Ok(cost)
    }
}

/// Returns the size of a block's delta before compression; `None` where the block itself is sent.
pub(in crate::bench) fn delta_bytes(
    before: &Block,
    after: &Block,
) -> Result<Option<usize>, LabError> {
    let mut encoder = Encoder::for_guest(1, BLOCK_SIZE);
    // They only have to differ.
    let [base, digest] = [Digest([1; 16]), Digest([2; 16])];
    encoder.keep_version(block(0), &base, before);
    let decision = [Decision::Changed { digest, base }];
    let frame = encoder
        .encode_frame(1, &[block(0)], &[*after], &decision, Compression::Raw)
        .map_err(|error| wrong(&error))?;
    Ok((frame.deltas == 1).then_some(frame.delta_bytes))
}

/// The cost of copying blocks into frames and out of them, and nothing else.
pub(super) struct Raw {
    staging: Vec<Block>,
    frame: Vec<Block>,
}

impl Raw {
    pub(super) fn new() -> Self {
        Self {
            staging: vec![[0; BLOCK_SIZE]; FRAME_BLOCKS],
            frame: vec![[0; BLOCK_SIZE]; FRAME_BLOCKS],
        }
    }
}

impl Pipeline for Raw {
    fn clear(&mut self) {}

    fn send(
        &mut self,
        first: usize,
        blocks: &[Block],
        destination: &mut [Block],
    ) -> Result<Cost, LabError> {
        let bytes = size_of_val(blocks);
        let mut cost = Cost {
            bytes,
            sent: bytes,
            ..Cost::default()
        };
        let there = destination[first..].chunks_mut(FRAME_BLOCKS);
        for (blocks, there) in blocks.chunks(FRAME_BLOCKS).zip(there) {
            let mut clock = Clock::start()?;
            let (staging, frame) = (
                &mut self.staging[..blocks.len()],
                &mut self.frame[..blocks.len()],
            );
            staging.copy_from_slice(blocks);
            clock.lap(&mut cost.copy)?;
            frame.copy_from_slice(staging);
            clock.lap(&mut cost.frame)?;
            there[..blocks.len()].copy_from_slice(frame);
            clock.lap(&mut cost.decode)?;
        }
        Ok(cost)
    }
}

fn block(index: usize) -> BlockId {
    BlockId {
        region: RegionId(0),
        block: index as u64,
    }
}

/// Digests are random already: their first half is used as the hash.
#[derive(Default)]
struct FirstHalf(u64);

impl std::hash::Hasher for FirstHalf {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(half) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*half);
        }
    }
}

/// The destination's content: the digest of each block, and the place of each content.
struct Index {
    held: Vec<Option<Digest>>,
    found: HashMap<u128, usize, BuildHasherDefault<FirstHalf>>,
    /// The content of the frame being built; it can be referred to from the next one on.
    coming: Vec<(usize, Option<Digest>)>,
}

impl Index {
    fn new(blocks: usize) -> Self {
        Self {
            held: vec![None; blocks],
            found: HashMap::with_capacity_and_hasher(blocks, BuildHasherDefault::default()),
            coming: Vec::new(),
        }
    }

    fn decide(&mut self, staged: Staged, index: usize, base: usize) -> Decision {
        let Staged::Content(digest) = staged else {
            self.coming.push((index, None));
            return Decision::Zero;
        };
        if self.held[index] == Some(digest) {
            return Decision::Skip;
        }
        self.coming.push((index, Some(digest)));
        match self.found.get(&u128::from_le_bytes(digest.0)) {
            Some(source) if self.held[*source] == Some(digest) => Decision::Reference {
                source: block(base + *source),
                digest,
            },
            _ => match self.held[index] {
                Some(held) => Decision::Changed { digest, base: held },
                None => Decision::Literal { digest },
            },
        }
    }

    fn sent(&mut self) {
        for (index, digest) in self.coming.drain(..) {
            self.held[index] = digest;
            if let Some(digest) = digest {
                self.found.insert(u128::from_le_bytes(digest.0), index);
            }
        }
    }
}

/// The destination's memory.
struct Memory<'a> {
    blocks: &'a mut [Block],
    /// The number of the first block.
    base: usize,
}

impl BlockSink for Memory<'_> {
    type Error = Infallible;

    fn region_blocks(&self, _: RegionId) -> Option<u64> {
        Some((self.base + self.blocks.len()) as u64)
    }

    fn accepts(&self, _: BlockId, _: u64) -> bool {
        true
    }

    fn read(&mut self, id: BlockId, content: &mut Block) -> bool {
        let index = (id.block as usize).checked_sub(self.base);
        let held = index.and_then(|index| self.blocks.get(index));
        held.map(|held| *content = *held).is_some()
    }

    fn read_shared(&mut self, _: MigrationId, _: BlockId, _: &mut Block) -> bool {
        false
    }

    fn apply(&mut self, _: u64, writes: &[BlockWrite<'_>]) -> Result<(), Infallible> {
        for write in writes {
            let start = write.range.start as usize - self.base;
            let end = write.range.end() as usize - self.base;
            let blocks = self.blocks[start..end].as_flattened_mut();
            match write.content {
                Content::Zero => blocks.fill(0),
                Content::Bytes(bytes) => blocks.copy_from_slice(bytes),
            }
        }
        Ok(())
    }
}
