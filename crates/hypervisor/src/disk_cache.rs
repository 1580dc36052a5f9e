//! Flushes the host's cached writes of a guest's disks.
//!
//! QEMU flushes every disk when it stops a guest, and the guest is stopped for that time: hundreds
//! of milliseconds after many writes. A flush shortly before leaves little to write.

use crate::memory::shared_files;
use crate::open_files::open_files;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;

/// Writes to stable storage the content of the host's page cache and journals for files and block
/// devices that this process has open for writing, except for its memory. Blocks for as long as the
/// disks take.
///
/// The guest is not held up, and does not notice. Nothing depends on the result: QEMU flushes by
/// itself when it stops the guest, and then also gets errors of lost data, since Linux reports them
/// to every open file. Of several errors the first is returned, after all files.
pub fn flush(pid: i32) -> io::Result<()> {
    let memory = shared_files(&fs::read_to_string(format!("/proc/{pid}/maps"))?);
    let mut flushed = Ok(());
    for file in open_files(pid)? {
        let file = file?;
        let file_type = file.metadata().file_type();
        let is_memory = memory.contains(&file.identity());
        // Sockets, pipes and other devices are not opened.
        let may_be_disk = (file_type.is_file() && !is_memory) || file_type.is_block_device();
        if may_be_disk && file.is_written() {
            let one = file.open().and_then(|file| file.sync_data());
            let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
            flushed =
                flushed.and(one.or_else(|error| if gone(&error) { Ok(()) } else { Err(error) }));
        }
    }
    flushed
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn files_of_a_process_are_flushed_and_what_is_gone_is_said() {
        let folder =
            std::env::temp_dir().join(format!("longhaul-disk-cache-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (written, read) = (folder.join("written"), folder.join("read"));
        fs::write(&read, b"content").unwrap();
        let (written, read) = (File::create(&written).unwrap(), File::open(&read).unwrap());
        let pid = std::process::id() as i32;
        flush(pid).unwrap();
        assert!(flush(-1).is_err());
        drop((written, read));
        fs::remove_dir_all(folder).unwrap();
    }
}
