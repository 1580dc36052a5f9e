//! Tracks a guest's writes to its local disks without a migration, at an operator's request:
//! inserts exports that record them, reads the records, and removes the exports.

use crate::context::Context;
use crate::disks::exports::{
    self, Below, FrontError, Noted, device_and_nodes, insert_all, make, shown, supervise,
};
use crate::disks::tracked_writes::{self, TrackedDisk};
use crate::source::local_disks::{self, Known, LocalDisk};
use crate::status::failure;
use longhaul_api::{ApiError, Check, DiskChoice, ErrorCode, Tracking};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::guest_agent;
use longhaul_hypervisor::process::ProcessId;
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_storage::front::tracking;
use std::fmt::Display;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::task::block_in_place;

fn internal(error: &dyn Display) -> ApiError {
    failure::internal(&error.to_string())
}

/// Refuses a guest whose writes are tracked.
pub(crate) fn refuse_tracked(context: &Context, guest: &str) -> Result<(), ApiError> {
    let state = &context.parts.config.state;
    let tracked = block_in_place(|| tracked_writes::exports_of(state, guest));
    match tracked.map_err(|error| internal(&error))?.is_empty() {
        true => Ok(()),
        false => {
            let text = format!("the writes of {guest} to its disks are tracked");
            let hint = format!("end that first: longhaul guests track-writes {guest} --stop");
            Err(ApiError::new(ErrorCode::Refused, text).hint(hint))
        }
    }
}

/// Returns what a plan says of a guest whose writes are tracked.
pub(crate) fn plan_check(context: &Context, guest: &str) -> Result<Option<Check>, ApiError> {
    let state = &context.parts.config.state;
    let tracked = block_in_place(|| tracked_writes::exports_of(state, guest));
    let is_tracked = !tracked.map_err(|error| internal(&error))?.is_empty();
    let check = || {
        let hint = "a move compares the disks by digests, and so does a later top-up of a parcel";
        Check::warn("disks", "its writes are tracked: the move ends that", hint)
    };
    Ok(is_tracked.then(check))
}

/// Begins to track the writes of a reserved guest to all of its local disks.
pub(crate) async fn begin(context: &Context, guest: &str) -> Result<(), ApiError> {
    refuse_tracked(context, guest)?;
    let state = &context.parts.config.state;
    let guests = &context.parts.guests;
    let found = block_in_place(|| guests.find(guest)).map_err(|error| internal(&error))?;
    let running = found.and_then(|found| Some((found.process()?.clone(), found)));
    let Some((process, found)) = running else {
        let text = format!("{guest} has no QEMU here");
        return Err(ApiError::new(ErrorCode::GuestState, text)
            .hint(format!("longhaul guests start {guest}")));
    };
    if let Some(by) = found.owner().manager() {
        // Between moves nothing keeps a snapshot by that program from missing the export.
        let text = format!("{guest} is a guest of {by}, whose writes are not tracked yet");
        return Err(ApiError::new(ErrorCode::Refused, text));
    }
    let lease = guests.lease(&found, COMMAND_TIMEOUT).await;
    let lease = lease.map_err(|error| ApiError::new(ErrorCode::Qemu, error.to_string()))?;
    let qmp = lease.qmp();
    let asked = DiskChoice::Precopy;
    let known = Known::of(context, &found, asked, qmp).await;
    let disks = || local_disks::local(context, found.description(), asked, &known, (&[], &[]));
    let disks = block_in_place(disks)?;
    if disks.is_empty() {
        let text = format!("{guest} has no disks on this host alone");
        return Err(ApiError::new(ErrorCode::Refused, text));
    }
    let Err(error) = put_in(state, (&found, &process), qmp, &disks).await else {
        context.sweeper.wake();
        return Ok(());
    };
    // Notes of exports that track already are left to the operator.
    if let Err(error) = exports::take_out(state, &found, qmp).await {
        tracing::error!(guest, %error, "still below a disk");
    }
    context.sweeper.wake();
    Err(error.into_api())
}

