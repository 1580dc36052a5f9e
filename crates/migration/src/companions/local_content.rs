//! The content of a guest that this host has already, as a companion: the guest's former memory and
//! disks, and the content index.

use crate::context::Context;
use crate::destination::companion::{About, Companion, Offered, Step};
use crate::destination::local_content::Kept;
use crate::residue::{Again, Residue};
use longhaul_protocol::message::Refusal;
use longhaul_storage::Holder;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

/// Interval at which outdated memory is removed.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

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

    /// The guest belongs to this host, so its cached memory is not needed any more.
    fn finished(&mut self) {
        self.0.context.sweeper.wake();
    }
}

/// Cached memory of guests that are here again, and outdated memory.
pub(super) struct CachedMemory;

impl Residue for CachedMemory {
    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        Box::pin(async move {
            let kept = context.parts.kept_memory.as_ref()?;
            let is_here = |guest: &str| {
                let right = context.rights.get(guest).ok().flatten();
                right.is_some_and(|right| right.holder == Holder::Here)
            };
            block_in_place(|| kept.sweep(&is_here));
            Some(SWEEP_EVERY)
        })
    }
}
