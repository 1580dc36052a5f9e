//! Where the memory of an arriving guest goes.

use longhaul_codec::{BlockId, BlockWrite};
use longhaul_protocol::BLOCK_SIZE;

/// The memory of an arriving guest.
pub(crate) trait Store: Send + 'static {
    /// Reads one block.
    fn read(&mut self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> Result<(), String>;

    /// Writes blocks. Zero blocks that were never written (`fresh`) may be skipped.
    fn write(&mut self, writes: &[BlockWrite<'_>], fresh: &[bool]) -> Result<(), String>;

    /// Waits until everything that was written is where it belongs.
    fn flush(&mut self) -> Result<(), String> {
        Ok(())
    }
}
