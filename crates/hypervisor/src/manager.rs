//! The interface between a migration and the owner of a guest on a host: [`GuestManager`].
//!
//! ```text
//! source                                      destination
//! find -> lease                               launch_incoming -> Launched
//! depart -> note_stop                           |
//!   |                                         commit          the guest is this host's
//!   '-> confirm         it has left             or
//!    or abort_outgoing  it stays              abort_incoming  nothing of it remains here
//! ```
//!
//! [`crate::launcher::Launcher`] manages the guests that Longhaul launched or attached to. The
//! right to run a guest is not a manager's: the handover's journals decide it
//! (docs/decisions/0036-guest-managers.md).

use crate::disk::base::Base;
use crate::folder::log_tail;
use crate::guest::StopError;
use crate::memory::{ByCommand, Migrator};
use crate::process::{Process, ProcessId};
use crate::qmp::Qmp;
use crate::starter::Starter;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use longhaul_protocol::HostId;
use longhaul_protocol::guest::{GuestDescription, Managed, Manager};
use longhaul_protocol::message::Check;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Number of lines of a log in an error.
const LAST_LINES: usize = 2;
/// Longest end of a log in an error, in characters: errors are cut where they are stored.
const LAST_WORDS_CHARS: usize = 250;

/// The owner of guests on this host.
pub trait GuestManager: Send + Sync {
    /// Returns the guests that have a QEMU here, or remains of one. Changes nothing.
    fn list(&self) -> io::Result<Vec<Found>>;

    /// Returns the guest with this name, if its QEMU runs here.
    fn find(&self, name: &str) -> io::Result<Option<Guest>> {
        let found = self.list()?;
        Ok(found.into_iter().find_map(|found| match found {
            Found::Running(guest) if guest.name() == name => Some(guest),
            Found::Running(_) | Found::Ended(_) | Found::Foreign { .. } | Found::Damaged { .. } => {
                None
            }
        }))
    }

    /// Returns what could start a second copy of a guest here after it has left; `None` where its
    /// QEMU has ended.
    fn starter(&self, guest: &Guest) -> io::Result<Option<Starter>>;

