//! Runs guests in QEMUs without an agent: those of histories, and of the baselines of Longhaul.

mod line;
pub mod qmp;

use crate::error::{During, LabError};
use crate::guest::disks::LocalDisk;
use crate::guest::{CHANNEL_NAME, KernelFiles};
use crate::interrupt;
use crate::lab::Host;
use longhaul_protocol::guest::GuestDescription;
use qmp::Qmp;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// The interval at which a state of QEMU is queried.
pub const POLL_EVERY: Duration = Duration::from_millis(10);
/// The time limit of QEMU's own cleanup after a completed or cancelled move.
pub const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for loading and saving a state, which takes seconds on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(300);
const SAVE_LIMIT: Duration = Duration::from_secs(300);

/// A host's resources for a baseline's QEMU.
#[derive(Debug)]
pub struct PeerHost<'a> {
    /// The host.
    pub host: &'a Host,
    /// The QEMU to run.
    pub qemu: &'a Path,
    /// `kvm` or `tcg`.
    pub accelerator: &'a str,
    /// The boot files of guests.
    pub files: &'a KernelFiles,
    /// The files of all shared disks of the guest, by the images' names.
    pub disks: &'a [(String, PathBuf)],
    /// Its disks on this host alone.
    pub local: &'a [LocalDisk],
}

/// How a QEMU's guest starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin<'a> {
    /// It boots.
    Boot,
    /// It resumes from a saved state in a file.
    Saved(&'a Path),
    /// It waits for an incoming guest.
    Incoming,
    /// The same; the guest stays stopped after it has arrived.
    IncomingStopped,
}

/// A QEMU that the laboratory started itself; it ends with this value.
#[derive(Debug)]
pub struct PeerQemu {
    process: QemuProcess,
    qmp: Qmp,
    socket: PathBuf,
}

/// The process of such a QEMU, whose control socket is free; it ends with this value.
#[derive(Debug)]
pub struct QemuProcess {
    child: Arc<Mutex<Child>>,
    pid: u32,
    channel: PathBuf,
}

/// Returns the socket of a channel of the laboratory's own guest on a host.
pub fn channel_socket(host: &Host, channel: &str) -> PathBuf {
    let name = format!("{}-peer-{channel}", host.name());
    host.socket_folder().join(name)
}

