//! The layout of a frame: its header, its entries, and their numbers.

use longhaul_protocol::{BlockRange, MigrationId, RegionId};

/// The version of the frame format that this crate writes and reads.
pub const FRAME_VERSION: u8 = 2;

/// Bytes in the header.
pub(crate) const HEADER_BYTES: usize = 20;

pub(crate) const COMPRESSION_RAW: u8 = 0;
pub(crate) const COMPRESSION_LZ4: u8 = 1;
pub(crate) const COMPRESSION_ZSTD: u8 = 2;
pub(crate) const COMPRESSION_LONG_BEGINS: u8 = 3;
pub(crate) const COMPRESSION_LONG: u8 = 4;

/// Bytes of the order number, which follows the header of a frame with one of the last two
/// compressions.
pub(crate) const ORDER_BYTES: usize = 4;

pub(crate) const KIND_ZERO: u8 = 0;
pub(crate) const KIND_LITERAL: u8 = 1;
pub(crate) const KIND_DUPLICATE: u8 = 2;
pub(crate) const KIND_REFERENCE: u8 = 3;
pub(crate) const KIND_DELTA: u8 = 4;
pub(crate) const KIND_SHARED: u8 = 5;
pub(crate) const KIND_KEPT: u8 = 6;
pub(crate) const KIND_KEPT_RUN: u8 = 7;

/// Blocks of a region whose content is compared by one digest at most: a run does not pass a
/// multiple of this.
pub const RUN_BLOCKS: u64 = 64;

/// The part of a frame before its entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) compression: u8,
    pub(crate) entries: u16,
    pub(crate) payload_bytes: u32,
    pub(crate) seq: u64,
    pub(crate) stored_bytes: u32,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = FRAME_VERSION;
        bytes[1] = self.compression;
        bytes[2..4].copy_from_slice(&self.entries.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.seq.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.stored_bytes.to_le_bytes());
        bytes
    }

    /// Parses a header of version [`FRAME_VERSION`].
    pub(crate) fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Self {
        let [
            _,
            compression,
            e0,
            e1,
            p0,
            p1,
            p2,
            p3,
            seq @ ..,
            s0,
            s1,
            s2,
            s3,
        ] = *bytes;
        Self {
            compression,
            entries: u16::from_le_bytes([e0, e1]),
            payload_bytes: u32::from_le_bytes([p0, p1, p2, p3]),
            seq: u64::from_le_bytes(seq),
            stored_bytes: u32::from_le_bytes([s0, s1, s2, s3]),
        }
    }
}

/// The encoding of an entry's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Zero,
    /// The next blocks of the payload.
    Literal,
    /// The blocks of the payload from this one on, which belong to earlier entries.
    Duplicate {
        literal: u64,
    },
    /// The destination's content of these blocks; a digest for each follows.
    Reference {
        region: RegionId,
        start: u64,
    },
    /// The destination's content of these blocks of another guest; a digest for each follows.
    Shared {
        migration: MigrationId,
        region: RegionId,
        start: u64,
    },
    /// Content that the destination may know; a digest for each follows.
    Kept,
    /// Content that the destination may know in these very blocks; one digest of all follows.
    KeptRun,
    /// The next deltas of the payload, against the destination's content of these very blocks; a
    /// digest of each result follows.
    Delta,
}

/// Consecutive blocks of one region that are encoded alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) region: RegionId,
    pub(crate) range: BlockRange,
    pub(crate) kind: Kind,
}

impl Entry {
    /// Adds one more block to the entry, if it continues it.
    pub(crate) fn extend(&mut self, region: RegionId, block: u64, kind: Kind) -> bool {
        let count = self.range.count;
        let continues = match (self.kind, kind) {
            (Kind::Zero, Kind::Zero)
            | (Kind::Literal, Kind::Literal)
            | (Kind::Delta, Kind::Delta)
            | (Kind::Kept, Kind::Kept) => true,
            (Kind::KeptRun, Kind::KeptRun) => !block.is_multiple_of(RUN_BLOCKS),
            (Kind::Duplicate { literal: first }, Kind::Duplicate { literal }) => {
                first.checked_add(count) == Some(literal)
            }
            (
                Kind::Reference {
                    region: first_region,
                    start: first,
                },
                Kind::Reference { region, start },
            ) => first_region == region && first.checked_add(count) == Some(start),
            (
                Kind::Shared {
                    migration: first_migration,
                    region: first_region,
                    start: first,
                },
                Kind::Shared {
                    migration,
                    region,
                    start,
                },
            ) => {
                (first_migration, first_region) == (migration, region)
                    && first.checked_add(count) == Some(start)
            }
            _ => false,
        };
        let next = self.range.start.checked_add(count) == Some(block);
        if self.region == region && next && continues {
            self.range.count += 1;
            return true;
        }
        false
    }

    /// Appends the entry, without the digests that follow it.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.push(match self.kind {
            Kind::Zero => KIND_ZERO,
            Kind::Literal => KIND_LITERAL,
            Kind::Duplicate { .. } => KIND_DUPLICATE,
            Kind::Reference { .. } => KIND_REFERENCE,
            Kind::Delta => KIND_DELTA,
            Kind::Shared { .. } => KIND_SHARED,
            Kind::Kept => KIND_KEPT,
            Kind::KeptRun => KIND_KEPT_RUN,
        });
        write_varint(bytes, u64::from(self.region.0));
        write_varint(bytes, self.range.start);
        write_varint(bytes, self.range.count);
        match self.kind {
            Kind::Zero | Kind::Literal | Kind::Delta | Kind::Kept | Kind::KeptRun => {}
            Kind::Duplicate { literal } => write_varint(bytes, literal),
            Kind::Reference { region, start } => {
                write_varint(bytes, u64::from(region.0));
                write_varint(bytes, start);
            }
            Kind::Shared {
                migration,
                region,
                start,
            } => {
                bytes.extend_from_slice(&migration.0);
                write_varint(bytes, u64::from(region.0));
                write_varint(bytes, start);
            }
        }
    }
}

/// Appends a number, seven bits per byte, lowest first; the top bit says that more bytes follow.
pub(crate) fn write_varint(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}