    /// Takes the exclusive right to control a guest's QEMU. Fails if another holder has it for
    /// `within`.
    fn lease<'a>(
        &'a self,
        guest: &'a Guest,
        within: Duration,
    ) -> BoxFuture<'a, Result<Lease, ManagerError>>;

    /// Learns what the names stand for here that the manager at the source has given to a guest's
    /// images and networks, before this host is asked whether it has them. Returns what a plan
    /// says about it. Changes nothing on the host.
    fn expect(&self, _guest: &GuestDescription) -> Vec<Check> {
        Vec::new()
    }

    /// Returns what the manager of a destination needs for [`GuestManager::obstacles`]. Changes
    /// nothing.
    fn outlook(&self, _guest: &Guest) -> io::Result<Cookie> {
        Ok(Cookie::default())
    }

    /// Returns what keeps a guest of this manager from coming here, by the outlook that its manager
    /// at the source has. It comes from another host. `follows` is whether some of its memory may
    /// follow it. Changes nothing.
    fn obstacles(
        &self,
        _guest: &GuestDescription,
        _outlook: &Managed,
        _follows: bool,
    ) -> Vec<Check> {
        Vec::new()
    }

    /// Allocates the volume of an image for a disk of an arriving guest, where
    /// [`GuestManager::expect`] has named the image as [`VolumeContent::Absent`]. Returns whether
    /// the image is one of this manager's. It is freed by [`GuestManager::abort_incoming`], and by
    /// [`GuestManager::free`].
    ///
    /// [`VolumeContent::Absent`]: crate::config::VolumeContent::Absent
    fn allocate<'a>(
        &'a self,
        _guest: &'a str,
        _image: &'a str,
        _bytes: u64,
    ) -> BoxFuture<'a, Result<bool, ManagerError>> {
        async { Ok(false) }.boxed()
    }

    /// Frees what was allocated for a guest whose QEMU was not launched. What cannot be freed yet
    /// is tried again.
    fn free<'a>(&'a self, _guest: &'a str) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    /// Launches the QEMU of a guest that arrives. It is paused, and takes no stream yet. After an
    /// error nothing of it remains, except where the error says so. The launch is completed even if
    /// the future is dropped.
    fn launch_incoming(
        &self,
        incoming: IncomingGuest,
    ) -> BoxFuture<'_, Result<Launched, LaunchIncomingError>>;

    /// Returns the socket on which the QEMU of an arriving guest takes its stream, also after a
    /// restart of the agent.
    fn incoming_socket(&self, guest: &Guest) -> io::Result<IncomingSocket>;

    /// Gives an arrived guest to this host by the manager's own durable record, and lets it run.
    ///
    /// `lease` is that of a QEMU that has just loaded the guest. Without one, as after a restart of
    /// the agent, the state of QEMU is unknown, and the guest counts as committed even if it does
    /// not run.
    fn commit<'a>(
        &'a self,
        guest: &'a Guest,
        lease: Option<&'a Lease>,
        commit: Commit,
    ) -> BoxFuture<'a, Result<(), CommitError>>;

    /// Returns whether an arriving guest of an earlier agent has never run here and cannot run any
    /// more: its QEMU ends with the agent, and [`GuestManager::commit`] was not begun.
    fn has_never_run(&self, _guest: &str) -> io::Result<bool> {
        Ok(false)
    }

    /// Ends the QEMU of an arriving guest that does not come, and removes what was made for it.
    /// Does nothing if there is nothing.
    fn abort_incoming<'a>(
        &'a self,
        guest: &'a str,
        lease: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>>;

    /// Begins the departure of a guest: keeps other programs from changing it. Returns what the
    /// manager of the destination needs for [`GuestManager::launch_incoming`]. The departure ends
    /// with the lease, if not by [`GuestManager::abort_outgoing`] or [`GuestManager::confirm`].
    fn begin<'a>(
        &'a self,
        _guest: &'a Guest,
        _lease: &'a Lease,
    ) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        async { Ok(Cookie::default()) }.boxed()
    }

    /// Notes durably what [`GuestManager::abort_outgoing`] has to restore in a guest's QEMU.
    /// Returns how it is made to migrate. `prepared` is what the manager of the destination has for
    /// this one.
    fn depart<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        prepared: Cookie,
    ) -> BoxFuture<'a, Result<Departure, ManagerError>>;

    /// Ends the manager's part of a departure whose stream was read to its end. Returns what the
    /// manager of the destination needs for [`GuestManager::commit`].
    fn departed<'a>(&'a self, _guest: &'a Guest) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        async { Ok(Cookie::default()) }.boxed()
    }

    /// Notes whether a move is about to stop a departing guest. The note survives the agent. It
    /// need not survive the host: neither does the guest.
    fn note_stop(&self, guest: &Guest, stops: bool) -> io::Result<()>;

    /// Undoes what an earlier agent has begun and did not live to record: no attempt of these
    /// guests is known but of those in `moving`. Called once, when an agent starts.
    fn settle<'a>(&'a self, _moving: &'a BTreeSet<String>) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    /// Restores a guest that does not leave to its state before the move.
    fn abort_outgoing<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        stays: Stays,
    ) -> BoxFuture<'a, Result<(), AbortError>>;

    /// Ends what a move has left undone of a guest of which no attempt is open any more: as where
    /// its QEMU has ended, or the agent was restarted. What cannot be ended yet is tried again.
    fn settle_guest(&self, _guest: &str) {}

    /// Ends the QEMU of a guest that has left, and removes what was made for it. Does nothing if
    /// there is nothing.
    fn confirm<'a>(
        &'a self,
        guest: &'a str,
        lease: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>>;
}

