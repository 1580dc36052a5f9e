//! Direct reads and writes of files and block devices: without a copy in the page cache, whose
//! pages cost more processor time than the encryption of what they hold, and would take the place
//! of those that guests use.

use crate::aligned::BLOCK_BYTES;
use crate::media::Medium;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag, PosixFadviseAdvice, posix_fadvise};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// Opens an open file again, for direct reads, and writes if it is writable. Returns `None` where
/// the file system has none.
fn again(file: &File, writable: bool) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(writable)
        .custom_flags(OFlag::O_DIRECT.bits());
    options.open(path).ok()
}

fn is_aligned(at: u64, bytes: &[u8]) -> bool {
    let block = BLOCK_BYTES as u64;
    at.is_multiple_of(block)
        && bytes.len().is_multiple_of(BLOCK_BYTES)
        && (bytes.as_ptr() as usize).is_multiple_of(BLOCK_BYTES)
}

/// Direct reads of a file that is open.
#[derive(Debug)]
pub(crate) struct DirectReads(Option<File>);

impl DirectReads {
    /// Prepares direct reads of a file.
    pub(crate) fn of(file: &File) -> Self {
        Self(again(file, false))
    }

    /// Returns whether the file can be read so.
    pub(crate) fn are_possible(&self) -> bool {
        self.0.is_some()
    }

    /// Reads until the buffer is full. Returns whether it is: whatever the reason is that it is
    /// not, a usual read says it.
    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> bool {
        let direct = self.0.as_ref().filter(|_| is_aligned(at, bytes));
        direct.is_some_and(|file| file.read_exact_at(bytes, at).is_ok())
    }
}

/// A file or a block device as the medium of a device. What is aligned is read and written
/// directly, where that is possible.
#[derive(Debug)]
pub(crate) struct DirectMedium {
    file: File,
    direct: Option<File>,
    /// Keeps other commands from writing it.
    _lock: Option<Flock<File>>,
}

/// How often a lock is tried, and the time between two trials: udev has one while it looks at a
/// block device.
const LOCK_TRIALS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// Locks an open file. Returns `None` if another command has locked it. A file system may have no
/// locks.
fn lock(file: &File) -> io::Result<Option<Option<Flock<File>>>> {
    for trial in 1.. {
        match Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(Some(Some(lock))),
            Err((_, Errno::EWOULDBLOCK)) if trial < LOCK_TRIALS => sleep(LOCK_PAUSE),
            Err((_, Errno::EWOULDBLOCK)) => break,
            Err((_, Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS)) => return Ok(Some(None)),
            Err((_, errno)) => return Err(errno.into()),
        }
    }
    Ok(None)
}

impl DirectMedium {
    /// Prepares an open file that is only read.
    pub(crate) fn to_read(file: File) -> Self {
        Self {
            direct: again(&file, false),
            file,
            _lock: None,
        }
    }

    /// Prepares an open file, which is written. Returns `None` if another command writes it.
    pub(crate) fn writable(file: File) -> io::Result<Option<Self>> {
        let lock = lock(&file)?;
        Ok(lock.map(|lock| Self {
            direct: again(&file, true),
            file,
            _lock: lock,
        }))
    }

    /// Reads or writes directly. Returns `None` where that is not possible.
    fn directly(
        &self,
        is_aligned: bool,
        act: impl FnOnce(&File) -> io::Result<()>,
    ) -> Option<io::Result<()>> {
        match act(self.direct.as_ref().filter(|_| is_aligned)?) {
            // The device has larger blocks, or the file ends within one.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => None,
            done => Some(done),
        }
    }
}

impl Medium for DirectMedium {
    fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let directly = self.directly(is_aligned(at, bytes), |file| file.read_exact_at(bytes, at));
        directly.unwrap_or_else(|| self.file.read_exact_at(bytes, at))
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let directly = self.directly(is_aligned(at, bytes), |file| file.write_all_at(bytes, at));
        directly.unwrap_or_else(|| self.file.write_all_at(bytes, at))
    }

    /// Makes everything durable, also what was written directly: both are of one file.
    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn forget(&self) -> io::Result<()> {
        posix_fadvise(&self.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aligned::Aligned;

    #[test]
    fn what_is_written_directly_is_read_in_any_way() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("device");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        let medium = DirectMedium::writable(file).unwrap().unwrap();
        let mut block = Aligned::zeros(2 * BLOCK_BYTES);
        block.bytes_mut().fill(3);
        medium.write_at(0, block.bytes()).unwrap();
        // Neither the offset nor the length are those of blocks.
        medium.write_at(BLOCK_BYTES as u64 - 1, &[4; 3]).unwrap();
        medium.write_at(2 * BLOCK_BYTES as u64, &[5; 10]).unwrap();
        medium.sync().unwrap();
        assert_eq!(medium.length().unwrap(), 2 * BLOCK_BYTES as u64 + 10);
        medium.read_at(0, block.bytes_mut()).unwrap();
        let expected = fs::read(&path).unwrap();
        assert_eq!(block.bytes(), &expected[..2 * BLOCK_BYTES]);
        assert_eq!(
            block.bytes()[BLOCK_BYTES - 2..BLOCK_BYTES + 3],
            [3, 4, 4, 4, 3]
        );
        // The end is within a block, and cannot be passed.
        let at = BLOCK_BYTES as u64;
        let error = medium.read_at(at, block.bytes_mut()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let reads = DirectReads::of(&File::open(&path).unwrap());
        assert!(!reads.read(at, block.bytes_mut()));
        let begin = &mut block.bytes_mut()[..BLOCK_BYTES];
        assert_eq!(reads.read(0, begin), reads.are_possible());
    }
}
