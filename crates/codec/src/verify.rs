//! Verification: comparing a whole region at both ends by digests, first of chunks, then of blocks
//! where they differ.

/// Blocks in a chunk of a comparison (1 MiB); the last chunk of a region may be shorter. Chunks of
/// disks (`longhaul_engine::chunk::CHUNK_BLOCKS`) are smaller.
pub const VERIFY_CHUNK_BLOCKS: u64 = 256;
