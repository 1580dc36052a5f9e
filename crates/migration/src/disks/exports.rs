//! The disk exports below the disks of a guest that moves. They are inserted when the migration
//! begins and removed when it ends, with any outcome, also by an agent that started since.
//!
//! Each export has a note in STATE/fronts, named by guest and number
//! ([`crate::disks::export_notes`]).

use crate::context::Context;
use crate::disks::export_notes::{self, ExportNote, Notes, Unreadable};
use crate::disks::{qcow2, volumes};
use crate::host::notes::{self, NoteStore};
use crate::host::set_aside::set_aside;
use crate::status::registry::Taken;
use longhaul_engine::handover::{Record, Side};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::disk::{self, DiskNodes, Front, InsertError, RemoveError};
use longhaul_hypervisor::helper::Helper;
use longhaul_hypervisor::process::{Account, ProcessId, let_through};
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::{MigrationId, RegionId};
use longhaul_storage::disk::{ExportSize, ImageIdentity, ImageUse, is_volume};
use longhaul_storage::front::arriving::masks::Masks;
use longhaul_storage::front::{FrontFolder, FrontSpec};
use longhaul_storage::nbd::ExportName;
use longhaul_storage::{SetAside, file_name, read_journal};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;

pub(crate) use crate::disks::export_notes::FrontError;

/// Limit on the length of a unix socket's path, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The note of one export: what it was inserted below.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Note {
    pub(crate) guest: String,
    pub(crate) disk: String,
    pub(crate) image: PathBuf,
    /// The path of the disk's device in QEMU.
    device: String,
    /// The nodes that the export was inserted between. The device's current nodes may differ.
    #[serde(default)]
    nodes: Option<DiskNodes>,
    /// The export's node in QEMU, and its NBD export name.
    pub(super) node: String,
    export: String,
    /// The supervisor process.
    #[serde(default)]
    helper: Option<Helper>,
    /// Whether the agent stops the guest for a moment and has not resumed it yet.
    #[serde(default, rename = "runs")]
    stops: bool,
    /// Set for a disk that arrives: blocks may still be missing.
    #[serde(default)]
    arriving: Option<Coming>,
    /// Set for a disk that leaves: what a later agent needs to send blocks that are missing at the
    /// destination.
    #[serde(default)]
    pub(crate) left: Option<LeftDisk>,
    /// Set for a disk whose writes are tracked without a move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tracks: Option<Tracks>,
    /// QEMU's path of the export's socket, where that is not in the export's folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
}

/// How a disk arrives.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Coming {
    pub(crate) migration: MigrationId,
    pub(crate) digest_key: [u8; 32],
    #[serde(default)]
    pub(crate) pulled: Pulled,
}

/// A disk at the source, of which blocks may be missing at the destination after its guest has
/// left.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeftDisk {
    pub(crate) migration: MigrationId,
    pub(crate) region: RegionId,
    pub(crate) blocks: u64,
    /// Whether the image can grow. Then it may be shorter than the region.
    #[serde(default)]
    pub(crate) grows: bool,
    pub(crate) digest_key: [u8; 32],
    /// Whether the disk is verified once it is complete at the destination.
    #[serde(default)]
    pub(crate) verify: bool,
    /// The image's identity. None in the note of an older agent.
    #[serde(default)]
    pub(crate) identity: Option<ImageIdentity>,
}

/// Whose writes an export tracks.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Tracks {
    /// The QEMU. Another one of this guest uses the image without the export.
    pub(super) qemu: ProcessId,
    /// Since when, in milliseconds of Unix time.
    pub(super) since_unix_ms: u64,
    /// Whether that QEMU has ended, and with it the export's processes.
    #[serde(default)]
    pub(super) ended: bool,
    /// The host's end of the port of the guest's agent, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) agent_port: Option<PathBuf>,
}

/// Returns the size that QEMU sees of an image, and the locks that QEMU would take on it.
pub(crate) fn shown(grows: bool, image: &Path) -> (ExportSize, ImageUse) {
    match grows {
        true if is_volume(image) => (ExportSize::OfFile, ImageUse::Growing),
        true => (qcow2::SHOWN, ImageUse::Growing),
        false => (ExportSize::OfFile, ImageUse::Raw),
    }
}

