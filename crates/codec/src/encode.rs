//! Encodes blocks into frames at the source.

use crate::compress::{Compressor, Method};
use crate::digest::of_run;
use crate::frame::{
    COMPRESSION_LONG, COMPRESSION_LONG_BEGINS, COMPRESSION_LZ4, COMPRESSION_RAW, COMPRESSION_ZSTD,
    Entry, HEADER_BYTES, Header, Kind, ORDER_BYTES,
};
use crate::versions::Versions;
use crate::{Compression, Digest};
use longhaul_protocol::limits::{FRAME_BLOCKS_MAX, FRAME_BYTES_MAX};
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId};
use std::{fmt, io};

/// Slots of the table that finds duplicates: a power of two, twice the blocks of a frame.
const DUPLICATE_SLOTS: usize = 2 * FRAME_BLOCKS_MAX;
/// A slot without a literal.
const NO_LITERAL: u16 = u16::MAX;

/// Identifies one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    /// The region that it is in.
    pub region: RegionId,
    /// Its index there.
    pub block: u64,
}

/// How a block travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Not at all: the destination has, or is getting, this very content for this very block.
    Skip,
    /// As zero.
    Zero,
    /// As a reference to a block with the same content at the destination, which checks it against
    /// the digest.
    Reference {
        /// The block that holds it.
        source: BlockId,
        /// The content's digest.
        digest: Digest,
    },
    /// As a reference to a block of another guest that this source has sent or is sending to the
    /// destination, which checks it against the digest.
    Shared {
        /// The other guest's migration.
        migration: MigrationId,
        /// The block of it that holds the content.
        source: BlockId,
        /// The content's digest, made with the key that both migrations share.
        digest: Digest,
    },
    /// As a digest of content that the destination may know, in this very block or anywhere; the
    /// destination verifies the content that it finds.
    Kept {
        /// The content's digest.
        digest: Digest,
    },
    /// As part of a run of content that the destination may know in these very blocks: one digest
    /// is sent for consecutive blocks.
    KeptRun {
        /// The content's digest.
        digest: Digest,
    },
    /// As a literal, or as a duplicate of an earlier literal of the frame.
    Literal {
        /// The content's digest.
        digest: Digest,
    },
    /// As a literal, or as a delta against the destination's content of this very block; the
    /// destination checks the result against the digest.
    Changed {
        /// The content's digest.
        digest: Digest,
        /// The digest of the destination's content.
        base: Digest,
    },
}

/// A frame, with the measurements that the choice of the next one's compression depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EncodedFrame {
    /// The bytes to send.
    pub bytes: Vec<u8>,
    /// Blocks that the frame describes: all but the skipped ones.
    pub blocks: usize,
    /// Blocks among them that equal another literal of the frame.
    pub duplicates: usize,
    /// Blocks among them that travel as a delta.
    pub deltas: usize,
    /// Those deltas before compression, in bytes.
    pub delta_bytes: usize,
    /// Literals and deltas before compression, in bytes.
    pub payload_bytes: usize,
    /// Literals and deltas as stored in the frame, in bytes.
    pub stored_bytes: usize,
    /// How the payload is stored: as requested, raw where that saves nothing, or with the level of
    /// a running [`Compression::ZstdLong`] frame that is too young for a change.
    pub compression: Compression,
}

/// A reason why no frame can be made.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The three slices do not describe the same blocks.
    #[error("{blocks} blocks with {content} contents and {decisions} decisions: give one of each")]
    Mismatch {
        /// Block names given.
        blocks: usize,
        /// Contents given.
        content: usize,
        /// Decisions given.
        decisions: usize,
    },
    /// There are more blocks than a frame may hold.
    #[error("{blocks} blocks in one frame: give at most {FRAME_BLOCKS_MAX}")]
    TooManyBlocks {
        /// Blocks given.
        blocks: usize,
    },
    /// The frame is longer than a destination accepts.
    #[error("a frame of {bytes} bytes: at most {FRAME_BYTES_MAX} are accepted, give fewer blocks")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A compressor failed: there is no memory for its context.
    #[error("cannot compress a frame")]
    Compression(#[source] io::Error),
}

