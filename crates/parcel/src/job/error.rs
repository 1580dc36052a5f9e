//! Why a job cannot go on.

use super::document::Shipment;
use crate::device::DeviceError;
use crate::header::ParcelId;
use crate::key::KeyError;
use crate::reader::OpenError;
use crate::record::RecordError;
use crate::writer::WriteError;
use longhaul_storage::disk::OpenError as OpenDiskError;
use longhaul_storage::front::tracking::CheckpointError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a job cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Its folder, or a disk, cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] OpenDiskError),
    /// Its document cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        error: serde_json::Error,
    },
    /// Its document is longer than it can be.
    #[error("{} is longer than the document of a parcel can be", .0.display())]
    Long(PathBuf),
    /// A site cannot be called so.
    #[error("{0:?} is not a site: use 1 to 100 characters that can be printed")]
    Site(String),
    /// No device is named.
    #[error("the parcel {0} has no devices yet: name them")]
    NoDevices(String),
    /// A guest is not in the parcel.
    #[error("parcel {parcel} has no guest {guest}: add it with its disks, {guest}=IMAGE,IMAGE")]
    NoGuest {
        /// The parcel.
        parcel: String,
        /// The guest.
        guest: String,
    },
    /// No guest is named.
    #[error("the parcel {0} has no guests yet: add them first")]
    NoGuests(String),
    /// A guest, a disk or a device is named twice.
    #[error("the {0} {1} is named twice")]
    Twice(&'static str, String),
    /// Another command works on it.
    #[error("another command works on {0}: wait until it has ended")]
    Busy(String),
    /// There is none.
    #[error("this host has no such parcel: there is no {}", .0.display())]
    Unknown(PathBuf),
    /// Only a sealed parcel is topped up.
    #[error("the export of {0} is not complete: continue it first")]
    NotSealed(String),
    /// There is one of this name.
    #[error("this host has a parcel {0} already")]
    Exists(String),
    /// A disk is added to a guest of which the version that is exported has all others.
    #[error(
        "the export of {parcel} is past {guest}: seal the parcel first, then add the disk and top \
         it up"
    )]
    Past {
        /// The parcel.
        parcel: String,
        /// The guest.
        guest: String,
    },
    /// A disk is in no version yet.
    #[error("{disk} of {guest} was added after {parcel} was sealed: top the parcel up first")]
    Added {
        /// The parcel.
        parcel: String,
        /// The guest.
        guest: String,
        /// The disk.
        disk: String,
    },
    /// The devices are gone.
    #[error(
        "the devices of {parcel} have left: {} ({}) took them on {}", shipment.courier,
        shipment.number, shipment.date
    )]
    Shipped {
        /// The parcel.
        parcel: String,
        /// Their journey.
        shipment: Box<Shipment>,
    },
    /// There is no journey to take back.
    #[error("no shipment of {0} is noted")]
    NotShipped(String),
    /// What is noted of a journey cannot be.
    #[error("a shipment cannot have {0}")]
    Shipment(&'static str),
    /// A path has another device.
    #[error("{} is not a device of the parcel {parcel}", path.display())]
    OtherDevice {
        /// The parcel.
        parcel: String,
        /// The path.
        path: PathBuf,
    },
    /// A report is not about this parcel.
    #[error(
        "the report is about the parcel {name} ({id}), not about {parcel} of this host, or was \
         altered"
    )]
    OtherReport {
        /// This host's parcel.
        parcel: String,
        /// The parcel that the report is about.
        name: String,
        /// Its id.
        id: ParcelId,
    },
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The sealed parcel cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A moment of a guest's disks is lost.
    #[error("the disks cannot be exported as of one moment: {0}")]
    Moment(CheckpointError),
    /// The host of a replica is not reached, or does not take what is sent.
    #[error(transparent)]
    Link(io::Error),
    /// What is exported is not one of the format.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Returns what makes errors of this file.
pub(super) fn io_at(path: &Path) -> impl Fn(io::Error) -> JobError {
    let path = path.to_path_buf();
    move |error| JobError::Io {
        path: path.clone(),
        error,
    }
}
