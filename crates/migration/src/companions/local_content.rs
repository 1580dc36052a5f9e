//! The content of a guest that this host has already, as a companion: the guest's former memory and
//! disks, and the content index.

use crate::destination::companion::{About, Companion, Offered, Step};
use crate::destination::local_content::Kept;
use longhaul_protocol::message::Refusal;
use tokio::task::block_in_place;

pub(super) struct Arrival(About);

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }
}

impl Companion for Arrival {
    fn prepare<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let About { context, guest, .. } = &self.0;
            let memory = context.parts.kept_memory.as_ref();
            let memory = memory.map(|memory| (memory.as_ref(), guest.as_str()));
            let held = context.parts.held.clone();
            let (regions, places) = (&offered.offer.regions, &offered.places);
            offered.kept = block_in_place(|| Kept::look(regions, places, memory, held));
            Ok(())
        })
    }

    /// The guest's memory is here, so the cached one is not needed any more.
    fn running(&mut self) -> Option<Step<'static, ()>> {
        let context = self.0.context.clone();
        Some(Box::pin(async move { context.forget_kept_memory() }))
    }
}