/// Encodes frames, and holds the contexts and buffers that are reused for each, and the versions
/// that deltas are made against. There is one per worker.
pub struct Encoder {
    compressor: Compressor,
    versions: Versions,
    entries: Entries,
    literals: Literals,
    deltas: Vec<u8>,
    gathered: Vec<u8>,
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").finish_non_exhaustive()
    }
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Encoder {
    /// Creates an encoder that remembers no versions and so sends no deltas.
    pub fn new() -> Self {
        Self::with_versions(0)
    }

    /// Creates an encoder that makes deltas, for as many blocks as fit into `bytes` of memory with
    /// the finest prints.
    pub fn with_versions(bytes: usize) -> Self {
        Self::for_guest(bytes / 1024, bytes)
    }

    /// Creates an encoder that makes deltas for a guest of `blocks` blocks: it remembers earlier
    /// versions in at most `bytes` of memory.
    pub fn for_guest(blocks: usize, bytes: usize) -> Self {
        Self {
            compressor: Compressor::new(),
            versions: Versions::new(bytes, blocks),
            entries: Entries::default(),
            literals: Literals::new(),
            deltas: Vec::new(),
            gathered: Vec::new(),
        }
    }

    /// Remembers a version of a block, as if it had just been sent.
    pub fn keep_version(&mut self, id: BlockId, digest: &Digest, content: &[u8; BLOCK_SIZE]) {
        self.versions.sent(id, digest, content);
    }

    /// Begins a new connection, whose receiver has none of the earlier frames.
    pub fn forget_frames(&mut self) {
        self.compressor.forget_frames();
    }

    /// Encodes the blocks, in their order, into one frame.
    ///
    /// `content` holds the copy of each block that its decision was based on. A block should not be
    /// named twice. Consecutive blocks with equal decisions cost no more than one.
    pub fn encode_frame(
        &mut self,
        seq: u64,
        blocks: &[BlockId],
        content: &[[u8; BLOCK_SIZE]],
        decisions: &[Decision],
        compression: Compression,
    ) -> Result<EncodedFrame, EncodeError> {
        if blocks.len() != content.len() || blocks.len() != decisions.len() {
            return Err(EncodeError::Mismatch {
                blocks: blocks.len(),
                content: content.len(),
                decisions: decisions.len(),
            });
        }
        if blocks.len() > FRAME_BLOCKS_MAX {
            return Err(EncodeError::TooManyBlocks {
                blocks: blocks.len(),
            });
        }
        self.entries.clear();
        self.literals.clear();
        self.deltas.clear();
        let mut counts = Counts::default();
        for (index, (id, decision)) in blocks.iter().zip(decisions).enumerate() {
            self.add(*id, index, content, decision, &mut counts);
        }
        self.entries.close();
        let payload_bytes = self.literals.bytes() + self.deltas.len();
        let compressed = if compression == Compression::Raw {
            None
        } else {
            let gathered = &mut self.gathered;
            let payload = self.literals.payload(content, &self.deltas, gathered);
            self.compressor
                .compress(payload, compression)
                .map_err(EncodeError::Compression)?
        };
        let (bytes, stored_bytes, compression) = match compressed {
            Some(made) => {
                let length = made.stored.len();
                let method = Some(made.method);
                let mut bytes = self.entries.begin(seq, payload_bytes, length, method)?;
                bytes.extend_from_slice(made.stored);
                (bytes, length, made.compression)
            }
            None => {
                let mut bytes = self
                    .entries
                    .begin(seq, payload_bytes, payload_bytes, None)?;
                self.literals.gather(content, &self.deltas, &mut bytes);
                (bytes, payload_bytes, Compression::Raw)
            }
        };
        Ok(EncodedFrame {
            bytes,
            blocks: counts.described,
            duplicates: counts.duplicates,
            deltas: counts.deltas,
            delta_bytes: self.deltas.len(),
            payload_bytes,
            stored_bytes,
            compression,
        })
    }

    /// Adds one block to the frame.
    fn add(
        &mut self,
        id: BlockId,
        index: usize,
        content: &[[u8; BLOCK_SIZE]],
        decision: &Decision,
        counts: &mut Counts,
    ) {
        match *decision {
            Decision::Skip => return,
            Decision::Zero => {
                self.versions.forget(id);
                self.entries.push(id, Kind::Zero);
            }
            Decision::Reference { source, digest } => {
                self.versions.sent(id, &digest, &content[index]);
                let BlockId { region, block } = source;
                let kind = Kind::Reference {
                    region,
                    start: block,
                };
                self.entries.push(id, kind);
                self.entries.digests.extend_from_slice(&digest.0);
            }
            Decision::Shared {
                migration,
                source: BlockId { region, block },
                digest,
            } => {
                self.versions.sent(id, &digest, &content[index]);
                let kind = Kind::Shared {
                    migration,
                    region,
                    start: block,
                };
                self.entries.push(id, kind);
                self.entries.digests.extend_from_slice(&digest.0);
            }
            Decision::Kept { digest } => {
                self.versions.sent(id, &digest, &content[index]);
                self.entries.push(id, Kind::Kept);
                self.entries.digests.extend_from_slice(&digest.0);
            }
            Decision::KeptRun { digest } => {
                self.versions.sent(id, &digest, &content[index]);
                self.entries.push(id, Kind::KeptRun);
                self.entries.digests.extend_from_slice(&digest.0);
            }
            Decision::Literal { digest } => {
                self.versions.sent(id, &digest, &content[index]);
                self.add_content(id, index, content, &digest, counts);
            }
            Decision::Changed { digest, base } => {
                let content_now = &content[index];
                let before = self.deltas.len();
                let delta =
                    self.versions
                        .sent_again(id, &base, &digest, content_now, &mut self.deltas);
                if delta && self.literals.find(&digest, index, content).is_err() {
                    self.entries.push(id, Kind::Delta);
                    self.entries.digests.extend_from_slice(&digest.0);
                    counts.deltas += 1;
                } else {
                    self.deltas.truncate(before);
                    self.add_content(id, index, content, &digest, counts);
                }
            }
        }
        counts.described += 1;
    }

    /// Adds a block whose content the frame carries.
    fn add_content(
        &mut self,
        id: BlockId,
        index: usize,
        content: &[[u8; BLOCK_SIZE]],
        digest: &Digest,
        counts: &mut Counts,
    ) {
        let kind = match self.literals.find(digest, index, content) {
            Ok(literal) => {
                counts.duplicates += 1;
                Kind::Duplicate { literal }
            }
            Err(slot) => {
                self.literals.add(slot, digest, index);
                Kind::Literal
            }
        };
        self.entries.push(id, kind);
    }
}

