//! Devices: files in folders, and block devices.

use crate::bisect;
use crate::cell::{BODY_BYTES, CELL_BYTES, Cell, NAME_BYTES, Name};
use crate::direct::DirectMedium;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// The number of rows after which a writer syncs all devices. A power cut can damage at most this
/// many rows.
pub(crate) const SYNC_ROWS: u64 = 64;
/// How the names of devices in folders end.
const SUFFIX: &str = ".parcel";

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// It cannot be opened, read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The device.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// It holds something.
    #[error(
        "{} is not empty: choose another device, or erase this one's first {} MiB if nothing on it \
         is needed",
        .0.display(), bisect::PROBES
    )]
    NotEmpty(PathBuf),
    /// It has no room.
    #[error("{} has no room: a device needs at least {least} MiB", path.display())]
    Small {
        /// The device.
        path: PathBuf,
        /// How much it needs.
        least: u64,
    },
    /// It is neither a folder, nor a file, nor a block device.
    #[error("{} is neither a folder, nor a file, nor a block device", .0.display())]
    Unsuitable(PathBuf),
    /// A folder has no device of a parcel, or several.
    #[error("{} has {found} files that end in {SUFFIX}, and must have one", path.display())]
    Ambiguous {
        /// The folder.
        path: PathBuf,
        /// How many it has.
        found: usize,
    },
}

/// The fewest cells of a device: the first header, one row, and two more headers.
const CELLS_MIN: u64 = 4;

/// What holds the bytes of a device: a file or a block device, or what tests have in its place.
pub(crate) trait Medium: Debug + Send + Sync {
    /// Returns the length of a file in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Reads until the buffer is full.
    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Writes all of the bytes.
    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()>;
    /// Makes everything durable that was written.
    fn sync(&self) -> io::Result<()>;
    /// Drops what the system keeps of it in memory.
    fn forget(&self) -> io::Result<()>;
    /// Removes the file.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// A medium at its place.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) path: PathBuf,
    pub(crate) medium: Box<dyn Medium>,
    pub(crate) is_block: bool,
    /// The bytes that it has, or of a new file those that are free.
    pub(crate) bytes: u64,
}

/// Makes the name of a new file durable, where the file system can do that.
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

/// Where devices are.
pub(crate) trait Media {
    /// Makes a new file in a folder, or opens a block device.
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError>;
    /// Opens a file, the only device in a folder, or a block device.
    fn find(&self, at: &Path, writable: bool) -> Result<Found, DeviceError>;
}

/// The machine's own.
struct RealMedia;

#[cfg(test)]
thread_local! {
    /// What this thread's devices are on in place of the machine's own.
    pub(crate) static MEDIA: std::cell::RefCell<Option<std::sync::Arc<dyn Media>>> =
        const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
fn media() -> std::sync::Arc<dyn Media> {
    let set = MEDIA.with(|media| media.borrow().clone());
    set.unwrap_or_else(|| std::sync::Arc::new(RealMedia))
}

#[cfg(not(test))]
fn media() -> RealMedia {
    RealMedia
}

/// An open device.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    medium: Box<dyn Medium>,
    is_block: bool,
    capacity: u64,
    /// Whether it held nothing when it was opened.
    is_new: bool,
}

impl Media for RealMedia {
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError> {
        let fails = |path: &Path| {
            let path = path.to_path_buf();
            move |error| DeviceError::Io { path, error }
        };
        let kind = fs::metadata(at).map_err(fails(at))?.file_type();
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let (path, file, bytes) = match (kind.is_dir(), kind.is_block_device()) {
            (true, _) => {
                let path = at.join(format!("{name}{SUFFIX}"));
                let file = match options.create_new(true).open(&path) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                        return Err(DeviceError::NotEmpty(path));
                    }
                    opened => opened.map_err(fails(&path))?,
                };
                sync_folder(at).map_err(fails(at))?;
                let room = nix::sys::statvfs::fstatvfs(&file);
                let room = room.map_err(|errno| fails(&path)(errno.into()))?;
                (path, file, room.blocks_available() * room.fragment_size())
            }
            (false, true) => {
                let mut file = options.open(at).map_err(fails(at))?;
                let size = file.seek(SeekFrom::End(0)).map_err(fails(at))?;
                (at.to_path_buf(), file, size)
            }
            (false, false) => return Err(DeviceError::Unsuitable(at.to_path_buf())),
        };
        Ok(Found {
            path,
            medium: Box::new(DirectMedium::of(file, true)),
            is_block: kind.is_block_device(),
            bytes,
        })
    }

    fn find(&self, at: &Path, writable: bool) -> Result<Found, DeviceError> {
        let fails = |error| DeviceError::Io {
            path: at.to_path_buf(),
            error,
        };
        let path = match at.is_dir() {
            false => at.to_path_buf(),
            true => {
                let entries = fs::read_dir(at).and_then(Iterator::collect::<io::Result<Vec<_>>>);
                let paths = entries
                    .map_err(fails)?
                    .into_iter()
                    .map(|entry| entry.path());
                let is_one = |path: &PathBuf| {
                    let name = path.file_name().and_then(|name| name.to_str());
                    name.is_some_and(|name| name.ends_with(SUFFIX))
                };
                let mut found: Vec<PathBuf> = paths.filter(is_one).collect();
                match (found.pop(), found.len()) {
                    (Some(path), 0) => path,
                    (last, others) => {
                        let found = others + usize::from(last.is_some());
                        let path = at.to_path_buf();
                        return Err(DeviceError::Ambiguous { path, found });
                    }
                }
            }
        };
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(writable)
            .open(&path)
            .map_err(fails)?;
        let kind = fs::metadata(&path).map_err(fails)?.file_type();
        let bytes = file.seek(SeekFrom::End(0)).map_err(fails)?;
        Ok(Found {
            path,
            medium: Box::new(DirectMedium::of(file, writable)),
            is_block: kind.is_block_device(),
            bytes,
        })
    }
}

