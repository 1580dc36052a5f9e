//! Identifies processes that may outlive the agent, so that each is found again and never mistaken
//! for another; ends them, and resolves their accounts.

use nix::unistd::{Gid, Uid, User};
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The identity of a process: unique while the machine is up, and invalid afterwards.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessId {
    /// Its number, which the system reuses.
    pub pid: i32,
    /// Its start time, in clock ticks since boot.
    pub start_ticks: u64,
    /// The identity of that boot.
    pub boot_id: String,
}

/// A handle of one process: signals reach it and never a successor of the same number.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    fd: AsyncFd<OwnedFd>,
}

/// The account of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Its name.
    pub name: String,
    /// Its user id.
    pub uid: Uid,
    /// Its primary group.
    pub gid: Gid,
}

impl Account {
    /// Returns the account that a process runs under. The owner of its folder in `/proc` is another
    /// one where the process has changed its account, as libvirt's QEMUs do.
    pub fn of_process(pid: i32) -> io::Result<Self> {
        let path = format!("/proc/{pid}/status");
        let status = std::fs::read_to_string(&path)?;
        // The real id, the effective one, and two others.
        let effective = |field: &str| -> io::Result<u32> {
            let lines = status.lines().filter_map(|line| line.strip_prefix(field));
            let ids = lines.flat_map(str::split_whitespace);
            let id = ids.map(str::parse).nth(1).and_then(Result::ok);
            id.ok_or_else(|| io::Error::other(format!("{path} has no line {field}")))
        };
        let uid = effective("Uid:")?;
        Ok(Self {
            name: uid.to_string(),
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(effective("Gid:")?),
        })
    }
}

/// Lets QEMU's account, which is not this process's, pass through the state folder.
pub fn let_through(state: &std::path::Path) -> io::Result<()> {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(state)?.permissions().mode();
    match mode & 0o111 == 0o111 {
        true => Ok(()),
        false => fs::set_permissions(state, Permissions::from_mode(mode | 0o111)),
    }
}

impl ProcessId {
    /// Returns the process with this number, unless it has ended.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        let Some(stat) = Stat::read(pid)? else {
            return Ok(None);
        };
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Ok((!stat.ended).then(|| Self {
            pid,
            start_ticks: stat.start_ticks,
            boot_id: boot_id.trim().to_owned(),
        }))
    }

    /// Returns how long ago it started.
    pub fn age(&self) -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
        let started = self.start_ticks as f64 / clock_ticks_per_second() as f64;
        now.saturating_sub(Duration::from_secs_f64(started))
    }

    /// Returns whether the process still runs.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(Self::of(self.pid)?.as_ref() == Some(self))
    }
}

impl Process {
    /// Opens a process; returns `None` where it has ended.
    pub fn open(id: &ProcessId) -> io::Result<Option<Self>> {
        let Some(pid) = Pid::from_raw(id.pid.max(0)) else {
            return Ok(None);
        };
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL) => return Ok(None),
            other => other?,
        };
        // The comparison is valid only now, with the handle open.
        if !id.is_alive()? {
            return Ok(None);
        }
        #[expect(unsafe_code, reason = "tokio has no safe way to wait for a file")]
        // SAFETY: an `OwnedFd` is open, and names the same file, for as long as it lives; it is
        // never taken out of the `AsyncFd`.
        let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
        let id = id.clone();
        Ok(Some(Self { id, fd }))
    }

    /// Returns the process's identity.
    pub fn id(&self) -> &ProcessId {
        &self.id
    }

    /// Asks the process to end.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::TERM)
    }

    /// Ends the process.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// Waits until the process has ended.
    pub async fn ended(&self) -> io::Result<()> {
        self.fd.readable().await.map(|_| ())
    }

    fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(self.fd.get_ref(), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl Account {
    /// Returns the account of that name; an error says what to do.
    pub fn of(name: &str) -> Result<Self, String> {
        match User::from_name(name) {
            Ok(Some(user)) => Ok(Self {
                name: user.name,
                uid: user.uid,
                gid: user.gid,
            }),
            Ok(None) => Err(format!(
                "is `{name}`, and this host has no such user: create it (useradd --system {name})"
            )),
            Err(error) => Err(format!("is `{name}`, which cannot be looked up: {error}")),
        }
    }
}

/// Fields of `/proc/PID/stat`.
struct Stat {
    start_ticks: u64,
    ended: bool,
}

impl Stat {
    fn read(pid: i32) -> io::Result<Option<Self>> {
        let text = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // The process ended between opening and reading.
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => return Ok(None),
            Err(error) => return Err(error),
        };
        Self::parse(&text)
            .map(Some)
            .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has an unknown form")))
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is the program's name in brackets, which may contain anything.
        let (_, rest) = text.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace();
        let state = fields.next()?;
        // The state is field 3, the start is field 22.
        let start_ticks = fields.nth(18)?.parse().ok()?;
        Some(Self {
            start_ticks,
            ended: matches!(state, "Z" | "X" | "x"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_start_is_read_whatever_the_name() {
        let text = "7 (a) Z (b) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 1";
        let stat = Stat::parse(text).unwrap();
        assert_eq!(stat.start_ticks, 4242);
        assert!(!stat.ended);
        assert!(Stat::parse("7 (a) S 1 2").is_none());
    }

    #[tokio::test]
    async fn a_process_is_held_until_it_ends() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let id = ProcessId::of(child.id() as i32).unwrap().unwrap();
        assert!(id.is_alive().unwrap());
        let process = Process::open(&id).unwrap().unwrap();
        process.kill().unwrap();
        process.ended().await.unwrap();
        // Ended and not yet reaped counts as gone.
        assert!(!id.is_alive().unwrap());
        child.wait().unwrap();
        assert!(Process::open(&id).unwrap().is_none());
        process.kill().unwrap();
    }

    #[test]
    fn a_process_has_an_age() {
        let before = std::time::Instant::now();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let id = ProcessId::of(child.id() as i32).unwrap().unwrap();
        let tick = Duration::from_millis(10);
        while id.age() < 5 * tick {
            std::thread::sleep(tick);
        }
        assert!(id.age() <= before.elapsed() + 2 * tick, "{:?}", id.age());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn another_process_of_the_same_number_is_not_taken() {
        let mut id = ProcessId::of(std::process::id() as i32).unwrap().unwrap();
        id.start_ticks += 1;
        assert!(Process::open(&id).unwrap().is_none());
        id.start_ticks -= 1;
        assert!(id.is_alive().unwrap());
        id.boot_id = "another".to_owned();
        assert!(Process::open(&id).unwrap().is_none());
        id.pid = -1;
        assert!(Process::open(&id).unwrap().is_none());
    }
}
