//! Measures how fast a guest writes to its memory without asking QEMU: a sample of its blocks is
//! read twice.
//!
//! QEMU can measure this itself (`calc-dirty-rate`), but Debian's 7.2 without KVM exits when its
//! precise mode is requested, and the other mode is a sample too.

use crate::memory::{AccessError, GuestMemory, Sample};
use longhaul_protocol::BLOCK_SIZE;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinError;
use tokio::time::Instant;

/// How long the guest is observed.
const WATCHED: Duration = Duration::from_secs(1);

/// Why the rate is not known.
#[derive(Debug, thiserror::Error)]
pub enum DirtyRateError {
    /// The guest's memory cannot be read.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// The measurement was interrupted.
    #[error("looking at the guest's memory was interrupted: {0}")]
    Interrupted(#[from] JoinError),
}

/// Returns the dirty rate in bytes per second: blocks that changed within a second, estimated from
/// a sample of one block in 64.
pub async fn measure(memory: &Arc<GuestMemory>) -> Result<u64, DirtyRateError> {
    let began = Instant::now();
    let looking = memory.clone();
    let before = tokio::task::spawn_blocking(move || Sample::take(&looking)).await??;
    tokio::time::sleep(WATCHED).await;
    let looking = memory.clone();
    let count = move || before.changed_blocks(&looking);
    let changed = tokio::task::spawn_blocking(count).await??;
    let rate = changed as f64 / began.elapsed().as_secs_f64();
    Ok((rate * BLOCK_SIZE as f64) as u64)
}