/// The disk below an export.
pub(crate) struct Below<'a> {
    pub(crate) disk: &'a str,
    pub(crate) image: &'a Path,
    /// The path of the disk's device in QEMU.
    pub(crate) device: String,
    pub(crate) nodes: &'a DiskNodes,
    pub(crate) size: ExportSize,
    pub(crate) image_use: ImageUse,
    pub(crate) arriving: Option<Coming>,
    pub(crate) left: Option<LeftDisk>,
    /// Whether the export is to record the writes.
    pub(crate) tracked: bool,
}

pub(crate) type Noted = export_notes::Noted<Note>;

impl notes::Note for Note {
    const FOLDER: &'static str = "fronts";
}

impl ExportNote for Note {
    fn helper_name(&self) -> String {
        // Another agent on this machine may have a guest of the same name.
        format!("front-{}", self.node)
    }

    fn helper(&mut self) -> &mut Option<Helper> {
        &mut self.helper
    }

    fn disk(&self) -> String {
        self.disk.clone()
    }
}

/// Returns the folder of the exports and their notes.
pub(crate) fn folder(state: &Path) -> PathBuf {
    notes_in(state).folder().to_owned()
}

/// Returns the notes in a state folder.
pub(crate) fn notes_in(state: &Path) -> NoteStore<Note> {
    NoteStore::of(state)
}

/// Reads the notes of all guests.
pub(super) fn all_notes(state: &Path) -> io::Result<Notes<Note>> {
    export_notes::notes(state)
}

/// Reads the notes of a guest. Fails if one of them cannot be read.
pub(crate) fn notes(state: &Path, guest: &str) -> io::Result<Vec<Noted>> {
    let Notes { noted, unreadable } = all_notes(state)?;
    let is_of = |name: &str| name.rsplit_once('.').is_some_and(|(of, _)| of == guest);
    let mut unreadable = unreadable.into_iter();
    if let Some(one) = unreadable.find(|one| is_of(&one.name())) {
        return Err(one.into_error());
    }
    let of = |noted: &Noted| noted.note.guest == guest;
    Ok(noted.into_iter().filter(of).collect())
}

impl Noted {
    pub(crate) fn front(&self) -> Front {
        Front {
            node: self.note.node.clone(),
            socket: match &self.note.socket {
                Some(socket) => socket.clone(),
                None => self.folder().socket(),
            },
            export: self.note.export.clone(),
        }
    }

    /// Ends the supervisor and server after their guest's QEMU has ended. Sets the image aside if
    /// the guest has moved away.
    async fn end(&mut self, state: &Path, moved: bool) -> Result<(), FrontError> {
        self.stop().await?;
        if moved && self.note.arriving.is_none() {
            let Note {
                guest, disk, image, ..
            } = &self.note;
            let done = match is_volume(image) {
                true => volumes::left(state, guest, disk, image),
                false => set_aside(image),
            };
            done.map_err(|error| self.error(&error))?;
        }
        self.remove()
    }
}

/// Returns the path of a disk's device in QEMU, if the description names the device. Those of
/// another program's guests are found by their images.
pub(crate) fn named_device(guest: &Guest, disk: &str) -> Option<String> {
    if guest.owner().manager().is_some() {
        return None;
    }
    let Some(hardware) = &guest.description().hardware else {
        return Some(format!("/machine/peripheral/blk-{disk}/virtio-backend"));
    };
    let mut devices = hardware.devices.iter();
    let device = devices.find(|device| device.serves.as_deref() == Some(disk))?;
    let id = device.id.as_deref()?;
    let below = match device.model.starts_with("virtio-blk") {
        true => "/virtio-backend",
        false => "",
    };
    Some(format!("/machine/peripheral/{id}{below}"))
}

fn pid(guest: &Guest, disk: &str) -> Result<i32, FrontError> {
    let pid = guest.pid();
    pid.ok_or_else(|| FrontError::new(disk, &"its QEMU has no process"))
}