/// The state of a guest that a manager found.
#[derive(Debug)]
pub enum Found {
    /// Its QEMU runs.
    Running(Guest),
    /// Its QEMU has ended, by itself or with the machine.
    Ended(Guest),
    /// It runs at another program, and cannot be described, so it cannot be moved.
    Foreign {
        /// The guest.
        name: String,
        /// The program that manages it.
        by: Manager,
        /// The reason, and what to do.
        why: String,
    },
    /// Its record cannot be used; nothing was changed.
    Damaged {
        /// The guest.
        name: String,
        /// Its description, if that can be read.
        description: Option<Box<GuestDescription>>,
        /// The host that sent it, if that is known.
        sender: Option<HostId>,
        /// The error.
        why: String,
    },
}

impl Found {
    /// Returns the guest's name.
    pub fn name(&self) -> &str {
        match self {
            Self::Running(guest) | Self::Ended(guest) => guest.name(),
            Self::Foreign { name, .. } | Self::Damaged { name, .. } => name,
        }
    }

    /// Returns its description, if that can be read.
    pub fn description(&self) -> Option<&GuestDescription> {
        match self {
            Self::Running(guest) | Self::Ended(guest) => Some(guest.description()),
            Self::Foreign { .. } => None,
            Self::Damaged { description, .. } => description.as_deref(),
        }
    }

    /// Returns the host that sent it, if that is known.
    pub fn sender(&self) -> Option<HostId> {
        match self {
            Self::Running(guest) | Self::Ended(guest) => guest.sender(),
            Self::Foreign { .. } => None,
            Self::Damaged { sender, .. } => *sender,
        }
    }
}

/// Who started the QEMU of a guest, and ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Owner {
    /// Longhaul.
    Longhaul,
    /// A program or a person that Longhaul does not know; the guest was attached to.
    Attached,
    /// libvirt.
    Libvirt,
    /// Proxmox VE.
    Proxmox,
}

impl Owner {
    /// Returns the program that manages the guest beside Longhaul.
    pub fn manager(self) -> Option<Manager> {
        match self {
            Self::Longhaul | Self::Attached => None,
            Self::Libvirt => Some(Manager::Libvirt),
            Self::Proxmox => Some(Manager::Proxmox),
        }
    }
}

/// What the managers at the two ends of a move tell each other. Only managers of the same kind
/// understand it; those of Longhaul's own guests need none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cookie(pub Vec<u8>);

/// How a guest departs.
#[derive(Debug, Clone)]
pub struct Departure {
    /// The path of the socket for its migration stream, where who connects may do so.
    pub socket: PathBuf,
    /// Who makes its QEMU migrate.
    pub by: Arc<dyn Migrator>,
}

impl From<PathBuf> for Departure {
    /// By QEMU's own commands.
    fn from(socket: PathBuf) -> Self {
        Self {
            socket,
            by: Arc::new(ByCommand),
        }
    }
}

/// The handle of a guest: what its manager knew when it was found.
#[derive(Debug, Clone)]
pub struct Guest(Arc<Facts>);

/// What a manager knows of a guest.
#[derive(Debug)]
pub struct Facts {
    /// The description that a destination launches.
    pub description: GuestDescription,
    /// Generation of the right to run at the time of the manager's record.
    pub generation: u64,
    /// Its process, also after that has ended.
    pub process: Option<ProcessId>,
    /// Who started its QEMU, and ends it.
    pub owner: Owner,
    /// Whether its manager knows that it is paused.
    pub paused: bool,
    /// The host that sent it, if it came by a migration.
    pub sender: Option<HostId>,
    /// QEMU's log.
    pub log: PathBuf,
    /// The host's ends of its channels, by the channels' names, where the manager knows them.
    pub channels: BTreeMap<String, PathBuf>,
    /// Where its QEMU can connect to sockets of this process, if not everywhere.
    pub sockets: Option<SocketPlace>,
}

/// A folder for sockets between this process and a QEMU that its manager confines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketPlace {
    /// The folder.
    pub folder: PathBuf,
    /// The folder's path in the mounts of QEMU.
    pub seen: PathBuf,
    /// How the names of all sockets end.
    pub end: String,
}

