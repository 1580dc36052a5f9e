//! Opens an image as a disk: its manifest, and the file for fetched stripes.

use super::{ImageDisk, ImageNotice, UNKNOWN};
use crate::manifest::{MANIFEST_BYTES_MAX, Manifest};
use crate::name::ImageId;
use crate::repository::{Repository, RepositoryError, read_manifest};
use longhaul_storage::files::{Access, Files, RealFiles, create_folder};
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A reason why an image was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenImageError {
    /// The repository does not have it, or is unreachable.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// The file for fetched stripes is unusable.
    #[error("cannot use {}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
}

impl ImageDisk {
    /// Opens an image. Its fetched stripes, from this process or an earlier one, are in
    /// `folder/ID.raw`; several processes may use that file at once.
    ///
    /// Once opened, an image can be opened again while its store is unreachable: its manifest is
    /// stored too.
    pub fn open(
        repository: Repository,
        id: ImageId,
        folder: &Path,
        patience: Duration,
        notify: impl Fn(ImageNotice) + Send + Sync + 'static,
    ) -> Result<Self, OpenImageError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |error| OpenImageError::File { path, error }
        };
        create_folder(&RealFiles, folder).map_err(failed(folder))?;
        let kept = folder.join(format!("{id}.manifest"));
        let (manifest, read_bytes) = match kept_manifest(id, &kept) {
            Some(manifest) => (manifest, 0),
            None => {
                let (manifest, bytes) = repository.manifest_bytes(id)?;
                keep(&kept, &bytes).map_err(failed(&kept))?;
                (manifest, bytes.len() as u64)
            }
        };
        let path = folder.join(format!("{id}.raw"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = file.map_err(failed(&path))?;
        let length = file.metadata().map_err(failed(&path))?.len();
        // A truncated or new file is a hole behind its end. A complete file must not look modified.
        if length != manifest.size_bytes() {
            file.set_len(manifest.size_bytes()).map_err(failed(&path))?;
        }
        let states = (0..manifest.stripe_count()).map(|_| AtomicU8::new(UNKNOWN));
        Ok(Self {
            id,
            states: states.collect(),
            missing: AtomicU32::new(manifest.stored_count()),
            manifest,
            repository,
            file,
            flights: Mutex::new(HashMap::new()),
            waiting: AtomicUsize::new(0),
            changed: (Mutex::new(()), Condvar::new()),
            patience,
            away: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            fetched_bytes: AtomicU64::new(0),
            read_bytes: AtomicU64::new(read_bytes),
            notify: Box::new(notify),
        })
    }
}

/// Returns the manifest if the file holds exactly that.
fn kept_manifest(id: ImageId, path: &Path) -> Option<Manifest> {
    let file = RealFiles.open(path, Access::Read).ok()?;
    let length = file
        .length()
        .ok()
        .filter(|length| *length <= MANIFEST_BYTES_MAX)?;
    let mut bytes = vec![0; usize::try_from(length).ok()?];
    file.read_at(0, &mut bytes).ok()?;
    read_manifest(id, &bytes).ok()
}

/// Stores a manifest. It need not be durable: it is compared with its id when it is read.
fn keep(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension(format!("manifest.{}", std::process::id()));
    std::fs::write(&new, bytes)?;
    std::fs::rename(&new, path)
}
