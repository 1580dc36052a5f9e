//! A guest that arrives: its file is made here, and `qm start --stateuri` starts its QEMU.

use super::departure::LOCK;
use super::volumes::{NewVolume, misfit};
use super::{CHANGE_TIMEOUT, Handoff, Proxmox, START_TIMEOUT, lock};
use crate::accept;
use crate::config::GuestConfig;
use crate::device::{Card, Content, Drive, is_card, is_drive, is_state};
use crate::names::{self, VmId, VolumeName, vmid};
use crate::node;
use crate::notes::{Note, Role, Volume, write_whole};
use crate::storage::Storage;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::config::VolumeContent;
use longhaul_hypervisor::manager::{
    Cookie, Found, IncomingGuest, LaunchIncomingError, Launched, Lease,
};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_protocol::guest::{Disk, GuestDescription, Managed};
use longhaul_protocol::message::{Check, Verdict};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use tokio::task::block_in_place;

const SAME_CLUSTER: &str = "it is a guest of this node's own cluster, which moves it itself";

/// Where a guest would arrive.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Expected {
    pub(super) id: VmId,
    /// The storages and the volumes' names in them, by the names under which the agents speak of
    /// them.
    pub(super) volumes: BTreeMap<String, (String, String)>,
    /// Their paths.
    pub(super) places: BTreeMap<String, Volume>,
    /// The volumes that have to be allocated, by the same names. Their sizes are not known yet.
    pub(super) new: BTreeMap<String, NewVolume>,
    /// The volumes with the state of devices, by the keys in the guest's file.
    pub(super) states: BTreeMap<String, NewVolume>,
}

pub(super) fn text(error: impl Display) -> String {
    error.to_string()
}

fn refused(text: String, hint: String) -> Check {
    Check {
        verdict: Verdict::Refused,
        text,
        hint: Some(hint),
    }
}

/// Returns why a path of this host cannot be used, without its name for the peer.
type Expecting = Result<Option<(Expected, VmId)>, (String, String)>;

impl Proxmox {
    /// Learns where the volumes and cards of a guest would be here.
    pub(super) fn expect_guest(&self, guest: &GuestDescription) -> Vec<Check> {
        match self.places_for(guest) {
            Ok(None) => {
                lock(&self.shared.expected).remove(&guest.name);
                Vec::new()
            }
            Ok(Some((expected, wanted))) => {
                let id = expected.id;
                for (name, volume) in &expected.places {
                    let mut image = volume.image();
                    if expected.new.contains_key(name) {
                        image.volume = Some(VolumeContent::Absent);
                    }
                    self.config.named.set_image(name, image);
                }
                for nic in &guest.nics {
                    if let Some(bridge) = names::bridge_of(&nic.network) {
                        let own = self.bridge_for(bridge);
                        self.config.named.set_bridge(&nic.network, own);
                    }
                }
                lock(&self.shared.expected).insert(guest.name.clone(), expected);
                let text = match id == wanted {
                    true => format!("{} keeps its number: VM {id}", guest.name),
                    false => format!(
                        "VM {wanted} is another guest here: {} becomes VM {id}",
                        guest.name
                    ),
                };
                vec![Check {
                    verdict: Verdict::Fine,
                    text,
                    hint: None,
                }]
            }
            Err((text, hint)) => vec![refused(text, hint)],
        }
    }

    fn bridge_for<'a>(&'a self, bridge: &'a str) -> &'a str {
        let mapped = self.config.proxmox.bridges.get(bridge);
        mapped.map_or(bridge, String::as_str)
    }

