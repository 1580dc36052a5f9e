//! Sets a journal aside that cannot be read, and leaves a tombstone in its place: as long as that
//! is there, the migration is not taken for an unknown one.

use super::{JournalError, file_name, io_error};
use crate::files::{Files, replace};
use longhaul_protocol::MigrationId;
use std::io;
use std::path::{Path, PathBuf};

/// Where a journal is after it was set aside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetAside {
    /// The journal under its new name.
    pub journal: PathBuf,
    /// The tombstone.
    pub tombstone: PathBuf,
}

impl SetAside {
    /// Returns the names for a migration's journal in a folder.
    pub fn of(folder: &Path, migration: MigrationId) -> Self {
        Self {
            journal: folder.join(format!("{migration}.damaged")),
            tombstone: folder.join(format!("{migration}.tombstone")),
        }
    }

    /// Whether there is a tombstone.
    pub fn exists(&self) -> bool {
        // What cannot be seen is taken for one: it only keeps agents from answering.
        self.tombstone.try_exists().unwrap_or(true)
    }
}

/// Sets a journal aside, durably. No agent may use the folder meanwhile. The tombstone says why.
pub fn set_aside(
    files: &dyn Files,
    folder: &Path,
    migration: MigrationId,
    why: &str,
) -> Result<SetAside, JournalError> {
    let names = SetAside::of(folder, migration);
    let what = ["the tombstone", "the tombstone's name"];
    replace(files, &names.tombstone, why.as_bytes(), what)
        .map_err(io_error("write", &names.tombstone))?;
    let journal = folder.join(file_name(migration));
    match files.rename(&journal, &names.journal) {
        // It was set aside before.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => other.map_err(io_error("rename", &journal))?,
    }
    let synced = files.sync_folder(folder, "the journal's other name");
    synced.map_err(io_error("sync", folder))?;
    Ok(names)
}

/// Returns the migrations whose journals were set aside in a folder, which may be missing.
pub fn list_set_aside(folder: &Path) -> Result<Vec<MigrationId>, JournalError> {
    super::list(&crate::files::RealFiles, folder, ".tombstone")
}
