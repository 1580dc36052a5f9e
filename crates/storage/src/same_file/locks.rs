//! A pattern of locked bytes by which another host recognizes the file: locks belong to the file
//! itself, under any name, and do not change it.
//!
//! They are shared locks of the open file description (`F_OFD_SETLK`), far behind all data and all
//! bytes that QEMU locks (100 to 203). Linux keeps them per file and machine; NFS from version 4
//! on, CephFS and cluster file systems share them among their hosts. Those of a block device's node
//! stay on the machine.

use longhaul_protocol::files::{LOCK_BYTES, LOCKED_BYTES, LOCKS_FROM, LOCKS_TO, LockPattern};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::fs::File;
use std::io;
use std::ops::Range;

/// Locks on a file, held until they are dropped or the process ends.
#[derive(Debug)]
pub struct HeldLocks {
    // This open file is not shared: its locks end with it.
    _file: File,
    pattern: LockPattern,
}

impl HeldLocks {
    /// Locks random bytes of a file whose open file description is not shared: a pattern that never
    /// existed before.
    pub fn take(file: File) -> io::Result<Self> {
        let pattern = random()?;
        for run in pattern.runs() {
            take(&file, &run)?;
        }
        Ok(Self {
            _file: file,
            pattern,
        })
    }

    /// Returns the pattern of the locks.
    pub fn pattern(&self) -> LockPattern {
        self.pattern
    }
}

/// Returns whether another process holds exactly these locks on a file.
pub fn are_on(pattern: &LockPattern, file: &File) -> io::Result<bool> {
    for byte in 0..LOCK_BYTES {
        if is_taken(file, pattern.first + byte)? != pattern.is_locked(byte) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns an unpredictable pattern at a place of its own: other proofs of the same file are
/// elsewhere.
fn random() -> io::Result<LockPattern> {
    let mut noise = Noise::default();
    let rows = (LOCKS_TO - LOCKS_FROM) / LOCK_BYTES;
    let row = noise.below(rows)?;
    // A partial shuffle, which decides the first bytes.
    let mut bytes: Vec<u64> = (0..LOCK_BYTES).collect();
    let mut mask = [0; (LOCK_BYTES / 8) as usize];
    for at in 0..u64::from(LOCKED_BYTES) {
        let other = at + noise.below(LOCK_BYTES - at)?;
        bytes.swap(at as usize, other as usize);
        let byte = bytes[at as usize];
        mask[(byte / 8) as usize] |= 1 << (byte % 8);
    }
    Ok(LockPattern {
        first: LOCKS_FROM + row * LOCK_BYTES,
        mask,
    })
}

/// Random numbers of the system.
#[derive(Default)]
struct Noise {
    words: Vec<u64>,
}

impl Noise {
    /// Returns a number below `end`.
    fn below(&mut self, end: u64) -> io::Result<u64> {
        if self.words.is_empty() {
            let mut bytes = [0; 1024];
            getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
            let words = bytes.chunks_exact(8);
            let word = |bytes: &[u8]| {
                let bytes = bytes.iter().enumerate();
                bytes.fold(0, |word, (at, byte)| word | u64::from(*byte) << (8 * at))
            };
            self.words = words.map(word).collect();
        }
        let word = self.words.pop().unwrap_or_default();
        // Of 64 bits, so that the bias is below one in 2^56.
        Ok(((u128::from(word) * u128::from(end)) >> 64) as u64)
    }
}

fn lock(kind: i32, bytes: &Range<u64>) -> io::Result<libc::flock> {
    let short = |number: i32| i16::try_from(number).map_err(io::Error::other);
    let long = |number: u64| i64::try_from(number).map_err(io::Error::other);
    Ok(libc::flock {
        l_type: short(kind)?,
        l_whence: short(libc::SEEK_SET)?,
        l_start: long(bytes.start)?,
        l_len: long(bytes.end - bytes.start)?,
        l_pid: 0,
    })
}

fn take(file: &File, bytes: &Range<u64>) -> io::Result<()> {
    let lock = lock(libc::F_RDLCK, bytes)?;
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn is_taken(file: &File, byte: u64) -> io::Result<bool> {
    loop {
        let mut lock = lock(libc::F_WRLCK, &(byte..byte + 1))?;
        match fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)) {
            Ok(_) => return Ok(i32::from(lock.l_type) != libc::F_UNLCK),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{ImageLock, ImageUse};
    use std::collections::HashSet;
    use std::fs;
    use tempfile::{NamedTempFile, tempdir};

    #[test]
    fn patterns_are_sound_and_never_the_same() {
        let patterns: Vec<LockPattern> = (0..200).map(|_| random().unwrap()).collect();
        assert!(patterns.iter().all(LockPattern::is_sound));
        let masks: HashSet<[u8; 16]> = patterns.iter().map(|it| it.mask).collect();
        let firsts: HashSet<u64> = patterns.iter().map(|it| it.first).collect();
        assert_eq!((masks.len(), firsts.len()), (200, 200));
        // Each byte is locked with a probability of one half.
        for byte in 0..LOCK_BYTES {
            let often = patterns.iter().filter(|it| it.is_locked(byte)).count();
            assert!((50..150).contains(&often), "byte {byte}: {often}");
        }
    }

    #[test]
    fn a_file_is_known_by_its_locks_under_any_name_and_no_other_is() {
        let folder = tempdir().unwrap();
        let [file, link, copy] = ["file", "link", "copy"].map(|name| folder.path().join(name));
        fs::write(&file, "content").unwrap();
        fs::hard_link(&file, &link).unwrap();
        fs::copy(&file, &copy).unwrap();
        let held = HeldLocks::take(File::open(&file).unwrap()).unwrap();
        let pattern = held.pattern();
        let is_it = |path| are_on(&pattern, &File::open(path).unwrap()).unwrap();
        assert!(is_it(&file) && is_it(&link));
        assert!(!is_it(&copy), "another file with the same content");
        // Another proof has a pattern of its own, at another place, and they do not conflict.
        let other = HeldLocks::take(File::open(&link).unwrap()).unwrap();
        assert!(is_it(&file));
        assert!(are_on(&other.pattern(), &File::open(&file).unwrap()).unwrap());
        let mut wrong = pattern;
        wrong.mask.reverse();
        assert!(!are_on(&wrong, &File::open(&file).unwrap()).unwrap());
        // One byte more, or one less, is another pattern.
        let more = File::open(&file).unwrap();
        let free = (0..LOCK_BYTES).find(|byte| !pattern.is_locked(*byte));
        let free = pattern.first + free.unwrap();
        take(&more, &(free..free + 1)).unwrap();
        assert!(!is_it(&file));
        drop(more);
        assert!(is_it(&file));
        drop(held);
        assert!(!is_it(&file), "they are gone with their holder");
        assert_eq!(fs::read(&file).unwrap(), b"content");
    }

    #[test]
    fn a_qemu_that_uses_the_image_is_not_disturbed() {
        let image = NamedTempFile::new().unwrap();
        let guest = ImageLock::alone(&image.reopen().unwrap(), ImageUse::Growing).unwrap();
        let held = HeldLocks::take(image.reopen().unwrap()).unwrap();
        guest.check().unwrap();
        assert!(are_on(&held.pattern(), &image.reopen().unwrap()).unwrap());
        drop(guest);
        ImageLock::alone(&image.reopen().unwrap(), ImageUse::Raw).unwrap();
    }
}
