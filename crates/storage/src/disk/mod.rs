//! The neutral core beneath every front end of a disk: what can be done to a range of its bytes.

mod lock;
pub mod qcow2;
mod raw;

pub use lock::{ImageLock, ImageUse, LockError, Permission};
pub use raw::{ExportSize, OpenError, RawDisk};

use std::fmt::Debug;
use std::io;
use std::ops::Range;

/// What a zeroed range may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeros {
    /// A hole: it takes no space, and a later write may find none.
    MayBeHole,
    /// Space that is set aside: a later write finds it.
    Allocated,
}

/// A piece of a disk that is all hole or all data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Its length, never 0.
    pub length_bytes: u64,
    /// Whether it takes no space and reads as zeros.
    pub hole: bool,
}

/// A disk of a fixed size. Several threads use it at once.
///
/// A range that is not within [`Disk::size_bytes`] is refused with `EINVAL` and nothing is done.
/// When a write, a zeroing or a discard returns, every later read, by whatever thread, sees it.
/// Requests that overlap and run at the same time are done in an order that nobody chooses.
pub trait Disk: Debug + Send + Sync {
    /// Its size; it never changes.
    fn size_bytes(&self) -> u64;
    /// Fills the buffer with what stands at `offset`.
    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Returns when the disk has all of the bytes; they need not be durable.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes durable what every thread's requests have changed that returned before.
    ///
    /// When this has failed once, it fails for good: nobody knows what was lost.
    fn flush(&self) -> io::Result<()>;
    /// Makes a range read as zeros.
    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()>;
    /// Says that the content of a range is no longer needed; it may read as anything afterwards.
    fn discard(&self, range: Range<u64>) -> io::Result<()>;
    /// What the first part of a range is made of, at most so many extents: at least one, unless
    /// the range is empty, and nothing beyond its end.
    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>>;
}
