//! Shows the progress of a guest that runs here while a part of it has yet to arrive.

use crate::destination::fetch::memory::FetchedMemory;
use crate::destination::fetch::{Fetch, Fetched};
use longhaul_api::{DiskChoice, RegionProgress};
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_storage::front::arriving::masks::Masks;
use std::collections::BTreeSet;
use tokio::time::Instant;

/// Limit on the number of unreadable blocks of a disk that are remembered.
const UNREADABLE_MAX: usize = 4096;

impl Fetched {
    /// Records blocks that the source cannot read.
    pub(crate) fn note_unreadable(&mut self, range: BlockRange) {
        for block in range.blocks().take(UNREADABLE_MAX) {
            if self.unreadable.len() < UNREADABLE_MAX {
                self.unreadable.insert(block);
            }
        }
    }

    /// Forgets unreadable blocks that are not missing any more: the guest has overwritten them, or
    /// the source could read them after all.
    fn forget_readable(&mut self) {
        if self.unreadable.is_empty() {
            return;
        }
        if let Ok(Some(masks)) = Masks::read(&self.disk.folder.noted_masks()) {
            self.unreadable.retain(|block| masks.is_missing(*block));
        }
    }

    fn progress(&self) -> RegionProgress {
        let blocks = self.disk.masks.blocks;
        RegionProgress {
            name: self.disk.name.clone(),
            blocks_total: blocks,
            blocks_settled: blocks.saturating_sub(self.missing_blocks),
            blocks_pending: self.missing_blocks,
            disk: true,
            strategy: strategy(self.disk.pulled),
            why: None,
            waiting: Some(self.waiting),
            unreadable_byte: first_byte(&self.unreadable),
        }
    }
}

/// Returns the strategy of a disk of which this much is fetched.
fn strategy(pulled: Pulled) -> Option<DiskChoice> {
    match pulled {
        Pulled::Nothing => None,
        Pulled::Often => Some(DiskChoice::Hybrid),
        Pulled::All => Some(DiskChoice::Postcopy),
    }
}

fn first_byte(blocks: &BTreeSet<u64>) -> Option<u64> {
    blocks.first().map(|block| block * BLOCK_SIZE as u64)
}

impl Fetch {
    /// Shows the current progress.
    pub(crate) fn show(&self) {
        let Some(entry) = &self.begun.entry else {
            return;
        };
        let memory = self.memory.iter().flat_map(FetchedMemory::progress);
        let disks = self.disks.values().map(Fetched::progress);
        let regions = memory.chain(disks).collect();
        let stuck = || self.memory.as_ref().and_then(FetchedMemory::trouble);
        let mut broken = self.disks.values().map(|fetched| fetched.broken.clone());
        let broken = broken.find_map(|broken| broken);
        let lost_at = self.lost_at.filter(|_| self.begun.call.is_none());
        let silent = lost_at.map(|at| at.elapsed().as_millis() as u64);
        entry.progress(|progress| {
            progress.regions = regions;
            progress.link.interrupted_ms = silent;
            let lost = || self.lost.clone();
            let trouble = broken.or_else(lost).or_else(stuck);
            progress.trouble = trouble.or_else(|| self.trouble.clone());
        });
    }

    /// Updates the unreadable blocks and the time since no source sends blocks, and shows the
    /// progress. A source that has lost what it knew of the guest only asks.
    pub(crate) fn look_and_show(&mut self) {
        self.disks.values_mut().for_each(Fetched::forget_readable);
        if self.bulk.is_some() {
            self.lost_at = None;
        } else {
            self.lost_at.get_or_insert_with(Instant::now);
        }
        if let Some(entry) = &self.begun.entry {
            self.begun.rate.report_if_due(entry, &mut self.begun.call);
        }
        self.show_lost();
        self.show();
    }
}