/// Returns the path of a disk's device in QEMU. A device without an id is found by its image.
pub(crate) async fn device(
    guest: &Guest,
    qmp: &Qmp,
    (disk, image): (&str, &Path),
) -> Result<String, FrontError> {
    match named_device(guest, disk) {
        Some(device) => Ok(device),
        None => {
            let found = disk::device_of(qmp, pid(guest, disk)?, image).await;
            found.map_err(|error| FrontError::not_found(disk, &error))
        }
    }
}

/// Returns the path of a disk's device in QEMU, and the nodes of the disk.
pub(crate) async fn device_and_nodes(
    guest: &Guest,
    qmp: &Qmp,
    (disk, image): (&str, &Path),
) -> Result<(String, DiskNodes), FrontError> {
    let device = device(guest, qmp, (disk, image)).await?;
    let nodes = disk::find(qmp, pid(guest, disk)?, &device).await;
    let nodes = nodes.map_err(|error| FrontError::not_found(disk, &error))?;
    Ok((device, nodes))
}

pub(crate) fn random_name() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Creates the folder of an export, after its note.
pub(crate) fn make(state: &Path, guest: &Guest, n: usize, below: Below<'_>) -> io::Result<Noted> {
    let above = export_notes::create_above::<Note>(state)?;
    let folder = above.join(format!("{}.{n}", guest.name()));
    let longest = FrontFolder::open(&folder).owner();
    if longest.as_os_str().len() > SOCKET_PATH_BYTES_MAX {
        let text = format!(
            "the path {} is too long for a socket: choose a shorter `state` folder in the agent's \
             configuration",
            longest.display()
        );
        return Err(io::Error::other(text));
    }
    if Noted::is_noted(&folder) {
        let text = "a disk export from an earlier move is still below it: see the agent's log";
        return Err(io::Error::other(text));
    }
    export_notes::remove_unnoted(&folder)?;
    let pid = guest.pid().unwrap_or_default();
    let uid = Account::of_process(pid)?.uid.as_raw();
    let ours = nix::unistd::geteuid().as_raw();
    let place = guest.sockets();
    match place {
        Some(place) => place.make()?,
        None if uid != ours => let_through(state)?,
        None => {}
    }
    let number = n.to_string();
    let export = random_name()?;
    let note = Note {
        guest: guest.name().to_owned(),
        disk: below.disk.to_owned(),
        image: below.image.to_owned(),
        device: below.device,
        nodes: Some(below.nodes.clone()),
        node: disk::node_prefix(below.tracked).to_owned() + &random_name()?[..16],
        export: export.clone(),
        helper: None,
        stops: false,
        arriving: below.arriving,
        left: below.left,
        tracks: None,
        socket: place.map(|place| place.theirs(&number)),
    };
    let noted = Noted::new(folder, note);
    noted.write()?;
    // An agent that died before it wrote a note may have left files here.
    noted.folder().remove().map_err(io::Error::other)?;
    let spec = FrontSpec {
        image: below.image.to_owned(),
        size: below.size,
        locks: Some(below.image_use),
        name: ExportName::new(export).ok_or_else(|| io::Error::other("no name for it"))?,
        qemu_uid: (uid != ours).then_some(uid),
        arriving: below.arriving.is_some(),
        tracked: below.tracked,
        fetched: None,
        socket: place.map(|place| place.ours(&number)),
    };
    FrontFolder::create(noted.path(), &spec).map_err(io::Error::other)?;
    Ok(noted)
}

