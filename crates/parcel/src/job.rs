//! Exports that can be interrupted: what goes into a parcel, and how far it has come, in a folder.

use crate::device::{Device, DeviceError};
use crate::header::check_name;
use crate::key::{DataKey, KeyError};
use crate::layout::{CELLS_MAX, Layout};
use crate::reader::{OpenError, Parcel};
use crate::record::{
    CHUNK_BYTES, Chunk, DISK_BYTES_MAX, Disk, Guest, Record, RecordError, Version, VersionDisk,
};
use crate::room::used_bytes;
use crate::tree::{Before, Tree};
use crate::writer::{Position, Settings, WriteError, Writer};
use longhaul_storage::disk::{Disk as _, OpenError as OpenDiskError, RawDisk};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

const DOCUMENT: &str = "job.json";
/// Chunks that are read and compressed at the same time.
const BATCH: u64 = 16;
/// How often the job is made durable: a job that is interrupted repeats at most so much.
const DURABLE_EVERY: Duration = Duration::from_secs(20);

/// Why a job cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// Its folder, or a disk, cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] OpenDiskError),
    /// Its document cannot be read.
    #[error("{} cannot be read: {error}", path.display())]
    Document {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        error: serde_json::Error,
    },
    /// It was interrupted before anything was written.
    #[error(
        "the export of {name} was interrupted before it began: remove {} and what it has on its \
         devices, and begin again",
        folder.display()
    )]
    NotBegun {
        /// The parcel.
        name: String,
        /// The job's folder.
        folder: PathBuf,
    },
    /// A guest or a disk is named twice.
    #[error("the {0} {1} is named twice")]
    Twice(&'static str, String),
    /// Another command works on it.
    #[error("another command works on the parcel {0}: wait until it has ended")]
    Busy(String),
    /// There is none.
    #[error("this host has exported no such parcel: there is no {}", .0.display())]
    Unknown(PathBuf),
    /// Only a sealed parcel is topped up.
    #[error("the export of {0} is not complete: continue it first")]
    NotSealed(String),
    /// There is one of this name.
    #[error("there is a parcel {0}: it is continued without guests and devices")]
    Exists(String),
    /// A device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The sealed parcel cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// What is exported is not one of the format.
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// A disk that is exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobDisk {
    /// The name by which the destination knows it.
    pub name: String,
    /// Its file, or its volume.
    pub path: PathBuf,
}

/// A disk as the job keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KnownDisk {
    #[serde(flatten)]
    disk: JobDisk,
    /// Its size when the export began. A file may have grown since: what is beyond is not exported.
    bytes: u64,
}

/// A guest as the job keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct KnownGuest {
    name: String,
    disks: Vec<KnownDisk>,
}

impl KnownGuest {
    fn look(guest: JobGuest) -> Result<Self, JobError> {
        let each = guest.disks.into_iter().map(|disk| {
            let bytes = RawDisk::open_to_read(&disk.path)?.size_bytes();
            Ok(KnownDisk { disk, bytes })
        });
        Ok(Self {
            name: guest.name,
            disks: each.collect::<Result<_, JobError>>()?,
        })
    }
}

/// A guest whose disks are exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobGuest {
    /// Its name.
    pub name: String,
    /// Its disks.
    pub disks: Vec<JobDisk>,
}

/// Where an export goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
struct Next {
    guest: usize,
    disk: usize,
    chunk: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Document {
    name: String,
    to: String,
    /// The data key: the file can be read by its owner alone.
    key: String,
    devices: Vec<PathBuf>,
    guests: Vec<KnownGuest>,
    /// `None` until the first header is durable.
    position: Option<Position>,
    /// The version that is exported, or was.
    version: u64,
    next: Next,
    sealed: bool,
}

impl Document {
    /// Returns the document, if its numbers are those of an export.
    fn checked(self) -> Result<Self, serde_json::Error> {
        let disks = self.guests.iter().flat_map(|guest| &guest.disks);
        let mut sizes = disks.map(|disk| disk.bytes);
        let ends = |position: Position| position.header < position.end && position.end <= CELLS_MAX;
        let is_known = self.position.is_none_or(ends)
            && (1..u64::MAX).contains(&self.version)
            && sizes.all(|bytes| bytes <= DISK_BYTES_MAX)
            && self.next.chunk <= DISK_BYTES_MAX / CHUNK_BYTES as u64;
        match is_known {
            true => Ok(self),
            false => Err(serde::de::Error::custom("it has impossible numbers")),
        }
    }
}

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
}

