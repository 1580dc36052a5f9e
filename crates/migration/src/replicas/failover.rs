//! Lets a guest run from its replica.

use super::{about, folder, no_replica, note, shown_version};
use crate::context::Context;
use crate::host::names::is_name;
use crate::host::right::Holder;
use crate::host::set_aside::set_aside_as;
use crate::left_behind;
use crate::status::failure;
use longhaul_api::{ApiError, ErrorCode, FailOver, FailedOver, ReclaimGuest};
use longhaul_parcel::{Replica, ReplicaError, ReplicaVersion};
use longhaul_protocol::guest::GuestDescription;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::{Instant, sleep};

/// How long a version may arrive from a host that is lost: its connection ends after 15 s without a
/// word.
const BUSY_WITHIN: Duration = Duration::from_secs(30);
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// Puts the disks of a version in place, and takes the right to run the guest. It can be done
/// again, and goes on where it was interrupted.
pub(crate) async fn fail_over(
    context: &Context,
    guest: &str,
    how: &FailOver,
) -> Result<(GuestDescription, FailedOver), ApiError> {
    let cannot = |error: &dyn std::fmt::Display| failure::internal(&error.to_string());
    let state = &context.parts.config.state;
    let path = folder(state).join(guest);
    let known = block_in_place(|| about(state, guest)).map_err(|error| cannot(&error))?;
    let mut known = known
        .filter(|_| is_name(guest))
        .ok_or_else(|| no_replica(guest))?;
    if known.failed_over.is_none() {
        // A version that was interrupted is completed first.
        open_settled(&path).await.map_err(|error| match error {
            ReplicaError::Busy(_) => ApiError::new(ErrorCode::GuestBusy, error.to_string()),
            error => cannot(&error),
        })?;
    }
    let looked = block_in_place(|| Replica::look(&path)).map_err(|error| cannot(&error))?;
    let (spec, versions) = looked.ok_or_else(|| no_replica(guest))?;
    let version = chosen(guest, &versions, known.failed_over.or(how.version))?;
    let disks = spec.disks.iter();
    let images: Vec<PathBuf> = disks.map(|disk| guests_path(&disk.path)).collect();
    if known.failed_over.is_none() {
        may_begin(context, guest, &images)?;
    }
    // From now on no version arrives.
    known.failed_over = Some(version.version);
    block_in_place(|| note(state, &known)).map_err(|error| cannot(&error))?;
    if context.right(guest).holder != Holder::Here {
        let reclaim = ReclaimGuest {
            other_side: how.other_side,
            because: how.because.clone(),
        };
        if let Err(error) = left_behind::reclaim(context, guest, &reclaim).await {
            known.failed_over = None;
            block_in_place(|| note(state, &known)).map_err(|error| cannot(&error))?;
            return Err(error);
        }
    }
    let newest = versions.last().map(|newest| newest.version);
    block_in_place(|| match newest == Some(version.version) {
        true => give(&path, version.version, &images),
        false => copy(&path, version.version, &images),
    })
    .map_err(|error| {
        let hint = format!("repeat it: longhaul failover {guest}");
        ApiError::new(ErrorCode::Internal, error).hint(hint)
    })?;
    known.failed_over = None;
    block_in_place(|| match newest == Some(version.version) {
        // Nothing of it is left but what the guest has now.
        true => fs::remove_dir_all(&path),
        false => note(state, &known),
    })
    .map_err(|error| cannot(&error))?;
    tracing::warn!(
        guest,
        version = version.version,
        "failed over to its replica"
    );
    let done = FailedOver {
        guest: guest.to_owned(),
        version: shown_version(&version),
        started: false,
        trouble: None,
        images: images
            .iter()
            .map(|image| image.display().to_string())
            .collect(),
    };
    Ok((known.guest, done))
}

/// Opens a replica, as soon as no version arrives any more.
async fn open_settled(folder: &Path) -> Result<(), ReplicaError> {
    let until = Instant::now() + BUSY_WITHIN;
    loop {
        match block_in_place(|| Replica::open(folder)) {
            Err(ReplicaError::Busy(_)) if Instant::now() < until => sleep(BUSY_PAUSE).await,
            opened => return opened.map(drop),
        }
    }
}

