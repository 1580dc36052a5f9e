//! A guest that leaves: locked for the move, and afterwards stopped, or unlocked.

use super::arrival::text;
use super::{CHANGE_TIMEOUT, Handoff, Proxmox, RUN_TIMEOUT, lock};
use crate::accept;
use crate::config::GuestConfig;
use crate::device::{Content, Drive, is_drive, is_state};
use crate::names::VmId;
use crate::node;
use crate::notes::{Note, Role};
use crate::storage::format_of;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::config::ImageFormat;
use longhaul_hypervisor::manager::{AbortError, Lease, Stays};
use longhaul_hypervisor::memory::{self, Continuation, Settings};
use longhaul_hypervisor::process::Process;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The lock of a guest that moves.
pub(super) const LOCK: &str = "migrate";

/// The intervals between attempts to unlock a guest: the first and the longest one.
const SETTLE_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The end of the name of a file that its guest has left, as of the guest's disks.
const SET_ASIDE: &str = ".moved";

impl Proxmox {
    /// Returns what a destination needs for its checks.
    pub(super) fn outlook_of(&self, guest: &Guest) -> Result<Handoff, String> {
        let id = self.id_of(guest.name()).map_err(text)?;
        let id = id.ok_or("Proxmox VE does not have it any more")?;
        let file = node::read(&node::config_path(id)).map_err(text)?;
        let config = GuestConfig::read(&file.unwrap_or_default()).map_err(text)?;
        let running = node::running(id).map_err(text)?;
        let running = running.ok_or("its QEMU has ended")?;
        handoff(id, config, &running, &guest.description().machine)
    }

    /// Locks a guest, and returns what its destination needs.
    pub(super) async fn begin_departure(&self, guest: &Guest) -> Result<Handoff, String> {
        let name = guest.name();
        let id = self.id_of(name).map_err(text)?;
        let id = id.ok_or("Proxmox VE does not have it any more")?;
        let read = || -> Result<GuestConfig, String> {
            let file = node::read(&node::config_path(id)).map_err(text)?;
            GuestConfig::read(&file.unwrap_or_default()).map_err(text)
        };
        // A lock of an earlier departure is not removed meanwhile.
        let departing = self.departing(name);
        let departing = departing.lock().await;
        let noted = self.notes.read(name).map_err(text)?;
        // An earlier agent may have locked it and died.
        let is_ours = noted
            .as_ref()
            .is_some_and(|note| note.role == Role::Departs);
        let config = read()?;
        if let Some(lock) = config.lock().filter(|lock| !is_ours || *lock != LOCK) {
            return Err(format!("VM {id} is locked ({lock})"));
        }
        let disks = &guest.description().disks;
        let volumes = disks.iter().filter_map(|disk| {
            let image = self.config.image(&disk.image)?;
            let volume = crate::notes::Volume {
                path: image.path,
                format: image.format,
            };
            Some((disk.image.clone(), volume))
        });
        let storages = node::storages().map_err(text)?;
        let states = config.settings().filter(|(key, _)| is_state(key));
        let states = states.filter_map(|(_, value)| match Drive::read(value)?.content {
            // A block device keeps its name.
            Content::Volume { storage, name } => {
                let storage = storages.get(storage).filter(|it| it.folder().is_some())?;
                storage.path(name)
            }
            Content::Empty | Content::HostDrive | Content::Path(_) => None,
        });
        let note = Note {
            id,
            role: Role::Departs,
            generation: guest.generation(),
            sender: None,
            stops: false,
            locked: false,
            before: None,
            began_ns: now_ns(),
            process: node::running(id).map_err(text)?.map(|it| it.process),
            volumes: volumes.collect(),
            allocated: BTreeSet::new(),
            states: states.collect(),
        };
        self.notes.write(name, &note).map_err(text)?;
        let (number, machine) = (id.to_string(), &guest.description().machine);
        let locked = async {
            let config = read()?;
            let lacks_lock = config.lock() != Some(LOCK);
            if lacks_lock {
                let arguments = ["set", &number, "--lock", LOCK];
                let set = self.run_beside(name, &arguments, CHANGE_TIMEOUT).await;
                set.map_err(text)?;
            }
            let config = read()?;
            if config.lock() != Some(LOCK) {
                return Err(format!("VM {id} is not locked (migrate) after qm set"));
            }
            let running = node::running(id).map_err(text)?;
            let running = running.ok_or("its QEMU has ended")?;
            handoff(id, config, &running, machine)
        };
        let handoff = locked.await;
        drop(departing);
        if handoff.is_err() {
            // It may be locked.
            if let Err(error) = self.stay(name, note.began_ns).await {
                tracing::error!(guest = name, error, "it stays locked: qm unlock {id}");
            }
        }
        handoff
    }

