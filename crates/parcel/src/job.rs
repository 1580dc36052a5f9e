//! Exports that can be interrupted: what goes into a parcel, and how far it has come, in a folder.

mod check;
mod chunks;
mod document;
mod error;
mod export;
mod moment;
mod rests;
mod setup;
mod ship;
mod status;

pub use check::{Checked, CheckedDisk, Verdict};
pub use document::{Confirmation, JobDisk, JobGuest, Seal, SealedDisk, Shipment};
pub use error::JobError;
pub use moment::{Tracking, Untracked};
pub use status::{Attachment, DeviceStatus, DiskStatus, GuestStatus, Reading, Status};

use crate::cell::CELL_BYTES;
use crate::device::Device;
use crate::key::DataKey;
use crate::reader::Parcel;
use crate::tree::Tree;
use crate::writer::Writer;
use document::{Document, KnownDisk, KnownGuest, Next};
use error::io_at;
use longhaul_storage::disk::{Disk as _, RawDisk};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rests::Rests;
use std::fs::File;
use std::path::{Path, PathBuf};
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
    /// Rows are read back.
    Seals {
        /// How many.
        rows: u64,
        /// All rows.
        all: u64,
    },
}

/// An export.
#[derive(Debug)]
pub struct Job {
    folder: PathBuf,
    document: Document,
    key: DataKey,
    durable_every: Duration,
    tracking: Box<dyn Tracking>,
}

