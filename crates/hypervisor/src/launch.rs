//! Starts a guest's QEMU from its description, so that it is never without a record.
//!
//! ```text
//! folder and record (no process)  ->  TAP devices  ->  QEMU, paused  ->  record (process)
//!     ->  fresh start: the guest runs            destination: QEMU waits for the state
//! ```
//!
//! An agent that dies on the way leaves at most a paused QEMU, which [`crate::guest::find_all`]
//! finds.

use crate::capabilities::Accelerator;
use crate::command_line::{Plug, ResolveError, Surroundings, arguments, format_node, plugs};
use crate::config::{HostConfig, RunsAsRoot};
use crate::description::{self, DescriptionError};
use crate::disk::base::Base;
use crate::folder::{GuestFolder, PathTooLong, Record};
use crate::guest::{RecordedGuest, StopError, account, scope_name, unique};
use crate::hardware::{self, families};
use crate::process::{Account, Process, ProcessId};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::scope::{Program, Scope, ScopeLimits, start};
use crate::tap;
use crate::tpm::{self, Tpm};
use longhaul_protocol::guest::GuestDescription;
use nix::unistd::fchown;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The time limit for the first answer of a QEMU.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// The time limit for a QEMU to end after it closed its control socket.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_secs(2);

/// The purpose of a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The guest boots.
    Fresh,
    /// The guest's state is received from another host.
    Destination,
}

/// A guest to be launched.
#[derive(Debug, Clone, Copy)]
pub struct Launch<'a> {
    /// The guest's description.
    pub description: &'a GuestDescription,
    /// The purpose.
    pub role: Role,
    /// Label of the emulator.
    pub emulator: &'a str,
    /// The executor of the guest's instructions.
    pub accelerator: Accelerator,
    /// The generation written into the record.
    pub generation: u64,
    /// The base images of its disks, by the disks' names; other images name their backing files
    /// themselves.
    pub bases: &'a BTreeMap<String, Base>,
    /// The sizes of raw disks that are smaller than their volumes, by the disks' names.
    pub sizes: &'a BTreeMap<String, u64>,
}

/// Why a guest was not launched. Nothing of it remains, except where stated.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No host would launch the description.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// This host cannot resolve a name in it.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// No emulator has this label.
    #[error(
        "this host has no emulator labelled `{0}`: add it under [qemu.emulators] in the agent's \
         configuration"
    )]
    Emulator(String),
    /// QEMU would run as root.
    #[error("{0}: {hint}", hint = RunsAsRoot::HINT)]
    User(#[from] RunsAsRoot),
    /// A socket's path is too long.
    #[error(transparent)]
    Path(#[from] PathTooLong),
    /// The guest already has a folder here.
    #[error(
        "{name} is on this host already (its folder is {}): stop it or move it away first",
        folder.display()
    )]
    Exists {
        /// The guest.
        name: String,
        /// Its folder.
        folder: PathBuf,
    },
    /// A system call failed.
    #[error("cannot launch {name}: {what}: {source}")]
    Host {
        /// The guest.
        name: String,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU ended instead of starting.
    #[error("cannot launch {name}: QEMU ended; the end of its log:\n{log}")]
    Ended {
        /// The guest.
        name: String,
        /// The end of QEMU's log.
        log: String,
    },
    /// QEMU does not answer.
    #[error("cannot launch {name}: {source}")]
    Qmp {
        /// The guest.
        name: String,
        /// The error.
        source: QmpError,
    },
    /// The launch failed, and so did the cleanup.
    #[error("{error}; then {left}")]
    LeftOver {
        /// Why the launch failed.
        error: Box<LaunchError>,
        /// Why the cleanup failed.
        left: Box<StopError>,
    },
}

