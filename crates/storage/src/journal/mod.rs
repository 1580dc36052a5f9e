//! The journal of one migration: an append-only file whose records are durable before the next step
//! is taken.
//!
//! `docs/journal.md` is the normative description of its bytes and of each sync. A record that was
//! cut off by a crash is omitted when the journal is read, and overwritten by the next one; any
//! other damage is an error that names the file and the offset.

mod format;
mod set_aside;
#[cfg(test)]
mod tests;

pub use format::{Ending, Entry, MAGIC, NotRead, Reading, read};
pub use set_aside::{SetAside, list_set_aside, set_aside};

use crate::files::{Access, Files, OpenFile, RealFiles, create_folder, parent, read_whole};
use longhaul_engine::handover::Record;
use longhaul_protocol::MigrationId;
use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest journal, in bytes: an attempt takes about six records.
const JOURNAL_BYTES_MAX: u64 = 16 << 20;
/// Space reserved with a journal's first record, in bytes: this attempt and many more can end on a
/// disk that is full by then.
pub const RESERVED_BYTES: u64 = 64 << 10;

/// A journal that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file system refused.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The file is not a journal.
    #[error("{} is not a journal", .0.display())]
    Foreign(PathBuf),
    /// The file is a journal in another format.
    #[error(
        "{} is a journal of version {version}, and this version of Longhaul knows version {}: use \
         the version that wrote it", path.display(), MAGIC[7]
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u8,
    },
    /// A newer agent wrote it.
    #[error(
        "{} has a record at byte {offset} that this version of Longhaul does not know (number \
         {number}): a newer one wrote it; use that one, or one that is newer still", path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
        /// The offset of the record, in bytes.
        offset: u64,
        /// Its number.
        number: u32,
    },
    /// The file has changed since it was written.
    #[error(
        "{} is damaged at byte {offset}; keep the file, and compare with the other host's journal \
         before you start the guest anywhere", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The offset of the damage, in bytes.
        offset: u64,
    },
    /// A record or journal exceeds its limit.
    #[error("{} would be larger than a journal can be", .0.display())]
    TooLarge(PathBuf),
    /// A person has set it aside.
    #[error(
        "the journal of migration {0} was set aside: a person decides where its guest runs, and no \
         question about it is answered"
    )]
    SetAside(MigrationId),
    /// This agent has it open already.
    #[error("{} is being written by another task of this agent", .0.display())]
    Busy(PathBuf),
}

/// What a disk says of a place that it cannot read, and a file system of its own damage.
const UNREADABLE: [i32; 3] = [nix::libc::EIO, nix::libc::EBADMSG, nix::libc::EUCLEAN];

impl JournalError {
    /// Whether this one file is at fault, and not the host: other journals can be used.
    pub fn is_of_the_file(&self) -> bool {
        match self {
            Self::Io { source, .. } => source
                .raw_os_error()
                .is_some_and(|code| UNREADABLE.contains(&code)),
            Self::Foreign(_)
            | Self::Version { .. }
            | Self::Unknown { .. }
            | Self::Damaged { .. }
            | Self::TooLarge(_)
            | Self::SetAside(_) => true,
            Self::Busy(_) => false,
        }
    }

    /// Whether a newer version of Longhaul can read the file.
    pub fn is_newer(&self) -> bool {
        matches!(self, Self::Version { .. } | Self::Unknown { .. })
    }
}

/// The folder of all journals.
#[derive(Debug, Clone)]
pub struct Journals {
    files: Arc<dyn Files>,
    folder: PathBuf,
    /// Enforces one writer per journal.
    open: Arc<Mutex<HashSet<MigrationId>>>,
}

impl Journals {
    /// Opens a folder, and creates it where it is missing.
    pub fn open(folder: &Path) -> Result<Self, JournalError> {
        Self::open_in(Arc::new(RealFiles), folder)
    }

