//! Determines which parts of a file are in this host's page cache: those were used recently.

use nix::errno::Errno;
use nix::libc;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

/// Bytes of a page in the page cache, as counted here.
const PAGE_BYTES: u64 = 4096;
/// Bytes that are inspected at once.
const WINDOW_BYTES: u64 = 1 << 30;

/// Returns the number of cached pages in each piece of a file, as (piece, pages), for pieces with
/// at least one.
pub(crate) fn pages_in_memory(file: &File, piece_bytes: u64) -> io::Result<Vec<(u32, u32)>> {
    let length = file.metadata()?.len();
    let mut found: Vec<(u32, u32)> = Vec::new();
    let mut start = 0;
    while start < length {
        let bytes = WINDOW_BYTES.min(length - start);
        for (page, _) in in_memory(file, start, bytes)?
            .iter()
            .enumerate()
            // The other bits are reserved.
            .filter(|(_, state)| **state & 1 == 1)
        {
            let piece = (start + page as u64 * PAGE_BYTES) / piece_bytes;
            let piece = u32::try_from(piece).map_err(|_| Errno::EFBIG)?;
            match found.last_mut() {
                Some((last, pages)) if *last == piece => *pages += 1,
                _ => found.push((piece, 1)),
            }
        }
        start += bytes;
    }
    Ok(found)
}

/// Returns a byte for each page of a range, which begins at a page.
fn in_memory(file: &File, start: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let length = usize::try_from(bytes).map_err(|_| Errno::EFBIG)?;
    let offset = libc::off_t::try_from(start).map_err(|_| Errno::EFBIG)?;
    let mut pages = vec![0_u8; bytes.div_ceil(PAGE_BYTES) as usize];
    #[expect(unsafe_code, reason = "there is no safe wrapper of mincore")]
    // SAFETY: a new mapping at an address that the system chooses, which is never read or written,
    // and is unmapped before this returns. The vector has a byte for each of its pages (4096 bytes,
    // the smallest size on this system), which is what mincore writes.
    let looked = unsafe {
        let (protection, flags) = (libc::PROT_NONE, libc::MAP_SHARED);
        let mapped = libc::mmap(
            ptr::null_mut(),
            length,
            protection,
            flags,
            file.as_raw_fd(),
            offset,
        );
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let looked = Errno::result(libc::mincore(mapped, length, pages.as_mut_ptr()));
        let gone = Errno::result(libc::munmap(mapped, length));
        looked.and(gone)
    };
    looked?;
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_just_written_is_in_memory_and_holes_are_not() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 3 * 4096]).unwrap();
        file.set_len((1 << 20) + 5).unwrap();
        let pages = pages_in_memory(&file, 2 * 4096).unwrap();
        assert_eq!(pages, [(0, 2), (1, 1)]);
        assert_eq!(
            pages_in_memory(&tempfile::tempfile().unwrap(), 4096).unwrap(),
            []
        );
    }
}
