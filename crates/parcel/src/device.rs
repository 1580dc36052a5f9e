//! Devices: files in folders, and block devices.

use crate::bisect;
use crate::cell::{BODY_BYTES, CELL_BYTES, Cell, NAME_BYTES, Name};
use crate::media::{Found, LocalMedia, Media, Medium, SUFFIX};
use std::io;
use std::path::{Path, PathBuf};

/// The number of rows after which a writer syncs all devices. A power cut can damage at most this
/// many rows.
pub(crate) const SYNC_ROWS: u64 = 64;

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
    /// Another command writes it.
    #[error("{} is in use: another command writes it", .0.display())]
    InUse(PathBuf),
    /// The host to which it is attached does not give it.
    #[error("{}: {text}", path.display())]
    Refused {
        /// The device.
        path: PathBuf,
        /// Why.
        text: String,
        /// What to do about it.
        hint: Option<String>,
    },
}

/// The fewest cells of a device: the first header, one row, and two more headers.
const CELLS_MIN: u64 = 4;

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

impl Device {
    /// Prepares a device that is to hold a parcel: a file of this name in a folder, or a block
    /// device whose first cell is zeros. It has room for `limit` bytes, or for as much as is free.
    ///
    /// # Errors
    /// When it is not empty, too small, or cannot be used.
    pub fn create(at: &Path, name: &str, limit: Option<u64>) -> Result<Self, DeviceError> {
        Self::create_on(&LocalMedia, at, name, limit)
    }

    /// As [`create`](Self::create), on any media.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_on(
        media: &dyn Media,
        at: &Path,
        name: &str,
        limit: Option<u64>,
    ) -> Result<Self, DeviceError> {
        let found = media.make(at, name)?;
        let capacity = found.bytes.min(limit.unwrap_or(u64::MAX)) / CELL_BYTES as u64;
        let mut device = Self::with(found, capacity);
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
        Self::open_on(&LocalMedia, at, writable)
    }

    /// As [`open`](Self::open), on any media.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_on(media: &dyn Media, at: &Path, writable: bool) -> Result<Self, DeviceError> {
        let found = media.find(at, writable)?;
        Ok(Self::of(found))
    }

    /// Prepares a medium that holds a parcel.
    pub(crate) fn of(found: Found) -> Self {
        let capacity = found.bytes.div_ceil(CELL_BYTES as u64);
        Self::with(found, capacity)
    }

    fn with(found: Found, capacity: u64) -> Self {
        Self {
            path: found.path,
            medium: found.medium,
            is_block: found.is_block,
            capacity,
            is_new: false,
        }
    }

    /// Returns the length of a file in bytes.
    pub(crate) fn length(&self) -> io::Result<u64> {
        self.medium.length()
    }

    /// Removes its file.
    pub(crate) fn remove_file(&self) -> io::Result<()> {
        self.medium.remove(&self.path)
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
