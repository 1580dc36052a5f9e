//! Brings the disks of a parcel to files.

use crate::key::DataKey;
use crate::reader::{Damage, Parcel, ReadError, Report};
use crate::record::{CHUNK_BYTES, Chunk, Disk, Guest, MomentId, Record, Version};
use crate::room::{Places, Room};
use crate::tree::{Tree, text};
use longhaul_storage::files::{OpenFile, RealFiles};
use ring::digest::{Context, SHA256};
use serde_json::Value;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// Why a parcel cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// A file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// The parcel cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Content is lost, so nothing was imported.
    #[error(
        "{0} MiB of its content cannot be read: `longhaul parcel verify` says what is missing or \
         damaged"
    )]
    Lost(u64),
    /// Content is not read, so nothing was imported.
    #[error("{cells} MiB of its content cannot be read: {}: {error}", path.display())]
    Unread {
        /// How many cells.
        cells: u64,
        /// A device that cannot be read, or not everywhere.
        path: PathBuf,
        /// What the system said of it last.
        error: String,
    },
    /// A disk's content is not what was exported.
    #[error("disk {disk} of {guest} does not have the digest of its version")]
    Digest {
        /// The guest.
        guest: String,
        /// The disk.
        disk: String,
    },
    /// The disks do not fit.
    #[error(
        "the disks take {} MiB more in {}, and its file system has {} MiB free: make room, or \
         name the images elsewhere",
        needed.div_ceil(1 << 20), folder.display(), free >> 20
    )]
    Room {
        /// Where they go.
        folder: PathBuf,
        /// The bytes that they take there.
        needed: u64,
        /// The bytes that are free.
        free: u64,
    },
    /// Two disks would go to one place.
    #[error("two disks of the parcel go to {}: give them different names", .0.display())]
    Twice(PathBuf),
    /// A guest's record is missing, or contradicts another one.
    #[error("the parcel contradicts itself: {0}")]
    Contradiction(&'static str),
    /// It has no complete guest.
    #[error("the parcel has no complete version of any guest")]
    Nothing,
    /// All versions are later.
    #[error("the parcel has no such version: its first one is {0}")]
    Later(u64),
}

/// A disk that was imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImportedDisk {
    /// The guest's name.
    pub guest: String,
    /// The disk's name.
    pub disk: String,
    /// Its file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// The digest of its content, as it was exported, and read back here.
    pub digest: String,
    /// The number of the version.
    pub version: u64,
    /// When the version was exported, in seconds since 1970.
    pub time: u64,
}

/// A guest whose disks were imported.
#[derive(Debug, Clone, PartialEq)]
pub struct ImportedGuest {
    /// Its name.
    pub guest: String,
    /// What a destination needs to start it; null if the source did not know it.
    pub description: Value,
    /// The number of the version.
    pub version: u64,
    /// Whether all disks are as they were at one moment.
    pub consistent: bool,
    /// Whether the guest's agent had frozen its file systems at that moment.
    pub frozen: bool,
    /// The moment, if other guests have it too.
    pub moment: Option<MomentId>,
}

/// What was imported.
#[derive(Debug)]
pub struct Imported {
    /// The disks, in the order of their guests.
    pub disks: Vec<ImportedDisk>,
    /// The guests.
    pub guests: Vec<ImportedGuest>,
    /// What was read of the devices.
    pub report: Report,
}

/// A disk while it is written.
struct Target {
    part: PathBuf,
    path: PathBuf,
    file: Box<dyn OpenFile>,
    disk: Disk,
    /// The bytes of content that were written.
    written: u64,
}

struct Arriving {
    guest: Guest,
    targets: BTreeMap<u32, Target>,
    /// The version that is imported, and the number of the record.
    version: Option<(Version, u64)>,
    /// The number of the last chunk record.
    last_chunk: u64,
}

/// The disks' places, and who says where each of them goes.
struct To<'a> {
    places: &'a dyn Places,
    place: &'a mut dyn FnMut(&Guest, &Disk) -> Result<PathBuf, ImportError>,
    taken: BTreeSet<PathBuf>,
    /// The last version that is wanted.
    up_to: Option<u64>,
    /// The first version that is not wanted.
    later: Option<u64>,
}

/// For each guest, the number of the last record that belongs to what is imported.
type Ends = BTreeMap<u32, u64>;

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    }
}

