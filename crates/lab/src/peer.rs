//! Runs the baselines of Longhaul: QEMU's own ways to move the same guest over the same link, as an
//! administrator would use them.

mod line;
pub mod mirror;
pub(crate) mod qmp;

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

const PORT: u16 = 4444;
const POLL_EVERY: Duration = Duration::from_millis(10);
/// The time limit of QEMU's own cleanup after a completed or cancelled move.
const SETTLE_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for loading and saving a state, which takes seconds on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(300);
const SAVE_LIMIT: Duration = Duration::from_secs(300);

/// The cache size of XBZRLE.
const XBZRLE_CACHE_BYTES: u64 = 512 << 20;

/// One of QEMU's ways to move a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerSystem {
    /// The default settings.
    Default,
    /// Deltas of pages that were sent before, from a large cache.
    Xbzrle,
    /// Several connections, each compressed.
    MultifdZstd,
    /// One pass, then the guest runs at the destination and faults in the missing pages.
    Postcopy,
    /// The same, with that pass over several connections, each compressed.
    MultifdZstdPostcopy,
}

impl PeerSystem {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Default,
        Self::Xbzrle,
        Self::MultifdZstd,
        Self::Postcopy,
        Self::MultifdZstdPostcopy,
    ];

    /// Returns its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "qemu-default",
            Self::Xbzrle => "qemu-xbzrle",
            Self::MultifdZstd => "qemu-multifd-zstd",
            Self::Postcopy => "qemu-postcopy",
            Self::MultifdZstdPostcopy => "qemu-multifd-zstd-postcopy",
        }
    }

    /// Returns the strategy in its rows.
    pub fn strategy(self) -> &'static str {
        match self {
            Self::Postcopy | Self::MultifdZstdPostcopy => "postcopy",
            _ => "precopy",
        }
    }

    /// Returns the first QEMU that has it, where older ones do not.
    pub fn since(self) -> Option<&'static str> {
        match self {
            Self::MultifdZstdPostcopy => Some("10.1"),
            _ => None,
        }
    }

    /// Returns whether a QEMU of this version has it.
    pub fn is_in(self, version: &str) -> bool {
        let numbers = |text: &str| {
            let numbers = text.split('.').map_while(|number| number.parse().ok());
            numbers.collect::<Vec<u32>>()
        };
        let since = self.since();
        since.is_none_or(|since| numbers(version) >= numbers(since))
    }

    fn capabilities(self) -> Value {
        let names: &[&str] = match self {
            Self::Default => &[],
            Self::Xbzrle => &["xbzrle"],
            Self::MultifdZstd => &["multifd"],
            Self::Postcopy => &["postcopy-ram", "postcopy-preempt"],
            Self::MultifdZstdPostcopy => &["multifd", "postcopy-ram", "postcopy-preempt"],
        };
        let list: Vec<Value> = names
            .iter()
            .map(|name| json!({"capability": name, "state": true}))
            .collect();
        json!({ "capabilities": list })
    }

    fn parameters(self) -> Value {
        match self {
            Self::Default | Self::Postcopy => json!({}),
            Self::Xbzrle => json!({"xbzrle-cache-size": XBZRLE_CACHE_BYTES}),
            Self::MultifdZstd | Self::MultifdZstdPostcopy => {
                json!({
                    "multifd-channels": 4,
                    "multifd-compression": "zstd",
                    "multifd-zstd-level": 1
                })
            }
        }
    }
}

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
            match migration_status(self)?.as_str() {
                "completed" => return Ok(()),
                "failed" => return Err(unexpected("QEMU could not save the guest's state")),
                _ => interrupt::sleep(POLL_EVERY)?,
            }
        }
        Err(unexpected("the guest's state was not saved in time"))
    }

    fn prepare(&mut self, system: PeerSystem) -> Result<(), LabError> {
        self.qmp
            .execute("migrate-set-capabilities", &system.capabilities())?;
        self.qmp
            .execute("migrate-set-parameters", &system.parameters())
            .map(drop)
    }

    fn is_running(&mut self) -> Result<bool, LabError> {
        Ok(self.status()? == "running")
    }

    fn status(&mut self) -> Result<String, LabError> {
        let status = self.qmp.execute("query-status", &json!({}))?;
        Ok(status_of(&status).to_owned())
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

fn unexpected(message: &str) -> LabError {
    LabError::Answer {
        what: "QEMU".to_owned(),
        message: message.to_owned(),
    }
}

/// The parameters of a baseline's move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerMove<'a> {
    /// The system.
    pub system: PeerSystem,
    /// The destination's address on the link.
    pub destination: &'a str,
    /// The requested downtime.
    pub downtime_ms: u64,
    /// The time limit.
    pub limit: Duration,
}

/// The results of a baseline's move.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerResult {
    /// The time of the request.
    pub began: Instant,
    /// When the guest ran at the destination, or the move was given up.
    pub ended: Instant,
    /// Why it did not complete, if it did not.
    pub failure: Option<String>,
    /// Bytes of memory sent, as QEMU counts them.
    pub memory_bytes: Option<u64>,
    /// Passes over memory, as QEMU counts them.
    pub passes: Option<u64>,
    /// Bytes of disks sent, as QEMU counts them, including repeated ones and zeros.
    pub disk_bytes: Option<u64>,
}