/// Removes the exports below the disks of a guest that stays on this host, if it has any, except
/// those that track writes.
pub(crate) async fn take_out(state: &Path, guest: &Guest, qmp: &Qmp) -> Result<(), FrontError> {
    let of_guest = |why: &dyn Display| FrontError::new("", why);
    let mut noted = notes(state, guest.name()).map_err(|error| of_guest(&error))?;
    noted.retain(|noted| !noted.tracks());
    if noted.is_empty() {
        return Ok(());
    }
    // An earlier attempt stopped the guest and did not resume it.
    let was_stopped = noted.iter().any(|noted| noted.note.stops);
    let status = qmp.query("query-status").await;
    let status = status.map_err(|error| of_guest(&error))?;
    let runs = status["running"].as_bool().unwrap_or(false);
    let mut below = Vec::new();
    for noted in &mut noted {
        // The export must answer while QEMU closes its connection.
        noted.keep_answering().await?;
        let nodes = match &noted.note.nodes {
            Some(nodes) => Ok(nodes.clone()),
            None => {
                let pid = pid(guest, &noted.note.disk)?;
                disk::find_below_export(qmp, pid, &noted.note.device).await
            }
        };
        below.push((nodes.map_err(|error| noted.error(&error))?, noted.front()));
    }
    for noted in &noted {
        let given = block_in_place(|| noted.control().give_locks());
        given.map_err(|error| noted.error(&error))?;
    }
    let pairs: Vec<_> = below.iter().map(|(nodes, front)| (nodes, front)).collect();
    let stops = disk::removal_stops(qmp, &pairs).await;
    let stops = stops.map_err(|error| of_guest(&error))?;
    if runs || stops {
        note_stop(&mut noted, stops)?;
    }
    let removed = disk::remove_all(qmp, &pairs).await;
    if stops && !matches!(removed, Err(RemoveError::Stopped(_))) {
        note_stop(&mut noted, false)?;
    }
    let still = removed.map_err(|error| of_guest(&error))?;
    tracing::info!(
        guest = guest.name(),
        ?still,
        "its disks are used directly again"
    );
    if was_stopped && !runs && status["status"] == "paused" {
        let woken = qmp.execute("cont", serde_json::json!({}), COMMAND_TIMEOUT);
        woken.await.map_err(|error| of_guest(&error))?;
    }
    for noted in &mut noted {
        noted.stop().await?;
        noted.remove()?;
    }
    Ok(())
}

/// Notes whether the agent is about to stop a guest. The next agent resumes such a guest, and does
/// not resume one that its owner paused.
fn note_stop(noted: &mut [Noted], stops: bool) -> Result<(), FrontError> {
    for noted in noted {
        if noted.note.stops != stops {
            noted.note.stops = stops;
            noted.write().map_err(|error| noted.error(&error))?;
        }
    }
    Ok(())
}

/// Returns whether an agent may have stopped a guest to change the nodes of its disks. Returns true
/// if this is unknown.
pub(crate) fn are_stopping(state: &Path, guest: &str) -> bool {
    match notes(state, guest) {
        Ok(noted) => noted.iter().any(|noted| noted.note.stops),
        Err(error) => {
            tracing::error!(guest, %error, "cannot look for its disk exports");
            true
        }
    }
}

/// Starts the process of an export, which locks the image.
pub(crate) async fn supervise(
    qmp: &Qmp,
    nodes: &DiskNodes,
    noted: &mut Noted,
) -> Result<(), FrontError> {
    let kept = disk::keep_open(qmp, nodes, &noted.front()).await;
    kept.map_err(|error| noted.error(&error))?;
    noted.supervise().await
}

/// Inserts disk exports below the disks of a running guest. Returns them, and the time that the
/// guest was stopped for this.
pub(crate) async fn insert_all(
    qmp: &Qmp,
    noted: &mut [Noted],
    nodes: &[DiskNodes],
) -> Result<(Vec<Front>, Duration), FrontError> {
    let of_guest = |why: &dyn Display| FrontError::new("", why);
    let fronts: Vec<Front> = noted.iter().map(Noted::front).collect();
    let pairs: Vec<_> = nodes.iter().zip(&fronts).collect();
    let stops = disk::insertion_stops(qmp, &pairs).await;
    let stops = stops.map_err(|error| of_guest(&error))?;
    note_stop(noted, stops)?;
    let inserted = disk::insert_all(qmp, &pairs).await;
    if !matches!(inserted, Err(InsertError::Stopped(_))) {
        note_stop(noted, false)?;
    }
    let still = inserted.map_err(|error| of_guest(&error))?;
    Ok((fronts, still))
}

/// An arriving disk, and the image that was created for it.
pub(crate) struct Comes {
    pub(crate) pulled: Pulled,
    pub(crate) name: String,
    pub(crate) image: PathBuf,
    /// The size that QEMU sees.
    pub(crate) size: ExportSize,
    /// Whether the image can grow.
    pub(crate) grows: bool,
}

