//! The source of a replica: brings versions of a guest's disks to another host, again and again.

use super::Step;
use super::copier::{self, Copier, Document, Encoded, Sink, parent_of};
use super::document::{self, Copied, JobGuest, KnownGuest, Next};
use super::error::{JobError, io_at};
use super::moment::Tracking;
use crate::header::Bytes16;
use crate::lock::FolderLock;
use crate::record::{KIND_CHUNK, Packer, Record, chunk_of};
use crate::replica::patch::{self, KIND_PATCH};
use crate::replica::{ReplicaId, Retention};
use longhaul_storage::disk::{Disk as _, RawDisk};
use longhaul_storage::files::{RealFiles, replace};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

/// The file of the schedule. It changes while a version is brought.
const SCHEDULE: &str = "schedule.json";
/// Bytes of a chunk's digest.
const DIGEST_BYTES: usize = 32;
/// Chunks that may wait for their answers: at most 32 MiB.
const ASKED_MAX: usize = 128;

/// The replica's host.
pub trait ReplicaLink {
    /// Begins a version of disks of these sizes. Returns the newest version there.
    ///
    /// # Errors
    /// When the host is not reached, or does not take it.
    fn begin(&mut self, sizes: &[u64]) -> io::Result<Option<Newest>>;

    /// Returns the digests of some chunks of a disk from this one on, as the host has them; none
    /// behind the last one.
    ///
    /// # Errors
    /// As above.
    fn digests(&mut self, disk: usize, first: u64) -> io::Result<Vec<u8>>;

    /// Sends a record: its kind, and the rest of it.
    ///
    /// # Errors
    /// As above.
    fn put(&mut self, kind: u8, rest: &[u8]) -> io::Result<()>;

    /// Asks which blocks of a chunk have other digests there.
    ///
    /// # Errors
    /// As above.
    fn ask(&mut self, disk: u32, chunk: u64, digests: &[u8]) -> io::Result<()>;

    /// Waits for the answer to the next question: a bit for each block, from the lowest on.
    ///
    /// # Errors
    /// As above.
    fn differing(&mut self) -> io::Result<u64>;

    /// Returns what this module keeps of the questions: nothing, at first.
    fn asked(&mut self) -> &mut Asked;

    /// Waits until all records are durable there.
    ///
    /// # Errors
    /// As above.
    fn sync(&mut self) -> io::Result<()>;
}

/// The newest version at a replica's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Newest {
    /// Its number.
    pub version: u64,
    /// Whether it came with the id of this replication.
    pub is_ours: bool,
}

/// Chunks about whose blocks the host was asked, in the order of the questions.
#[derive(Debug, Default)]
pub struct Asked {
    chunks: VecDeque<Encoded>,
    packer: Packer,
}

impl dyn ReplicaLink + '_ {
    /// Sends chunks whose questions are answered until at most `left` wait for their answers.
    fn settle(&mut self, left: usize) -> Result<(), JobError> {
        while self.asked().chunks.len() > left {
            let mask = self.differing().map_err(JobError::Link)?;
            let asked = self.asked();
            let Some(chunk) = asked.chunks.pop_front() else {
                return Ok(());
            };
            let patch = patch::encode(&chunk.rest, mask, &chunk.digest, &mut asked.packer)?;
            let put = match patch {
                Some(patch) => self.put(KIND_PATCH, &patch),
                None => self.put(KIND_CHUNK, &chunk.rest),
            };
            put.map_err(JobError::Link)?;
        }
        Ok(())
    }
}

impl Sink for dyn ReplicaLink + '_ {
    fn put(&mut self, record: &Record) -> Result<(), JobError> {
        self.settle(0)?;
        let (kind, rest) = record.encode()?;
        ReplicaLink::put(self, kind, &rest).map_err(JobError::Link)
    }

    fn put_chunk(&mut self, chunk: Encoded) -> Result<(), JobError> {
        let Some(blocks) = &chunk.blocks else {
            return ReplicaLink::put(self, KIND_CHUNK, &chunk.rest).map_err(JobError::Link);
        };
        let (disk, number) = chunk_of(&chunk.rest)
            .ok_or_else(|| JobError::Link(io::Error::other("a chunk's record has no number")))?;
        self.ask(disk, number, blocks).map_err(JobError::Link)?;
        self.asked().chunks.push_back(chunk);
        self.settle(ASKED_MAX)
    }
}

/// What is kept of a replica at its source.
#[derive(Debug, Serialize, Deserialize)]
struct ReplicationDocument {
    id: ReplicaId,
    /// The host that it is about.
    to: String,
    /// The last version of one moment that the host has confirmed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    last: Option<Replicated>,
    /// The last version that the host has confirmed.
    confirmed: Option<u64>,
}

