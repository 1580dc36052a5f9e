//! Searches for what a guest uses of its memory that follows.

use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_hypervisor::memory::{GuestMemory, Layout, TablesInUse};
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::RegionId;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// Where a guest's RAM lies, once that was looked for; `None` for a machine of another kind.
pub(super) type KnownLayout = Arc<OnceCell<Option<Layout>>>;

/// Returns where a guest's RAM lies.
pub(super) async fn layout(
    known: &KnownLayout,
    guest: &str,
    qmp: &Qmp,
    memory: &GuestMemory,
) -> Option<Layout> {
    let found = known.get_or_try_init(async || Layout::of(qmp, memory).await);
    match found.await {
        Ok(found) => *found,
        Err(error) => {
            tracing::debug!(guest, %error, "the layout of its RAM is not known");
            None
        }
    }
}

/// A search for the missing blocks that a stopped guest's CPUs probably use next.
pub(crate) struct NextUse {
    /// The region of these blocks.
    pub(crate) region: RegionId,
    pub(super) layout: Layout,
    pub(super) memory: Arc<GuestMemory>,
    /// The device state.
    pub(super) tail: Vec<u8>,
}

impl NextUse {
    /// Returns the blocks in the order of their use. Reads the guest's RAM for some milliseconds.
    /// `missing` has a mask of the missing blocks of each chunk, and `often` lists those that the
    /// guest has written often, the most written first.
    pub(crate) fn find(&self, missing: &[u64], often: &[u64]) -> Vec<u64> {
        let is_missing = |block: u64| {
            let mask = missing.get((block / CHUNK_BLOCKS) as usize).copied();
            mask.is_some_and(|mask| mask >> (block % CHUNK_BLOCKS) & 1 == 1)
        };
        self.layout
            .used_next(&self.memory, &self.tail, is_missing, often)
    }
}

/// A search for the code and the constants that a running guest uses.
pub(crate) struct CodeInUse {
    pub(super) guest: String,
    pub(super) qmp: Qmp,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) places: BTreeMap<RegionId, usize>,
    pub(super) layout: KnownLayout,
}

impl CodeInUse {
    /// Returns the blocks in the order in which they should travel, and their region. Asks QEMU for
    /// the CPUs' registers, and reads the guest's RAM for half a second or a little longer.
    pub(crate) async fn find(self) -> Option<(RegionId, Vec<u64>)> {
        let layout = layout(&self.layout, &self.guest, &self.qmp, &self.memory).await?;
        let region = region_of(&self.places, layout.block())?;
        let tables = match TablesInUse::of(&self.qmp).await {
            Ok(tables) => tables,
            Err(error) => {
                tracing::debug!(guest = self.guest, %error, "its CPUs' registers are not known");
                return None;
            }
        };
        let search = move || layout.code_in_use(&self.memory, &tables);
        match tokio::task::spawn_blocking(search).await {
            Ok(blocks) => Some((region, blocks)),
            Err(error) => {
                tracing::error!(guest = self.guest, %error, "the search for its code broke");
                None
            }
        }
    }
}

/// Returns the region of a RAM block.
pub(super) fn region_of(places: &BTreeMap<RegionId, usize>, block: usize) -> Option<RegionId> {
    let mut places = places.iter();
    let (region, _) = places.find(|(_, at)| **at == block)?;
    Some(*region)
}
