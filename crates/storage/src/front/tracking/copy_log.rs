//! The copy-before-write log of a checkpoint: before a write changes a unit of the image that is
//! still to be copied, the unit's content goes to the log. The log never waits for who copies. When
//! it cannot be written, or is full, the checkpoint is lost, and the guest goes on.
//!
//! The log is a sparse file in which each unit has the place that it has in the image, and a map
//! with a byte for each unit. A reader reads the image first and the map afterwards: where the map
//! has no 1, no write had begun.

use crate::disk::{Disk, RawDisk};
use crate::front::folder::{FolderError, FrontFolder, failed};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The unit of the log, in bytes: also the granularity at which clusters are copied by QEMU's own
/// filter.
pub(super) const UNIT_BYTES: u64 = 64 << 10;
/// Units that are copied at the same time.
const LOCKS: usize = 16;

/// A unit that is to be copied; 0 is one that is not.
const WANTED: u8 = 1;
/// A unit whose content is in the log.
const KEPT: u8 = 2;

fn data_file(folder: &FrontFolder) -> PathBuf {
    folder.checkpoints().with_extension("data")
}

fn map_file(folder: &FrontFolder) -> PathBuf {
    folder.checkpoints().with_extension("map")
}

fn units(bytes: &Range<u64>) -> Range<u64> {
    bytes.start / UNIT_BYTES..bytes.end.div_ceil(UNIT_BYTES)
}

/// The log of a checkpoint, as the server uses it.
#[derive(Debug)]
pub(super) struct CopyLog {
    disk: RawDisk,
    /// The image's length at the checkpoint.
    image_bytes: u64,
    data: File,
    map: File,
    files: [PathBuf; 2],
    states: Vec<AtomicU8>,
    locks: [Mutex<()>; LOCKS],
    /// The image has been copied up to here.
    copied_to: AtomicU64,
    kept_bytes: AtomicU64,
    bytes_max: u64,
    lost: OnceLock<String>,
}

impl CopyLog {
    /// Creates the log of an image in which these ranges are to be copied.
    pub(super) fn create(
        folder: &FrontFolder,
        wanted: &[Range<u64>],
        bytes_max: u64,
    ) -> Result<Self, FolderError> {
        let spec = folder.spec()?;
        let of_image = |error: io::Error| failed(&spec.image, error);
        let disk = RawDisk::open_to_read(&spec.image);
        let disk = disk.map_err(|error| of_image(io::Error::other(error)))?;
        let image_bytes = disk.size_bytes();
        let mut states = Vec::new();
        states.resize_with(units(&(0..image_bytes)).end as usize, AtomicU8::default);
        let mut log = Self {
            disk,
            image_bytes,
            data: open(&data_file(folder))?,
            map: open(&map_file(folder))?,
            files: [data_file(folder), map_file(folder)],
            states,
            locks: std::array::from_fn(|_| Mutex::new(())),
            copied_to: AtomicU64::new(0),
            kept_bytes: AtomicU64::new(0),
            bytes_max,
            lost: OnceLock::new(),
        };
        let sized = log.map.set_len(log.states.len() as u64);
        sized.map_err(|error| failed(&log.files[1], error))?;
        wanted.iter().for_each(|range| log.want(range));
        Ok(log)
    }

    /// More that is to be copied.
    pub(super) fn want(&mut self, range: &Range<u64>) {
        let units = units(range);
        let end = (units.end as usize).min(self.states.len());
        let start = (units.start as usize).min(end);
        for state in &mut self.states[start..end] {
            *state.get_mut() = WANTED;
        }
    }

    /// The image may have become longer since the log was created.
    pub(super) fn grow(&mut self) -> io::Result<()> {
        let now = self.disk.file().metadata()?.len();
        // The length of a device is not that of its file, and does not change.
        if now > self.image_bytes {
            let units = now.div_ceil(UNIT_BYTES);
            self.states.resize_with(units as usize, AtomicU8::default);
            self.map.set_len(units)?;
            let before = std::mem::replace(&mut self.image_bytes, now);
            self.want(&(before..now));
        }
        Ok(())
    }

