//! A turn that one process of a host has at a time, and that ends with it for certain.
//!
//! It is a lock of POSIX on a file. The system takes it from a process when the last of its threads
//! is about to end, which none does in the middle of a read or a write: so whoever gets the turn
//! knows that nothing of the one before goes on, whether that ended, was killed, or is not its
//! child. And the system says whose it is.

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

/// How often it is tried again.
const AGAIN: Duration = Duration::from_millis(2);

/// Why a process has no turn.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// Another has it.
    #[error("process {pid} has {} and does not end", path.display())]
    Taken {
        /// The lock.
        path: PathBuf,
        /// Who has it; 0 where that is not seen from here.
        pid: i32,
    },
    /// The system refused.
    #[error("cannot lock {}: {error}", path.display())]
    Io {
        /// The lock.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

/// The turn. It is lost, too, when this process closes the same file elsewhere: nothing else
/// may open it.
#[derive(Debug)]
pub struct Turn {
    _file: File,
}

impl Turn {
    /// Takes the turn, waiting at most so long for another to end.
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

/// Kills whoever else has the turn; `None` when nobody has it. To be asked again until then: somebody
/// whom the system holds ends later.
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
        // Asked again, so that nobody is killed who was given its number meanwhile.
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

/// Which other process has the turn.
fn holder_of(file: &File) -> io::Result<Option<i32>> {
    let mut lock = whole();
    fcntl(file, FcntlArg::F_GETLK(&mut lock))?;
    Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
}

fn whole() -> libc::flock {
    libc::flock {
        // Both are small numbers of the system's.
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

    /// No test, but what the next one runs: it has the turn until it is killed.
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
        // It is killed whether it is stopped or not, and not only by whom it is a child of.
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
