//! The journal of one migration: an append-only file whose records are durable before the next
//! step is taken.
//!
//! `docs/journal.md` is the normative description of its bytes. A record that was cut off by a
//! crash is left out when the journal is read, and overwritten by the next one; any other damage is
//! an error that names the file and the place.

use longhaul_engine::handover::Record;
use longhaul_protocol::MigrationId;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// First bytes of every journal: a name and the format's version.
pub const MAGIC: [u8; 8] = *b"LHJRNL\x00\x01";
/// Longest record, in bytes.
const RECORD_BYTES_MAX: usize = 4096;
/// Longest journal, in bytes: an attempt takes half a dozen records.
const JOURNAL_BYTES_MAX: u64 = 16 << 20;
/// Bytes of length and checksum in front of each record.
const HEADER_BYTES: usize = 12;

/// A journal that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file system refused.
    #[error("cannot {what} {}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        #[source]
        source: io::Error,
    },
    /// The file is not a journal of this version.
    #[error("{} is not a journal of a version that this agent knows", .0.display())]
    Foreign(PathBuf),
    /// The file has changed since it was written.
    #[error(
        "{} is damaged at byte {offset}; keep the file, and compare with the other host's journal \
         before you start the guest anywhere", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the damage is, in bytes.
        offset: u64,
    },
    /// A record or journal that is larger than it can be.
    #[error("{} would be larger than a journal can be", .0.display())]
    TooLarge(PathBuf),
}

/// An open journal.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    records: Vec<Record>,
    end: u64,
}

impl Journal {
    /// Opens the journal of a migration in `folder`, or makes it. The folder must be there.
    pub fn open(folder: &Path, migration: MigrationId) -> Result<Self, JournalError> {
        let path = folder.join(format!("{migration}.journal"));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&path).map_err(io_error("open", &path))?;
        let bytes = read_all(&mut file, &path)?;
        let (records, end) = if bytes.len() < MAGIC.len() && MAGIC.starts_with(&bytes) {
            (Vec::new(), 0)
        } else {
            parse(&bytes, &path)?
        };
        Ok(Self {
            path,
            file,
            records,
            end,
        })
    }

    /// The journals in a folder, oldest name first.
    pub fn list(folder: &Path) -> Result<Vec<MigrationId>, JournalError> {
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error("read", folder)(error)),
        };
        let mut ids = Vec::new();
        for entry in entries {
            let name = entry.map_err(io_error("read", folder))?.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".journal"));
            ids.extend(id.and_then(|id| id.parse::<MigrationId>().ok()));
        }
        ids.sort();
        Ok(ids)
    }

    /// What has been recorded, oldest first.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Makes a record durable: when this returns, it survives a power cut.
    pub fn append(&mut self, record: &Record) -> Result<(), JournalError> {
        let too_large = || JournalError::TooLarge(self.path.clone());
        let payload = postcard::to_stdvec(record).map_err(|_| too_large())?;
        if payload.len() > RECORD_BYTES_MAX || self.end > JOURNAL_BYTES_MAX {
            return Err(too_large());
        }
        let first = self.end == 0;
        let mut bytes = Vec::with_capacity(MAGIC.len() + HEADER_BYTES + payload.len());
        if first {
            bytes.extend_from_slice(&MAGIC);
        }
        let place = self.end + bytes.len() as u64;
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&checksum(place, &payload));
        bytes.extend_from_slice(&payload);
        let error = |what| io_error(what, &self.path);
        self.file.set_len(self.end).map_err(error("shorten"))?;
        self.file
            .seek(SeekFrom::Start(self.end))
            .map_err(error("write"))?;
        self.file.write_all(&bytes).map_err(error("write"))?;
        self.file.sync_all().map_err(error("sync"))?;
        if first {
            sync_folder(&self.path)?;
        }
        self.end += bytes.len() as u64;
        self.records.push(record.clone());
        Ok(())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JournalError + use<> {
    let path = path.to_owned();
    move |source| JournalError::Io { what, path, source }
}

fn sync_folder(path: &Path) -> Result<(), JournalError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let opened = File::open(folder).map_err(io_error("open", folder))?;
    opened.sync_all().map_err(io_error("sync", folder))
}