/// The number of blocks of a frame by how they travel.
#[derive(Default)]
struct Counts {
    described: usize,
    duplicates: usize,
    deltas: usize,
}

/// The entries of an unfinished frame; the last one may still grow.
#[derive(Default)]
struct Entries {
    bytes: Vec<u8>,
    count: u16,
    open: Option<Entry>,
    /// Digests of the blocks of the open entry, if it has any.
    digests: Vec<u8>,
}

impl Entries {
    fn clear(&mut self) {
        self.bytes.clear();
        self.count = 0;
        self.open = None;
        self.digests.clear();
    }

    fn push(&mut self, id: BlockId, kind: Kind) {
        if let Some(open) = &mut self.open
            && open.extend(id.region, id.block, kind)
        {
            return;
        }
        self.close();
        self.count += 1;
        let range = BlockRange::new(id.block, 1);
        self.open = Some(Entry {
            region: id.region,
            range,
            kind,
        });
    }

    fn close(&mut self) {
        if let Some(entry) = self.open.take() {
            entry.write(&mut self.bytes);
            if entry.kind == Kind::KeptRun {
                let run = of_run(&self.digests);
                self.bytes.extend_from_slice(&run.0);
                self.digests.clear();
            }
            self.bytes.append(&mut self.digests);
        }
    }

