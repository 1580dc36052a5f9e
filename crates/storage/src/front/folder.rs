//! The folder of one disk's front end: its sockets, its locks, and what is to be shown.

use crate::disk::{ExportSize, ImageUse};
use crate::nbd::ExportName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Longest description of a front end, in bytes.
const SPEC_BYTES_MAX: u64 = 64 << 10;

/// What a front end shows, and to whom.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontSpec {
    /// The image.
    pub image: PathBuf,
    /// The size of the disk that it is shown as.
    pub size: ExportSize,
    /// The locks that QEMU would hold on it; none for an image that QEMU does not lock.
    pub locks: Option<ImageUse>,
    /// The name of the export: a secret.
    pub name: ExportName,
    /// The account of the QEMU that may connect; without one, those of this process's account may.
    pub qemu_uid: Option<u32>,
    /// Whether a part of the disk may still be at another host ([`super::arriving`]).
    #[serde(default)]
    pub arriving: bool,
    /// Where what is missing of a base image comes from; none of any other disk.
    #[serde(default)]
    pub fetched: Option<Fetched>,
}

/// Where a base image comes from while a guest uses it. This crate only keeps it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fetched {
    /// Its repository, as a configuration names it.
    pub repository: String,
    /// What of the environment the repository needs: secrets, too.
    pub environment: BTreeMap<String, String>,
}

impl fmt::Debug for Fetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetched")
            .field("repository", &self.repository)
            .finish_non_exhaustive()
    }
}

/// Why a front end's folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The system refused.
    #[error("cannot use {} for a disk's front end: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// What is to be shown is not understood.
    #[error("{} does not describe a disk's front end: {why}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

/// The folder of one disk's front end, which is new for every time that a disk is shown.
#[derive(Debug, Clone)]
pub struct FrontFolder(PathBuf);

impl FrontFolder {
    /// Makes the folder, which must not exist. Those above it decide, too, who reaches it.
    pub fn create(path: &Path, spec: &FrontSpec) -> Result<Self, FolderError> {
        let folder = Self(path.to_owned());
        let make = |path: &Path, mode| {
            let made = DirBuilder::new().mode(mode).create(path);
            made.map_err(|error| failed(path, error))
        };
        // QEMU's account goes through the outer one to its socket, and sees nothing of the inner.
        make(path, 0o711)?;
        make(&folder.own(), 0o700)?;
        let path = folder.spec_file();
        let spec = serde_json::to_vec(spec).map_err(io::Error::other);
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600);
        let written = spec.and_then(|spec| file.open(&path)?.write_all(&spec));
        written.map_err(|error| failed(&path, error))?;
        Ok(folder)
    }

    /// A folder that was made before.
    pub fn open(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Whether all of it was made: what is to be shown can be read.
    pub fn is_made(&self) -> bool {
        self.spec().is_ok()
    }

    /// What is to be shown.
    pub fn spec(&self) -> Result<FrontSpec, FolderError> {
        let path = self.spec_file();
        let file = File::open(&path).map_err(|error| failed(&path, error))?;
        let mut bytes = Vec::new();
        let read = file.take(SPEC_BYTES_MAX).read_to_end(&mut bytes);
        read.map_err(|error| failed(&path, error))?;
        serde_json::from_slice(&bytes).map_err(|error| FolderError::Spec {
            path,
            why: error.to_string(),
        })
    }

    /// The socket that QEMU connects to.
    pub fn socket(&self) -> PathBuf {
        self.0.join("nbd")
    }

    /// Whether the fallback has answered since the owner last said that it knows.
    pub fn fell_back(&self) -> bool {
        self.fallback_mark().exists()
    }

    /// The owner knows what the guest wrote while the fallback answered, or that it knows nothing of it.
    pub fn forgive_fallback(&self) -> Result<(), FolderError> {
        let path = self.fallback_mark();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&path, error)),
            _ => Ok(()),
        }
    }

    /// Before the fallback answers. It need not outlive the machine: neither does the guest.
    pub(super) fn note_fallback(&self) -> Result<(), FolderError> {
        let path = self.fallback_mark();
        let made = File::create(&path).map(drop);
        made.map_err(|error| failed(&path, error))
    }

    /// Who may answer ([`super::Turn`]).
    pub fn turn(&self) -> PathBuf {
        self.own().join("turn")
    }

    /// Who supervises ([`super::Turn`]).
    pub(super) fn supervision(&self) -> PathBuf {
        self.own().join("supervision")
    }

    pub(super) fn control(&self) -> PathBuf {
        self.own().join("control")
    }

    /// Where an owner listens that wants to be told of writes ([`super::telling`]).
    pub fn owner(&self) -> PathBuf {
        self.own().join("owner")
    }

    /// Where the server of an arriving disk listens for whoever brings what is missing of it.
    pub fn pump(&self) -> PathBuf {
        self.own().join("pump")
    }

    /// What of an arriving disk is missing, as far as that is durable ([`super::arriving::masks`]).
    pub fn stored_masks(&self) -> PathBuf {
        self.own().join("masks")
    }

    /// What of an arriving disk is missing, as long as the host runs.
    pub fn noted_masks(&self) -> PathBuf {
        self.own().join("noted")
    }

    /// What of an arriving disk its guest has not written since it runs here, where that is to be compared
    /// ([`super::arriving::unwritten`]).
    pub fn unwritten_masks(&self) -> PathBuf {
        self.own().join("unwritten")
    }

    /// That an arriving disk could not be made durable, and in which boot of the host.
    pub fn failed_mark(&self) -> PathBuf {
        self.own().join("failed")
    }

    /// In which order what is missing of a base image is to come.
    pub fn order(&self) -> PathBuf {
        self.own().join("order")
    }

    /// What the server of a base image says of how far that has come.
    pub fn told(&self) -> PathBuf {
        self.own().join("told")
    }

    /// Removes the folder, once nobody supervises.
    pub fn remove(&self) -> Result<(), FolderError> {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&self.0, error)),
            _ => Ok(()),
        }
    }

    fn own(&self) -> PathBuf {
        self.0.join("own")
    }

    fn spec_file(&self) -> PathBuf {
        self.own().join("disk.json")
    }

    fn fallback_mark(&self) -> PathBuf {
        self.own().join("fell-back")
    }

    /// Listens in place of whoever did before: clients find the one or the other at every moment.
    pub(super) fn listen(&self, at: &Path, uid: Option<u32>) -> Result<UnixListener, FolderError> {
        let new = self.own().join("new");
        let listen = || {
            match fs::remove_file(&new) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = UnixListener::bind(&new)?;
            fs::set_permissions(&new, Permissions::from_mode(0o600))?;
            if let Some(uid) = uid {
                std::os::unix::fs::chown(&new, Some(uid), None)?;
            }
            fs::rename(&new, at)?;
            Ok(listener)
        };
        listen().map_err(|error| failed(at, error))
    }
}

