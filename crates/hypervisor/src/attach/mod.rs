//! Attaches to a guest whose QEMU another program started: collects everything about it and changes
//! nothing.
//!
//! ```text
//! control socket -> process -> command line ─┐
//!                └> machine, devices, images ┴-> description -> folder with a record
//! ```
//!
//! The destination launches the resulting description. A part that it cannot express is refused by
//! name before anything is changed, and checked again before each move.

mod backing;
mod cards;
mod contents;
mod describe;
pub mod discover;
mod drives;
mod floppies;
mod found;
mod limits;
mod memory;
mod more_options;
mod names;
mod options;
mod properties;
mod readconfig;
#[cfg(test)]
mod reference_tests;
mod tpm;
mod words;

use crate::bridge_port;
use crate::config::HostConfig;
use crate::description::{self, DescriptionError};
use crate::disk;
use crate::folder::{GuestFolder, PathTooLong, Record};
use crate::guest::{Found as FoundGuest, RecordedGuest, StopError, find_all};
use crate::manager::Guest;
use crate::observe::Blocker;
use crate::process::{Account, ProcessId};
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use crate::scope::Scope;
use cards::Wires;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use names::Names;
use options::CommandLine;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The maximum length of a command line, in bytes.
const COMMAND_LINE_BYTES_MAX: usize = 1 << 20;

/// A guest to attach to.
#[derive(Debug, Clone, Copy)]
pub struct Attach<'a> {
    /// The guest's new name.
    pub name: &'a str,
    /// Its QEMU's control socket.
    pub socket: &'a Path,
    /// Its process, where the socket does not identify it.
    pub pid: Option<i32>,
    /// The generation that is written into the record.
    pub generation: u64,
}

/// The result of inspecting a guest.
#[derive(Debug, Clone)]
pub struct Learned {
    /// The description that a destination launches.
    pub description: GuestDescription,
    /// The machine as it runs.
    pub machine: Machine,
    /// The reasons why it cannot be moved; empty where there are none.
    pub refusals: Vec<Blocker>,
}