    /// Opens a folder in a given file system.
    pub fn open_in(files: Arc<dyn Files>, folder: &Path) -> Result<Self, JournalError> {
        create_folder(&*files, folder).map_err(io_error("make", folder))?;
        Ok(Self {
            files,
            folder: folder.to_owned(),
            open: Arc::default(),
        })
    }

    fn now_open(&self) -> MutexGuard<'_, HashSet<MigrationId>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a journal from being opened twice, until it is dropped.
#[derive(Debug)]
struct Opened {
    journals: Journals,
    migration: MigrationId,
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.journals.now_open().remove(&self.migration);
    }
}

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    opened: Opened,
    path: PathBuf,
    /// `None` before the first record: a journal without records has no file.
    file: Option<Box<dyn OpenFile>>,
    records: Vec<Record>,
    /// The place of the next record.
    end: u64,
    /// Upper bound of the file's length, over all attempted writes.
    length: u64,
}

impl Journal {
    /// Opens the journal of a migration. Its records are durable when this returns, even if the
    /// agent that wrote it was killed in between.
    pub fn open(journals: &Journals, migration: MigrationId) -> Result<Self, JournalError> {
        let path = journals.folder.join(file_name(migration));
        let tombstone = SetAside::of(&journals.folder, migration).tombstone;
        match journals.files.open(&tombstone, Access::Read) {
            Ok(_) => return Err(JournalError::SetAside(migration)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error("open", &tombstone)(error)),
        }
        if !journals.now_open().insert(migration) {
            return Err(JournalError::Busy(path));
        }
        let mut journal = Self {
            opened: Opened {
                journals: journals.clone(),
                migration,
            },
            path,
            file: None,
            records: Vec::new(),
            end: 0,
            length: 0,
        };
        journal.load()?;
        Ok(journal)
    }

    /// Returns the migrations that have a journal.
    pub fn list(journals: &Journals) -> Result<Vec<MigrationId>, JournalError> {
        list(&*journals.files, &journals.folder, ".journal")
    }

    fn load(&mut self) -> Result<(), JournalError> {
        let error = |what| io_error(what, &self.path);
        let files = &self.opened.journals.files;
        let file = match files.open(&self.path, Access::Write) {
            Ok(file) => file,
            Err(missing) if missing.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(other) => return Err(error("open")(other)),
        };
        let bytes = read_whole(&*file, JOURNAL_BYTES_MAX).map_err(error("read"))?;
        let mut bytes = bytes.ok_or_else(|| JournalError::TooLarge(self.path.clone()))?;
        let reading = checked(read(&bytes), &self.path)?;
        self.end = reading.end;
        self.length = bytes.len() as u64;
        self.records = reading.entries.into_iter().map(|e| e.record).collect();
        if !bytes.is_empty() {
            // Readable does not mean durable: the agent that wrote the journal may have been killed
            // before its sync, or have seen the sync fail, after which another sync alone would
            // write nothing. Nor may an omitted record reappear.
            bytes[self.end as usize..].fill(0);
            file.write_at(0, &bytes).map_err(error("write"))?;
            file.sync("the records that were found")
                .map_err(error("sync"))?;
            self.sync_name("the name that was found")?;
        }
        self.file = Some(file);
        Ok(())
    }

