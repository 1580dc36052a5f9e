//! The files that images are imported from.

use longhaul_storage::disk::{Disk, ImageLock, ImageUse, LockError, OpenError, RawDisk};
use serde::Deserialize;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program that reads qcow2 images.
const QEMU_IMG: &str = "qemu-img";

/// The format of a file; never guessed from its content, which a guest could write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceFormat {
    /// The disk, byte for byte.
    Raw,
    /// QEMU's qcow2.
    Qcow2,
}

impl SourceFormat {
    /// Returns the format by the file's name.
    pub fn of_name(path: &Path) -> Option<Self> {
        match path.extension()?.to_str()? {
            "raw" | "img" => Some(Self::Raw),
            "qcow2" => Some(Self::Qcow2),
            _ => None,
        }
    }
}

/// A reason why a file cannot be imported. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It cannot be opened.
    #[error(transparent)]
    Open(OpenError),
    /// It is not a regular file or device.
    #[error("{} is neither a plain file nor a block device: give the file of a disk", .0.display())]
    NoFile(PathBuf),
    /// Another process writes to it.
    #[error("cannot import {}: {error}", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The conflict, in words.
        error: LockError,
    },
    /// The program that reads it is missing.
    #[error(
        "{} cannot be read without qemu-img, which cannot be started: {error}; install it (Debian: \
         apt-get install qemu-utils)", path.display()
    )]
    NoProgram {
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The program failed.
    #[error("qemu-img cannot read {}: {said}", path.display())]
    Program {
        /// The file.
        path: PathBuf,
        /// Its output.
        said: String,
    },
    /// It is an overlay of another file.
    #[error(
        "{} stands on another file ({on}), which an import does not follow: make one file of them \
         first: qemu-img convert -O qcow2 {} NEW.qcow2", path.display(), path.display()
    )]
    Chained {
        /// The file.
        path: PathBuf,
        /// The other file.
        on: String,
    },
    /// It is encrypted.
    #[error(
        "{} is encrypted: an image holds what a guest reads, so decrypt it first",
        path.display()
    )]
    Encrypted {
        /// The file.
        path: PathBuf,
    },
    /// The unpacked disk could not be stored.
    #[error(
        "cannot unpack {} in {}: {error}; set TMPDIR to a folder with room for it",
        path.display(), folder.display()
    )]
    Scratch {
        /// The file.
        path: PathBuf,
        /// The folder for it.
        folder: PathBuf,
        /// The cause.
        error: io::Error,
    },
}

impl From<OpenError> for SourceError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::NoImage { path } => Self::NoFile(path),
            other => Self::Open(other),
        }
    }
}

/// The disk in a file, which no QEMU writes to while this is held.
#[derive(Debug)]
pub struct Source {
    disk: RawDisk,
    _lock: Option<ImageLock>,
    /// The unpacked disk, which is gone when this is closed.
    _unpacked: Option<File>,
}

impl Source {
    /// Opens a file. A qcow2 image is first unpacked into the folder `scratch`.
    pub fn open(path: &Path, format: SourceFormat, scratch: &Path) -> Result<Self, SourceError> {
        match format {
            SourceFormat::Raw => Self::open_raw(path),
            SourceFormat::Qcow2 => Self::unpack(path, scratch),
        }
    }

    /// Returns the disk.
    pub fn disk(&self) -> &dyn Disk {
        &self.disk
    }

    fn open_raw(path: &Path) -> Result<Self, SourceError> {
        let disk = RawDisk::open_to_read(path)?;
        let lock = ImageLock::alone(disk.file(), ImageUse::Still);
        let lock = lock.map_err(|error| SourceError::InUse {
            path: path.to_owned(),
            error,
        })?;
        Ok(Self {
            disk,
            _lock: Some(lock),
            _unpacked: None,
        })
    }

    fn unpack(path: &Path, scratch: &Path) -> Result<Self, SourceError> {
        let failed = |error| SourceError::Scratch {
            path: path.to_owned(),
            folder: scratch.to_owned(),
            error,
        };
        let info = info(path)?;
        let file = nameless(scratch).map_err(failed)?;
        file.set_len(info.virtual_size).map_err(failed)?;
        let name = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let mut convert = Command::new(QEMU_IMG);
        convert
            .args(["convert", "-f", "qcow2", "-O", "raw"])
            // The file exists, and is one hole.
            .args(["-n", "--target-is-zero"])
            .arg(as_file(path))
            .arg(&name);
        run(convert, path)?;
        Ok(Self {
            disk: RawDisk::open_to_read(Path::new(&name))?,
            _lock: None,
            _unpacked: Some(file),
        })
    }
}

/// Creates a file without a name: it is gone when it is closed, however this process ends.
fn nameless(folder: &Path) -> io::Result<File> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
    let name = format!(".longhaul-{:016x}", u64::from_le_bytes(random));
    let path = folder.join(name);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// The program's description of a file.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Info {
    virtual_size: u64,
    backing_filename: Option<String>,
    #[serde(default)]
    encrypted: bool,
    format_specific: Option<Specific>,
}

#[derive(Deserialize)]
struct Specific {
    #[serde(default)]
    data: SpecificData,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct SpecificData {
    data_file: Option<String>,
}

/// Inspects a qcow2 image, and refuses one that an import cannot take.
fn info(path: &Path) -> Result<Info, SourceError> {
    let mut command = Command::new(QEMU_IMG);
    command
        .args(["info", "-f", "qcow2", "--output=json"])
        .arg(as_file(path));
    let said = run(command, path)?;
    let info: Info = serde_json::from_slice(&said).map_err(|error| SourceError::Program {
        path: path.to_owned(),
        said: format!("its answer is not understood: {error}"),
    })?;
    let data_file = info
        .format_specific
        .as_ref()
        .and_then(|specific| specific.data.data_file.clone());
    if let Some(on) = info.backing_filename.clone().or(data_file) {
        let path = path.to_owned();
        return Err(SourceError::Chained { path, on });
    }
    if info.encrypted {
        let path = path.to_owned();
        return Err(SourceError::Encrypted { path });
    }
    Ok(info)
}

/// Returns a path that the program takes for a file, whatever characters it has.
fn as_file(path: &Path) -> PathBuf {
    match path.is_absolute() {
        true => path.to_owned(),
        false => Path::new(".").join(path),
    }
}

fn run(mut command: Command, path: &Path) -> Result<Vec<u8>, SourceError> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|error| SourceError::NoProgram {
        path: path.to_owned(),
        error,
    })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.trim().trim_start_matches("qemu-img: ");
    Err(SourceError::Program {
        path: path.to_owned(),
        said: match said {
            "" => output.status.to_string(),
            said => said.lines().next().unwrap_or_default().to_owned(),
        },
    })
}
