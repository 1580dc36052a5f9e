//! Disks that move with a guest: what a destination must know of one beforehand, and what of it is
//! still at the source when the guest goes on.

use crate::RegionId;
use serde::{Deserialize, Serialize};

/// How a disk's content stands in its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskFormat {
    /// Byte for byte.
    Raw,
    /// As QEMU's qcow2, in a file that grows.
    Qcow2(Qcow2),
}

/// What QEMU goes by when it opens a qcow2 image whose content has yet to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qcow2 {
    /// 2 or 3.
    pub version: u8,
    /// A cluster has 2 to the power of so many bytes.
    pub cluster_bits: u8,
    /// Whether parts of clusters are allocated by themselves (extended L2 entries).
    pub extended_l2: bool,
    /// What the guest sees, in bytes.
    pub disk_bytes: u64,
}

/// A base image, which is a raw disk: the destination has it from its own repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Its id: the digest of its manifest.
    pub image: [u8; 32],
    /// Its length, in bytes.
    pub bytes: u64,
    /// Whether the guest may run at the destination before all of it is there.
    pub lazily: bool,
    /// What of it the source's guests use: that comes first.
    pub hot: Vec<Hot>,
}

/// Bytes of a stripe of a base image, of which the last one may be shorter.
pub const STRIPE_BYTES: u64 = 256 << 10;
/// Most pages (of 4096 bytes) that a stripe has.
pub const STRIPE_PAGES: u8 = 64;

/// A stripe of a base image that is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hot {
    /// Which one.
    pub stripe: u32,
    /// How many of its pages the source has in memory.
    pub pages: u8,
}

/// A disk whose image travels with its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDisk {
    /// Its region.
    pub region: RegionId,
    /// Its name in the guest's description.
    pub name: String,
    /// The length of its image, in bytes, or the most that one which grows may have when the guest
    /// goes on: within the region's last block.
    pub image_bytes: u64,
    /// What of the image takes space at the source, in bytes.
    pub allocated_bytes: u64,
    /// What the image holds.
    pub format: DiskFormat,
    /// What of it may still be at the source when the guest goes on at the destination.
    pub pulled: Pulled,
    /// What the image stands on, which does not travel.
    pub base: Option<Base>,
}

/// What of a disk is fetched when its guest runs at the destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pulled {
    /// Nothing.
    #[default]
    Nothing,
    /// What the guest wrote often.
    Often,
    /// All of it.
    All,
}

/// The same blocks of consecutive chunks (of 64 blocks), which are still at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remaining {
    /// The first chunk.
    pub chunk: u32,
    /// How many chunks.
    pub chunks: u32,
    /// Which blocks of each, the first in the lowest bit. Bits beyond the region's end mean nothing.
    pub mask: u64,
    /// How much was written to each since the migration began, in blocks, up to 65535: what was
    /// written most travels first.
    pub written_blocks: u16,
}

/// A part of the list of what is left of one region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The region.
    pub region: RegionId,
    /// Where this part begins: the first one at 0.
    pub from_chunk: u32,
    /// Frames from this number on bring what the list names; older ones brought it before it was
    /// written again.
    pub from_seq: u64,
    /// What is left, in ascending order.
    pub remaining: Vec<Remaining>,
    /// Where the next part begins; none when this is the last one.
    pub next_chunk: Option<u32>,
}

impl List {
    /// Nothing is left: whatever comes, came before.
    pub fn nothing(region: RegionId) -> Self {
        Self {
            region,
            from_chunk: 0,
            from_seq: u64::MAX,
            remaining: Vec::new(),
            next_chunk: None,
        }
    }

    /// How many blocks it names.
    pub fn blocks(&self) -> u64 {
        let blocks = |part: &Remaining| u64::from(part.mask.count_ones()) * u64::from(part.chunks);
        self.remaining.iter().map(blocks).sum()
    }
}

/// What a destination that has the guest lacks of a part of a region: after a new connection, or when
/// one side was restarted. It lacks nothing else of these chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// The region.
    pub region: RegionId,
    /// The first chunk that this speaks of.
    pub from_chunk: u32,
    /// The first chunk after them.
    pub to_chunk: u32,
    /// What is missing of them, in ascending order.
    pub lacks: Vec<Remaining>,
}