/// Inserts exports below the disks of an arriving guest, whose QEMU waits for it. After an error
/// the caller ends that QEMU and then calls [`ended`].
pub(crate) async fn put_in_for(
    state: &Path,
    guest: &Guest,
    qmp: &Qmp,
    coming: Coming,
    disks: &[Comes],
) -> Result<Vec<FrontFolder>, FrontError> {
    let mut below = Vec::new();
    let mut folders = Vec::new();
    for (n, disk) in disks.iter().enumerate() {
        let of_disk = |why: &dyn Display| FrontError::new(&disk.name, why);
        let (device, nodes) = device_and_nodes(guest, qmp, (&disk.name, &disk.image)).await?;
        let (_, image_use) = shown(disk.grows, &disk.image);
        let of = Below {
            device,
            nodes: &nodes,
            disk: &disk.name,
            image: &disk.image,
            size: disk.size,
            image_use,
            arriving: Some(Coming {
                pulled: disk.pulled,
                ..coming
            }),
            left: None,
            tracked: false,
        };
        let mut noted = make(state, guest, n, of).map_err(|error| of_disk(&error))?;
        noted.supervise().await?;
        folders.push(noted.folder());
        below.push((nodes, noted.front()));
    }
    let pairs: Vec<_> = below.iter().map(|(nodes, front)| (nodes, front)).collect();
    let inserted = disk::insert_all(qmp, &pairs).await;
    inserted.map_err(|error| FrontError::new("", &error))?;
    Ok(folders)
}

/// A disk of a guest that has arrived. Blocks may still be missing.
pub(crate) struct Incomplete {
    pub(crate) name: String,
    pub(crate) image: PathBuf,
    pub(crate) pulled: Pulled,
    pub(crate) folder: FrontFolder,
    pub(crate) masks: Masks,
    pub(crate) digest_key: [u8; 32],
}

/// Returns the disks that a migration has brought, of a guest that runs here. Their missing blocks
/// were recorded before.
pub(crate) fn incomplete(
    state: &Path,
    guest: &str,
    migration: MigrationId,
) -> io::Result<Vec<Incomplete>> {
    let mut found = Vec::new();
    for noted in notes(state, guest)? {
        let Some(coming) = noted.note.arriving.filter(|one| one.migration == migration) else {
            continue;
        };
        let folder = noted.folder();
        let stored = folder.stored_masks();
        let masks = Masks::read(&stored).map_err(io::Error::other)?;
        let masks = masks.ok_or_else(|| {
            io::Error::other(format!("{}: the file is missing", stored.display()))
        })?;
        found.push(Incomplete {
            name: noted.note.disk,
            image: noted.note.image,
            pulled: coming.pulled,
            folder,
            masks,
            digest_key: coming.digest_key,
        });
    }
    Ok(found)
}

/// Starts supervisors for a guest's exports that do not answer, for example after a restart of the
/// host. The exports also hold the locks of the images.
pub(crate) async fn keep_answering(state: &Path, guest: &str) -> Result<(), FrontError> {
    let noted = notes(state, guest).map_err(|error| FrontError::new("", &error))?;
    for mut noted in noted {
        noted.keep_answering().await?;
    }
    Ok(())
}

/// Ends the exports of a guest whose QEMU has ended, except those that track writes. Sets the
/// images aside if the guest has moved away.
pub(crate) async fn ended(state: &Path, guest: &str, moved: bool) {
    let noted = match notes(state, guest) {
        Ok(noted) => noted,
        Err(error) => {
            return tracing::error!(guest, %error, "cannot look for its disk exports");
        }
    };
    for mut noted in noted.into_iter().filter(|noted| !noted.tracks()) {
        if let Err(error) = noted.end(state, moved).await {
            tracing::error!(guest, %error, "files of a disk export remain");
        }
    }
}