impl SocketPlace {
    /// Makes the folder, which nobody but this account may change.
    pub fn make(&self) -> io::Result<()> {
        match DirBuilder::new().mode(0o711).create(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let is = fs::symlink_metadata(&self.folder)?;
        if !is.is_dir() || is.uid() != nix::unistd::geteuid().as_raw() || is.mode() & 0o022 != 0 {
            let folder = self.folder.display();
            let text = format!("others can change the folder {folder}: remove it");
            return Err(io::Error::other(text));
        }
        match is.mode() & 0o111 == 0o111 {
            true => Ok(()),
            false => fs::set_permissions(&self.folder, Permissions::from_mode(is.mode() | 0o111)),
        }
    }

    /// Returns the path of a socket for this process.
    pub fn ours(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}{}", self.end))
    }

    /// Returns the path of a socket for QEMU.
    pub fn theirs(&self, name: &str) -> PathBuf {
        self.seen.join(format!("{name}{}", self.end))
    }
}

impl From<Facts> for Guest {
    fn from(facts: Facts) -> Self {
        Self(Arc::new(facts))
    }
}

impl Guest {
    /// Returns the guest's name.
    pub fn name(&self) -> &str {
        &self.0.description.name
    }

    /// Returns the description that a destination launches.
    pub fn description(&self) -> &GuestDescription {
        &self.0.description
    }

    /// Returns the generation of the right to run in its manager's record.
    pub fn generation(&self) -> u64 {
        self.0.generation
    }

    /// Returns who started its QEMU, and ends it.
    pub fn owner(&self) -> Owner {
        self.0.owner
    }

    /// Returns whether its manager knows that it is paused. QEMU knows it in any case.
    pub fn is_paused(&self) -> bool {
        self.0.paused
    }

    /// Returns whether it was attached to.
    pub fn is_attached(&self) -> bool {
        self.0.owner == Owner::Attached
    }

    /// Returns the host that sent it, if it came by a migration.
    pub fn sender(&self) -> Option<HostId> {
        self.0.sender
    }

    /// Returns QEMU's log.
    pub fn log(&self) -> &Path {
        &self.0.log
    }

    /// Returns the last lines of QEMU's log, shortened for an error.
    pub fn last_words(&self) -> String {
        last_words(&log_tail(&self.0.log))
    }

    /// Returns the host's end of one of its channels.
    pub fn channel(&self, name: &str) -> Option<&Path> {
        self.0.channels.get(name).map(PathBuf::as_path)
    }

    /// Returns where its QEMU can connect to sockets of this process, if not everywhere.
    pub fn sockets(&self) -> Option<&SocketPlace> {
        self.0.sockets.as_ref()
    }

    /// Returns the host's ends of its channels, by the channels' names.
    pub fn channels(&self) -> &BTreeMap<String, PathBuf> {
        &self.0.channels
    }

    /// Returns the number of its process, also after the process ended.
    pub fn pid(&self) -> Option<i32> {
        self.0.process.as_ref().map(|process| process.pid)
    }

    /// Returns its process, also after the process ended.
    pub fn process(&self) -> Option<&ProcessId> {
        self.0.process.as_ref()
    }

    /// Ends its QEMU at once.
    pub fn kill(&self) -> io::Result<()> {
        let process = self.process().map(Process::open).transpose()?;
        process.flatten().map_or(Ok(()), |process| process.kill())
    }

    /// Waits until its QEMU has ended.
    pub async fn ended(&self) -> io::Result<()> {
        let process = self.process().map(Process::open).transpose()?;
        match process.flatten() {
            Some(process) => process.ended().await,
            None => Ok(()),
        }
    }
}

/// Returns the last lines of a log, at most [`LAST_WORDS_CHARS`] characters.
fn last_words(log: &str) -> String {
    let lines: Vec<&str> = log.lines().map(str::trim).collect();
    let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("; ");
    let more = last.chars().count().saturating_sub(LAST_WORDS_CHARS);
    last.chars().skip(more).collect()
}

/// The exclusive right to control a guest's QEMU, until this and all clones of its [`Qmp`] are
/// dropped.
#[derive(Debug)]
pub struct Lease {
    qmp: Qmp,
    _held: Option<Box<dyn Held>>,
}

/// What a manager keeps as long as a lease is held.
pub trait Held: fmt::Debug + Send + Sync {}

