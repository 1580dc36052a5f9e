//! The folder of one disk export: its sockets, its locks, and its description.

use crate::disk::{ExportSize, ImageUse};
use crate::files::{RealFiles, replace};
use crate::nbd::ExportName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Longest description of a disk export, in bytes.
const SPEC_BYTES_MAX: u64 = 64 << 10;

/// The description of a disk export: what it exports, and to whom.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrontSpec {
    /// The image.
    pub image: PathBuf,
    /// The size of the exported disk.
    pub size: ExportSize,
    /// The locks that QEMU would hold on it; `None` for an image that QEMU does not lock.
    pub locks: Option<ImageUse>,
    /// The name of the export: a secret.
    pub name: ExportName,
    /// The account of the QEMU that may connect; `None` permits this process's account.
    pub qemu_uid: Option<u32>,
    /// Whether blocks of the disk may be missing ([`super::arriving`]).
    #[serde(default)]
    pub arriving: bool,
    /// Whether the server records which chunks the guest changes ([`super::tracking`]).
    #[serde(default)]
    pub tracked: bool,
    /// Where the missing content of a base image is fetched from; `None` for any other disk.
    #[serde(default)]
    pub fetched: Option<Fetched>,
    /// The path of the socket for QEMU, where QEMU may not use those in the export's folder. This
    /// account alone must be able to change the folder that it is in.
    #[serde(default)]
    pub socket: Option<PathBuf>,
}

/// The repository that a base image is fetched from while a guest uses it. This crate only stores
/// it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fetched {
    /// The repository, as a configuration names it.
    pub repository: String,
    /// The environment variables that the repository needs, secrets included.
    pub environment: BTreeMap<String, String>,
}

impl fmt::Debug for Fetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fetched")
            .field("repository", &self.repository)
            .finish_non_exhaustive()
    }
}

/// A reason why the folder of a disk export is unusable.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The system refused.
    #[error("cannot use {} for a disk export: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The description is invalid.
    #[error("{} does not describe a disk export: {why}", path.display())]
    Spec {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
}

/// The folder of one disk export. Each export gets a new one.
#[derive(Debug, Clone)]
pub struct FrontFolder(PathBuf);

