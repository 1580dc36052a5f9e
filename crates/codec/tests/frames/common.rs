//! A destination in memory, and content to fill it with.

use longhaul_codec::{
    BlockId, BlockSink, BlockWrite, Compression, Content, Decision, Digest, DigestKey,
    EncodedFrame, Encoder, Hasher,
};
use longhaul_protocol::{BLOCK_SIZE, MigrationId, RegionId};
use std::collections::BTreeMap;

pub(crate) type Block = [u8; BLOCK_SIZE];

pub(crate) const KEY: DigestKey = DigestKey([0x42; 32]);
/// The regions of every test, and their lengths in blocks.
pub(crate) const REGIONS: [(RegionId, u64); 2] = [(RegionId(0), 300), (RegionId(7), 40)];

/// A destination that stores content and version of every written block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemorySink {
    pub(crate) blocks: BTreeMap<BlockId, (Vec<u8>, u64)>,
    pub(crate) unreadable: Option<BlockId>,
    /// The content of other guests here.
    pub(crate) shared: BTreeMap<(MigrationId, BlockId), Block>,
    /// Known content.
    pub(crate) kept: BTreeMap<BlockId, Block>,
    pub(crate) applies: usize,
    pub(crate) writes: usize,
    pub(crate) fails: bool,
}

impl MemorySink {
    pub(crate) fn new() -> Self {
        Self {
            blocks: BTreeMap::new(),
            unreadable: None,
            shared: BTreeMap::new(),
            kept: BTreeMap::new(),
            applies: 0,
            writes: 0,
            fails: false,
        }
    }

    pub(crate) fn content(&self, id: BlockId) -> &[u8] {
        self.blocks
            .get(&id)
            .map_or(&[0; BLOCK_SIZE], |(content, _)| content)
    }

    pub(crate) fn set(&mut self, id: BlockId, content: &Block, seq: u64) {
        self.blocks.insert(id, (content.to_vec(), seq));
    }
}

impl BlockSink for MemorySink {
    type Error = &'static str;

    fn region_blocks(&self, region: RegionId) -> Option<u64> {
        REGIONS
            .iter()
            .find(|(id, _)| *id == region)
            .map(|(_, blocks)| *blocks)
    }

    fn accepts(&self, id: BlockId, seq: u64) -> bool {
        self.blocks
            .get(&id)
            .is_none_or(|(_, version)| *version < seq)
    }

    fn read(&mut self, id: BlockId, content: &mut Block) -> bool {
        content.copy_from_slice(self.content(id));
        self.unreadable != Some(id)
    }

    fn read_shared(&mut self, migration: MigrationId, id: BlockId, content: &mut Block) -> bool {
        let shared = self.shared.get(&(migration, id));
        shared.map(|held| *content = *held).is_some()
    }

    fn read_kept(&mut self, id: BlockId, _: Option<&Digest>, content: &mut Block) -> bool {
        let kept = self.kept.get(&id);
        kept.map(|kept| *content = *kept).is_some()
    }

    fn apply(&mut self, seq: u64, writes: &[BlockWrite<'_>]) -> Result<(), Self::Error> {
        self.applies += 1;
        self.writes += writes.len();
        if self.fails {
            return Err("the guest's memory is gone");
        }
        for write in writes {
            for (index, block) in write.range.blocks().enumerate() {
                let content = match write.content {
                    Content::Zero => vec![0; BLOCK_SIZE],
                    Content::Bytes(bytes) => {
                        assert_eq!(bytes.len() as u64, write.range.count * BLOCK_SIZE as u64);
                        bytes[index * BLOCK_SIZE..][..BLOCK_SIZE].to_vec()
                    }
                };
                self.blocks.insert(
                    BlockId {
                        region: write.region,
                        block,
                    },
                    (content, seq),
                );
            }
        }
        Ok(())
    }
}

pub(crate) fn id(region: u16, block: u64) -> BlockId {
    BlockId {
        region: RegionId(region),
        block,
    }
}

pub(crate) fn digest(content: &Block) -> Digest {
    Hasher::new(KEY).digest(content)
}

pub(crate) fn literal(content: &Block) -> Decision {
    Decision::Literal {
        digest: digest(content),
    }
}

/// Returns compressible content, different for each seed.
pub(crate) fn text(seed: u64) -> Block {
    let words = ["migrate ", "block ", "page ", "host ", "frame ", "guest "];
    let mut state = seed;
    let mut text = String::new();
    while text.len() < BLOCK_SIZE {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        text.push_str(words[(state >> 33) as usize % words.len()]);
    }
    text.as_bytes()[..BLOCK_SIZE].try_into().unwrap()
}

/// Returns incompressible content, different for each seed.
pub(crate) fn noise(seed: u64) -> Block {
    let mut reader = blake3::Hasher::new()
        .update(&seed.to_le_bytes())
        .finalize_xof();
    let mut block = [0; BLOCK_SIZE];
    reader.fill(&mut block);
    block
}

pub(crate) fn encode(
    seq: u64,
    blocks: &[(BlockId, Block, Decision)],
    compression: Compression,
) -> EncodedFrame {
    encode_with(&mut Encoder::new(), seq, blocks, compression)
}

pub(crate) fn encode_with(
    encoder: &mut Encoder,
    seq: u64,
    blocks: &[(BlockId, Block, Decision)],
    compression: Compression,
) -> EncodedFrame {
    let ids: Vec<_> = blocks.iter().map(|(id, ..)| *id).collect();
    let content: Vec<_> = blocks.iter().map(|(_, content, _)| *content).collect();
    let decisions: Vec<_> = blocks.iter().map(|(.., decision)| *decision).collect();
    encoder
        .encode_frame(seq, &ids, &content, &decisions, compression)
        .unwrap()
}
