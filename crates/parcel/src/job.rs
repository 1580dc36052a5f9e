//! Exports that can be interrupted: what goes into a parcel, and how far it has come, in a folder.

mod check;
mod chunks;
mod copier;
mod document;
mod error;
mod export;
mod moment;
mod replication;
mod rests;
mod setup;
mod ship;
mod status;

pub use check::{Checked, CheckedDisk, Verdict};
pub use document::{Confirmation, JobDisk, JobGuest, Seal, SealedDisk, Shipment};
pub use error::JobError;
pub use moment::{Frozen, Tracking, Untracked};
pub use replication::{Asked, Newest, ReplicaLink, Replicated, Replication, Schedule};
pub use status::{Attachment, DeviceStatus, DiskStatus, GuestStatus, Reading, Status};

use crate::cell::CELL_BYTES;
use crate::device::Device;
use crate::key::DataKey;
use crate::lock::FolderLock;
use crate::media::{LocalMedia, Media};
use crate::reader::Parcel;
use crate::tree::Tree;
use crate::writer::Writer;
use copier::Copier;
use document::{KnownDisk, KnownGuest, Next, ParcelDocument};
use error::io_at;
use longhaul_storage::disk::{Disk as _, RawDisk};
use rests::Rests;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How often the job is made durable: a job that is interrupted repeats at most so much.
const DURABLE_EVERY: Duration = Duration::from_secs(20);

/// How far an export has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<'a> {
    /// Disks are read.
    Exports {
        /// The disk.
        disk: &'a str,
        /// Bytes of it that were read.
        done: u64,
        /// All its bytes.
        all: u64,
    },
    /// A guest's disks could not be exported as of one moment: this is tried again, or they are
    /// exported as they are.
    MomentLost {
        /// The guest.
        guest: &'a str,
        /// The reason.
        why: &'a str,
    },
    /// The file systems of a guest were not frozen at its moment.
    NotFrozen {
        /// The guest.
        guest: &'a str,
        /// The reason.
        why: &'a str,
    },
    /// Rows are read back.
    Seals {
        /// How many.
        rows: u64,
        /// All rows.
        all: u64,
    },
}

/// The moment of a guest's version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MomentOf {
    /// Whether the guest's agent had frozen its file systems.
    pub frozen: bool,
    /// The group whose guests have the same moment.
    pub group: Option<String>,
}

/// An export.
#[derive(Debug)]
pub struct Job {
    copier: Copier<ParcelDocument>,
    key: DataKey,
    /// Where its devices are.
    media: Arc<dyn Media>,
}

