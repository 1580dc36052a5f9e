//! Where a repository's objects are: whole values under keys, in a folder or in an S3-compatible
//! store.

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

/// Of what version the repository is.
pub(crate) const FORMAT: &str = "longhaul-images";

/// An object of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// The repository's version; it is there from the beginning.
    Format,
    /// An image's manifest.
    Image(ImageId),
    /// The id of the image of that name.
    Name(ImageName),
    /// A stripe's content, compressed.
    Stripe(Digest),
    /// Somebody at work in the repository.
    Marker(String),
}

impl Key {
    /// The folder that it is in, and its name there.
    pub fn place(&self) -> (String, String) {
        match self {
            Self::Format => (String::new(), FORMAT.to_owned()),
            Self::Image(id) => (Listing::Images.folder(), id.to_string()),
            Self::Name(name) => (Listing::Names.folder(), name.to_string()),
            Self::Stripe(digest) => (Listing::Stripes(digest.0[0]).folder(), digest.to_string()),
            Self::Marker(name) => (Listing::Markers.folder(), name.clone()),
        }
    }

    /// In the words of an error.
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
    /// All who are at work.
    Markers,
}

impl Listing {
    /// Their folder.
    pub fn folder(self) -> String {
        match self {
            Self::Images => "images".to_owned(),
            Self::Names => "names".to_owned(),
            Self::Stripes(first) => format!("stripes/{first:02x}"),
            Self::Markers => "markers".to_owned(),
        }
    }
}

/// What a store did not do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// There is no such object, for certain.
    #[error("{what} is not in the image repository {store}")]
    Missing {
        /// The object.
        what: String,
        /// The store.
        store: String,
    },
    /// The store does not answer: it may later.
    #[error("the image repository {store} cannot be reached: {reason}")]
    Away {
        /// The store.
        store: String,
        /// Why not.
        reason: String,
    },
    /// The object is longer than one of its kind can be.
    #[error("{what} in the image repository {store} is damaged: it is too long")]
    TooLong {
        /// The object.
        what: String,
        /// The store.
        store: String,
    },
    /// The store said no.
    #[error("cannot {what} in the image repository {store}: {reason}")]
    Refused {
        /// What was tried.
        what: String,
        /// The store.
        store: String,
        /// Why not.
        reason: String,
    },
}

/// A store of objects. Several threads, processes and hosts use it at once.
///
/// What one of them has put, all others get from then on, and list.
pub trait Store: Debug + Send + Sync {
    /// Where it is, for people.
    fn place(&self) -> String;
    /// The whole object, at most so many bytes long.
    fn get(&self, key: &Key, length_max: u64) -> Result<Vec<u8>, StoreError>;
    /// Whether there is such an object.
    fn has(&self, key: &Key) -> Result<bool, StoreError>;
    /// Puts an object there, in place of one that is there: others see all of it or nothing.
    /// Stripes are durable only after [`Store::settle`].
    fn put(&self, key: &Key, bytes: &[u8]) -> Result<(), StoreError>;
    /// Makes durable which stripes this store was told of since it was made: by `put`, or by `has`.
    fn settle(&self) -> Result<(), StoreError>;
    /// Removes an object, if it is there. Removed images are gone for good; others may be there
    /// again after a power cut.
    fn remove(&self, key: &Key) -> Result<(), StoreError>;
    /// The names of objects in a folder, without an order.
    fn list(&self, listing: Listing) -> Result<Vec<String>, StoreError>;
    /// Removes what is left of puts that came to no end. Nobody puts anything but markers meanwhile.
    fn tidy(&self) -> Result<(), StoreError>;
}
