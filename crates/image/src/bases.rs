//! Images as regular files of a host, used as backing files of guests' disks.
//!
//! ```text
//! FOLDER/ID.raw       the disk: complete when it is read-only and unchanged since it was sealed
//! FOLDER/ID.manifest  the digests that its content is checked against during the download
//! ```

use crate::disk::{Fetched, ImageDisk, ImageNotice, OpenImageError, Order};
use crate::heat::pages_in_memory;
use crate::manifest::STRIPE_BYTES;
use crate::name::ImageId;
use crate::repository::Repository;
use longhaul_storage::disk::Disk as _;
use longhaul_storage::files::{RealFiles, create_folder};
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const ENDING: &str = ".raw";
/// The modification time of a complete file, so that a later write shows.
const SEALED_SECONDS: u64 = 1;
/// The write permissions of a file.
const WRITERS: u32 = 0o222;

pub(crate) fn sealed() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(SEALED_SECONDS)
}

/// A reason why an image could not be brought to this host.
#[derive(Debug, thiserror::Error)]
pub enum BringError {
    /// The download could not begin.
    #[error(transparent)]
    Open(#[from] OpenImageError),
    /// The file system failed.
    #[error("cannot keep image {}: {error}", id.short())]
    Files {
        /// The image.
        id: ImageId,
        /// The cause.
        error: io::Error,
    },
    /// A part of the image cannot be fetched or stored.
    #[error("image {} cannot be fetched: {reason}", id.short())]
    Failed {
        /// The image.
        id: ImageId,
        /// The reason.
        reason: String,
    },
}

/// The images of a host.
#[derive(Debug, Clone)]
pub struct Bases {
    folder: PathBuf,
}

impl Bases {
    /// Returns the images in a folder, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        Self { folder }
    }

    /// Returns the path of an image's file.
    pub fn path(&self, id: ImageId) -> PathBuf {
        self.folder.join(format!("{id}{ENDING}"))
    }

    /// Returns the image of a file, from the file's name.
    pub fn named(path: &Path) -> Option<ImageId> {
        let name = path.file_name()?.to_str()?;
        name.strip_suffix(ENDING)?.parse().ok()
    }

    /// Returns the length of an image's file if it is complete.
    pub fn whole(&self, id: ImageId) -> io::Result<Option<u64>> {
        match fs::symlink_metadata(self.path(id)) {
            Ok(file) => {
                let closed = file.is_file() && file.mode() & WRITERS == 0;
                let whole = closed && file.modified()? == sealed();
                Ok(whole.then_some(file.len()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the files of all complete images. Files that cannot be inspected are omitted.
    pub fn all_whole(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| Self::named(&entry.path()));
        let whole = ids.filter(|id| matches!(self.whole(*id), Ok(Some(_))));
        let mut paths: Vec<PathBuf> = whole.map(|id| self.path(id)).collect();
        paths.sort();
        paths
    }

    /// Returns the parts of an image that this host's guests use: stripes, with the number of their
    /// pages (of 4096 bytes) in memory.
    pub fn hot(&self, id: ImageId) -> io::Result<Vec<(u32, u32)>> {
        pages_in_memory(&File::open(self.path(id))?, STRIPE_BYTES)
    }

    /// Begins to bring an image: afterwards its file exists at full length. Several processes may
    /// do so at once. While the store is unreachable, it is waited for up to the given time.
    pub fn bring(
        &self,
        repository: Repository,
        id: ImageId,
        patience: Duration,
    ) -> Result<Bringing, BringError> {
        let trouble = Arc::new(Trouble::default());
        let heard = trouble.clone();
        let notify = move |notice| heard.hear(notice);
        let disk = Arc::new(self.open(repository, id, patience, notify)?);
        // The disk is new, so the value is unset.
        let _ = trouble.disk.set(Arc::downgrade(&disk));
        Ok(Bringing { disk, trouble })
    }

    /// Opens an image as a disk whose content is being fetched.
    pub(crate) fn open(
        &self,
        repository: Repository,
        id: ImageId,
        patience: Duration,
        notify: impl Fn(ImageNotice) + Send + Sync + 'static,
    ) -> Result<ImageDisk, BringError> {
        let files = |error| BringError::Files { id, error };
        create_folder(&RealFiles, &self.folder).map_err(files)?;
        // QEMU's account reads there.
        fs::set_permissions(&self.folder, Permissions::from_mode(0o755)).map_err(files)?;
        let disk = ImageDisk::open(repository, id, &self.folder, patience, notify)?;
        Ok(disk)
    }
}

/// The cause that keeps an image from being completed.
#[derive(Debug, Default)]
struct Trouble {
    disk: OnceLock<Weak<ImageDisk>>,
    first: Mutex<Option<String>>,
}

impl Trouble {
    /// Without one stripe the image cannot be completed: the others need not be tried.
    fn hear(&self, notice: ImageNotice) {
        let (ImageNotice::Failed { reason, .. } | ImageNotice::NotKept { reason }) = notice else {
            return;
        };
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(reason);
        if let Some(disk) = self.disk.get().and_then(Weak::upgrade) {
            disk.end();
        }
    }
}

/// An image that is being brought.
#[derive(Debug)]
pub struct Bringing {
    disk: Arc<ImageDisk>,
    trouble: Arc<Trouble>,
}

impl Bringing {
    /// Returns the image.
    pub fn id(&self) -> ImageId {
        self.disk.id()
    }

    /// Returns the length of its disk.
    pub fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    /// Returns the length of its content other than zeros, in bytes.
    pub fn content_bytes(&self) -> u64 {
        self.disk.manifest().stored_bytes()
    }

    /// Returns how much of that is known to be here, in bytes.
    pub fn here_bytes(&self) -> u64 {
        let missing = u64::from(self.disk.missing()) * STRIPE_BYTES;
        self.content_bytes().saturating_sub(missing)
    }

    /// Returns how much was read from the repository, in bytes.
    pub fn read_bytes(&self) -> u64 {
        self.disk.read_bytes()
    }

    /// Brings the remaining stripes, in this order. When it returns without an error the whole
    /// image is here durably and verified, and its file is read-only.
    pub fn finish(&self, order: &Order) -> Result<(), BringError> {
        let id = self.id();
        let fetched = self.disk.fetch(order);
        let files = |error| BringError::Files { id, error };
        if fetched.map_err(files)? == Fetched::All {
            return self.disk.seal().map_err(files);
        }
        let first = &self.trouble.first;
        let reason = first.lock().unwrap_or_else(PoisonError::into_inner).take();
        let reason = reason.unwrap_or_else(|| "it was given up".to_owned());
        Err(BringError::Failed { id, reason })
    }

    /// Ends a running [`Self::finish`].
    pub fn end(&self) {
        self.disk.end();
    }
}
