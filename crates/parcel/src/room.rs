//! Where imported disks go, and how much room is there.

use longhaul_storage::files::{Files, OpenFile, RealFiles};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// The free room of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// The file system's number.
    pub(crate) device: u64,
    pub(crate) free_bytes: u64,
}

/// What tells a file from another one, and from its own earlier content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    /// Its file system and its number there.
    pub(crate) file: (u64, u64),
    /// When it was written last: seconds and nanoseconds.
    pub(crate) written: (i64, i64),
    pub(crate) bytes: u64,
}

/// Folders for imported disks.
pub(crate) trait Places: Files {
    /// Creates an empty file, or empties it; only its owner may use it.
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>>;
    /// Returns the free room of a folder's file system.
    fn room(&self, folder: &Path) -> io::Result<Room>;
    /// Returns the stamp of a file.
    fn stamp(&self, path: &Path) -> io::Result<Stamp>;
}

impl Places for RealFiles {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        Ok(Box::new(options.mode(0o600).open(path)?))
    }

    fn room(&self, folder: &Path) -> io::Result<Room> {
        let found = statvfs(folder)?;
        Ok(Room {
            device: fs::metadata(folder)?.dev(),
            free_bytes: found.blocks_available() * found.fragment_size(),
        })
    }

    fn stamp(&self, path: &Path) -> io::Result<Stamp> {
        let found = fs::metadata(path)?;
        Ok(Stamp {
            file: (found.dev(), found.ino()),
            written: (found.mtime(), found.mtime_nsec()),
            bytes: found.len(),
        })
    }
}

/// Returns the bytes that a file takes of its file system; `None` if it is not a file.
pub(crate) fn used_bytes(path: &Path) -> Option<u64> {
    let found = fs::metadata(path).ok()?;
    found.is_file().then(|| found.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_new_file_is_empty_and_its_owners_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        for content in [&b"1234"[..], b"5"] {
            let file = RealFiles.create(&path).unwrap();
            assert_eq!(file.length().unwrap(), 0);
            file.write_at(0, content).unwrap();
        }
        assert_eq!(fs::read(&path).unwrap(), b"5");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let room = RealFiles.room(folder.path()).unwrap();
        assert_eq!(room.device, fs::metadata(&path).unwrap().dev());
    }

    #[test]
    fn holes_take_no_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = RealFiles.create(&path).unwrap();
        file.set_length(1 << 30).unwrap();
        file.write_at(5 << 20, &[1; 8192]).unwrap();
        file.sync("a test").unwrap();
        let used = used_bytes(&path).unwrap();
        assert!((8192..1 << 20).contains(&used), "{used}");
        assert_eq!(used_bytes(folder.path()), None);
    }
}
