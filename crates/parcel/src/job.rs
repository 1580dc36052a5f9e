//! Exports that can be interrupted: what goes into a parcel, and how far it has come, in a folder.

mod document;
mod error;
mod export;
mod moment;

pub use document::{JobDisk, JobGuest};
pub use error::JobError;
pub use moment::{Tracking, Untracked};

use crate::device::Device;
use crate::header::check_name;
use crate::key::DataKey;
use crate::layout::Layout;
use crate::reader::Parcel;
use crate::writer::{Settings, WriteError, Writer};
use document::{Document, KnownGuest, Next};
use error::io_at;
use longhaul_storage::disk::{Disk as _, RawDisk};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
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
    /// Begins an export. `folder` is the job's, and does not exist.
    ///
    /// # Errors
    /// When there is such a job, or the devices cannot be used.
    pub fn create(
        folder: &Path,
        settings: &Settings,
        (devices, limit): (&[PathBuf], Option<u64>),
        guests: Vec<JobGuest>,
    ) -> Result<Self, JobError> {
        let mut names = BTreeSet::new();
        for guest in &guests {
            let disks = guest.disks.iter().map(|disk| ("disk", disk.name.as_str()));
            for name in disks.chain([("guest", guest.name.as_str())]) {
                if !names.insert(name) {
                    return Err(JobError::Twice(name.0, name.1.to_owned()));
                }
            }
        }
        let guests = guests.into_iter().map(KnownGuest::look);
        let guests = guests.collect::<Result<_, _>>()?;
        let parent = folder.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(parent).map_err(io_at(parent))?;
        match fs::create_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(JobError::Exists(settings.name.clone()));
            }
            created => created.map_err(io_at(folder))?,
        }
        let key = DataKey::draw()?;
        let mut job = Self {
            folder: folder.to_path_buf(),
            document: Document {
                name: settings.name.clone(),
                to: settings.to.clone(),
                key: key.text().to_string(),
                devices: devices.to_vec(),
                guests,
                position: None,
                version: 1,
                next: Next::default(),
                consolidates: false,
                sealed: false,
            },
            key,
            durable_every: DURABLE_EVERY,
            tracking: Box::new(Untracked),
        };
        let begun = job.begin(settings, limit);
        if begun.is_err() {
            // Nothing was written that is worth a key.
            fs::remove_dir_all(folder).map_err(io_at(folder))?;
        }
        begun.map(|()| job)
    }

    fn begin(&mut self, settings: &Settings, limit: Option<u64>) -> Result<(), JobError> {
        check_name(&settings.name).map_err(WriteError::from)?;
        let cells = vec![1; self.document.devices.len()];
        Layout::new(&cells, settings.parity).map_err(WriteError::from)?;
        self.save()?;
        let mut devices: Vec<Device> = Vec::new();
        let each = self.document.devices.iter().enumerate();
        for (number, at) in each {
            let name = format!("{}-{number}", settings.name);
            match Device::create(at, &name, limit) {
                Ok(device) => devices.push(device),
                Err(error) => {
                    devices.iter().for_each(Device::remove);
                    return Err(error.into());
                }
            }
        }
        let writer = Writer::create(devices, settings, &self.key)?;
        self.document.position = Some(writer.position());
        self.document.devices = writer.paths();
        self.save()
    }

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

    /// Keeps other commands from the job, and reads what the last one has left.
    fn lock(&mut self) -> Result<Flock<File>, JobError> {
        let fails = io_at(&self.folder);
        let folder = File::open(&self.folder).map_err(&fails)?;
        let lock = Flock::lock(folder, FlockArg::LockExclusiveNonblock);
        let lock = lock.map_err(|(_, errno)| match errno {
            Errno::EWOULDBLOCK => JobError::Busy(self.document.name.clone()),
            errno => fails(errno.into()),
        })?;
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

    /// Returns the data key.
    pub fn key(&self) -> &DataKey {
        &self.key
    }

    /// Returns the paths of the devices.
    pub fn devices(&self) -> &[PathBuf] {
        &self.document.devices
    }

    /// Returns whether the parcel is sealed.
    pub fn is_sealed(&self) -> bool {
        self.document.sealed
    }

    fn save(&self) -> Result<(), JobError> {
        self.document.save(&self.folder)
    }

    /// Prepares a top-up of a sealed parcel: [`run`](Self::run) then exports the chunks whose
    /// digests have changed since, as another version. Where writes are tracked, only what may have
    /// changed is read.
    ///
    /// # Errors
    /// When the parcel is not sealed, or a disk cannot be read.
    pub fn top_up(&mut self) -> Result<(), JobError> {
        let _lock = self.lock()?;
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
        let open = |writable| {
            let paths = self.document.devices.iter();
            paths
                .map(|path| Device::open(path, writable))
                .collect::<Result<Vec<_>, _>>()
        };
        if self.document.sealed {
            return Ok(Parcel::open(open(false)?)?);
        }
        let position = self.document.position.ok_or_else(|| JobError::NotBegun {
            name: self.document.name.clone(),
            folder: self.folder.clone(),
        })?;
        let mut writer = Writer::reopen(open(true)?, position, &self.key)?;
        self.durable(&mut writer)?;
        self.export_all(&mut writer, now, progress)?;
        let all = writer.rows();
        let (parcel, position) = writer.seal(&mut |rows| progress(&Step::Seals { rows, all }))?;
        self.document.position = Some(position);
        self.document.sealed = true;
        self.save()?;
        Ok(parcel)
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
