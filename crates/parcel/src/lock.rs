//! Locks of folders: one process at a time works with what is in them.

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use std::fs::File;
use std::io;
use std::path::Path;

/// A folder that is locked until this is dropped, or the process ends.
pub(crate) type FolderLock = Flock<File>;

/// Locks a folder; `None` if another one has locked it.
pub(crate) fn lock_folder(folder: &Path) -> io::Result<Option<FolderLock>> {
    let folder = File::open(folder)?;
    match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}
