//! Reads RAM that QEMU shares through its file, so that unused pages stay unallocated.
//!
//! RAM in a memfd begins as one hole. Reading a page of the hole through a mapping, QEMU's own or
//! by `process_vm_readv`, makes the system allocate a page of zeros; reading the file does not.

use super::address_map::{Mapping, covering};
use crate::open_files::open_files;
use nix::errno::Errno;
use nix::sys::uio::pread;
use std::fs::File;
use std::sync::Arc;

/// The place of a block in its file.
#[derive(Debug, Clone)]
pub(crate) struct Backing {
    file: Arc<File>,
    /// The block's offset in the file.
    offset: u64,
}

impl Backing {
    /// Returns the file behind `[start, start + length)` of a process's memory, if all of that is
    /// one shared mapping of a file that the process has open.
    pub(crate) fn find(pid: i32, maps: &str, start: u64, length: u64) -> Option<Self> {
        let mapping = covering(maps, start, length)?;
        if !mapping.shared || mapping.inode == 0 {
            return None;
        }
        let file = open(pid, &mapping)?;
        Some(Self {
            file: Arc::new(file),
            offset: mapping.offset + (start - mapping.from),
        })
    }

    /// Reads from offset `at` of the block.
    pub(crate) fn read(&self, at: u64, mut out: &mut [u8]) -> Result<(), Errno> {
        let mut from = self.offset + at;
        while !out.is_empty() {
            let offset = i64::try_from(from).map_err(|_| Errno::EOVERFLOW)?;
            match pread(&self.file, out, offset) {
                // The file is shorter than the mapping, so QEMU could not use that part either.
                Ok(0) => return Err(Errno::ENXIO),
                Ok(read) => {
                    from += read as u64;
                    out = out.get_mut(read..).unwrap_or_default();
                }
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }
}

/// Opens the mapped file by one of the process's own descriptors.
fn open(pid: i32, mapping: &Mapping) -> Option<File> {
    let mapped = (mapping.device, mapping.inode);
    let mut files = open_files(pid).ok()?.flatten();
    files.find(|file| file.identity() == mapped)?.open().ok()
}
