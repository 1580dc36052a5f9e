//! The rounds of a record: one file for each, named by its number, or by the numbers of those that
//! were merged (`3-7`). The highest is the current one, in which writes are recorded; the others
//! are closed. A write that changes the image after round N was closed is in a later round.
//!
//! A round that exists and was not switched to is empty. So whatever a power cut or a death leaves
//! of a switch, the rounds together name every change.

use super::CHUNK_BYTES;
use super::record::WriteMap;
use crate::files::{Files, RealFiles, create_folder};
use crate::front::arriving::masks::Masks;
use crate::front::folder::{FolderError, FrontFolder, failed};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_engine::remaining::Remaining;
use longhaul_protocol::{BLOCK_SIZE, RegionId};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// With more closed rounds than this, they are merged.
const CLOSED_MAX: usize = 16;

/// A file of the record: these rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Named {
    last: u64,
    first: u64,
}

impl Named {
    fn parse(name: &str) -> Option<Self> {
        let (first, last) = name.split_once('-').unwrap_or((name, name));
        let (first, last) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last).then_some(Self { last, first })
    }

    fn path(self, folder: &Path) -> PathBuf {
        folder.join(match self.first == self.last {
            true => self.first.to_string(),
            false => format!("{}-{}", self.first, self.last),
        })
    }
}

/// Begins the record of an image of this length, which must not be 0: nothing has changed. To be
/// called before the export is inserted.
pub fn begin(folder: &FrontFolder, image_bytes: u64) -> Result<(), FolderError> {
    begin_in(&RealFiles, &folder.tracked_writes(), image_bytes)
}

/// Begins the record in a given file system. `folder` is the record's.
pub fn begin_in(files: &dyn Files, folder: &Path, image_bytes: u64) -> Result<(), FolderError> {
    create_folder(files, folder).map_err(|error| failed(folder, error))?;
    write(files, &folder.join("0"), image_bytes, &[])
}

/// Writes a round in which these chunks have changed, durably; those that are not named have not.
fn write(
    files: &dyn Files,
    path: &Path,
    image_bytes: u64,
    changed: &[bool],
) -> Result<(), FolderError> {
    let blocks = image_bytes.div_ceil(BLOCK_SIZE as u64);
    let chunks = blocks.div_ceil(CHUNK_BLOCKS) as u32;
    let mut missing: Vec<Remaining> = Vec::new();
    for chunk in 0..chunks {
        if changed.get(chunk as usize).is_some_and(|changed| *changed) {
            continue;
        }
        match missing.last_mut() {
            Some(last) if last.chunk + last.chunks == chunk => last.chunks += 1,
            _ => missing.push(Remaining {
                chunk,
                chunks: 1,
                mask: u64::MAX,
                written_blocks: 0,
            }),
        }
    }
    let masks = Masks {
        // A record has one disk.
        region: RegionId(0),
        blocks,
        // Power cuts do not invalidate it.
        boot: [0; 16],
        missing,
    };
    masks.write_in(files, path)
}

pub(super) fn read(files: &dyn Files, path: &Path) -> Result<Masks, FolderError> {
    let gone = || io::Error::from(io::ErrorKind::NotFound);
    Masks::read_in(files, path)?.ok_or_else(|| failed(path, gone()))
}

/// Returns for each chunk whether it has changed.
pub(super) fn changed_chunks(masks: &Masks) -> Vec<bool> {
    let mut changed = vec![true; masks.blocks.div_ceil(CHUNK_BLOCKS) as usize];
    for part in &masks.missing {
        let first = part.chunk as usize;
        changed[first..first + part.chunks as usize].fill(false);
    }
    changed
}

/// Returns the files of a record, in ascending order, without those that a merged one contains.
fn files_of(files: &dyn Files, folder: &Path) -> Result<Vec<Named>, FolderError> {
    let names = files.names(folder).map_err(|error| failed(folder, error))?;
    let named = names
        .iter()
        .filter_map(|name| Named::parse(name.to_str()?))
        .collect::<Vec<_>>();
    let is_whole = |one: &Named| {
        let contains =
            |other: &&Named| other.first <= one.first && one.last <= other.last && **other != *one;
        !named.iter().any(|other| contains(&other))
    };
    let mut all: Vec<Named> = named.iter().copied().filter(is_whole).collect();
    all.sort_unstable();
    match all.is_empty() {
        true => Err(failed(folder, io::ErrorKind::NotFound.into())),
        false => Ok(all),
    }
}

/// Opens the highest round for writes: it becomes the current one.
pub fn open_current(files: &dyn Files, folder: &Path) -> Result<(u64, WriteMap), FolderError> {
    let named = files_of(files, folder)?;
    let Some(last) = named.last() else {
        return Err(failed(folder, io::ErrorKind::NotFound.into()));
    };
    // It may have been created just before another server ended.
    let synced = files.sync_folder(folder, "the round that was found");
    synced.map_err(|error| failed(folder, error))?;
    Ok((last.last, WriteMap::open_in(files, &last.path(folder))?))
}

/// Creates the round after the current one, durably and empty. The caller switches to it.
pub fn create(
    files: &dyn Files,
    folder: &Path,
    round: u64,
    image_bytes: u64,
) -> Result<WriteMap, FolderError> {
    let path = folder.join(round.to_string());
    write(files, &path, image_bytes, &[])?;
    WriteMap::open_in(files, &path)
}

/// Removes rounds after the current one: they were created, and never switched to.
pub fn forget_unused(files: &dyn Files, folder: &Path, current: u64) -> Result<(), FolderError> {
    for one in files_of(files, folder)? {
        if one.first > current {
            let path = one.path(folder);
            files.remove(&path).map_err(|error| failed(&path, error))?;
        }
    }
    Ok(())
}