impl Job {
    /// Opens a job.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(folder: &Path) -> Result<Self, JobError> {
        let document = Document::read(folder)?;
        Ok(Self {
            folder: folder.to_path_buf(),
            key: document.key.parse()?,
            durable_every: DURABLE_EVERY,
            tracking: Box::new(Untracked),
            document,
        })
    }

    fn lock_folder(folder: &Path, name: &str) -> Result<Flock<File>, JobError> {
        let fails = io_at(folder);
        let folder = File::open(folder).map_err(&fails)?;
        let lock = Flock::lock(folder, FlockArg::LockExclusiveNonblock);
        lock.map_err(|(_, errno)| match errno {
            Errno::EWOULDBLOCK => JobError::Busy(name.to_owned()),
            errno => fails(errno.into()),
        })
    }

    /// Keeps other commands from the job, and reads what the last one has left.
    fn lock(&mut self) -> Result<Flock<File>, JobError> {
        let lock = Self::lock_folder(&self.folder, &self.document.name)?;
        self.document = Document::read(&self.folder)?;
        Ok(lock)
    }

    /// Changes how often the job is made durable, which is every 20 s.
    #[must_use]
    pub fn durable_every(mut self, time: Duration) -> Self {
        self.durable_every = time;
        self
    }

    /// Says where the exports are found that track the writes to the disks. Without them, whole
    /// disks are read, each chunk as it is then.
    #[must_use]
    pub fn with_tracking(mut self, tracking: impl Tracking + 'static) -> Self {
        self.tracking = Box::new(tracking);
        self
    }

    /// Returns the guests.
    pub fn guests(&self) -> Vec<JobGuest> {
        let guests = self.document.guests.iter().map(|guest| JobGuest {
            name: guest.name.clone(),
            disks: guest.disks.iter().map(|known| known.disk.clone()).collect(),
        });
        guests.collect()
    }

    /// Returns whether the last version of a guest is of one moment.
    pub fn is_of_one_moment(&self, guest: &str) -> bool {
        let mut guests = self.document.guests.iter();
        guests.any(|known| known.name == guest && known.consistent)
    }

    /// Returns the data key.
    pub fn key(&self) -> &DataKey {
        &self.key
    }

    /// Returns the paths of the devices.
    pub fn devices(&self) -> &[PathBuf] {
        &self.document.devices
    }

    /// Returns whether a top-up was begun and has not ended.
    pub fn tops_up(&self) -> bool {
        self.document.version > 1 && !self.document.sealed
    }

    /// Returns whether the parcel is sealed.
    pub fn is_sealed(&self) -> bool {
        self.document.sealed
    }

    fn save(&self) -> Result<(), JobError> {
        self.document.save(&self.folder)
    }

    /// Prepares a top-up of a sealed parcel: [`run`](Self::run) then exports the chunks whose
    /// digests have changed since, as another version.
    ///
    /// # Errors
    /// When the parcel is not sealed, or a disk cannot be read.
    pub fn top_up(&mut self) -> Result<(), JobError> {
        let _lock = self.lock()?;
        self.is_here()?;
        if !self.document.sealed {
            return Err(JobError::NotSealed(self.document.name.clone()));
        }
        for guest in &mut self.document.guests {
            for known in &mut guest.disks {
                known.bytes = RawDisk::open_to_read(&known.disk.path)?.size_bytes();
            }
        }
        self.document.version += 1;
        self.document.next = Next::default();
        self.document.sealed = false;
        self.save()
    }

    /// Returns the file of the digests that a disk has in a version.
    fn digests(&self, (guest, disk): (usize, usize), version: u64) -> PathBuf {
        self.folder
            .join(format!("digests.{guest}.{disk}.{version}"))
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
            let paths = self.document.devices.iter();
            paths
                .map(|path| Device::open(path, writable))
                .collect::<Result<Vec<_>, _>>()
        };
        if self.document.sealed {
            self.has_all()?;
            return Ok(Parcel::open(open(false)?)?);
        }
        let position = self.document.position;
        let position = position.ok_or_else(|| JobError::NoDevices(self.document.name.clone()))?;
        let mut writer = Writer::reopen(open(true)?, position, &self.key)?;
        self.durable(&mut writer)?;
        self.export_all(&mut writer, now, progress)?;
        let disks = self.exported_disks()?;
        let (all, is_in_use) = (writer.rows(), self.is_in_use()?);
        let mut rests = Rests::begin();
        let (parcel, position) = writer.seal(&mut |rows| {
            progress(&Step::Seals { rows, all });
            if is_in_use {
                rests.take();
            }
        })?;
        self.document.position = Some(position);
        self.document.sealed = true;
        self.document.parcel = Some(parcel.id());
        self.document.seals.push(Seal {
            version: self.document.version,
            time: now,
            device_bytes: (parcel.header().row + 1) * CELL_BYTES as u64,
            disks,
        });
        self.save()?;
        Ok(parcel)
    }

    /// Returns whether guests run whose writes are tracked.
    fn is_in_use(&self) -> Result<bool, JobError> {
        for guest in &self.document.guests {
            if moment::exports(&*self.tracking, guest)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns all disks as the version that is exported, or was, has them.
    fn exported_disks(&self) -> Result<Vec<SealedDisk>, JobError> {
        let mut disks = Vec::new();
        for (number, guest) in self.document.guests.iter().enumerate() {
            for (at, known) in guest.disks.iter().enumerate() {
                let path = self.digests((number, at), self.document.version);
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
        let guests = self.document.guests.iter().enumerate();
        let mut disks = guests.flat_map(|(number, guest)| {
            let disks = guest.disks.iter().enumerate();
            disks.map(move |(at, known)| ((number, at), (guest, known)))
        });
        let is_in = |at| self.digests(at, self.document.version).exists();
        disks.find(|(at, _)| !is_in(*at)).map(|(_, found)| found)
    }

    /// Refuses a sealed parcel to which disks were added since.
    fn has_all(&self) -> Result<(), JobError> {
        match self.added() {
            None => Ok(()),
            Some((guest, known)) => Err(JobError::Added {
                parcel: self.document.name.clone(),
                guest: guest.name.clone(),
                disk: known.disk.name.clone(),
            }),
        }
    }

    /// Exports all guests. Those that are tracked, and whose version is of no moment, get another
    /// one that is.
    fn export_all(
        &mut self,
        writer: &mut Writer,
        now: u64,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<(), JobError> {
        loop {
            while self.document.next.guest < self.document.guests.len() {
                match self.keeps_version()? {
                    true => self.keep_version()?,
                    false => self.export(writer, now, progress)?,
                }
            }
            if self.document.consolidates || !self.consolidate()? {
                self.document.consolidates = false;
                return Ok(());
            }
        }
    }

    fn durable(&mut self, writer: &mut Writer) -> Result<(), JobError> {
        self.document.position = Some(writer.sync()?);
        self.save()
    }
}