fn read_all(file: &mut File, path: &Path) -> Result<Vec<u8>, JournalError> {
    let mut bytes = Vec::new();
    let mut limited = file.take(JOURNAL_BYTES_MAX + 1);
    limited
        .read_to_end(&mut bytes)
        .map_err(io_error("read", path))?;
    if bytes.len() as u64 > JOURNAL_BYTES_MAX {
        return Err(JournalError::TooLarge(path.to_owned()));
    }
    Ok(bytes)
}

/// The checksum covers the record's place, so that no record can pass for another.
fn checksum(place: u64, payload: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&place.to_le_bytes());
    hasher.update(payload);
    let mut sum = [0; 8];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    sum
}

fn parse(bytes: &[u8], path: &Path) -> Result<(Vec<Record>, u64), JournalError> {
    let rest = bytes.strip_prefix(&MAGIC);
    let mut rest = rest.ok_or_else(|| JournalError::Foreign(path.to_owned()))?;
    let mut records = Vec::new();
    while !rest.is_empty() {
        let place = (bytes.len() - rest.len()) as u64;
        let damaged = || JournalError::Damaged {
            path: path.to_owned(),
            offset: place,
        };
        let Some((header, after)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return Ok((records, place));
        };
        let [a, b, c, d, sum @ ..] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        let whole = length <= RECORD_BYTES_MAX && length <= after.len();
        let payload = &after[..length.min(after.len())];
        if !whole || checksum(place, payload) != sum {
            // A write that was cut off can only be the last one.
            let last = !whole && length <= RECORD_BYTES_MAX || after.len() <= length;
            return if last || all_zero(rest) {
                Ok((records, place))
            } else {
                Err(damaged())
            };
        }
        records.push(postcard::from_bytes(payload).map_err(|_| damaged())?);
        rest = &after[length..];
    }
    Ok((records, bytes.len() as u64))
}

/// Some file systems leave zeros where a write was cut off.
fn all_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::{Attempt, Generation};

    const ID: MigrationId = MigrationId([1, 2, 3, 4, 5, 6, 7, 8]);

    fn records() -> Vec<Record> {
        let attempt = Attempt(1);
        vec![
            Record::Ready { attempt },
            Record::Released {
                attempt,
                generation: Generation(7),
            },
            Record::Aborted {
                attempt,
                reason: "no".repeat(100),
            },
        ]
    }

    fn written(folder: &Path) -> PathBuf {
        let mut journal = Journal::open(folder, ID).unwrap();
        records()
            .iter()
            .for_each(|record| journal.append(record).unwrap());
        journal.path().to_owned()
    }

    #[test]
    fn records_survive_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        written(folder.path());
        assert_eq!(
            Journal::open(folder.path(), ID).unwrap().records(),
            records()
        );
        assert_eq!(Journal::list(folder.path()).unwrap(), [ID]);
    }

    #[test]
    fn a_record_that_was_cut_off_is_left_out_and_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path());
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let mut journal = Journal::open(folder.path(), ID).unwrap();
            let kept = journal.records().to_vec();
            assert_eq!(kept, records()[..kept.len()]);
            journal.append(&records()[0]).unwrap();
            let again = Journal::open(folder.path(), ID).unwrap();
            assert_eq!(again.records().len(), kept.len() + 1, "cut at {length}");
        }
    }

    #[test]
    fn a_flipped_byte_is_never_read_as_a_record() {
        let folder = tempfile::tempdir().unwrap();
        let path = written(folder.path());
        let whole = fs::read(&path).unwrap();
        for place in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[place] ^= 0x40;
            fs::write(&path, &bytes).unwrap();
            if let Ok(journal) = Journal::open(folder.path(), ID) {
                let kept = journal.records();
                assert_eq!(kept, &records()[..kept.len()], "flipped at {place}");
                assert!(kept.len() < records().len(), "flipped at {place}");
            }
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_documentation() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path(), ID).unwrap();
        journal.append(&records()[1]).unwrap();
        let bytes = fs::read(journal.path()).unwrap();
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let page = include_str!("../../../docs/journal.md");
        assert!(
            page.contains(&hex.join(" ")),
            "docs/journal.md lacks {}",
            hex.join(" ")
        );
    }
}
