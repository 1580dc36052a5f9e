//! A disk in a regular file or a block device.

use super::clearing::Clearing;
use super::{Disk, Extent, Volume, Zeros};
use crate::pulse::elsewhere;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Zeros written at once where the file system cannot zero a range by itself.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
/// The length reported as data where the file changed during the query.
const BLOCK_BYTES: u64 = 4096;

/// The size of the disk that a file is exported as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportSize {
    /// The file's own size: for images as long as their disk (`raw`).
    OfFile,
    /// This number of bytes. Of a file, at least its own size: for growing images (`qcow2`). The
    /// range behind the end of the file reads as zeros, and a write there makes the file longer. Of
    /// a block device, at most its own size: the range behind is not part of the disk.
    Bytes(u64),
}

/// A reason why a file is not used as a disk. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The system refused.
    #[error("cannot open the disk image {}: {error}", path.display())]
    Io {
        /// The image.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// It is neither a regular file nor a block device.
    #[error(
        "{} is neither a plain file nor a block device: such disks cannot be moved; leave this \
         disk where both hosts see it",
        path.display()
    )]
    NoImage {
        /// The image.
        path: PathBuf,
    },
    /// It is a block device, and smaller than the requested size.
    #[error(
        "{} is a block device of {device_bytes} bytes: it cannot be shown as a disk of \
         {export_bytes} bytes",
        path.display()
    )]
    DeviceSize {
        /// The device.
        path: PathBuf,
        /// Its size.
        device_bytes: u64,
        /// The requested size.
        export_bytes: u64,
    },
    /// The image is longer than the requested size.
    #[error(
        "the disk image {} has {file_bytes} bytes, more than the {export_bytes} that it was to be \
         shown with: it has grown since it was looked at; try again",
        path.display()
    )]
    TooLong {
        /// The image.
        path: PathBuf,
        /// Its length.
        file_bytes: u64,
        /// The requested size.
        export_bytes: u64,
    },
}

/// A disk in a regular file or a block device: its holes stay holes, and a write is in the file
/// when it returns. Which parts of a block device were never written is unknown: all of it is
/// reported as data.
///
/// It is accessed through the page cache, with which QEMU's own reads and writes of the file on
/// this host are coherent, even those that bypass the cache (`cache=none`).
#[derive(Debug)]
pub struct RawDisk {
    file: File,
    size_bytes: u64,
    kind: Kind,
    /// The error of the first flush that failed. The kernel reports a lost page only once.
    flush_failed: OnceLock<i32>,
    /// Set for a volume whose former content does not count: it reads as zeros.
    clearing: Option<Clearing>,
    /// Where the image on a device ends, if that is known.
    end: OnceLock<u64>,
}

/// The kind of file below a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A file as long as the disk.
    Whole,
    /// A file that may be shorter than the disk.
    Grows,
    /// A block device: it zeroes whole blocks only, and does not report holes.
    Device,
}

impl RawDisk {
    /// Opens an image for reading and writing. It takes no lock: see [`super::ImageLock`].
    pub fn open(path: &Path, size: ExportSize) -> Result<Self, OpenError> {
        Self::open_for(path, size, true)
    }

    /// Opens an image for reading only.
    pub fn open_to_read(path: &Path) -> Result<Self, OpenError> {
        Self::open_for(path, ExportSize::OfFile, false)
    }