impl Document for ReplicationDocument {
    type Sink = dyn ReplicaLink;
    const PATCHES: bool = true;

    fn sync(&mut self, link: &mut Self::Sink) -> Result<(), JobError> {
        link.settle(0)?;
        link.sync().map_err(JobError::Link)
    }

    fn is_possible(&self) -> bool {
        true
    }
}

/// The source of a replica.
#[derive(Debug)]
pub struct Replication {
    copier: Copier<ReplicationDocument>,
    schedule: Schedule,
}

/// Where a replica goes, and how often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schedule {
    /// The name of the host.
    pub to: String,
    /// The seconds between two versions.
    pub every_s: u64,
    /// Which versions are kept.
    pub keep: Retention,
    /// Whether the guest's file systems are not frozen, also if its agent could do that.
    #[serde(default)]
    pub no_freeze: bool,
}

impl Schedule {
    fn read(folder: &Path) -> Result<Self, JobError> {
        let path = folder.join(SCHEDULE);
        let text = fs::read(&path).map_err(io_at(&path))?;
        serde_json::from_slice(&text).map_err(|error| JobError::Document { path, error })
    }

    /// Makes it durable.
    fn save(&self, folder: &Path) -> Result<(), JobError> {
        let path = folder.join(SCHEDULE);
        let text = serde_json::to_vec_pretty(self).map_err(|error| JobError::Document {
            path: path.clone(),
            error,
        })?;
        let names = ["the schedule", "its name"];
        replace(&RealFiles, &path, &text, names).map_err(io_at(&path))
    }
}

/// What one run has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replicated {
    /// The version.
    pub version: u64,
    /// When it was begun, in seconds since 1970: it has all that was written before.
    pub time: u64,
    /// Whether all disks are as they were at one moment.
    pub consistent: bool,
    /// Whether the guest's agent had frozen its file systems at that moment.
    #[serde(default)]
    pub frozen: bool,
}