/// Returns whether an export still uses this image.
pub(crate) fn uses(state: &Path, image: &Path) -> io::Result<bool> {
    let Notes { noted, unreadable } = all_notes(state)?;
    // A volume has several names.
    let found = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let same = |other: &Path| other == image || found(other) == found(image);
    let by_note = noted.iter().any(|noted| same(&noted.note.image));
    // An export without a description has no image.
    let described = |one: &Unreadable| one.folder().spec().is_ok_and(|spec| same(&spec.image));
    Ok(by_note || unreadable.iter().any(described))
}

/// Returns whether a journal exists and its last record gives the guest to the destination.
fn is_committed(journal: &Path) -> bool {
    match read_journal(journal) {
        Ok(reading) => reading
            .entries
            .last()
            .is_some_and(|last| match last.record {
                Record::Committed { .. } => true,
                Record::Overruled { run_on, .. } => run_on == Side::Destination,
                _ => false,
            }),
        // An unreadable journal holds its guest and the guest's disks.
        Err(_) => journal.exists(),
    }
}

impl Context {
    /// Removes the exports of guests that no migration uses, which an earlier agent or attempt
    /// left, and keeps those answering that track writes. Returns whether nothing is left to do.
    pub(crate) async fn sweep_exports(
        self: &Arc<Self>,
        logged: &mut BTreeSet<PathBuf>,
        watched: &mut BTreeSet<String>,
    ) -> bool {
        let state = &self.parts.config.state;
        let found = match all_notes(state) {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(%error, "cannot look for disk exports");
                return false;
            }
        };
        found.log_unreadable(logged);
        let mut clean = found.unreadable.is_empty();
        let (tracking, others): (Vec<_>, Vec<_>) = found.noted.into_iter().partition(Noted::tracks);
        clean &= self.keep_tracking(tracking, watched).await;
        let done = others.into_iter().filter(|noted| !self.comes_yet(noted));
        let mut guests: Vec<String> = done.map(|noted| noted.note.guest).collect();
        guests.dedup();
        for guest in guests {
            let Ok(_reservation) = self.registry.take(&guest, Taken::Maintained) else {
                clean = false;
                continue;
            };
            if let Err(error) = self.sweep_fronts_of(&guest).await {
                tracing::error!(guest, %error, "its disks are still used through the disk export");
                clean = false;
            }
        }
        clean
    }

    /// Returns whether a disk still arrives: its attempt is undecided, or blocks are missing.
    fn comes_yet(&self, noted: &Noted) -> bool {
        let Some(coming) = noted.note.arriving else {
            return false;
        };
        let masks = Masks::read(&noted.folder().stored_masks()).ok().flatten();
        let is_compared = !noted.folder().unwritten_masks().exists();
        let journal = self.parts.config.state.join("journal");
        if is_compared && masks.is_some_and(|masks| masks.missing.is_empty()) {
            // Until the journal records that nothing is missing, this export is the proof.
            return is_committed(&journal.join(file_name(coming.migration)));
        }
        let right = self.rights.get(&noted.note.guest).ok().flatten();
        let ours = right.is_some_and(|right| right.holder == longhaul_storage::Holder::Here);
        ours || journal.join(file_name(coming.migration)).exists()
            || SetAside::of(&journal, coming.migration).exists()
    }

    /// Removes a guest's exports from its QEMU, or ends them if it has no QEMU.
    pub(crate) async fn sweep_fronts_of(&self, guest: &str) -> Result<(), FrontError> {
        let state = &self.parts.config.state;
        let of_guest = |why: &dyn Display| FrontError::new("", why);
        let left = notes(state, guest).map_err(|error| of_guest(&error))?;
        if left.iter().all(Noted::tracks) {
            return Ok(());
        }
        let guests = &self.parts.guests;
        let found = guests.find(guest).map_err(|error| of_guest(&error))?;
        match found {
            Some(found) => {
                let lease = guests.lease(&found, COMMAND_TIMEOUT).await;
                let lease = lease.map_err(|error| of_guest(&error))?;
                take_out(state, &found, lease.qmp()).await
            }
            None => {
                let right = self.rights.get(guest).map_err(|error| of_guest(&error))?;
                let elsewhere =
                    |holder| matches!(holder, longhaul_storage::Holder::Elsewhere { .. });
                let moved = right.is_some_and(|right| elsewhere(right.holder));
                ended(state, guest, moved).await;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
