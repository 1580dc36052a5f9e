//! RAM that nobody has used yet: it is zero, and reading it would only make the system put pages of
//! zeros there.
//!
//! Anonymous memory has no page until somebody touches one. Linux says of each page of a process
//! whether it has one, in `/proc/PID/pagemap`.

use longhaul_protocol::BLOCK_SIZE;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// What the system holds for a page is in memory, or swapped out.
const HELD: u64 = 0b11 << 62;
/// Bytes that tell of one page.
const ENTRY_BYTES: usize = 8;
/// Pages that are asked about at once.
const PAGES_MAX: usize = 512;

/// Tells of a process's anonymous memory which is unused.
#[derive(Debug, Clone)]
pub(crate) struct PageMap(Arc<File>);

impl PageMap {
    /// That of a process; none where the system does not tell.
    pub(crate) fn open(pid: i32) -> Option<Self> {
        let file = File::open(format!("/proc/{pid}/pagemap")).ok()?;
        Some(Self(Arc::new(file)))
    }

    /// Whether no page of `[start, start + length)` was ever used. False where it is not known, as of a
    /// process that has ended.
    pub(crate) fn is_unused(&self, start: u64, length: u64) -> bool {
        let mut entries = [0; PAGES_MAX * ENTRY_BYTES];
        let mut page = start / BLOCK_SIZE as u64;
        let end = (start + length).div_ceil(BLOCK_SIZE as u64);
        while page < end {
            let count = (end - page).min(PAGES_MAX as u64);
            let entries = &mut entries[..count as usize * ENTRY_BYTES];
            let read = self.0.read_exact_at(entries, page * ENTRY_BYTES as u64);
            let (entries, _) = entries.as_chunks();
            let held = |entry: &[u8; ENTRY_BYTES]| u64::from_le_bytes(*entry) & HELD != 0;
            if read.is_err() || entries.iter().any(held) {
                return false;
            }
            page += count;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = BLOCK_SIZE as u64;

    #[test]
    fn memory_is_unused_until_it_is_written() {
        // So much comes from the system, and is not touched.
        let mut memory = vec![0_u8; 64 << 20];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE) + 16 * PAGE;
        let map = PageMap::open(std::process::id() as i32).unwrap();
        assert!(map.is_unused(start, 2000 * PAGE));
        memory[1000 * BLOCK_SIZE] = 1;
        assert!(!map.is_unused(start, 2000 * PAGE));
        assert!(map.is_unused(start, PAGE));
        drop(memory);
    }

    #[test]
    fn nothing_is_known_of_a_process_that_has_ended() {
        let mut child = std::process::Command::new("sleep")
            .arg("600")
            .spawn()
            .unwrap();
        let map = PageMap::open(child.id() as i32).unwrap();
        assert!(map.is_unused(PAGE, PAGE), "nothing is there");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!map.is_unused(PAGE, PAGE));
    }
}
