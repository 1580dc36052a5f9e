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

use crate::disks::{export_process, left_images};
use crate::host::atomic_file;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::helper::Helper;
use longhaul_storage::files::{RealFiles, create_folder};
use longhaul_storage::front::{Control, FrontFolder};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tokio::task::block_in_place;

/// Limit on the size of a note, in bytes.
const NOTE_BYTES_MAX: u64 = 64 << 10;
const NOTE: &str = "note";

/// The purpose of an export.
pub(crate) trait Note: Serialize + DeserializeOwned {
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
#[derive(Debug, thiserror::Error)]
#[error("disk {disk}: {why}")]
pub(crate) struct FrontError {
    disk: String,
    why: String,
}

impl FrontError {
    pub(crate) fn new(disk: &str, why: &dyn Display) -> Self {
        let (disk, why) = (disk.to_owned(), why.to_string());
        Self { disk, why }
    }

    pub(crate) fn into_api(self) -> ApiError {
        ApiError::new(ErrorCode::Qemu, self.to_string())
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

/// Reads all notes in a folder. An unreadable note does not affect the others.
pub(crate) fn notes<N: Note>(above: &Path) -> io::Result<Notes<N>> {
    let mut found = Notes::default();
    let entries = match fs::read_dir(above) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        other => other?,
    };
    let mut folders = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == NOTE) {
            folders.push(path.with_extension(""));
        }
    }
    folders.sort();
    for folder in folders {
        match Noted::read(folder.clone()) {
            Ok(noted) => found.noted.push(noted),
            // It has been removed since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(why) => found.unreadable.push(Unreadable { folder, why }),
        }
    }
    Ok(found)
}

/// Creates the folder for exports and their notes.
pub(crate) fn create_above(above: &Path) -> io::Result<()> {
    create_folder(&RealFiles, above)?;
    // QEMU's account passes through this folder to its socket.
    fs::set_permissions(above, Permissions::from_mode(0o711))
}

impl<N: Note> Noted<N> {
    /// Creates the note in memory, for an export that does not exist yet.
    pub(crate) fn new(folder: PathBuf, note: N) -> Self {
        Self { note, folder }
    }

    /// Reads the note of an export's folder.
    pub(crate) fn read(folder: PathBuf) -> io::Result<Self> {
        let path = note_of(&folder);
        let of_path =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut text = Vec::new();
        let file = File::open(&path).map_err(of_path)?;
        let read = file.take(NOTE_BYTES_MAX).read_to_end(&mut text);
        read.map_err(of_path)?;
        let note = serde_json::from_slice(&text).map_err(|error| of_path(error.into()))?;
        Ok(Self { note, folder })
    }

    /// Returns whether an export's folder has a note.
    pub(crate) fn is_noted(folder: &Path) -> bool {
        note_of(folder).exists()
    }

    pub(crate) fn read_again(&mut self) -> io::Result<()> {
        *self = Self::read(self.folder.clone())?;
        Ok(())
    }

    pub(crate) fn write(&self) -> io::Result<()> {
        let text = serde_json::to_vec(&self.note).map_err(io::Error::other)?;
        atomic_file::write(&note_of(&self.folder), &text)
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
        let removed = remove_if_there(&note_of(&self.folder));
        removed.map_err(|error| self.error(&error))?;
        remove_unnoted(&self.folder).map_err(|error| self.error(&error))
    }
}

/// Removes the folder of an export without a note, if it exists, and the files beside it.
pub(crate) fn remove_unnoted(folder: &Path) -> io::Result<()> {
    FrontFolder::open(folder)
        .remove()
        .map_err(io::Error::other)?;
    left_images::forget(folder)?;
    remove_if_there(&export_process::log(folder))
}

fn remove_if_there(file: &Path) -> io::Result<()> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns the path of the note of an export's folder. The folder's own name may contain dots.
fn note_of(folder: &Path) -> PathBuf {
    let mut path = folder.as_os_str().to_owned();
    path.push(".");
    path.push(NOTE);
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Serialize, Deserialize)]
    struct Some;

    impl Note for Some {
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
        let above = tempfile::tempdir().unwrap();
        let folder = |name: &str| above.path().join(name);
        Noted::new(folder("db-1.0"), Some).write().unwrap();
        Noted::new(folder("web-7.0"), Some).write().unwrap();
        for wrong in ["", "{", "{\"more\":1}", &"x".repeat(100 << 10)] {
            fs::write(folder("db-1.0.note"), wrong).unwrap();
            let found = notes::<Some>(above.path()).unwrap();
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
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("web-7.0");
        let noted = Noted::new(folder.clone(), Some);
        noted.write().unwrap();
        // A file cannot be removed as a folder.
        fs::write(&folder, "").unwrap();
        assert!(noted.remove().is_err());
        assert!(!Noted::<Some>::is_noted(&folder));
        assert!(notes::<Some>(above.path()).unwrap().is_empty());

        fs::remove_file(&folder).unwrap();
        fs::create_dir_all(folder.join("own")).unwrap();
        fs::write(export_process::log(&folder), "").unwrap();
        remove_unnoted(&folder).unwrap();
        assert_eq!(fs::read_dir(above.path()).unwrap().count(), 0);
        remove_unnoted(&folder).unwrap();
    }
}
