//! Where the memory of an arriving guest goes.

use longhaul_codec::{BlockId, BlockWrite};
use longhaul_protocol::BLOCK_SIZE;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Time limit for QEMU to take pages.
const PATIENCE: Duration = Duration::from_secs(60);
/// Why it takes nothing more.
pub(crate) const GONE: &str = "its QEMU is not served any more";

/// The memory of an arriving guest.
pub(crate) trait Store: Send + 'static {
    /// Reads one block.
    fn read(&mut self, id: BlockId, into: &mut [u8; BLOCK_SIZE]) -> Result<(), String>;

    /// Writes blocks. Zero blocks that were never written (`fresh`) may be skipped.
    fn write(&mut self, writes: &[BlockWrite<'_>], fresh: &[bool]) -> Result<(), String>;

    /// Returns what says when everything that was written is where it belongs, unless it is.
    fn unfinished(&mut self) -> Option<Taken> {
        None
    }
}

/// Says when QEMU's page server has what was given to it.
pub(crate) struct Taken(oneshot::Receiver<()>);

impl Taken {
    pub(crate) fn when(taken: oneshot::Receiver<()>) -> Self {
        Self(taken)
    }

    pub(crate) async fn wait(self) -> Result<(), String> {
        match timeout(PATIENCE, self.0).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(GONE.to_owned()),
            Err(_) => Err("its QEMU takes no pages".to_owned()),
        }
    }
}
