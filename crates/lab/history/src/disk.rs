//! Accesses a disk of the guest without its page cache.

use crate::writer::Medium;
use longhaul_history::plan::SECTOR_BYTES;
use std::ffi::{c_int, c_ulong};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const O_DIRECT: i32 = 0o40000;
/// Kernel requests, `_IO(0x12, 119)` and `_IO(0x12, 127)`.
const BLKDISCARD: c_ulong = 0x1277;
const BLKZEROOUT: c_ulong = 0x127f;

#[expect(unsafe_code, reason = "declares a function of the C library")]
// SAFETY: the signature is that of the C library on 64-bit Linux.
unsafe extern "C" {
    fn ioctl(descriptor: c_int, request: c_ulong, ...) -> c_int;
}

/// An open disk.
pub(crate) struct Disk {
    file: File,
    sectors: u64,
}

impl Disk {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(O_DIRECT);
        let mut file = options.open(path)?;
        let sectors = file.seek(SeekFrom::End(0))? / SECTOR_BYTES as u64;
        Ok(Self { file, sectors })
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.sectors
    }

    fn request(&self, request: c_ulong, first: u64, sectors: u64) -> io::Result<()> {
        let range = [place(first), place(sectors)];
        #[expect(unsafe_code, reason = "the standard library has no ioctl")]
        // SAFETY: both requests read two 64-bit numbers from the address, which outlive the call.
        let result = unsafe { ioctl(self.file.as_raw_fd(), request, range.as_ptr()) };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Medium for Disk {
    fn read(&self, first: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, place(first))
    }

    fn write(&self, first: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, place(first))
    }

    fn zero(&self, first: u64, sectors: u64) -> io::Result<()> {
        self.request(BLKZEROOUT, first, sectors)
    }

    fn discard(&self, first: u64, sectors: u64) -> io::Result<()> {
        self.request(BLKDISCARD, first, sectors)
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

fn place(sectors: u64) -> u64 {
    sectors * SECTOR_BYTES as u64
}
