//! Why a job cannot go on.

use crate::device::DeviceError;
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
    /// It was interrupted before anything was written.
    #[error(
        "the export of {name} was interrupted before it began: remove {} and what it has on its \
         devices, and begin again",
        folder.display()
    )]
    NotBegun {
        /// The parcel.
        name: String,
        /// The job's folder.
        folder: PathBuf,
    },
    /// A guest or a disk is named twice.
    #[error("the {0} {1} is named twice")]
    Twice(&'static str, String),
    /// Another command works on it.
    #[error("another command works on the parcel {0}: wait until it has ended")]
    Busy(String),
    /// There is none.
    #[error("this host has exported no such parcel: there is no {}", .0.display())]
    Unknown(PathBuf),
    /// Only a sealed parcel is topped up.
    #[error("the export of {0} is not complete: continue it first")]
    NotSealed(String),
    /// There is one of this name.
    #[error("there is a parcel {0}: it is continued without guests and devices")]
    Exists(String),
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
