//! The byte-range locks with which QEMU processes protect an image from each other, taken on a
//! guest's behalf while its QEMU reaches the image through a disk export.
//!
//! A QEMU that uses an image holds a shared lock on byte `100 + p` for each permission `p` that it
//! has, and on byte `200 + p` for each that it denies others. Before it starts it checks whether
//! another process holds a conflicting byte. The locks belong to open file descriptions
//! (`F_OFD_SETLK`): they last until the file is closed everywhere, and processes of one host see
//! them. They are never part of the proof that a guest runs once (docs/handover.md).

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;

/// A permission on an image, in QEMU's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// To read content that was written.
    Read,
    /// To write.
    Write,
    /// To change the length.
    Resize,
}

impl Permission {
    /// Returns its number in QEMU's locks. (2 is for writes that change nothing, which QEMU always
    /// shares.)
    fn number(self) -> i64 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Resize => 3,
        }
    }
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Resize => "resize",
        })
    }
}

/// How a guest uses an image. QEMU 7.2 and 10.0 take the same locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageUse {
    /// As a raw disk for exclusive use.
    Raw,
    /// As a raw disk that others may write as well (`share-rw=on`).
    SharedRaw,
    /// As a disk in a growing image (`qcow2`).
    Growing,
    /// For reading, while others must not change it.
    Still,
}

impl ImageUse {
    /// Returns the permissions that it uses.
    fn has(self) -> &'static [Permission] {
        match self {
            Self::Raw | Self::SharedRaw => &[Permission::Read, Permission::Write],
            Self::Growing => &[Permission::Read, Permission::Write, Permission::Resize],
            Self::Still => &[Permission::Read],
        }
    }

    /// Returns the permissions that it denies others.
    fn denies(self) -> &'static [Permission] {
        match self {
            Self::Raw => &[Permission::Write],
            Self::SharedRaw => &[],
            Self::Growing | Self::Still => &[Permission::Write, Permission::Resize],
        }
    }
}

/// A reason why an image's locks were not taken. None is held.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has a conflicting use of the image.
    #[error(
        "somebody else uses this disk image ({what}): see who by `lslocks`, and let it end first"
    )]
    InUse {
        /// The conflict, in words.
        what: String,
    },
    /// The system refused.
    #[error("cannot lock the disk image: {0}")]
    Io(#[from] io::Error),
}

/// The locks for one use of an image, held until they are dropped or the process ends.
#[derive(Debug)]
pub struct ImageLock {
    file: File,
    image_use: ImageUse,
}

impl ImageLock {
    /// Takes the locks of a use beside those of the guest's own QEMU, which uses the same image in
    /// the same way: so the image is never unlocked when QEMU closes it.
    pub fn beside(file: &File, image_use: ImageUse) -> io::Result<Self> {
        // From here on dropped on error: locks taken before it are released.
        let lock = Self {
            file: file.try_clone()?,
            image_use,
        };
        for place in lock.places() {
            change(&lock.file, libc::F_RDLCK, place)?;
        }
        Ok(lock)
    }

    /// Takes the locks of a use, unless another process has a conflicting use of the image.
    pub fn alone(file: &File, image_use: ImageUse) -> Result<Self, LockError> {
        // Locked first and checked afterwards, as in QEMU: of two concurrent users at most one
        // succeeds.
        let lock = Self::beside(file, image_use)?;
        lock.check()?;
        Ok(lock)
    }

    /// Returns an error if another process has a conflicting use of the image.
    pub fn check(&self) -> Result<(), LockError> {
        let taken = |place| asked(&self.file, place);
        for permission in self.image_use.denies() {
            if taken(100 + permission.number())? {
                let what = format!("it may {permission}");
                return Err(LockError::InUse { what });
            }
        }
        for permission in self.image_use.has() {
            if taken(200 + permission.number())? {
                let what = format!("it lets nobody else {permission}");
                return Err(LockError::InUse { what });
            }
        }
        Ok(())
    }

