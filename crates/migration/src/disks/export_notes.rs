//! The exports that an agent has created, each with a note of its purpose. The note is durable
//! before the export is inserted, so that a later agent removes it.
//!
//! ```text
//! STATE/KIND/NAME        the folder of an export
//! STATE/KIND/NAME.log    the log of its supervisor and its server
//! STATE/KIND/NAME.note   its purpose
//! ```
//!
//! An unreadable note affects only its own export.

use crate::disks::export_process;
use crate::host::notes::{All, Note, NoteStore};
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::FindError;
use longhaul_hypervisor::helper::Helper;
use longhaul_storage::front::{Control, FrontFolder};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tokio::task::block_in_place;

/// The ends of the files beside an export that identify its image
/// (`left_images`).
pub(crate) const CONTENT: &str = "content";
pub(crate) const ACCEPT: &str = "accept";

/// The note of an export's purpose.
pub(crate) trait ExportNote: Note {
    /// Returns the name of the supervisor, which is unique on this machine, also among other
    /// agents.
    fn helper_name(&self) -> String;

    /// Returns the supervisor.
    fn helper(&mut self) -> &mut Option<Helper>;

    /// Returns the name of the disk for errors.
    fn disk(&self) -> String;
}

/// A note with the folder of its export.
pub(crate) struct Noted<N> {
    pub(crate) note: N,
    folder: PathBuf,
}

/// Why an export could not be inserted or removed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("disk {disk}: {why}")]
pub(crate) struct FrontError {
    disk: String,
    why: String,
    hint: Option<String>,
}

impl FrontError {
    pub(crate) fn new(disk: &str, why: &dyn Display) -> Self {
        let (disk, why) = (disk.to_owned(), why.to_string());
        let hint = None;
        Self { disk, why, hint }
    }

    /// Creates the error for a disk that QEMU has in a form that no export can be put below.
    pub(crate) fn not_found(disk: &str, error: &FindError) -> Self {
        let hint = match error {
            FindError::Nodes(error) => Some(error.hint().to_owned()),
            FindError::Qmp(_) => None,
        };
        let new = Self::new(disk, error);
        Self { hint, ..new }
    }

    pub(crate) fn into_api(self) -> ApiError {
        let error = ApiError::new(ErrorCode::Qemu, self.to_string());
        match self.hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// The notes in a folder, ordered by name.
pub(crate) struct Notes<N> {
    pub(crate) noted: Vec<Noted<N>>,
    pub(crate) unreadable: Vec<Unreadable>,
}

/// A note that cannot be read.
#[derive(Debug)]
pub(crate) struct Unreadable {
    folder: PathBuf,
    why: io::Error,
}

impl<N> Default for Notes<N> {
    fn default() -> Self {
        Self {
            noted: Vec::new(),
            unreadable: Vec::new(),
        }
    }
}

impl<N> Notes<N> {
    pub(crate) fn is_empty(&self) -> bool {
        self.noted.is_empty() && self.unreadable.is_empty()
    }

    /// Logs each unreadable note once.
    pub(crate) fn log_unreadable(&self, logged: &mut BTreeSet<PathBuf>) {
        for Unreadable { folder, why } in &self.unreadable {
            if logged.insert(folder.clone()) {
                tracing::error!(
                    export = %folder.display(),
                    %why,
                    "a note cannot be read: its disk export stays as it is"
                );
            }
        }
    }
}

impl Unreadable {
    /// Returns the name of the export.
    pub(crate) fn name(&self) -> Cow<'_, str> {
        self.folder
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
    }

    pub(crate) fn folder(&self) -> FrontFolder {
        FrontFolder::open(&self.folder)
    }

    pub(crate) fn into_error(self) -> io::Error {
        self.why
    }
}

/// Reads all notes of a kind. An unreadable note does not affect the others.
pub(crate) fn notes<N: ExportNote>(state: &Path) -> io::Result<Notes<N>> {
    let store = NoteStore::<N>::of(state);
    let All { notes, unreadable } = store.all()?;
    let folder = |name: &str| store.folder().join(name);
    Ok(Notes {
        noted: notes
            .into_iter()
            .map(|(name, note)| Noted::new(folder(&name), note))
            .collect(),
        unreadable: unreadable
            .into_iter()
            .map(|(name, why)| Unreadable {
                folder: folder(&name),
                why,
            })
            .collect(),
    })
}

/// Creates the folder for exports and their notes, and returns it.
pub(crate) fn create_above<N: ExportNote>(state: &Path) -> io::Result<PathBuf> {
    let store = NoteStore::<N>::of(state);
    store.create()?;
    // QEMU's account passes through this folder to its socket.
    fs::set_permissions(store.folder(), Permissions::from_mode(0o711))?;
    Ok(store.folder().to_owned())
}

impl<N: ExportNote> Noted<N> {
    /// Creates the note in memory, for an export that does not exist yet.
    pub(crate) fn new(folder: PathBuf, note: N) -> Self {
        Self { note, folder }
    }

