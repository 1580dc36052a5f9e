//! Retained QEMUs: those of guests that have left, until the guests' memory is in the memory cache
//! ([`KeptMemory`](crate::host::memory_cache::KeptMemory)). The cache is written after the move,
//! and as long as the RAM is not needed for another guest.

use crate::context::Context;
use crate::disks::exports;
use crate::host::fail_point;
use crate::host::memory_cache::{KeptMemory, Memory, Written};
use crate::host::retained_qemus::Retained;
use crate::status::migration::Entry;
use crate::status::registry::{Reservation, Taken};
use longhaul_api::{KeptMemoryReport, Phase};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::manager::Found;
use longhaul_hypervisor::memory::GuestMemory;
use longhaul_protocol::BlockRange;
use longhaul_protocol::units::show_bytes;
use longhaul_storage::Holder;
use longhaul_storage::files::{RealFiles, create_folder};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

/// Time limit for a retained QEMU.
const WITHIN: Duration = Duration::from_secs(3600);
/// Interval of the checks whether other moves and retained QEMUs are done.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Interval at which outdated memory caches are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// The QEMU of a guest that runs elsewhere and no longer needs it.
pub(crate) struct RetainedQemu {
    guest: Guest,
    memory: Arc<GuestMemory>,
    /// The indexes of the RAM blocks that were regions of the move.
    places: Vec<usize>,
}

/// The reader of a guest's memory while the cache is written.
struct Read<'a> {
    departed: &'a RetainedQemu,
    context: &'a Context,
    stands: &'a Retained,
    until: Instant,
}

/// Removes the guest from the list of retained QEMUs when dropped.
struct Leaves {
    context: Arc<Context>,
    guest: String,
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.context.retained_qemus.remove(&self.guest);
    }
}

