//! Regions: arrays of 4 KiB blocks with one owner at a time.

use serde::{Deserialize, Serialize};

/// Bytes in a block, the unit of content.
pub const BLOCK_SIZE: usize = 4096;

/// Identifies a region within one migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RegionId(pub u16);

/// Consecutive blocks of one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BlockRange {
    /// First block.
    pub start: u64,
    /// Number of blocks.
    pub count: u64,
}

impl BlockRange {
    /// Returns `count` blocks from `start` on.
    pub fn new(start: u64, count: u64) -> Self {
        Self { start, count }
    }

    /// Returns the first block after the range.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.count)
    }

    /// Returns the blocks, in ascending order.
    pub fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        self.start..self.end()
    }
}

/// The properties of a region that both sides must agree on before its first block travels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionSpec {
    /// Its id in this migration.
    pub id: RegionId,
    /// Its name at both ends, such as `pc.ram`.
    pub name: String,
    /// Its length in blocks.
    pub blocks: u64,
    /// Whether a block must be on stable storage before it counts as handed over.
    pub durable: bool,
    /// Whether every block at the destination is zero before the first one arrives.
    pub starts_zero: bool,
}

/// What a region is the content of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// A RAM block of the guest's QEMU.
    Memory,
    /// The image of a disk.
    Disk,
}

impl RegionSpec {
    /// Returns the kind of the region. On the wire it is not separate: exactly the disks are
    /// durable.
    pub fn kind(&self) -> RegionKind {
        match self.durable {
            true => RegionKind::Disk,
            false => RegionKind::Memory,
        }
    }
}