    /// Returns where a guest of Proxmox VE would be here, and the number that it has at its
    /// source; `None` where it is none, or its places are settled.
    fn places_for(&self, guest: &GuestDescription) -> Expecting {
        let failed = |error: io::Error| {
            let hint = "see the agent's log there".to_owned();
            (format!("Proxmox VE's files cannot be read: {error}"), hint)
        };
        let volumes = guest.disks.iter();
        let volumes: Vec<(&Disk, VolumeName)> = volumes
            .filter_map(|disk| Some((disk, VolumeName::read(&disk.image)?)))
            .collect();
        let bridges = guest.nics.iter();
        let bridges: Vec<&str> = bridges
            .filter_map(|nic| names::bridge_of(&nic.network))
            .collect();
        let Some(wanted) = volumes.first().map(|(_, name)| name.id) else {
            self.check_bridges(&bridges)?;
            for bridge in bridges {
                let name = names::network_of(bridge);
                self.config.named.set_bridge(&name, self.bridge_for(bridge));
            }
            return Ok(None);
        };
        if !node::is_there() {
            return Err((
                "this host is no node of Proxmox VE, which manages the guest".to_owned(),
                "choose a destination with Proxmox VE".to_owned(),
            ));
        }
        if lock(&self.shared.freeing).contains(&guest.name) {
            return Err((
                "volumes of an earlier attempt are not freed here yet".to_owned(),
                "try again; why they are in use is in the agent's log there".to_owned(),
            ));
        }
        let note = self.notes.read(&guest.name).map_err(failed)?;
        let is_here = match &note {
            Some(note) if note.role == Role::Here => node::running(note.id).map_err(failed)?,
            _ => None,
        };
        let moves = |note: &Note| !matches!(note.role, Role::Left | Role::Here);
        if is_here.is_some() || note.as_ref().is_some_and(moves) {
            return Ok(None);
        }
        if is_of_this_cluster(wanted, &guest.name).map_err(failed)? {
            let hint = format!("on its node: qm migrate {wanted} NODE --online");
            return Err((SAME_CLUSTER.to_owned(), hint));
        }
        self.check_bridges(&bridges)?;
        let id = self.free_id(wanted, note.as_ref())?;
        let storages = node::storages().map_err(failed)?;
        let name = node::name().map_err(failed)?;
        let mut expected = Expected {
            id,
            ..Expected::default()
        };
        for (disk, volume) in volumes {
            // Of those that the guest cannot write, only that of cloud-init moves.
            let wanted = (&volume, id, disk.read_only);
            let (storage, file, place) = self.place(wanted, &storages, (&name, &expected))?;
            let image = &disk.image;
            if storages.get(&storage).is_some_and(Storage::allocates) {
                let new = NewVolume {
                    storage: storage.clone(),
                    name: file.clone(),
                    path: place.path.clone(),
                    format: volume.format,
                    bytes: 0,
                };
                expected.new.insert(image.clone(), new);
            }
            expected.volumes.insert(image.clone(), (storage, file));
            expected.places.insert(image.clone(), place);
        }
        Ok(Some((expected, wanted)))
    }

    fn check_bridges(&self, bridges: &[&str]) -> Result<(), (String, String)> {
        for bridge in bridges {
            let own = self.bridge_for(bridge);
            let there = names::is_bridge(own) && Path::new("/sys/class/net").join(own).exists();
            if !there {
                return Err((
                    format!("it has no bridge {own}, for cards on {bridge}"),
                    format!("in the configuration there: [proxmox.bridges] {bridge} = \"BRIDGE\""),
                ));
            }
        }
        Ok(())
    }

    /// Returns a number for an arriving guest: the one that it had here before it left, otherwise
    /// the one that it has, if that is free.
    fn free_id(&self, wanted: VmId, left: Option<&Note>) -> Result<VmId, (String, String)> {
        let failed = |error: &dyn Display| {
            let hint = "pvesh get /cluster/nextid".to_owned();
            (format!("no number is free for it: {error}"), hint)
        };
        let is_taken = |id: VmId| node::is_taken(id).map_err(|error| failed(&error));
        let left = left.filter(|note| note.role == Role::Left && is_left(note.id));
        if let Some(note) = left {
            return Ok(note.id);
        }
        if !is_taken(wanted)? {
            return Ok(wanted);
        }
        let asked = block_in_place(|| {
            let arguments = ["get", "/cluster/nextid", "--output-format", "json"];
            let asking = node::run("pvesh", &arguments, CHANGE_TIMEOUT);
            tokio::runtime::Handle::current().block_on(asking)
        });
        let said = asked.map_err(|error| failed(&error))?;
        let next = vmid(said.trim().trim_matches('"'));
        next.ok_or_else(|| failed(&format!("pvesh says {said:?}")))
    }

