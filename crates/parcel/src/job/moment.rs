//! The moment that a version of a guest's disks has: a checkpoint of the exports that track them.

use super::Step;
use super::document::{KnownDisk, KnownGuest};
use super::error::{JobError, io_at};
use crate::record::MomentId;
use longhaul_storage::files::RealFiles;
use longhaul_storage::front::FrontFolder;
use longhaul_storage::front::tracking::{
    self, Changed, Checkpoint, CheckpointError, Held, Request, TrackingId,
};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::path::Path;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

/// How long a guest's writes may wait for a checkpoint.
const HOLD: Duration = Duration::from_millis(500);
/// Attempts at a checkpoint: a slow disk may not complete its writes in time.
const ATTEMPTS: usize = 3;
/// Which part of a file system's free room a copy-before-write log may take.
const LOG_PART: u64 = 2;

/// Finds the exports that track the writes to guests' disks.
pub trait Tracking: Debug + Send + Sync {
    /// Returns the export that records the writes of a guest to an image now; `None` where there is
    /// none, or where it may not know all of them.
    ///
    /// # Errors
    /// When that cannot be found out.
    fn export_of(&self, guest: &str, image: &Path) -> io::Result<Option<FrontFolder>>;

    /// Freezes the file systems of a guest that has an agent for it; `None` if it has none.
    ///
    /// # Errors
    /// When they are not frozen, with the reason.
    fn freeze(&self, _guest: &str) -> Result<Option<Box<dyn Frozen>>, String> {
        Ok(None)
    }
}

/// The frozen file systems of a guest. Dropped, they are thawed.
pub trait Frozen: Debug + Send {
    /// Thaws them.
    ///
    /// # Errors
    /// When they were not frozen until now, or that is not known, with the reason.
    fn thaw(self: Box<Self>) -> Result<(), String>;
}

/// No writes are tracked.
#[derive(Debug)]
pub struct Untracked;

impl Tracking for Untracked {
    fn export_of(&self, _: &str, _: &Path) -> io::Result<Option<FrontFolder>> {
        Ok(None)
    }
}

/// Since when a record has what is not in the last version of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Since {
    record: TrackingId,
    /// The first round that is not in it.
    from: u64,
}

impl Since {
    /// Returns what a copy that begins now will lack. What was written before is durable when this
    /// returns: a power cut does not take it back.
    fn now(export: &FrontFolder, image: &Path) -> Result<Self, CheckpointError> {
        let from = tracking::current(export)?;
        File::open(image)?.sync_data()?;
        let record = TrackingId::of(export)?;
        Ok(Self { record, from })
    }
}

/// Returns the exports that track all disks of a guest now; `None` if one of them is not tracked.
pub(super) fn exports(
    tracking: &dyn Tracking,
    guest: &KnownGuest,
) -> Result<Option<Vec<FrontFolder>>, JobError> {
    let each = guest.disks.iter().map(|known| {
        let image = &known.disk.path;
        tracking.export_of(&guest.name, image).map_err(io_at(image))
    });
    each.collect()
}

/// Returns how many bytes of a disk may have changed since its last version, if that is known.
pub(super) fn changed_bytes(
    tracking: &dyn Tracking,
    guest: &str,
    known: &KnownDisk,
) -> Option<u64> {
    // Whatever the reason is that it is not known, all of the disk is compared.
    let export = tracking.export_of(guest, &known.disk.path).ok()??;
    let record = TrackingId::of(&export).ok()?;
    let since = known
        .since
        .as_ref()
        .filter(|since| since.record == record)?;
    let changed = Changed::since(&RealFiles, &export.tracked_writes(), since.from);
    Some(changed.ok()??.bytes())
}

/// Notes for each disk of a guest what a copy that begins now will lack; nothing where its writes
/// are not tracked.
pub(super) fn begins(guest: &mut KnownGuest, exports: Option<&[FrontFolder]>) {
    for (at, known) in guest.disks.iter_mut().enumerate() {
        let export = exports.and_then(|exports| exports.get(at));
        // Without a server that answers, the next version compares the whole disk.
        known.begun = export.and_then(|export| Since::now(export, &known.disk.path).ok());
    }
}

/// A moment of all disks of a guest.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) checkpoints: Vec<Checkpoint>,
    records: Vec<TrackingId>,
    exports: Vec<FrontFolder>,
    /// Whether its file systems were frozen.
    pub(super) frozen: bool,
    /// Identifies it, if other guests have it too.
    pub(super) id: Option<MomentId>,
}

/// A guest whose writes are to be held.
pub(super) struct Member {
    guest: KnownGuest,
    exports: Vec<FrontFolder>,
    records: Vec<TrackingId>,
    /// By disk, the first round that its last version lacks.
    from: Vec<Option<u64>>,
}

impl Member {
    /// Prepares a guest whose disks these exports track.
    pub(super) fn of(
        guest: KnownGuest,
        exports: Vec<FrontFolder>,
    ) -> Result<Self, CheckpointError> {
        let records = exports.iter().map(TrackingId::of);
        let records: Vec<TrackingId> = records.collect::<Result<_, _>>()?;
        let each = guest.disks.iter().zip(&records);
        let from = each.map(|(known, record)| {
            let since = known.since.as_ref();
            Some(since.filter(|since| since.record == *record)?.from)
        });
        Ok(Self {
            from: from.collect(),
            guest,
            exports,
            records,
        })
    }
}

