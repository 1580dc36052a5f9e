//! What Longhaul knows of a guest beside Proxmox VE: a file for each guest that moves or has moved.

use crate::names::VmId;
use longhaul_hypervisor::config::{Image, ImageFormat};
use longhaul_hypervisor::process::ProcessId;
use longhaul_protocol::HostId;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The maximum size of a note that is read, in bytes.
const NOTE_BYTES_MAX: u64 = 8 << 20;

/// What a move has to do with a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Role {
    /// It is leaving, and locked for that.
    Departs,
    /// It has left: its file is here, locked.
    Left,
    /// Its QEMU waits for it, and has never run it.
    Arrives,
    /// It has come, and Proxmox VE is being told to run it.
    Commits,
    /// It has come, and is this host's.
    Here,
}

/// The place of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Volume {
    pub(crate) path: PathBuf,
    pub(crate) format: ImageFormat,
}

impl Volume {
    pub(crate) fn image(&self) -> Image {
        Image {
            path: self.path.clone(),
            format: self.format,
            direct: None,
            locks: true,
            local: true,
            same_file_as: None,
            volume: None,
        }
    }
}

/// A note about a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Note {
    pub(crate) id: VmId,
    pub(crate) role: Role,
    /// The generation of the right to run it.
    pub(crate) generation: u64,
    /// The host that sent it.
    pub(crate) sender: Option<HostId>,
    /// Whether the move is about to stop it.
    #[serde(default)]
    pub(crate) stops: bool,
    /// The file of the guest that had left before, with the same number. It is put back where the
    /// guest does not come.
    #[serde(default)]
    pub(crate) before: Option<String>,
    /// Whether it stays locked until all of its memory is here.
    #[serde(default)]
    pub(crate) locked: bool,
    /// When its departure began, in nanoseconds of Unix time.
    #[serde(default)]
    pub(crate) began_ns: u64,
    /// The QEMU that departs.
    #[serde(default)]
    pub(crate) process: Option<ProcessId>,
    /// Its volumes, by the names under which the agents speak of them.
    #[serde(default)]
    pub(crate) volumes: BTreeMap<String, Volume>,
    /// The volumes that Proxmox VE has allocated for it, or was about to. They are freed where the
    /// guest does not come.
    #[serde(default)]
    pub(crate) allocated: BTreeSet<String>,
    /// The files with the state of devices of a guest that leaves. They are set aside.
    #[serde(default)]
    pub(crate) states: BTreeSet<PathBuf>,
}

/// The folder of the notes.
#[derive(Debug, Clone)]
pub(crate) struct Notes(PathBuf);

impl Notes {
    /// In the agent's folder of state.
    pub(crate) fn new(state: &Path) -> Self {
        Self(state.join("proxmox"))
    }

    fn file(&self, name: &str) -> io::Result<PathBuf> {
        let is_plain = !name.is_empty() && !name.starts_with('.') && !name.contains('/');
        match is_plain {
            true => Ok(self.0.join(format!("{name}.json"))),
            false => Err(io::Error::other("the guest's name is no file's")),
        }
    }

    /// Returns the path of a file of a guest beside its note, in a folder that only this account
    /// can enter.
    pub(crate) fn beside(&self, name: &str, kind: &str) -> io::Result<PathBuf> {
        self.make()?;
        let file = self.file(name)?;
        Ok(file.with_file_name(format!("{name}.{kind}")))
    }

    fn make(&self) -> io::Result<()> {
        let mut folder = DirBuilder::new();
        folder.recursive(true).mode(0o700).create(&self.0)
    }

    /// Reads the note about a guest.
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

    /// Reads all notes, by the guests' names. A note that cannot be read is passed over.
    pub(crate) fn all(&self) -> BTreeMap<String, Note> {
        let entries = fs::read_dir(&self.0).into_iter().flatten();
        let names = entries.filter_map(|entry| {
            let path = entry.ok()?.path();
            let is_note = path.extension().is_some_and(|it| it == "json");
            let stem = path.file_stem().filter(|_| is_note)?;
            Some(stem.to_str()?.to_owned())
        });
        let notes = names.filter_map(|name| match self.read(&name) {
            Ok(note) => note.map(|note| (name, note)),
            Err(error) => {
                tracing::error!(guest = name, %error, "cannot read a note about it");
                None
            }
        });
        notes.collect()
    }

    /// Writes the note about a guest durably.
    pub(crate) fn write(&self, name: &str, note: &Note) -> io::Result<()> {
        let path = self.file(name)?;
        self.make()?;
        write_whole(&path, &serde_json::to_vec(note)?)
    }

    /// Changes the note about a guest, if there is one.
    pub(crate) fn change(&self, name: &str, change: impl FnOnce(&mut Note)) -> io::Result<()> {
        let Some(mut note) = self.read(name)? else {
            return Ok(());
        };
        change(&mut note);
        self.write(name, &note)
    }

    /// Removes the note about a guest, if there is one.
    pub(crate) fn forget(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.file(name)?) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Replaces a file by a whole other one, durably.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".tmp.{}", std::process::id()));
    let new = path.with_file_name(name);
    let mut file = File::create(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
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
        let volume = Volume {
            path: "/var/lib/vz/images/100/vm-100-disk-0.qcow2".into(),
            format: ImageFormat::Qcow2,
        };
        let mut note = Note {
            id: 100,
            role: Role::Arrives,
            generation: 3,
            sender: Some(HostId([7; 32])),
            stops: false,
            locked: false,
            before: Some("lock: migrate\n".to_owned()),
            began_ns: 7,
            process: ProcessId::of(1).unwrap(),
            volumes: [("proxmox.local.100.scsi0.qcow2".to_owned(), volume)].into(),
            allocated: ["local:100/vm-100-disk-1.raw".to_owned()].into(),
            states: BTreeSet::new(),
        };
        notes.write("web", &note).unwrap();
        notes.change("web", |note| note.role = Role::Here).unwrap();
        note.role = Role::Here;
        assert_eq!(notes.read("web").unwrap(), Some(note.clone()));
        assert_eq!(notes.all(), [("web".to_owned(), note)].into());
        notes.forget("web").unwrap();
        notes.forget("web").unwrap();
        assert_eq!(notes.read("web").unwrap(), None);
        for name in ["", "..", "a/b", ".json"] {
            assert!(notes.read(name).is_err(), "{name}");
        }
    }
}
