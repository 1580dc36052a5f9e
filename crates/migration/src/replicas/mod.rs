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

mod arrival;
mod failover;

pub(crate) use arrival::receive;
pub(crate) use failover::fail_over;

use crate::context::Context;
use crate::host::atomic_file;
use crate::host::lock::lock;
use crate::host::names::is_name;
use crate::host::retention;
use crate::status::failure;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_parcel::{Replica, ReplicaError, ReplicaSpec, ReplicaVersion, Retention};
use longhaul_protocol::HostId;
use longhaul_protocol::guest::GuestDescription;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

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
        keep: retention::shown(
            spec.as_ref()
                .map_or_else(|| Retention::last(0), |spec| spec.keep),
        ),
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
        frozen: version.frozen,
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
pub(crate) fn remove(context: &Context, first: &First, guest: &str) -> Result<(), ApiError> {
    let cannot = |error: &dyn std::fmt::Display| failure::internal(&error.to_string());
    let state = &context.parts.config.state;
    let path = folder(state).join(guest);
    if !is_name(guest) || !path.is_dir() {
        return Err(no_replica(guest));
    }
    drop(lock(&first.0).remove(guest));
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

fn now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}