impl Replication {
    /// Makes the source of a replica. `folder` is its own, and does not exist.
    ///
    /// # Errors
    /// When it cannot be written, or a disk cannot be opened.
    pub fn make(folder: &Path, guest: JobGuest, schedule: Schedule) -> Result<Self, JobError> {
        let parent = parent_of(folder);
        fs::create_dir_all(parent).map_err(io_at(parent))?;
        match fs::create_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(io_at(folder))?,
        }
        let Bytes16(id) = Bytes16::draw()?;
        let state = Copied {
            guests: vec![KnownGuest::look(guest)?],
            version: 1,
            ..Copied::default()
        };
        let document = ReplicationDocument {
            id: ReplicaId(id),
            to: schedule.to.clone(),
            last: None,
            confirmed: None,
        };
        let copier = Copier::new(folder, state, document);
        schedule.save(folder)?;
        copier.save()?;
        Ok(Self { copier, schedule })
    }

    /// Opens the source of a replica.
    ///
    /// # Errors
    /// When there is none, or it cannot be read.
    pub fn open(folder: &Path) -> Result<Self, JobError> {
        let (state, document) = document::read::<ReplicationDocument>(folder)?;
        Ok(Self {
            schedule: Schedule::read(folder)?,
            copier: Copier::new(folder, state, document),
        })
    }

    /// Says where the exports are found that track the writes to the disks. Without them, whole
    /// disks are read, each chunk as it is then.
    #[must_use]
    pub fn with_tracking(mut self, tracking: impl Tracking + 'static) -> Self {
        self.copier.tracking = Box::new(tracking);
        self
    }

    /// Returns the replica's id.
    pub fn id(&self) -> ReplicaId {
        self.copier.document.id
    }

    /// Returns where it goes, and how often.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Changes where it goes, and how often, from the next version on.
    ///
    /// # Errors
    /// When that cannot be saved.
    pub fn set_schedule(&mut self, schedule: Schedule) -> Result<(), JobError> {
        schedule.save(&self.copier.folder)?;
        self.schedule = schedule;
        Ok(())
    }

    /// Returns the last version of one moment that the host has confirmed.
    pub fn last(&self) -> Option<Replicated> {
        self.copier.document.last
    }

    /// Returns the guest.
    pub fn guest(&self) -> Option<JobGuest> {
        let guest = self.copier.state.guests.first()?;
        Some(JobGuest {
            name: guest.name.clone(),
            disks: guest.disks.iter().map(|known| known.disk.clone()).collect(),
        })
    }

    fn lock(&mut self) -> Result<FolderLock, JobError> {
        let name = self.guest().map_or_else(String::new, |guest| guest.name);
        let lock = copier::lock(&self.copier.folder, &name)?;
        self.copier.read()?;
        Ok(lock)
    }

    /// Brings another version to the host. If writes are tracked, it is of one moment, and only
    /// what may have changed is read.
    ///
    /// # Errors
    /// When a disk cannot be read, or the host does not take it. It can be done again: what the
    /// host has of the last version stays.
    pub fn run(
        &mut self,
        now: u64,
        link: &mut (dyn ReplicaLink + 'static),
        progress: &mut dyn FnMut(&Step<'_>),
    ) -> Result<Replicated, JobError> {
        let _lock = self.lock()?;
        if self.copier.document.to != self.schedule.to {
            // Another host is compared with.
            self.copier.document.to.clone_from(&self.schedule.to);
            (self.copier.document.confirmed, self.copier.document.last) = (None, None);
        }
        let mut sizes = Vec::new();
        for known in self
            .copier
            .state
            .guests
            .iter_mut()
            .flat_map(|it| &mut it.disks)
        {
            known.bytes = RawDisk::open_to_read(&known.disk.path)?.size_bytes();
            sizes.push(known.bytes);
        }
        *link.asked() = Asked::default();
        let newest = link.begin(&sizes).map_err(JobError::Link)?;
        let base = match (newest, self.copier.document.confirmed) {
            (Some(newest), Some(confirmed)) if newest.is_ours && newest.version == confirmed => {
                confirmed
            }
            (newest, confirmed) => self.compare(newest, confirmed, link)?,
        };
        self.forget_others(base)?;
        self.copier.state.is_first = newest.is_none();
        self.copier.state.version = base + 1;
        self.copier.state.next = Next::default();
        self.copier.state.consolidates = false;
        self.copier.freezes = !self.schedule.no_freeze;
        self.copier.save()?;
        self.copier.export_all(link, now, progress)?;
        let guests = &self.copier.state.guests;
        let replicated = Replicated {
            version: self.copier.state.version,
            time: now,
            consistent: guests.iter().all(|guest| guest.consistent),
            frozen: guests.iter().all(|guest| guest.frozen),
        };
        self.copier.document.confirmed = Some(replicated.version);
        if replicated.consistent {
            self.copier.document.last = Some(replicated);
        }
        self.copier.save()?;
        Ok(replicated)
    }

    /// Takes what the host has as the last version. Returns the number under which it is kept.
    fn compare(
        &mut self,
        newest: Option<Newest>,
        confirmed: Option<u64>,
        link: &mut (dyn ReplicaLink + 'static),
    ) -> Result<u64, JobError> {
        // If the host has a version that it could not confirm any more, the records still name all
        // that has changed since the one before, and so all that has changed since this one.
        let is_later = newest
            .zip(confirmed)
            .is_some_and(|(newest, confirmed)| newest.is_ours && newest.version > confirmed);
        let newest = newest.map(|newest| newest.version);
        let base = newest.unwrap_or(self.copier.state.version);
        let Some(guest) = self.copier.state.guests.first_mut() else {
            return Ok(base);
        };
        for known in &mut guest.disks {
            known.begun = None;
            if !is_later {
                known.since = None;
                known.version_bytes = 0;
            }
        }
        guest.consistent &= is_later;
        let disks = guest.disks.len();
        // The digests that are there now are of other versions.
        self.copier.document.confirmed = None;
        self.copier.save()?;
        self.forget_others(0)?;
        for disk in 0..disks {
            let path = self.copier.digests((0, disk), base);
            let fails = io_at(&path);
            let mut file = File::create(&path).map_err(&fails)?;
            let mut chunk = 0;
            loop {
                let digests = link.digests(disk, chunk).map_err(JobError::Link)?;
                if digests.is_empty() {
                    break;
                }
                file.write_all(&digests).map_err(&fails)?;
                chunk += (digests.len() / DIGEST_BYTES) as u64;
            }
            file.sync_all().map_err(&fails)?;
        }
        self.copier.document.confirmed = newest;
        Ok(base)
    }

    /// Removes the digests of all versions but one.
    fn forget_others(&self, version: u64) -> Result<(), JobError> {
        let folder = &self.copier.folder;
        let fails = io_at(folder);
        for entry in fs::read_dir(folder).map_err(&fails)? {
            let name = entry.map_err(&fails)?.file_name();
            let name = name.to_string_lossy();
            let is_other = name.starts_with("digests.") && !name.ends_with(&format!(".{version}"));
            if is_other {
                fs::remove_file(folder.join(&*name)).map_err(&fails)?;
            }
        }
        Ok(())
    }

    /// Returns how many bytes of the disks may have changed since the last version that the host
    /// has confirmed; `None` if all of them are compared.
    pub fn changed_bytes(&self, tracking: &dyn Tracking) -> Option<u64> {
        let guest = self.copier.state.guests.first()?;
        let each = guest.disks.iter();
        each.map(|known| super::moment::changed_bytes(tracking, &guest.name, known))
            .sum()
    }
}