fn io_at(path: &Path) -> impl Fn(io::Error) -> ImportError {
    let path = path.to_path_buf();
    move |error| ImportError::Io {
        path: path.clone(),
        error,
    }
}

/// Returns the name of a file while it is written.
fn part_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.importing"))
}

/// Writes the last versions of all guests, or those before them: the last ones up to the version
/// `up_to`. `place` says where a disk goes; nothing may be there. Files have their names when they
/// are complete, and were read back.
///
/// # Errors
/// When content is lost, no guest has such a version, or files cannot be written.
pub fn import(
    parcel: &Parcel,
    key: &DataKey,
    up_to: Option<u64>,
    place: &mut dyn FnMut(&Guest, &Disk) -> Result<PathBuf, ImportError>,
) -> Result<Imported, ImportError> {
    import_to(&RealFiles, parcel, (key, up_to), place)
}

/// As [`import`], to any places.
pub(crate) fn import_to(
    places: &dyn Places,
    parcel: &Parcel,
    (key, up_to): (&DataKey, Option<u64>),
    place: &mut dyn FnMut(&Guest, &Disk) -> Result<PathBuf, ImportError>,
) -> Result<Imported, ImportError> {
    let mut to = To {
        places,
        place,
        taken: BTreeSet::new(),
        up_to,
        later: None,
    };
    let mut guests: BTreeMap<u32, Arriving> = BTreeMap::new();
    let outcome = read_into(parcel, key, &mut to, &mut guests);
    let finished = outcome.and_then(|report| match (finish(places, &guests)?, to.later) {
        (disks, _) if !disks.is_empty() => Ok(Imported {
            disks,
            guests: guests.values().filter_map(Arriving::imported).collect(),
            report,
        }),
        (_, Some(first)) => Err(ImportError::Later(first)),
        (_, None) => Err(ImportError::Nothing),
    });
    if finished.is_err() {
        for target in guests.values().flat_map(|guest| guest.targets.values()) {
            // The first error is the one to be told.
            let _ = places.remove(&target.part);
        }
    }
    finished
}

fn read_into(
    parcel: &Parcel,
    key: &DataKey,
    to: &mut To<'_>,
    guests: &mut BTreeMap<u32, Arriving>,
) -> Result<Report, ImportError> {
    let report = read(parcel, key, to, guests, None)?;
    let is_beyond = |guest: &Arriving| {
        let version = guest.version.as_ref().map_or(0, |(_, at)| *at);
        version > 0 && guest.last_chunk > version
    };
    if !guests.values().any(is_beyond) {
        return Ok(report);
    }
    // Chunks of no version, or of a later one, are already in the files: they are read again
    // without them.
    let mut ends = Ends::new();
    for (number, guest) in guests.iter_mut() {
        let end = guest.version.as_ref().map_or(0, |(_, at)| *at);
        ends.insert(*number, end);
        guest.forget_later_disks(to)?;
        for target in guest.targets.values_mut() {
            target.written = 0;
            let cleared = target.file.set_length(0);
            cleared.map_err(io_at(&target.part))?;
        }
    }
    read(parcel, key, to, guests, Some(&ends))
}

fn read(
    parcel: &Parcel,
    key: &DataKey,
    to: &mut To<'_>,
    guests: &mut BTreeMap<u32, Arriving>,
    ends: Option<&Ends>,
) -> Result<Report, ImportError> {
    let mut number = 0;
    let mut failed = None;
    let read = parcel.read(key, |record| {
        number += 1;
        // Where content is lost, records may contradict each other. The end reports the loss.
        if matches!(failed, Some(ImportError::Contradiction(_))) {
            return Ok(());
        }
        match take(record, number, to, guests, ends) {
            Ok(()) => Ok(()),
            Err(error) => {
                let is_odd = matches!(error, ImportError::Contradiction(_));
                failed = Some(error);
                is_odd.then_some(()).ok_or("the import has failed")
            }
        }
    });
    match (failed, read) {
        (None | Some(ImportError::Contradiction(_)), Ok(report)) if report.lost > 0 => {
            Err(lost(parcel, &report))
        }
        (Some(error), _) => Err(error),
        (None, read) => Ok(read?),
    }
}

