//! What a job has done, and what it will do next.

use super::Job;
use super::document::{Confirmation, KnownDisk, Seal, Shipment};
use super::error::JobError;
use super::moment;
use crate::device::Device;
use crate::header::{Header, ParcelId};
use crate::key::Fingerprint;
use crate::reader::header_at;
use crate::record::CHUNK_BYTES;
use longhaul_storage::disk::{Disk as _, RawDisk};
use serde::Serialize;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What an export, or a top-up, will do with a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "does")]
pub enum Reading {
    /// All is read, and what is not zeros is written: no version has the disk.
    Full {
        /// Where it goes on.
        from: u64,
        /// Bytes that are read.
        bytes: u64,
    },
    /// All is read and compared with the digests of the version before; what differs is written.
    Compare {
        /// Where it goes on.
        from: u64,
        /// Bytes that are read.
        bytes: u64,
        /// The version.
        with: u64,
    },
    /// Only what may have changed since the version before is read: its writes are tracked.
    Changed {
        /// Bytes that may have changed so far.
        bytes: u64,
        /// The version.
        with: u64,
    },
    /// The version that is exported has it.
    Done,
}

impl Reading {
    /// Returns the number of bytes that are read.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Full { bytes, .. }
            | Self::Compare { bytes, .. }
            | Self::Changed { bytes, .. } => *bytes,
            Self::Done => 0,
        }
    }
}

/// A disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// Its file, or its volume.
    pub path: PathBuf,
    /// Its size when the parcel last looked at it.
    pub bytes: u64,
    /// Its size now, if it is there.
    pub now_bytes: Option<u64>,
    /// What it has allocated now.
    pub allocated_bytes: Option<u64>,
    /// Why it cannot be read.
    pub error: Option<String>,
    /// What the next export or top-up does.
    pub next: Reading,
}

/// A guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GuestStatus {
    /// Its name.
    pub name: String,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
}

/// Whether a device is there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "state")]
pub enum Attachment {
    /// It is there, and its header has the proof of the parcel's key.
    Attached {
        /// The id of its parcel.
        parcel: ParcelId,
        /// The fingerprint of the key that it needs.
        key: Fingerprint,
        /// Bytes up to the last cell that was written.
        used_bytes: u64,
    },
    /// Nothing can be read there.
    Absent {
        /// Why.
        why: String,
    },
    /// Something else is there.
    Other {
        /// What.
        what: String,
    },
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeviceStatus {
    /// Its number.
    pub device: usize,
    /// Where it was last.
    pub path: PathBuf,
    /// Whether it is there.
    #[serde(flatten)]
    pub attachment: Attachment,
}

/// A parcel as its source knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Its id, if it was sealed once.
    pub parcel: Option<ParcelId>,
    /// The site that it goes to.
    pub to: String,
    /// When it was made, in seconds since 1970, if that is known.
    pub created: Option<u64>,
    /// When the devices were begun, in seconds since 1970, if that is known.
    pub begun: Option<u64>,
    /// Whether the devices were begun.
    pub is_begun: bool,
    /// The number of devices that may be lost.
    pub parity: u8,
    /// The fingerprint of its data key.
    pub key: Fingerprint,
    /// The version that is exported, or was.
    pub version: u64,
    /// Whether the version is complete on the devices.
    pub sealed: bool,
    /// The guests.
    pub guests: Vec<GuestStatus>,
    /// The devices; none until they are named.
    pub devices: Vec<DeviceStatus>,
    /// The versions that were sealed, without their disks.
    pub seals: Vec<Seal>,
    /// The journey of the devices.
    pub shipped: Option<Shipment>,
    /// What the destination has confirmed of an earlier or the last version.
    pub confirmed: Option<Confirmation>,
    /// Whether the destination has confirmed all disks of the last version.
    pub is_confirmed: bool,
}

/// Returns the bytes that a file has allocated, or the size of a volume.
fn allocated(path: &Path, size: u64) -> Option<u64> {
    let file = fs::metadata(path).ok()?;
    match file.file_type().is_block_device() {
        true => Some(size),
        false => Some(file.blocks().saturating_mul(512).min(size)),
    }
}

