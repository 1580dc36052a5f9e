//! Finds a guest's QEMU again after a restart of the agent, connects to it, and ends it, by the
//! guest's folder.
//!
//! [`crate::launch`] and [`crate::attach`] write the folder. Migrations see these guests as
//! [`crate::launcher::Launcher`] shows them, as handles ([`crate::manager::Guest`]).

use crate::description;
use crate::folder::{GuestFolder, Record};
use crate::manager::{Facts, Guest, Owner};
use crate::process::{Account, Process, ProcessId};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::scope::Scope;
use crate::tap;
use crate::tpm::{self, Tpm};
use longhaul_protocol::guest::GuestDescription;
use serde_json::json;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::timeout;

/// The time limit for a QEMU to end by itself, and again after SIGTERM.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit for the system to end a killed QEMU (its last writes may be under way).
const KILL_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for an answer from the control socket of a QEMU that is to end anyway.
const LAST_WORD_TIMEOUT: Duration = Duration::from_secs(2);

/// A guest with a folder: it has a QEMU on this host, or had one that died.
#[derive(Debug, Clone)]
pub struct RecordedGuest {
    folder: GuestFolder,
    description: GuestDescription,
    record: Record,
}

/// The state of a guest whose folder was found.
#[derive(Debug)]
pub enum Found {
    /// Its QEMU runs.
    Running(RecordedGuest),
    /// Its QEMU has ended, by itself or with the machine.
    Ended(RecordedGuest),
    /// Its content cannot be read; nothing was changed.
    Damaged {
        /// The folder.
        folder: GuestFolder,
        /// The error in it.
        why: String,
    },
}

/// Why a QEMU was not ended, or not removed completely.
#[derive(Debug, thiserror::Error)]
#[error("ending {guest}: {what}: {source}")]
pub struct StopError {
    /// The guest.
    pub guest: String,
    /// The operation that failed.
    pub what: String,
    /// The system's error.
    pub source: io::Error,
}

/// Returns the guests of all folders under a state folder.
///
/// A QEMU that started just as the agent died is found by its command line. Nothing is written: the
/// guest may be one that is being launched.
pub fn find_all(state: &Path) -> io::Result<Vec<Found>> {
    Ok(GuestFolder::all(state)?.into_iter().map(find).collect())
}

pub(crate) fn find(folder: GuestFolder) -> Found {
    let look = || -> io::Result<(RecordedGuest, bool)> {
        let description = folder.description()?;
        description::check(&description).map_err(io::Error::other)?;
        if description.name != folder.name() {
            let text = format!("it describes a guest called {}", description.name);
            return Err(io::Error::other(text));
        }
        let mut record = folder.record()?;
        if record.process.is_none()
            && let Some(id) = find_by_command_line(&folder)?
        {
            record.process = Some(id);
            record.scope = Scope::of_name(&scope_name(&folder));
        }
        let alive = match &record.process {
            Some(id) => id.is_alive()?,
            None => false,
        };
        let guest = RecordedGuest {
            folder: folder.clone(),
            description,
            record,
        };
        Ok((guest, alive))
    };
    match look() {
        Ok((guest, true)) => Found::Running(guest),
        Ok((guest, false)) => Found::Ended(guest),
        Err(error) => Found::Damaged {
            why: error.to_string(),
            folder,
        },
    }
}

fn find_by_command_line(folder: &GuestFolder) -> io::Result<Option<ProcessId>> {
    let socket = folder.qmp().to_string_lossy().replace(',', ",,");
    process_with_argument(&format!("socket,id=qmp,path={socket},server=on,wait=off"))
}

/// Returns a process that has this argument in its command line.
pub(crate) fn process_with_argument(wanted: &str) -> io::Result<Option<ProcessId>> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may end at any time; it is then not the one sought.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if line
            .split(|byte| *byte == 0)
            .any(|argument| argument == wanted.as_bytes())
        {
            return ProcessId::of(pid);
        }
    }
    Ok(None)
}

/// Returns a name for the guest's scope that is unique on this machine.
pub(crate) fn scope_name(folder: &GuestFolder) -> String {
    format!("{}-{:08x}", folder.name(), unique(folder))
}

