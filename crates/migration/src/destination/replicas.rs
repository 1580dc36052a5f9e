//! Replicas that other hosts keep here: versions of a guest's disks, which a source brings again
//! and again.
//!
//! ```text
//! STATE/replicas/GUEST/about.json     what this host knows of the guest
//! STATE/replicas/GUEST/replica.json   and the other files of a replica (longhaul_parcel::Replica)
//! ```
//!
//! The images are beside the paths at which the guest would have them, as after a move: a move
//! finds them there, and compares instead of sending. Nothing here lets a guest run: the right to
//! run it is recorded as the source's.

use crate::channel::TalkError;
use crate::context::Context;
use crate::destination::Destination;
use crate::destination::call::{Call, may_send};
use crate::disks::images::{invalid, refused};
use crate::host::atomic_file;
use crate::host::lock::lock;
use crate::host::names::is_name;
use crate::host::right::Holder;
use crate::host::set_aside::set_aside_as;
use crate::left_behind;
use crate::limits::peer_quota;
use crate::status::failure;
use longhaul_api::{ApiError, ErrorCode, FailOver, FailedOver, ReclaimGuest};
use longhaul_parcel::{Replica, ReplicaDisk, ReplicaError, ReplicaId, ReplicaSpec, ReplicaVersion};
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::Refusal;
use longhaul_protocol::replica::{FromReplica, ReplicaOffer, ToReplica};
use longhaul_protocol::units::show_bytes;
use longhaul_protocol::{Generation, HostId};
use longhaul_storage::disk::is_volume;
use longhaul_storage::files::{RealFiles, create_folder};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tokio::task::block_in_place;

const ABOUT: &str = "about.json";

/// What this host knows of a guest of which it keeps a replica.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct About {
    /// The host that brings it.
    pub(crate) host: HostId,
    /// Its name.
    pub(crate) from: String,
    /// The generation of that host's right to run the guest; 0 if it never moved.
    pub(crate) generation: u64,
    /// What the guest is.
    pub(crate) guest: GuestDescription,
    /// Whether an operator lets the guest run here: from the version with this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) failed_over: Option<u64>,
}

/// Replicas that have no version yet. Their images are compared once, and not again for each
/// connection.
#[derive(Debug, Default)]
pub(crate) struct First(Mutex<BTreeMap<String, Replica>>);

/// Returns the folder of all replicas.
pub(crate) fn folder(state: &Path) -> PathBuf {
    state.join("replicas")
}

/// Returns the folder of a guest's replica; `None` if no guest can be called so.
pub fn folder_of(state: &Path, guest: &str) -> Option<PathBuf> {
    is_name(guest).then(|| folder(state).join(guest))
}

/// Returns what is known of a guest's replica, if there is one.
pub(crate) fn about(state: &Path, guest: &str) -> io::Result<Option<About>> {
    let path = folder(state).join(guest).join(ABOUT);
    match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display()))),
    }
}

/// Writes what is known of a guest's replica durably.
pub(crate) fn note(state: &Path, about: &About) -> io::Result<()> {
    let folder = folder(state).join(&about.guest.name);
    let text = serde_json::to_vec_pretty(about).map_err(io::Error::other)?;
    atomic_file::write(&folder.join(ABOUT), &text)
}

/// Why a version is not taken.
enum Not {
    Refused(Refusal),
    /// The guest belongs to this host.
    Superseded(u64),
}

