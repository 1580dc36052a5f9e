//! A repository: images, their names and their stripes, in a store.

use crate::manifest::{MANIFEST_BYTES_MAX, Manifest, ManifestError};
use crate::name::{Digest, ImageId, ImageName, PREFIX_DIGITS_MIN, is_prefix};
use crate::store::{Key, Listing, Store, StoreError};
use crate::stripe::{STORED_BYTES_MAX, StripeFault, decode_stripe};
use std::sync::Arc;

/// The content of the object that identifies the format.
const FORMAT_TEXT: &str = "longhaul image repository 1\n";
/// Longest text of a small object.
const TEXT_BYTES_MAX: u64 = 4096;

/// A reason why a repository, or one of its images, was not opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RepositoryError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store has no repository.
    #[error("there is no image repository in {store} yet: the first import makes it")]
    None {
        /// The store.
        store: String,
    },
    /// It is of another version.
    #[error(
        "{store} holds an image repository that this Longhaul does not know ({said:?}): use a \
         newer one"
    )]
    Version {
        /// The store.
        store: String,
        /// Its version text.
        said: String,
    },
    /// The stored manifest of an image is damaged.
    #[error(
        "the manifest of image {} in {store} is damaged: {reason}; remove the image, and import it \
         again", id.short()
    )]
    Damaged {
        /// The image.
        id: ImageId,
        /// The store.
        store: String,
        /// The fault.
        reason: ManifestFault,
    },
}

/// A fault of a stored manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ManifestFault {
    /// It does not match the image's id.
    #[error("it holds something else than its id says")]
    Id,
    /// It is not a manifest.
    #[error(transparent)]
    Form(#[from] ManifestError),
}

/// A reason why an image was not found.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FindError {
    /// The repository failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such image.
    #[error("no image in {store} is called {wanted}, and no id begins with that")]
    Unknown {
        /// The requested name or id.
        wanted: String,
        /// The store.
        store: String,
    },
    /// Several images match.
    #[error("{count} images in {store} begin with {wanted}: give more of the id")]
    Several {
        /// The requested id.
        wanted: String,
        /// The store.
        store: String,
        /// Number of matches.
        count: usize,
    },
}

/// A reason why a stripe was not read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StripeError {
    /// The store failed, or does not have it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The stored content is not the stripe.
    #[error("stripe {digest} in {store} is damaged: {fault}")]
    Damaged {
        /// The stripe.
        digest: Digest,
        /// The store.
        store: String,
        /// The fault.
        fault: StripeFault,
    },
}

/// A repository.
#[derive(Debug, Clone)]
pub struct Repository {
    store: Arc<dyn Store>,
}

impl Repository {
    /// Opens the repository in a store.
    pub fn open(store: Arc<dyn Store>) -> Result<Self, RepositoryError> {
        let repository = Self { store };
        match repository.text(&Key::Format)? {
            Some(said) if said == FORMAT_TEXT => Ok(repository),
            Some(said) => Err(RepositoryError::Version {
                store: repository.place(),
                said: said.trim_end().chars().take(80).collect(),
            }),
            None => Err(RepositoryError::None {
                store: repository.place(),
            }),
        }
    }

    /// Returns the repository in a store that was opened before, without any request.
    pub(crate) fn known(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Opens it, and creates it where there is none.
    pub fn open_or_make(store: Arc<dyn Store>) -> Result<Self, RepositoryError> {
        match Self::open(store.clone()) {
            Err(RepositoryError::None { .. }) => {
                store.put(&Key::Format, FORMAT_TEXT.as_bytes())?;
                Self::open(store)
            }
            other => other,
        }
    }

    /// Returns its place, for display.
    pub fn place(&self) -> String {
        self.store.place()
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Returns a small object's text; `None` where there is no such object.
    fn text(&self, key: &Key) -> Result<Option<String>, StoreError> {
        match self.store.get(key, TEXT_BYTES_MAX) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns all images.
    pub fn images(&self) -> Result<Vec<ImageId>, StoreError> {
        let names = self.store.list(Listing::Images)?;
        // Foreign names are ignored.
        let mut images: Vec<ImageId> = names.iter().filter_map(|name| name.parse().ok()).collect();
        images.sort();
        Ok(images)
    }

    /// Returns all names with their images.
    pub fn names(&self) -> Result<Vec<(ImageName, ImageId)>, StoreError> {
        let mut names = Vec::new();
        for name in self.store.list(Listing::Names)? {
            let Ok(name) = name.parse::<ImageName>() else {
                continue;
            };
            names.extend(self.named(&name)?.map(|id| (name, id)));
        }
        names.sort();
        Ok(names)
    }

    /// Returns the image of a name.
    pub fn named(&self, name: &ImageName) -> Result<Option<ImageId>, StoreError> {
        let text = self.text(&Key::Name(name.clone()))?;
        Ok(text.and_then(|text| text.trim_end().parse().ok()))
    }

    /// Returns the image with that name, or whose id begins with that text.
    pub fn find(&self, wanted: &str) -> Result<ImageId, FindError> {
        if let Ok(name) = wanted.parse::<ImageName>()
            && let Some(id) = self.named(&name)?
        {
            return Ok(id);
        }
        let mut found = Vec::new();
        if wanted.len() >= PREFIX_DIGITS_MIN && is_prefix(wanted) {
            found = self.images()?;
            found.retain(|id| id.to_string().starts_with(wanted));
        }
        let (wanted, store) = (wanted.to_owned(), self.place());
        match found[..] {
            [id] => Ok(id),
            [] => Err(FindError::Unknown { wanted, store }),
            _ => Err(FindError::Several {
                wanted,
                store,
                count: found.len(),
            }),
        }
    }

    /// Returns an image's manifest as stored, verified.
    pub(crate) fn manifest_bytes(
        &self,
        id: ImageId,
    ) -> Result<(Manifest, Vec<u8>), RepositoryError> {
        let damaged = |reason| RepositoryError::Damaged {
            id,
            store: self.place(),
            reason,
        };
        let bytes = match self.store.get(&Key::Image(id), MANIFEST_BYTES_MAX) {
            Err(StoreError::TooLong { .. }) => return Err(damaged(ManifestFault::Id)),
            bytes => bytes?,
        };
        let manifest = read_manifest(id, &bytes).map_err(damaged)?;
        Ok((manifest, bytes))
    }

    /// Returns an image's manifest.
    pub fn manifest(&self, id: ImageId) -> Result<Manifest, RepositoryError> {
        Ok(self.manifest_bytes(id)?.0)
    }

    /// Fills a buffer of the stripe's length with its content, which is undefined after an error.
    /// Returns how many bytes were read for it.
    pub fn stripe(&self, digest: Digest, content: &mut [u8]) -> Result<u64, StripeError> {
        let damaged = |fault| StripeError::Damaged {
            digest,
            store: self.place(),
            fault,
        };
        match self.store.get(&Key::Stripe(digest), STORED_BYTES_MAX) {
            Err(StoreError::TooLong { .. }) => Err(damaged(StripeFault::Compressed)),
            stored => {
                let stored = stored?;
                decode_stripe(&stored, digest, content).map_err(damaged)?;
                Ok(stored.len() as u64)
            }
        }
    }
}

/// Parses the manifest of that image, if these bytes are it.
pub(crate) fn read_manifest(id: ImageId, bytes: &[u8]) -> Result<Manifest, ManifestFault> {
    if ImageId(Digest::of(bytes)) != id {
        return Err(ManifestFault::Id);
    }
    Ok(Manifest::parse(bytes)?)
}