impl Launch<'_> {
    /// Starts the guest's QEMU and connects to it.
    ///
    /// The future must be driven to completion: if dropped earlier, it leaves a guest behind that
    /// [`crate::guest::find_all`] finds.
    pub async fn run(&self, config: &HostConfig) -> Result<(RecordedGuest, Qmp), LaunchError> {
        description::check(self.description)?;
        config.qemu.check_user()?;
        let name = &self.description.name;
        let plugs = plugs(self.description, config)?;
        let emulator = config
            .qemu
            .emulators
            .get(self.emulator)
            .ok_or_else(|| LaunchError::Emulator(self.emulator.to_owned()))?;
        let folder = GuestFolder::new(&config.state, name)?;
        if tpm::has_one(self.description) {
            folder.socket("tpm")?;
        }
        for channel in &self.description.channels {
            folder.socket(&format!("channel-{}", channel.name))?;
        }
        let account = account(config.qemu.run_as.as_deref())
            .map_err(self.host("looking up the user that QEMU runs as"))?;
        let taps: BTreeMap<usize, String> = plugs
            .keys()
            .map(|index| (*index, tap::name(unique(&folder), *index)))
            .collect();
        let around = Surroundings {
            config,
            accelerator: self.accelerator,
            folder: &folder,
            taps: &taps,
            bases: self.bases,
            sizes: self.sizes,
            incoming: self.role == Role::Destination,
        };
        let arguments = arguments(self.description, &around)?;

        folder.create(account.as_ref()).map_err(|source| {
            match source.kind() == io::ErrorKind::AlreadyExists {
                true => LaunchError::Exists {
                    name: name.clone(),
                    folder: folder.path().to_owned(),
                },
                false => self.host("making its folder")(source),
            }
        })?;
        let mut guest = RecordedGuest::new(
            folder.clone(),
            self.description.clone(),
            Record {
                generation: self.generation,
                emulator: self.emulator.to_owned(),
                taps: taps.values().cloned().collect(),
                process: None,
                scope: Scope::Session,
                attached: None,
                tpm: None,
            },
        );
        let wires = taps.iter().filter_map(|(index, tap)| {
            let plug = plugs.get(index)?;
            Some((tap.as_str(), plug))
        });
        let program = Program {
            file: emulator,
            arguments: &arguments,
            account: account.as_ref(),
            log: &folder.log(),
            scope_name: &scope_name(&folder),
            limits: ScopeLimits::of(self.description),
        };
        match self.bring_up(&mut guest, wires, &program).await {
            Ok(qmp) => Ok((guest, qmp)),
            Err(error) => match guest.stop(None).await {
                Ok(()) => Err(error),
                Err(left) => Err(LaunchError::LeftOver {
                    error: Box::new(error),
                    left: Box::new(left),
                }),
            },
        }
    }

    async fn bring_up<'w>(
        &self,
        guest: &mut RecordedGuest,
        wires: impl Iterator<Item = (&'w str, &'w Plug)>,
        program: &Program<'_>,
    ) -> Result<Qmp, LaunchError> {
        guest
            .folder()
            .write_description(self.description)
            .and_then(|()| guest.write_record())
            .map_err(self.host("writing its record"))?;
        if let Some(hardware) = &self.description.hardware {
            let run = guest.folder().run();
            for (path, bytes) in families::contents(hardware, &run) {
                write_for(&path, &bytes, program.account)
                    .map_err(self.host("writing the content of its files"))?;
            }
        }
        if tpm::has_one(self.description) {
            self.start_tpm(guest, program.account).await?;
        }
        for (tap, plug) in wires {
            tap::create(tap, plug, program.account)
                .await
                .map_err(self.host("making its TAP device"))?;
        }
        // QEMU's log must exist before its user is the one who writes to it.
        drop(
            guest
                .folder()
                .open_log()
                .map_err(self.host("making its log"))?,
        );
        let started = start(program).await.map_err(self.host("starting QEMU"))?;
        if let Some(mut child) = started.child {
            // Reaps the process when it ends.
            tokio::spawn(async move { child.wait().await });
        }
        let process = ProcessId::of(started.pid).map_err(self.host("finding QEMU's process"))?;
        guest
            .set_process(process.clone(), started.scope)
            .map_err(self.host("writing its record"))?;
        let process = match &process {
            Some(id) => Process::open(id).map_err(self.host("finding QEMU's process"))?,
            None => None,
        };
        let process = process.ok_or_else(|| self.ended(guest))?;
        let qmp = self.connect(guest, &process).await?;
        self.limit_disks(&qmp).await?;
        if self.role == Role::Fresh {
            qmp.execute("cont", json!({}), COMMAND_TIMEOUT)
                .await
                .map_err(self.qmp())?;
        }
        Ok(qmp)
    }

    /// Starts the emulator of the guest's TPM.
    async fn start_tpm(
        &self,
        guest: &mut RecordedGuest,
        account: Option<&Account>,
    ) -> Result<(), LaunchError> {
        let arrives = self.role == Role::Destination;
        let record = |helper| Tpm { arrives, helper };
        let folder = guest.folder().clone();
        let role = (self.role, self.generation);
        guest
            .set_tpm(record(None))
            .and_then(|()| tpm::prepare(&folder, role, account))
            .map_err(self.host("making the place of its TPM's state"))?;
        let helper = tpm::start(&folder, self.description, account).await;
        let helper = helper.map_err(self.host("starting its TPM"))?;
        guest
            .set_tpm(record(Some(helper)))
            .map_err(self.host("writing its record"))
    }

    /// Sets the limits on the requests of disks, as they were where the description comes from.
    async fn limit_disks(&self, qmp: &Qmp) -> Result<(), LaunchError> {
        let hardware = self.description.hardware.as_ref();
        let limits = hardware.map(hardware::limits).unwrap_or_default();
        if limits.is_empty() {
            return Ok(());
        }
        let drives = qmp.query("query-block").await.map_err(self.qmp())?;
        let drives = drives.as_array().map(Vec::as_slice).unwrap_or_default();
        for (disk, mut limits) in limits {
            let node = format_node(disk);
            let mut drives = drives.iter();
            let drive = drives.find(|drive| drive["inserted"]["node-name"] == node.as_str());
            let device = drive.map_or(Value::Null, |drive| drive["qdev"].clone());
            limits.insert("id".to_owned(), device);
            qmp.execute("block_set_io_throttle", limits.into(), COMMAND_TIMEOUT)
                .await
                .map_err(self.qmp())?;
        }
        Ok(())
    }

    /// Connects as soon as QEMU listens.
    async fn connect(&self, guest: &RecordedGuest, process: &Process) -> Result<Qmp, LaunchError> {
        let path = guest.folder().qmp();
        let deadline = Instant::now() + START_TIMEOUT;
        let connected = async {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                match Qmp::connect(&path, left).await {
                    Err(QmpError::Connect { .. }) if !left.is_zero() => {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                    other => return other.map_err(self.qmp()),
                }
            }
        };
        tokio::select! {
            biased;
            ended = process.ended() => {
                ended.map_err(self.host("watching QEMU's process"))?;
                Err(self.ended(guest))
            }
            connected = connected => match connected {
                Ok(qmp) => Ok(qmp),
                // A QEMU that is ending closes its socket first; the end of its log explains more.
                Err(error) => match timeout(LAST_WORDS_TIMEOUT, process.ended()).await {
                    Ok(Ok(())) => Err(self.ended(guest)),
                    Ok(Err(_)) | Err(_) => Err(error),
                },
            },
        }
    }

    fn host(&self, what: &'static str) -> impl FnOnce(io::Error) -> LaunchError + use<> {
        let name = self.description.name.clone();
        move |source| LaunchError::Host { name, what, source }
    }

    fn qmp(&self) -> impl FnOnce(QmpError) -> LaunchError + use<> {
        let name = self.description.name.clone();
        move |source| LaunchError::Qmp { name, source }
    }

    fn ended(&self, guest: &RecordedGuest) -> LaunchError {
        LaunchError::Ended {
            name: guest.name().to_owned(),
            log: guest.folder().log_tail(),
        }
    }
}

/// Writes a file that only this process and QEMU's user may read.
fn write_for(path: &Path, bytes: &[u8], account: Option<&Account>) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options
        .create_new(true)
        .write(true)
        .mode(0o400)
        .open(path)?;
    file.write_all(bytes)?;
    if let Some(account) = account {
        fchown(&file, Some(account.uid), Some(account.gid))?;
    }
    Ok(())
}
