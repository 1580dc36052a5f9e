//! Exports that can be interrupted: what goes into a parcel, and how far it has come, in a folder.

mod check;
mod document;
mod error;
mod setup;
mod ship;
mod status;

pub use check::{Checked, CheckedDisk, Verdict};
pub use document::{Confirmation, JobDisk, JobGuest, Seal, SealedDisk, Shipment};
pub use error::JobError;
pub use status::{Attachment, DeviceStatus, DiskStatus, GuestStatus, Reading, Status};

use crate::cell::CELL_BYTES;
use crate::device::Device;
use crate::key::DataKey;
use crate::reader::Parcel;
use crate::record::{CHUNK_BYTES, Chunk, Record, RecordError, Version, VersionDisk};
use crate::tree::{Before, Tree};
use crate::writer::Writer;
use document::{Document, KnownDisk, KnownGuest, Next};
use error::io_at;
use longhaul_storage::disk::{Disk as _, RawDisk};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use setup::record_of;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Chunks that are read and compressed at the same time.
const BATCH: u64 = 16;
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
        while self.document.next.guest < self.document.guests.len() {
            self.export(&mut writer, now, progress)?;
        }
        let disks = self.exported_disks()?;
        let all = writer.rows();
        let (parcel, position) = writer.seal(&mut |rows| progress(&Step::Seals { rows, all }))?;
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
        let record = record_of(number, &guest);
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