impl<T: fmt::Debug + Send + Sync> Held for T {}

impl From<Qmp> for Lease {
    fn from(qmp: Qmp) -> Self {
        Self { qmp, _held: None }
    }
}

impl Lease {
    /// A lease that keeps something of its manager's.
    pub fn holding(qmp: Qmp, held: impl Held + 'static) -> Self {
        Self {
            qmp,
            _held: Some(Box::new(held)),
        }
    }

    /// Returns the access to QEMU.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }
}

/// A guest that arrives.
#[derive(Debug, Clone)]
pub struct IncomingGuest {
    /// Its description.
    pub description: GuestDescription,
    /// Generation of the right to run at its source.
    pub generation: u64,
    /// The base images of its disks, by the disks' names; other images name their backing files
    /// themselves.
    pub bases: BTreeMap<String, Base>,
    /// The sizes of raw disks that are smaller than their volumes, by the disks' names.
    pub sizes: BTreeMap<String, u64>,
    /// The host that sends it.
    pub sender: HostId,
    /// The program that manages it there, and here from now on, if Longhaul does not.
    pub managed: Option<Managed>,
}

/// The QEMU of an arriving guest.
#[derive(Debug)]
pub struct Launched {
    /// The guest.
    pub guest: Guest,
    /// The right to control its QEMU.
    pub lease: Lease,
    /// The path of the socket for its migration stream, where QEMU may listen.
    pub socket: PathBuf,
    /// Whether QEMU was set up by its manager, and listens there already.
    pub listens: bool,
    /// What its manager here has for the one at the source.
    pub cookie: Cookie,
}

/// The socket on which a QEMU listens for its migration stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncomingSocket {
    /// Its path for this process.
    pub ours: PathBuf,
    /// Its path for QEMU, which may have mounts of its own.
    pub theirs: PathBuf,
}

impl From<PathBuf> for IncomingSocket {
    /// A socket that has the same path for both.
    fn from(path: PathBuf) -> Self {
        Self {
            ours: path.clone(),
            theirs: path,
        }
    }
}

/// The terms on which an arrived guest becomes this host's.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The new generation of the right to run it.
    pub generation: u64,
    /// Whether it runs; a guest that was paused at its source stays paused.
    pub runs: bool,
    /// Whether some of its memory follows.
    pub follows: bool,
    /// What its manager at the source has for the one here.
    pub cookie: Cookie,
}

/// How a guest that does not leave continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stays {
    /// QEMU's migration was aborted, and the guest is in its state before the move.
    Continued,
    /// QEMU's migration may still run, and the guest may be stopped.
    Interrupted {
        /// Whether it ran before the move.
        ran: bool,
        /// Whether the move may have stopped it. It counts as stopped, too, if
        /// [`GuestManager::note_stop`] said so.
        stopped: bool,
    },
}

/// Why a manager cannot do what is asked.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct ManagerError(pub String);

/// Why the QEMU of an arriving guest was not launched.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LaunchIncomingError {
    /// This host cannot run the guest.
    #[error("{0}")]
    Unsuitable(String),
    /// QEMU did not start, or its record could not be written.
    #[error("{0}")]
    Failed(String),
}

/// Why an arrived guest does not run.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    /// QEMU refused. The guest has never run here, and nothing was recorded.
    #[error("{0}")]
    Refused(String),
    /// It is not known whether the guest has run here.
    #[error("{0}")]
    Unknown(String),
}

/// Why a guest is not in its state before the move.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AbortError {
    /// It does not continue.
    #[error("{0}")]
    Stopped(String),
    /// It continues, and its QEMU has settings of the move.
    #[error("{0}")]
    Settings(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_the_last_lines_of_a_log() {
        assert_eq!(last_words("one\ntwo\nthree\n"), "two; three");
        assert_eq!(last_words("one"), "one");
        assert_eq!(last_words(""), "");
        let long = format!("{}\nends here", "x".repeat(1000));
        let words = last_words(&long);
        assert_eq!(words.chars().count(), LAST_WORDS_CHARS);
        assert!(words.ends_with("ends here"));
    }
}
