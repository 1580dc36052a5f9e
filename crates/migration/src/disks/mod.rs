//! The resources of a guest's disks on a host during a migration: exports, images that are created
//! for them, and base images.

pub(crate) mod backing_files;
pub(crate) mod base_images;
pub(crate) mod export_notes;
pub(crate) mod export_process;
pub(crate) mod exports;
mod fate;
pub(crate) mod images;
pub(crate) mod lazy_base_images;
pub(crate) mod left_images;
pub(crate) mod qcow2;
pub(crate) mod tracked_writes;
pub(crate) mod volumes;

use longhaul_codec::BlockId;
use longhaul_hypervisor::config::{Image, ImageFormat};
use longhaul_protocol::disk::DiskFormat;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_storage::disk::{Disk as _, RawDisk};
use std::io;

const BLOCK: u64 = BLOCK_SIZE as u64;
/// Returns whether an image has the format that the hosts agreed on.
pub(crate) fn has_format(image: &Image, format: &DiskFormat) -> bool {
    match format {
        DiskFormat::Raw => image.format == ImageFormat::Raw,
        DiskFormat::Qcow2(_) => image.format == ImageFormat::Qcow2,
    }
}

/// Returns the number of blocks for a number of bytes, rounded up.
pub(crate) fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK)
}

/// Reads blocks of a disk. Blocks past its end read as zeros.
pub(crate) fn read_blocks(
    disk: &RawDisk,
    range: BlockRange,
    into: &mut [u8],
) -> Result<(), String> {
    let (start, size) = (range.start * BLOCK, disk.size_bytes());
    let here = size.saturating_sub(start).min(into.len() as u64) as usize;
    let (content, behind) = into.split_at_mut(here);
    behind.fill(0);
    if content.is_empty() {
        return Ok(());
    }
    let failed = |error| format!("its disk, at byte {start}: {error}");
    disk.read(start, content).map_err(failed)
}

/// Reads single blocks of a disk, in the given order.
pub(crate) fn read_each(
    disk: &RawDisk,
    blocks: &[BlockId],
    into: &mut [[u8; BLOCK_SIZE]],
) -> Result<(), String> {
    for (at, range) in ranges(blocks) {
        let into = &mut into[at..at + range.count as usize];
        read_blocks(disk, range, into.as_flattened_mut())?;
    }
    Ok(())
}

/// Writes blocks of a disk. Ignores the part past its end.
pub(crate) fn write_blocks(disk: &RawDisk, range: BlockRange, bytes: &[u8]) -> io::Result<()> {
    let start = range.start * BLOCK;
    let here = disk
        .size_bytes()
        .saturating_sub(start)
        .min(bytes.len() as u64);
    disk.write(start, &bytes[..here as usize])
}

/// Splits blocks of one region into runs of consecutive blocks, each with its index in the list.
pub(crate) fn ranges(blocks: &[BlockId]) -> impl Iterator<Item = (usize, BlockRange)> {
    let follows = |one: &BlockId, next: &BlockId| one.block + 1 == next.block;
    let mut place = 0;
    blocks.chunk_by(follows).filter_map(move |run| {
        let first = run.first()?;
        let at = place;
        place += run.len();
        Some((at, BlockRange::new(first.block, run.len() as u64)))
    })
}
