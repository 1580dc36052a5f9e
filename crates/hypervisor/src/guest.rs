//! A guest on this host: its QEMU found again after a restart of the agent, reached, and ended.
//!
//! [`Guest`] is what the rest of Longhaul holds of a guest, whoever started its QEMU: a control
//! socket, a process, a description. Here it comes from a folder that [`crate::launch`] filled;
//! guests that libvirt, Proxmox or a person started will be further sources of the same handle.

use crate::description;
use crate::folder::{GuestFolder, Record};
use crate::process::{Account, Process, ProcessId};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::scope::Scope;
use crate::tap;
use longhaul_protocol::guest::GuestDescription;
use serde_json::json;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::timeout;

/// Time that a QEMU gets to end by itself, and again after SIGTERM.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the system gets to end a killed QEMU (its last writes may be under way).
const KILL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time that a QEMU's control socket gets to answer when the QEMU is to end anyway.
const LAST_WORD_TIMEOUT: Duration = Duration::from_secs(2);

/// A guest that has a QEMU on this host, or had one that died.
#[derive(Debug, Clone)]
pub struct Guest {
    folder: GuestFolder,
    description: GuestDescription,
    record: Record,
}

/// What a folder of a guest turned out to hold.
#[derive(Debug)]
pub enum Found {
    /// Its QEMU runs.
    Running(Guest),
    /// Its QEMU has ended, by itself or with the machine.
    Ended(Guest),
    /// What is in it cannot be read; nothing was changed.
    Damaged {
        /// The folder.
        folder: GuestFolder,
        /// What is wrong with it.
        why: String,
    },
}

/// A QEMU that could not be ended, or left something behind.
#[derive(Debug, thiserror::Error)]
#[error("ending {guest}: {what}: {source}")]
pub struct StopError {
    /// The guest.
    pub guest: String,
    /// What was being done.
    pub what: String,
    /// What the system said.
    pub source: io::Error,
}

/// Looks at every guest's folder under a state folder.
///
/// A QEMU that was started in the moment in which the agent died is found by its command line. Nothing
/// is written: the guest may be one that is being launched.
pub fn find_all(state: &Path) -> io::Result<Vec<Found>> {
    Ok(GuestFolder::all(state)?.into_iter().map(find).collect())
}

fn find(folder: GuestFolder) -> Found {
    let look = || -> io::Result<(Guest, bool)> {
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
        let guest = Guest {
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
    let wanted = format!("socket,id=qmp,path={socket},server=on,wait=off");
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process may end at any time, and then it is not the one.
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

/// A name for the guest's scope that no other on this machine has.
pub(crate) fn scope_name(folder: &GuestFolder) -> String {
    format!("{}-{:08x}", folder.name(), unique(folder))
}

/// A number that tells this folder from all others, the same in every version of this program.
pub(crate) fn unique(folder: &GuestFolder) -> u32 {
    let bytes = folder.path().as_os_str().as_encoded_bytes();
    // 32-bit FNV-1a.
    bytes.iter().fold(0x811c_9dc5, |hash: u32, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

impl Guest {
    pub(crate) fn new(folder: GuestFolder, description: GuestDescription, record: Record) -> Self {
        Self {
            folder,
            description,
            record,
        }
    }

    /// The guest's name.
    pub fn name(&self) -> &str {
        &self.description.name
    }

    /// What it was launched from.
    pub fn description(&self) -> &GuestDescription {
        &self.description
    }

    /// Its files and sockets.
    pub fn folder(&self) -> &GuestFolder {
        &self.folder
    }

    /// Its QEMU's control socket.
    pub fn socket(&self) -> PathBuf {
        let attached = self.record.attached.clone();
        attached.unwrap_or_else(|| self.folder.qmp())
    }

    /// Whether something other than Longhaul started its QEMU.
    pub fn is_attached(&self) -> bool {
        self.record.attached.is_some()
    }

    /// Forgets a guest that something else started; its QEMU goes on as it is.
    pub fn detach(&self) -> io::Result<()> {
        self.folder.remove()
    }

    /// Which QEMU runs it.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The number of its process, while or after it ran.
    pub fn pid(&self) -> Option<i32> {
        self.record.process.as_ref().map(|process| process.pid)
    }

    pub(crate) fn write_record(&self) -> io::Result<()> {
        self.folder.write_record(&self.record)
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

    /// Writes down the generation that the right to run has now.
    pub fn set_generation(&mut self, generation: u64) -> io::Result<()> {
        let record = Record {
            generation,
            ..self.record.clone()
        };
        self.folder.write_record(&record)?;
        self.record = record;
        Ok(())
    }

    /// Connects to its QEMU's control socket, which serves one client at a time.
    pub async fn connect(&self) -> Result<Qmp, QmpError> {
        Qmp::connect(&self.socket(), COMMAND_TIMEOUT).await
    }

    /// A hold on its process; none where it has ended.
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

    /// Ends its QEMU and removes everything that was made for it.
    ///
    /// A connection that is held already must be given, as there can be no second one.
    pub async fn stop(&self, qmp: Option<&Qmp>) -> Result<(), StopError> {
        if let Some(process) = self.process().map_err(self.failed("finding its process"))? {
            self.end(&process, qmp)
                .await
                .map_err(self.failed("ending its process"))?;
        }
        self.clean_up().await
    }

    async fn end(&self, process: &Process, qmp: Option<&Qmp>) -> io::Result<()> {
        if let Err(error) = self.quit(qmp).await {
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

    async fn quit(&self, qmp: Option<&Qmp>) -> Result<(), QmpError> {
        let own;
        let qmp = match qmp {
            Some(qmp) => qmp,
            None => {
                own = Qmp::connect(&self.socket(), LAST_WORD_TIMEOUT).await?;
                &own
            }
        };
        match qmp.execute("quit", json!({}), LAST_WORD_TIMEOUT).await {
            // It may be gone before its answer is.
            Ok(_) | Err(QmpError::Closed { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn clean_up(&self) -> Result<(), StopError> {
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

/// The account that a configuration names.
pub(crate) fn account(run_as: Option<&str>) -> io::Result<Option<Account>> {
    run_as
        .map(|name| Account::of(name).map_err(|text| io::Error::other(format!("run_as {text}"))))
        .transpose()
}
