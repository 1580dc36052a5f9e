//! Proxmox VE as a manager of guests: a move is carried out with its own commands, and leaves its
//! files as `qm remote-migrate` leaves them.

mod arrival;
mod commit;
mod departure;
mod handoff;
mod volumes;

use crate::accept::{self, Refused, refuse};
use crate::config::GuestConfig;
use crate::device::{Card, Content, Drive, is_card, is_drive};
use crate::names::{self, VmId, VolumeName};
use crate::node::{self, CommandError, Running};
use crate::notes::{Note, Notes, Role, Volume};
use crate::relay::{self, Relay};
use crate::storage::{Storages, format_of};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
pub use handoff::{Handoff, HandoffError};
use longhaul_hypervisor::config::HostConfig;
use longhaul_hypervisor::description;
use longhaul_hypervisor::guest::StopError;
use longhaul_hypervisor::manager::{
    AbortError, Commit, CommitError, Cookie, Departure, Facts, Found, Guest, GuestManager,
    IncomingGuest, IncomingSocket, LaunchIncomingError, Launched, Lease, ManagerError, Owner,
    Stays,
};
use longhaul_hypervisor::starter::Starter;
use longhaul_protocol::guest::{Disk, GuestDescription, Managed, Manager, Nic};
use longhaul_protocol::message::Check;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

/// The memory of a guest whose file says nothing, in MiB.
const MEMORY_MIB: u64 = 512;
/// The CPU model of a guest whose command line says nothing.
const CPU: &str = "kvm64";
/// The interval between looks at a state.
const POLL: Duration = Duration::from_millis(20);
/// The time limit for a command that changes a file.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for a QEMU to start, beside that of `qm start` itself.
const START_TIMEOUT: Duration = Duration::from_secs(600);
/// The time limit for a QEMU to end, or to run.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// The guests of Proxmox VE on this host.
#[derive(Debug, Clone)]
pub struct Proxmox {
    config: Arc<HostConfig>,
    notes: Notes,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The relays of leases, by the guests' names.
    relays: Mutex<HashMap<String, Weak<Relay>>>,
    /// Where guests would arrive, by their names.
    expected: Mutex<HashMap<String, arrival::Expected>>,
    /// The guests that did not come, and whose volumes could not be freed at once.
    freeing: Mutex<HashSet<String>>,
    /// Guests that are being unlocked, by their names.
    staying: Mutex<HashSet<String>>,
    /// Guests whose departure begins or ends, by their names.
    departing: Mutex<HashMap<String, Arc<tokio::sync::Mutex<()>>>>,
    /// Guests whose locks are being removed until that is done, by their names.
    settling: Mutex<HashSet<String>>,
    /// The machines of running guests, by their processes' numbers and start times.
    machines: Mutex<HashMap<String, String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: impl Display) -> ManagerError {
    ManagerError(error.to_string())
}

fn stop_error(guest: &str, what: &str, error: impl Display) -> StopError {
    StopError {
        guest: guest.to_owned(),
        what: what.to_owned(),
        source: io::Error::other(error.to_string()),
    }
}

/// What the agent keeps as long as it holds a guest. A guest that was to leave, and was never
/// stopped for that, is unlocked when nobody holds it any more.
#[derive(Debug)]
struct Hold {
    manager: Proxmox,
    name: String,
    _relay: Arc<Relay>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Ok(Some(note)) = self.manager.notes.read(&self.name) else {
            return;
        };
        if note.role != Role::Departs || note.stops {
            return;
        }
        let (manager, name) = (self.manager.clone(), self.name.clone());
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        lock(&self.manager.shared.staying).insert(name.clone());
        runtime.spawn(async move {
            if let Err(error) = manager.stay(&name, note.began_ns).await {
                let id = note.id;
                tracing::error!(guest = name, error, "it stays locked: qm unlock {id}");
            }
            lock(&manager.shared.staying).remove(&name);
        });
    }
}