impl Device {
    /// Prepares a device that is to hold a parcel: a file of this name in a folder, or a block
    /// device whose first cell is zeros. It has room for `limit` bytes, or for as much as is free.
    ///
    /// # Errors
    /// When it is not empty, too small, or cannot be used.
    pub fn create(at: &Path, name: &str, limit: Option<u64>) -> Result<Self, DeviceError> {
        let found = media().make(at, name)?;
        let capacity = found.bytes.min(limit.unwrap_or(u64::MAX)) / CELL_BYTES as u64;
        let mut device = Self::of(found, capacity);
        device.is_new = !device.is_block;
        if capacity < CELLS_MIN {
            device.remove();
            let least = (CELLS_MIN * CELL_BYTES as u64) >> 20;
            let path = device.path;
            return Err(DeviceError::Small { path, least });
        }
        if device.is_block {
            if !device.is_empty().map_err(|error| DeviceError::Io {
                path: device.path.clone(),
                error,
            })? {
                return Err(DeviceError::NotEmpty(device.path));
            }
            device.is_new = true;
        }
        Ok(device)
    }

    /// Returns whether the first cell of a block device is zeros, and nothing is left of a parcel
    /// where readers look for the beginning of one.
    fn is_empty(&self) -> io::Result<bool> {
        let mut first = Cell::new();
        if !self.read(0, &mut first)? || first.bytes().iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        for row in 0..self.capacity.min(bisect::PROBES) {
            if self.peek(row)?.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Makes a device usable again that was prepared and holds nothing of worth: removes its file,
    /// or what was written of its first cell.
    pub(crate) fn remove(&self) {
        // What stays is refused as a device, and does no other harm.
        let _ = match (self.is_new, self.is_block) {
            (false, _) => Ok(()),
            (true, false) => self.medium.remove(&self.path),
            (true, true) => self.write(0, &Cell::new()),
        };
    }

    /// Opens a device that holds a parcel: a file, the only such file in a folder, or a block
    /// device.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(at: &Path, writable: bool) -> Result<Self, DeviceError> {
        let found = media().find(at, writable)?;
        let capacity = found.bytes.div_ceil(CELL_BYTES as u64);
        Ok(Self::of(found, capacity))
    }

    fn of(found: Found, capacity: u64) -> Self {
        Self {
            path: found.path,
            medium: found.medium,
            is_block: found.is_block,
            capacity,
            is_new: false,
        }
    }

    /// Returns the path of the file or the block device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of cells that it has room for; of an opened file, the number that it has.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the number of cells up to the last one that was written, and of a block device
    /// perhaps some fewer.
    pub(crate) fn written(&self) -> io::Result<u64> {
        match self.is_block {
            false => Ok(self.medium.length()?.div_ceil(CELL_BYTES as u64)),
            true => self.end(|row| self.peek(row)),
        }
    }

    /// Returns [`written`](Self::written), where cells that cannot be read count as damaged.
    pub(crate) fn readable(&self) -> io::Result<u64> {
        match self.is_block {
            false => self.written(),
            true => self.end(|row| Ok(self.peek(row).unwrap_or(None))),
        }
    }

    /// Finds the end of what a block device has of its parcel. Behind it there may be cells of
    /// another parcel, which was there before.
    fn end(&self, peek: impl Fn(u64) -> io::Result<Option<Name>>) -> io::Result<u64> {
        for first in 0..self.capacity.min(bisect::PROBES) {
            let Some(first) = peek(first)?.filter(|name| name.row == first) else {
                continue;
            };
            let is_its = |row, name: Name| name.row == row && name.parcel == first.parcel;
            return bisect::end(self.capacity, |row| {
                Ok(peek(row)?.is_some_and(|name| is_its(row, name)))
            });
        }
        Ok(0)
    }

    /// Reads a cell, and returns whether the device has it.
    pub(crate) fn read(&self, row: u64, cell: &mut Cell) -> io::Result<bool> {
        self.read_at(row * CELL_BYTES as u64, cell.bytes_mut())
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<bool> {
        match self.medium.read_at(at, bytes) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the name of a cell, without its digest.
    pub(crate) fn peek(&self, row: u64) -> io::Result<Option<Name>> {
        let mut name = [0; NAME_BYTES];
        let at = row * CELL_BYTES as u64 + BODY_BYTES as u64;
        Ok(match self.read_at(at, &mut name)? {
            true => Name::decode(&name),
            false => None,
        })
    }

    pub(crate) fn write(&self, row: u64, cell: &Cell) -> io::Result<()> {
        self.medium.write_at(row * CELL_BYTES as u64, cell.bytes())
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.medium.sync()
    }

    /// Drops what the system keeps of it in memory: what is read then comes from the device.
    pub(crate) fn forget(&self) -> io::Result<()> {
        self.medium.forget()
    }
}
