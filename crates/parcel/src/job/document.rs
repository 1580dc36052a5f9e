//! What a job keeps in its folder.

use super::copier::Document;
use super::error::{JobError, io_at};
use super::moment::Since;
use crate::date::Date;
use crate::header::ParcelId;
use crate::layout::CELLS_MAX;
use crate::record::{CHUNK_BYTES, DISK_BYTES_MAX, MomentId};
use crate::writer::{Position, Writer};
use longhaul_storage::disk::{Disk as _, RawDisk};
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

const DOCUMENT: &str = "job.json";
/// Room for 100 versions of thousands of disks.
const DOCUMENT_BYTES_MAX: u64 = 64 << 20;

/// A disk that is exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobDisk {
    /// The name by which the destination knows it.
    pub name: String,
    /// Its file, or its volume.
    pub path: PathBuf,
}

/// A disk as the job keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KnownDisk {
    #[serde(flatten)]
    pub(super) disk: JobDisk,
    /// Its size when the export began. A file may have grown since: what is beyond is not exported.
    pub(super) bytes: u64,
    /// Its size in the last version that is complete.
    #[serde(default)]
    pub(super) version_bytes: u64,
    /// What its last version lacks; `None` if that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) since: Option<Since>,
    /// What the version that is exported will lack.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) begun: Option<Since>,
}

/// A guest as the job keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct KnownGuest {
    pub(super) name: String,
    pub(super) disks: Vec<KnownDisk>,
    /// Whether its last version is of one moment.
    #[serde(default)]
    pub(super) consistent: bool,
    /// Whether its file systems were frozen at that moment.
    #[serde(default)]
    pub(super) frozen: bool,
    /// What a destination needs to start it.
    #[serde(default)]
    pub(super) description: Value,
    /// The group whose guests are to have the same moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<String>,
    /// The moment of its last version, if others of its group have it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) moment: Option<MomentId>,
}

impl KnownGuest {
    /// Notes how large its disks are.
    pub(super) fn look(guest: JobGuest) -> Result<Self, JobError> {
        let each = guest.disks.into_iter().map(|disk| {
            let bytes = RawDisk::open_to_read(&disk.path)?.size_bytes();
            Ok(KnownDisk {
                disk,
                bytes,
                version_bytes: 0,
                since: None,
                begun: None,
            })
        });
        Ok(Self {
            name: guest.name,
            consistent: false,
            frozen: false,
            description: Value::Null,
            group: None,
            moment: None,
            disks: each.collect::<Result<_, JobError>>()?,
        })
    }
}

/// A guest whose disks are exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGuest {
    /// Its name.
    pub name: String,
    /// Its disks.
    pub disks: Vec<JobDisk>,
}

/// Where an export goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Next {
    pub(super) guest: usize,
    pub(super) disk: usize,
    pub(super) chunk: u64,
}

impl Next {
    /// The beginning of a guest.
    pub(super) fn begin(guest: usize) -> Self {
        Self {
            guest,
            ..Self::default()
        }
    }
}

/// A disk as a sealed version has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SealedDisk {
    /// The guest's name.
    pub guest: String,
    /// The disk's name.
    pub disk: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The digest of its content, in hexadecimal digits.
    pub digest: String,
}

/// A version that is complete on the devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// Its number.
    pub version: u64,
    /// When the parcel was sealed with it, in seconds since 1970.
    pub time: u64,
    /// Bytes that are used of the fullest device.
    pub device_bytes: u64,
    /// All disks.
    pub disks: Vec<SealedDisk>,
}

/// The journey of the devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shipment {
    /// Who carries them.
    pub courier: String,
    /// The courier's number for it.
    pub number: String,
    /// When they leave.
    pub date: Date,
    /// When they are expected to arrive.
    pub arrives: Option<Date>,
}

/// What the destination has reported, and this host has compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirmation {
    /// The version whose disks are all there.
    pub version: u64,
    /// When they were imported, in seconds since 1970.
    pub imported: u64,
    /// When the report was checked, in seconds since 1970.
    pub checked: u64,
}

/// Versions of guests' disks, and how far the last one has come.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Copied {
    pub(super) guests: Vec<KnownGuest>,
    /// The version that is exported, or was.
    pub(super) version: u64,
    pub(super) next: Next,
    /// Whether only guests whose last version is of no moment get this one.
    #[serde(default)]
    pub(super) consolidates: bool,
    /// Whether the version before is no version, but what was found at the destination: comparing
    /// with it takes too long for a moment.
    #[serde(default)]
    pub(super) is_first: bool,
}