fn io_at(path: &Path) -> impl Fn(io::Error) -> JobError {
    let path = path.to_path_buf();
    move |error| JobError::Io {
        path: path.clone(),
        error,
    }
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
                sealed: false,
            },
            key,
            durable_every: DURABLE_EVERY,
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
        let document = Self::read(folder)?;
        Ok(Self {
            folder: folder.to_path_buf(),
            key: document.key.parse()?,
            durable_every: DURABLE_EVERY,
            document,
        })
    }

    fn read(folder: &Path) -> Result<Document, JobError> {
        let path = folder.join(DOCUMENT);
        let text = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => JobError::Unknown(folder.to_path_buf()),
            _ => io_at(&path)(error),
        })?;
        let document = serde_json::from_slice(&text).and_then(Document::checked);
        document.map_err(|error| JobError::Document { path, error })
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
        self.document = Self::read(&self.folder)?;
        Ok(lock)
    }

    /// Changes how often the job is made durable, which is every 20 s.
    #[must_use]
    pub fn durable_every(mut self, time: Duration) -> Self {
        self.durable_every = time;
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

    /// Writes the document durably, readable by its owner alone.
    fn save(&self) -> Result<(), JobError> {
        let path = self.folder.join(DOCUMENT);
        let new = self.folder.join(".job.json.new");
        let fails = io_at(&path);
        let text = serde_json::to_vec_pretty(&self.document);
        let text = text.map_err(|error| JobError::Document {
            path: path.clone(),
            error,
        })?;
        let mut options = OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(&new).map_err(&fails)?;
        file.write_all(&text).map_err(&fails)?;
        file.sync_all().map_err(&fails)?;
        fs::rename(&new, &path).map_err(&fails)?;
        let folder = File::open(&self.folder).map_err(&fails)?;
        folder.sync_all().map_err(&fails)
    }

    /// Prepares a top-up of a sealed parcel: [`run`](Self::run) then exports the chunks whose
    /// digests have changed since, as another version.
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
    /// The disks may be written meanwhile: each chunk is as it was when it was read.
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
        while self.document.next.guest < self.document.guests.len() {
            self.export(&mut writer, now, progress)?;
        }
        let all = writer.rows();
        let (parcel, position) = writer.seal(&mut |rows| progress(&Step::Seals { rows, all }))?;
        self.document.position = Some(position);
        self.document.sealed = true;
        self.save()?;
        Ok(parcel)
    }

    fn durable(&mut self, writer: &mut Writer) -> Result<(), JobError> {
        self.document.position = Some(writer.sync()?);
        self.save()
    }

    /// Exports the rest of a guest.
    fn export(
        &mut self,
        writer: &mut Writer,
        now: u64,
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<(), JobError> {
        let number = self.document.next.guest;
        let Some(guest) = self.document.guests.get(number).cloned() else {
            return Ok(());
        };
        let open = |known: &KnownDisk| RawDisk::open_to_read(&known.disk.path);
        let disks = guest
            .disks
            .iter()
            .map(open)
            .collect::<Result<Vec<_>, _>>()?;
        let known = guest.disks.iter().zip(0..);
        let record = Record::Guest(Guest {
            guest: number as u32,
            name: guest.name.clone(),
            disks: known
                .map(|(known, number)| Disk {
                    disk: number,
                    name: known.disk.name.clone(),
                    bytes: known.bytes,
                    used: used_bytes(&known.disk.path),
                })
                .collect(),
            description: serde_json::Value::Null,
        });
        writer.put(&record)?;
        let mut trees = Vec::new();
        for (at, (disk, known)) in disks.iter().zip(&guest.disks).enumerate() {
            let version = self.document.version;
            let path = self.digests((number, at), version);
            let mut tree = Tree::open(&path).map_err(io_at(&path))?;
            let before = self.digests((number, at), version - 1);
            let before = Before::open(&before).map_err(io_at(&before))?;
            let fails = io_at(&known.disk.path);
            let fails_tree = io_at(&path);
            let all = known.bytes;
            let chunks = all.div_ceil(CHUNK_BYTES as u64);
            // A disk that is complete is not read again.
            let mut chunk = match at.cmp(&self.document.next.disk) {
                std::cmp::Ordering::Less => chunks,
                std::cmp::Ordering::Equal => self.document.next.chunk,
                std::cmp::Ordering::Greater => 0,
            };
            tree.cut(chunk).map_err(&fails_tree)?;
            let mut saved = Instant::now();
            while chunk < chunks {
                let end = (chunk + BATCH).min(chunks);
                let batch = encode((disk, all), (number as u32, at as u32), chunk..end);
                let old = before.digests(chunk..end).map_err(&fails_tree)?;
                for (read, old) in batch.into_iter().zip(old) {
                    let (kind, rest, digest) = match read {
                        Ok(read) => read,
                        Err(ReadOrRecord::Read(error)) => return Err(fails(error)),
                        Err(ReadOrRecord::Record(error)) => return Err(error.into()),
                    };
                    if old != Some(digest) {
                        writer.put_encoded(kind, &rest)?;
                    }
                    tree.push(digest).map_err(&fails_tree)?;
                }
                chunk = end;
                progress(&Step::Exports {
                    disk: &known.disk.name,
                    done: (chunk * CHUNK_BYTES as u64).min(all),
                    all,
                });
                if saved.elapsed() >= self.durable_every || chunk == chunks {
                    tree.sync().map_err(&fails_tree)?;
                    self.document.next = Next {
                        guest: number,
                        disk: at,
                        chunk,
                    };
                    self.durable(writer)?;
                    saved = Instant::now();
                }
            }
            trees.push(VersionDisk {
                disk: at as u32,
                digest: tree.digest().map_err(&fails_tree)?,
            });
        }
        writer.put(&Record::Version(Version {
            guest: number as u32,
            version: self.document.version,
            time: now,
            consistent: false,
            disks: trees,
        }))?;
        self.document.next = Next {
            guest: number + 1,
            ..Next::default()
        };
        self.durable(writer)?;
        for at in 0..guest.disks.len() {
            let old = self.digests((number, at), self.document.version - 1);
            match fs::remove_file(&old) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(io_at(&old)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Why a chunk cannot be exported.
enum ReadOrRecord {
    Read(io::Error),
    Record(RecordError),
}

type Encoded = (u8, Vec<u8>, [u8; 32]);

/// Reads and encodes chunks of a disk, at the same time.
fn encode(
    (disk, bytes): (&RawDisk, u64),
    (guest, number): (u32, u32),
    chunks: std::ops::Range<u64>,
) -> Vec<Result<Encoded, ReadOrRecord>> {
    let one = |chunk: u64| {
        let from = chunk * CHUNK_BYTES as u64;
        let length = (bytes - from).min(CHUNK_BYTES as u64);
        let mut content = vec![0; length as usize];
        disk.read(from, &mut content).map_err(ReadOrRecord::Read)?;
        let digest = Tree::of_chunk(&content);
        let record = Record::Chunk(Chunk {
            guest,
            disk: number,
            chunk,
            content: Some(content),
        });
        let (kind, rest) = record.encode().map_err(ReadOrRecord::Record)?;
        Ok((kind, rest, digest))
    };
    let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
    let each = (chunks.end - chunks.start).div_ceil(threads).max(1);
    let one = &one;
    thread::scope(|scope| {
        let parts: Vec<_> = chunks
            .clone()
            .step_by(each as usize)
            .map(|from| {
                let part = from..(from + each).min(chunks.end);
                scope.spawn(move || part.map(one).collect::<Vec<_>>())
            })
            .collect();
        let joined = parts.into_iter().map(|part| part.join());
        joined
            .flat_map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}
