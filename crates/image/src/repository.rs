//! A repository: images, their names and their stripes, in a store.

use crate::manifest::{MANIFEST_BYTES_MAX, Manifest, ManifestError};
use crate::name::{Digest, ImageId, ImageName, PREFIX_DIGITS_MIN, is_prefix};
use crate::store::{Key, Listing, Store, StoreError};
use crate::stripe::{STORED_BYTES_MAX, StripeFault, decode_stripe};
use std::sync::Arc;

/// What the object says that is there from the beginning.
const FORMAT_TEXT: &str = "longhaul image repository 1\n";
/// Longest text of a small object.
const TEXT_BYTES_MAX: u64 = 4096;

/// A repository that was not opened, or an image of one.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RepositoryError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is none.
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
        /// What it says of itself.
        said: String,
    },
    /// What stands for an image is something else.
    #[error(
        "the manifest of image {} in {store} is damaged: {reason}; remove the image, and import it \
         again", id.short()
    )]
    Damaged {
        /// The image.
        id: ImageId,
        /// The store.
        store: String,
        /// What is wrong.
        reason: ManifestFault,
    },
}

/// What is wrong with a stored manifest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ManifestFault {
    /// It is not the one.
    #[error("it holds something else than its id says")]
    Id,
    /// It is none.
    #[error(transparent)]
    Form(#[from] ManifestError),
}

/// An image that was not found.
#[derive(Debug, Clone, thiserror::Error)]
pub enum FindError {
    /// The repository failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such image.
    #[error("no image in {store} is called {wanted}, and no id begins with that")]
    Unknown {
        /// What was asked for.
        wanted: String,
        /// The store.
        store: String,
    },
    /// There are several.
    #[error("{count} images in {store} begin with {wanted}: give more of the id")]
    Several {
        /// What was asked for.
        wanted: String,
        /// The store.
        store: String,
        /// How many.
        count: usize,
    },
}

/// A stripe that was not read.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StripeError {
    /// The store failed, or does not have it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// What is there is not the stripe.
    #[error("stripe {digest} in {store} is damaged: {fault}")]
    Damaged {
        /// The stripe.
        digest: Digest,
        /// The store.
        store: String,
        /// What is wrong.
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

    /// The repository in a store that was opened before: nothing is asked of it yet.
    pub(crate) fn known(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Opens it, and makes it where there is none.
    pub fn open_or_make(store: Arc<dyn Store>) -> Result<Self, RepositoryError> {
        match Self::open(store.clone()) {
            Err(RepositoryError::None { .. }) => {
                store.put(&Key::Format, FORMAT_TEXT.as_bytes())?;
                Self::open(store)
            }
            other => other,
        }
    }

    /// Where it is, for people.
    pub fn place(&self) -> String {
        self.store.place()
    }

    pub(crate) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// A small object's text; none where there is no such object.
    fn text(&self, key: &Key) -> Result<Option<String>, StoreError> {
        match self.store.get(key, TEXT_BYTES_MAX) {
            Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
            Err(StoreError::Missing { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All images.
    pub fn images(&self) -> Result<Vec<ImageId>, StoreError> {
        let names = self.store.list(Listing::Images)?;
        // Other names are not ours.
        let mut images: Vec<ImageId> = names.iter().filter_map(|name| name.parse().ok()).collect();
        images.sort();
        Ok(images)
    }

    /// All names, and the images that they stand for.
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

    /// The image of a name.
    pub fn named(&self, name: &ImageName) -> Result<Option<ImageId>, StoreError> {
        let text = self.text(&Key::Name(name.clone()))?;
        Ok(text.and_then(|text| text.trim_end().parse().ok()))
    }

    /// The image of that name, or whose id begins so.
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

    /// An image's manifest as it is stored, checked.
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

    /// An image's manifest.
    pub fn manifest(&self, id: ImageId) -> Result<Manifest, RepositoryError> {
        Ok(self.manifest_bytes(id)?.0)
    }

    /// Fills a buffer, as long as the stripe, with a stripe's content; what is in it after an error
    /// means nothing. How many bytes were read for it is returned.
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

/// The manifest of that image, if these bytes are it.
pub(crate) fn read_manifest(id: ImageId, bytes: &[u8]) -> Result<Manifest, ManifestFault> {
    if ImageId(Digest::of(bytes)) != id {
        return Err(ManifestFault::Id);
    }
    Ok(Manifest::parse(bytes)?)
}