impl Proxmox {
    /// Manages the guests of this host. The configuration maps the storages and bridges of other
    /// hosts to its own.
    pub fn new(config: Arc<HostConfig>) -> Self {
        let manager = Self {
            notes: Notes::new(&config.state),
            config,
            shared: Arc::default(),
        };
        // What an earlier agent has begun needs the places of its volumes.
        for note in manager.notes.all().values() {
            manager.name_volumes(&note.volumes);
        }
        manager
    }

    fn name_volumes(&self, volumes: &BTreeMap<String, Volume>) {
        for (name, volume) in volumes {
            self.config.named.set_image(name, volume.image());
        }
    }

    /// Returns the relay of a guest's lease.
    fn relay(&self, name: &str) -> Option<Arc<Relay>> {
        lock(&self.shared.relays).get(name)?.upgrade()
    }

    /// Runs a command of Proxmox VE that uses a guest's control socket.
    async fn run_beside(
        &self,
        name: &str,
        arguments: &[&str],
        limit: Duration,
    ) -> Result<String, CommandOrRelay> {
        let running = node::run("qm", arguments, limit);
        match self.relay(name) {
            Some(relay) => {
                let done = relay.without(running).await;
                Ok(done.map_err(CommandOrRelay::Relay)??)
            }
            None => Ok(running.await?),
        }
    }

    /// Returns the note about a guest, by its number.
    fn note_of(&self, id: VmId) -> Option<(String, Note)> {
        let mut notes = self.notes.all().into_iter();
        notes.find(|(_, note)| note.id == id)
    }

    /// Returns what a guest with a file here is; `None` where its QEMU does not run.
    fn look(&self, id: VmId, storages: &Storages) -> io::Result<Option<Found>> {
        let Some(running) = node::running(id)? else {
            return Ok(None);
        };
        let Some(text) = node::read(&node::config_path(id))? else {
            return Ok(None);
        };
        let note = self.note_of(id).filter(|(_, note)| note.role != Role::Left);
        let described = self.describe(id, &text, &running, storages, note.is_some())?;
        let name = match &described {
            Ok((guest, _)) => guest.name.clone(),
            Err(_) => {
                let config = GuestConfig::read(&text);
                let name = config.as_ref().ok().and_then(|config| config.get("name"));
                let sound = name.filter(|name| description::check_name(name).is_ok());
                sound.map_or_else(|| format!("vm-{id}"), str::to_owned)
            }
        };
        let note = note.filter(|(noted, _)| *noted == name);
        let note = note.map(|(_, note)| note);
        let arrives = |note: &Note| matches!(note.role, Role::Arrives | Role::Commits);
        let foreign = |why: String| Found::Foreign {
            name: name.clone(),
            by: Manager::Proxmox,
            why,
        };
        let (mut guest, volumes) = match described {
            Ok(described) => described,
            Err(refused) => {
                let text = refused.text.replace("VMID", &id.to_string());
                let hint = refused.hint.replace("VMID", &id.to_string());
                return Ok(Some(foreign(format!("VM {id}: {text} (hint: {hint})"))));
            }
        };
        self.name_volumes(&volumes);
        if let Some(note) = note.as_ref().filter(|note| arrives(note)) {
            // The source of a guest that arrives has other names for its volumes.
            for disk in &mut guest.disks {
                let path = volumes.get(&disk.image).map(|volume| &volume.path);
                let mut noted = note.volumes.iter();
                if let Some((name, _)) = noted.find(|(_, volume)| Some(&volume.path) == path) {
                    disk.image.clone_from(name);
                }
            }
        }
        for nic in &guest.nics {
            if let Some(bridge) = names::bridge_of(&nic.network) {
                self.config.named.set_bridge(&nic.network, bridge);
            }
        }
        Ok(Some(Found::Running(Guest::from(Facts {
            description: guest,
            generation: note.as_ref().map_or(0, |note| note.generation),
            process: Some(running.process),
            owner: Owner::Proxmox,
            paused: false,
            sender: note.and_then(|note| note.sender),
            log: self.log(&name),
            channels: BTreeMap::new(),
            sockets: None,
        }))))
    }

