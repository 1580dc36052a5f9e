//! The machine's own file system.

use super::{Access, Files, OpenFile};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;

/// The machine's own file system.
#[derive(Debug, Clone, Copy)]
pub struct RealFiles;

impl Files for RealFiles {
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(access != Access::Read);
        options.create(access == Access::Create).truncate(false);
        Ok(Box::new(options.open(path)?))
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o700).create(path)
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(folder)?
            .map(|entry| entry.map(|entry| entry.file_name()))
            .collect()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync_folder(&self, folder: &Path, _what: &'static str) -> io::Result<()> {
        File::open(folder)?.sync_all()
    }
}

impl OpenFile for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.set_len(length)
    }

    fn reserve(&self, length: u64) -> io::Result<()> {
        let length = i64::try_from(length).map_err(io::Error::other)?;
        loop {
            match fallocate(self, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, length) {
                Ok(()) | Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn sync(&self, _what: &'static str) -> io::Result<()> {
        self.sync_all()
    }

    fn sync_content(&self, _what: &'static str) -> io::Result<()> {
        self.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::create_folder;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn reserved_space_is_there_and_the_length_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let file = RealFiles.open(&path, Access::Create).unwrap();
        file.write_at(0, b"abc").unwrap();
        file.reserve(64 << 10).unwrap();
        assert_eq!(file.length().unwrap(), 3);
        let blocks = fs::metadata(&path).unwrap().blocks();
        // No space is reserved where the file system does not support it.
        assert!(blocks * 512 >= 64 << 10 || blocks <= 8, "{blocks} blocks");
    }

    #[test]
    fn folders_are_made_with_those_above_them() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        create_folder(&RealFiles, &deep).unwrap();
        create_folder(&RealFiles, &deep).unwrap();
        assert!(deep.is_dir());
        fs::write(folder.path().join("file"), "").unwrap();
        let error = create_folder(&RealFiles, &folder.path().join("file")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    }
}
