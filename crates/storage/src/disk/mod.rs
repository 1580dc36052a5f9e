//! The disk interface below every export: operations on ranges of a disk's bytes.

mod clearing;
mod identity;
mod lock;
pub mod qcow2;
mod raw;
mod volume;

pub use identity::{ContentDigests, ImageIdentity, OtherImage};
pub use lock::{ImageLock, ImageUse, LockError, Permission};
pub use raw::{ExportSize, OpenError, RawDisk};
pub use volume::{Found, Volume, VolumeError, is_volume};

use std::fmt::Debug;
use std::io;
use std::ops::Range;

/// How a range may be zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeros {
    /// As a hole: it takes no space, and a later write may fail for want of space.
    MayBeHole,
    /// As allocated space, which a later write finds.
    Allocated,
}

/// A part of a disk that is entirely hole or entirely data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Its length, never 0.
    pub length_bytes: u64,
    /// Whether it takes no space and reads as zeros.
    pub hole: bool,
}

/// A disk of a fixed size, used by several threads at once.
///
/// A range that is not within [`Disk::size_bytes`] is refused with `EINVAL`, and nothing is done.
/// Once a write, a zeroing or a discard has returned, every later read by any thread sees it.
/// Overlapping concurrent requests are carried out in an unspecified order.
pub trait Disk: Debug + Send + Sync {
    /// Returns its size, which never changes.
    fn size_bytes(&self) -> u64;
    /// Fills the buffer from `offset` on.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Writes all of the bytes. They need not be durable when it returns.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes durable the changes of all requests, by any thread, that returned before.
    ///
    /// Once this has failed, it fails for good: it is unknown which data was lost.
    fn flush(&self) -> io::Result<()>;
    /// Makes a range read as zeros.
    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()>;
    /// Discards the content of a range, which may read as anything afterwards.
    fn discard(&self, range: Range<u64>) -> io::Result<()>;
    /// Returns the first extents of a range, at most `count_max`: at least one unless the range is
    /// empty, and none beyond its end.
    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>>;
}
