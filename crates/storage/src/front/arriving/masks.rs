//! The dirty bitmap of an arriving disk's missing blocks in a file: one copy is durable, and one
//! only has to outlive processes. The record of [tracked writes](super::super::tracking) has the
//! same format; there, a bit that is set means that the block is unchanged.
//!
//! ```text
//! "LHMASKS1" | region: u64 | blocks: u64 | boot: 16 bytes | 24 bytes of 0
//! mask: u64 for each chunk of 64 blocks    the missing blocks, the first in the lowest bit
//! written: u16 for each chunk              how much was written to it, in blocks
//! ```
//!
//! All numbers are little-endian. Bits are only ever cleared, after their blocks were written: so
//! whatever a power cut leaves of a word that was being written, no missing block is marked as
//! present.

use super::super::folder::{FolderError, failed};
use crate::files::{Access, Files, OpenFile, RealFiles, read_whole, replace};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_engine::presence::ChunkMask;
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::RegionId;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

const MAGIC: &[u8; 8] = b"LHMASKS1";
const HEADER_BYTES: usize = 64;
const MASK_BYTES: usize = 8;
const WRITTEN_BYTES: usize = 2;
/// Limit on blocks: as many as an engine counts.
const BLOCKS_MAX: u64 = u32::MAX as u64;

/// Identifies a boot of the machine.
pub type Boot = [u8; 16];

/// The missing blocks of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Masks {
    /// Its region.
    pub region: RegionId,
    /// Its length in blocks.
    pub blocks: u64,
    /// The boot in which this is valid; all zero where power cuts do not matter.
    pub boot: Boot,
    /// The missing blocks, in ascending order.
    pub missing: Vec<Remaining>,
}

fn chunks(blocks: u64) -> usize {
    blocks.div_ceil(CHUNK_BLOCKS) as usize
}

fn whole(chunk: usize, blocks: u64) -> u64 {
    match blocks.saturating_sub(chunk as u64 * CHUNK_BLOCKS) {
        CHUNK_BLOCKS.. => u64::MAX,
        here => (1 << here) - 1,
    }
}