    pub(super) fn image_bytes(&self) -> u64 {
        self.image_bytes
    }

    /// Everything before this byte has been copied.
    pub(super) fn copied(&self, to: u64) {
        self.copied_to.fetch_max(to, Ordering::Relaxed);
    }

    /// Returns why the checkpoint is lost, if it is.
    pub(super) fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }

    /// Keeps the content of these bytes, which are about to change, where it is still to be copied.
    pub(super) fn keep(&self, bytes: &Range<u64>) {
        let units = units(bytes);
        let end = units.end.min(self.states.len() as u64);
        for unit in units.start.min(end)..end {
            let copied = (unit + 1) * UNIT_BYTES <= self.copied_to.load(Ordering::Relaxed);
            let state = &self.states[unit as usize];
            if copied || state.load(Ordering::Acquire) != WANTED || self.lost().is_some() {
                continue;
            }
            let lock = &self.locks[unit as usize % LOCKS];
            let _lock = lock.lock().unwrap_or_else(PoisonError::into_inner);
            if state.load(Ordering::Acquire) != WANTED {
                continue;
            }
            match self.keep_unit(unit) {
                Ok(()) => state.store(KEPT, Ordering::Release),
                Err(error) => {
                    // The first reason counts.
                    let _ = self.lost.set(error.to_string());
                }
            }
        }
    }

    fn keep_unit(&self, unit: u64) -> io::Result<()> {
        let start = unit * UNIT_BYTES;
        let length = UNIT_BYTES.min(self.image_bytes - start);
        let kept = self.kept_bytes.fetch_add(length, Ordering::Relaxed);
        if kept + length > self.bytes_max {
            let text = format!(
                "the copy-before-write log has reached {} bytes",
                self.bytes_max
            );
            return Err(io::Error::other(text));
        }
        let mut content = vec![0; length as usize];
        // It may have become longer since it was opened.
        self.disk.file().read_exact_at(&mut content, start)?;
        self.data.write_all_at(&content, start)?;
        self.map.write_all_at(&[1], unit)
    }
}

impl Drop for CopyLog {
    fn drop(&mut self) {
        for file in &self.files {
            // The next log removes it as well.
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Creates a file in place of one that a server has left.
fn open(path: &Path) -> Result<File, FolderError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(path, error)),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create_new(true).mode(0o600);
    options.open(path).map_err(|error| failed(path, error))
}

/// The log as who copies reads it.
#[derive(Debug)]
pub(super) struct LogReader {
    disk: RawDisk,
    data: File,
    map: File,
}

impl LogReader {
    /// Opens the log of a checkpoint that is held.
    pub(super) fn open(folder: &FrontFolder) -> Result<Self, FolderError> {
        let spec = folder.spec()?;
        let disk = RawDisk::open_to_read(&spec.image);
        let disk = disk.map_err(|error| failed(&spec.image, io::Error::other(error)))?;
        let open = |path: PathBuf| File::open(&path).map_err(|error| failed(&path, error));
        Ok(Self {
            disk,
            data: open(data_file(folder))?,
            map: open(map_file(folder))?,
        })
    }

    /// Reads bytes as they were at the checkpoint.
    pub(super) fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let bytes = offset..offset + buffer.len() as u64;
        let units = units(&bytes);
        let mut kept = vec![0; (units.end - units.start) as usize];
        self.map.read_exact_at(&mut kept, units.start)?;
        if kept.contains(&0) {
            // The image may have become longer since, and never shorter.
            self.disk.file().read_exact_at(buffer, offset)?;
            self.map.read_exact_at(&mut kept, units.start)?;
        }
        for (unit, _) in units.zip(kept).filter(|(_, kept)| *kept != 0) {
            let start = (unit * UNIT_BYTES).max(bytes.start);
            let end = ((unit + 1) * UNIT_BYTES).min(bytes.end);
            let place = &mut buffer[(start - offset) as usize..(end - offset) as usize];
            self.data.read_exact_at(place, start)?;
        }
        Ok(())
    }
}
