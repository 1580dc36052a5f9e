//! Verification: comparing a whole region at both ends by digests, first of chunks, then of blocks
//! where they differ.

/// Blocks in a chunk of a comparison (1 MiB); the last chunk of a region may be shorter.
pub const CHUNK_BLOCKS: u64 = 256;