fn wrong(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Masks {
    /// Returns the file's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let chunks = chunks(self.blocks);
        let mut bytes = Vec::with_capacity(length(chunks));
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&u64::from(self.region.0).to_le_bytes());
        bytes.extend_from_slice(&self.blocks.to_le_bytes());
        bytes.extend_from_slice(&self.boot);
        bytes.resize(length(chunks), 0);
        for part in &self.missing {
            for chunk in part.chunk..part.chunk.saturating_add(part.chunks) {
                let chunk = chunk as usize;
                let mask = part.mask & whole(chunk, self.blocks);
                let at = HEADER_BYTES + chunk * MASK_BYTES;
                if let Some(place) = bytes.get_mut(at..at + MASK_BYTES) {
                    place.copy_from_slice(&mask.to_le_bytes());
                }
                let at = HEADER_BYTES + chunks * MASK_BYTES + chunk * WRITTEN_BYTES;
                if let Some(place) = bytes.get_mut(at..at + WRITTEN_BYTES) {
                    place.copy_from_slice(&part.written_blocks.to_le_bytes());
                }
            }
        }
        bytes
    }

    /// Parses a file's bytes.
    pub fn parse(bytes: &[u8]) -> io::Result<Self> {
        let header = bytes.get(..HEADER_BYTES).ok_or(wrong("it is too short"))?;
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(number)
        };
        if &header[..8] != MAGIC || header[40..].iter().any(|byte| *byte != 0) {
            return Err(wrong("it is not of this version"));
        }
        let region = u16::try_from(number(8)).map_err(|_| wrong("it is of no region"))?;
        let blocks = number(16);
        if blocks == 0 || blocks > BLOCKS_MAX {
            return Err(wrong("it is of no disk"));
        }
        let chunks = chunks(blocks);
        if bytes.len() != length(chunks) {
            return Err(wrong("it has another length than its disk"));
        }
        let mut boot = [0; 16];
        boot.copy_from_slice(&header[24..40]);
        let (masks, written) = bytes[HEADER_BYTES..].split_at(chunks * MASK_BYTES);
        let written = written
            .chunks_exact(WRITTEN_BYTES)
            .map(|count| u16::from_le_bytes([count[0], count[1]]));
        let mut missing: Vec<Remaining> = Vec::new();
        for (chunk, (mask, written_blocks)) in (0..).zip(words(masks).zip(written)) {
            if mask & !whole(chunk as usize, blocks) != 0 {
                return Err(wrong("it names blocks beyond the end"));
            }
            if mask == 0 {
                continue;
            }
            match missing.last_mut() {
                Some(last)
                    if (last.mask, last.written_blocks) == (mask, written_blocks)
                        && last.chunk + last.chunks == chunk =>
                {
                    last.chunks += 1;
                }
                _ => missing.push(Remaining {
                    chunk,
                    chunks: 1,
                    mask,
                    written_blocks,
                }),
            }
        }
        Ok(Self {
            region: RegionId(region),
            blocks,
            boot,
            missing,
        })
    }

    /// Returns whether a block is missing.
    pub fn is_missing(&self, block: u64) -> bool {
        let Ok(chunk) = u32::try_from(block / CHUNK_BLOCKS) else {
            return false;
        };
        let of_it = |part: &&Remaining| (part.chunk..part.chunk + part.chunks).contains(&chunk);
        let part = self.missing.iter().find(of_it);
        part.is_some_and(|part| part.mask & 1 << (block % CHUNK_BLOCKS) != 0)
    }

    /// Returns how many blocks are missing.
    pub fn missing_blocks(&self) -> u64 {
        let blocks = |part: &Remaining| u64::from(part.mask.count_ones()) * u64::from(part.chunks);
        self.missing.iter().map(blocks).sum()
    }

    /// Reads a file; `None` where it does not exist.
    pub fn read(path: &Path) -> Result<Option<Self>, FolderError> {
        Self::read_in(&RealFiles, path)
    }

    /// Reads a file of a given file system.
    pub fn read_in(files: &dyn Files, path: &Path) -> Result<Option<Self>, FolderError> {
        let file = match files.open(path, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(|error| failed(path, error))?,
        };
        let longest = length(chunks(BLOCKS_MAX)) as u64;
        let read = || {
            let bytes = read_whole(&*file, longest)?;
            Self::parse(&bytes.ok_or(wrong("it is too long"))?).map(Some)
        };
        read().map_err(|error| failed(path, error))
    }

    /// Creates or replaces the file, durably.
    pub fn write(&self, path: &Path) -> Result<(), FolderError> {
        self.write_in(&RealFiles, path)
    }

    /// Creates or replaces the file in a given file system.
    pub fn write_in(&self, files: &dyn Files, path: &Path) -> Result<(), FolderError> {
        let what = ["the masks", "the masks' name"];
        let written = replace(files, path, &self.to_bytes(), what);
        written.map_err(|error| failed(path, error))
    }
}

/// Returns the masks in a file's bytes.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(MASK_BYTES).map(|mask| {
        let mut word = [0; MASK_BYTES];
        word.copy_from_slice(mask);
        u64::from_le_bytes(word)
    })
}

fn length(chunks: usize) -> usize {
    HEADER_BYTES + chunks * (MASK_BYTES + WRITTEN_BYTES)
}

/// Returns the current boot of the machine.
pub(crate) fn this_boot() -> io::Result<Boot> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let number = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok(number.to_le_bytes())
}

/// Records that something of a disk could not be made durable. The record is written completely or
/// not at all.
pub(super) fn mark_failed(path: &Path) -> io::Result<()> {
    let what = ["the mark", "the mark's name"];
    replace(&RealFiles, path, &this_boot()?, what)
}

/// Returns whether that was recorded since the host was started.
pub(super) fn is_marked_failed(path: &Path) -> io::Result<bool> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
        Ok(bytes) => Ok(bytes == this_boot()?),
    }
}