    /// Returns the file with what commands of Proxmox VE said of a guest.
    fn log(&self, name: &str) -> PathBuf {
        let beside = self.notes.beside(name, "log");
        beside.unwrap_or_else(|_| self.config.state.join("proxmox.log"))
    }

    /// Returns the guest's description and the places of its volumes, or why it does not move.
    fn describe(
        &self,
        id: VmId,
        text: &str,
        running: &Running,
        storages: &Storages,
        moves: bool,
    ) -> io::Result<Result<Described, Refused>> {
        let describe = || {
            let config = GuestConfig::read(text)?;
            accept::check(&config)?;
            accept::check_sections(&config)?;
            if let Some(lock) = config.lock().filter(|_| !moves) {
                return refuse(
                    format!("it is locked ({lock}): something else is done with it"),
                    "wait for that; if nothing is (qm config VMID, the task log): qm unlock VMID",
                );
            }
            Ok(config)
        };
        let config = match describe() {
            Ok(config) => config,
            Err(refused) => return Ok(Err(refused)),
        };
        if node::is_highly_available(id)? && !moves {
            return Ok(refuse(
                "the cluster's HA manager would start it again",
                format!("ha-manager remove vm:{id}, and add it at the other cluster"),
            ));
        }
        if node::is_replicated(id)? && !moves {
            return Ok(refuse(
                "its disks are replicated to another node, which would stay without a guest",
                format!("pvesr delete {id}-0"),
            ));
        }
        let machine = match self.machine(id, running) {
            Ok(machine) => machine,
            Err(error) => {
                return Ok(refuse(
                    format!("its QEMU does not say which machine it is: {error}"),
                    "try again: another program may use its control socket",
                ));
            }
        };
        Ok(described(id, &config, &machine, running, storages))
    }

    /// Returns the machine type of a running guest, without Proxmox VE's version of it.
    fn machine(&self, id: VmId, running: &Running) -> io::Result<String> {
        let shown = running.machine().unwrap_or_default();
        let plain = shown.split('+').next().unwrap_or_default();
        if description::is_machine(plain) {
            return Ok(plain.to_owned());
        }
        // It is an alias, such as `pc`.
        let key = format!("{:?}", running.process);
        if let Some(machine) = lock(&self.shared.machines).get(&key) {
            return Ok(machine.clone());
        }
        let machine = node::ask_machine(id)?;
        lock(&self.shared.machines).insert(key, machine.clone());
        Ok(machine)
    }

    /// Takes the control socket of a guest.
    async fn open(&self, guest: &str, id: VmId, within: Duration) -> Result<Lease, ManagerError> {
        let start = Instant::now();
        let is_held = || {
            let stays = lock(&self.shared.staying).contains(guest);
            stays || self.relay(guest).is_some()
        };
        while is_held() {
            if start.elapsed() > within {
                return Err(failed("another operation of this agent controls its QEMU"));
            }
            tokio::time::sleep(POLL).await;
        }
        let (qmp, relay) = relay::open(&node::qmp(id), within).await.map_err(failed)?;
        let relay = Arc::new(relay);
        let weak = Arc::downgrade(&relay);
        lock(&self.shared.relays).insert(guest.to_owned(), weak);
        let hold = Hold {
            manager: self.clone(),
            name: guest.to_owned(),
            _relay: relay,
        };
        Ok(Lease::holding(qmp, hold))
    }

    /// Returns the guests that run.
    fn list_all(&self) -> io::Result<Vec<Found>> {
        if !node::is_there() {
            let mut notes = self.notes.all().into_values();
            return match notes.any(|note| note.role != Role::Left) {
                true => node::present().map(|()| Vec::new()),
                false => Ok(Vec::new()),
            };
        }
        let storages = node::storages()?;
        let mut found: Vec<Found> = Vec::new();
        for id in node::guests()? {
            let Some(guest) = self.look(id, &storages)? else {
                continue;
            };
            let same = found.iter().position(|other| other.name() == guest.name());
            match same {
                None => found.push(guest),
                Some(at) => {
                    let name = found[at].name().to_owned();
                    found[at] = Found::Foreign {
                        why: format!(
                            "VM {id} and another guest have the name {name} (hint: qm set {id} \
                             --name NAME)"
                        ),
                        name,
                        by: Manager::Proxmox,
                    };
                }
            }
        }
        Ok(found)
    }