/// Forgets the closed rounds up to this one: their changes are copied, and what was copied is
/// durable in the image. The current round stays.
pub fn forget(files: &dyn Files, folder: &Path, through: u64) -> Result<(), FolderError> {
    let named = files_of(files, folder)?;
    let Some((_, closed)) = named.split_last() else {
        return Ok(());
    };
    for one in closed.iter().filter(|one| one.last <= through) {
        let path = one.path(folder);
        files.remove(&path).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// Merges closed rounds where there are many: attempts to copy them have failed.
pub fn merge(files: &dyn Files, folder: &Path) -> Result<(), FolderError> {
    let named = files_of(files, folder)?;
    let Some((_, closed)) = named.split_last() else {
        return Ok(());
    };
    let (Some(first), Some(last)) = (closed.first(), closed.last()) else {
        return Ok(());
    };
    if closed.len() <= CLOSED_MAX {
        return Ok(());
    }
    let mut all = Union::default();
    for one in closed {
        all.add(&read(files, &one.path(folder))?);
    }
    let merged = Named {
        first: first.first,
        last: last.last,
    };
    write(files, &merged.path(folder), all.image_bytes, &all.changed)?;
    for one in closed.iter().filter(|one| **one != merged) {
        let path = one.path(folder);
        files.remove(&path).map_err(|error| failed(&path, error))?;
    }
    Ok(())
}

/// What several rounds have changed.
#[derive(Debug, Default)]
struct Union {
    image_bytes: u64,
    changed: Vec<bool>,
}

impl Union {
    fn add(&mut self, masks: &Masks) {
        let mut more = changed_chunks(masks);
        let chunks = self.changed.len().max(more.len());
        for changed in [&mut self.changed, &mut more] {
            // The last chunk of a shorter image stands for everything beyond.
            let last = changed.last().copied().unwrap_or(false);
            changed.resize(chunks, last);
        }
        for (changed, more) in self.changed.iter_mut().zip(more) {
            *changed |= more;
        }
        self.image_bytes = self.image_bytes.max(masks.blocks * BLOCK_SIZE as u64);
    }
}

/// The changes of an image in some rounds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// The length of the image when the last of the rounds began, in bytes, rounded up to blocks.
    pub image_bytes: u64,
    /// The bytes that may have changed, in ascending order. The last range also stands for
    /// everything beyond the length.
    pub ranges: Vec<Range<u64>>,
}

impl Changed {
    /// Returns all recorded changes of an export's image.
    pub fn of(folder: &FrontFolder) -> Result<Self, FolderError> {
        let mut changed = Self::read_in(&RealFiles, &folder.tracked_writes())?;
        if folder.fell_back() {
            changed.ranges.clear();
            changed.ranges.push(0..changed.image_bytes);
        }
        Ok(changed)
    }

    /// Reads the record of a given file system.
    pub fn read_in(files: &dyn Files, folder: &Path) -> Result<Self, FolderError> {
        let named = files_of(files, folder)?;
        Self::of_files(files, folder, &named)
    }

    /// Returns the changes in the rounds from `from` to `to`, both included; `None` if one of them
    /// was forgotten. Merged rounds may add older or younger changes.
    pub fn between(
        files: &dyn Files,
        folder: &Path,
        (from, to): (u64, u64),
    ) -> Result<Option<Self>, FolderError> {
        let named = files_of(files, folder)?;
        let wanted = |one: &&Named| one.last >= from && one.first <= to;
        let wanted: Vec<Named> = named.iter().filter(wanted).copied().collect();
        let mut next = from;
        for one in &wanted {
            if one.first > next {
                return Ok(None);
            }
            next = next.max(one.last + 1);
        }
        match next > to {
            true => Self::of_files(files, folder, &wanted).map(Some),
            false => Ok(None),
        }
    }

    /// Returns the changes since a round began; `None` if one of the rounds was forgotten.
    pub fn since(files: &dyn Files, folder: &Path, from: u64) -> Result<Option<Self>, FolderError> {
        let to = files_of(files, folder)?.last().map_or(0, |last| last.last);
        Self::between(files, folder, (from, to))
    }

    fn of_files(files: &dyn Files, folder: &Path, named: &[Named]) -> Result<Self, FolderError> {
        let mut all = Union::default();
        for one in named {
            all.add(&read(files, &one.path(folder))?);
        }
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (chunk, _) in (0..).zip(&all.changed).filter(|(_, changed)| **changed) {
            let start: u64 = chunk * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(all.image_bytes);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        Ok(Self {
            image_bytes: all.image_bytes,
            ranges,
        })
    }

    /// Returns the ranges, the last one without an end if it stands for everything beyond.
    pub(super) fn with_growth(mut self) -> Vec<Range<u64>> {
        if let Some(last) = self.ranges.last_mut()
            && last.end >= self.image_bytes
        {
            last.end = u64::MAX;
        }
        self.ranges
    }

    /// Returns how many bytes may have changed.
    pub fn bytes(&self) -> u64 {
        self.ranges
            .iter()
            .map(|range| range.end - range.start)
            .sum()
    }

    /// Returns whether a part of these bytes may have changed.
    pub fn meets(&self, bytes: &Range<u64>) -> bool {
        let after = self
            .ranges
            .partition_point(|range| range.end <= bytes.start);
        let meets = self
            .ranges
            .get(after)
            .is_some_and(|range| range.start < bytes.end);
        let last = self.ranges.last();
        meets || last.is_some_and(|last| last.end >= self.image_bytes && bytes.end > last.start)
    }
}