    fn departing(&self, name: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut departing = lock(&self.shared.departing);
        departing.entry(name.to_owned()).or_default().clone()
    }

    /// Unlocks a guest that stays, and forgets that it was to leave, unless another departure of it
    /// has begun.
    pub(super) async fn stay(&self, name: &str, began_ns: u64) -> Result<(), String> {
        let departing = self.departing(name);
        let _departing = departing.lock().await;
        let note = self.notes.read(name).map_err(text)?;
        let departs = |note: &Note| note.role == Role::Departs && note.began_ns == began_ns;
        let Some(note) = note.filter(departs) else {
            return Ok(());
        };
        node::present().map_err(text)?;
        let id = note.id;
        let file = node::read(&node::config_path(id)).map_err(text)?;
        let config = GuestConfig::read(&file.unwrap_or_default()).map_err(text)?;
        let running = node::running(id).map_err(text)?;
        if config.lock() == Some(LOCK) && is_ours(&note, running.as_ref()) {
            let number = id.to_string();
            let arguments = ["unlock", &number];
            let unlocked = node::run("qm", &arguments, CHANGE_TIMEOUT).await;
            unlocked.map_err(text)?;
        }
        self.notes.forget(name).map_err(text)
    }

    /// Unlocks a guest that stays and whose move is over, as where its QEMU has ended. Continues
    /// until that is done.
    pub(super) fn settle_departure(&self, name: &str) {
        let note = match self.notes.read(name) {
            Ok(note) => note.filter(|note| note.role == Role::Departs),
            Err(error) => {
                return tracing::error!(guest = name, %error, "the note about it cannot be read");
            }
        };
        let Some(note) = note else {
            return;
        };
        // An agent that restarts unlocks it too.
        if let Err(error) = self.notes.change(name, |note| note.stops = false) {
            tracing::error!(guest = name, %error, "cannot note that it stays");
        }
        if !lock(&self.shared.settling).insert(name.to_owned()) {
            return;
        }
        let (manager, name) = (self.clone(), name.to_owned());
        tokio::spawn(async move {
            let [mut interval, longest] = SETTLE_INTERVALS;
            while let Err(error) = manager.stay(&name, note.began_ns).await {
                let id = note.id;
                tracing::error!(
                    guest = name,
                    error,
                    "it stays locked for now: qm unlock {id}"
                );
                tokio::time::sleep(interval).await;
                interval = (interval * 2).min(longest);
            }
            lock(&manager.shared.settling).remove(&name);
        });
    }

    /// Keeps QEMU's settings before the move. Returns the path of the socket for its stream.
    pub(super) async fn keep_settings(&self, name: &str, lease: &Lease) -> Result<PathBuf, String> {
        let settings = Settings::look(lease.qmp()).await.map_err(text)?;
        let file = self.notes.beside(name, "settings").map_err(text)?;
        settings.keep(&file).map_err(text)?;
        self.notes.beside(name, "sock").map_err(text)
    }

    /// Lets a guest go on that does not leave.
    pub(super) async fn continue_guest(
        &self,
        guest: &Guest,
        lease: &Lease,
        stays: Stays,
    ) -> Result<(), AbortError> {
        let name = guest.name();
        let note = self.notes.read(name).unwrap_or_default();
        let departs = note.filter(|note| note.role == Role::Departs);
        if let Stays::Interrupted { ran, stopped } = stays {
            let noted = departs.as_ref().is_some_and(|note| note.stops);
            let how = Continuation::of(ran, stopped || noted);
            let resumed = memory::resume(lease.qmp(), how).await;
            resumed.map_err(|error| AbortError::Stopped(text(error)))?;
        }
        let settings = |error: String| AbortError::Settings(error);
        let file = self.notes.beside(name, "settings");
        let file = file.map_err(|error| settings(text(error)))?;
        let restored = Settings::restore_kept(lease.qmp(), &file).await;
        if let Some(note) = departs {
            let stayed = self.stay(name, note.began_ns).await;
            stayed.map_err(|error| settings(format!("it stays locked: {error}")))?;
        }
        restored.map_err(|error| settings(text(error)))
    }

