//! Imports a disk into a repository: first the stripes that it lacks, then the manifest.

use crate::manifest::{Manifest, ManifestError, STRIPE_BYTES};
use crate::marker::{Marker, Owner, Work, others};
use crate::name::{Digest, ImageId, ImageName};
use crate::repository::Repository;
use crate::store::{Key, StoreError};
use crate::stripe::encode_stripe;
use longhaul_storage::disk::Disk;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Threads that read, compress and store: a remote store answers each request with a delay.
const WORKERS: usize = 8;
/// Extents that are queried at once.
const EXTENTS: usize = 1024;
/// Limit on the wait for a removal.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(600);
/// The time between two checks of it.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(200);

/// A reason why an image was not imported. Stripes stored so far are used by the next attempt, and
/// removed by the next removal.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The disk cannot be read.
    #[error("cannot read the disk at byte {offset}: {error}")]
    Read {
        /// The offset.
        offset: u64,
        /// The cause.
        error: io::Error,
    },
    /// No image can have this size.
    #[error("the disk cannot become an image: {0}")]
    Size(ManifestError),
    /// A stripe cannot be compressed.
    #[error("cannot compress what stands at byte {offset}: {error}")]
    Compress {
        /// The offset.
        offset: u64,
        /// The compressor's error.
        error: io::Error,
    },
    /// Another image has the name.
    #[error(
        "image {} is called {name} already: choose another name, or remove that image",
        id.short()
    )]
    NameTaken {
        /// The name.
        name: ImageName,
        /// The image with that name.
        id: ImageId,
    },
    /// A removal of images is running, and does not end.
    #[error(
        "images are being removed by {}: import again when that has ended", describe(owner.as_ref())
    )]
    Removal {
        /// Its owner.
        owner: Option<Owner>,
    },
    /// A removal meanwhile did not wait for this import.
    #[error("somebody removed images and did not wait for this import: import again")]
    Overruled,
}

/// Returns an owner as text.
pub(crate) fn describe(owner: Option<&Owner>) -> String {
    owner.map_or_else(|| "somebody".to_owned(), Owner::to_string)
}

/// The options of an import.
#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// The image's name.
    pub name: Option<ImageName>,
    /// Whether to store existing stripes again: they may be damaged.
    pub rewrite: bool,
}

/// The progress of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImportProgress {
    /// Bytes read of the disk, without holes.
    pub read_bytes: u64,
    /// Bytes to be read.
    pub total_bytes: u64,
    /// Bytes stored, compressed.
    pub stored_bytes: u64,
    /// Whether it waits for a removal.
    pub waits: bool,
}

/// An image that was imported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Imported {
    /// Its id.
    pub id: ImageId,
    /// The size of the disk.
    pub size_bytes: u64,
    /// Its content other than zeros, in whole stripes.
    pub content_bytes: u64,
    /// How much of that was new to the repository.
    pub new_bytes: u64,
    /// The compressed length of that.
    pub stored_bytes: u64,
}

/// Imports a disk into a repository. `progress` is called periodically, by several threads.
///
/// The disk must not be written meanwhile.
pub fn import(
    repository: &Repository,
    disk: &dyn Disk,
    options: &ImportOptions,
    progress: &(dyn Fn(ImportProgress) + Sync),
) -> Result<Imported, ImportError> {
    Manifest::new(disk.size_bytes(), &[]).map_err(ImportError::Size)?;
    let marker = Marker::leave(repository, Work::Import)?;
    wait_for_removals(repository, progress)?;
    // The same name for the same image is fine, but the image is not known yet.
    let taken = match &options.name {
        Some(name) => repository.named(name)?.map(|id| (name.clone(), id)),
        None => None,
    };
    let work = Import {
        repository,
        disk,
        rewrite: options.rewrite,
        progress,
        stripes: candidates(disk)?,
        next: AtomicUsize::new(0),
        failed: AtomicBool::new(false),
        read_bytes: AtomicU64::new(0),
        new_bytes: AtomicU64::new(0),
        stored_bytes: AtomicU64::new(0),
        found: Mutex::default(),
    };
    // A removal that did not wait also removes files that are being written.
    let because = |error| match (&error, marker.is_there()) {
        (ImportError::Store(_), Ok(false)) => ImportError::Overruled,
        _ => error,
    };
    let manifest = work.all().map_err(because)?;
    let id = manifest.id();
    if let Some((name, other)) = taken
        && other != id
    {
        return Err(ImportError::NameTaken { name, id: other });
    }
    publish(repository, &marker, &manifest, options.name.as_ref()).map_err(because)?;
    Ok(Imported {
        id,
        size_bytes: manifest.size_bytes(),
        content_bytes: manifest.stored_bytes(),
        new_bytes: work.new_bytes.into_inner(),
        stored_bytes: work.stored_bytes.into_inner(),
    })
}

/// Waits for removals that may not have seen this import's marker. Later ones give way to it.
fn wait_for_removals(
    repository: &Repository,
    progress: &(dyn Fn(ImportProgress) + Sync),
) -> Result<(), ImportError> {
    let begin = Instant::now();
    let first = others(repository, Work::Removal)?;
    loop {
        let mut now = others(repository, Work::Removal)?;
        now.retain(|removal| first.iter().any(|one| one.is_same(removal)));
        let Some(removal) = now.pop() else {
            return Ok(());
        };
        if begin.elapsed() >= REMOVAL_PATIENCE {
            let owner = removal.owner;
            return Err(ImportError::Removal { owner });
        }
        progress(ImportProgress {
            waits: true,
            ..ImportProgress::default()
        });
        thread::sleep(REMOVAL_INTERVAL);
    }
}