    /// Returns the number of a guest that runs here.
    fn id_of(&self, name: &str) -> io::Result<Option<VmId>> {
        let moves = |note: &Note| !matches!(note.role, Role::Left | Role::Here);
        if let Some(note) = self.notes.read(name)?.filter(moves) {
            return Ok(Some(note.id));
        }
        for id in node::guests()? {
            let Some(text) = node::read(&node::config_path(id))? else {
                continue;
            };
            let config = GuestConfig::read(&text).ok();
            let is_it = config.is_some_and(|config| config.get("name") == Some(name));
            if is_it && node::running(id)?.is_some() {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }
}

/// Why a command that needs a guest's control socket was not carried out.
#[derive(Debug, thiserror::Error)]
enum CommandOrRelay {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("{0}")]
    Relay(String),
}

type Described = (GuestDescription, BTreeMap<String, Volume>);

/// Returns the guest of a checked file in the terms of guests.
fn described(
    id: VmId,
    config: &GuestConfig,
    machine: &str,
    running: &Running,
    storages: &Storages,
) -> Result<Described, Refused> {
    let (mut disks, mut nics, mut volumes) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (key, value) in config.settings() {
        if is_card(key)
            && let Some(Card {
                mac,
                bridge: Some(bridge),
                ..
            }) = Card::read(value)
        {
            nics.push(Nic {
                network: names::network_of(bridge),
                mac: mac.to_owned(),
                port: None,
            });
        }
        let Some(drive) = Drive::read(value).filter(|_| is_drive(key)) else {
            continue;
        };
        let Content::Volume { storage, name } = drive.content else {
            continue;
        };
        let Some(known) = storages.get(storage) else {
            let hint = "pvesm status";
            return refuse(format!("drive {key}: there is no storage {storage}"), hint);
        };
        let format = format_of(name);
        let (Some(path), Some(format)) = (known.path(name), format) else {
            let kind = &known.kind;
            let hint = "move it to a directory, an LVM or a ZFS storage (qm disk move)";
            return refuse(
                format!("drive {key}: volume {storage}:{name} ({kind}) is no raw or qcow2 file"),
                hint,
            );
        };
        let name = VolumeName {
            storage: storage.to_owned(),
            id,
            drive: key.to_owned(),
            format,
        };
        disks.push(Disk {
            name: key.to_owned(),
            image: name.to_string(),
            shared: false,
            // What Proxmox VE made for cloud-init is never written by the guest.
            read_only: drive.is_cdrom(),
        });
        volumes.insert(name.to_string(), Volume { path, format });
    }
    let number = |key: &str| config.get(key).and_then(|it| it.parse::<u32>().ok());
    let all = number("sockets").unwrap_or(1) * number("cores").unwrap_or(1);
    let memory = config.get("memory").map(|memory| {
        let mut parts = memory.split(',');
        let current = parts.find_map(|part| {
            let plain = (!part.contains('=')).then_some(part);
            part.strip_prefix("current=").or(plain)
        });
        current.and_then(|current| current.parse().ok())
    });
    let guest = GuestDescription {
        name: config.get("name").unwrap_or_default().to_owned(),
        machine: machine.to_owned(),
        cpu: running.cpu().unwrap_or(CPU).to_owned(),
        vcpus: number("vcpus").unwrap_or(all),
        memory_mib: memory.flatten().unwrap_or(MEMORY_MIB),
        firmware: None,
        kernel: None,
        disks,
        nics,
        channels: Vec::new(),
        hardware: None,
    };
    match description::check(&guest) {
        Ok(()) => Ok((guest, volumes)),
        Err(error) => refuse(error.to_string(), "see qm config VMID"),
    }
}

impl GuestManager for Proxmox {
    fn list(&self) -> io::Result<Vec<Found>> {
        // Longhaul's own guests do not depend on Proxmox VE.
        Ok(self.list_all().unwrap_or_else(|error| {
            tracing::warn!(%error, "guests of Proxmox VE are not known");
            Vec::new()
        }))
    }

