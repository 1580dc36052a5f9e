//! Fencing marks: which disks belong to guests that left this host or are leaving it.

use crate::host::lock::lock;
use crate::host::notes::{Note, NoteStore};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The mark of a guest that left or is leaving.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mark {
    pub(crate) guest: String,
    /// The destination, by its name on this host.
    pub(crate) host: String,
    /// The generation of the right after the migration.
    pub(crate) generation: u64,
    /// The files and devices that the guest may write.
    pub(crate) disks: Vec<PathBuf>,
}

impl Note for Mark {
    const FOLDER: &'static str = "marks";
    const ENDING: &'static str = "toml";

    fn encode(&self) -> io::Result<Vec<u8>> {
        let text = toml::to_string(self).map_err(io::Error::other)?;
        Ok(text.into_bytes())
    }

    fn decode(content: &[u8]) -> io::Result<Self> {
        toml::from_slice(content).map_err(io::Error::other)
    }
}

/// All marks of this host.
#[derive(Debug)]
pub(crate) struct Marks {
    store: NoteStore<Mark>,
    /// Held while marks change: a mark that is set is not removed for an older reason.
    turn: Mutex<()>,
}

impl Marks {
    /// Opens the marks in a state folder.
    pub(crate) fn open(state: &Path) -> io::Result<Self> {
        let store = NoteStore::of(state);
        store.create()?;
        store.remove_unfinished()?;
        Ok(Self {
            store,
            turn: Mutex::default(),
        })
    }

    /// Writes a mark durably. Replaces an older mark of the same guest. Guest names are validated
    /// before and fit a file name.
    pub(crate) fn set(&self, mark: &Mark) -> io::Result<()> {
        let _turn = lock(&self.turn);
        self.store.write(&mark.guest, mark)
    }

    /// Removes a guest's mark.
    pub(crate) fn remove(&self, guest: &str) -> io::Result<()> {
        let _turn = lock(&self.turn);
        self.store.remove(guest)
    }

    /// Removes the marks of which this returns true. No mark is set meanwhile.
    pub(crate) fn remove_if(&self, is_needless: impl Fn(&Mark) -> bool) -> io::Result<()> {
        let _turn = lock(&self.turn);
        for mark in self.all()?.iter().filter(|mark| is_needless(mark)) {
            self.store.remove(&mark.guest)?;
        }
        Ok(())
    }

    /// Reads all marks. Fails if one cannot be read: it could be about any disk.
    pub(crate) fn all(&self) -> io::Result<Vec<Mark>> {
        let all = self.store.all()?;
        match all.unreadable.into_iter().next() {
            None => Ok(all.notes.into_iter().map(|(_, mark)| mark).collect()),
            Some((_, error)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn marks_are_kept_replaced_and_taken_away() {
        let state = tempfile::tempdir().unwrap();
        let marks = Marks::open(state.path()).unwrap();
        let mark = |disks: &[PathBuf]| Mark {
            guest: "web-7".to_owned(),
            host: "paris-2".to_owned(),
            generation: 5,
            disks: disks.to_vec(),
        };
        marks.set(&mark(&[])).unwrap();
        let newer = mark(&["/srv/a".into()]);
        marks.set(&newer).unwrap();
        assert_eq!(marks.all().unwrap(), std::slice::from_ref(&newer));
        marks.remove_if(|_| false).unwrap();
        assert_eq!(marks.all().unwrap(), [newer]);
        marks.remove_if(|mark| mark.generation == 5).unwrap();
        marks.remove("web-7").unwrap();
        assert!(marks.all().unwrap().is_empty());
        let unfinished = state.path().join("marks/web-7.toml.new");
        fs::write(&unfinished, "").unwrap();
        let marks = Marks::open(state.path()).unwrap();
        assert!(!unfinished.exists());
        fs::write(state.path().join("marks/web-7.toml"), "guest = 7").unwrap();
        let error = marks.all().unwrap_err().to_string();
        assert!(error.contains("web-7.toml"), "{error}");
    }
}
