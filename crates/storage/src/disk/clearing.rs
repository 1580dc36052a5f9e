//! Clears a volume whose former content does not count, beside the writes that arrive for it.
//!
//! Chunks are cleared in ascending order, and each chunk also before its first use. Where the
//! device can zero a range by itself, it does. Otherwise the range is discarded, if the device can
//! do that, and read: only blocks that are not zero are written. So a thin volume stays thin.

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// The unit in which cleared parts are remembered, in bytes.
const CHUNK: u64 = 256 << 10;
/// Chunks that are cleared at once.
const CHUNKS_AT_ONCE: u64 = 64;
/// Bytes that are read, and zeroed, at once where the device cannot zero by itself.
const PIECE: usize = 1 << 20;

mod request {
    nix::ioctl_write_ptr_bad!(
        /// Discards a range: its first byte and its length.
        discard,
        nix::request_code_none!(0x12, 119),
        [u64; 2]
    );
}

/// Which chunks of a volume are cleared.
#[derive(Debug)]
pub(super) struct Clearing {
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// A bit for each chunk.
    cleared: Vec<u64>,
    /// All chunks before this one are cleared.
    next: u64,
    /// Whether the device zeroes and discards ranges by itself, as far as is known.
    zeroes: bool,
    discards: bool,
}

impl Clearing {
    /// Creates it for the first bytes of a volume. Nothing of them is cleared.
    pub(super) fn new(bytes: u64) -> Self {
        let words = bytes.div_ceil(CHUNK).div_ceil(64) as usize;
        Self {
            bytes,
            state: Mutex::new(State {
                cleared: vec![0; words],
                next: 0,
                zeroes: true,
                discards: true,
            }),
        }
    }

    fn chunks(&self) -> u64 {
        self.bytes.div_ceil(CHUNK)
    }

    /// Clears the next chunks. Returns whether all chunks are cleared.
    pub(super) fn next(&self, file: &File) -> io::Result<bool> {
        // A panic cannot leave a chunk marked that is not cleared.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = state.next;
        let end = (begin + CHUNKS_AT_ONCE).min(self.chunks());
        state.clear(file, begin..end, self.bytes)?;
        state.next = end;
        Ok(end == self.chunks())
    }

    /// Clears all chunks that a range overlaps.
    pub(super) fn clear(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        let chunks = range.start / CHUNK..range.end.min(self.bytes).div_ceil(CHUNK);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if chunks.end <= state.next {
            return Ok(());
        }
        state.clear(file, chunks, self.bytes)
    }
}

impl State {
    fn is_cleared(&self, chunk: u64) -> bool {
        let word = self.cleared.get((chunk / 64) as usize);
        word.is_some_and(|word| word & (1 << (chunk % 64)) != 0)
    }

    /// Clears the chunks among these that are not cleared yet.
    fn clear(&mut self, file: &File, chunks: Range<u64>, bytes: u64) -> io::Result<()> {
        let mut at = chunks.start;
        while at < chunks.end {
            if self.is_cleared(at) {
                at += 1;
                continue;
            }
            let mut end = at + 1;
            while end < chunks.end && !self.is_cleared(end) {
                end += 1;
            }
            self.zero(file, at * CHUNK..(end * CHUNK).min(bytes))?;
            for chunk in at..end {
                if let Some(word) = self.cleared.get_mut((chunk / 64) as usize) {
                    *word |= 1 << (chunk % 64);
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Makes a range read as zeros.
    fn zero(&mut self, file: &File, range: Range<u64>) -> io::Result<()> {
        if self.zeroes && zero_by_device(file, &range)? {
            return Ok(());
        }
        self.zeroes = false;
        // What a discarded range reads as is not certain: so it is read.
        self.discards = self.discards && discard(file, &range).is_ok();
        let mut buffer = vec![0; PIECE];
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).min(PIECE as u64);
            let piece = &mut buffer[..length as usize];
            file.read_exact_at(piece, at)?;
            if piece.iter().any(|byte| *byte != 0) {
                piece.fill(0);
                file.write_all_at(piece, at)?;
            }
            at += length;
        }
        let (start, length) = (signed(range.start)?, signed(range.end - range.start)?);
        // Advice: the pages are not needed again.
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        let _ = posix_fadvise(file, start, length, advice);
        Ok(())
    }
}

/// Returns `false` if the device cannot zero the range without writing.
fn zero_by_device(file: &File, range: &Range<u64>) -> io::Result<bool> {
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let (start, length) = (signed(range.start)?, signed(range.end - range.start)?);
    loop {
        match fallocate(file, mode, start, length) {
            Ok(()) => return Ok(true),
            Err(Errno::EINTR) => {}
            // EINVAL: not whole blocks of the device.
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

fn discard(file: &File, range: &Range<u64>) -> nix::Result<()> {
    let range = [range.start, range.end - range.start];
    #[expect(unsafe_code, reason = "nix has no safe function for this request")]
    // SAFETY: the descriptor is open, and the request reads two numbers from the pointer.
    unsafe { request::discard(file.as_raw_fd(), &raw const range) }.map(drop)
}

fn signed(number: u64) -> io::Result<i64> {
    i64::try_from(number).map_err(|_| Errno::EINVAL.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::TempDir;

    const BYTES: u64 = 40 << 20;

    /// Returns a file full of former content, in the place of a volume.
    fn former(bytes: u64) -> (TempDir, File) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("volume");
        fs::write(&path, vec![7; bytes as usize]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        (folder, file)
    }

    fn content(file: &File, range: Range<u64>) -> Vec<u8> {
        let mut content = vec![1; (range.end - range.start) as usize];
        file.read_exact_at(&mut content, range.start).unwrap();
        content
    }

    #[test]
    fn what_was_written_meanwhile_stays_and_all_else_is_zero() {
        for zeroes in [true, false] {
            let (_folder, file) = former(BYTES + 8192);
            let clearing = Clearing::new(BYTES + 4096);
            clearing.state.lock().unwrap().zeroes = zeroes;
            let at = 33 * (1 << 20) + 5;
            clearing.clear(&file, &(at..at + 3)).unwrap();
            file.write_all_at(b"new", at).unwrap();
            assert!(!clearing.next(&file).unwrap());
            // A part that was cleared before.
            clearing.clear(&file, &(4096..8192)).unwrap();
            file.write_all_at(b"also", 4096).unwrap();
            while !clearing.next(&file).unwrap() {}
            assert!(clearing.next(&file).unwrap());
            let mut expected = vec![0; BYTES as usize + 4096];
            expected[at as usize..at as usize + 3].copy_from_slice(b"new");
            expected[4096..4100].copy_from_slice(b"also");
            assert!(content(&file, 0..BYTES + 4096) == expected);
            // What is behind it is not touched.
            assert!(content(&file, BYTES + 4096..BYTES + 8192) == vec![7; 4096]);
        }
    }

    #[test]
    fn zeros_are_not_written_where_there_are_zeros() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("volume");
        let file = File::create_new(&path).unwrap();
        drop(file);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.set_len(BYTES).unwrap();
        file.write_all_at(&[7; 4096], 20 << 20).unwrap();
        let clearing = Clearing::new(BYTES);
        clearing.state.lock().unwrap().zeroes = false;
        while !clearing.next(&file).unwrap() {}
        assert!(content(&file, 0..BYTES) == vec![0; BYTES as usize]);
        let allocated = file.metadata().unwrap().blocks() * 512;
        assert!(allocated <= 2 * PIECE as u64, "{allocated}");
    }
}