/// Returns why content is missing.
fn lost(parcel: &Parcel, report: &Report) -> ImportError {
    let unread = report
        .damage
        .iter()
        .find_map(|(number, damage)| match damage {
            Damage::Cells { error, .. } => parcel.device(*number).zip(error.clone()),
            Damage::Absent => None,
        });
    match unread {
        None => ImportError::Lost(report.lost),
        Some((device, error)) => ImportError::Unread {
            cells: report.lost,
            path: device.path().to_path_buf(),
            error,
        },
    }
}

fn take(
    record: Record,
    number: u64,
    to: &mut To<'_>,
    guests: &mut BTreeMap<u32, Arriving>,
    ends: Option<&Ends>,
) -> Result<(), ImportError> {
    match record {
        Record::Guest(guest) => {
            if ends.is_some_and(|ends| !reaches(ends, guest.guest, number)) {
                return Ok(());
            }
            let arriving = guests.entry(guest.guest).or_insert_with(|| Arriving {
                guest: guest.clone(),
                targets: BTreeMap::new(),
                version: None,
                last_chunk: 0,
            });
            for disk in &guest.disks {
                if ends.is_some() && !arriving.targets.contains_key(&disk.disk) {
                    // It is not of the version.
                    continue;
                }
                let target = match arriving.targets.entry(disk.disk) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => {
                        let path = (to.place)(&guest, disk)?;
                        if !to.taken.insert(path.clone()) {
                            return Err(ImportError::Twice(path));
                        }
                        new.insert(Target::create(to.places, path, disk)?)
                    }
                };
                target.disk = disk.clone();
                let sized = target.file.set_length(disk.bytes);
                sized.map_err(io_at(&target.part))?;
            }
            arriving.guest = guest;
            match ends {
                None => enough_room(to.places, guests),
                // It is written in place of what was there.
                Some(_) => Ok(()),
            }
        }
        Record::Chunk(chunk) => {
            if ends.is_some_and(|ends| !reaches(ends, chunk.guest, number)) {
                return Ok(());
            }
            let unknown = ImportError::Contradiction("a chunk is of an unknown guest or disk");
            let Some(guest) = guests.get_mut(&chunk.guest) else {
                return Err(unknown);
            };
            guest.last_chunk = number;
            match (guest.targets.get_mut(&chunk.disk), ends) {
                (Some(target), _) => target.write(&chunk),
                (None, None) => Err(unknown),
                // It is not of the version.
                (None, Some(_)) => Ok(()),
            }
        }
        Record::Version(version) if to.up_to.is_some_and(|last| version.version > last) => {
            to.later.get_or_insert(version.version);
            Ok(())
        }
        Record::Version(version) => match guests.get_mut(&version.guest) {
            Some(guest) => {
                guest.version = Some((version, number));
                Ok(())
            }
            None => Err(ImportError::Contradiction(
                "a version is of an unknown guest",
            )),
        },
    }
}

/// Returns whether a record belongs to what is imported of a guest.
fn reaches(ends: &Ends, guest: u32, number: u64) -> bool {
    ends.get(&guest).is_some_and(|end| number <= *end)
}

impl Arriving {
    fn imported(&self) -> Option<ImportedGuest> {
        let (version, _) = self.version.as_ref()?;
        Some(ImportedGuest {
            guest: self.guest.name.clone(),
            description: self.guest.description.clone(),
            version: version.version,
            consistent: version.consistent,
            frozen: version.frozen,
            moment: version.moment,
        })
    }

    /// Removes the files of disks that the guest did not have yet.
    fn forget_later_disks(&mut self, to: &mut To<'_>) -> Result<(), ImportError> {
        let Some((version, _)) = &self.version else {
            return Ok(());
        };
        let has = |number: &u32| version.disks.iter().any(|disk| disk.disk == *number);
        let all = std::mem::take(&mut self.targets).into_iter();
        let (kept, later): (BTreeMap<_, _>, BTreeMap<_, _>) = all.partition(|(it, _)| has(it));
        self.targets = kept;
        for target in later.into_values() {
            to.taken.remove(&target.path);
            let removed = to.places.remove(&target.part);
            removed.map_err(io_at(&target.part))?;
        }
        Ok(())
    }
}

impl Target {
    fn create(places: &dyn Places, path: PathBuf, disk: &Disk) -> Result<Self, ImportError> {
        let part = part_of(&path);
        let file = places.create(&part).map_err(io_at(&part))?;
        Ok(Self {
            part,
            path,
            file,
            disk: disk.clone(),
            written: 0,
        })
    }