    fn places(&self) -> impl Iterator<Item = i64> {
        let has = self.image_use.has().iter();
        let denies = self.image_use.denies().iter();
        has.map(|permission| 100 + permission.number())
            .chain(denies.map(|permission| 200 + permission.number()))
    }
}

impl Drop for ImageLock {
    /// Releases the locks, even if others share the open file.
    fn drop(&mut self) {
        for place in self.places() {
            // Releasing a held lock cannot fail, and the end of the process releases it anyway.
            let _ = change(&self.file, libc::F_UNLCK, place);
        }
    }
}

fn byte(kind: i32, place: i64) -> io::Result<libc::flock> {
    let short = |number: i32| i16::try_from(number).map_err(io::Error::other);
    Ok(libc::flock {
        l_type: short(kind)?,
        l_whence: short(libc::SEEK_SET)?,
        l_start: place,
        l_len: 1,
        l_pid: 0,
    })
}

fn change(file: &File, kind: i32, place: i64) -> io::Result<()> {
    let lock = byte(kind, place)?;
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns whether another process holds a lock on a byte.
fn asked(file: &File, place: i64) -> io::Result<bool> {
    let mut lock = byte(libc::F_WRLCK, place)?;
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::NamedTempFile;

    fn open(image: &NamedTempFile) -> File {
        image.reopen().unwrap()
    }

    #[test]
    fn two_uses_of_one_image_exclude_each_other_where_qemus_would() {
        let image = NamedTempFile::new().unwrap();
        let (one, other) = (open(&image), open(&image));
        let held = ImageLock::alone(&one, ImageUse::Raw).unwrap();
        for image_use in [ImageUse::Raw, ImageUse::SharedRaw, ImageUse::Growing] {
            let refusal = ImageLock::alone(&other, image_use).unwrap_err();
            assert!(matches!(refusal, LockError::InUse { .. }), "{refusal}");
        }
        drop(held);
        let shared = ImageLock::alone(&one, ImageUse::SharedRaw).unwrap();
        ImageLock::alone(&other, ImageUse::Raw).unwrap_err();
        let beside = ImageLock::alone(&other, ImageUse::SharedRaw).unwrap();
        drop((shared, beside));
        // The refusals above left no locks behind.
        ImageLock::alone(&other, ImageUse::Growing).unwrap();
    }

    #[test]
    fn what_is_to_stand_still_is_read_by_several_and_written_by_none() {
        let image = NamedTempFile::new().unwrap();
        let still = ImageLock::alone(&open(&image), ImageUse::Still).unwrap();
        let other = ImageLock::alone(&open(&image), ImageUse::Still).unwrap();
        for image_use in [ImageUse::Raw, ImageUse::SharedRaw, ImageUse::Growing] {
            let refusal = ImageLock::alone(&open(&image), image_use).unwrap_err();
            assert!(matches!(refusal, LockError::InUse { .. }), "{refusal}");
        }
        drop((still, other));
        let _written = ImageLock::alone(&open(&image), ImageUse::SharedRaw).unwrap();
        ImageLock::alone(&open(&image), ImageUse::Still).unwrap_err();
    }

    #[test]
    fn locks_taken_beside_another_use_are_checked_when_it_has_let_go() {
        let image = NamedTempFile::new().unwrap();
        let (guest, ours) = (open(&image), open(&image));
        let of_guest = ImageLock::alone(&guest, ImageUse::Growing).unwrap();
        let lock = ImageLock::beside(&ours, ImageUse::Growing).unwrap();
        let refusal = lock.check().unwrap_err().to_string();
        assert!(refusal.contains("it may write"), "{refusal}");
        drop(of_guest);
        lock.check().unwrap();
    }

    #[test]
    fn dropping_a_lock_gives_it_back_while_the_file_is_open_elsewhere() {
        let image = NamedTempFile::new().unwrap();
        let file = open(&image);
        let copy = file.try_clone().unwrap();
        drop(ImageLock::alone(&file, ImageUse::Raw).unwrap());
        let third = open(&image);
        ImageLock::alone(&third, ImageUse::Raw).unwrap();
        drop(copy);
    }
}