    /// Finds places for all that an arriving guest brings, and makes its file this host's.
    fn accept(
        &self,
        guest: &GuestDescription,
        handoff: &Handoff,
    ) -> Result<(Expected, GuestConfig), LaunchIncomingError> {
        let unsuitable = |error: &dyn Display| LaunchIncomingError::Unsuitable(error.to_string());
        let broken = |error: &dyn Display| LaunchIncomingError::Failed(error.to_string());
        let name = &guest.name;
        if !node::is_there() {
            return Err(unsuitable(&"this host is no node of Proxmox VE"));
        }
        let same = block_in_place(|| is_of_this_cluster(handoff.vmid, name));
        if same.map_err(|error| broken(&error))? {
            return Err(unsuitable(&SAME_CLUSTER));
        }
        let noted = self.notes.read(name).map_err(|error| broken(&error))?;
        let expected = lock(&self.shared.expected).get(name).cloned();
        let mut expected = match expected {
            Some(expected) => expected,
            // It has no volumes.
            None => Expected {
                id: block_in_place(|| self.free_id(handoff.vmid, noted.as_ref()))
                    .map_err(|(error, _)| unsuitable(&error))?,
                ..Expected::default()
            },
        };
        let placed = block_in_place(|| self.place_states(handoff, &mut expected));
        placed.map_err(|error| unsuitable(&error))?;
        let config = self.config_for(handoff, guest, &expected);
        Ok((expected, config.map_err(|error| unsuitable(&error))?))
    }