/// Why a guest was not attached to. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum AttachGuestError {
    /// It cannot have that name.
    #[error(transparent)]
    Name(#[from] DescriptionError),
    /// Its QEMU does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Its process cannot be identified.
    #[error("{0}")]
    Process(String),
    /// Another guest has its place.
    #[error("{0}")]
    Exists(String),
    /// It could not be moved.
    #[error("{} cannot be moved:{}", name, listed(.refusals))]
    Refused {
        /// The guest.
        name: String,
        /// All reasons.
        refusals: Vec<Blocker>,
    },
    /// A socket's path is too long.
    #[error(transparent)]
    Path(#[from] PathTooLong),
    /// The remains of an earlier guest of this name cannot be removed.
    #[error(transparent)]
    Stop(#[from] StopError),
    /// A system call failed.
    #[error("cannot attach to {name}: {what}: {source}")]
    Host {
        /// The guest.
        name: String,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

fn listed(refusals: &[Blocker]) -> String {
    let line = |one: &Blocker| format!("\n- {}\n  {}", one.text, one.hint.replace('\n', "\n  "));
    refusals.iter().map(line).collect()
}

/// A guest that can be attached to.
#[derive(Debug)]
pub struct Candidate {
    name: String,
    socket: PathBuf,
    generation: u64,
    process: ProcessId,
    pid: i32,
    learned: Learned,
}

impl Candidate {
    /// Returns the description that a destination would launch.
    pub fn description(&self) -> &GuestDescription {
        &self.learned.description
    }

    /// Attaches: writes a folder and a record for the guest.
    pub fn keep(self, config: &HostConfig) -> Result<RecordedGuest, AttachGuestError> {
        let folder = GuestFolder::new(&config.state, &self.name)?;
        let record = Record {
            generation: self.generation,
            emulator: self.learned.machine.qemu.clone(),
            taps: Vec::new(),
            process: Some(self.process.clone()),
            scope: Scope::Session,
            attached: Some(self.socket.clone()),
            tpm: None,
        };
        if let Err(error) = self.write(&folder, &record) {
            let failed = host(&self.name, "removing its folder");
            folder.remove().map_err(failed)?;
            return Err(error);
        }
        Ok(RecordedGuest::new(folder, self.learned.description, record))
    }

    fn write(&self, folder: &GuestFolder, record: &Record) -> Result<(), AttachGuestError> {
        let (name, pid) = (&self.name, self.pid);
        let account = Account::of_process(pid).map_err(host(name, "finding its user"))?;
        folder
            .create(Some(&account))
            .map_err(host(name, "making its folder"))?;
        let run = folder.run();
        let inside = run.strip_prefix("/").unwrap_or(&run);
        let theirs = PathBuf::from(format!("/proc/{pid}/root")).join(inside);
        let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
        if identity(&theirs).is_none() || identity(&theirs) != identity(&run) {
            return Err(AttachGuestError::Process(format!(
                "its QEMU runs where {} cannot be reached (another root folder or mount \
                 namespace): start it without, or the agent with the same",
                run.display()
            )));
        }
        folder
            .write_description(&self.learned.description)
            .and_then(|()| folder.write_record(record))
            .map_err(host(name, "writing its record"))
    }
}

fn host(name: &str, what: &'static str) -> impl FnOnce(io::Error) -> AttachGuestError + use<> {
    let name = name.to_owned();
    move |source| AttachGuestError::Host { name, what, source }
}

impl Attach<'_> {
    /// Inspects the guest. Its QEMU is queried and not changed; remains of an ended guest of this
    /// name are removed.
    pub async fn look(&self, config: &HostConfig) -> Result<Candidate, AttachGuestError> {
        description::check_name(self.name)?;
        self.make_room(config).await?;
        let (qmp, pid) = self.connect().await?;
        let id = ProcessId::of(pid).map_err(host(self.name, "finding its process"))?;
        let id = id.ok_or_else(|| AttachGuestError::Process(format!("process {pid} has ended")))?;
        let learned = learn(self.name, &qmp, pid, config).await?;
        if !learned.refusals.is_empty() {
            return Err(AttachGuestError::Refused {
                name: self.name.to_owned(),
                refusals: learned.refusals,
            });
        }
        Ok(Candidate {
            name: self.name.to_owned(),
            socket: self.socket.to_owned(),
            generation: self.generation,
            process: id,
            pid,
            learned,
        })
    }

    /// Refuses a guest that is here already, and removes the remains of an ended guest of this
    /// name.
    async fn make_room(&self, config: &HostConfig) -> Result<(), AttachGuestError> {
        let all = find_all(&config.state).map_err(host(self.name, "looking for guests"))?;
        let socket = fs::canonicalize(self.socket).unwrap_or_else(|_| self.socket.to_owned());
        for found in all {
            let (guest, runs) = match found {
                FoundGuest::Running(guest) => (guest, true),
                FoundGuest::Ended(guest) => (guest, false),
                FoundGuest::Damaged { .. } => continue,
            };
            let theirs = guest.socket();
            let same = fs::canonicalize(&theirs).unwrap_or(theirs) == socket;
            if runs && same {
                return Err(AttachGuestError::Exists(format!(
                    "{} has this control socket, and is known here already",
                    guest.name()
                )));
            }
            if guest.name() == self.name {
                if runs {
                    let text =
                        format!("{} runs here already, on another control socket", self.name);
                    return Err(AttachGuestError::Exists(text));
                }
                guest.stop(None).await?;
            }
        }
        Ok(())
    }

    /// Connects, and finds the process at the other end.
    async fn connect(&self) -> Result<(Qmp, i32), AttachGuestError> {
        let path = self.socket;
        let failed = |why: String| QmpError::Connect {
            path: path.to_owned(),
            why,
        };
        let stream = timeout(COMMAND_TIMEOUT, UnixStream::connect(path)).await;
        let stream = stream.map_err(|_| QmpError::Busy {
            path: path.to_owned(),
            waited: COMMAND_TIMEOUT,
        })?;
        let stream = stream.map_err(|error| failed(error.to_string()))?;
        let peer = stream
            .peer_cred()
            .map_err(|error| failed(error.to_string()))?;
        let peer = peer.pid().filter(|pid| *pid > 0);
        let pid = match (peer, self.pid) {
            (Some(peer), Some(told)) if peer != told => {
                return Err(AttachGuestError::Process(format!(
                    "the control socket is process {peer}'s, and not {told}'s"
                )));
            }
            (Some(pid), _) | (None, Some(pid)) => pid,
            (None, None) => {
                return Err(AttachGuestError::Process(
                    "the process at the control socket cannot be seen from here: give it with \
                     --pid"
                        .to_owned(),
                ));
            }
        };
        Ok((Qmp::over(stream, path, COMMAND_TIMEOUT).await?, pid))
    }
}

/// Inspects a guest without changing it. A running job of its QEMU is a reason too.
pub async fn learn(
    name: &str,
    qmp: &Qmp,
    pid: i32,
    config: &HostConfig,
) -> Result<Learned, AttachGuestError> {
    let mut learned = inspect(name, qmp, pid, config).await?;
    learned.refusals.extend(disk::busy(qmp).await?);
    Ok(learned)
}

/// Returns what lasts about a guest.
async fn inspect(
    name: &str,
    qmp: &Qmp,
    pid: i32,
    config: &HostConfig,
) -> Result<Learned, AttachGuestError> {
    let words = command_line(pid).map_err(|source| AttachGuestError::Host {
        name: name.to_owned(),
        what: "reading its command line",
        source,
    })?;
    let mut names = Names {
        config,
        pid,
        pvids: BTreeMap::new(),
    };
    let read = |path: &str| readconfig::content(&names.seen_by_it(path));
    let mut line = interpret(words.get(1..).unwrap_or_default(), read);
    line.tpm_version = line.tpm_socket().and_then(tpm::version);
    let process = ProcessId::of(pid).map_err(|source| AttachGuestError::Host {
        name: name.to_owned(),
        what: "looking at its process",
        source,
    })?;
    let found = found::look(qmp, process.as_ref(), &line.devices).await?;
    names.pvids = bridge_port::pvids(&found.networks).await;
    let (description, mut refusals) = describe::describe(name, line, &found, &names);
    let local = description.disks.iter().filter(|disk| disk.is_local());
    let local = local.filter_map(|disk| {
        let image = config.images.get(&disk.image)?;
        Some((&*disk.name, &*image.path))
    });
    let local: Vec<_> = local.collect();
    refusals.extend(disk::refusals(qmp, pid, &local).await?);
    Ok(Learned {
        description,
        machine: found.machine,
        refusals,
    })
}

/// Interprets a command line, with the content of the files of `-readconfig`.
fn interpret(words: &[String], read: impl Fn(&str) -> io::Result<String>) -> CommandLine {
    let (words, refusals) = readconfig::expand(words, read);
    let mut line = CommandLine::read(&words);
    line.refusals.extend(refusals);
    line
}

/// Returns the reasons why a guest cannot be moved that texts about it give alone: its command
/// line, the content of a file of `-readconfig`, and what QEMU prints of its networks.
pub fn reasons(words: &[String], config: &str, networks: &str) -> Vec<Blocker> {
    let line = interpret(words, |_| Ok(config.to_owned()));
    let wires = Wires::read(networks, networks);
    let mut reasons = line.refusals;
    reasons.extend(wires.refusals(&line.netdevs));
    reasons
}

/// Returns the machine of an attached guest, and new devices or other reasons that prevent a move;
/// `None` for guests that Longhaul launched.
pub async fn look_again(
    guest: &Guest,
    qmp: &Qmp,
    config: &HostConfig,
) -> Result<Option<(Machine, Vec<Blocker>)>, AttachGuestError> {
    let Some(pid) = guest.pid().filter(|_| guest.is_attached()) else {
        return Ok(None);
    };
    let learned = inspect(guest.name(), qmp, pid, config).await?;
    let mut refusals = learned.refusals;
    if refusals.is_empty() && learned.description != *guest.description() {
        let name = guest.name();
        refusals.push(Blocker {
            text: format!("{name} is not as it was when it was attached to"),
            hint: format!("longhaul guests detach {name}, and attach to it again"),
        });
    }
    Ok(Some((learned.machine, refusals)))
}

/// Returns a process's arguments, the program first.
fn command_line(pid: i32) -> io::Result<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
    if bytes.len() > COMMAND_LINE_BYTES_MAX {
        return Err(io::Error::other("it is longer than 1 MiB"));
    }
    let text = String::from_utf8(bytes).map_err(|_| io::Error::other("it is no text"))?;
    let text = text.strip_suffix('\0').unwrap_or(&text);
    Ok(text.split('\0').map(str::to_owned).collect())
}