/// Publishes the image, once all of its stripes are durable.
fn publish(
    repository: &Repository,
    marker: &Marker<'_>,
    manifest: &Manifest,
    name: Option<&ImageName>,
) -> Result<(), ImportError> {
    let store = repository.store();
    store.settle()?;
    if !marker.is_there()? {
        return Err(ImportError::Overruled);
    }
    let id = manifest.id();
    store.put(&Key::Image(id), &manifest.bytes())?;
    // A removal that did not wait may have come between: then a stripe may be gone.
    if !marker.is_there()? {
        for (_, digest) in manifest.stripes() {
            if !store.has(&Key::Stripe(digest))? {
                return Err(ImportError::Overruled);
            }
        }
    }
    if let Some(name) = name {
        let text = format!("{id}\n");
        store.put(&Key::Name(name.clone()), text.as_bytes())?;
    }
    Ok(())
}

/// Returns the stripes that hold data.
fn candidates(disk: &dyn Disk) -> Result<Vec<u32>, ImportError> {
    let size_bytes = disk.size_bytes();
    let mut stripes = Vec::new();
    let mut offset = 0;
    while offset < size_bytes {
        let extents = disk.extents(offset..size_bytes, EXTENTS);
        let extents = extents.map_err(|error| ImportError::Read { offset, error })?;
        let before = offset;
        for extent in extents {
            let end = (offset + extent.length_bytes).min(size_bytes);
            if !extent.hole {
                // An image is at most 4 Mi stripes long.
                let first = (offset / STRIPE_BYTES) as u32;
                let behind = end.div_ceil(STRIPE_BYTES) as u32;
                let known = stripes.last().map_or(0, |last| last + 1);
                stripes.extend(first.max(known)..behind);
            }
            offset = end;
        }
        if offset == before {
            let error = io::Error::other("the system does not say what is there");
            return Err(ImportError::Read { offset, error });
        }
    }
    Ok(stripes)
}

/// A running import.
struct Import<'a> {
    repository: &'a Repository,
    disk: &'a dyn Disk,
    rewrite: bool,
    progress: &'a (dyn Fn(ImportProgress) + Sync),
    /// The stripes that may hold content.
    stripes: Vec<u32>,
    /// The index of the next one.
    next: AtomicUsize,
    failed: AtomicBool,
    read_bytes: AtomicU64,
    new_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    /// The stripes that do hold content.
    found: Mutex<Vec<(u32, Digest)>>,
}

impl Import<'_> {
    fn all(&self) -> Result<Manifest, ImportError> {
        thread::scope(|scope| {
            let workers = [(); WORKERS].map(|()| scope.spawn(|| self.work()));
            // All of them end before the first error is returned.
            let results = workers.map(|worker| {
                let panicked = || io::Error::other("a thread of the import ended unexpectedly");
                worker.join().unwrap_or_else(|_| {
                    Err(ImportError::Read {
                        offset: 0,
                        error: panicked(),
                    })
                })
            });
            results.into_iter().collect::<Result<(), _>>()
        })?;
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.sort_unstable_by_key(|(index, _)| *index);
        Manifest::new(self.disk.size_bytes(), &found).map_err(ImportError::Size)
    }

    fn work(&self) -> Result<(), ImportError> {
        let mut buffer = vec![0; STRIPE_BYTES as usize];
        while !self.failed.load(Ordering::Relaxed) {
            let next = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(index) = self.stripes.get(next) else {
                break;
            };
            let start = u64::from(*index) * STRIPE_BYTES;
            let end = (start + STRIPE_BYTES).min(self.disk.size_bytes());
            let content = &mut buffer[..(end - start) as usize];
            let digest = self.stripe(start..end, content).inspect_err(|_| {
                self.failed.store(true, Ordering::Relaxed);
            })?;
            if let Some(digest) = digest {
                let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
                found.push((*index, digest));
            }
            self.tell(end - start);
        }
        Ok(())
    }

    /// Stores a stripe, unless it is all zeros or exists already.
    fn stripe(&self, range: Range<u64>, content: &mut [u8]) -> Result<Option<Digest>, ImportError> {
        let offset = range.start;
        let read = self.disk.read(offset, content);
        read.map_err(|error| ImportError::Read { offset, error })?;
        if content.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let digest = Digest::of(content);
        let key = Key::Stripe(digest);
        if self.rewrite || !self.repository.store().has(&key)? {
            let stored = encode_stripe(content);
            let stored = stored.map_err(|error| ImportError::Compress { offset, error })?;
            self.repository.store().put(&key, &stored)?;
            self.new_bytes
                .fetch_add(content.len() as u64, Ordering::Relaxed);
            self.stored_bytes
                .fetch_add(stored.len() as u64, Ordering::Relaxed);
        }
        Ok(Some(digest))
    }

    fn tell(&self, read_bytes: u64) {
        let read_bytes = read_bytes + self.read_bytes.fetch_add(read_bytes, Ordering::Relaxed);
        let total_bytes = self.stripes.len() as u64 * STRIPE_BYTES;
        (self.progress)(ImportProgress {
            read_bytes,
            total_bytes: total_bytes.min(self.disk.size_bytes()),
            stored_bytes: self.stored_bytes.load(Ordering::Relaxed),
            waits: false,
        });
    }
}