impl Memory for Read<'_> {
    fn regions(&self) -> Vec<u64> {
        let blocks = self.departed.memory.blocks();
        let places = self.departed.places.iter();
        places
            .filter_map(|place| Some(blocks.get(*place)?.blocks()))
            .collect()
    }

    fn read(&self, region: usize, range: BlockRange, into: &mut [u8]) -> Result<(), String> {
        let RetainedQemu {
            guest,
            memory,
            places,
        } = self.departed;
        if range.start > 0 {
            fail_point::keeping();
        }
        let place = places.get(region).ok_or("there is no such region")?;
        let read = memory.read(*place, &[range], into);
        read.map_err(|error| error.to_string())?;
        // The process id may have been reused.
        match guest.process().map(|id| id.is_alive()) {
            Some(Ok(true)) => Ok(()),
            _ => Err("QEMU has ended".to_owned()),
        }
    }

    fn may_go_on(&self) -> bool {
        loop {
            if self.stands.gives_way.load(Ordering::Relaxed) || Instant::now() > self.until {
                return false;
            }
            if !self.context.somebody_moves() {
                return true;
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

impl RetainedQemu {
    /// Retains a guest's QEMU. Returns `None` if no memory is to be cached, or the note cannot be
    /// written.
    pub(crate) fn stand(
        context: &Context,
        guest: &Guest,
        memory: &Arc<GuestMemory>,
        places: &[usize],
    ) -> Option<Self> {
        context.parts.kept_memory.as_ref()?;
        let noted = block_in_place(|| note(&context.parts.config.state, guest.name()));
        if let Err(error) = noted {
            tracing::warn!(guest = guest.name(), %error, "its memory is not kept");
            return None;
        }
        Some(Self {
            guest: guest.clone(),
            memory: memory.clone(),
            places: places.to_vec(),
        })
    }

    /// Writes the guest's memory to the cache, and then ends its QEMU.
    pub(crate) fn keep(self, context: &Arc<Context>, entry: Arc<Entry>, reservation: Reservation) {
        let name = self.guest.name().to_owned();
        let stands = context.retained_qemus.add(&name);
        reservation.now(Taken::RetainedQemu);
        let leaves = Leaves {
            context: context.clone(),
            guest: name.clone(),
        };
        let context = context.clone();
        tokio::spawn(async move {
            match self.written(&context, &stands).await {
                Ok(written) if written.bytes > 0 => report(&context, &entry, &name, written),
                Ok(_) => tracing::info!(guest = name, "there was no time to keep its memory"),
                Err(error) => tracing::warn!(guest = name, %error, "its memory is not kept"),
            }
            context.end_departed(&name).await;
            drop(reservation);
            drop(leaves);
        });
    }

    async fn written(self, context: &Arc<Context>, stands: &Arc<Retained>) -> io::Result<Written> {
        let (done, written) = oneshot::channel();
        let (context, stands) = (context.clone(), stands.clone());
        let thread = thread::Builder::new().name("kept-memory".to_owned());
        thread.spawn(move || {
            let outcome = match &context.parts.kept_memory {
                Some(kept) => self.write(kept, &context, &stands),
                None => Err(io::Error::other("it is not to be kept")),
            };
            // The receiver waits until this is sent.
            let _ = done.send(outcome);
        })?;
        let broke = |_| Err(io::Error::other("a part of the agent broke"));
        written.await.unwrap_or_else(broke)
    }

    fn write(
        &self,
        kept: &KeptMemory,
        context: &Context,
        stands: &Retained,
    ) -> io::Result<Written> {
        let read = Read {
            departed: self,
            context,
            stands,
            until: Instant::now() + WITHIN,
        };
        let nothing = Written {
            bytes: 0,
            whole: false,
        };
        let _turn = loop {
            if !read.may_go_on() {
                return Ok(nothing);
            }
            match context.retained_qemus.turn.try_lock() {
                Ok(turn) => break turn,
                Err(TryLockError::Poisoned(turn)) => break turn.into_inner(),
                Err(TryLockError::WouldBlock) => thread::sleep(LOOK_EVERY),
            }
        };
        kept.write(self.guest.name(), &read)
    }
}

fn report(context: &Context, entry: &Entry, guest: &str, written: Written) {
    let Written { bytes, whole } = written;
    let kept = show_bytes(bytes);
    tracing::info!(guest, kept, whole, "what its memory held is kept");
    entry.report_with(|report| report.kept_memory = Some(KeptMemoryReport { bytes, whole }));
    context.archive.keep(entry);
}

/// Returns the folder with a note for each guest whose QEMU is retained.
fn folder(state: &Path) -> PathBuf {
    state.join("departed")
}

/// Returns whether this is the guest, and has a QEMU or a record that cannot be used.
fn is_left_over(found: &Found, guest: &str) -> bool {
    found.name() == guest && !matches!(found, Found::Ended(_))
}

fn note(state: &Path, guest: &str) -> io::Result<()> {
    let folder = folder(state);
    create_folder(&RealFiles, &folder)?;
    File::create(folder.join(guest))?.sync_all()?;
    File::open(folder)?.sync_all()
}

impl Context {
    /// Returns whether a guest moves to or from this host and has not arrived yet.
    fn somebody_moves(&self) -> bool {
        let entries = self.registry.list();
        entries
            .iter()
            .any(|entry| entry.outcome().is_none() && entry.phase() != Phase::Finishing)
    }

    /// Ends the QEMU of a departed guest, and the exports below its disks.
    async fn end_departed(&self, guest: &str) {
        let state = &self.parts.config.state;
        if let Err(error) = self.parts.guests.confirm(guest, None).await {
            tracing::error!(guest, %error, "something of it is left over");
        }
        let found = self.parts.guests.list();
        let stands = found.map(|found| found.into_iter().find(|found| is_left_over(found, guest)));
        if !matches!(stands, Ok(None)) {
            // The agent finds the note after its next start.
            return tracing::error!(guest, ?stands, "its QEMU is left over");
        }
        exports::ended(state, guest, true).await;
        match fs::remove_file(folder(state).join(guest)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::error!(guest, %error, "cannot note that its QEMU has ended");
            }
            _ => {}
        }
    }

    /// Ends the QEMUs that an earlier agent retained.
    pub(crate) async fn end_all_departed(&self) -> io::Result<()> {
        let state = &self.parts.config.state;
        let entries = match fs::read_dir(folder(state)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        for entry in entries {
            let path = entry?.path();
            let Some(guest) = path.file_name().and_then(|name| name.to_str()) else {
                continue;
            };
            let right = self.rights.get(guest).map_err(io::Error::other)?;
            let elsewhere = |holder| matches!(holder, Holder::Elsewhere { .. });
            if right.is_some_and(|right| elsewhere(right.holder)) {
                self.end_departed(guest).await;
            } else {
                tracing::error!(guest, "noted as departed, and not: its QEMU is left alone");
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Removes the memory caches of guests that are here again, and outdated ones.
    pub(crate) fn sweep_kept_memory(&self) {
        let Some(kept) = &self.parts.kept_memory else {
            return;
        };
        let is_here = |guest: &str| {
            let right = self.rights.get(guest).ok().flatten();
            right.is_some_and(|right| right.holder == Holder::Here)
        };
        kept.sweep(&is_here);
    }

    /// Removes the memory cache of a guest that has arrived.
    pub(crate) fn forget_kept_memory(self: &Arc<Self>) {
        let context = self.clone();
        tokio::task::spawn_blocking(move || context.sweep_kept_memory());
    }

    /// Sweeps the memory caches every [`SWEEP_EVERY`].
    pub(crate) fn keep_sweeping_kept_memory(self: &Arc<Self>) {
        if self.parts.kept_memory.is_none() {
            return;
        }
        let context = self.clone();
        tokio::spawn(async move {
            loop {
                block_in_place(|| context.sweep_kept_memory());
                tokio::time::sleep(SWEEP_EVERY).await;
            }
        });
    }
}
