//! The content of files that are not written, as their length and a hash of all of it, cached while
//! the file is the same and unchanged.

use longhaul_protocol::files::FileContent;
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Limit on cached files.
const REMEMBERED_MAX: usize = 256;
/// Read at once.
const PIECE_BYTES: usize = 1 << 20;
/// A file changed more recently than this could be changed again without a change of its times.
const SETTLED: Duration = Duration::from_secs(2);

/// The identity of a file, with the time of its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Which {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Which {
    /// Returns the identity from a file's metadata.
    pub fn of(file: &Metadata) -> Self {
        Self {
            device: file.dev(),
            inode: file.ino(),
            bytes: file.len(),
            modified: (file.mtime(), file.mtime_nsec()),
            changed: (file.ctime(), file.ctime_nsec()),
        }
    }

    /// Returns whether it is the same file with the same content, though its owner or its mode may
    /// have changed: libvirt gives files to QEMU's account.
    pub fn is_unwritten(&self, before: &Self) -> bool {
        let ignoring = |which: &Self| Self {
            changed: (0, 0),
            ..*which
        };
        ignoring(self) == ignoring(before)
    }

    /// Returns whether its times would show the next change.
    fn has_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let latest = self.changed.max(self.modified).0;
        let latest = Duration::from_secs(u64::try_from(latest).unwrap_or(0));
        now.is_ok_and(|now| now > latest + SETTLED)
    }
}

/// The known contents of files.
#[derive(Debug, Default)]
pub struct Contents {
    known: Mutex<HashMap<Which, [u8; 32]>>,
}

impl Contents {
    /// Returns the content of a regular file, and reads the whole file where it is not known yet.
    /// Returns an error if the file changes meanwhile.
    pub fn of(&self, file: &File) -> io::Result<FileContent> {
        let which = Which::of(&file.metadata()?);
        let bytes = which.bytes;
        if let Some(digest) = self.with(|known| known.get(&which).copied()) {
            return Ok(FileContent { bytes, digest });
        }
        let settled = which.has_settled();
        let digest = read(file, bytes)?;
        if Which::of(&file.metadata()?) != which {
            return Err(io::Error::other("it changes while it is read"));
        }
        if settled {
            self.with(|known| {
                if known.len() >= REMEMBERED_MAX {
                    known.clear();
                }
                known.insert(which, digest);
            });
        }
        Ok(FileContent { bytes, digest })
    }

    fn with<T>(&self, what: impl FnOnce(&mut HashMap<Which, [u8; 32]>) -> T) -> T {
        what(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn read(file: &File, bytes: u64) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < bytes {
        let room = (bytes - at).min(PIECE_BYTES as u64) as usize;
        match file.read_at(&mut piece[..room], at) {
            Ok(0) => return Err(io::Error::other("it gets shorter while it is read")),
            Ok(read) => {
                hasher.update(&piece[..read]);
                at += read as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hasher.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tempfile::tempdir;

    fn age(file: &File) {
        let long_ago = SystemTime::now() - Duration::from_secs(60);
        file.set_modified(long_ago).unwrap();
    }

    #[test]
    fn equal_content_is_equal_and_other_content_is_not() {
        let folder = tempdir().unwrap();
        let contents = Contents::default();
        let of = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            fs::write(&path, bytes).unwrap();
            contents.of(&File::open(path).unwrap()).unwrap()
        };
        let mut long = vec![7; 3 * PIECE_BYTES + 5];
        let one = of("one", &long);
        assert_eq!(one.bytes, long.len() as u64);
        assert_eq!(one.digest, *blake3::hash(&long).as_bytes());
        assert_eq!(of("other", &long), one);
        long[2 * PIECE_BYTES] ^= 1;
        assert_ne!(of("changed", &long).digest, one.digest);
        assert_eq!(of("empty", &[]).bytes, 0);
    }

    #[test]
    fn it_is_remembered_for_as_long_as_the_file_is_unchanged() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "content").unwrap();
        let file = File::open(&path).unwrap();
        let contents = Contents::default();
        let known = || contents.with(|all| all.len());
        let first = contents.of(&file).unwrap();
        assert_eq!(known(), 0, "it could be changed in the same tick");
        let which = Which::of(&file.metadata().unwrap());
        contents.with(|all| all.insert(which, [9; 32]));
        assert_eq!(contents.of(&file).unwrap().digest, [9; 32]);
        // After any change of the file, its old content is not used.
        age(&File::options().write(true).open(&path).unwrap());
        assert_eq!(contents.of(&file).unwrap(), first);
        fs::write(&path, "CONTENT").unwrap();
        assert_ne!(contents.of(&file).unwrap(), first);
    }

    #[test]
    fn what_has_settled_is_remembered() {
        // Only the clock sets the time of a file's last change.
        let file = File::open("/bin/sh").unwrap();
        let contents = Contents::default();
        assert!(Which::of(&file.metadata().unwrap()).has_settled());
        let content = contents.of(&file).unwrap();
        assert_eq!(contents.with(|all| all.len()), 1);
        assert_eq!(contents.of(&file).unwrap(), content);
    }
}