async fn put_in(
    state: &Path,
    (guest, process): (&Guest, &ProcessId),
    qmp: &Qmp,
    disks: &[LocalDisk],
) -> Result<(), FrontError> {
    let mut all_noted = Vec::new();
    let mut all_nodes = Vec::new();
    for (n, disk) in disks.iter().enumerate() {
        let of_disk = |why: &dyn Display| FrontError::new(&disk.spec.name, why);
        let of = (&*disk.spec.name, &*disk.image);
        let (device, nodes) = device_and_nodes(guest, qmp, of).await?;
        let (size, image_use) = shown(disk.grows(), &disk.image);
        let of = Below {
            disk: &disk.spec.name,
            image: &disk.image,
            device,
            nodes: &nodes,
            size,
            image_use,
            arriving: None,
            left: None,
            tracked: true,
        };
        let mut noted = make(state, guest, n, of).map_err(|error| of_disk(&error))?;
        let image_bytes = disk.offered.image_bytes;
        let begun = block_in_place(|| tracking::begin(&noted.folder(), image_bytes));
        begun.map_err(|error| of_disk(&error))?;
        supervise(qmp, &nodes, &mut noted).await?;
        all_noted.push(noted);
        all_nodes.push(nodes);
    }
    let (_, still) = insert_all(qmp, &mut all_noted, &all_nodes).await?;
    tracing::info!(guest = guest.name(), ?still, "its writes are tracked");
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
    let mut noted = all_noted.iter_mut();
    let port = guest.channel(guest_agent::PORT);
    noted.try_for_each(|noted| noted.begin_tracking(process, now, port))
}

/// Returns the recorded writes of a guest.
pub(crate) fn read(
    context: &Context,
    guest: &str,
) -> Result<Vec<longhaul_api::TrackedDisk>, ApiError> {
    let state = &context.parts.config.state;
    let read = || {
        Ok((
            tracked_writes::read(state, guest)?,
            context.parts.guests.find(guest)?,
        ))
    };
    let read: std::io::Result<_> = block_in_place(read);
    let (disks, running) = read.map_err(|error| internal(&error))?;
    let running = running.and_then(|found| found.process().cloned());
    let disks = disks.into_iter();
    Ok(disks.map(|disk| show(disk, running.as_ref())).collect())
}

fn show(disk: TrackedDisk, running: Option<&ProcessId>) -> longhaul_api::TrackedDisk {
    let tracking = match running {
        Some(process) if *process == disk.qemu => Tracking::Ongoing,
        // It uses the image without the export.
        Some(_) => Tracking::Lost,
        None => Tracking::Ended,
    };
    longhaul_api::TrackedDisk {
        disk: disk.disk,
        tracking,
        since_unix_ms: disk.since_unix_ms,
        image_bytes: disk.changed.image_bytes,
        changed_bytes: match tracking {
            Tracking::Lost => disk.changed.image_bytes,
            Tracking::Ongoing | Tracking::Ended => disk.changed.bytes(),
        },
    }
}

/// Ends the tracking of a reserved guest's writes before it moves, if they are tracked.
pub(crate) async fn end_before_move(context: &Context, guest: &str) -> Result<(), ApiError> {
    let state = &context.parts.config.state;
    let tracked = block_in_place(|| tracked_writes::exports_of(state, guest));
    match tracked.map_err(|error| internal(&error))?.is_empty() {
        true => Ok(()),
        false => {
            tracing::info!(guest, "the tracking of its writes ends: it moves");
            end(context, guest).await
        }
    }
}

/// Ends the tracking of a reserved guest's writes, and removes the exports and their records.
pub(crate) async fn end(context: &Context, guest: &str) -> Result<(), ApiError> {
    let state = &context.parts.config.state;
    let tracked = block_in_place(|| tracked_writes::exports_of(state, guest));
    let mut tracked = tracked.map_err(|error| internal(&error))?;
    if tracked.is_empty() {
        let text = format!("the writes of {guest} are not tracked");
        return Err(ApiError::new(ErrorCode::GuestState, text));
    }
    let ended = end_all(context, guest, &mut tracked).await;
    // What could not be removed is tried again.
    context.sweeper.wake();
    ended.map_err(FrontError::into_api)
}

async fn end_all(context: &Context, guest: &str, tracked: &mut [Noted]) -> Result<(), FrontError> {
    for noted in tracked {
        noted.keep_tracking().await?;
        match noted.has_ended() {
            true => noted.remove()?,
            false => noted.end_tracking()?,
        }
    }
    context.sweep_fronts_of(guest).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_storage::front::tracking::Changed;

    #[test]
    fn another_qemu_of_the_guest_may_have_written_everything() {
        let us = ProcessId::of(std::process::id() as i32).unwrap().unwrap();
        let other = ProcessId {
            start_ticks: us.start_ticks + 1,
            ..us.clone()
        };
        let shown = |running: Option<&ProcessId>| {
            let changed = Changed {
                image_bytes: 1 << 20,
                ranges: vec![0..4096, 8192..12288],
            };
            let disk = TrackedDisk {
                disk: "vda".to_owned(),
                since_unix_ms: 7,
                qemu: us.clone(),
                changed,
            };
            let shown = show(disk, running);
            (shown.tracking, shown.changed_bytes)
        };
        assert_eq!(shown(Some(&us)), (Tracking::Ongoing, 8192));
        assert_eq!(shown(None), (Tracking::Ended, 8192));
        assert_eq!(shown(Some(&other)), (Tracking::Lost, 1 << 20));
    }
}
