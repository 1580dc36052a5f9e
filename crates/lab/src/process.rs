//! Runs processes and returns their output, finds them in /proc, and ends them reliably.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::{During, LabError};

/// The pauses between two looks at a condition: short at first.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// The identity of a process, distinct from a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: i32,
    /// Its start time, in the kernel's ticks since boot.
    pub started_ticks: u64,
}

impl ProcessId {
    /// Returns the current process of that number; `None` when there is none.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may contain anything; field 22 is counted after it.
        let fields = stat.rsplit_once(')')?.1;
        let mut fields = fields.split_ascii_whitespace();
        if matches!(fields.next()?, "Z" | "X") {
            return None;
        }
        Some(Self {
            pid,
            started_ticks: fields.nth(18)?.parse().ok()?,
        })
    }

    /// Returns this process.
    pub fn own() -> Option<Self> {
        Self::of(i32::try_from(std::process::id()).ok()?)
    }

    /// Returns whether it still exists.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

/// Returns the numbers of all processes that satisfy a predicate.
///
/// # Errors
/// When /proc cannot be read.
pub fn all_where(mut wanted: impl FnMut(i32) -> bool) -> Result<Vec<i32>, LabError> {
    let entries = fs::read_dir("/proc").during(|| "read /proc".to_owned())?;
    Ok(entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| wanted(*pid))
        .collect())
}

/// Returns the processes that were started with this variable in their environment.
///
/// # Errors
/// When /proc cannot be read.
pub fn all_with_variable(name: &str, value: &str) -> Result<Vec<i32>, LabError> {
    let wanted = format!("{name}={value}").into_bytes();
    all_where(|pid| {
        fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|environment| environment.split(|byte| *byte == 0).any(|it| it == wanted))
    })
}

/// Kills these processes and waits until they have ended.
///
/// # Errors
/// When one still exists after ten seconds.
pub fn kill_all(pids: &[i32]) -> Result<(), LabError> {
    let own = std::process::id();
    let victims: Vec<ProcessId> = pids
        .iter()
        .filter(|pid| u32::try_from(**pid).is_ok_and(|pid| pid != own && pid > 1))
        .filter_map(|pid| ProcessId::of(*pid))
        .collect();
    for victim in &victims {
        // It may be gone already.
        let _ = kill(Pid::from_raw(victim.pid), Signal::SIGKILL);
    }
    let limit = Duration::from_secs(10);
    if wait_until(limit, || victims.iter().all(|victim| !victim.is_alive())) {
        return Ok(());
    }
    Err(LabError::Late {
        what: "killed processes did not end".to_owned(),
        seconds: limit.as_secs(),
        log: PathBuf::from("/proc"),
    })
}

/// Waits until the condition holds, or the limit is over; returns whether it holds.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    let mut pause = PAUSE_MIN;
    loop {
        if condition() {
            return true;
        }
        if started.elapsed() >= limit {
            return false;
        }
        thread::sleep(pause);
        // A condition may be a command, which takes time from those that it waits for.
        pause = (pause * 5 / 4).min(PAUSE_MAX);
    }
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// When it cannot be started or fails; with its standard error.
pub fn run(command: &mut Command) -> Result<String, LabError> {
    run_with_input(command, "")
}

/// Runs a command to its end with this on its standard input, and returns its standard output.
///
/// # Errors
/// When it cannot be started or fails; with its standard error.
pub fn run_with_input(command: &mut Command, input: &str) -> Result<String, LabError> {
    let shown = show(command);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| not_started(command, &shown, source))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that ends without reading reports the reason by its exit status.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child
        .wait_with_output()
        .during(|| format!("wait for `{shown}`"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(LabError::Command {
        command: shown,
        message: match said.trim() {
            "" => output.status.to_string(),
            said => said.to_owned(),
        },
    })
}

fn not_started(command: &Command, shown: &str, source: std::io::Error) -> LabError {
    if source.kind() == std::io::ErrorKind::NotFound {
        LabError::Missing {
            what: format!("the program `{}`", command.get_program().to_string_lossy()),
            hint: "sudo scripts/install".to_owned(),
        }
    } else {
        LabError::Io {
            doing: format!("start `{shown}`"),
            source,
        }
    }
}

/// Returns a command as typed in a shell.
pub fn show(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the path of a binary of this workspace: beside the running one, or one folder up (for
/// tests).
///
/// # Errors
/// When it has not been built.
pub fn own_binary(name: &str) -> Result<PathBuf, LabError> {
    let running = std::env::current_exe().during(|| "find the running program".to_owned())?;
    running
        .ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .ok_or_else(|| LabError::Missing {
            what: format!("the program `{name}` beside {}", running.display()),
            hint: "make build".to_owned(),
        })
}
