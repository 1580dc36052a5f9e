//! Detects RAM that was never used: it is zero, and reading it would only make the system allocate
//! pages of zeros.
//!
//! Anonymous memory has no page until its first access. Linux reports for each page of a process
//! whether it exists, in `/proc/PID/pagemap`.

use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The bits of a page that is in memory, or swapped out.
const HELD: u64 = 0b11 << 62;
/// Size of a page's entry in bytes.
const ENTRY_BYTES: usize = 8;
/// The number of pages queried at once: of a piece that is read soon, and of whole blocks.
const PAGES_OF_PIECE: usize = 512;
const PAGES_OF_BLOCK: usize = 8192;
/// The number of pages of a group.
const GROUP_PAGES: usize = 64;

/// Reports which pages of a process's anonymous memory are unused.
#[derive(Debug, Clone)]
pub(crate) struct PageMap(Arc<File>);

impl PageMap {
    /// Opens the map of a process; returns `None` where the system does not provide it.
    pub(crate) fn open(pid: i32) -> Option<Self> {
        let file = File::open(format!("/proc/{pid}/pagemap")).ok()?;
        Some(Self(Arc::new(file)))
    }

    /// Returns whether no page of `[start, start + length)` was ever used; false where that is
    /// unknown, for example after the process has ended.
    pub(crate) fn is_unused(&self, start: u64, length: u64) -> bool {
        let mut entries = [0; PAGES_OF_PIECE * ENTRY_BYTES];
        let mut page = start / BLOCK_SIZE as u64;
        let end = (start + length).div_ceil(BLOCK_SIZE as u64);
        while page < end {
            match self.entries(page, end - page, &mut entries) {
                Some(entries) if !entries.iter().any(is_held) => page += entries.len() as u64,
                _ => return false,
            }
        }
        true
    }

    /// Reads the entries of pages, as many of them as fit; `None` where they are unknown.
    fn entries<'a>(
        &self,
        page: u64,
        pages: u64,
        into: &'a mut [u8],
    ) -> Option<&'a [[u8; ENTRY_BYTES]]> {
        let bytes = into
            .len()
            .min(usize::try_from(pages).ok()?.checked_mul(ENTRY_BYTES)?);
        let into = into.get_mut(..bytes)?;
        self.0.read_exact_at(into, page * ENTRY_BYTES as u64).ok()?;
        Some(into.as_chunks().0)
    }

    /// Returns the unused pages from `start` on, in whole groups of 64, as ranges of pages counted
    /// from there. Stops where something is unknown.
    pub(crate) fn unused(&self, start: u64, pages: u64) -> Vec<BlockRange> {
        let mut entries = vec![0; PAGES_OF_BLOCK * ENTRY_BYTES];
        let mut unused: Vec<BlockRange> = Vec::new();
        let first = start / BLOCK_SIZE as u64;
        let mut page = 0;
        while page < pages {
            let Some(entries) = self.entries(first + page, pages - page, &mut entries) else {
                break;
            };
            for group in entries.chunks(GROUP_PAGES) {
                if group.len() == GROUP_PAGES && !group.iter().any(is_held) {
                    match unused.last_mut().filter(|range| range.end() == page) {
                        Some(range) => range.count += GROUP_PAGES as u64,
                        None => unused.push(BlockRange::new(page, GROUP_PAGES as u64)),
                    }
                }
                page += group.len() as u64;
            }
        }
        unused
    }
}

fn is_held(entry: &[u8; ENTRY_BYTES]) -> bool {
    u64::from_le_bytes(*entry) & HELD != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = BLOCK_SIZE as u64;

    #[test]
    fn memory_is_unused_until_it_is_written() {
        // An allocation of this size is from the system, and is untouched.
        let mut memory = vec![0_u8; 64 << 20];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE) + 16 * PAGE;
        let map = PageMap::open(std::process::id() as i32).unwrap();
        assert!(map.is_unused(start, 2000 * PAGE));
        memory[1000 * BLOCK_SIZE] = 1;
        assert!(!map.is_unused(start, 2000 * PAGE));
        assert!(map.is_unused(start, PAGE));
        let first = (start - memory.as_ptr() as u64) as usize;
        memory[first + 6400 * BLOCK_SIZE] = 1;
        let unused = map.unused(start, 10_000);
        let is_unused = |page: u64| unused.iter().any(|it| (it.start..it.end()).contains(&page));
        let held = (memory.as_ptr() as u64 + 1000 * PAGE - start) / PAGE;
        assert!(!is_unused(held) && !is_unused(6400), "{unused:?}");
        // A huge page may be in use around them.
        assert!(is_unused(3000) && is_unused(9983), "{unused:?}");
        assert!(!is_unused(9984), "no whole group");
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
