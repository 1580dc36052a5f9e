//! The turn: a lock that one process of a host holds at a time, and that provably ends with it.
//!
//! It is a POSIX lock on a file. The system takes it from a process when the last of its threads is
//! about to end, which no thread does in the middle of a read or a write: so the next holder knows
//! that no operation of the previous one continues, whether that process ended, was killed, or is
//! not its child. The system also reports which process holds the lock.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two attempts.
const AGAIN: Duration = Duration::from_millis(2);

/// A reason why a process does not have the turn.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// Another process has it.
    #[error("process {pid} has {} and does not end", path.display())]
    Taken {
        /// The lock.
        path: PathBuf,
        /// The process that has it; 0 where that cannot be seen from here.
        pid: i32,
    },
    /// The system refused.
    #[error("cannot lock {}: {error}", path.display())]
    Io {
        /// The lock.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
}

/// The turn. It is also lost when this process closes the same file elsewhere: no other code may
/// open it.
#[derive(Debug)]
pub struct Turn {
    _file: File,
}

impl Turn {
    /// Takes the turn, waiting at most this long for another process to end.
    pub fn take(path: &Path, within: Duration) -> Result<Self, TurnError> {
        let failed = |error| TurnError::Io {
            path: path.to_owned(),
            error,
        };
        let file = open(path).map_err(failed)?;
        let until = Instant::now() + within;
        loop {
            match fcntl(&file, FcntlArg::F_SETLK(&whole())) {
                Ok(_) => return Ok(Self { _file: file }),
                Err(Errno::EAGAIN | Errno::EACCES) if Instant::now() >= until => {
                    return Err(TurnError::Taken {
                        path: path.to_owned(),
                        pid: holder_of(&file).map_err(failed)?.unwrap_or(0),
                    });
                }
                Err(Errno::EAGAIN | Errno::EACCES) => thread::sleep(AGAIN),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(failed(error.into())),
            }
        }
    }
}

/// Kills another process that has the turn; `None` when the turn is free. To be repeated until
/// then: a process that the system holds ends later.
pub(super) fn end_holder(path: &Path) -> io::Result<Option<i32>> {
    let file = open(path)?;
    let Some(pid) = holder_of(&file)? else {
        return Ok(None);
    };
    let Some(named) = Pid::from_raw(pid) else {
        let unseen = "a process that is not seen from here (another container?) has the turn";
        return Err(io::Error::other(unseen));
    };
    match pidfd_open(named, PidfdFlags::empty()) {
        // It has ended since.
        Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
        // Checked again, so that no process is killed that got the same number meanwhile.
        Ok(process) if holder_of(&file)? == Some(pid) => {
            match pidfd_send_signal(&process, Signal::KILL) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(_) => {}
    }
    Ok(Some(pid))
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.mode(0o600).open(path)
}

/// Returns the other process that has the turn.
fn holder_of(file: &File) -> io::Result<Option<i32>> {
    let mut lock = whole();
    fcntl(file, FcntlArg::F_GETLK(&mut lock))?;
    Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
}

fn whole() -> libc::flock {
    libc::flock {
        // Both are small constants of the system.
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    const PATH: &str = "LONGHAUL_TEST_TURN";

    /// Not a test, but the process that the next test runs: it has the turn until it is killed.
    #[test]
    fn a_process_with_a_turn() {
        let Some(path) = std::env::var_os(PATH) else {
            return;
        };
        let _turn = Turn::take(Path::new(&path), Duration::ZERO).unwrap();
        eprintln!("taken");
        loop {
            thread::park();
        }
    }

    #[test]
    fn a_turn_is_one_processs_until_that_is_dead() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("turn");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "front::turn::tests::a_process_with_a_turn"])
            .arg("--nocapture")
            .env(PATH, &path)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "taken"));
        let refusal = Turn::take(&path, Duration::ZERO).unwrap_err();
        let pid = child.id() as i32;
        assert!(matches!(refusal, TurnError::Taken { pid: found, .. } if found == pid));
        // It is killed whether it is stopped or not, and also by a process other than its parent.
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid),
            nix::sys::signal::Signal::SIGSTOP,
        )
        .unwrap();
        assert_eq!(end_holder(&path).unwrap(), Some(pid));
        let turn = Turn::take(&path, Duration::from_secs(60)).unwrap();
        child.wait().unwrap();
        drop(turn);
        assert_eq!(end_holder(&path).unwrap(), None);
    }
}
