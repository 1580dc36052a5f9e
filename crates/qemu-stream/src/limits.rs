//! Limits on the buffered parts of a stream.

use longhaul_protocol::limits;

/// Limits on the memory of a [`Parser`](crate::Parser), for any stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes from the header up to the end of the list of RAM blocks.
    pub prelude_bytes: usize,
    /// RAM blocks.
    pub blocks: usize,
    /// Bytes of one RAM block.
    pub block_bytes: u64,
    /// Bytes of device state, its description included.
    pub device_state_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            prelude_bytes: limits::PRELUDE_BYTES_MAX,
            blocks: limits::REGIONS_MAX,
            block_bytes: limits::REGION_BLOCKS_MAX.saturating_mul(crate::PAGE_SIZE as u64),
            device_state_bytes: limits::DEVICE_STATE_BYTES_MAX,
        }
    }
}
