//! Where devices are: on this machine, or wherever the caller finds them.

use crate::device::DeviceError;
use crate::direct::DirectMedium;
use nix::fcntl::OFlag;
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// How the names of devices in folders end.
pub(crate) const SUFFIX: &str = ".parcel";

/// What holds the bytes of a device: a file or a block device.
pub trait Medium: Debug + Send + Sync {
    /// Returns the length of a file in bytes.
    ///
    /// # Errors
    /// When the device is lost.
    fn length(&self) -> io::Result<u64>;

    /// Reads until the buffer is full.
    ///
    /// # Errors
    /// When it cannot be read. An end before that is [`io::ErrorKind::UnexpectedEof`].
    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes all of the bytes.
    ///
    /// # Errors
    /// When it cannot be written. A medium may say that at the next call.
    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes everything durable that was written.
    ///
    /// # Errors
    /// When something was not written, or may not be durable.
    fn sync(&self) -> io::Result<()>;

    /// Drops what the system keeps of it in memory.
    ///
    /// # Errors
    /// When the device is lost.
    fn forget(&self) -> io::Result<()>;

    /// Removes the file.
    ///
    /// # Errors
    /// When it cannot be removed.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// A medium at its place.
#[derive(Debug)]
pub struct Found {
    /// The path of the file or the block device.
    pub path: PathBuf,
    /// What holds its bytes.
    pub medium: Box<dyn Medium>,
    /// Whether it is a block device.
    pub is_block: bool,
    /// The bytes that it has, or of a new file those that are free.
    pub bytes: u64,
}

/// Where devices are.
pub trait Media: Debug + Send + Sync {
    /// Makes a new file in a folder, or opens a block device. The file's name is completed.
    ///
    /// # Errors
    /// When there is such a file, or it cannot be used.
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError>;

    /// Opens a file, the only device in a folder, or a block device.
    ///
    /// # Errors
    /// When it cannot be opened, or another command writes it.
    fn find(&self, at: &Path, writable: bool) -> Result<Found, DeviceError>;

    /// Returns the path by which a place is told from others.
    ///
    /// # Errors
    /// When nothing is there.
    fn place(&self, at: &Path) -> io::Result<PathBuf>;
}

/// The machine's own files and block devices. One command at a time writes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalMedia;

#[cfg(test)]
thread_local! {
    /// What this thread's devices are on in place of the machine's own.
    pub(crate) static MEDIA: std::cell::RefCell<Option<std::sync::Arc<dyn Media>>> =
        const { std::cell::RefCell::new(None) };
}

#[cfg(test)]
fn in_place() -> Option<std::sync::Arc<dyn Media>> {
    MEDIA.with(|media| media.borrow().clone())
}

#[cfg(not(test))]
fn in_place() -> Option<std::sync::Arc<dyn Media>> {
    None
}

/// Makes the name of a new file durable, where the file system can do that.
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced,
    }
}

fn fails(path: &Path) -> impl Fn(io::Error) -> DeviceError + '_ {
    move |error| DeviceError::Io {
        path: path.to_path_buf(),
        error,
    }
}

/// Prepares an open file. If it may be written, no other command writes it.
fn found(
    path: PathBuf,
    file: File,
    (writable, is_block): (bool, bool),
) -> Result<Found, DeviceError> {
    let mut file = file;
    let bytes = file.seek(SeekFrom::End(0)).map_err(fails(&path))?;
    let medium = match writable {
        true => DirectMedium::writable(file).map_err(fails(&path))?,
        false => Some(DirectMedium::to_read(file)),
    };
    match medium {
        None => Err(DeviceError::InUse(path)),
        Some(medium) => Ok(Found {
            path,
            medium: Box::new(medium),
            is_block,
            bytes,
        }),
    }
}

/// Returns the only device in a folder.
fn only_in(folder: &Path) -> Result<PathBuf, DeviceError> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let paths = entries
        .map_err(fails(folder))?
        .into_iter()
        .map(|it| it.path());
    let is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.ends_with(SUFFIX))
    };
    let mut found: Vec<PathBuf> = paths.filter(is_one).collect();
    match (found.pop(), found.len()) {
        (Some(path), 0) => Ok(path),
        (last, others) => Err(DeviceError::Ambiguous {
            path: folder.to_path_buf(),
            found: others + usize::from(last.is_some()),
        }),
    }
}

impl Media for LocalMedia {
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError> {
        if let Some(media) = in_place() {
            return media.make(at, name);
        }
        let kind = fs::metadata(at).map_err(fails(at))?.file_type();
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        match (kind.is_dir(), kind.is_block_device()) {
            (true, _) => {
                let path = at.join(format!("{name}{SUFFIX}"));
                let file = match options.create_new(true).open(&path) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                        return Err(DeviceError::NotEmpty(path));
                    }
                    opened => opened.map_err(fails(&path))?,
                };
                sync_folder(at).map_err(fails(at))?;
                let room = nix::sys::statvfs::fstatvfs(&file);
                let room = room.map_err(|errno| fails(&path)(errno.into()))?;
                let bytes = room.blocks_available() * room.fragment_size();
                Ok(Found {
                    bytes,
                    ..found(path, file, (true, false))?
                })
            }
            (false, true) => {
                let file = options.open(at).map_err(fails(at))?;
                found(at.to_path_buf(), file, (true, true))
            }
            (false, false) => Err(DeviceError::Unsuitable(at.to_path_buf())),
        }
    }

    fn find(&self, at: &Path, writable: bool) -> Result<Found, DeviceError> {
        if let Some(media) = in_place() {
            return media.find(at, writable);
        }
        let path = match at.is_dir() {
            false => at.to_path_buf(),
            true => only_in(at)?,
        };
        let mut options = OpenOptions::new();
        let file = options.read(true).write(writable).open(&path);
        let file = file.map_err(fails(at))?;
        let kind = file.metadata().map_err(fails(at))?.file_type();
        found(path, file, (writable, kind.is_block_device()))
    }

    fn place(&self, at: &Path) -> io::Result<PathBuf> {
        fs::canonicalize(at)
    }
}

