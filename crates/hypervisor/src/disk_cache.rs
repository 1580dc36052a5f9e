//! What the host still holds in memory of a guest's disks.
//!
//! QEMU flushes every disk when it stops a guest, and the guest stands still for as long as that
//! takes: hundreds of milliseconds where much was written. Flushed shortly before, there is little left.

use crate::memory::shared_files;
use nix::sys::stat::{major, minor};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// More open files of one QEMU than this are not looked at.
const FILES_MAX: usize = 4096;

/// Writes to stable storage what the host's page cache and journals hold of the files and block
/// devices that this process has open for writing, except for those that are its memory. Blocks for as
/// long as the disks take.
///
/// The guest is not held up, and sees nothing of it. Nobody depends on it: QEMU flushes by itself
/// when it stops the guest, and is told of lost data then too, since Linux tells every open file. Of
/// several errors the first one is returned, after all files.
pub fn flush(pid: i32) -> io::Result<()> {
    let memory = shared_files(&fs::read_to_string(format!("/proc/{pid}/maps"))?);
    let mut flushed = Ok(());
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.take(FILES_MAX) {
        let entry = entry?;
        let path = entry.path();
        // What was closed meanwhile needs nothing; sockets, pipes and devices are not opened.
        let Ok(metadata) = fs::metadata(&path) else {
            continue;
        };
        let file_type = metadata.file_type();
        let device = (major(metadata.dev()), minor(metadata.dev()));
        let is_memory = memory.contains(&(device, metadata.ino()));
        let may_be_disk = (file_type.is_file() && !is_memory) || file_type.is_block_device();
        if may_be_disk && is_written(pid, &entry.file_name().to_string_lossy()) {
            let one = File::open(&path).and_then(|file| file.sync_data());
            let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
            flushed =
                flushed.and(one.or_else(|error| if gone(&error) { Ok(()) } else { Err(error) }));
        }
    }
    flushed
}

/// Whether a process has a file open for writing.
fn is_written(pid: i32, fd: &str) -> bool {
    /// O_WRONLY and O_RDWR of open(2), as proc(5) shows them.
    const WRITES: u32 = 0o3;
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & WRITES != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn files_of_a_process_are_flushed_and_what_is_gone_is_said() {
        let folder =
            std::env::temp_dir().join(format!("longhaul-disk-cache-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (written, read) = (folder.join("written"), folder.join("read"));
        fs::write(&read, b"content").unwrap();
        let (written, read) = (File::create(&written).unwrap(), File::open(&read).unwrap());
        let pid = std::process::id() as i32;
        assert!(is_written(pid, &written.as_raw_fd().to_string()));
        assert!(!is_written(pid, &read.as_raw_fd().to_string()));
        flush(pid).unwrap();
        assert!(flush(-1).is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