    /// Returns what keeps a guest from coming here.
    pub(super) fn obstacle(&self, guest: &GuestDescription, outlook: &[u8]) -> Option<Check> {
        let found = match Handoff::unpack(outlook) {
            Ok(handoff) => match self.accept(guest, &handoff) {
                Ok((expected, _)) => misfit(&handoff, &expected)?,
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        Some(Check {
            verdict: Verdict::Refused,
            text: format!("Proxmox VE cannot take {}: {found}", guest.name),
            hint: None,
        })
    }

    pub(super) async fn launch(
        self,
        incoming: IncomingGuest,
    ) -> Result<Launched, LaunchIncomingError> {
        let unsuitable = |error: &dyn Display| LaunchIncomingError::Unsuitable(error.to_string());
        let broken = |error: &dyn Display| LaunchIncomingError::Failed(error.to_string());
        let IncomingGuest {
            description,
            generation,
            sender,
            managed,
            ..
        } = incoming;
        let Some(Managed { cookie, .. }) = managed else {
            return Err(unsuitable(&"it is no guest of Proxmox VE"));
        };
        let handoff = Handoff::unpack(&cookie).map_err(|error| unsuitable(&error))?;
        let name = description.name.clone();
        let (expected, config) = self.accept(&description, &handoff)?;
        let id = expected.id;
        let note = self.arriving(&name, &expected);
        let note = Note {
            generation,
            sender: Some(sender),
            ..note.map_err(|error| broken(&error))?
        };
        self.notes
            .write(&name, &note)
            .map_err(|error| broken(&error))?;
        self.name_volumes(&note.volumes);
        let new = (&config, &expected);
        let launched = self.start(&name, &note, new, &handoff).await;
        lock(&self.shared.expected).remove(&name);
        match launched {
            Ok((guest, lease)) => Ok(Launched {
                guest,
                lease,
                socket: node::incoming(id),
                listens: true,
                cookie: Cookie::default(),
            }),
            Err(error) => {
                if let Err(error) = self.end_arriving(&name).await {
                    tracing::error!(guest = name, error, "something of it is left over");
                }
                Err(broken(&error))
            }
        }
    }

    /// Returns the note about an arriving guest. It may be noted already, with volumes that were
    /// allocated for it.
    pub(super) fn arriving(&self, name: &str, expected: &Expected) -> io::Result<Note> {
        let id = expected.id;
        let noted = self.notes.read(name)?.filter(|note| note.id == id);
        let before = match &noted {
            Some(note) if note.role == Role::Arrives => return Ok(note.clone()),
            Some(note) if note.role == Role::Left => node::read(&node::config_path(id))?,
            Some(note) if note.role != Role::Here => {
                return Err(io::Error::other("another move of it is not over"));
            }
            Some(_) | None => None,
        };
        Ok(Note {
            id,
            role: Role::Arrives,
            generation: 0,
            sender: None,
            stops: false,
            before,
            locked: false,
            began_ns: 0,
            process: None,
            volumes: expected.places.clone(),
            allocated: BTreeSet::new(),
            states: BTreeSet::new(),
        })
    }

    /// Returns the file of an arriving guest for this host.
    fn config_for(
        &self,
        handoff: &Handoff,
        guest: &GuestDescription,
        expected: &Expected,
    ) -> Result<GuestConfig, String> {
        let mut config = accept::read_foreign(&handoff.config).map_err(text)?;
        let differs = |what: &str| Err(format!("its file has another {what} than was offered"));
        if config.get("name") != Some(&guest.name) {
            return differs("name");
        }
        config.retain(|key| !accept::stays_behind(key));
        let settings: Vec<(String, String)> = config
            .settings()
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let (mut drives, mut cards) = (0, 0);
        for (key, value) in &settings {
            if is_card(key)
                && let Some(card) = Card::read(value)
            {
                let offered = guest.nics.iter().find(|nic| nic.mac == card.mac);
                let Some(bridge) = offered.and_then(|nic| names::bridge_of(&nic.network)) else {
                    return differs("card");
                };
                config.set(key, &card.with_bridge(self.bridge_for(bridge)));
                cards += 1;
            }
            if is_state(key)
                && let Some(state) = Drive::read(value)
            {
                let Some(NewVolume { storage, name, .. }) = expected.states.get(key) else {
                    return Err(format!("no volume is here for `{key}`"));
                };
                config.set(key, &state.with_volume(storage, name));
                continue;
            }
            let Some(drive) = Drive::read(value).filter(|_| is_drive(key)) else {
                continue;
            };
            if !matches!(drive.content, Content::Volume { .. }) {
                continue;
            }
            let offered = guest.disks.iter().find(|disk| disk.name == *key);
            let volume = offered.and_then(|disk| expected.volumes.get(&disk.image));
            let Some((storage, file)) = volume else {
                return differs("drive");
            };
            if offered.is_none_or(|disk| disk.read_only != drive.is_cdrom()) {
                return differs("drive");
            }
            config.set(key, &drive.with_volume(storage, file));
            drives += 1;
        }
        if drives != guest.disks.len() || cards != guest.nics.len() {
            return differs("number of drives or cards");
        }
        config.set("lock", LOCK);
        Ok(config)
    }

    /// Makes the file of an arriving guest, and starts its QEMU.
    async fn start(
        &self,
        name: &str,
        note: &Note,
        (config, expected): (&GuestConfig, &Expected),
        handoff: &Handoff,
    ) -> Result<(Guest, Lease), String> {
        let id = note.id;
        let path = node::config_path(id);
        let content = config.to_string();
        match note.before {
            Some(_) => write_whole(&path, content.as_bytes()).map_err(text)?,
            None => {
                // Another guest may have got the number meanwhile.
                if node::is_taken(id).map_err(text)? {
                    return Err(format!("VM {id} was made meanwhile: try again"));
                }
                let file = OpenOptions::new().write(true).create_new(true).open(&path);
                let written = file.and_then(|mut file| {
                    file.write_all(content.as_bytes())?;
                    file.sync_all()
                });
                written.map_err(|error| format!("{}: {error}", path.display()))?;
            }
        }
        if let Some(rules) = &handoff.firewall {
            let path = node::firewall_path(id);
            write_whole(&path, rules.as_bytes())
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        // Its file is here: volumes with this number are its own.
        for new in expected.states.values() {
            self.allocate(name, id, new).await?;
        }
        let (number, node) = (id.to_string(), node::name().map_err(text)?);
        // As if it came from this node: its file is here.
        let arguments = [
            "start",
            &number,
            "--skiplock",
            "--migratedfrom",
            &node,
            "--migration_type",
            "secure",
            "--stateuri",
            "unix",
            "--machine",
            &handoff.machine,
        ];
        let started = node::run("qm", &arguments, START_TIMEOUT).await;
        let said = started.as_ref().map_or_else(text, Clone::clone);
        if let Err(error) = fs::write(self.log(name), &said) {
            tracing::debug!(%error, "what qm start said is not kept");
        }
        let said = started.map_err(text)?;
        let expected = format!("migration listens on unix:{}", node::incoming(id).display());
        if !said.lines().any(|line| line.trim() == expected) {
            return Err(format!("qm start has not said {expected:?}, but {said:?}"));
        }
        let storages = node::storages().map_err(text)?;
        let found = block_in_place(|| self.look(id, &storages)).map_err(text)?;
        match found {
            Some(Found::Running(guest)) => {
                let lease = self.open(name, id, COMMAND_TIMEOUT).await;
                Ok((guest, lease.map_err(text)?))
            }
            Some(Found::Foreign { why, .. }) => Err(why),
            Some(Found::Ended(_) | Found::Damaged { .. }) | None => {
                Err("its QEMU has ended".to_owned())
            }
        }
    }

    /// Ends the QEMU of a guest that does not come, and removes what was made for it.
    pub(super) async fn end_arriving(&self, name: &str) -> Result<(), String> {
        let note = self.notes.read(name).map_err(text)?;
        let arrives = |note: &Note| matches!(note.role, Role::Arrives | Role::Commits);
        let Some(note) = note.filter(arrives) else {
            return Ok(());
        };
        node::present().map_err(text)?;
        self.end_qemu(name, note.id).await?;
        let path = node::config_path(note.id);
        let config = node::read(&path).map_err(text)?;
        let config = config.and_then(|file| GuestConfig::read(&file).ok());
        let is_it = |config: &GuestConfig| config.get("name") == Some(name);
        match &note.before {
            Some(before) => {
                write_whole(&path, before.as_bytes()).map_err(text)?;
            }
            None => {
                if config.is_some_and(|config| is_it(&config)) {
                    fs::remove_file(&path).map_err(text)?;
                    remove_if_there(&node::firewall_path(note.id))?;
                }
            }
        }
        self.config.named.forget_images(note.volumes.keys());
        if let Err(error) = self.free_volumes(name, &note).await {
            // Something on this host may be closing them.
            tracing::info!(guest = name, error, "its volumes are not freed yet");
            let noted = self.notes.change(name, |note| note.role = Role::Arrives);
            noted.map_err(text)?;
            self.free_later(name);
        }
        Ok(())
    }
}

/// Returns whether a guest is one of another node of this node's cluster.
fn is_of_this_cluster(id: VmId, name: &str) -> io::Result<bool> {
    let files = node::elsewhere(id)?;
    let mut configs = files.iter().filter_map(|file| GuestConfig::read(file).ok());
    Ok(configs.any(|config| config.get("name") == Some(name)))
}

/// Returns whether the file of a guest that has left is still here, locked.
fn is_left(id: VmId) -> bool {
    let file = node::read(&node::config_path(id)).unwrap_or_default();
    let config = GuestConfig::read(&file.unwrap_or_default());
    config.is_ok_and(|config| config.lock() == Some(LOCK)) && matches!(node::running(id), Ok(None))
}

fn remove_if_there(path: &Path) -> Result<(), String> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(text(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use longhaul_hypervisor::config::HostConfig;
    use longhaul_protocol::guest::Nic;

    const FILE: &str = "\
ide2: local:100/vm-100-cloudinit.qcow2,media=cdrom
name: web
net0: virtio=BC:24:11:00:00:01,bridge=vmbr0,tag=7
scsi0: fast:100/vm-100-disk-0.raw,size=1G
scsi1: none,media=cdrom
unused0: local:100/vm-100-disk-9.raw
";

    pub(in crate::manager) fn manager(state: &Path) -> Proxmox {
        let text = format!(
            "state = {state:?}\n[qemu.emulators]\nq = \"/usr/bin/kvm\"\n[proxmox]\n\
             storages = {{ fast = \"tank\" }}\nbridges = {{ vmbr0 = \"vmbr7\" }}\n"
        );
        let config: HostConfig = toml::from_str(&text).unwrap();
        Proxmox::new(std::sync::Arc::new(config))
    }

    fn guest() -> GuestDescription {
        let disk = |name: &str, image: &str, read_only| Disk {
            name: name.to_owned(),
            image: image.to_owned(),
            shared: false,
            read_only,
        };
        GuestDescription {
            name: "web".to_owned(),
            machine: "pc-q35-9.2".to_owned(),
            cpu: "host".to_owned(),
            vcpus: 1,
            memory_mib: 512,
            firmware: None,
            kernel: None,
            disks: vec![
                disk("ide2", "proxmox.local.100.ide2.qcow2", true),
                disk("scsi0", "proxmox.fast.100.scsi0.raw", false),
            ],
            nics: vec![Nic {
                network: "proxmox.vmbr0".to_owned(),
                mac: "BC:24:11:00:00:01".to_owned(),
                port: None,
            }],
            channels: Vec::new(),
            hardware: None,
        }
    }

    fn expected() -> Expected {
        let volume = |image: &str, storage: &str, file: &str| {
            let volume = (storage.to_owned(), file.to_owned());
            (image.to_owned(), volume)
        };
        let cloud_init = "101/vm-101-cloudinit.qcow2";
        Expected {
            id: 101,
            volumes: [
                volume("proxmox.local.100.ide2.qcow2", "local", cloud_init),
                volume(
                    "proxmox.fast.100.scsi0.raw",
                    "tank",
                    "101/vm-101-disk-0.raw",
                ),
            ]
            .into(),
            ..Expected::default()
        }
    }

    fn handoff(config: &str) -> Handoff {
        Handoff {
            vmid: 100,
            config: config.to_owned(),
            machine: "pc-q35-9.2+pve1".to_owned(),
            firewall: None,
            sizes: BTreeMap::new(),
        }
    }

    #[test]
    fn a_file_gets_the_volumes_and_bridges_of_this_host() {
        let folder = tempfile::tempdir().unwrap();
        let manager = manager(folder.path());
        let config = manager.config_for(&handoff(FILE), &guest(), &expected());
        let expected = "\
ide2: local:101/vm-101-cloudinit.qcow2,media=cdrom
name: web
net0: virtio=BC:24:11:00:00:01,bridge=vmbr7,tag=7
scsi0: tank:101/vm-101-disk-0.raw,size=1G
scsi1: none,media=cdrom
lock: migrate
";
        assert_eq!(config.unwrap().to_string(), expected);
    }

    #[test]
    fn a_file_must_be_that_of_the_guest_that_was_offered() {
        let folder = tempfile::tempdir().unwrap();
        let manager = manager(folder.path());
        for (from, to) in [
            ("name: web", "name: other"),
            ("name: web", "name: web\nscsi2: fast:100/vm-100-disk-3.raw"),
            ("scsi0:", "scsi3:"),
            (",size=1G", ",media=cdrom"),
            ("BC:24:11:00:00:01", "BC:24:11:00:00:02"),
            ("net0: virtio=BC:24:11:00:00:01,bridge=vmbr0,tag=7\n", ""),
            ("name: web", "name: web\nargs: -S"),
        ] {
            assert!(FILE.contains(from), "{from}");
            let file = FILE.replace(from, to);
            let config = manager.config_for(&handoff(&file), &guest(), &expected());
            assert!(config.is_err(), "{to}");
        }
    }

    #[test]
    fn a_guest_of_another_program_is_not_expected() {
        let folder = tempfile::tempdir().unwrap();
        let manager = manager(folder.path());
        let mut other = guest();
        other
            .disks
            .iter_mut()
            .for_each(|disk| disk.image = "web".to_owned());
        other.nics[0].network = "lan".to_owned();
        assert_eq!(manager.expect_guest(&other), []);
        // There is no Proxmox VE where this test runs, and such a guest is not for this host.
        if !node::is_there() {
            let checks = manager.expect_guest(&guest());
            assert_eq!(checks.len(), 1);
            assert_eq!(checks[0].verdict, Verdict::Refused);
        }
    }
}