/// Returns a number that identifies this folder, the same in every version of this program.
pub(crate) fn unique(folder: &GuestFolder) -> u32 {
    let bytes = folder.path().as_os_str().as_encoded_bytes();
    // 32-bit FNV-1a.
    bytes.iter().fold(0x811c_9dc5, |hash: u32, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

impl RecordedGuest {
    pub(crate) fn new(folder: GuestFolder, description: GuestDescription, record: Record) -> Self {
        Self {
            folder,
            description,
            record,
        }
    }

    /// Returns the guest's name.
    pub fn name(&self) -> &str {
        &self.description.name
    }

    /// Returns the description that it was launched from.
    pub fn description(&self) -> &GuestDescription {
        &self.description
    }

    /// Returns its files and sockets.
    pub fn folder(&self) -> &GuestFolder {
        &self.folder
    }

    /// Returns its QEMU's control socket.
    pub fn socket(&self) -> PathBuf {
        let attached = self.record.attached.clone();
        attached.unwrap_or_else(|| self.folder.qmp())
    }

    /// Returns whether another program started its QEMU.
    pub fn is_attached(&self) -> bool {
        self.record.attached.is_some()
    }

    /// Returns the record of its QEMU.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Returns the number of its process, also after the process ended.
    pub fn pid(&self) -> Option<i32> {
        self.record.process.as_ref().map(|process| process.pid)
    }

    pub(crate) fn write_record(&self) -> io::Result<()> {
        self.folder.write_record(&self.record)
    }

    pub(crate) fn set_tpm(&mut self, tpm: Tpm) -> io::Result<()> {
        self.record.tpm = Some(tpm);
        self.write_record()
    }

    pub(crate) fn set_process(
        &mut self,
        process: Option<ProcessId>,
        scope: Scope,
    ) -> io::Result<()> {
        self.record.process = process;
        self.record.scope = scope;
        self.write_record()
    }

    /// Returns the handle for migrations.
    pub fn handle(&self) -> Guest {
        let channel = |name: &String| (name.clone(), self.folder.channel(name));
        let channels = self.description.channels.iter();
        // The program that started an attached guest decides where its channels lead.
        let channels = channels.filter(|_| !self.is_attached());
        Guest::from(Facts {
            description: self.description.clone(),
            generation: self.record.generation,
            process: self.record.process.clone(),
            owner: match self.is_attached() {
                true => Owner::Attached,
                false => Owner::Longhaul,
            },
            paused: false,
            sender: self.folder.sender(),
            log: self.folder.log(),
            channels: channels.map(|one| channel(&one.name)).collect(),
            sockets: None,
        })
    }

    /// Records the current generation of the right to run.
    pub(crate) fn set_generation(&mut self, generation: u64) -> io::Result<()> {
        let mut record = Record {
            generation,
            ..self.record.clone()
        };
        if let Some(tpm) = &mut record.tpm {
            tpm.arrives = false;
        }
        self.folder.write_record(&record)?;
        self.record = record;
        Ok(())
    }

    /// Connects to its QEMU's control socket, which serves one client at a time.
    pub async fn connect(&self) -> Result<Qmp, QmpError> {
        Qmp::connect(&self.socket(), COMMAND_TIMEOUT).await
    }

    /// Returns a handle of its process; `None` where it has ended.
    pub fn process(&self) -> io::Result<Option<Process>> {
        match &self.record.process {
            Some(id) => Process::open(id),
            None => Ok(None),
        }
    }

    /// Waits until its QEMU has ended.
    pub async fn ended(&self) -> io::Result<()> {
        match self.process()? {
            Some(process) => process.ended().await,
            None => Ok(()),
        }
    }

    /// Ends its QEMU and removes everything that was created for it.
    ///
    /// An existing connection must be given, as there can be no second one.
    pub async fn stop(&self, qmp: Option<&Qmp>) -> Result<(), StopError> {
        if let Some(process) = self.process().map_err(self.failed("finding its process"))? {
            self.end(&process, qmp)
                .await
                .map_err(self.failed("ending its process"))?;
        }
        self.clean_up().await
    }

    async fn end(&self, process: &Process, qmp: Option<&Qmp>) -> io::Result<()> {
        if let Err(error) = self.ask_to_quit(qmp).await {
            tracing::debug!(guest = self.name(), %error, "QEMU could not be asked to quit");
        } else if timeout(END_TIMEOUT, process.ended()).await.is_ok() {
            return Ok(());
        }
        process.terminate()?;
        if timeout(END_TIMEOUT, process.ended()).await.is_err() {
            process.kill()?;
            if timeout(KILL_TIMEOUT, process.ended()).await.is_err() {
                let text = format!(
                    "process {} does not end though it was killed: it waits for a disk or network \
                     that does not answer",
                    process.id().pid
                );
                return Err(io::Error::other(text));
            }
        }
        Ok(())
    }

    async fn ask_to_quit(&self, qmp: Option<&Qmp>) -> Result<(), QmpError> {
        let own;
        let qmp = match qmp {
            Some(qmp) => qmp,
            None => {
                own = Qmp::connect(&self.socket(), LAST_WORD_TIMEOUT).await?;
                &own
            }
        };
        quit(qmp).await
    }

    async fn clean_up(&self) -> Result<(), StopError> {
        if let Some(tpm) = &self.record.tpm {
            tpm::end(&self.folder, tpm, self.record.generation)
                .await
                .map_err(self.failed("ending its TPM"))?;
        }
        for tap in &self.record.taps {
            tap::remove(tap)
                .await
                .map_err(self.failed("removing its TAP device"))?;
        }
        self.record
            .scope
            .remove()
            .await
            .map_err(self.failed("removing its scope"))?;
        self.folder
            .remove()
            .map_err(self.failed("removing its folder"))
    }

    fn failed(&self, what: &str) -> impl FnOnce(io::Error) -> StopError + use<> {
        let (guest, what) = (self.name().to_owned(), what.to_owned());
        move |source| StopError {
            guest,
            what,
            source,
        }
    }
}

/// Tells a QEMU to end.
pub(crate) async fn quit(qmp: &Qmp) -> Result<(), QmpError> {
    match qmp.execute("quit", json!({}), LAST_WORD_TIMEOUT).await {
        // QEMU may exit before its answer is sent.
        Ok(_) | Err(QmpError::Closed { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Returns the account that a configuration names, unless it is the agent's own.
pub(crate) fn account(run_as: Option<&str>) -> io::Result<Option<Account>> {
    let account = run_as
        .map(|name| Account::of(name).map_err(|text| io::Error::other(format!("run_as {text}"))))
        .transpose()?;
    Ok(account.filter(|account| account.uid != nix::unistd::geteuid()))
}
