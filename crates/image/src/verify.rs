//! Verifies a whole image in its repository.

use crate::manifest::{Manifest, STRIPE_BYTES, length};
use crate::name::{Digest, ImageId};
use crate::repository::{Repository, RepositoryError, StripeError};
use crate::store::StoreError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Threads that read: a remote store answers each request with a delay.
const WORKERS: usize = 8;

/// A reason why an image could not be verified.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// The repository failed, or the image's manifest is damaged.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// The store failed meanwhile.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A thread of the verification panicked.
    #[error("a thread that verified ended unexpectedly")]
    Thread,
}

/// The result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Verified {
    /// Stripes that were read.
    pub stripes: u64,
    /// Number of stripes that are missing.
    pub missing: u64,
    /// Number of stripes with other content.
    pub damaged: u64,
    /// The offset of the first such stripe in the image.
    pub first_bad_offset: Option<u64>,
}

impl Verified {
    /// Returns whether the image is intact.
    pub fn is_good(&self) -> bool {
        self.missing + self.damaged == 0
    }

    fn note(&mut self, offset: u64) {
        let first = self.first_bad_offset.unwrap_or(offset);
        self.first_bad_offset = Some(first.min(offset));
    }
}

/// Reads a whole image. `progress` is called by several threads with the number of stripes that
/// were read, and their total.
pub fn verify(
    repository: &Repository,
    id: ImageId,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Verified, VerifyError> {
    let manifest = repository.manifest(id)?;
    let stripes: Vec<_> = manifest.stripes().collect();
    let next = AtomicUsize::new(0);
    let verified = Mutex::new(Verified::default());
    let work = || {
        let mut buffer = vec![0; STRIPE_BYTES as usize];
        while let Some((index, digest)) = stripes.get(next.fetch_add(1, Ordering::Relaxed)) {
            let found = look(repository, &manifest, *index, *digest, &mut buffer);
            if found.is_err() {
                // The other threads need not continue.
                next.store(stripes.len(), Ordering::Relaxed);
            }
            let found = found?;
            let mut verified = verified.lock().unwrap_or_else(PoisonError::into_inner);
            verified.stripes += 1;
            match found {
                Found::Good => {}
                Found::Missing => verified.missing += 1,
                Found::Damaged => verified.damaged += 1,
            }
            if found != Found::Good {
                verified.note(manifest.range(*index).start);
            }
            progress(verified.stripes, stripes.len() as u64);
        }
        Ok::<(), StoreError>(())
    };
    thread::scope(|scope| {
        let workers = [(); WORKERS].map(|()| scope.spawn(work));
        let results = workers.map(thread::ScopedJoinHandle::join);
        for result in results {
            result.map_err(|_| VerifyError::Thread)??;
        }
        Ok::<(), VerifyError>(())
    })?;
    Ok(verified
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    Good,
    Missing,
    Damaged,
}

fn look(
    repository: &Repository,
    manifest: &Manifest,
    index: u32,
    digest: Digest,
    buffer: &mut [u8],
) -> Result<Found, StoreError> {
    let bytes = length(&manifest.range(index)) as usize;
    match repository.stripe(digest, &mut buffer[..bytes]) {
        Ok(_) => Ok(Found::Good),
        Err(StripeError::Damaged { .. }) => Ok(Found::Damaged),
        Err(StripeError::Store(StoreError::Missing { .. })) => Ok(Found::Missing),
        Err(StripeError::Store(error)) => Err(error),
    }
}