impl Copied {
    fn is_possible(&self) -> bool {
        let disks = self.guests.iter().flat_map(|guest| &guest.disks);
        let mut sizes = disks.map(|disk| disk.bytes);
        (1..u64::MAX).contains(&self.version)
            && sizes.all(|bytes| bytes <= DISK_BYTES_MAX)
            && self.next.chunk <= DISK_BYTES_MAX / CHUNK_BYTES as u64
    }
}

/// What is kept of a parcel.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ParcelDocument {
    pub(super) name: String,
    pub(super) to: String,
    /// The data key: the file can be read by its owner alone.
    pub(super) key: String,
    pub(super) devices: Vec<PathBuf>,
    /// `None` until the first header is durable.
    pub(super) position: Option<Position>,
    pub(super) sealed: bool,
    /// The number of devices that may be lost.
    #[serde(default)]
    pub(super) parity: u8,
    /// When it was made, in seconds since 1970; 0 if an earlier program has made it.
    #[serde(default)]
    pub(super) created: u64,
    /// When the first header was written, in seconds since 1970.
    #[serde(default)]
    pub(super) begun: Option<u64>,
    /// How much of each device is used.
    #[serde(default)]
    pub(super) limit: Option<u64>,
    /// Its id, from the first seal on.
    #[serde(default)]
    pub(super) parcel: Option<ParcelId>,
    /// All versions that were sealed, in their order.
    #[serde(default)]
    pub(super) seals: Vec<Seal>,
    #[serde(default)]
    pub(super) shipped: Option<Shipment>,
    #[serde(default)]
    pub(super) confirmed: Option<Confirmation>,
}

impl Document for ParcelDocument {
    type Sink = Writer;
    const PATCHES: bool = false;

    fn sync(&mut self, writer: &mut Writer) -> Result<(), JobError> {
        self.position = Some(writer.sync()?);
        Ok(())
    }

    fn is_possible(&self) -> bool {
        let ends = |position: Position| position.header < position.end && position.end <= CELLS_MAX;
        self.position.is_none_or(ends)
    }
}

/// The file of a job.
#[derive(Serialize, Deserialize)]
struct Whole<C, D> {
    #[serde(flatten)]
    copied: C,
    #[serde(flatten)]
    document: D,
}

/// Reads the document in a job's folder.
pub(super) fn read<D: Document>(folder: &Path) -> Result<(Copied, D), JobError> {
    let path = folder.join(DOCUMENT);
    let file = File::open(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => JobError::Unknown(folder.to_path_buf()),
        _ => io_at(&path)(error),
    })?;
    let mut text = Zeroizing::new(Vec::new());
    let read = file.take(DOCUMENT_BYTES_MAX + 1).read_to_end(&mut text);
    read.map_err(io_at(&path))?;
    if text.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(JobError::Long(path));
    }
    let whole = serde_json::from_slice(&text).and_then(|whole: Whole<Copied, D>| {
        match whole.copied.is_possible() && whole.document.is_possible() {
            true => Ok((whole.copied, whole.document)),
            false => Err(serde_json::Error::custom("it has impossible numbers")),
        }
    });
    whole.map_err(|error| JobError::Document { path, error })
}

/// Writes it durably, readable by its owner alone.
pub(super) fn save<D: Document>(
    folder: &Path,
    copied: &Copied,
    document: &D,
) -> Result<(), JobError> {
    let path = folder.join(DOCUMENT);
    let new = folder.join(".job.json.new");
    let fails = io_at(&path);
    let whole = Whole { copied, document };
    let text = serde_json::to_vec_pretty(&whole).map(Zeroizing::new);
    let text = text.map_err(|error| JobError::Document {
        path: path.clone(),
        error,
    })?;
    if text.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(JobError::Long(path.clone()));
    }
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(&new).map_err(&fails)?;
    file.write_all(&text).map_err(&fails)?;
    file.sync_all().map_err(&fails)?;
    fs::rename(&new, &path).map_err(&fails)?;
    let folder = File::open(folder).map_err(&fails)?;
    folder.sync_all().map_err(&fails)
}