/// A folder or a block device of this machine that others use. Nothing else is reached through it:
/// of a folder, only plain files in it whose names are those of devices.
#[derive(Debug, Clone, Copy)]
pub struct SharedPlace<'a>(pub &'a Path);

impl SharedPlace<'_> {
    /// Makes a new device, as [`Media::make`].
    ///
    /// # Errors
    /// As [`Media::make`], and when the name is none of a file.
    pub fn make(&self, name: &str) -> Result<Found, DeviceError> {
        self.is_one(&format!("{name}{SUFFIX}"))?;
        LocalMedia.make(self.0, name)
    }

    /// Opens a device: in a folder the one of this name, or the only one; or a block device.
    ///
    /// # Errors
    /// As [`Media::find`], and when the name is none of a device, or it is no plain file.
    pub fn find(&self, name: Option<&str>, writable: bool) -> Result<Found, DeviceError> {
        let Self(at) = *self;
        name.map_or(Ok(()), |name| self.is_one(name))?;
        let kind = fs::metadata(at).map_err(fails(at))?.file_type();
        let path = match (kind.is_dir(), kind.is_block_device(), name) {
            (true, _, Some(name)) => at.join(name),
            (true, _, None) => only_in(at)?,
            (false, true, None) => return LocalMedia.find(at, writable),
            (false, ..) => return Err(DeviceError::Unsuitable(at.to_path_buf())),
        };
        let mut options = OpenOptions::new();
        // What was put there in place of a file is not followed, nor waited for.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let options = options
            .read(true)
            .write(writable)
            .custom_flags(flags.bits());
        let is_plain = |path: &Path| fs::symlink_metadata(path).map(|it| it.is_file());
        if !is_plain(&path).map_err(fails(&path))? {
            return Err(DeviceError::Unsuitable(path));
        }
        let file = options.open(&path).map_err(fails(&path))?;
        if !file.metadata().map_err(fails(&path))?.is_file() {
            return Err(DeviceError::Unsuitable(path));
        }
        found(path, file, (writable, false))
    }

    /// Refuses what is no name of a device in a folder.
    fn is_one(&self, name: &str) -> Result<(), DeviceError> {
        let is_plain = Path::new(name).file_name().is_some_and(|it| it == name);
        let has_suffix = name.len() > SUFFIX.len() && name.ends_with(SUFFIX);
        match is_plain && has_suffix && !name.starts_with('.') && !name.contains('\0') {
            true => Ok(()),
            false => Err(DeviceError::Unsuitable(self.0.to_path_buf())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn one_command_at_a_time_writes_a_device() {
        let folder = tempfile::tempdir().unwrap();
        let made = LocalMedia.make(folder.path(), "box-0").unwrap();
        assert!(made.path.ends_with("box-0.parcel"));
        let again = LocalMedia.make(folder.path(), "box-0").unwrap_err();
        assert!(matches!(again, DeviceError::NotEmpty(_)), "{again}");
        let second = LocalMedia.find(folder.path(), true).unwrap_err();
        assert!(matches!(second, DeviceError::InUse(_)), "{second}");
        // It can be read meanwhile.
        LocalMedia.find(folder.path(), false).unwrap();
        drop(made);
        LocalMedia.find(folder.path(), true).unwrap();
    }

    #[test]
    fn nothing_but_devices_is_reached_in_a_place_that_others_use() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("wd1");
        fs::create_dir(&at).unwrap();
        let secret = folder.path().join("secret.parcel");
        fs::write(&secret, "secret").unwrap();
        let place = SharedPlace(&at);
        assert!(
            place
                .make("box-0")
                .unwrap()
                .path
                .ends_with("wd1/box-0.parcel")
        );
        let found = place.find(None, true).unwrap();
        assert!(found.path.ends_with("wd1/box-0.parcel"));
        drop(found);
        for name in ["../secret", "a/b", "", ".", "..", ".hidden", "/etc/x"] {
            assert!(place.make(name).is_err(), "{name}");
            let name = format!("{name}.parcel");
            assert!(place.find(Some(&name), false).is_err(), "{name}");
        }
        fs::write(at.join("notes.txt"), "private").unwrap();
        assert!(place.find(Some("notes.txt"), false).is_err());
        // What whoever had the disk has put there.
        symlink(&secret, at.join("link.parcel")).unwrap();
        symlink("/dev/null", at.join("null.parcel")).unwrap();
        nix::unistd::mkfifo(&at.join("pipe.parcel"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        for name in ["link.parcel", "null.parcel", "pipe.parcel"] {
            for writable in [false, true] {
                let found = place.find(Some(name), writable);
                assert!(
                    matches!(found, Err(DeviceError::Unsuitable(_))),
                    "{found:?}"
                );
            }
        }
        let none = place.find(None, false).unwrap_err();
        assert!(
            matches!(none, DeviceError::Ambiguous { found: 4, .. }),
            "{none}"
        );
        // Neither is a plain file a place.
        let file = SharedPlace(&secret);
        assert!(file.find(None, false).is_err() && file.make("x").is_err());
    }
}
