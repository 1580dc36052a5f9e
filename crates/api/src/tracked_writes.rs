//! Defines the writes of a guest that are tracked without a migration.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whether writes to a disk are tracked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Tracking {
    /// They are tracked.
    Ongoing,
    /// The guest's QEMU has ended, and tracking with it. All changes up to there are known. Changes
    /// that another program has made to the image since are not.
    Ended,
    /// Another QEMU of the guest uses the disk, and its writes are not tracked. Everything counts
    /// as changed.
    Lost,
}

/// The tracked writes to one disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrackedDisk {
    /// Name of the disk.
    pub disk: String,
    /// Whether writes to it are tracked.
    pub tracking: Tracking,
    /// When tracking began, in milliseconds of Unix time.
    pub since_unix_ms: u64,
    /// Length of the image, in bytes; of an image that grows, its greatest expected length.
    pub image_bytes: u64,
    /// Number of bytes that may have changed since then, in whole chunks of 256 KiB. It is never
    /// too small.
    pub changed_bytes: u64,
}

/// The tracked writes of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrackedWrites {
    /// Name of the guest.
    pub guest: String,
    /// Disks whose writes are tracked. Empty if none are.
    pub disks: Vec<TrackedDisk>,
}
