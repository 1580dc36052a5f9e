//! The base images below a guest's disks as a companion.

use crate::context::Context;
use crate::destination::companion::{About, Companion, Offered, Step};
use crate::destination::qemu::DestinationQemu;
use crate::disks::base_images::ComingBases;
use crate::disks::export_notes;
use crate::disks::lazy_base_images;
use crate::residue::{Again, Residue};
use longhaul_protocol::message::{Refusal, RefusalCode, Summary};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::block_in_place;

/// Interval between checks of the progress of images that arrive while guests run.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Arrival {
    about: About,
    coming: Option<ComingBases>,
}

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self {
            about,
            coming: None,
        }
    }
}

impl Companion for Arrival {
    fn check<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let begun = block_in_place(|| ComingBases::begin(&self.about.context, &offered.places));
            self.coming = Some(begun?);
            Ok(())
        })
    }

    fn prepare<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let Some(coming) = &self.coming else {
                return Ok(());
            };
            let About { context, guest, .. } = &self.about;
            let below = coming.below(context, guest, &offered.places).await;
            offered.bases = below.map_err(|error| Refusal {
                code: RefusalCode::QemuFailed,
                text: format!("{}: {error}", context.parts.config.name),
                hint: None,
            })?;
            Ok(())
        })
    }

    fn started<'a>(
        &'a mut self,
        _arriving: &'a Offered<'_>,
        _qemu: &'a DestinationQemu,
    ) -> Step<'a, Result<(), Refusal>> {
        if let Some(coming) = &mut self.coming {
            coming.go_on();
        }
        Box::pin(async { Ok(()) })
    }

    fn has_arrived(&self) -> bool {
        self.coming.as_ref().is_none_or(ComingBases::are_here)
    }

    fn arrive(&mut self) -> Step<'_, Result<(), String>> {
        let here = &self.about.context.parts.config.name;
        let coming = &mut self.coming;
        Box::pin(async move {
            match coming {
                Some(coming) => coming.brought(here).await,
                None => Ok(()),
            }
        })
    }

    fn report(&self, summary: &mut Summary) {
        let read = self.coming.as_ref();
        let read = read.map(|coming| coming.read_bytes(&self.about.context));
        summary.repository_bytes += read.unwrap_or_default();
    }
}

/// Exports of base images that no disk uses, or that are complete.
#[derive(Default)]
pub(super) struct Exports {
    /// The notes that were logged as unreadable.
    logged: Mutex<BTreeSet<PathBuf>>,
}

impl Residue for Exports {
    fn open(&self, state: &Path) -> io::Result<()> {
        lazy_base_images::notes_in(state).remove_unfinished()?;
        export_notes::remove_stray_logs::<lazy_base_images::Note>(state)
    }

    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        Box::pin(async move {
            let mut logged = self.logged.lock().await;
            match context.sweep_coming(&mut logged).await {
                true => None,
                false => Some(LOOK_EVERY),
            }
        })
    }
}
