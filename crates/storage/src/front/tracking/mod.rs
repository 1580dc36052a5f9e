//! Tracked writes: the server remembers which chunks of the image its guest has changed since
//! tracking began. It needs no owner, and may do this for days.
//!
//! The record has [`rounds`]. Each is a file of [masks](super::arriving::masks), in which a bit
//! that is set means that the block is unchanged. Its unit is a chunk of 256 KiB: the first write
//! to a chunk clears the whole mask. The mask is durable *before* that write begins. So the record
//! never lacks a change, whichever process dies, and whenever the power is cut: the kernel may
//! write the image's new content to the disk at any time, before the guest has flushed it. Later
//! writes to the chunk cost nothing. It may name chunks whose write was never carried out: also
//! those that [sequential writes](record) are expected to reach.
//!
//! Writes beyond the end of a round count for its last chunk: an image may grow.
//!
//! A [checkpoint](Checkpoint) closes a round at a moment at which no write is under way, over
//! several disks if needed, and keeps the content of that moment until it is copied.
//!
//! If the fallback has answered ([`FrontFolder::fell_back`]), everything counts as changed.

mod checkpoint;
mod control;
mod copy_log;
mod gate;
mod record;
pub mod rounds;

pub use checkpoint::{Checkpoint, CheckpointError, Held, Request, TrackingId, current, ship};
pub use record::WriteMap;
pub use rounds::{Changed, begin, begin_in};

use super::folder::FrontFolder;
use super::server::{ServeError, serve};
use super::watched::WatchedDisk;
use crate::disk::{Disk, RawDisk};
use crate::files::RealFiles;
use crate::nbd::{Export, Notice};
use gate::Gate;
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_protocol::BLOCK_SIZE;
use std::sync::Arc;

/// Bytes of a chunk.
pub const CHUNK_BYTES: u64 = CHUNK_BLOCKS * BLOCK_SIZE as u64;

/// Exports the image, and records every chunk that the guest changes.
pub fn tracking(
    folder: &FrontFolder,
    notify: impl Fn(Notice) + Send + Sync + 'static,
) -> Result<(), ServeError> {
    let name = folder.spec()?.name;
    let open = || {
        let disk = tracked_disk(folder)?;
        Ok(Export { name, disk })
    };
    serve(folder, open, notify)
}

/// Opens the image of an export as a disk whose writes are recorded, and accepts checkpoints.
///
/// # Errors
/// When the record or the image cannot be opened.
pub fn tracked_disk(folder: &FrontFolder) -> Result<Arc<dyn Disk>, ServeError> {
    let spec = folder.spec()?;
    let round = rounds::open_current(&RealFiles, &folder.tracked_writes())?;
    let disk = RawDisk::open(&spec.image, spec.size)?;
    let gate = Arc::new(Gate::new(round));
    control::listen(folder, &gate)?;
    Ok(Arc::new(WatchedDisk { disk, sink: gate }))
}

#[cfg(test)]
mod tests;