impl Job {
    /// Opens a job.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(folder: &Path) -> Result<Self, JobError> {
        let (state, document) = document::read::<ParcelDocument>(folder)?;
        Ok(Self {
            key: document.key.parse()?,
            copier: Copier::new(folder, state, document),
            media: Arc::new(LocalMedia),
        })
    }

    /// Keeps other commands from the job, and reads what the last one has left.
    fn lock(&mut self) -> Result<FolderLock, JobError> {
        let lock = copier::lock(&self.copier.folder, &self.copier.document.name)?;
        self.copier.read()?;
        Ok(lock)
    }

    /// Changes how often the job is made durable, which is every 20 s.
    #[must_use]
    pub fn durable_every(mut self, time: Duration) -> Self {
        self.copier.durable_every = time;
        self
    }

    /// Says where the exports are found that track the writes to the disks. Without them, whole
    /// disks are read, each chunk as it is then.
    #[must_use]
    pub fn with_tracking(mut self, tracking: impl Tracking + 'static) -> Self {
        self.copier.tracking = Box::new(tracking);
        self
    }

    /// Says where its devices are, which is on this machine otherwise.
    #[must_use]
    pub fn with_media(mut self, media: Arc<dyn Media>) -> Self {
        self.media = media;
        self
    }

    /// Returns the guests.
    pub fn guests(&self) -> Vec<JobGuest> {
        let guests = self.copier.state.guests.iter().map(|guest| JobGuest {
            name: guest.name.clone(),
            disks: guest.disks.iter().map(|known| known.disk.clone()).collect(),
        });
        guests.collect()
    }

    /// Lets the file systems of guests be as they are at their moments, also if their agents could
    /// freeze them.
    #[must_use]
    pub fn without_freezing(mut self) -> Self {
        self.copier.freezes = false;
        self
    }

    /// Returns of what moment the last version of a guest is; `None` if it is of none.
    pub fn moment_of(&self, guest: &str) -> Option<MomentOf> {
        let mut guests = self.copier.state.guests.iter();
        let known = guests.find(|known| known.name == guest && known.consistent)?;
        Some(MomentOf {
            frozen: known.frozen,
            group: known.group.clone().filter(|_| known.moment.is_some()),
        })
    }

    /// Returns the data key.
    pub fn key(&self) -> &DataKey {
        &self.key
    }

    /// Returns the paths of the devices.
    pub fn devices(&self) -> &[PathBuf] {
        &self.copier.document.devices
    }

    /// Returns whether a top-up was begun and has not ended.
    pub fn tops_up(&self) -> bool {
        self.copier.state.version > 1 && !self.copier.document.sealed
    }

    /// Returns whether the parcel is sealed.
    pub fn is_sealed(&self) -> bool {
        self.copier.document.sealed
    }

    /// Prepares a top-up of a sealed parcel: [`run`](Self::run) then exports the chunks whose
    /// digests have changed since, as another version.
    ///
    /// # Errors
    /// When the parcel is not sealed, or a disk cannot be read.
    pub fn top_up(&mut self) -> Result<(), JobError> {
        let _lock = self.lock()?;
        self.is_here()?;
        if !self.copier.document.sealed {
            return Err(JobError::NotSealed(self.copier.document.name.clone()));
        }
        for guest in &mut self.copier.state.guests {
            for known in &mut guest.disks {
                known.bytes = RawDisk::open_to_read(&known.disk.path)?.size_bytes();
            }
        }
        self.copier.state.version += 1;
        self.copier.state.next = Next::default();
        self.copier.document.sealed = false;
        self.copier.save()
    }

    /// Exports what has not been exported, and seals the parcel.
    ///
    /// The disks may be written meanwhile: each chunk is as it was when it was read. Where writes
    /// are tracked, what has changed meanwhile is then exported again, as it was at one moment.
    ///
    /// # Errors
    /// When a disk cannot be read, or a device cannot be written. The job can be run again.
    pub fn run(
        &mut self,
        now: u64,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<Parcel, JobError> {
        let _lock = self.lock()?;
        self.is_here()?;
        let open = |writable| {
            let paths = self.copier.document.devices.iter();
            paths
                .map(|path| Device::open_on(&*self.media, path, writable))
                .collect::<Result<Vec<_>, _>>()
        };
        if self.copier.document.sealed {
            self.has_all()?;
            return Ok(Parcel::open(open(false)?)?);
        }
        let position = self.copier.document.position;
        let position =
            position.ok_or_else(|| JobError::NoDevices(self.copier.document.name.clone()))?;
        let mut writer = Writer::reopen(open(true)?, position, &self.key)?;
        self.copier.durable(&mut writer)?;
        self.copier.export_all(&mut writer, now, progress)?;
        let disks = self.exported_disks()?;
        let (all, is_in_use) = (writer.rows(), self.is_in_use()?);
        let mut rests = Rests::begin();
        let (parcel, position) = writer.seal(&mut |rows| {
            progress(&Step::Seals { rows, all });
            if is_in_use {
                rests.take();
            }
        })?;
        self.copier.document.position = Some(position);
        self.copier.document.sealed = true;
        self.copier.document.parcel = Some(parcel.id());
        self.copier.document.seals.push(Seal {
            version: self.copier.state.version,
            time: now,
            device_bytes: (parcel.header().row + 1) * CELL_BYTES as u64,
            disks,
        });
        self.copier.save()?;
        Ok(parcel)
    }

    /// Returns whether guests run whose writes are tracked.
    fn is_in_use(&self) -> Result<bool, JobError> {
        for guest in &self.copier.state.guests {
            if moment::exports(&*self.copier.tracking, guest)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns all disks as the version that is exported, or was, has them.
    fn exported_disks(&self) -> Result<Vec<SealedDisk>, JobError> {
        let mut disks = Vec::new();
        for (number, guest) in self.copier.state.guests.iter().enumerate() {
            for (at, known) in guest.disks.iter().enumerate() {
                let path = self.copier.digests((number, at), self.copier.state.version);
                let digest = Tree::open_to_read(&path).and_then(|mut tree| tree.digest());
                disks.push(SealedDisk {
                    guest: guest.name.clone(),
                    disk: known.disk.name.clone(),
                    bytes: known.bytes,
                    digest: digest.map_err(io_at(&path))?,
                });
            }
        }
        Ok(disks)
    }

    /// Returns a disk that is in no version of a sealed parcel, with its guest.
    fn added(&self) -> Option<(&KnownGuest, &KnownDisk)> {
        let guests = self.copier.state.guests.iter().enumerate();
        let mut disks = guests.flat_map(|(number, guest)| {
            let disks = guest.disks.iter().enumerate();
            disks.map(move |(at, known)| ((number, at), (guest, known)))
        });
        let is_in = |at| self.copier.digests(at, self.copier.state.version).exists();
        disks.find(|(at, _)| !is_in(*at)).map(|(_, found)| found)
    }

    /// Refuses a sealed parcel to which disks were added since.
    fn has_all(&self) -> Result<(), JobError> {
        match self.added() {
            None => Ok(()),
            Some((guest, known)) => Err(JobError::Added {
                parcel: self.copier.document.name.clone(),
                guest: guest.name.clone(),
                disk: known.disk.name.clone(),
            }),
        }
    }
}