/// Refuses a failover of a guest that is here, or whose images are.
fn may_begin(context: &Context, guest: &str, images: &[PathBuf]) -> Result<(), ApiError> {
    let right = context.right(guest);
    if right.holder == Holder::Here || right.moving.is_some() {
        let text = format!("{guest} belongs to this host already, or comes or leaves");
        return Err(
            ApiError::new(ErrorCode::GuestState, text).hint("longhaul guests; longhaul migrations")
        );
    }
    match images.iter().find(|image| image.exists()) {
        None => Ok(()),
        Some(image) => {
            let text = format!("{} exists: it may be a guest's disk", image.display());
            Err(ApiError::new(ErrorCode::Refused, text).hint("move it away"))
        }
    }
}

/// Returns the version that is asked for, or the newest one that a guest can go on from.
fn chosen(
    guest: &str,
    versions: &[ReplicaVersion],
    asked: Option<u64>,
) -> Result<ReplicaVersion, ApiError> {
    let refuse = |text: String| {
        let hint = "longhaul replicas lists the versions";
        Err(ApiError::new(ErrorCode::Refused, text).hint(hint))
    };
    let found = match asked {
        Some(asked) => versions.iter().find(|version| version.version == asked),
        None => versions.iter().rfind(|version| version.consistent),
    };
    match found {
        Some(version) if version.consistent => Ok(version.clone()),
        Some(version) => refuse(format!(
            "version {} of {guest} has disks of different moments: a guest may not start from them",
            version.version
        )),
        None => match asked {
            Some(asked) => refuse(format!("there is no version {asked} of {guest}")),
            None => refuse(format!("there is no version of {guest} yet of one moment")),
        },
    }
}

/// Returns the path at which a guest has the image that is set aside here.
fn guests_path(set_aside: &Path) -> PathBuf {
    set_aside.with_extension("")
}

/// Gives the images of the newest version to the guest.
fn give(folder: &Path, version: u64, images: &[PathBuf]) -> Result<(), String> {
    let is_given = |image: &PathBuf| image.exists() && !set_aside_as(image).exists();
    if images.iter().all(is_given) {
        return Ok(());
    }
    let is_begun = images.iter().any(is_given);
    // All of them had the version when the first one was given.
    let mut replica = None;
    if !is_begun {
        // An interrupted version is completed now.
        replica = Replica::open(folder).map_err(|error| error.to_string())?;
        let replica = replica.as_mut().ok_or("the replica is gone")?;
        if replica
            .newest()
            .is_none_or(|newest| newest.version != version)
        {
            return Err("a version has come meanwhile".to_owned());
        }
        replica.check_images().map_err(|error| error.to_string())?;
    }
    for image in images.iter().filter(|image| !is_given(image)) {
        if image.exists() {
            return Err(format!("{} exists: move it away", image.display()));
        }
        put_in_place(&set_aside_as(image), image)?;
    }
    // It was kept from others up to here.
    drop(replica);
    Ok(())
}

/// Copies an earlier version for the guest. The replica stays.
fn copy(folder: &Path, version: u64, images: &[PathBuf]) -> Result<(), String> {
    let parts: Vec<PathBuf> = images
        .iter()
        .map(|image| {
            let mut name = image.as_os_str().to_owned();
            name.push(".restored");
            PathBuf::from(name)
        })
        .collect();
    let is_given = images.iter().any(|image| image.exists());
    if !is_given {
        // What an interrupted failover has left.
        for part in &parts {
            match fs::remove_file(part) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(format!("{}: {error}", part.display()));
                }
                _ => {}
            }
        }
        let replica = Replica::open(folder).map_err(|error| error.to_string())?;
        let replica = replica.ok_or("the replica is gone")?;
        let restored = replica.restore(version, &parts, &mut |_| ());
        restored.map_err(|error| error.to_string())?;
    }
    for (part, image) in parts.iter().zip(images) {
        match (part.exists(), image.exists()) {
            (true, false) => {}
            (false, true) => continue,
            _ => return Err(format!("{} exists: move it away", image.display())),
        }
        put_in_place(part, image)?;
    }
    Ok(())
}

/// Renames a file to a guest's image, durably.
fn put_in_place(file: &Path, image: &Path) -> Result<(), String> {
    let parent = image.parent().unwrap_or(image);
    let renamed = fs::rename(file, image)
        .and_then(|()| fs::File::open(parent))
        .and_then(|parent| parent.sync_all());
    renamed.map_err(|error| format!("{}: {error}", image.display()))
}
