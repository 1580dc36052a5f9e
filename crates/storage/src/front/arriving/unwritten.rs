//! The record of the parts of a disk that the guest has not written since it runs here, kept where
//! arrived content is compared with the source in the end.
//!
//! It is a file of [`masks`](super::masks). A bit is cleared *before* its write begins: a block
//! still marked as unwritten after its content was read has never held anything but arrived
//! content. The file is valid as long as the host runs; after that everything counts as written.
//! The process that compares removes it afterwards.

use super::masks::{MaskFile, Masks, this_boot};
use crate::files::{Files, RealFiles, parent};
use crate::front::folder::{FolderError, FrontFolder, failed};
use longhaul_engine::chunk::{CHUNK_BLOCKS, pieces};
use longhaul_engine::presence::ChunkMask;
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, RegionId};
use std::io;
use std::ops::Range;

const BLOCK: u64 = BLOCK_SIZE as u64;

/// Begins the record: the guest has written nothing yet. It precedes the masks of missing blocks.
pub fn begin(folder: &FrontFolder, region: RegionId, blocks: u64) -> Result<(), FolderError> {
    let path = folder.unwritten_masks();
    let boot = this_boot().map_err(|error| failed(&path, error))?;
    let all = Remaining {
        chunk: 0,
        chunks: blocks.div_ceil(CHUNK_BLOCKS) as u32,
        mask: u64::MAX,
        written_blocks: 0,
    };
    let masks = Masks {
        region,
        blocks,
        boot,
        missing: vec![all],
    };
    masks.write(&path)
}

/// Ends the record after the comparison, durably.
pub fn end(folder: &FrontFolder) -> Result<(), FolderError> {
    let path = folder.unwritten_masks();
    let removed = match RealFiles.remove(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        done => done.and_then(|()| RealFiles.sync_folder(parent(&path), "the masks' end")),
    };
    removed.map_err(|error| failed(&path, error))
}

/// The record as the comparing process uses it.
#[derive(Debug)]
pub struct Unwritten {
    /// `None` if the file is of another boot of the host.
    file: Option<MaskFile>,
    blocks: u64,
}

impl Unwritten {
    /// Opens the record of a disk with this number of blocks; `None` where nothing is to be
    /// compared.
    pub fn open(folder: &FrontFolder, blocks: u64) -> Result<Option<Self>, FolderError> {
        let path = folder.unwritten_masks();
        let Some(masks) = Masks::read(&path)? else {
            return Ok(None);
        };
        let boot = this_boot().map_err(|error| failed(&path, error))?;
        let file = match (masks.boot, masks.blocks) == (boot, blocks) {
            true => Some(MaskFile::open(&path)?),
            false => None,
        };
        Ok(Some(Self { file, blocks }))
    }

    /// Returns for each piece of a range, of `blocks_per_piece` blocks, whether the guest has not
    /// written to it.
    pub fn pieces(&self, range: BlockRange, blocks_per_piece: u64) -> io::Result<Vec<bool>> {
        let starts = (range.start..range.end()).step_by(blocks_per_piece.max(1) as usize);
        let within = range.end() <= self.blocks;
        let (Some(file), true) = (&self.file, within && range.count > 0) else {
            return Ok(starts.map(|_| false).collect());
        };
        let first = range.start / CHUNK_BLOCKS;
        let masks = file.get(first as u32..range.end().div_ceil(CHUNK_BLOCKS) as u32)?;
        let is_unwritten = |start: u64| {
            let piece = BlockRange::new(start, (range.end() - start).min(blocks_per_piece));
            pieces(piece).all(|(chunk, mask)| {
                let unwritten = masks.get(chunk - first as usize).copied().unwrap_or(0);
                unwritten & mask == mask
            })
        };
        Ok(starts.map(is_unwritten).collect())
    }
}

/// The record as the server uses it, which records the guest's writes.
#[derive(Debug)]
pub(super) struct Noting {
    file: MaskFile,
    masks: Vec<u64>,
}

impl Noting {
    /// Opens the record of a disk with this number of blocks, where there is one.
    pub(super) fn open(folder: &FrontFolder, blocks: u64) -> Result<Option<Self>, FolderError> {
        let opened = Unwritten::open(folder, blocks)?;
        let Some(file) = opened.and_then(|unwritten| unwritten.file) else {
            return Ok(None);
        };
        let chunks = blocks.div_ceil(CHUNK_BLOCKS) as u32;
        let masks = file.get(0..chunks);
        let masks = masks.map_err(|error| failed(&folder.unwritten_masks(), error))?;
        Ok(Some(Self { file, masks }))
    }

    /// Returns the masks to record for a write of these bytes that is about to begin.
    pub(super) fn writes(&mut self, bytes: &Range<u64>) -> Vec<ChunkMask> {
        let first = bytes.start / BLOCK;
        let blocks = BlockRange::new(first, bytes.end.div_ceil(BLOCK).saturating_sub(first));
        let mut changed = Vec::new();
        for (chunk, mask) in pieces(blocks) {
            let Some(unwritten) = self.masks.get_mut(chunk) else {
                continue;
            };
            if *unwritten & mask != 0 {
                *unwritten &= !mask;
                changed.push(ChunkMask {
                    chunk: chunk as u32,
                    missing: *unwritten,
                });
            }
        }
        changed
    }

    pub(super) fn file(&self) -> &MaskFile {
        &self.file
    }
}