impl From<Refusal> for Not {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Not> for FromReplica {
    fn from(not: Not) -> Self {
        match not {
            Not::Refused(refusal) => Self::Refused(refusal),
            Not::Superseded(generation) => Self::Superseded { generation },
        }
    }
}

fn failed(here: &str, error: &dyn std::fmt::Display) -> Refusal {
    invalid(format!("{here} cannot keep the replica: {error}"))
}

/// Takes a version from a source, until it is complete or the channel ends.
pub(crate) async fn receive(
    context: &Destination,
    call: Call,
    offer: ReplicaOffer,
) -> Result<(), TalkError> {
    let peer = call.control.peer().host.clone();
    let here = context.parts.config.name.clone();
    let allowed = may_send(&call.control, &here);
    let mut sender = call.sender.of::<FromReplica>();
    let mut receiver = call.receiver.of::<ToReplica>();
    let begun = block_in_place(|| {
        allowed?;
        begin(context, (peer.id, &peer.name), &offer)
    });
    let (mut replica, same) = match begun {
        Ok(begun) => begun,
        Err(not) => return sender.send(&not.into()),
    };
    let newest = replica.newest().map(|newest| newest.version);
    sender.send(&FromReplica::Begun { newest, same })?;
    let ended = loop {
        let message = match receiver.recv().await {
            Ok(message) => message,
            // What is complete is durable, and the rest comes again.
            Err(TalkError::Closed | TalkError::Channel(_)) => break Ok(()),
            Err(error) => break Err(error),
        };
        match block_in_place(|| take(&mut replica, message)) {
            Ok(None) => {}
            Ok(Some(answer)) => sender.send(&answer)?,
            Err(error) => {
                let guest = &offer.guest.name;
                tracing::warn!(guest, peer = peer.name, %error, "a version is not taken");
                break sender.send(&FromReplica::Refused(failed(&here, &error)));
            }
        }
    };
    if replica.newest().is_none() {
        lock(&context.first_replicas.0).insert(offer.guest.name, replica);
    }
    ended
}

fn take(replica: &mut Replica, message: ToReplica) -> Result<Option<FromReplica>, ReplicaError> {
    match message {
        ToReplica::Record { kind, rest } => replica.put(kind, &rest).map(|()| None),
        ToReplica::Mark { number, durable } => {
            if durable {
                replica.sync()?;
            }
            Ok(Some(FromReplica::Marked { number }))
        }
        ToReplica::QueryDigests { disk, first } => {
            let disk = disk as usize;
            let left = replica.known_chunks(disk)?.saturating_sub(first);
            let digests = match left {
                0 => Vec::new(),
                left => replica.digests(disk, first, left.min(4096) as usize)?,
            };
            Ok(Some(FromReplica::Digests { digests }))
        }
    }
}

/// Opens the replica of a guest, or makes it, for a version of disks of these sizes. Returns it,
/// and whether the source has brought the last version.
fn begin(
    context: &Destination,
    (host, from): (HostId, &str),
    offer: &ReplicaOffer,
) -> Result<(Replica, bool), Not> {
    let (guest, id) = (&offer.guest.name, ReplicaId(offer.id));
    let (here, state) = (&context.parts.config.name, &context.parts.config.state);
    let fails = |error: &dyn std::fmt::Display| failed(here, error);
    if !is_name(guest) {
        let text = format!("{guest:?} is no name that {here} can keep a replica under");
        return Err(invalid(text).into());
    }
    let known = about(state, guest).map_err(|error| fails(&error))?;
    if let Some(known) = known.as_ref().filter(|known| known.host != host) {
        let text = format!("{here} keeps a replica of {guest} for {}", known.from);
        let hint = format!("if it is not needed: on {here}: longhaul replicas remove {guest}");
        return Err(refused(text, hint).into());
    }
    may_follow(context, offer, known.as_ref())?;
    let path = folder(state).join(guest);
    create_folder(&RealFiles, &path).map_err(|error| fails(&error))?;
    let about = About {
        host,
        from: from.to_owned(),
        generation: offer.generation,
        guest: offer.guest.clone(),
        failed_over: None,
    };
    if known.as_ref() != Some(&about) {
        note(state, &about).map_err(|error| fails(&error))?;
    }
    let is_new = context.rights.get(guest).map_err(|error| fails(&error))?;
    if is_new.is_none() {
        // From now on nobody starts it here by mistake.
        let right = longhaul_storage::Right {
            guest: guest.clone(),
            generation: Generation(offer.generation),
            holder: longhaul_storage::Holder::Elsewhere {
                host: from.to_owned(),
            },
        };
        context.rights.set(&right).map_err(|error| fails(&error))?;
    }
    let first = lock(&context.first_replicas.0).remove(guest);
    let opened = match first {
        Some(replica) => Some(replica),
        None => Replica::open(&path).map_err(|error| fails(&error))?,
    };
    let names = || offer.disks.iter().map(|disk| &disk.image);
    let of_these = |replica: &Replica| {
        let disks = replica.spec().disks.iter();
        disks.map(|disk| &disk.name).eq(names())
    };
    let mut replica = match opened {
        Some(replica) if of_these(&replica) => replica,
        Some(_) => {
            let text = format!("{guest} has other disks than its replica on {here}");
            let hint = format!("on {here}: longhaul replicas remove {guest}");
            return Err(refused(text, hint).into());
        }
        None => {
            has_room(context, offer)?;
            let spec = ReplicaSpec {
                id,
                guest: guest.clone(),
                from: from.to_owned(),
                keep: offer.keep.max(1),
                every_s: offer.every_s,
                disks: places(context, offer)?,
            };
            Replica::make(&path, spec).map_err(|error| fails(&error))?
        }
    };
    let same = replica.spec().id == id;
    let follows = replica.follow(id, offer.every_s, offer.keep);
    follows.map_err(|error| fails(&error))?;
    let sizes: Vec<u64> = offer.disks.iter().map(|disk| disk.bytes).collect();
    replica.begin(&sizes).map_err(|error| fails(&error))?;
    Ok((replica, same))
}

/// Refuses a version of a guest that belongs to this host, or to a third one.
fn may_follow(context: &Context, offer: &ReplicaOffer, known: Option<&About>) -> Result<(), Not> {
    let (guest, here) = (&offer.guest.name, &context.parts.config.name);
    let right = context.right(guest);
    let generation = right.generation.unwrap_or_default();
    if generation > offer.generation {
        return Err(Not::Superseded(generation));
    }
    peer_quota::refuse_older(context, guest, Generation(offer.generation))?;
    if known.is_some_and(|known| known.failed_over.is_some()) {
        let text = format!("{here} is about to run {guest}, from its replica");
        let hint = format!("on {here}: longhaul failover {guest}, to end what was begun");
        return Err(refused(text, hint).into());
    }
    let found = context.parts.guests.find(guest);
    let found = found.map_err(|error| failed(here, &error))?;
    match (&right.holder, found, right.moving) {
        (Holder::Elsewhere(_), None, None) => Ok(()),
        (Holder::Here, None, None) if right.generation.is_none() => Ok(()),
        _ => {
            let text = format!("a guest {guest} is on {here}, comes, or leaves");
            let hint = format!("on {here}: longhaul guests; longhaul migrations");
            Err(refused(text, hint).into())
        }
    }
}

/// Returns where the images go.
fn places(context: &Destination, offer: &ReplicaOffer) -> Result<Vec<ReplicaDisk>, Refusal> {
    let config = &context.parts.config;
    let here = &config.name;
    let each = offer.disks.iter().map(|disk| {
        let name = &disk.image;
        let Some(image) = config.hypervisor.images.get(name) else {
            let text = format!("{here} does not know the image {name}");
            return Err(refused(text, "name it under [images] in its configuration"));
        };
        if is_volume(&image.path) || image.path.starts_with("/dev") {
            let text = format!("{here} has a volume for the image {name}: a replica needs a file");
            return Err(refused(text, "give the image a path for a file there"));
        }
        if fs::symlink_metadata(&image.path).is_ok() {
            let text = format!("{here} has a file already at the path of the image {name}");
            let hint = format!("on {here}: move that file away: it may be a guest's disk");
            return Err(refused(text, hint));
        }
        Ok(ReplicaDisk {
            name: name.clone(),
            path: set_aside_as(&image.path),
        })
    });
    each.collect()
}

/// Refuses a first version that does not fit. What images of an earlier stay take counts.
fn has_room(context: &Destination, offer: &ReplicaOffer) -> Result<(), Refusal> {
    let here = &context.parts.config.name;
    let mut needed: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for (place, disk) in places(context, offer)?.iter().zip(&offer.disks) {
        let folder = place.path.parent().unwrap_or(&place.path);
        let looked = || {
            let room = statvfs(folder).map_err(io::Error::from)?;
            let free = room.blocks_available() * room.fragment_size();
            Ok::<_, io::Error>((fs::metadata(folder)?.dev(), free))
        };
        let (device, free) = looked().map_err(|error| {
            tracing::warn!(folder = %folder.display(), %error, "cannot be looked at");
            refused(
                format!("{here} has no folder for the image {}", disk.image),
                "make the folder of its path, or name it elsewhere",
            )
        })?;
        let has = fs::metadata(&place.path).map_or(0, |image| image.blocks() * 512);
        let entry = needed.entry(device).or_insert((free, 0));
        entry.1 += disk.allocated_bytes.saturating_sub(has);
    }
    match needed.into_values().find(|(free, needed)| needed > free) {
        None => Ok(()),
        Some((free, needed)) => {
            let text = format!(
                "the disks of {} take {} more on {here}, which has {} free for them",
                offer.guest.name,
                show_bytes(needed),
                show_bytes(free)
            );
            Err(refused(
                text,
                "make room there, or give the images other paths",
            ))
        }
    }
}

/// Returns the replicas that this host keeps.
pub(crate) fn list(context: &Context) -> io::Result<Vec<longhaul_api::Replica>> {
    let state = &context.parts.config.state;
    let entries = match fs::read_dir(folder(state)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut replicas = Vec::new();
    for entry in entries {
        let guest = entry?.file_name().to_string_lossy().into_owned();
        replicas.extend(show(state, &guest));
    }
    replicas.sort_by(|one, other| one.guest.cmp(&other.guest));
    Ok(replicas)
}

fn show(state: &Path, guest: &str) -> Option<longhaul_api::Replica> {
    let known = about(state, guest);
    let looked = Replica::look(&folder(state).join(guest));
    let (from, failing_over_to) = match &known {
        // It was not made to its end.
        Ok(None) => return None,
        Ok(Some(known)) => (known.from.clone(), known.failed_over),
        Err(_) => (String::new(), None),
    };
    let errors = [
        known.err().map(|it| it.to_string()),
        looked.as_ref().err().map(|it| it.to_string()),
    ];
    let mut trouble = errors.into_iter().flatten().next();
    let (spec, versions) = looked.ok().flatten().unzip();
    let spec: Option<ReplicaSpec> = spec;
    let versions = versions.unwrap_or_default();
    let mut disks = spec.iter().flat_map(|spec| &spec.disks);
    if !versions.is_empty()
        && let Some(missing) = disks.find(|disk| !disk.path.exists())
    {
        let text = format!(
            "{} is missing: the guest has come here, or the file was removed",
            missing.path.display()
        );
        trouble.get_or_insert(text);
    }
    let moments = versions.iter().filter(|version| version.consistent);
    let last = moments.map(|version| version.time).next_back();
    let behind_s = last.map(|last| now_s().saturating_sub(last));
    let every_s = spec.as_ref().map_or(0, |spec| spec.every_s);
    Some(longhaul_api::Replica {
        guest: guest.to_owned(),
        from,
        every_s,
        keep: spec.as_ref().map_or(0, |spec| spec.keep),
        versions: versions.iter().map(shown_version).collect(),
        behind_s,
        late: behind_s.is_some_and(|behind| every_s > 0 && behind > 2 * every_s),
        failing_over_to,
        trouble,
    })
}

fn shown_version(version: &ReplicaVersion) -> longhaul_api::ReplicaVersion {
    longhaul_api::ReplicaVersion {
        version: version.version,
        unix_ms: version.time * 1000,
        consistent: version.consistent,
    }
}

fn no_replica(guest: &str) -> ApiError {
    ApiError::new(
        ErrorCode::GuestUnknown,
        format!("this host keeps no replica of {guest}"),
    )
    .hint("longhaul replicas lists those that it keeps")
}

/// Removes a replica with all its versions and images.
pub(crate) fn remove(context: &Destination, guest: &str) -> Result<(), ApiError> {
    let cannot = |error: &dyn std::fmt::Display| failure::internal(&error.to_string());
    let state = &context.parts.config.state;
    let path = folder(state).join(guest);
    if !is_name(guest) || !path.is_dir() {
        return Err(no_replica(guest));
    }
    drop(lock(&context.first_replicas.0).remove(guest));
    // Nobody else uses it meanwhile.
    let replica = match Replica::open(&path) {
        Err(error @ ReplicaError::Busy(_)) => {
            return Err(ApiError::new(ErrorCode::GuestBusy, error.to_string()));
        }
        // One that cannot be opened can be removed.
        opened => opened.ok().flatten(),
    };
    let spec = match &replica {
        Some(replica) => Some(replica.spec().clone()),
        None => Replica::look(&path).ok().flatten().map(|(spec, _)| spec),
    };
    for disk in spec.iter().flat_map(|spec| &spec.disks) {
        match fs::remove_file(&disk.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(cannot(&format!("{}: {error}", disk.path.display())));
            }
            _ => {}
        }
    }
    fs::remove_dir_all(&path).map_err(|error| cannot(&error))
}

/// Puts the disks of a version in place, and takes the right to run the guest. It can be done
/// again, and goes on where it was interrupted.
pub(crate) async fn fail_over(
    context: &Destination,
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
    let looked = block_in_place(|| Replica::look(&path)).map_err(|error| cannot(&error))?;
    let (spec, versions) = looked.ok_or_else(|| no_replica(guest))?;
    let version = chosen(guest, &versions, known.failed_over.or(how.version))?;
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
    let images: Vec<PathBuf> = spec
        .disks
        .iter()
        .map(|disk| guests_path(&disk.path))
        .collect();
    let newest = versions.last().map(|newest| newest.version);
    block_in_place(|| match newest == Some(version.version) {
        true => give(&path, &images),
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
fn give(folder: &Path, images: &[PathBuf]) -> Result<(), String> {
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
        if let Some(replica) = &mut replica {
            replica.check_images().map_err(|error| error.to_string())?;
        }
    }
    for image in images.iter().filter(|image| !is_given(image)) {
        if image.exists() {
            return Err(format!("{} exists: move it away", image.display()));
        }
        let renamed = fs::rename(set_aside_as(image), image);
        renamed.map_err(|error| format!("{}: {error}", image.display()))?;
        let parent = image.parent().unwrap_or(image);
        let synced = fs::File::open(parent).and_then(|parent| parent.sync_all());
        synced.map_err(|error| format!("{}: {error}", parent.display()))?;
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
        let renamed = fs::rename(part, image);
        renamed.map_err(|error| format!("{}: {error}", image.display()))?;
        let parent = image.parent().unwrap_or(image);
        let synced = fs::File::open(parent).and_then(|parent| parent.sync_all());
        synced.map_err(|error| format!("{}: {error}", parent.display()))?;
    }
    Ok(())
}

fn now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
