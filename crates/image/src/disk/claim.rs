//! A claim on a stripe that this process is fetching, so that other processes with the same file
//! wait for it instead of fetching it as well.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

/// The place of the locks: far behind every image, and behind QEMU's own locks.
const PLACE: i64 = 1 << 62;
/// The time between two attempts.
const INTERVAL: Duration = Duration::from_millis(10);

/// A lock on one byte that represents the stripe, and ends with the process.
pub(super) struct Claim<'a> {
    file: &'a File,
    index: u32,
    held: bool,
}

impl<'a> Claim<'a> {
    /// Claims a stripe. Returns `None` when another process does not release it in time, or where
    /// the file system has no locks: the stripe is fetched twice then.
    pub(super) fn wait(
        file: &'a File,
        index: u32,
        patience: Duration,
        ended: impl Fn() -> bool,
    ) -> Self {
        let begin = Instant::now();
        let mut claim = Self {
            file,
            index,
            held: false,
        };
        loop {
            match change(file, libc::F_WRLCK, index) {
                Ok(()) => claim.held = true,
                Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR)
                    if begin.elapsed() < patience && !ended() =>
                {
                    thread::sleep(INTERVAL);
                    continue;
                }
                Err(_) => {}
            }
            return claim;
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if self.held {
            // Releasing a held lock cannot fail, and the end of the process releases it anyway.
            let _ = change(self.file, libc::F_UNLCK, self.index);
        }
    }
}

fn change(file: &File, kind: i32, index: u32) -> Result<(), Errno> {
    let short = |number: i32| i16::try_from(number).map_err(|_| Errno::EINVAL);
    let lock = libc::flock {
        l_type: short(kind)?,
        l_whence: short(libc::SEEK_SET)?,
        l_start: PLACE + i64::from(index),
        l_len: 1,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(|_| ())
}