    /// Returns a frame up to its payload, with capacity for that.
    fn begin(
        &self,
        seq: u64,
        payload_bytes: usize,
        stored_bytes: usize,
        method: Option<Method>,
    ) -> Result<Vec<u8>, EncodeError> {
        let (compression, order) = match method {
            None => (COMPRESSION_RAW, None),
            Some(Method::Lz4) => (COMPRESSION_LZ4, None),
            Some(Method::Zstd) => (COMPRESSION_ZSTD, None),
            Some(Method::Long { begins, order }) => {
                let begins = if begins {
                    COMPRESSION_LONG_BEGINS
                } else {
                    COMPRESSION_LONG
                };
                (begins, Some(order))
            }
        };
        let order_bytes = if order.is_some() { ORDER_BYTES } else { 0 };
        let length = HEADER_BYTES + order_bytes + self.bytes.len() + stored_bytes;
        if length > FRAME_BYTES_MAX {
            return Err(EncodeError::TooLong { bytes: length });
        }
        let header = Header {
            compression,
            entries: self.count,
            payload_bytes: payload_bytes as u32,
            seq,
            stored_bytes: stored_bytes as u32,
        };
        let mut frame = Vec::with_capacity(length);
        frame.extend_from_slice(&header.to_bytes());
        if let Some(order) = order {
            frame.extend_from_slice(&order.to_le_bytes());
        }
        frame.extend_from_slice(&self.bytes);
        Ok(frame)
    }
}

/// The literals of one frame, with an open hash table of their digests that is at most half full.
struct Literals {
    slots: [u16; DUPLICATE_SLOTS],
    /// Digest and index in the batch of each literal.
    found: Vec<(Digest, usize)>,
}

impl Literals {
    fn new() -> Self {
        Self {
            slots: [NO_LITERAL; DUPLICATE_SLOTS],
            found: Vec::with_capacity(FRAME_BLOCKS_MAX),
        }
    }

    fn clear(&mut self) {
        self.slots.fill(NO_LITERAL);
        self.found.clear();
    }

    /// Returns the literal that equals block `index`, or else the slot for it.
    fn find(
        &self,
        digest: &Digest,
        index: usize,
        content: &[[u8; BLOCK_SIZE]],
    ) -> Result<u64, usize> {
        let mut slot = usize::from(u16::from_le_bytes([digest.0[0], digest.0[1]]));
        loop {
            slot %= DUPLICATE_SLOTS;
            let literal = self.slots[slot];
            if literal == NO_LITERAL {
                return Err(slot);
            }
            let (other, first) = &self.found[usize::from(literal)];
            if other == digest && content[*first] == content[index] {
                return Ok(u64::from(literal));
            }
            slot += 1;
        }
    }

    /// Adds block `index` as the next literal; `slot` is its place in the table.
    fn add(&mut self, slot: usize, digest: &Digest, index: usize) {
        self.slots[slot] = self.found.len() as u16;
        self.found.push((*digest, index));
    }

    /// Returns all literals in sequence, followed by the deltas: in place, or gathered if they are
    /// not adjacent.
    fn payload<'a>(
        &self,
        content: &'a [[u8; BLOCK_SIZE]],
        deltas: &'a [u8],
        gathered: &'a mut Vec<u8>,
    ) -> &'a [u8] {
        let (Some((_, first)), Some((_, last))) = (self.found.first(), self.found.last()) else {
            return deltas;
        };
        if deltas.is_empty() && last - first + 1 == self.found.len() {
            return content[*first..=*last].as_flattened();
        }
        gathered.clear();
        self.gather(content, deltas, gathered);
        gathered
    }

    /// Appends all literals in sequence, followed by the deltas.
    fn gather(&self, content: &[[u8; BLOCK_SIZE]], deltas: &[u8], into: &mut Vec<u8>) {
        for run in self.found.chunk_by(|(_, one), (_, next)| one + 1 == *next) {
            if let [(_, first), ..] = run {
                into.extend_from_slice(content[*first..][..run.len()].as_flattened());
            }
        }
        into.extend_from_slice(deltas);
    }

    /// Returns the length of all literals, in bytes.
    fn bytes(&self) -> usize {
        self.found.len() * BLOCK_SIZE
    }
}