impl Job {
    /// Says what was done, and what comes next. It changes nothing, and reads a few cells of each
    /// device.
    ///
    /// # Errors
    /// When the key cannot be used.
    pub fn status(&self) -> Result<Status, JobError> {
        let (state, document) = (&self.copier.state, &self.copier.document);
        let guests = state.guests.iter().enumerate().map(|(number, guest)| {
            let disks = guest.disks.iter().enumerate();
            GuestStatus {
                name: guest.name.clone(),
                disks: disks
                    .map(|(at, known)| self.disk_status((number, at), (&guest.name, known)))
                    .collect(),
            }
        });
        let key = self.key.fingerprint()?;
        let devices = document.devices.iter().enumerate();
        let devices = devices.map(|(device, path)| DeviceStatus {
            device,
            path: path.clone(),
            attachment: self.attachment(device, path, key),
        });
        Ok(Status {
            name: document.name.clone(),
            parcel: document.parcel,
            to: document.to.clone(),
            created: Some(document.created).filter(|time| *time > 0),
            begun: document.begun,
            is_begun: document.position.is_some(),
            parity: document.parity,
            key,
            version: state.version,
            sealed: document.sealed,
            guests: guests.collect(),
            devices: devices.collect(),
            seals: document.seals.clone(),
            shipped: document.shipped.clone(),
            confirmed: document.confirmed.clone(),
            is_confirmed: self.is_confirmed(),
        })
    }

    /// Returns whether the destination has confirmed all disks as they were sealed last.
    pub fn is_confirmed(&self) -> bool {
        let document = &self.copier.document;
        let confirmed = document.confirmed.as_ref().map(|it| it.version);
        document.sealed && confirmed == Some(self.copier.state.version) && self.added().is_none()
    }

    fn disk_status(&self, at: (usize, usize), (guest, known): (&str, &KnownDisk)) -> DiskStatus {
        let opened = RawDisk::open_to_read(&known.disk.path);
        let now = opened.as_ref().ok().map(|disk| disk.size_bytes());
        DiskStatus {
            name: known.disk.name.clone(),
            path: known.disk.path.clone(),
            bytes: known.bytes,
            now_bytes: now,
            allocated_bytes: now.and_then(|size| allocated(&known.disk.path, size)),
            error: opened.err().map(|error| error.to_string()),
            next: self.reading(at, (guest, known), now),
        }
    }

    fn reading(
        &self,
        at: (usize, usize),
        (guest, known): (&str, &KnownDisk),
        now: Option<u64>,
    ) -> Reading {
        let (state, document) = (&self.copier.state, &self.copier.document);
        let next = state.next;
        // A top-up looks at the size again, and so does a beginning.
        let looks_again = document.sealed || document.position.is_none();
        let bytes = match looks_again {
            true => now.unwrap_or(known.bytes),
            false => known.bytes,
        };
        let is_before = at < (next.guest, next.disk);
        let from = match (document.sealed, is_before, at == (next.guest, next.disk)) {
            (true, _, _) | (false, false, false) => 0,
            (false, true, _) => return Reading::Done,
            (false, false, true) => (next.chunk * CHUNK_BYTES as u64).min(bytes),
        };
        let last = match document.sealed {
            true => state.version,
            false => state.version - 1,
        };
        let bytes = bytes - from;
        let changed = moment::changed_bytes(&*self.copier.tracking, guest, known);
        match (self.copier.digests(at, last).exists(), changed) {
            (true, Some(bytes)) => Reading::Changed { bytes, with: last },
            (true, None) => Reading::Compare {
                from,
                bytes,
                with: last,
            },
            (false, _) => Reading::Full { from, bytes },
        }
    }

    fn attachment(&self, number: usize, path: &Path, key: Fingerprint) -> Attachment {
        let absent = |why: String| Attachment::Absent { why };
        if self.copier.document.position.is_none() {
            return absent("nothing was written to it".to_owned());
        }
        let device = match Device::open_on(&*self.media, path, false) {
            Ok(device) => device,
            Err(error) => return absent(error.to_string()),
        };
        let other = |what: &str| Attachment::Other {
            what: what.to_owned(),
        };
        let is_proved = |parcel: &ParcelId, proof: &crate::header::Proof| {
            let headers = self.key.of_headers(parcel);
            headers.is_ok_and(|headers| proof.is_by(&headers))
        };
        match header_at(&device, 0) {
            Err(error) => absent(error.to_string()),
            Ok(None) => other("it is no device of a parcel"),
            Ok(Some((Header { name, key: its, .. }, _))) if its != key => Attachment::Other {
                what: format!("it is a device of another parcel, {name}, with the key {its}"),
            },
            Ok(Some((header, proof))) if !is_proved(&header.parcel, &proof) => {
                other("its header was altered")
            }
            Ok(Some((header, _))) if usize::from(header.device) != number => Attachment::Other {
                what: format!("it is device {} of this parcel", header.device),
            },
            Ok(Some((header, _))) => match device.written() {
                Err(error) => absent(error.to_string()),
                Ok(cells) => Attachment::Attached {
                    parcel: header.parcel,
                    key: header.key,
                    used_bytes: cells * crate::cell::CELL_BYTES as u64,
                },
            },
        }
    }
}