impl PeerQemu {
    /// Starts a QEMU with its guest.
    ///
    /// # Errors
    /// When QEMU does not start; its output is in `peer-qemu.log` in the host's folder.
    pub fn start(
        host: &PeerHost<'_>,
        guest: &GuestDescription,
        begin: Begin<'_>,
    ) -> Result<Self, LabError> {
        let socket = channel_socket(host.host, "qmp");
        let channels = guest.channels.iter();
        let channels = channels.map(|it| channel_socket(host.host, &it.name));
        for old in channels.chain([socket.clone()]) {
            match fs::remove_file(&old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).during(|| format!("remove {}", old.display()));
                }
                _ => {}
            }
        }
        let log = host.host.folder().join("peer-qemu.log");
        let log = File::create(&log).during(|| format!("create {}", log.display()))?;
        let mut command = line::command_line(host, guest, &socket)?;
        match begin {
            Begin::Boot => {}
            Begin::Saved(state) => {
                let uri = format!("exec:cat {}", quoted(state));
                command.args(["-incoming", &uri]);
            }
            Begin::Incoming => {
                command.args(["-incoming", "defer"]);
            }
            Begin::IncomingStopped => {
                command.args(["-incoming", "defer", "-S"]);
            }
        }
        command.stdout(Stdio::null()).stderr(log);
        let child = host.host.spawn(&mut command)?;
        let process = QemuProcess {
            pid: child.id(),
            child: Arc::new(Mutex::new(child)),
            channel: channel_socket(host.host, CHANNEL_NAME),
        };
        let qmp = Qmp::connect(&socket)?;
        Ok(Self {
            process,
            qmp,
            socket,
        })
    }

    /// Returns the socket of the arena's channel.
    pub fn channel(&self) -> &Path {
        &self.process.channel
    }

    /// Returns the control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Lets it flush its data and end, as an administrator would.
    ///
    /// # Errors
    /// When it refuses, does not end in time, or reports a failure.
    pub fn quit(mut self) -> Result<(), LabError> {
        self.qmp.execute("quit", &json!({}))?;
        let began = Instant::now();
        while began.elapsed() < SETTLE_LIMIT {
            let ended = lock(&self.process.child).try_wait();
            match ended.during(|| "wait for QEMU".to_owned())? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(unexpected(&format!("it ended with {status}"))),
                None => interrupt::sleep(POLL_EVERY)?,
            }
        }
        Err(unexpected("it did not end in time"))
    }

    /// Frees its control socket for another client, which may end it.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn release(self) -> Result<QemuProcess, LabError> {
        self.process.reap_when_ended()?;
        Ok(self.process)
    }

    /// Waits until the guest's saved state is loaded, and lets it run.
    ///
    /// # Errors
    /// When it does not.
    pub fn wake(&mut self) -> Result<(), LabError> {
        let began = Instant::now();
        while began.elapsed() < START_LIMIT {
            match self.status()?.as_str() {
                "running" => return Ok(()),
                // As it was when saved.
                "paused" => drop(self.qmp.execute("cont", &json!({}))?),
                _ => interrupt::sleep(POLL_EVERY)?,
            }
        }
        Err(unexpected("the guest's saved state was not loaded in time"))
    }

    /// Stops the guest and saves its state in a file. The disks then match the state.
    ///
    /// # Errors
    /// When QEMU cannot write it.
    pub fn save(&mut self, state: &Path) -> Result<(), LabError> {
        self.qmp.execute("stop", &json!({}))?;
        let unlimited = json!({"max-bandwidth": 0});
        self.qmp.execute("migrate-set-parameters", &unlimited)?;
        let uri = format!("exec:cat > {}", quoted(state));
        self.qmp.execute("migrate", &json!({ "uri": uri }))?;
        let began = Instant::now();
        while began.elapsed() < SAVE_LIMIT {
            match self.migration_status()?.as_str() {
                "completed" => return Ok(()),
                "failed" => return Err(unexpected("QEMU could not save the guest's state")),
                _ => interrupt::sleep(POLL_EVERY)?,
            }
        }
        Err(unexpected("the guest's state was not saved in time"))
    }

    /// Executes a QMP command and returns its result.
    ///
    /// # Errors
    /// When QEMU refuses it or does not answer.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, LabError> {
        self.qmp.execute(command, arguments)
    }

    /// Returns the state of the guest, as `query-status` names it.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn status(&mut self) -> Result<String, LabError> {
        let status = self.execute("query-status", &json!({}))?;
        Ok(status_of(&status).to_owned())
    }

    /// Returns the state of the migration, as `query-migrate` names it; empty when there is none.
    ///
    /// # Errors
    /// When QEMU does not answer.
    pub fn migration_status(&mut self) -> Result<String, LabError> {
        let info = self.execute("query-migrate", &json!({}))?;
        Ok(status_of(&info).to_owned())
    }
}

impl QemuProcess {
    /// Reaps it as soon as it ends, as an init does: the process that ends it waits for that.
    fn reap_when_ended(&self) -> Result<(), LabError> {
        let child = Arc::downgrade(&self.child);
        let reap = move || {
            while let Some(child) = child.upgrade() {
                if !matches!(lock(&child).try_wait(), Ok(None)) {
                    return;
                }
                drop(child);
                thread::sleep(POLL_EVERY);
            }
        };
        let thread = thread::Builder::new().name("reaper".to_owned()).spawn(reap);
        thread.map(drop).during(|| "start a thread".to_owned())
    }
}

impl Drop for QemuProcess {
    fn drop(&mut self) {
        let mut child = lock(&self.child);
        // It may have ended by itself; either way it is reaped.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn lock(child: &Mutex<Child>) -> MutexGuard<'_, Child> {
    child.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a path quoted for the shell that QEMU starts.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', r"'\''"))
}

/// Returns the error of a QEMU that answers otherwise than it should.
pub fn unexpected(message: &str) -> LabError {
    LabError::Answer {
        what: "QEMU".to_owned(),
        message: message.to_owned(),
    }
}

/// Returns the state in an answer of QEMU; empty where it has none.
pub fn status_of(info: &Value) -> &str {
    let status = info.get("status").and_then(Value::as_str);
    status.unwrap_or_default()
}
