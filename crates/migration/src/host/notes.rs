//! Durable notes: what an agent must know, after a restart, of things that move along with guests.
//! A note is a small file, replaced atomically. An unreadable note does not affect the others.
//!
//! ```text
//! STATE/FOLDER/NAME.ENDING
//! ```

use crate::host::atomic_file;
use longhaul_storage::files::{RealFiles, create_folder};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File};
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// Limit on the size of a note, in bytes.
const BYTES_MAX: u64 = 64 << 10;

/// A kind of notes.
pub(crate) trait Note: Serialize + DeserializeOwned {
    /// The folder of these notes in the state folder.
    const FOLDER: &'static str;
    /// The end of the files' names.
    const ENDING: &'static str = "note";

    /// Returns the content of the file.
    fn encode(&self) -> io::Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(io::Error::other)
    }

    /// Reads the content of a file.
    fn decode(content: &[u8]) -> io::Result<Self> {
        Ok(serde_json::from_slice(content)?)
    }
}

/// The notes of one kind in a state folder.
#[derive(Debug)]
pub(crate) struct NoteStore<N> {
    folder: PathBuf,
    kind: PhantomData<fn() -> N>,
}

/// All notes of a kind, each by name, in the order of the names.
#[derive(Debug)]
pub(crate) struct All<N> {
    pub(crate) notes: Vec<(String, N)>,
    /// The notes that cannot be read, and why. Each error names the file.
    pub(crate) unreadable: Vec<(String, io::Error)>,
}

impl<N> Default for All<N> {
    fn default() -> Self {
        Self {
            notes: Vec::new(),
            unreadable: Vec::new(),
        }
    }
}

impl<N: Note> NoteStore<N> {
    /// Names the notes in a state folder. Nothing is created.
    pub(crate) fn of(state: &Path) -> Self {
        Self {
            folder: state.join(N::FOLDER),
            kind: PhantomData,
        }
    }

    /// Returns the folder of the notes.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Creates the folder if it does not exist.
    pub(crate) fn create(&self) -> io::Result<()> {
        create_folder(&RealFiles, &self.folder)
    }

    /// Returns the file of a note. A name may contain dots.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.{}", N::ENDING))
    }

    /// Writes a note durably. Replaces an older one of that name. Creates the folder.
    pub(crate) fn write(&self, name: &str, note: &N) -> io::Result<()> {
        self.create()?;
        atomic_file::write(&self.path(name), &note.encode()?)
    }

    /// Reads a note. Errors name the file.
    pub(crate) fn read(&self, name: &str) -> io::Result<N> {
        let path = self.path(name);
        let read = || {
            let mut content = Vec::new();
            File::open(&path)?
                .take(BYTES_MAX)
                .read_to_end(&mut content)?;
            N::decode(&content)
        };
        read().map_err(|error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        })
    }

    /// Returns whether there is a note of this name.
    pub(crate) fn exists(&self, name: &str) -> bool {
        self.path(name).exists()
    }

    /// Removes a note, if there is one.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Reads all notes.
    pub(crate) fn all(&self) -> io::Result<All<N>> {
        let mut all = All::default();
        for name in self.names()? {
            match self.read(&name) {
                Ok(note) => all.notes.push((name, note)),
                // It has been removed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => all.unreadable.push((name, error)),
            }
        }
        Ok(all)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|ending| ending == N::ENDING) {
                let name = path.file_stem().unwrap_or_default();
                names.push(name.to_string_lossy().into_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Removes notes that an earlier agent was writing when it died. Call this before any note is
    /// written.
    pub(crate) fn remove_unfinished(&self) -> io::Result<()> {
        atomic_file::remove_unfinished(&self.folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Text(String);

    impl Note for Text {
        const FOLDER: &'static str = "texts";
    }

    #[test]
    fn a_damaged_note_does_not_affect_the_others() {
        let state = tempfile::tempdir().unwrap();
        let store = NoteStore::<Text>::of(state.path());
        assert!(store.all().unwrap().notes.is_empty(), "there is no folder");
        store.remove_unfinished().unwrap();
        store.write("web-7.0", &Text("old".to_owned())).unwrap();
        store.write("web-7.0", &Text("new".to_owned())).unwrap();
        store.write("db.1", &Text(String::new())).unwrap();
        assert_eq!(store.read("web-7.0").unwrap(), Text("new".to_owned()));
        for wrong in ["", "{", "7", &format!("\"{}\"", "x".repeat(100 << 10))] {
            fs::write(store.path("db.1"), wrong).unwrap();
            let all = store.all().unwrap();
            assert_eq!(all.notes, [("web-7.0".to_owned(), Text("new".to_owned()))]);
            let (name, why) = &all.unreadable[0];
            assert_eq!(name, "db.1");
            assert!(why.to_string().contains("texts/db.1.note"), "{why}");
        }
        fs::write(store.folder().join("web-8.note.new"), "\"").unwrap();
        store.remove_unfinished().unwrap();
        store.remove("db.1").unwrap();
        store.remove("db.1").unwrap();
        assert!(store.exists("web-7.0") && !store.exists("db.1"));
        assert_eq!(fs::read_dir(store.folder()).unwrap().count(), 1);
    }
}
