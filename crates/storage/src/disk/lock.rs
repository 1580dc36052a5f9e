//! The byte-range locks by which QEMUs keep each other off an image, taken in a guest's place
//! while its QEMU reaches the image through us.
//!
//! A QEMU that uses an image holds a shared lock on byte `100 + p` for each permission `p` that it
//! has, and on byte `200 + p` for each that it grants to nobody else. Before it starts it asks
//! whether somebody else holds a byte that contradicts it. The locks are those of open files
//! (`F_OFD_SETLK`): they last until the file is closed everywhere, and processes of one host see
//! them. They are never part of the proof that a guest runs once (docs/hand-over.md).

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;

/// What can be done to an image, as QEMU divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    /// To read what was written.
    Read,
    /// To write.
    Write,
    /// To change its length.
    Resize,
}

impl Permission {
    /// Its number in QEMU's locks. (2 is for writes that change nothing: everybody may.)
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

/// How a guest uses an image. QEMU 7.2 and 10.0 lock alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageUse {
    /// As a raw disk of its own.
    Raw,
    /// As a raw disk that others may write too (`share-rw=on`).
    SharedRaw,
    /// As a disk in an image that grows (`qcow2`).
    Growing,
    /// For reading, by somebody for whom nobody may change it.
    Still,
}

impl ImageUse {
    /// What it does itself.
    fn has(self) -> &'static [Permission] {
        match self {
            Self::Raw | Self::SharedRaw => &[Permission::Read, Permission::Write],
            Self::Growing => &[Permission::Read, Permission::Write, Permission::Resize],
            Self::Still => &[Permission::Read],
        }
    }

    /// What nobody else may do meanwhile.
    fn denies(self) -> &'static [Permission] {
        match self {
            Self::Raw => &[Permission::Write],
            Self::SharedRaw => &[],
            Self::Growing | Self::Still => &[Permission::Write, Permission::Resize],
        }
    }
}

/// Why an image's locks were not taken. None is held.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else uses the image in a way that contradicts.
    #[error(
        "somebody else uses this disk image ({what}): see who by `lslocks`, and let it end first"
    )]
    InUse {
        /// What it holds, in words.
        what: String,
    },
    /// The system refused.
    #[error("cannot lock the disk image: {0}")]
    Io(#[from] io::Error),
}

/// The locks of one use of an image, until they are dropped or the process ends.
#[derive(Debug)]
pub struct ImageLock {
    file: File,
    image_use: ImageUse,
}

impl ImageLock {
    /// Takes the locks of a use beside those of the guest's own QEMU, which does the same to the
    /// same image: so there is no moment without locks when it lets go.
    pub fn beside(file: &File, image_use: ImageUse) -> io::Result<Self> {
        // A lock of its own from here on: what was taken before an error is given back.
        let lock = Self {
            file: file.try_clone()?,
            image_use,
        };
        for place in lock.places() {
            change(&lock.file, libc::F_RDLCK, place)?;
        }
        Ok(lock)
    }

    /// Takes the locks of a use, if nobody else uses the image in a way that contradicts.
    pub fn alone(file: &File, image_use: ImageUse) -> Result<Self, LockError> {
        // First taken, then asked, as QEMU does it: of two at once, at most one goes on.
        let lock = Self::beside(file, image_use)?;
        lock.check()?;
        Ok(lock)
    }

    /// Whether nobody else uses the image in a way that contradicts.
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
    /// Gives back the locks, though others may have the same file open.
    fn drop(&mut self) {
        for place in self.places() {
            // It cannot fail for a lock that is held, and the end of the process does it anyway.
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

/// Whether somebody else holds a lock on a byte.
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
        // The refusals above left nothing behind.
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
