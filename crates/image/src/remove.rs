//! Removes an image from a repository, with the stripes that no other image needs.

use crate::import::describe;
use crate::marker::{Marker, Owner, Work, others};
use crate::name::{Digest, ImageId};
use crate::repository::{Repository, RepositoryError};
use crate::store::{Key, Listing, StoreError};

/// A reason why an image was not removed, or not completely.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    /// The repository failed: the remaining stripes are removed by the next removal.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// An import is running; nothing was changed.
    #[error(
        "an image is being imported by {}, and may need what would be removed; nothing was removed",
        describe(owner.as_ref())
    )]
    Import {
        /// Its owner.
        owner: Option<Owner>,
    },
}

impl From<StoreError> for RemoveError {
    fn from(error: StoreError) -> Self {
        Self::Repository(error.into())
    }
}

/// The result of a removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Removed {
    /// Number of removed stripes.
    pub stripes: u64,
    /// Number of stripes that other images need.
    pub kept: u64,
}

/// Removes images, their names, and all stripes that no image needs.
///
/// Imports are not disturbed, unless they are to be `overruled`: then they fail, and have to begin
/// again. Readers of a removed image can no longer fetch the stripes that they have not read.
pub fn remove(
    repository: &Repository,
    images: &[ImageId],
    overrule: bool,
) -> Result<Removed, RemoveError> {
    let _marker = Marker::leave(repository, Work::Removal)?;
    for other in others(repository, Work::Import)? {
        if !overrule {
            return Err(RemoveError::Import { owner: other.owner });
        }
        other.remove(repository)?;
    }
    // The manifests of remaining images have to be readable: otherwise their stripes are unknown.
    let mut needed = Vec::new();
    for id in repository.images()? {
        if !images.contains(&id) {
            let manifest = repository.manifest(id)?;
            needed.extend(manifest.stripes().map(|(_, digest)| beginning(digest)));
        }
    }
    needed.sort_unstable();
    needed.dedup();
    for (name, id) in repository.names()? {
        if images.contains(&id) {
            repository.store().remove(&Key::Name(name))?;
        }
    }
    for id in images {
        repository.store().remove(&Key::Image(*id))?;
    }
    let mut removed = Removed::default();
    for first in 0..=u8::MAX {
        sweep(repository, first, &needed, &mut removed)?;
    }
    repository.store().tidy()?;
    Ok(removed)
}

/// Returns a prefix of a digest, which is enough: an unneeded stripe rarely has the prefix of a
/// needed one, and then it stays.
fn beginning(digest: Digest) -> u64 {
    let mut beginning = [0; 8];
    beginning.copy_from_slice(&digest.0[..8]);
    u64::from_be_bytes(beginning)
}

fn sweep(
    repository: &Repository,
    first: u8,
    needed: &[u64],
    removed: &mut Removed,
) -> Result<(), StoreError> {
    for name in repository.store().list(Listing::Stripes(first))? {
        // Foreign names are ignored.
        let Ok(digest) = name.parse::<Digest>() else {
            continue;
        };
        if needed.binary_search(&beginning(digest)).is_ok() {
            removed.kept += 1;
        } else {
            repository.store().remove(&Key::Stripe(digest))?;
            removed.stripes += 1;
        }
    }
    Ok(())
}