pub(super) fn failed(path: &Path, error: io::Error) -> FolderError {
    let path = path.to_owned();
    FolderError::Io { path, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_says_what_is_shown_to_nobody_else() {
        let above = tempfile::tempdir().unwrap();
        let path = above.path().join("vda");
        let spec = FrontSpec {
            image: "/images/vda".into(),
            size: ExportSize::Bytes(1 << 40),
            locks: Some(ImageUse::Growing),
            name: ExportName::new("0123456789abcdef".repeat(2)).unwrap(),
            qemu_uid: None,
            arriving: false,
            fetched: None,
        };
        FrontFolder::create(&path, &spec).unwrap();
        FrontFolder::create(&path, &spec).unwrap_err();
        let folder = FrontFolder::open(&path);
        assert!(folder.is_made());
        let read = folder.spec().unwrap();
        assert_eq!((read.size, read.locks), (spec.size, spec.locks));
        assert_eq!(read.name, spec.name);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder.own()), 0o700);
        assert_eq!(mode(&folder.spec_file()), 0o600);
        let _listener = folder.listen(&folder.socket(), None).unwrap();
        assert_eq!(mode(&folder.socket()), 0o600);
        // Again, in its place.
        let _next = folder.listen(&folder.socket(), None).unwrap();

        assert!(!folder.fell_back());
        folder.note_fallback().unwrap();
        assert!(folder.fell_back());
        folder.forgive_fallback().unwrap();
        folder.forgive_fallback().unwrap();
        assert!(!folder.fell_back());

        fs::write(folder.spec_file(), b"{\"image\": 1}").unwrap();
        let refusal = folder.spec().unwrap_err();
        assert!(matches!(refusal, FolderError::Spec { .. }), "{refusal}");
        fs::write(folder.spec_file(), vec![b' '; 100 << 10]).unwrap();
        folder.spec().unwrap_err();
        fs::write(folder.spec_file(), b"").unwrap();
        assert!(!folder.is_made());
    }
}