/// A file of masks that is changed in place.
#[derive(Debug)]
pub struct MaskFile(Box<dyn OpenFile>);

impl MaskFile {
    /// Opens an existing file.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        Self::open_in(&RealFiles, path)
    }

    /// Opens an existing file of a given file system.
    pub fn open_in(files: &dyn Files, path: &Path) -> Result<Self, FolderError> {
        let opened = files.open(path, Access::Write);
        opened.map(Self).map_err(|error| failed(path, error))
    }

    /// Sets masks; they need not be durable.
    pub fn set(&self, masks: &[ChunkMask]) -> io::Result<()> {
        masks.iter().try_for_each(|mask| {
            let at = HEADER_BYTES as u64 + u64::from(mask.chunk) * MASK_BYTES as u64;
            self.0.write_at(at, &mask.missing.to_le_bytes())
        })
    }

    /// Returns the masks of these chunks.
    pub fn get(&self, chunks: Range<u32>) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; chunks.len() * MASK_BYTES];
        let at = HEADER_BYTES as u64 + u64::from(chunks.start) * MASK_BYTES as u64;
        self.0.read_at(at, &mut bytes)?;
        Ok(words(&bytes).collect())
    }

    /// Makes the set masks durable.
    pub fn sync(&self) -> io::Result<()> {
        self.sync_as("the masks that changed")
    }

    /// Makes the set masks durable, under this name in errors.
    pub(crate) fn sync_as(&self, what: &'static str) -> io::Result<()> {
        self.0.sync_content(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(chunk: u32, chunks: u32, mask: u64, written_blocks: u16) -> Remaining {
        Remaining {
            chunk,
            chunks,
            mask,
            written_blocks,
        }
    }

    #[test]
    fn masks_survive_their_file_and_are_changed_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("masks");
        assert_eq!(Masks::read(&path).unwrap(), None);
        let mut masks = Masks {
            region: RegionId(3),
            blocks: 64 * 9 + 2,
            boot: [7; 16],
            missing: vec![part(0, 3, u64::MAX, 5), part(3, 1, 1, 5), part(9, 1, 3, 0)],
        };
        masks.write(&path).unwrap();
        assert_eq!(Masks::read(&path).unwrap(), Some(masks.clone()));
        assert_eq!(masks.missing_blocks(), 3 * 64 + 1 + 2);
        let missing = |block| masks.is_missing(block);
        assert!(missing(0) && missing(3 * 64) && missing(9 * 64 + 1));
        assert!(!missing(3 * 64 + 1) && !missing(4 * 64) && !missing(1 << 40));
        let file = MaskFile::open(&path).unwrap();
        let (chunk, missing) = (1, 0);
        file.set(&[ChunkMask { chunk, missing }]).unwrap();
        file.sync().unwrap();
        let all = u64::MAX;
        masks
            .missing
            .splice(..1, [part(0, 1, all, 5), part(2, 1, all, 5)]);
        assert_eq!(Masks::read(&path).unwrap(), Some(masks));
    }

    #[test]
    fn what_is_none_is_refused() {
        let masks = Masks {
            region: RegionId(1),
            blocks: 65,
            boot: [0; 16],
            missing: vec![part(1, 1, 1, 0)],
        };
        let bytes = masks.to_bytes();
        assert_eq!(Masks::parse(&bytes).unwrap(), masks);
        let wrong = |at: usize, byte: u8| {
            let mut bytes = bytes.clone();
            bytes[at] = byte;
            Masks::parse(&bytes).unwrap_err();
        };
        // Another version, no region, no disk, a too long disk, a block beyond the end.
        for (at, byte) in [
            (7, b'2'),
            (10, 1),
            (16, 0),
            (22, 1),
            (63, 1),
            (HEADER_BYTES + 8, 3),
        ] {
            wrong(at, byte);
        }
        for length in [0, 63, bytes.len() - 1] {
            Masks::parse(&bytes[..length]).unwrap_err();
        }
    }
}