    /// Returns the records, oldest first.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Makes a record durable: when this returns, it survives a power cut. After an error it may or
    /// may not have been written; the next record takes its place.
    pub fn append(&mut self, record: &Record) -> Result<(), JournalError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_ms = since.map_or(0, |since| since.as_millis() as u64);
        self.append_at(unix_ms, record)
    }

    /// Makes a record with a given time durable.
    pub fn append_at(&mut self, unix_ms: u64, record: &Record) -> Result<(), JournalError> {
        let too_large = || JournalError::TooLarge(self.path.clone());
        let mut bytes = format::encode(self.end, unix_ms, record).ok_or_else(too_large)?;
        let end = self.end + bytes.len() as u64;
        if end > JOURNAL_BYTES_MAX {
            return Err(too_large());
        }
        // Overwrites the remains of a failed record, so that none of it follows this one. The file
        // is not truncated instead, since that would release its reserved space.
        self.length = self.length.max(end);
        bytes.resize((self.length - self.end) as usize, 0);
        let first = self.end == 0;
        let error = |what| io_error(what, &self.path);
        let file = match &self.file {
            Some(file) => file,
            None => {
                let files = &self.opened.journals.files;
                let file = files.open(&self.path, Access::Create);
                self.file.insert(file.map_err(error("make"))?)
            }
        };
        if first {
            file.reserve(RESERVED_BYTES)
                .map_err(error("set space aside for"))?;
        }
        file.write_at(self.end, &bytes).map_err(error("write"))?;
        file.sync("the record").map_err(error("sync"))?;
        if first {
            self.sync_name("the journal's name")?;
        }
        self.end = end;
        self.records.push(record.clone());
        Ok(())
    }

    fn sync_name(&self, what: &'static str) -> Result<(), JournalError> {
        let folder = parent(&self.path);
        let files = &self.opened.journals.files;
        let synced = files.sync_folder(folder, what);
        synced.map_err(io_error("sync", folder))
    }

    /// Removes the journal once the migration needs it no more. It may exist again after a power
    /// cut, unchanged.
    pub fn remove(self) -> Result<(), JournalError> {
        match self.opened.journals.files.remove(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(io_error("remove", &self.path)(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Returns the path of the file, which exists from the first record on.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Reads a journal's file for display, without changing anything. Its records need not be durable.
pub fn read_journal(path: &Path) -> Result<Reading, JournalError> {
    let error = |what| io_error(what, path);
    let file = RealFiles.open(path, Access::Read).map_err(error("open"))?;
    let bytes = read_whole(&*file, JOURNAL_BYTES_MAX).map_err(error("read"))?;
    let bytes = bytes.ok_or_else(|| JournalError::TooLarge(path.to_owned()))?;
    read(&bytes).map_err(|not_read| refused(not_read, path))
}

/// Reads a journal's file as [`read_journal`] does, and refuses one that an agent would not use.
pub fn read_sound_journal(path: &Path) -> Result<Reading, JournalError> {
    checked(Ok(read_journal(path)?), path)
}

/// Returns the migrations that have a journal in a folder, which may be missing.
pub fn list_journals(folder: &Path) -> Result<Vec<MigrationId>, JournalError> {
    list(&RealFiles, folder, ".journal")
}

/// Returns the name of a migration's file in the folder of journals.
pub fn file_name(migration: MigrationId) -> String {
    format!("{migration}.journal")
}

fn list(files: &dyn Files, folder: &Path, end: &str) -> Result<Vec<MigrationId>, JournalError> {
    let names = match files.names(folder) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("read", folder)(error)),
    };
    let ids = names.iter().filter_map(|name| {
        let id = name.to_str()?.strip_suffix(end)?;
        id.parse::<MigrationId>().ok()
    });
    let mut ids: Vec<_> = ids.collect();
    ids.sort();
    Ok(ids)
}

/// Returns the records if the journal is undamaged: only then may they be acted upon.
fn checked(read: Result<Reading, NotRead>, path: &Path) -> Result<Reading, JournalError> {
    let reading = read.map_err(|not_read| refused(not_read, path))?;
    let (path, offset) = (path.to_owned(), reading.end);
    match reading.ending {
        Ending::Whole | Ending::CutOff(_) => Ok(reading),
        Ending::Damaged => Err(JournalError::Damaged { path, offset }),
        Ending::Unknown(number) => Err(JournalError::Unknown {
            path,
            offset,
            number,
        }),
    }
}

fn refused(not_read: NotRead, path: &Path) -> JournalError {
    let path = path.to_owned();
    match not_read {
        NotRead::Foreign => JournalError::Foreign(path),
        NotRead::Version(version) => JournalError::Version { path, version },
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError + use<> {
    let path = path.to_owned();
    move |source| JournalError::Io { what, path, source }
}