    fn open_for(path: &Path, size: ExportSize, write: bool) -> Result<Self, OpenError> {
        let failed = |error| OpenError::Io {
            path: path.to_owned(),
            error,
        };
        // Checked before it is opened: opening a device may have side effects.
        let known = std::fs::metadata(path).map_err(failed)?.file_type();
        if !known.is_file() && !known.is_block_device() {
            let path = path.to_owned();
            return Err(OpenError::NoImage { path });
        }
        let file = OpenOptions::new().read(true).write(write).open(path);
        let mut file = file.map_err(failed)?;
        // The length of a device is the position of its end.
        let file_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let (kind, size_bytes) = match size {
            ExportSize::OfFile if known.is_block_device() => (Kind::Device, file_bytes),
            ExportSize::OfFile => (Kind::Whole, file_bytes),
            ExportSize::Bytes(export_bytes) if known.is_block_device() => {
                if export_bytes > file_bytes {
                    return Err(OpenError::DeviceSize {
                        path: path.to_owned(),
                        device_bytes: file_bytes,
                        export_bytes,
                    });
                }
                (Kind::Device, export_bytes)
            }
            ExportSize::Bytes(export_bytes) if export_bytes < file_bytes => {
                return Err(OpenError::TooLong {
                    path: path.to_owned(),
                    file_bytes,
                    export_bytes,
                });
            }
            ExportSize::Bytes(export_bytes) => (Kind::Grows, export_bytes),
        };
        i64::try_from(size_bytes).map_err(|_| failed(Errno::EFBIG.into()))?;
        Ok(Self {
            file,
            size_bytes,
            kind,
            flush_failed: OnceLock::new(),
            clearing: None,
            end: OnceLock::new(),
        })
    }

    /// Makes a disk of this size of a volume. The volume stays exclusive as long as the disk is
    /// open. Its former content does not count: what was not written since reads as zeros. See
    /// [`Self::clear_next`].
    pub fn over(volume: &Volume, bytes: u64) -> Result<Self, OpenError> {
        let device_bytes = volume.size_bytes();
        if bytes > device_bytes {
            return Err(OpenError::DeviceSize {
                path: volume.path().to_owned(),
                device_bytes,
                export_bytes: bytes,
            });
        }
        let file = volume.try_clone_file().map_err(|error| OpenError::Io {
            path: volume.path().to_owned(),
            error,
        })?;
        // The last block is a block of its region, and is cleared to its end.
        let cleared = bytes.next_multiple_of(BLOCK_BYTES).min(device_bytes);
        Ok(Self {
            file,
            size_bytes: bytes,
            kind: Kind::Device,
            flush_failed: OnceLock::new(),
            clearing: Some(Clearing::new(cleared)),
            end: OnceLock::new(),
        })
    }

    /// Clears the next part of a volume's former content. Returns whether nothing of it is left.
    /// Reads and writes clear their own part first, in any order with this.
    pub fn clear_next(&self) -> io::Result<bool> {
        match &self.clearing {
            Some(clearing) => elsewhere(|| clearing.next(&self.file)),
            None => Ok(true),
        }
    }

    /// Clears the former content in a range.
    fn clear(&self, range: &Range<u64>) -> io::Result<()> {
        match &self.clearing {
            Some(clearing) => elsewhere(|| clearing.clear(&self.file, range)),
            None => Ok(()),
        }
    }

    /// Returns the open file, for the locks on it.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Records where an image on a device ends, which the device does not say. It counts as the
    /// length of its file from then on.
    pub fn ends_at(&self, bytes: u64) {
        if self.kind == Kind::Device {
            self.end.get_or_init(|| bytes.min(self.size_bytes));
        }
    }

    /// Returns the current length of the file, which for a growing image is not the disk's size.
    pub fn file_bytes(&self) -> io::Result<u64> {
        match self.kind {
            Kind::Whole => Ok(self.size_bytes),
            Kind::Device => Ok(self.end.get().copied().unwrap_or(self.size_bytes)),
            Kind::Grows => Ok(self.file.metadata()?.len()),
        }
    }

    /// Sets the length of a growing image's file, durably. Content behind that is lost. A block
    /// device keeps its size.
    pub fn set_file_bytes(&self, bytes: u64) -> io::Result<()> {
        if bytes > self.size_bytes {
            return Err(Errno::EINVAL.into());
        }
        match self.kind {
            Kind::Grows => self.file.set_len(bytes)?,
            // An image on a device may be shorter, and is not cut off.
            Kind::Device => self.ends_at(bytes),
            Kind::Whole => return Err(Errno::EINVAL.into()),
        }
        self.file.sync_all()
    }

    fn check(&self, range: &Range<u64>) -> io::Result<()> {
        if range.start <= range.end && range.end <= self.size_bytes {
            return Ok(());
        }
        Err(Errno::EINVAL.into())
    }