impl Moment {
    /// Holds the writes to all disks of some guests, and lets them go on. Returns their moments,
    /// which are the same one.
    ///
    /// # Errors
    /// When a server does not answer, or writes are not complete in time, again and again.
    pub(super) fn of(
        (id, mut members): (Option<MomentId>, Vec<Member>),
        tracking: Option<&dyn Tracking>,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<Vec<Self>, CheckpointError> {
        let names: Vec<String> = members.iter().map(|it| it.guest.name.clone()).collect();
        let mut not_frozen = |guest: usize, why: &str| {
            let guest = names.get(guest).map_or("", String::as_str);
            progress(&Step::NotFrozen { guest, why });
        };
        let mut frozen = Vec::new();
        for (guest, outcome) in freeze_all(tracking, &names).into_iter().enumerate() {
            frozen.push(outcome.unwrap_or_else(|why| {
                not_frozen(guest, &why);
                None
            }));
        }
        let mut attempt = 1;
        let held = loop {
            match checkpoints(&mut members) {
                Ok(checkpoints) => break checkpoints,
                Err(error) if attempt == ATTEMPTS => return Err(error),
                Err(_) => attempt += 1,
            }
        };
        let thawed = thaw_all(frozen);
        let all = members.into_iter().zip(held).zip(thawed).enumerate();
        let moments = all.map(|(guest, ((member, checkpoints), thawed))| {
            if let Some(Err(why)) = &thawed {
                not_frozen(guest, why);
            }
            Self {
                checkpoints,
                records: member.records,
                exports: member.exports,
                frozen: matches!(thawed, Some(Ok(()))),
                id,
            }
        });
        Ok(moments.collect())
    }

    /// Notes that the version of this moment is durable. What was copied is durable in the images
    /// first: a power cut takes back none of it.
    pub(super) fn is_durable(&self, guest: &mut KnownGuest) -> Result<(), JobError> {
        let each = self.checkpoints.iter().zip(&self.records);
        for (known, (checkpoint, record)) in guest.disks.iter_mut().zip(each) {
            let image = &known.disk.path;
            let synced = File::open(image).and_then(|image| image.sync_data());
            synced.map_err(io_at(image))?;
            known.begun = None;
            known.since = Some(Since {
                record: record.clone(),
                from: checkpoint.round() + 1,
            });
        }
        Ok(())
    }

    /// Lets the records forget what the version has. It is noted durably.
    pub(super) fn forget(self) {
        for (checkpoint, export) in self.checkpoints.into_iter().zip(&self.exports) {
            let round = checkpoint.round();
            drop(checkpoint);
            // Rounds that are not forgotten only take room: the next checkpoint does not copy them,
            // and lets them be forgotten with its own.
            let _ = tracking::ship(export, round);
        }
    }
}

/// Returns what a thread has returned; what it broke with breaks this one too.
fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|broken| std::panic::resume_unwind(broken))
}

/// Freezes the file systems of guests, all at once.
fn freeze_all(
    tracking: Option<&dyn Tracking>,
    guests: &[String],
) -> Vec<Result<Option<Box<dyn Frozen>>, String>> {
    let Some(tracking) = tracking else {
        return guests.iter().map(|_| Ok(None)).collect();
    };
    thread::scope(|scope| {
        let threads = guests.iter();
        let threads: Vec<_> = threads
            .map(|guest| scope.spawn(|| tracking.freeze(guest)))
            .collect();
        threads.into_iter().map(joined).collect()
    })
}

/// Thaws them, all at once. Returns how that went where file systems were frozen.
fn thaw_all(frozen: Vec<Option<Box<dyn Frozen>>>) -> Vec<Option<Result<(), String>>> {
    thread::scope(|scope| {
        let thaw = |frozen: Option<Box<dyn Frozen>>| {
            let frozen = frozen?;
            Some(scope.spawn(|| frozen.thaw()))
        };
        let threads: Vec<_> = frozen.into_iter().map(thaw).collect();
        threads.into_iter().map(|it| it.map(joined)).collect()
    })
}

/// Holds all disks of all guests, and commits them.
fn checkpoints(members: &mut [Member]) -> Result<Vec<Vec<Checkpoint>>, CheckpointError> {
    // What takes long is done for all of them at once, before the first one is held.
    let held: Vec<Vec<Result<Held, CheckpointError>>> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for member in members {
            let each = member.exports.iter().zip(&mut member.from);
            let each = each.map(|(export, from)| scope.spawn(|| hold(export, from)));
            threads.push(each.collect::<Vec<_>>());
        }
        let join = |threads: Vec<_>| threads.into_iter().map(joined).collect();
        threads.into_iter().map(join).collect()
    });
    let held = held
        .into_iter()
        .map(|of_guest| of_guest.into_iter().collect());
    let held: Vec<Vec<Held>> = held.collect::<Result<_, _>>()?;
    let commit = |held: Vec<Held>| held.into_iter().map(Held::commit).collect();
    held.into_iter().map(commit).collect()
}

/// Holds a disk.
fn hold(export: &FrontFolder, from: &mut Option<u64>) -> Result<Held, CheckpointError> {
    let mut request = Request {
        from: *from,
        hold: HOLD,
        log_bytes_max: log_bytes_max(export)?,
    };
    match Held::prepare(export, &request) {
        // All of it is copied.
        Err(CheckpointError::Forgotten) => {
            (*from, request.from) = (None, None);
            Held::prepare(export, &request)
        }
        prepared => prepared,
    }
}

/// Returns how long the log of an export may become: whatever it takes, its file system keeps room.
fn log_bytes_max(export: &FrontFolder) -> Result<u64, CheckpointError> {
    let record = export.tracked_writes();
    let room = statvfs(&record).map_err(io::Error::from)?;
    Ok(room.blocks_available() * room.fragment_size() / LOG_PART)
}