    fn write(&mut self, chunk: &Chunk) -> Result<(), ImportError> {
        const BEYOND: ImportError = ImportError::Contradiction("a chunk is beyond its disk");
        let from = chunk.chunk * CHUNK_BYTES as u64;
        let room = self.disk.bytes.checked_sub(from).filter(|room| *room > 0);
        let length = room.ok_or(BEYOND)?.min(CHUNK_BYTES as u64);
        let fails = io_at(&self.part);
        match &chunk.content {
            Some(content) if content.len() as u64 == length => {
                self.written += length;
                self.file.write_at(from, content).map_err(fails)
            }
            Some(_) => Err(ImportError::Contradiction("a chunk has another length")),
            // The file is sparse, but the chunk may have had content before.
            None => {
                let mut now = vec![0; length as usize];
                self.file.read_at(from, &mut now).map_err(&fails)?;
                match now.iter().all(|byte| *byte == 0) {
                    true => Ok(()),
                    false => {
                        now.fill(0);
                        self.file.write_at(from, &now).map_err(fails)
                    }
                }
            }
        }
    }

    /// Reads the file, and returns its digest.
    fn digest(&self) -> io::Result<String> {
        let mut whole = Context::new(&SHA256);
        let mut from = 0;
        while from < self.disk.bytes {
            let length = (self.disk.bytes - from).min(CHUNK_BYTES as u64);
            let mut content = vec![0; length as usize];
            self.file.read_at(from, &mut content)?;
            whole.update(&Tree::of_chunk(&content));
            from += length;
        }
        Ok(text(whole.finish().as_ref()))
    }
}

/// Checks that the file systems have room for what the disks took at the source, as far as the
/// parcel says that.
fn enough_room(places: &dyn Places, guests: &BTreeMap<u32, Arriving>) -> Result<(), ImportError> {
    let mut needs: BTreeMap<u64, (u64, Room, &Path)> = BTreeMap::new();
    for target in guests.values().flat_map(|guest| guest.targets.values()) {
        let folder = folder_of(&target.path);
        let room = places.room(folder).map_err(io_at(folder))?;
        let used = target.disk.used.unwrap_or(0).min(target.disk.bytes);
        let (needed, ..) = needs.entry(room.device).or_insert((0, room, folder));
        *needed = needed.saturating_add(used.saturating_sub(target.written));
    }
    let lacks = |(needed, room, _): &&(u64, Room, &Path)| *needed > room.free_bytes;
    match needs.values().find(lacks) {
        None => Ok(()),
        Some((needed, room, folder)) => Err(ImportError::Room {
            folder: folder.to_path_buf(),
            needed: *needed,
            free: room.free_bytes,
        }),
    }
}

/// Syncs all files, compares them with their versions, and gives them their names.
fn finish(
    places: &dyn Places,
    guests: &BTreeMap<u32, Arriving>,
) -> Result<Vec<ImportedDisk>, ImportError> {
    let mut imported = Vec::new();
    for guest in guests.values() {
        let Some((version, _)) = &guest.version else {
            // An export of it was interrupted, and never completed.
            for target in guest.targets.values() {
                let removed = places.remove(&target.part);
                removed.map_err(io_at(&target.part))?;
            }
            continue;
        };
        for (number, target) in &guest.targets {
            let synced = target.file.sync("an imported disk");
            synced.map_err(io_at(&target.part))?;
            let digest = target.digest().map_err(io_at(&target.part))?;
            let mut expected = version.disks.iter();
            let expected = expected.find(|disk| disk.disk == *number);
            if expected.is_none_or(|disk| disk.digest != digest) {
                return Err(ImportError::Digest {
                    guest: guest.guest.name.clone(),
                    disk: target.disk.name.clone(),
                });
            }
            imported.push((
                target,
                ImportedDisk {
                    guest: guest.guest.name.clone(),
                    disk: target.disk.name.clone(),
                    path: target.path.clone(),
                    bytes: target.disk.bytes,
                    digest,
                    version: version.version,
                    time: version.time,
                },
            ));
        }
    }
    for (target, _) in &imported {
        let renamed = places.rename(&target.part, &target.path);
        renamed.map_err(io_at(&target.path))?;
        let folder = folder_of(&target.path);
        let synced = places.sync_folder(folder, "an imported disk's name");
        synced.map_err(io_at(folder))?;
    }
    Ok(imported.into_iter().map(|(_, imported)| imported).collect())
}
