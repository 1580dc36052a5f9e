//! Disks that move with a guest: their description in an offer, and the lists of blocks that are
//! missing at the destination after the handover.

use crate::RegionId;
use serde::{Deserialize, Serialize};

/// The format of a disk's content in its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskFormat {
    /// Byte for byte.
    Raw,
    /// As QEMU's qcow2, in a growing file.
    Qcow2(Qcow2),
}

/// The properties with which QEMU opens a qcow2 image whose content has yet to arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qcow2 {
    /// 2 or 3.
    pub version: u8,
    /// Logarithm of the bytes per cluster, to base 2.
    pub cluster_bits: u8,
    /// Whether parts of clusters are allocated separately (extended L2 entries).
    pub extended_l2: bool,
    /// The size of the disk that the guest sees, in bytes.
    pub disk_bytes: u64,
}

/// A base image, which is a raw disk: the destination takes it from its own repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Base {
    /// Its id: the digest of its manifest.
    pub image: [u8; 32],
    /// Its length, in bytes.
    pub bytes: u64,
    /// Whether the guest may run at the destination before the image is complete there.
    pub lazily: bool,
    /// The stripes that the source's guests use, which are fetched first.
    pub hot: Vec<Hot>,
}

/// Bytes per stripe of a base image; the last one may be shorter.
pub const STRIPE_BYTES: u64 = 256 << 10;
/// Most pages (of 4096 bytes) per stripe.
pub const STRIPE_PAGES: u8 = 64;

/// A stripe of a base image that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hot {
    /// Its number.
    pub stripe: u32,
    /// How many of its pages are in the source's page cache.
    pub pages: u8,
}

/// A disk whose image travels with its guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfferedDisk {
    /// Its region.
    pub region: RegionId,
    /// Its name in the guest's description.
    pub name: String,
    /// The length of its image, in bytes, or the greatest length that a growing one may have at the
    /// handover: within the region's last block.
    pub image_bytes: u64,
    /// The space that the image takes at the source, in bytes.
    pub allocated_bytes: u64,
    /// The format of the image.
    pub format: DiskFormat,
    /// The part of the image that may be missing when the guest runs at the destination.
    pub pulled: Pulled,
    /// The base image that it is an overlay of, which does not travel.
    pub base: Option<Base>,
}

/// The part of a disk, or of the memory, that is fetched while its guest runs at the destination.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pulled {
    /// Nothing.
    #[default]
    Nothing,
    /// The frequently written chunks.
    Often,
    /// All of it.
    All,
}

/// Missing blocks, equal in each of several consecutive chunks (of 64 blocks).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remaining {
    /// The first chunk.
    pub chunk: u32,
    /// Number of chunks.
    pub chunks: u32,
    /// The missing blocks of each, the first in the lowest bit. Bits beyond the region's end are
    /// ignored.
    pub mask: u64,
    /// The number of blocks written to each since the migration began, up to 65535: the most
    /// written chunks travel first.
    pub written_blocks: u16,
}

/// A part of the list of a region's missing blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct List {
    /// The region.
    pub region: RegionId,
    /// Where this part begins; the first one begins at 0.
    pub from_chunk: u32,
    /// Frames from this number on bring the listed blocks; older frames brought them before they
    /// were written again.
    pub from_seq: u64,
    /// The missing blocks, in ascending order.
    pub remaining: Vec<Remaining>,
    /// Where the next part begins; `None` for the last one.
    pub next_chunk: Option<u32>,
}

impl List {
    /// Returns an empty list: every arriving block belongs to the time before it.
    pub fn nothing(region: RegionId) -> Self {
        Self {
            region,
            from_chunk: 0,
            from_seq: u64::MAX,
            remaining: Vec::new(),
            next_chunk: None,
        }
    }

    /// Returns the number of listed blocks.
    pub fn blocks(&self) -> u64 {
        let blocks = |part: &Remaining| u64::from(part.mask.count_ones()) * u64::from(part.chunks);
        self.remaining.iter().map(blocks).sum()
    }
}

/// The missing blocks in a part of a region, sent by a destination that has the guest, after a new
/// connection or a restart of one side. No other blocks of these chunks are missing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// The region.
    pub region: RegionId,
    /// The first of these chunks.
    pub from_chunk: u32,
    /// The first chunk after them.
    pub to_chunk: u32,
    /// The missing blocks in them, in ascending order.
    pub lacks: Vec<Remaining>,
}
