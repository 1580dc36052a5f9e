//! The images of a guest's local disks as a companion.

use crate::context::Context;
use crate::destination::companion::{About, Companion, Offered, Step};
use crate::disks::images::{self, Room};
use crate::disks::volumes;
use crate::residue::{Again, Residue};
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::{Check, Refusal, RefusalCode, Verdict};
use longhaul_protocol::units::show_bytes;
use longhaul_storage::disk::RawDisk;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::task::{JoinHandle, block_in_place, spawn_blocking};

pub(super) struct Arrival {
    about: About,
    clearing: Option<Clearing>,
}

/// The task that clears the volumes of arriving disks, beside the blocks that arrive.
struct Clearing {
    /// None when it has ended.
    task: Option<JoinHandle<io::Result<()>>>,
    stop: Arc<AtomicBool>,
}

impl Clearing {
    /// Begins it. Disks in files have nothing to be cleared.
    fn begin(disks: Vec<Arc<RawDisk>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let task = spawn_blocking(move || {
            for disk in disks {
                while !disk.clear_next()? {
                    if stopped.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                }
            }
            Ok(())
        });
        Self {
            task: Some(task),
            stop,
        }
    }

    /// Waits for its end. Safe to cancel.
    async fn ended(&mut self) -> io::Result<()> {
        let Some(task) = &mut self.task else {
            return Ok(());
        };
        let ended = task
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)));
        self.task = None;
        ended
    }
}

impl Drop for Clearing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self {
            about,
            clearing: None,
        }
    }
}

impl Companion for Arrival {
    fn look(&self, guest: &GuestDescription) -> Vec<Check> {
        let context = &self.about.context;
        let here = &context.parts.config.name;
        let local = guest.disks.iter().filter(|disk| disk.is_local());
        let check = |disk: &longhaul_protocol::guest::Disk| {
            let (verdict, text, hint) = match images::look_for_room(context, guest, &disk.name) {
                Ok(Room::File(_)) => return None,
                Ok(Room::Absent { .. }) => {
                    let text = format!("{here} allocates a volume for disk {}", disk.name);
                    (Verdict::Fine, text, None)
                }
                Ok(Room::Volume(volumes::Room { volume, why })) => {
                    let size = show_bytes(volume.size_bytes());
                    let name = &disk.name;
                    let text = format!("{here} has a volume of {size} for disk {name}, {why}");
                    (Verdict::Fine, text, None)
                }
                Err(refusal) => (Verdict::Refused, refusal.text, refusal.hint),
            };
            Some(Check {
                verdict,
                text,
                hint,
            })
        };
        local.filter_map(check).collect()
    }

    fn check<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let (offer, disks) = (&offered.offer, offered.disks);
            let places = block_in_place(|| images::places(&self.about.context, offer, disks));
            offered.places = places?;
            Ok(())
        })
    }

    fn prepare<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let context = &self.about.context;
            let guest = &offered.offer.guest.name;
            images::allocate(context, guest, &mut offered.places).await?;
            let made = block_in_place(|| images::make(context, &offered.offer, &offered.places));
            offered.images = made.map_err(|error| Refusal {
                code: RefusalCode::QemuFailed,
                text: format!(
                    "{}: cannot make the image of a disk: {error}",
                    context.parts.config.name
                ),
                hint: None,
            })?;
            if offered.places.iter().any(|place| place.volume().is_some()) {
                self.clearing = Some(Clearing::begin(offered.images.clone()));
            }
            Ok(())
        })
    }

    fn has_arrived(&self) -> bool {
        let clearing = self.clearing.as_ref();
        clearing.is_none_or(|clearing| clearing.task.is_none())
    }

    /// Waits until the volumes are cleared. Until then, the guest is not stopped at its source.
    fn arrive(&mut self) -> Step<'_, Result<(), String>> {
        Box::pin(async move {
            let Some(clearing) = &mut self.clearing else {
                return Ok(());
            };
            let cleared = clearing.ended().await;
            cleared.map_err(|error| {
                let here = &self.about.context.parts.config.name;
                format!("{here} cannot clear the volume of a disk: {error}")
            })
        })
    }

    fn aborted(&mut self) -> Step<'_, ()> {
        Box::pin(async move {
            if let Some(clearing) = &mut self.clearing {
                clearing.stop.store(true, Ordering::Relaxed);
                if let Err(error) = clearing.ended().await {
                    tracing::debug!(%error, "while a volume was cleared");
                }
            }
            self.finished();
        })
    }

    fn finished(&mut self) {
        block_in_place(|| images::sweep(&self.about.context));
    }
}

/// Images of guests that did not come, and notes of guests that did.
pub(super) struct Images;

impl Residue for Images {
    fn open(&self, state: &Path) -> io::Result<()> {
        volumes::notes_in(state).remove_unfinished()?;
        images::notes_in(state).remove_unfinished()
    }

    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        block_in_place(|| images::sweep(context));
        Box::pin(async { None })
    }
}
