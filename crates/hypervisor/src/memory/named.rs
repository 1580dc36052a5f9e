//! Finds the pages that a guest's device state names: rings and buffers, whose addresses devices
//! keep. QEMU reads many of them while it loads the devices, so a guest that is loaded without some
//! of its memory needs them at once.
//!
//! A page is taken for named if its address stands anywhere in the state, most significant byte
//! first as in all of QEMU's streams. QEMU is asked for nothing: commands that list the rings of
//! devices are no stable part of its interface, and version 11.1 ended at one.

use super::GuestMemory;
use super::address_map::host_address;
use crate::qmp::{Qmp, QmpError};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::collections::BTreeSet;

/// The length of the end of a stream that is searched: devices come last.
const STATE_BYTES_MAX: usize = 512 << 10;
/// The maximum number of pages.
const PAGES_MAX: usize = 1024;
/// Lower addresses belong to firmware, and are as often plain numbers.
const FIRST: u64 = 1 << 20;
/// Rings are aligned to this at least.
const ALIGNMENT: u64 = 16;
const HIGH: u64 = 4 << 30;
/// Option ROMs, one of which QEMU's `kvm-tpr-opt` reads on every PC.
const ROMS: std::ops::Range<u64> = 0xc_0000..0xe_0000;

/// Where a PC's RAM lies in its main block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// The index of the block.
    block: usize,
    /// The length of the part that lies below 4 GiB, and of all of it, in bytes.
    low_bytes: u64,
    bytes: u64,
}

impl Layout {
    /// Asks QEMU for it. Returns `None` for a machine of another kind.
    pub async fn of(qmp: &Qmp, memory: &GuestMemory) -> Result<Option<Self>, QmpError> {
        let place = async |address: u64| {
            let found = host_address(qmp, address).await?;
            Ok::<_, QmpError>(found.and_then(|(_, at)| memory.place_of(at)))
        };
        let Some((block, page)) = place(FIRST).await? else {
            return Ok(None);
        };
        if page * BLOCK_SIZE as u64 != FIRST {
            return Ok(None);
        }
        let Some(found) = memory.blocks().get(block) else {
            return Ok(None);
        };
        let bytes = found.used_bytes;
        let low_bytes = match place(HIGH).await? {
            Some((same, page)) if same == block => page * BLOCK_SIZE as u64,
            _ => bytes,
        };
        Ok(Some(Self {
            block,
            low_bytes,
            bytes,
        }))
    }

    /// Returns the pages that a device state names, by the index of their block.
    pub fn named(&self, state: &[u8]) -> (usize, Vec<BlockRange>) {
        let state = &state[state.len().saturating_sub(STATE_BYTES_MAX)..];
        let block = BLOCK_SIZE as u64;
        let mut pages: BTreeSet<u64> = (ROMS.start / block..ROMS.end / block).collect();
        for window in state.windows(8) {
            let Ok(bytes) = window.try_into() else {
                continue;
            };
            pages.extend(self.page_at(u64::from_be_bytes(bytes)));
            if pages.len() >= PAGES_MAX {
                break;
            }
        }
        let range = |page| BlockRange::new(page, 1);
        (self.block, pages.into_iter().map(range).collect())
    }

    /// Returns the page of the block at an address that a ring may have.
    fn page_at(&self, address: u64) -> Option<u64> {
        if address < FIRST || !address.is_multiple_of(ALIGNMENT) {
            return None;
        }
        self.page_of(address)
    }

    /// Creates the layout of a guest whose first block holds all of its RAM.
    #[cfg(test)]
    pub(super) fn of_one_block(bytes: u64) -> Self {
        Self {
            block: 0,
            low_bytes: bytes,
            bytes,
        }
    }

    /// Returns the index of the block.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Returns the page of the block at a physical address.
    pub(super) fn page_of(&self, address: u64) -> Option<u64> {
        let offset = match address.checked_sub(HIGH) {
            None if address < self.low_bytes => address,
            None => return None,
            Some(above) => self.low_bytes.checked_add(above)?,
        };
        (offset < self.bytes).then_some(offset / BLOCK_SIZE as u64)
    }

    /// Returns the physical address of a page of the block.
    pub(super) fn address_of(&self, page: u64) -> u64 {
        let offset = page * BLOCK_SIZE as u64;
        match offset.checked_sub(self.low_bytes) {
            Some(above) => HIGH + above,
            None => offset,
        }
    }

    /// Returns the number of pages of the block.
    pub(super) fn pages(&self) -> u64 {
        self.bytes / BLOCK_SIZE as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_a_state_name_pages() {
        let layout = Layout {
            block: 3,
            low_bytes: 2 << 30,
            bytes: 3 << 30,
        };
        let mut state = vec![0x80; 100];
        // In the low part, above 4 GiB, not aligned, in the hole, beyond the end, firmware.
        for address in [
            0x2a3_8000_u64,
            HIGH + 0x5010,
            0x2a4_8008,
            3 << 30,
            HIGH + (1 << 30),
            0xc_0000,
        ] {
            state.extend(address.to_be_bytes());
            state.push(0xff);
        }
        let (block, pages) = layout.named(&state);
        assert_eq!(block, 3);
        let high = ((2_u64 << 30) + 0x5000) / 4096;
        let expected = [BlockRange::new(0x2a38, 1), BlockRange::new(high, 1)];
        assert_eq!(pages[32..], expected);
        let roms: Vec<_> = (0xc0..0xe0).map(|page| BlockRange::new(page, 1)).collect();
        assert_eq!(pages[..32], roms);
        assert_eq!(layout.named(&[]).1, roms);
        assert_eq!(layout.named(&[0; 4096]).1, roms);
    }

    #[test]
    fn a_state_of_addresses_alone_names_not_more_than_the_limit() {
        let layout = Layout {
            block: 0,
            low_bytes: 2 << 30,
            bytes: 2 << 30,
        };
        let state: Vec<u8> = (512..100_000_u64)
            .flat_map(|page| (page * 4096).to_be_bytes())
            .collect();
        assert!(layout.named(&state).1.len() <= PAGES_MAX);
    }
}