impl PeerResult {
    /// Creates a result with the source QEMU's statistics of memory.
    fn of(
        source: &mut PeerQemu,
        [began, ended]: [Instant; 2],
        failure: Option<String>,
    ) -> Result<Self, LabError> {
        let info = source.qmp.execute("query-migrate", &json!({}))?;
        let ram = |key: &str| info.get("ram")?.get(key)?.as_u64();
        Ok(Self {
            began,
            ended,
            failure,
            memory_bytes: ram("transferred"),
            passes: ram("dirty-sync-count"),
            disk_bytes: None,
        })
    }
}

impl PeerMove<'_> {
    /// Moves the guest of `source` to `destination`, which was started to wait for it.
    ///
    /// # Errors
    /// When a QEMU refuses or dies; a move that exceeds its limit is a result.
    pub fn run(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
    ) -> Result<PeerResult, LabError> {
        source.prepare(self.system)?;
        destination.prepare(self.system)?;
        // max-bandwidth 0: as fast as the link takes it.
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": self.downtime_ms});
        source.qmp.execute("migrate-set-parameters", &parameters)?;
        let listen = json!({"uri": format!("tcp:0.0.0.0:{PORT}")});
        destination.qmp.execute("migrate-incoming", &listen)?;

        let began = Instant::now();
        let target = json!({"uri": format!("tcp:{}:{PORT}", self.destination)});
        source.qmp.execute("migrate", &target)?;
        let failure = self.wait(source, destination, began)?;
        let ended = Instant::now();
        PeerResult::of(source, [began, ended], failure)
    }

    /// Waits until the guest runs at the destination; returns the error otherwise.
    fn wait(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
        began: Instant,
    ) -> Result<Option<String>, LabError> {
        let mut switched = self.system.strategy() != "postcopy";
        let counts_passes = counts_passes(&source.qmp.execute("query-version", &json!({}))?);
        loop {
            let info = source.qmp.execute("query-migrate", &json!({}))?;
            match status_of(&info) {
                "completed" if destination.is_running()? => return Ok(None),
                "failed" => return Ok(Some("QEMU failed to migrate".to_owned())),
                "postcopy-paused" => return Ok(Some("QEMU's post-copy broke".to_owned())),
                "active" if !switched && first_pass_is_over(&info, counts_passes) => {
                    source.qmp.execute("migrate-start-postcopy", &json!({}))?;
                    switched = true;
                }
                _ => {}
            }
            if began.elapsed() > self.limit {
                cancel(source)?;
                let seconds = self.limit.as_secs();
                return Ok(Some(format!("it had not converged after {seconds} s")));
            }
            interrupt::sleep(POLL_EVERY)?;
        }
    }
}

fn migration_status(qemu: &mut PeerQemu) -> Result<String, LabError> {
    let info = qemu.qmp.execute("query-migrate", &json!({}))?;
    Ok(status_of(&info).to_owned())
}

fn status_of(info: &Value) -> &str {
    let status = info.get("status").and_then(Value::as_str);
    status.unwrap_or_default()
}

/// Returns whether `dirty-sync-count` is the number of passes over memory that were begun. Where
/// post-copy may follow, QEMU 11.1 queries dirty pages, and counts that, ten times a second.
fn counts_passes(version: &Value) -> bool {
    let number = |key: &str| version.get("qemu")?.get(key)?.as_u64();
    number("major").zip(number("minor")) <= Some((10, 0))
}

fn first_pass_is_over(info: &Value, counts_passes: bool) -> bool {
    let ram = |key: &str| info.get("ram")?.get(key)?.as_u64();
    let over = || match counts_passes {
        true => Some(ram("dirty-sync-count")? > 1),
        false => Some((ram("normal")? + ram("duplicate")?) * ram("page-size")? >= ram("total")?),
    };
    over().unwrap_or(false)
}

fn cancel(source: &mut PeerQemu) -> Result<(), LabError> {
    source.qmp.execute("migrate_cancel", &json!({}))?;
    let began = Instant::now();
    while began.elapsed() < SETTLE_LIMIT {
        if ["cancelled", "completed", "failed"].contains(&migration_status(source)?.as_str()) {
            return Ok(());
        }
        thread::sleep(POLL_EVERY);
    }
    Err(unexpected("a cancelled migration did not end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_what_came_before_it() {
        let new = PeerSystem::MultifdZstdPostcopy;
        for (version, has) in [
            ("7.2.22", false),
            ("10.0.2", false),
            ("10.1.0", true),
            ("11.1.3", true),
        ] {
            assert_eq!(new.is_in(version), has, "{version}");
            assert!(PeerSystem::Postcopy.is_in(version), "{version}");
        }
    }

    #[test]
    fn a_pass_is_over_when_it_was_counted_or_every_page_was_sent() {
        let info = |normal, counted| {
            json!({"status": "active", "ram": {
                "normal": normal, "duplicate": 20, "page-size": 4096, "total": 100 * 4096,
                "dirty-sync-count": counted,
            }})
        };
        for ([major, minor], counts) in [([7, 2], true), ([10, 0], true), ([11, 1], false)] {
            let version = json!({"qemu": {"micro": 2, "minor": minor, "major": major}});
            assert_eq!(counts_passes(&version), counts, "{version}");
            assert!(!first_pass_is_over(&json!({"status": "setup"}), counts));
        }
        assert!(!first_pass_is_over(&info(79, 1), true));
        assert!(first_pass_is_over(&info(79, 2), true));
        assert!(!first_pass_is_over(&info(79, 40), false));
        assert!(first_pass_is_over(&info(80, 40), false));
    }
}
