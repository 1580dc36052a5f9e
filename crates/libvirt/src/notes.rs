//! What Longhaul knows of a domain beside libvirt: a file for each domain that moves or has moved.

use longhaul_protocol::HostId;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The maximum size of a note that is read, in bytes.
const NOTE_BYTES_MAX: u64 = 4 << 20;

/// What a move has to do with a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Role {
    /// It is leaving.
    Departs,
    /// It has left, and what it had here is being ended.
    Left,
    /// Its QEMU waits for it, and has never run it.
    Arrives,
    /// It has come, and its daemon is being told to run it.
    Commits,
    /// It has come, and is this host's.
    Here,
}

/// A note about a domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Note {
    pub(crate) uuid: String,
    pub(crate) role: Role,
    /// The generation of the right to run it.
    pub(crate) generation: u64,
    /// The host that sent it.
    pub(crate) sender: Option<HostId>,
    /// Whether the move is about to stop it.
    #[serde(default)]
    pub(crate) stops: bool,
    /// The host's boot in which its move began, if its host would start it by itself, and does not
    /// while it moves.
    #[serde(default)]
    pub(crate) autostart_off: Option<String>,
    /// When its departure began, in nanoseconds of Unix time.
    #[serde(default)]
    pub(crate) began_ns: u64,
    /// Whether its memory follows: libvirt passes nothing on to its QEMU until all of it is there,
    /// and takes no definition of it.
    #[serde(default)]
    pub(crate) follows: bool,
    /// How it is to be defined here when it runs.
    #[serde(default)]
    pub(crate) definition: Option<Definition>,
}

impl Note {
    /// Returns whether a move that is over has left something undone.
    pub(crate) fn is_unsettled(&self) -> bool {
        match self.role {
            Role::Departs | Role::Left => true,
            Role::Here => self.definition.is_some() || self.follows,
            Role::Arrives | Role::Commits => false,
        }
    }
}

/// A domain's definition for this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Definition {
    pub(crate) xml: String,
    /// Whether it is started with the host.
    pub(crate) autostarts: bool,
}

/// The folder of the notes.
#[derive(Debug, Clone)]
pub(crate) struct Notes(PathBuf);

impl Notes {
    /// In the agent's folder of state.
    pub(crate) fn new(state: &Path) -> Self {
        Self(state.join("libvirt"))
    }

    fn file(&self, name: &str) -> io::Result<PathBuf> {
        let is_plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
        match is_plain {
            true => Ok(self.0.join(format!("{name}.json"))),
            false => Err(io::Error::other("the domain's name is no file's")),
        }
    }

    fn make(&self) -> io::Result<()> {
        let mut folder = DirBuilder::new();
        folder.recursive(true).mode(0o700).create(&self.0)
    }

    /// Returns the domains about which there are notes.
    pub(crate) fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let name = name.to_str().and_then(|name| name.strip_suffix(".json"));
            names.extend(name.map(str::to_owned));
        }
        Ok(names)
    }

    /// Reads the note about a domain.
    pub(crate) fn read(&self, name: &str) -> io::Result<Option<Note>> {
        let path = self.file(name)?;
        let mut bytes = Vec::new();
        match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
            Ok(file) => file.take(NOTE_BYTES_MAX).read_to_end(&mut bytes)?,
        };
        let note = serde_json::from_slice(&bytes);
        note.map(Some)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
    }

    /// Writes the note about a domain durably.
    pub(crate) fn write(&self, name: &str, note: &Note) -> io::Result<()> {
        let path = self.file(name)?;
        self.make()?;
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&serde_json::to_vec(note)?)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(&self.0)?.sync_all()
    }

    /// Changes the note about a domain, if there is one.
    pub(crate) fn change(&self, name: &str, change: impl FnOnce(&mut Note)) -> io::Result<()> {
        let Some(mut note) = self.read(name)? else {
            return Ok(());
        };
        change(&mut note);
        self.write(name, &note)
    }

    /// Removes the note about a domain, if there is one.
    pub(crate) fn forget(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.file(name)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_kept_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let notes = Notes::new(folder.path());
        assert_eq!(notes.read("web").unwrap(), None);
        let mut note = Note {
            uuid: "67297888-a1e2-4f43-9539-6d11f855afba".to_owned(),
            role: Role::Arrives,
            generation: 3,
            sender: Some(HostId([7; 32])),
            stops: false,
            autostart_off: None,
            began_ns: 0,
            follows: false,
            definition: None,
        };
        notes.write("web", &note).unwrap();
        notes.change("web", |note| note.role = Role::Here).unwrap();
        note.role = Role::Here;
        assert_eq!(notes.read("web").unwrap(), Some(note));
        notes.forget("web").unwrap();
        notes.forget("web").unwrap();
        assert_eq!(notes.read("web").unwrap(), None);
        for name in ["", "..", "a/b", ".json"] {
            assert!(notes.read(name).is_err(), "{name}");
        }
    }
}
