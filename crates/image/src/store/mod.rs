//! Stores of a repository's objects: whole values under keys, in a folder or in an S3-compatible
//! service.

mod folder;
#[cfg(feature = "s3")]
mod http;
mod place;
#[cfg(feature = "s3")]
mod s3;

pub use folder::FolderStore;
pub use place::{Place, PlaceError};
#[cfg(feature = "s3")]
pub use s3::{S3Place, S3SetupError, S3Store};

use crate::name::{Digest, ImageId, ImageName};
use std::fmt::Debug;

/// The name of the object with the repository's version.
pub(crate) const FORMAT: &str = "longhaul-images";

/// An object of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// The repository's version; it exists from the beginning.
    Format,
    /// An image's manifest.
    Image(ImageId),
    /// The id of the image of that name.
    Name(ImageName),
    /// A stripe's content, compressed.
    Stripe(Digest),
    /// A marker of a process that works in the repository.
    Marker(String),
}

impl Key {
    /// Returns the object's folder, and its name there.
    pub fn place(&self) -> (String, String) {
        match self {
            Self::Format => (String::new(), FORMAT.to_owned()),
            Self::Image(id) => (Listing::Images.folder(), id.to_string()),
            Self::Name(name) => (Listing::Names.folder(), name.to_string()),
            Self::Stripe(digest) => (Listing::Stripes(digest.0[0]).folder(), digest.to_string()),
            Self::Marker(name) => (Listing::Markers.folder(), name.clone()),
        }
    }

    /// Returns a description for errors.
    pub(crate) fn words(&self) -> String {
        match self {
            Self::Format => "the repository's version".to_owned(),
            Self::Image(id) => format!("image {}", id.short()),
            Self::Name(name) => format!("the name {name}"),
            Self::Stripe(digest) => format!("stripe {digest}"),
            Self::Marker(name) => format!("the marker {name}"),
        }
    }
}

/// Keys that are listed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// All images.
    Images,
    /// All names.
    Names,
    /// The stripes whose digests begin with this byte.
    Stripes(u8),
    /// All markers.
    Markers,
}

impl Listing {
    /// Returns their folder.
    pub fn folder(self) -> String {
        match self {
            Self::Images => "images".to_owned(),
            Self::Names => "names".to_owned(),
            Self::Stripes(first) => format!("stripes/{first:02x}"),
            Self::Markers => "markers".to_owned(),
        }
    }
}

/// An error of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The object does not exist, for certain.
    #[error("{what} is not in the image repository {store}")]
    Missing {
        /// The object.
        what: String,
        /// The store.
        store: String,
    },
    /// The store does not answer, and may answer later.
    #[error("the image repository {store} cannot be reached: {reason}")]
    Away {
        /// The store.
        store: String,
        /// The reason.
        reason: String,
    },
    /// The object is longer than its kind permits.
    #[error("{what} in the image repository {store} is damaged: it is too long")]
    TooLong {
        /// The object.
        what: String,
        /// The store.
        store: String,
    },
    /// The store refused.
    #[error("cannot {what} in the image repository {store}: {reason}")]
    Refused {
        /// The operation.
        what: String,
        /// The store.
        store: String,
        /// The reason.
        reason: String,
    },
}

/// A store of objects, used by several threads, processes and hosts at once.
///
/// An object that one of them has put is visible to all others from then on, and listed.
pub trait Store: Debug + Send + Sync {
    /// Returns its place, for display.
    fn place(&self) -> String;
    /// Returns a whole object of at most `length_max` bytes.
    fn get(&self, key: &Key, length_max: u64) -> Result<Vec<u8>, StoreError>;
    /// Returns whether an object exists.
    fn has(&self, key: &Key) -> Result<bool, StoreError>;
    /// Puts an object, replacing an existing one atomically. Stripes are durable only after
    /// [`Store::settle`].
    fn put(&self, key: &Key, bytes: &[u8]) -> Result<(), StoreError>;
    /// Makes all stripes durable that `put` or `has` has confirmed since this store was created.
    fn settle(&self) -> Result<(), StoreError>;
    /// Removes an object, if it exists. Removed images are gone durably; other objects may reappear
    /// after a power cut.
    fn remove(&self, key: &Key) -> Result<(), StoreError>;
    /// Returns the names of objects in a folder, unordered.
    fn list(&self, listing: Listing) -> Result<Vec<String>, StoreError>;
    /// Removes the remains of interrupted puts. Only markers may be put meanwhile.
    fn tidy(&self) -> Result<(), StoreError>;
}