    fn find(&self, name: &str) -> io::Result<Option<Guest>> {
        // Journals are closed by this answer: files that are not there are no absence.
        let known = self.notes.read(name)?;
        let found = match self.list_all() {
            Err(error) if known.is_some_and(|note| note.role != Role::Left) => return Err(error),
            Err(_) => return Ok(None),
            Ok(found) => found,
        };
        Ok(found.into_iter().find_map(|found| match found {
            Found::Running(guest) if guest.name() == name => Some(guest),
            Found::Running(_) | Found::Ended(_) | Found::Foreign { .. } | Found::Damaged { .. } => {
                None
            }
        }))
    }

    fn starter(&self, _: &Guest) -> io::Result<Option<Starter>> {
        // Its file stays locked.
        Ok(None)
    }

    fn lease<'a>(
        &'a self,
        guest: &'a Guest,
        within: Duration,
    ) -> BoxFuture<'a, Result<Lease, ManagerError>> {
        async move {
            let name = guest.name();
            let id = self.id_of(name).map_err(failed)?;
            let id = id.ok_or_else(|| failed("Proxmox VE does not have it any more"))?;
            self.open(name, id, within).await
        }
        .boxed()
    }

    fn expect(&self, guest: &GuestDescription) -> Vec<Check> {
        self.expect_guest(guest)
    }

    fn outlook(&self, guest: &Guest) -> io::Result<Cookie> {
        let handoff = self.outlook_of(guest).map_err(io::Error::other)?;
        Ok(handoff.pack())
    }

    fn obstacles(&self, guest: &GuestDescription, outlook: &Managed, _: bool) -> Vec<Check> {
        self.obstacle(guest, &outlook.cookie).into_iter().collect()
    }

    fn allocate<'a>(
        &'a self,
        guest: &'a str,
        image: &'a str,
        bytes: u64,
    ) -> BoxFuture<'a, Result<bool, ManagerError>> {
        async move {
            let allocated = self.allocate_disk(guest, image, bytes).await;
            allocated.map_err(failed)
        }
        .boxed()
    }

    fn free<'a>(&'a self, guest: &'a str) -> BoxFuture<'a, ()> {
        async move {
            if let Err(error) = self.free_unlaunched(guest).await {
                tracing::error!(guest, error, "something of it is left over");
            }
        }
        .boxed()
    }

    fn launch_incoming(
        &self,
        incoming: IncomingGuest,
    ) -> BoxFuture<'_, Result<Launched, LaunchIncomingError>> {
        let launching = tokio::spawn(self.clone().launch(incoming));
        let broke =
            |error| LaunchIncomingError::Failed(format!("a part of the agent broke: {error}"));
        async move { launching.await.map_err(broke)? }.boxed()
    }

    fn incoming_socket(&self, guest: &Guest) -> io::Result<IncomingSocket> {
        let id = self.id_of(guest.name())?;
        let id = id.ok_or_else(|| io::Error::other("Proxmox VE does not have it any more"))?;
        Ok(node::incoming(id).into())
    }

    fn commit<'a>(
        &'a self,
        guest: &'a Guest,
        lease: Option<&'a Lease>,
        commit: Commit,
    ) -> BoxFuture<'a, Result<(), CommitError>> {
        self.commit_guest(guest, lease, commit).boxed()
    }

    fn abort_incoming<'a>(
        &'a self,
        guest: &'a str,
        _: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            let ended = self.end_arriving(guest).await;
            ended.map_err(|error| stop_error(guest, "ending its QEMU", error))
        }
        .boxed()
    }

    fn begin<'a>(
        &'a self,
        guest: &'a Guest,
        _: &'a Lease,
    ) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        async move {
            let begun = self.begin_departure(guest).await;
            Ok(begun.map_err(failed)?.pack())
        }
        .boxed()
    }

    fn depart<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        _: Cookie,
    ) -> BoxFuture<'a, Result<Departure, ManagerError>> {
        async move {
            let socket = self.keep_settings(guest.name(), lease).await;
            socket.map(Departure::from).map_err(failed)
        }
        .boxed()
    }

    fn settle<'a>(&'a self, moving: &'a BTreeSet<String>) -> BoxFuture<'a, ()> {
        async move {
            let notes = self.notes.all();
            for (name, note) in notes.iter().filter(|(name, _)| !moving.contains(*name)) {
                let settled = match note.role {
                    Role::Departs if !note.stops => self.stay(name, note.began_ns).await,
                    Role::Arrives => self.end_arriving(name).await,
                    _ => {
                        self.unlock_arrived(name).await;
                        continue;
                    }
                };
                match settled {
                    Ok(()) => tracing::info!(guest = name, "its move was not recorded: undone"),
                    Err(error) => tracing::error!(guest = name, error, "a part of a move stays"),
                }
            }
        }
        .boxed()
    }

    fn settle_guest(&self, guest: &str) {
        self.settle_departure(guest);
        let (manager, guest) = (self.clone(), guest.to_owned());
        tokio::spawn(async move { manager.unlock_arrived(&guest).await });
    }

    fn note_stop(&self, guest: &Guest, stops: bool) -> io::Result<()> {
        self.notes.change(guest.name(), |note| note.stops = stops)
    }

    fn abort_outgoing<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        stays: Stays,
    ) -> BoxFuture<'a, Result<(), AbortError>> {
        self.continue_guest(guest, lease, stays).boxed()
    }

    fn confirm<'a>(
        &'a self,
        guest: &'a str,
        _: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            let ended = self.end_departed(guest).await;
            ended.map_err(|error| stop_error(guest, "ending it", error))
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_hypervisor::config::ImageFormat;

    #[test]
    fn a_guest_is_described_by_its_file_and_its_command_line() {
        let config = GuestConfig::read(
            "cores: 2\nide2: tank:vm-100-cloudinit,media=cdrom\nmemory: current=1024\nname: web\n\
             net0: virtio=BC:24:11:00:00:01,bridge=vmbr0\nscsi0: local:100/vm-100-disk-0.qcow2\n\
             scsi1: none,media=cdrom\nsockets: 2\n",
        )
        .unwrap();
        let storages = Storages::read("dir: local\n\tpath /vz\nlvm: tank\n\tvgname g\n");
        let words = ["-cpu", "qemu64,+aes,enforce"].map(str::to_owned).into();
        let process = longhaul_hypervisor::process::ProcessId::of(1);
        let running = Running {
            process: process.unwrap().unwrap(),
            words,
        };
        let (guest, volumes) = described(100, &config, "pc-q35-9.2", &running, &storages).unwrap();
        assert_eq!((guest.vcpus, guest.memory_mib), (4, 1024));
        assert_eq!(guest.cpu, "qemu64");
        assert_eq!(guest.nics[0].network, "proxmox.vmbr0");
        let disks: Vec<_> = guest
            .disks
            .iter()
            .map(|it| (&*it.name, it.read_only))
            .collect();
        assert_eq!(disks, [("ide2", true), ("scsi0", false)]);
        let disk = &volumes["proxmox.local.100.scsi0.qcow2"];
        assert_eq!(
            disk.path.to_str(),
            Some("/vz/images/100/vm-100-disk-0.qcow2")
        );
        assert_eq!(disk.format, ImageFormat::Qcow2);
        let none = described(100, &config, "pc-q35-9.2", &running, &Storages::default());
        assert!(none.unwrap_err().text.contains("no storage tank"));
    }
}
