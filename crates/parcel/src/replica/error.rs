//! Why a replica does not take something.

use crate::record::RecordError;
use std::io;
use std::path::{Path, PathBuf};

/// Why a replica does not take something.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// Its document cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        error: serde_json::Error,
    },
    /// There is a replica of this guest.
    #[error("there is a replica of {0} already")]
    Exists(String),
    /// Another process uses it.
    #[error("the replica of {0} is in use: a version arrives, or one is restored")]
    Busy(String),
    /// What arrives is not one of the format.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// What arrives does not belong to this replica.
    #[error("what arrives contradicts the replica: {0}")]
    Contradiction(&'static str),
    /// A version would not have the digest that it says.
    #[error("{0} would not have the digest of its version")]
    Digest(String),
    /// A version does not fit.
    #[error(
        "the next version may take {} MiB more in {}, and its file system has {} MiB free: make \
         room",
        needed.div_ceil(1 << 20), folder.display(), free >> 20
    )]
    Room {
        /// Where it goes.
        folder: PathBuf,
        /// The bytes that it may take there.
        needed: u64,
        /// The bytes that are free.
        free: u64,
    },
    /// The images were replaced by other files while a version arrived.
    #[error("its images were replaced while a version arrived")]
    Replaced,
    /// There is no such version.
    #[error("the replica has no version {0}")]
    NoVersion(u64),
}

/// Returns what makes errors of this file.
pub(super) fn io_at(path: &Path) -> impl Fn(io::Error) -> ReplicaError {
    let path = path.to_path_buf();
    move |error| ReplicaError::Io {
        path: path.clone(),
        error,
    }
}