    /// Returns the range of a buffer.
    fn range(&self, offset: u64, length: usize) -> io::Result<Range<u64>> {
        let end = u64::try_from(length)
            .ok()
            .and_then(|length| offset.checked_add(length));
        let range = offset..end.ok_or(Errno::EINVAL)?;
        self.check(&range)?;
        Ok(range)
    }

    /// Returns `false` if the file system does not support the operation.
    fn allocate(&self, range: &Range<u64>, mode: FallocateFlags) -> io::Result<bool> {
        let offset = signed(range.start)?;
        let length = signed(range.end - range.start)?;
        loop {
            match elsewhere(|| fallocate(&self.file, mode, offset, length)) {
                Ok(()) => return Ok(true),
                Err(Errno::EINTR) => {}
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(false),
                // Not whole blocks of the device.
                Err(Errno::EINVAL) if self.kind == Kind::Device => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn punch(&self, range: &Range<u64>) -> io::Result<bool> {
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        self.allocate(range, mode)
    }

    /// Extends a growing file to the end of a range that is about to be zeroed, as QEMU's own
    /// writes of zeros would. Never shortens it, even if other threads write behind the range.
    fn reach(&self, range: &Range<u64>) -> io::Result<()> {
        if self.kind == Kind::Grows && range.end > self.file.metadata()?.len() {
            self.put(&[0], range.end - 1)?;
        }
        Ok(())
    }

    fn put(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        elsewhere(|| self.file.write_all_at(bytes, offset))
    }

    fn write_zeros(&self, range: Range<u64>) -> io::Result<()> {
        let mut offset = range.start;
        while offset < range.end {
            let length = (range.end - offset).min(ZEROS.len() as u64);
            let piece = usize::try_from(length).map_err(io::Error::other)?;
            self.put(&ZEROS[..piece], offset)?;
            offset += length;
        }
        Ok(())
    }

    /// Returns where the next data or hole begins; `None` when no more data follows.
    fn seek(&self, offset: u64, whence: Whence) -> io::Result<Option<u64>> {
        let offset = signed(offset)?;
        match elsewhere(|| lseek(&self.file, offset, whence)) {
            Ok(place) => u64::try_from(place).map(Some).map_err(io::Error::other),
            Err(Errno::ENXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn extent_at(&self, offset: u64, end: u64) -> io::Result<Extent> {
        if self.kind == Kind::Device {
            return Ok(Extent {
                length_bytes: end - offset,
                hole: false,
            });
        }
        let data = self
            .seek(offset, Whence::SeekData)?
            .map_or(end, |place| place.min(end));
        if data > offset {
            return Ok(Extent {
                length_bytes: data - offset,
                hole: true,
            });
        }
        let hole = self
            .seek(offset, Whence::SeekHole)?
            .map_or(end, |place| place.min(end));
        // It became a hole between the two queries: reporting a block of it as data is always
        // correct.
        let hole = hole.max(end.min(offset + BLOCK_BYTES));
        Ok(Extent {
            length_bytes: hole - offset,
            hole: false,
        })
    }
}

fn signed(number: u64) -> io::Result<i64> {
    i64::try_from(number).map_err(|_| Errno::EINVAL.into())
}

impl Disk for RawDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let range = self.range(offset, buffer.len())?;
        self.clear(&range)?;
        let mut done = 0;
        while done < buffer.len() {
            let left = &mut buffer[done..];
            match elsewhere(|| self.file.read_at(left, offset + done as u64)) {
                Ok(0) if self.kind == Kind::Grows => {
                    buffer[done..].fill(0);
                    break;
                }
                // The image was shortened: its content there is lost, and not zeros.
                Ok(0) => return Err(Errno::EIO.into()),
                Ok(length) => done += length,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let range = self.range(offset, bytes.len())?;
        self.clear(&range)?;
        self.put(bytes, offset)
    }

    fn flush(&self) -> io::Result<()> {
        if let Some(errno) = self.flush_failed.get() {
            return Err(io::Error::from_raw_os_error(*errno));
        }
        elsewhere(|| self.file.sync_data()).inspect_err(|error| {
            let errno = error.raw_os_error().unwrap_or(Errno::EIO as i32);
            // Another thread's flush may have failed first: its error stays.
            let _ = self.flush_failed.set(errno);
        })
    }

    fn zero(&self, range: Range<u64>, zeros: Zeros) -> io::Result<()> {
        self.check(&range)?;
        if range.is_empty() {
            return Ok(());
        }
        self.clear(&range)?;
        let done = match zeros {
            Zeros::MayBeHole => {
                self.reach(&range)?;
                self.punch(&range)?
            }
            Zeros::Allocated => self.allocate(&range, FallocateFlags::FALLOC_FL_ZERO_RANGE)?,
        };
        if done {
            return Ok(());
        }
        self.write_zeros(range)
    }

    fn discard(&self, range: Range<u64>) -> io::Result<()> {
        self.check(&range)?;
        if !range.is_empty() {
            self.clear(&range)?;
            // Where the file system has no holes, nothing needs to be done.
            self.punch(&range)?;
        }
        Ok(())
    }

    fn extents(&self, range: Range<u64>, count_max: usize) -> io::Result<Vec<Extent>> {
        self.check(&range)?;
        let mut extents = Vec::new();
        let mut offset = range.start;
        while offset < range.end && extents.len() < count_max {
            let extent = self.extent_at(offset, range.end)?;
            offset += extent.length_bytes;
            extents.push(extent);
        }
        Ok(extents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use tempfile::TempDir;

    const MIB: u64 = 1 << 20;

    fn image(length: u64, size: ExportSize) -> (TempDir, PathBuf, RawDisk) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        File::create(&path).unwrap().set_len(length).unwrap();
        let disk = RawDisk::open(&path, size).unwrap();
        (folder, path, disk)
    }

    fn allocated(path: &Path) -> u64 {
        std::fs::metadata(path).unwrap().blocks() * 512
    }

    #[test]
    fn what_is_written_is_in_the_file_and_holes_stay_holes() {
        let (_folder, path, disk) = image(8 * MIB, ExportSize::OfFile);
        disk.write(3 * MIB - 5, b"across a boundary").unwrap();
        let file = std::fs::read(&path).unwrap();
        let at = usize::try_from(3 * MIB - 5).unwrap();
        assert_eq!(&file[at..at + 17], b"across a boundary");
        assert!(allocated(&path) <= 64 << 10, "{}", allocated(&path));
        disk.flush().unwrap();

        let extents = disk.extents(0..8 * MIB, 10).unwrap();
        assert_eq!(extents.iter().map(|e| e.length_bytes).sum::<u64>(), 8 * MIB);
        assert!(extents[0].hole && !extents[1].hole && extents[2].hole);
        // With a smaller limit it returns fewer extents, and none beyond the end of the range.
        assert_eq!(disk.extents(0..8 * MIB, 1).unwrap().len(), 1);
        let part = disk.extents(MIB + 7..2 * MIB, 10).unwrap();
        let hole = Extent {
            length_bytes: MIB - 7,
            hole: true,
        };
        assert_eq!(part, [hole]);
        assert!(disk.extents(MIB..MIB, 10).unwrap().is_empty());
    }

    #[test]
    fn zeroed_ranges_read_as_zeros_and_keep_their_space_where_asked_to() {
        let (_folder, path, disk) = image(4 * MIB, ExportSize::OfFile);
        disk.write(0, &vec![0xaa; 4 << 20]).unwrap();
        disk.zero(MIB..2 * MIB, Zeros::Allocated).unwrap();
        disk.flush().unwrap();
        assert!(allocated(&path) >= 4 * MIB);
        disk.zero(2 * MIB + 1..3 * MIB - 1, Zeros::MayBeHole)
            .unwrap();
        disk.discard(3 * MIB..4 * MIB).unwrap();
        assert!(allocated(&path) <= 2 * MIB + (64 << 10));
        let mut expected = vec![0xaa; 4 << 20];
        expected[1 << 20..2 << 20].fill(0);
        expected[(2 << 20) + 1..(3 << 20) - 1].fill(0);
        expected[3 << 20..].fill(0);
        assert!(std::fs::read(&path).unwrap() == expected);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * MIB);
    }

    #[test]
    fn an_image_that_grows_reads_zeros_behind_its_end() {
        let (_folder, path, disk) = image(1000, ExportSize::Bytes(4 * MIB));
        disk.write(990, &[1; 10]).unwrap();
        let mut buffer = [7; 20];
        disk.read(990, &mut buffer).unwrap();
        assert_eq!(buffer[..10], [1; 10]);
        assert_eq!(buffer[10..], [0; 10]);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1000);

        disk.zero(500..MIB, Zeros::MayBeHole).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);
        disk.write(2 * MIB, b"far").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 2 * MIB + 3);
        disk.discard(3 * MIB..4 * MIB).unwrap();
        disk.zero(3 * MIB..4 * MIB, Zeros::Allocated).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * MIB);
        let extents = disk.extents(0..4 * MIB, 100).unwrap();
        assert_eq!(extents.iter().map(|e| e.length_bytes).sum::<u64>(), 4 * MIB);
    }

    #[test]
    fn only_the_file_of_an_image_that_grows_is_given_another_length() {
        let (_folder, path, disk) = image(1000, ExportSize::Bytes(4 * MIB));
        disk.write(MIB, &[1; 10]).unwrap();
        assert_eq!(disk.file_bytes().unwrap(), MIB + 10);
        disk.set_file_bytes(MIB + 3).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB + 3);
        let mut buffer = [7; 10];
        disk.read(MIB, &mut buffer).unwrap();
        assert_eq!(buffer, [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]);
        disk.set_file_bytes(4 * MIB + 1).unwrap_err();
        let (_folder, _, whole) = image(1000, ExportSize::OfFile);
        whole.set_file_bytes(10).unwrap_err();
        assert_eq!(whole.file_bytes().unwrap(), 1000);
    }

    #[test]
    fn ranges_beyond_the_end_are_refused_and_change_nothing() {
        let (_folder, path, disk) = image(MIB, ExportSize::OfFile);
        let refused = |result: io::Result<()>| {
            assert_eq!(
                result.unwrap_err().raw_os_error(),
                Some(Errno::EINVAL as i32)
            );
        };
        refused(disk.read(MIB - 1, &mut [0; 2]));
        refused(disk.read(u64::MAX, &mut [0; 2]));
        refused(disk.write(MIB, b"x"));
        refused(disk.zero(0..MIB + 1, Zeros::MayBeHole));
        refused(disk.discard(u64::MAX - 1..u64::MAX));
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 5..4;
        refused(disk.zero(backwards, Zeros::Allocated));
        refused(disk.extents(MIB..MIB + 1, 1).map(|_| ()));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);
        assert_eq!(allocated(&path), 0);
    }

    #[test]
    fn an_image_that_somebody_cuts_off_gives_errors_and_not_zeros() {
        let (_folder, path, disk) = image(MIB, ExportSize::OfFile);
        OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(MIB / 2)
            .unwrap();
        let error = disk.read(MIB / 2 - 1, &mut [0; 2]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EIO as i32));
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let (folder, path, disk) = image(MIB, ExportSize::OfFile);
        drop(disk);
        let refusal = |path: &Path, size| RawDisk::open(path, size).unwrap_err();
        let of_file = ExportSize::OfFile;
        assert!(matches!(
            refusal(folder.path(), of_file),
            OpenError::NoImage { .. }
        ));
        assert!(matches!(
            refusal(Path::new("/dev/null"), of_file),
            OpenError::NoImage { .. }
        ));
        assert!(matches!(
            refusal(&path.join("x"), of_file),
            OpenError::Io { .. }
        ));
        let short = ExportSize::Bytes(MIB - 1);
        assert!(matches!(refusal(&path, short), OpenError::TooLong { .. }));
        assert!(matches!(
            refusal(&path, ExportSize::Bytes(u64::MAX)),
            OpenError::Io { .. }
        ));
    }
}
