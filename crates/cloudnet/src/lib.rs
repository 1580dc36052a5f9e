//! Implements CloudNet's encoding of guest memory from its paper, as a baseline for the benches.
//!
//! Wood, Ramakrishnan, Shenoy, van der Merwe: "CloudNet: Dynamic Pooling of Cloud Resources by Live
//! WAN Migration of Virtual Machines" (VEE 2011), sections 4.2, 4.3 and 5.3. Both ends keep the
//! same FIFO cache of sent content, 100 MB by default. [`blocks`] is the variant of the paper's
//! experiments: blocks of a fixed size, looked up by a SuperFastHash of their content and compared
//! whole; a block that misses is sent as the run-length encoded XOR with the last content of the
//! same address. [`strings`] is the alternative: strings of any length that are found again by
//! Rabin fingerprints. There is no entropy coding in either.
//!
//! Where the paper leaves a choice open, this crate takes the one that saves most: a block sent as
//! a delta enters the caches too, and a change of a few bytes does not end a run.

pub mod blocks;
mod cache;
pub mod delta;
mod hash;
mod index;
mod rabin;
mod read;
pub mod strings;

/// Size of a page in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Size of each cache in the paper's experiments, in bytes.
pub const CACHE_BYTES: usize = 100 << 20;

/// A page.
pub type Page = [u8; PAGE_BYTES];

/// Guest bytes of one or more pages, by the way they were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Guest bytes found in the cache.
    pub found: u64,
    /// Guest bytes sent as a delta.
    pub delta: u64,
    /// Guest bytes sent unencoded.
    pub whole: u64,
}

impl std::ops::AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        self.found += other.found;
        self.delta += other.delta;
        self.whole += other.whole;
    }
}

/// Why an encoder and decoder cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The block size does not divide a page.
    #[error("blocks of {0} bytes: give a power of two from 64 to {PAGE_BYTES}")]
    BlockBytes(usize),
    /// There are too few or too many fingerprints per page.
    #[error("{0} fingerprints a page: give a power of two from 1 to 64")]
    Fingerprints(usize),
    /// The cache holds less than one page, or more than an index can address.
    #[error("a cache of {0} bytes: give at least {PAGE_BYTES}, and at most 8 GiB")]
    CacheBytes(usize),
}

/// Why a page cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("page {page} of a memory of {pages} pages")]
pub struct NoSuchPage {
    /// The page.
    pub page: u64,
    /// Number of pages of the memory.
    pub pages: u64,
}

/// Why bytes cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end in the middle of a page.
    #[error("the bytes end in the middle of a page")]
    Short,
    /// A page is outside of the memory.
    #[error(transparent)]
    Page(#[from] NoSuchPage),
    /// A referenced entry is not in the cache, or new content would go to a wrong entry.
    #[error("the caches of the two ends differ at entry {0}")]
    Cache(i64),
    /// A delta or a string exceeds its block or page.
    #[error("a delta or a string leaves its page")]
    Bounds,
}
