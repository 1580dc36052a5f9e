//! CloudNet's encoding of guest memory, as its paper describes it, for the benches to compare with.
//!
//! Wood, Ramakrishnan, Shenoy, van der Merwe: "CloudNet: Dynamic Pooling of Cloud Resources by Live
//! WAN Migration of Virtual Machines" (VEE 2011), sections 4.2, 4.3 and 5.3. Both ends keep the same
//! FIFO cache of what was sent, 100 MB by default. [`blocks`] is what the paper's experiments use:
//! blocks of a fixed size, looked up by a SuperFastHash of their content and compared whole; those
//! that miss are sent as the run-length encoded XOR with what was sent before from the same address.
//! [`strings`] is its alternative: strings of any length that are found again by Rabin fingerprints.
//! There is no entropy coding in either.
//!
//! Where the paper leaves something open, this crate does what saves most: a block sent as a delta
//! enters the caches too, and a change of a few bytes does not break a run.

pub mod blocks;
mod cache;
pub mod delta;
mod hash;
mod index;
mod rabin;
mod read;
pub mod strings;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;
/// What the paper's experiments give each cache.
pub const CACHE_BYTES: usize = 100 << 20;

/// A page.
pub type Page = [u8; PAGE_BYTES];

/// How the bytes of one or more pages were sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Guest bytes that the caches held already.
    pub found: u64,
    /// Guest bytes that went as a delta.
    pub delta: u64,
    /// Guest bytes that went as they are.
    pub whole: u64,
}

impl std::ops::AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        self.found += other.found;
        self.delta += other.delta;
        self.whole += other.whole;
    }
}

/// Why a pair of encoder and decoder cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The size of a block is none that a page divides into.
    #[error("blocks of {0} bytes: give a power of two from 64 to {PAGE_BYTES}")]
    BlockBytes(usize),
    /// There are too few or too many fingerprints.
    #[error("{0} fingerprints a page: give a power of two from 1 to 64")]
    Fingerprints(usize),
    /// The cache holds less than one page, or more than an index can name.
    #[error("a cache of {0} bytes: give at least {PAGE_BYTES}, and at most 8 GiB")]
    CacheBytes(usize),
}

/// Why a page cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("page {page} of a memory of {pages} pages")]
pub struct NoSuchPage {
    /// The page.
    pub page: u64,
    /// How many there are.
    pub pages: u64,
}

/// Why bytes are no pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// They end in the middle of a page.
    #[error("the bytes end in the middle of a page")]
    Short,
    /// A page is outside of the memory.
    #[error(transparent)]
    Page(#[from] NoSuchPage),
    /// What they refer to is not in the cache, or new content would go where it does not belong.
    #[error("the caches of the two ends differ at entry {0}")]
    Cache(i64),
    /// A delta or a string leaves its block or page.
    #[error("a delta or a string leaves its page")]
    Bounds,
}
