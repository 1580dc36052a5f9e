//! What a replica keeps of itself.

use super::error::{ReplicaError, io_at};
use super::retention::Retention;
use crate::record::{CHUNK_BYTES, DISK_BYTES_MAX, Version};
use crate::room::Stamp;
use longhaul_storage::files::{Access, Files};
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

const DOCUMENT: &str = "replica.json";
/// Room for thousands of versions of 256 disks.
const DOCUMENT_BYTES_MAX: u64 = 64 << 20;
const DISKS_MAX: usize = 256;

/// Identifies what a source keeps of a replica. Another one has nothing in common with it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaId(pub [u8; 16]);

impl fmt::Debug for ReplicaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::tree::text(&self.0))
    }
}

/// A disk of a replica.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaDisk {
    /// The name by which both hosts know it.
    pub name: String,
    /// Its image at the destination.
    pub path: PathBuf,
}

/// What a replica is of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaSpec {
    /// Its id.
    pub id: ReplicaId,
    /// The guest's name.
    pub guest: String,
    /// The name of the host that it comes from.
    pub from: String,
    /// Which versions are kept.
    pub keep: Retention,
    /// The seconds between two versions, as the source intends; 0 if there is no schedule.
    pub every_s: u64,
    /// Its disks.
    pub disks: Vec<ReplicaDisk>,
}

/// A disk as a version has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaVersionDisk {
    /// Its size in bytes.
    pub bytes: u64,
    /// The digest of its content, in hexadecimal digits.
    pub digest: String,
}

/// A version that can be restored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaVersion {
    /// Its number.
    pub version: u64,
    /// When it was taken, in seconds since 1970.
    pub time: u64,
    /// Whether all disks are as they were at one moment.
    pub consistent: bool,
    /// Whether the guest's agent had frozen its file systems at that moment.
    #[serde(default)]
    pub frozen: bool,
    /// Its disks, in the order of the replica's.
    pub disks: Vec<ReplicaVersionDisk>,
}

impl ReplicaVersion {
    pub(super) fn of(version: Version, sizes: &[u64]) -> Self {
        let disks = version.disks.into_iter().zip(sizes);
        Self {
            version: version.version,
            time: version.time,
            consistent: version.consistent,
            frozen: version.frozen,
            disks: disks
                .map(|(disk, bytes)| ReplicaVersionDisk {
                    bytes: *bytes,
                    digest: disk.digest,
                })
                .collect(),
        }
    }
}

/// A version whose records and undo log are durable, and which the images may not have yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Stage {
    pub(super) version: ReplicaVersion,
    /// The length of its records.
    pub(super) bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Document {
    #[serde(flatten)]
    pub(super) spec: ReplicaSpec,
    pub(super) versions: Vec<ReplicaVersion>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stage: Option<Stage>,
    /// The images, as the newest version has left them.
    pub(super) stamps: Vec<Stamp>,
}

impl Document {
    pub(super) fn of(spec: ReplicaSpec) -> Result<Self, ReplicaError> {
        let wrong = |why| Err(ReplicaError::Contradiction(why));
        let names: BTreeSet<&String> = spec.disks.iter().map(|disk| &disk.name).collect();
        let paths: BTreeSet<&PathBuf> = spec.disks.iter().map(|disk| &disk.path).collect();
        match (1..=DISKS_MAX).contains(&spec.disks.len()) {
            false => wrong("a guest has 1 to 256 disks"),
            true if names.len() != spec.disks.len() => wrong("two disks have one name"),
            true if paths.len() != spec.disks.len() => wrong("two disks have one image"),
            true if spec.keep.last == 0 => wrong("at least one version is kept"),
            true => Ok(Self {
                spec,
                versions: Vec::new(),
                stage: None,
                stamps: Vec::new(),
            }),
        }
    }

    /// Returns whether it is one that this program writes.
    fn is_possible(&self) -> bool {
        let stage = self.stage.as_ref().map(|stage| &stage.version);
        let mut versions = self.versions.iter().chain(stage);
        let count = self.spec.disks.len();
        let is_increasing = self
            .versions
            .iter()
            .chain(stage)
            .is_sorted_by(|one, next| one.version < next.version);
        is_increasing
            && self.spec.keep.last > 0
            && versions.all(|version| {
                let sizes = version.disks.iter().map(|disk| disk.bytes);
                version.disks.len() == count
                    && version.version > 0
                    && sizes.into_iter().all(|bytes| bytes <= DISK_BYTES_MAX)
            })
    }

    pub(super) fn read(files: &dyn Files, folder: &Path) -> Result<Option<Self>, ReplicaError> {
        let path = folder.join(DOCUMENT);
        let fails = io_at(&path);
        let file = match files.open(&path, Access::Read) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(&fails)?,
        };
        let length = file.length().map_err(&fails)?;
        if length > DOCUMENT_BYTES_MAX {
            return Err(fails(io::Error::other("it is longer than 64 MiB")));
        }
        let mut text = vec![0; length as usize];
        file.read_at(0, &mut text).map_err(&fails)?;
        let document =
            serde_json::from_slice(&text).and_then(|document: Self| match document.is_possible() {
                true => Ok(document),
                false => Err(serde_json::Error::custom("it has impossible numbers")),
            });
        let document = document.map_err(|error| ReplicaError::Document {
            path: path.clone(),
            error,
        });
        document.map(Some)
    }

    /// Makes it durable in the place of the last one.
    pub(super) fn save(&self, files: &dyn Files, folder: &Path) -> Result<(), ReplicaError> {
        let path = folder.join(DOCUMENT);
        let fails = io_at(&path);
        let text = serde_json::to_vec_pretty(self);
        let text = text.map_err(|error| ReplicaError::Document {
            path: path.clone(),
            error,
        })?;
        let replaced = longhaul_storage::files::replace(
            files,
            &path,
            &text,
            ["the replica's document", "its name"],
        );
        replaced.map_err(fails)
    }
}

/// Chunks of the largest disk.
pub(super) const CHUNKS_MAX: u64 = DISK_BYTES_MAX / CHUNK_BYTES as u64;