    /// Ends the QEMU of a guest that has left. Its file stays, locked.
    pub(super) async fn end_departed(&self, name: &str) -> Result<(), String> {
        let note = self.notes.read(name).map_err(text)?;
        let Some(note) = note.filter(|note| note.role == Role::Departs) else {
            return Ok(());
        };
        node::present().map_err(text)?;
        self.end_qemu(name, note.id).await?;
        // Its disks are set aside; so is what Proxmox VE makes for cloud-init, and the state of
        // devices.
        let volumes = note.volumes.values().map(|volume| &volume.path);
        let volumes = volumes.filter(|path| is_cloud_init(path));
        for path in volumes.chain(&note.states) {
            let mut aside = path.clone().into_os_string();
            aside.push(SET_ASIDE);
            match fs::rename(path, aside) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(text(error)),
                _ => {}
            }
        }
        let left = self.notes.change(name, |note| {
            note.role = Role::Left;
            note.stops = false;
        });
        left.map_err(text)
    }

    /// Ends the QEMU of a guest.
    pub(super) async fn end_qemu(&self, name: &str, id: VmId) -> Result<(), String> {
        let Some(running) = node::running(id).map_err(text)? else {
            return Ok(());
        };
        let number = id.to_string();
        let arguments = ["stop", &number, "--skiplock"];
        let stopped = self.run_beside(name, &arguments, RUN_TIMEOUT).await;
        let process = Process::open(&running.process).map_err(text)?;
        let Some(process) = process else {
            return Ok(());
        };
        if let Err(error) = stopped {
            tracing::warn!(guest = name, %error, "ending its QEMU by its process");
            process.kill().map_err(text)?;
        }
        match tokio::time::timeout(RUN_TIMEOUT, process.ended()).await {
            Ok(ended) => ended.map_err(text),
            Err(_) => Err(format!(
                "its QEMU has not ended (process {})",
                running.process.pid
            )),
        }
    }
}

/// Returns whether a lock `migrate` is that of a departure. A QEMU that was started since was
/// unlocked by somebody else before, and its lock is that of another operation.
fn is_ours(note: &Note, running: Option<&node::Running>) -> bool {
    let departs = note.process.as_ref();
    running.is_none_or(|running| departs.is_none_or(|process| running.process == *process))
}

/// Returns the time since the Unix epoch, by which departures of a guest are told apart.
fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

/// Returns whether a file is the volume of cloud-init.
fn is_cloud_init(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str());
    let is_file = !path.starts_with("/dev");
    is_file && stem.is_some_and(|stem| stem.ends_with("-cloudinit"))
}

/// Returns what the destination needs of a locked guest.
fn handoff(
    id: VmId,
    mut config: GuestConfig,
    running: &node::Running,
    machine: &str,
) -> Result<Handoff, String> {
    accept::check(&config).map_err(text)?;
    accept::check_sections(&config).map_err(text)?;
    config.keep_only_now();
    config.retain(|key| !accept::stays_behind(key));
    let shown = running.machine().unwrap_or_default();
    // The version of Proxmox VE's, which the machine has beside QEMU's.
    let version = shown.split_once('+').map(|(_, version)| version);
    let sizes = sizes(&config)?;
    Ok(Handoff {
        vmid: id,
        config: config.to_string(),
        machine: match version {
            Some(version) => format!("{machine}+{version}"),
            None => machine.to_owned(),
        },
        firewall: node::read(&node::firewall_path(id)).map_err(text)?,
        sizes,
    })
}

/// Returns the sizes of a guest's raw volumes in bytes, by their drives. One that cannot be opened
/// is reported where it is moved.
fn sizes(config: &GuestConfig) -> Result<BTreeMap<String, u64>, String> {
    let storages = node::storages().map_err(text)?;
    let drives = config.settings().filter(|(key, _)| is_drive(key));
    let sizes = drives.filter_map(|(key, value)| match Drive::read(value)?.content {
        Content::Volume { storage, name } if format_of(name) == Some(ImageFormat::Raw) => {
            let path = storages.get(storage)?.path(name)?;
            let size = File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0)));
            Some((key.to_owned(), size.ok()?))
        }
        Content::Volume { .. } | Content::Empty | Content::HostDrive | Content::Path(_) => None,
    });
    Ok(sizes.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_hypervisor::process::ProcessId;

    #[test]
    fn a_lock_of_a_later_start_is_left_alone() {
        let process = ProcessId::of(1).unwrap().unwrap();
        let running = |start_ticks: u64| node::Running {
            process: ProcessId {
                start_ticks,
                ..process.clone()
            },
            words: Vec::new(),
        };
        let note = Note {
            id: 100,
            role: Role::Departs,
            generation: 1,
            sender: None,
            stops: true,
            locked: false,
            before: None,
            began_ns: 1,
            process: Some(process.clone()),
            volumes: BTreeMap::new(),
            allocated: BTreeSet::new(),
            states: BTreeSet::new(),
        };
        assert!(is_ours(&note, None));
        assert!(is_ours(&note, Some(&running(process.start_ticks))));
        assert!(!is_ours(&note, Some(&running(process.start_ticks + 1))));
    }
}
