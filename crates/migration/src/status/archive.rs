//! Reports of migrations that ended, in a folder with one file each. The oldest are removed.

use crate::host::lock::lock;
use crate::status::migration::Entry;
use longhaul_api::{Migration, Report};
use longhaul_protocol::MigrationId;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::SystemTime;

/// Limit on the number of reports.
const KEPT_MAX: usize = 500;
/// Limit on the size of a report, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The folder of reports.
#[derive(Debug)]
pub(crate) struct Archive {
    folder: PathBuf,
    /// Held while a report is written: figures that are known late may be kept at once.
    writing: Mutex<()>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    migration: Migration,
    report: Report,
}

impl Archive {
    /// Opens the folder. Creates it if it does not exist.
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
            writing: Mutex::new(()),
        })
    }

    /// Writes the report of a migration that has ended. Nothing depends on reports, so a failure is
    /// only logged.
    pub(crate) fn keep(&self, entry: &Entry) {
        let _writing = lock(&self.writing);
        let mut migration = entry.migration();
        migration.progress = None;
        let document = Document {
            migration,
            report: entry.report(),
        };
        let path = self.folder.join(format!("{}.json", entry.id()));
        let written = serde_json::to_vec_pretty(&document)
            .map_err(io::Error::other)
            .and_then(|bytes| fs::write(&path, bytes));
        if let Err(error) = written.and_then(|()| self.files().map(drop)) {
            tracing::warn!(%error, path = %path.display(), "cannot keep a report");
        }
    }

    /// Returns the files, oldest first. Removes those beyond the limit.
    fn files(&self) -> io::Result<Vec<(SystemTime, PathBuf, MigrationId)>> {
        let mut files = Vec::new();
        for file in fs::read_dir(&self.folder)? {
            let file = file?;
            let name = file.file_name();
            let id = name.to_str().and_then(|name| name.strip_suffix(".json"));
            let Some(id) = id.and_then(|id| id.parse().ok()) else {
                continue;
            };
            files.push((file.metadata()?.modified()?, file.path(), id));
        }
        files.sort();
        let excess = files.len().saturating_sub(KEPT_MAX);
        for (_, path, _) in files.drain(..excess) {
            match fs::remove_file(path) {
                // Two migrations that end at once see the same excess.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(files)
    }

    /// Reads all reports. A file that cannot be read is logged.
    pub(crate) fn load(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for (_, path, id) in self.files()? {
            match read(&path) {
                Ok(document) => {
                    entries.push(Entry::ended(id, document.migration, document.report));
                }
                Err(error) => {
                    tracing::warn!(%error, path = %path.display(), "cannot read a report");
                }
            }
        }
        Ok(entries)
    }
}

fn read(path: &Path) -> io::Result<Document> {
    if fs::metadata(path)?.len() > FILE_BYTES_MAX {
        return Err(io::Error::other("it is too long"));
    }
    serde_json::from_slice(&fs::read(path)?).map_err(io::Error::other)
}
