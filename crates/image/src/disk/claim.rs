//! A stripe that this process is fetching, so that others with the same file wait for it instead.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

/// Where the locks are: far behind every image, and QEMU's own locks.
const PLACE: i64 = 1 << 62;
/// Time between two tries.
const INTERVAL: Duration = Duration::from_millis(10);

/// A lock on one byte that stands for the stripe, which ends with the process.
pub(super) struct Claim<'a> {
    file: &'a File,
    index: u32,
    held: bool,
}

impl<'a> Claim<'a> {
    /// Claims a stripe. When somebody else does not let go of it in that time, or where the file
    /// system has no locks, there is none: it is fetched twice then.
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
            // It cannot fail for a lock that is held, and the end of the process does it anyway.
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
