//! Lists the open files of a process by `/proc/PID/fd`, which also opens files without a name.

use nix::sys::stat::{major, minor};
use std::fs::{self, DirEntry, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The maximum number of open files of one process that are examined.
const FILES_MAX: usize = 4096;

/// The identity of a file on this host: its device, major and minor, and its inode.
pub(crate) type FileIdentity = ((u64, u64), u64);

/// A file that a process had open at the time of listing.
pub(crate) struct OpenFile {
    /// A path that opens the same file again.
    path: PathBuf,
    /// The process's descriptor number.
    fd: String,
    metadata: Metadata,
}

/// Returns the open files of a process, without those that it closes meanwhile.
pub(crate) fn open_files(pid: i32) -> io::Result<impl Iterator<Item = io::Result<OpenFile>>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))?.take(FILES_MAX);
    Ok(entries.filter_map(|entry| entry.map(OpenFile::of).transpose()))
}

/// Returns whether a process has this exact file, or block device, open, possibly for reading only:
/// QEMU does so while its guest cannot write.
pub fn has_open(pid: i32, file: &Metadata) -> io::Result<bool> {
    let is_it = |open: &Metadata| match file.file_type().is_block_device() {
        true => open.file_type().is_block_device() && open.rdev() == file.rdev(),
        false => (open.dev(), open.ino()) == (file.dev(), file.ino()),
    };
    for open in open_files(pid)? {
        if is_it(open?.metadata()) {
            return Ok(true);
        }
    }
    Ok(false)
}

impl OpenFile {
    fn of(entry: DirEntry) -> Option<Self> {
        let path = entry.path();
        Some(Self {
            metadata: fs::metadata(&path).ok()?,
            fd: entry.file_name().to_string_lossy().into_owned(),
            path,
        })
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        let device = self.metadata.dev();
        ((major(device), minor(device)), self.metadata.ino())
    }

    pub(crate) fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Opens it for reading, as a file of our own.
    pub(crate) fn open(&self) -> io::Result<File> {
        File::open(&self.path)
    }

    /// Returns whether the process has it open for writing.
    pub(crate) fn is_written(&self) -> bool {
        /// The bits of O_WRONLY and O_RDWR of open(2), as proc(5) shows them.
        const WRITES: u32 = 0o3;
        let process = self.path.parent().and_then(Path::parent);
        let info = process.map(|process| process.join("fdinfo").join(&self.fd));
        let info = info.and_then(|path| fs::read_to_string(path).ok());
        let info = info.unwrap_or_default();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
        flags.is_some_and(|flags| flags & WRITES != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_and_who_writes_them_is_seen() {
        let folder = std::env::temp_dir();
        let path = folder.join(format!("longhaul-open-files-{}", std::process::id()));
        let written = File::create(&path).unwrap();
        let read = File::open(&path).unwrap();
        // A file without a name is found as well.
        fs::remove_file(&path).unwrap();
        let inode = written.metadata().unwrap().ino();
        let files = open_files(std::process::id() as i32).unwrap();
        let files = files.map(Result::unwrap);
        let ours: Vec<OpenFile> = files.filter(|file| file.identity().1 == inode).collect();
        assert_eq!(ours.len(), 2);
        assert_eq!(ours.iter().filter(|file| file.is_written()).count(), 1);
        assert!(ours.iter().all(|file| file.open().is_ok()));
        assert!(open_files(-1).is_err());
        let about = written.metadata().unwrap();
        let pid = std::process::id() as i32;
        drop(written);
        assert!(has_open(pid, &about).unwrap());
        drop(read);
        assert!(!has_open(pid, &about).unwrap());
    }
}