    /// Reads the note of an export's folder.
    pub(crate) fn read(folder: PathBuf) -> io::Result<Self> {
        let (store, name) = store_of(&folder);
        let note = store.read(&name)?;
        Ok(Self { note, folder })
    }

    /// Returns whether an export's folder has a note.
    pub(crate) fn is_noted(folder: &Path) -> bool {
        let (store, name) = store_of::<N>(folder);
        store.exists(&name)
    }

    pub(crate) fn read_again(&mut self) -> io::Result<()> {
        *self = Self::read(self.folder.clone())?;
        Ok(())
    }

    pub(crate) fn write(&self) -> io::Result<()> {
        let (store, name) = store_of(&self.folder);
        store.write(&name, &self.note)
    }

    pub(crate) fn error(&self, why: &dyn Display) -> FrontError {
        FrontError::new(&self.note.disk(), why)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn folder(&self) -> FrontFolder {
        FrontFolder::open(&self.folder)
    }

    pub(crate) fn control(&self) -> Control {
        Control::new(self.folder())
    }

    /// Starts a supervisor if none answers for the export.
    pub(crate) async fn keep_answering(&mut self) -> Result<(), FrontError> {
        match block_in_place(|| self.control().status()) {
            Ok(_) => Ok(()),
            Err(_) => self.supervise().await,
        }
    }

    /// Starts a supervisor, and waits until its server answers.
    pub(crate) async fn supervise(&mut self) -> Result<(), FrontError> {
        let log = export_process::log(&self.folder);
        let helper = export_process::start(&self.folder, &log, &self.note.helper_name()).await;
        *self.note.helper() = Some(helper.map_err(|error| self.error(&error))?);
        self.write().map_err(|error| self.error(&error))?;
        let answers = export_process::answers(&self.folder, &log).await;
        answers.map_err(|why| self.error(&why))
    }

    /// Ends the supervisor and server. The disk must not be used through them any more.
    pub(crate) async fn stop(&mut self) -> Result<(), FrontError> {
        // An agent may have died while it created the folder.
        let made = self.folder().is_made();
        if made && block_in_place(|| self.control().stop()).is_err() {
            // No supervisor runs. A new one ends a server that still runs.
            self.supervise().await?;
            let stopped = block_in_place(|| self.control().stop());
            stopped.map_err(|error| self.error(&error))?;
        }
        if let Some(helper) = self.note.helper().clone() {
            helper.ended().await.map_err(|error| self.error(&error))?;
        }
        Ok(())
    }

    /// Removes the note, and then the export's files. A folder without a note is removed when its
    /// name is needed again.
    pub(crate) fn remove(&self) -> Result<(), FrontError> {
        let (store, name) = store_of::<N>(&self.folder);
        store.remove(&name).map_err(|error| self.error(&error))?;
        remove_unnoted(&self.folder).map_err(|error| self.error(&error))
    }
}

/// Removes the folder of an export without a note, if it exists, and the files beside it.
pub(crate) fn remove_unnoted(folder: &Path) -> io::Result<()> {
    FrontFolder::open(folder)
        .remove()
        .map_err(io::Error::other)?;
    forget(folder)?;
    remove_if_there(&export_process::log(folder))
}

/// Removes the logs of exports that have neither a note nor a folder: an agent died while it
/// removed them. A folder without a note stays, since its note may have been lost. Call this before
/// any export is created.
pub(crate) fn remove_stray_logs<N: ExportNote>(state: &Path) -> io::Result<()> {
    let store = NoteStore::<N>::of(state);
    let entries = match fs::read_dir(store.folder()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in entries {
        let log = entry?.path();
        let folder = log.with_extension("");
        let is_log = export_process::log(&folder) == log;
        if is_log && !folder.exists() && !Noted::<N>::is_noted(&folder) {
            remove_if_there(&log)?;
        }
    }
    Ok(())
}

/// Removes the files that identify an export's image.
pub(crate) fn forget(export: &Path) -> io::Result<()> {
    for what in [CONTENT, ACCEPT] {
        remove_if_there(&beside(export, what))?;
    }
    Ok(())
}

/// Returns the path of a file beside an export's folder.
pub(crate) fn beside(export: &Path, what: &str) -> PathBuf {
    let mut path = export.as_os_str().to_owned();
    path.push(".");
    path.push(what);
    PathBuf::from(path)
}

/// Removes a file, unless it is gone already.
pub(crate) fn remove_if_there(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the store and the name of the note of an export's folder.
fn store_of<N: ExportNote>(folder: &Path) -> (NoteStore<N>, String) {
    // The folder is STATE/KIND/NAME.
    let state = folder.ancestors().nth(2).unwrap_or(Path::new("/"));
    let name = folder.file_name().unwrap_or_default();
    (NoteStore::of(state), name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};

    #[derive(Serialize, Deserialize)]
    struct Some;

    impl Note for Some {
        const FOLDER: &'static str = "some";
    }

    impl ExportNote for Some {
        fn helper_name(&self) -> String {
            unreachable!("nothing is started")
        }

        fn helper(&mut self) -> &mut Option<Helper> {
            unreachable!("nothing is started")
        }

        fn disk(&self) -> String {
            "vda".to_owned()
        }
    }

    #[test]
    fn an_unreadable_note_is_its_own_exports_matter() {
        let state = tempfile::tempdir().unwrap();
        let above = create_above::<Some>(state.path()).unwrap();
        let folder = |name: &str| above.join(name);
        Noted::new(folder("db-1.0"), Some).write().unwrap();
        Noted::new(folder("web-7.0"), Some).write().unwrap();
        for wrong in ["", "{", "{\"more\":1}", &"x".repeat(100 << 10)] {
            fs::write(folder("db-1.0.note"), wrong).unwrap();
            let found = notes::<Some>(state.path()).unwrap();
            assert_eq!(found.noted.len(), 1, "{wrong:.20}");
            assert_eq!(found.noted[0].path(), folder("web-7.0"));
            assert_eq!(found.unreadable.len(), 1);
            assert_eq!(found.unreadable[0].name(), "db-1.0");
            let why = found.unreadable.into_iter().next().unwrap().into_error();
            assert!(why.to_string().contains("db-1.0.note"), "{why}");
        }
    }

    /// A crash between the two steps must leave a folder without a note. A note would block the
    /// guest's next migration for ever.
    #[test]
    fn a_note_goes_before_its_folder() {
        let state = tempfile::tempdir().unwrap();
        let above = create_above::<Some>(state.path()).unwrap();
        let folder = above.join("web-7.0");
        let noted = Noted::new(folder.clone(), Some);
        noted.write().unwrap();
        // A file cannot be removed as a folder.
        fs::write(&folder, "").unwrap();
        assert!(noted.remove().is_err());
        assert!(!Noted::<Some>::is_noted(&folder));
        assert!(notes::<Some>(state.path()).unwrap().is_empty());

        fs::remove_file(&folder).unwrap();
        fs::create_dir_all(folder.join("own")).unwrap();
        fs::write(export_process::log(&folder), "").unwrap();
        remove_unnoted(&folder).unwrap();
        assert_eq!(fs::read_dir(&above).unwrap().count(), 0);
        remove_unnoted(&folder).unwrap();
    }

    #[test]
    fn a_log_without_an_export_is_removed_at_the_start() {
        let state = tempfile::tempdir().unwrap();
        remove_stray_logs::<Some>(state.path()).unwrap();
        let above = create_above::<Some>(state.path()).unwrap();
        let folder = |name: &str| above.join(name);
        for name in ["ended-11.0", "noted.0", "made.0"] {
            fs::write(export_process::log(&folder(name)), "").unwrap();
        }
        Noted::new(folder("noted.0"), Some).write().unwrap();
        fs::create_dir(folder("made.0")).unwrap();
        remove_stray_logs::<Some>(state.path()).unwrap();
        let exists = |name: &str| export_process::log(&folder(name)).exists();
        assert_eq!(
            ["ended-11.0", "noted.0", "made.0"].map(exists),
            [false, true, true]
        );
    }
}