impl FrontFolder {
    /// Creates the folder, which must not exist. Access to it also depends on the folders above it.
    pub fn create(path: &Path, spec: &FrontSpec) -> Result<Self, FolderError> {
        let folder = Self(path.to_owned());
        let make = |path: &Path, mode| {
            let made = DirBuilder::new().mode(mode).create(path);
            made.map_err(|error| failed(path, error))
        };
        // QEMU's account passes through the outer folder to its socket, and sees nothing of the
        // inner one.
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

    /// Opens an existing folder.
    pub fn open(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Returns whether the folder is complete: its description can be read.
    pub fn is_made(&self) -> bool {
        self.spec().is_ok()
    }

    /// Reads the description.
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

    /// Returns the socket that QEMU connects to, unless the description has another one.
    pub fn socket(&self) -> PathBuf {
        self.0.join("nbd")
    }

    /// Returns the socket that QEMU connects to.
    pub(super) fn socket_of(&self, spec: &FrontSpec) -> PathBuf {
        spec.socket.clone().unwrap_or_else(|| self.socket())
    }

    /// Returns whether the fallback has answered since the owner last acknowledged it.
    pub fn fell_back(&self) -> bool {
        self.fallback_mark().exists()
    }

    /// Acknowledges the fallback: the owner knows which writes the guest made meanwhile, or that it
    /// does not know them.
    pub fn forgive_fallback(&self) -> Result<(), FolderError> {
        let path = self.fallback_mark();
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&path, error)),
            _ => Ok(()),
        }
    }

    /// Records the fallback before it answers. Where writes are tracked the record is durable. For
    /// a move it need not outlive the machine: neither does the guest.
    pub(super) fn note_fallback(&self) -> Result<(), FolderError> {
        let path = self.fallback_mark();
        let made = match self.tracked_writes().exists() {
            true => replace(
                &RealFiles,
                &path,
                &[],
                ["the fallback", "the fallback's name"],
            ),
            false => File::create(&path).map(drop),
        };
        made.map_err(|error| failed(&path, error))
    }

    /// Returns the lock of the process that may answer ([`super::Turn`]).
    pub fn turn(&self) -> PathBuf {
        self.own().join("turn")
    }

    /// Returns the lock of the supervising process ([`super::Turn`]).
    pub(super) fn supervision(&self) -> PathBuf {
        self.own().join("supervision")
    }

    pub(super) fn control(&self) -> PathBuf {
        self.own().join("control")
    }

    /// Returns the socket of an owner that wants write reporting ([`super::telling`]).
    pub fn owner(&self) -> PathBuf {
        self.own().join("owner")
    }

    /// Returns the socket of the server of an arriving disk for its pump.
    pub fn pump(&self) -> PathBuf {
        self.own().join("pump")
    }

    /// Returns the file of an arriving disk's missing blocks that is durable
    /// ([`super::arriving::masks`]).
    pub fn stored_masks(&self) -> PathBuf {
        self.own().join("masks")
    }

    /// Returns the file of an arriving disk's missing blocks that is valid as long as the host
    /// runs.
    pub fn noted_masks(&self) -> PathBuf {
        self.own().join("noted")
    }

    /// Returns the file of the parts of an arriving disk that its guest has not written here, where
    /// they are to be compared ([`super::arriving::unwritten`]).
    pub fn unwritten_masks(&self) -> PathBuf {
        self.own().join("unwritten")
    }

    /// Returns the folder of the writes that are tracked ([`super::tracking::rounds`]).
    pub fn tracked_writes(&self) -> PathBuf {
        self.own().join("tracked")
    }

    /// Returns the socket on which checkpoints of tracked writes are made ([`super::tracking`]).
    pub(super) fn checkpoints(&self) -> PathBuf {
        self.own().join("checkpoints")
    }

    /// Returns the file that marks an arriving disk that could not be made durable, with the boot
    /// of the host.
    pub fn failed_mark(&self) -> PathBuf {
        self.own().join("failed")
    }

    /// Returns the file with the order in which missing content of a base image is fetched.
    pub fn order(&self) -> PathBuf {
        self.own().join("order")
    }

    /// Returns the file in which the server of a base image reports its progress.
    pub fn told(&self) -> PathBuf {
        self.own().join("told")
    }

    /// Removes the folder, once no supervisor runs.
    pub fn remove(&self) -> Result<(), FolderError> {
        // A supervisor that was killed has left its socket there.
        if let Ok(FrontSpec {
            socket: Some(socket),
            ..
        }) = self.spec()
        {
            match fs::remove_file(&socket) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(&socket, error));
                }
                _ => {}
            }
        }
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

    /// Listens in place of an earlier listener: at every moment clients find one of them.
    pub(super) fn listen(&self, at: &Path, uid: Option<u32>) -> Result<UnixListener, FolderError> {
        let new: PathBuf = match at.starts_with(&self.0) {
            true => self.own().join("new"),
            false => {
                let mut new = at.as_os_str().to_owned();
                new.push(".new");
                new.into()
            }
        };
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
            tracked: false,
            fetched: None,
            socket: None,
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
        // A second time, in its place.
        let _next = folder.listen(&folder.socket(), None).unwrap();
        assert_eq!(folder.socket_of(&spec), folder.socket());

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

    #[test]
    fn a_socket_elsewhere_goes_with_its_folder() {
        let above = tempfile::tempdir().unwrap();
        let socket = above.path().join("0.elsewhere");
        let spec = FrontSpec {
            image: "/images/vda".into(),
            size: ExportSize::OfFile,
            locks: None,
            name: ExportName::new("0123456789abcdef".repeat(2)).unwrap(),
            qemu_uid: None,
            arriving: false,
            tracked: false,
            fetched: None,
            socket: Some(socket.clone()),
        };
        let folder = FrontFolder::create(&above.path().join("vda"), &spec).unwrap();
        for _ in 0..2 {
            let _listener = folder.listen(&folder.socket_of(&spec), None).unwrap();
            assert!(socket.exists() && !folder.socket().exists());
        }
        folder.remove().unwrap();
        assert_eq!(fs::read_dir(above.path()).unwrap().count(), 0);
        folder.remove().unwrap();
    }
}
