//! The images of a guest's local disks as a companion.

use crate::context::Context;
use crate::destination::companion::{About, Companion, Offered, Step};
use crate::disks::images;
use crate::residue::{Again, Residue};
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Refusal, RefusalCode, Verdict};
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::task::block_in_place;

pub(super) struct Arrival(About);

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }
}

impl Companion for Arrival {
    fn look(&self, guest: &GuestDescription) -> Vec<Check> {
        let local = guest.disks.iter().filter(|disk| disk.is_local());
        let room = local.map(|disk| images::look_for_room(&self.0.context, guest, &disk.name));
        let refusals = room.filter_map(Result::err);
        let refused = |refusal: Refusal| Check {
            verdict: Verdict::Refused,
            text: refusal.text,
            hint: refusal.hint,
        };
        refusals.map(refused).collect()
    }

    fn check<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let (offer, disks) = (&offered.offer, offered.disks);
            offered.places = block_in_place(|| images::places(&self.0.context, offer, disks))?;
            Ok(())
        })
    }

    fn prepare<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let context = &self.0.context;
            let made = block_in_place(|| images::make(context, &offered.offer, &offered.places));
            offered.images = made.map_err(|error| Refusal {
                code: RefusalCode::QemuFailed,
                text: format!(
                    "{}: cannot make the image of a disk: {error}",
                    context.parts.config.name
                ),
                hint: None,
            })?;
            Ok(())
        })
    }

    fn aborted(&mut self) -> Step<'_, ()> {
        self.finished();
        Box::pin(async {})
    }

    fn finished(&mut self) {
        block_in_place(|| images::sweep(&self.0.context));
    }
}

/// Images of guests that did not come, and notes of guests that did.
pub(super) struct Images;

impl Residue for Images {
    fn open(&self, state: &Path) -> io::Result<()> {
        images::notes_in(state).remove_unfinished()
    }

    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        block_in_place(|| images::sweep(context));
        Box::pin(async { None })
    }
}
