//! Images as plain files of a host, for the disks of guests that stand on them.
//!
//! ```text
//! FOLDER/ID.raw       the disk: whole when nobody may write to it, and nobody has since it was sealed
//! FOLDER/ID.manifest  what it is compared with while it comes
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
/// When a file that is whole says that it was written last: a write shows.
const SEALED_SECONDS: u64 = 1;
/// Whoever may write to a file.
const WRITERS: u32 = 0o222;

pub(crate) fn sealed() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(SEALED_SECONDS)
}

/// An image that is not here.
#[derive(Debug, thiserror::Error)]
pub enum BringError {
    /// It cannot be begun.
    #[error(transparent)]
    Open(#[from] OpenImageError),
    /// The file system failed.
    #[error("cannot keep image {}: {error}", id.short())]
    Files {
        /// The image.
        id: ImageId,
        /// What the system said.
        error: io::Error,
    },
    /// Something of it cannot be had, or not be kept.
    #[error("image {} cannot be fetched: {reason}", id.short())]
    Failed {
        /// The image.
        id: ImageId,
        /// Why not.
        reason: String,
    },
}

/// The images of a host.
#[derive(Debug, Clone)]
pub struct Bases {
    folder: PathBuf,
}

impl Bases {
    /// Those in a folder, which need not be there yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        Self { folder }
    }

    /// The file of an image.
    pub fn path(&self, id: ImageId) -> PathBuf {
        self.folder.join(format!("{id}{ENDING}"))
    }

    /// The image that a file is, by its name and in whatever folder.
    pub fn named(path: &Path) -> Option<ImageId> {
        let name = path.file_name()?.to_str()?;
        name.strip_suffix(ENDING)?.parse().ok()
    }

    /// The length of an image's file, where all of the image is in it.
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

    /// The files of all images that are here as a whole. What cannot be looked at is not among them.
    pub fn all_whole(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| Self::named(&entry.path()));
        let whole = ids.filter(|id| matches!(self.whole(*id), Ok(Some(_))));
        let mut paths: Vec<PathBuf> = whole.map(|id| self.path(id)).collect();
        paths.sort();
        paths
    }

    /// What of an image this host's guests use: stripes, and how many of their pages (of 4096 bytes) are in memory.
    pub fn hot(&self, id: ImageId) -> io::Result<Vec<(u32, u32)>> {
        pages_in_memory(&File::open(self.path(id))?, STRIPE_BYTES)
    }

    /// Begins to bring an image: its file is there then, as long as it will be. Several may do so at
    /// once. While the store is away it is waited for so long.
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
        // It is new, so nothing is there.
        let _ = trouble.disk.set(Arc::downgrade(&disk));
        Ok(Bringing { disk, trouble })
    }

    /// Opens an image as a disk whose content comes.
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

/// What keeps an image from coming.
#[derive(Debug, Default)]
struct Trouble {
    disk: OnceLock<Weak<ImageDisk>>,
    first: Mutex<Option<String>>,
}

impl Trouble {
    /// Without one stripe there is no image: the others need not be tried.
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

/// An image that is coming.
#[derive(Debug)]
pub struct Bringing {
    disk: Arc<ImageDisk>,
    trouble: Arc<Trouble>,
}

impl Bringing {
    /// The image.
    pub fn id(&self) -> ImageId {
        self.disk.id()
    }

    /// How long its disk is.
    pub fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    /// What of it is not all zeros, in bytes.
    pub fn content_bytes(&self) -> u64 {
        self.disk.manifest().stored_bytes()
    }

    /// What of that is known to be here, in bytes.
    pub fn here_bytes(&self) -> u64 {
        let missing = u64::from(self.disk.missing()) * STRIPE_BYTES;
        self.content_bytes().saturating_sub(missing)
    }

    /// What was read from the repository, in bytes.
    pub fn read_bytes(&self) -> u64 {
        self.disk.read_bytes()
    }

    /// Brings the rest, in this order. When it returns without an error all of the image is here, durably, was compared, and
    /// nobody writes to its file any more.
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

    /// Ends [`Self::finish`], where that goes on.
    pub fn end(&self) {
        self.disk.end();
    }
}
