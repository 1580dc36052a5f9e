//! The front ends below the disks of a guest that leaves: put in when its move begins, taken out when
//! it ends, whichever way, also by an agent that was started since.
//!
//! What is noted of them is in STATE/fronts, by guest and number ([`super::noted`]).

use super::draining::may_be_left;
use super::watch::Watch;
use super::{LocalDisk, growing, noted};
use crate::agent::migration::Context;
use crate::agent::migration::registry::Taken;
use crate::agent::migration::send::Sending;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::disk::{self, DiskNodes, Front};
use longhaul_hypervisor::guest::Guest;
use longhaul_hypervisor::helper::Helper;
use longhaul_hypervisor::qmp::{COMMAND_TIMEOUT, Qmp};
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::{MigrationId, RegionId};
use longhaul_storage::disk::{ExportSize, ImageUse};
use longhaul_storage::file_name;
use longhaul_storage::front::arriving::masks::Masks;
use longhaul_storage::front::{FrontFolder, FrontSpec};
use longhaul_storage::nbd::ExportName;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::block_in_place;
use tokio::time::sleep;

pub(in crate::agent::migration) use super::noted::FrontError;

/// Between two tries to take a front end out.
const AGAIN_EVERY: Duration = Duration::from_secs(2);
/// Longest path of a unix socket, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;
/// What the image of a guest that has left is called.
const MOVED: &str = "moved";

/// What was put below a disk.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    guest: String,
    disk: String,
    image: PathBuf,
    /// The disk's device, by its path in QEMU.
    device: String,
    /// What it was put between; what the device stands on may be something else by now.
    #[serde(default)]
    nodes: Option<DiskNodes>,
    /// The front end's node in QEMU, and what it shows.
    node: String,
    export: String,
    /// The supervisor.
    #[serde(default)]
    helper: Option<Helper>,
    /// The guest ran when the front end was about to be taken out: QEMU may be stopped for that.
    #[serde(default)]
    runs: bool,
    /// How it comes: a part of it may still be at the source.
    #[serde(default)]
    arriving: Option<Coming>,
    /// What whoever goes on after this agent needs to send what may be left when the guest has gone.
    #[serde(default)]
    left: Option<LeftDisk>,
}

/// How a disk comes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::agent::migration) struct Coming {
    pub(in crate::agent::migration) migration: MigrationId,
    pub(in crate::agent::migration) digest_key: [u8; 32],
    #[serde(default)]
    pub(in crate::agent::migration) pulled: Pulled,
}

/// A disk of which something may be left here when its guest has gone.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::agent::migration) struct LeftDisk {
    pub(in crate::agent::migration) migration: MigrationId,
    pub(in crate::agent::migration) region: RegionId,
    pub(in crate::agent::migration) blocks: u64,
    /// Whether its image grows, and may be shorter.
    #[serde(default)]
    pub(in crate::agent::migration) grows: bool,
    pub(in crate::agent::migration) digest_key: [u8; 32],
    /// Whether it is compared when all of it is at the destination.
    #[serde(default)]
    pub(in crate::agent::migration) verify: bool,
}

/// How an image is shown to QEMU, and what QEMU would lock of it.
fn shown(grows: bool) -> (ExportSize, ImageUse) {
    match grows {
        true => (growing::SHOWN, ImageUse::Growing),
        false => (ExportSize::OfFile, ImageUse::Raw),
    }
}

/// The disk below a front end.
struct Below<'a> {
    disk: &'a str,
    image: &'a Path,
    /// The path of its device in QEMU.
    device: String,
    nodes: &'a DiskNodes,
    size: ExportSize,
    image_use: ImageUse,
    arriving: Option<Coming>,
    left: Option<LeftDisk>,
}

type Noted = noted::Noted<Note>;

impl noted::Note for Note {
    fn helper_name(&self) -> String {
        // Another agent of this machine may have a guest of the same name.
        format!("front-{}", self.node)
    }

    fn helper(&mut self) -> &mut Option<Helper> {
        &mut self.helper
    }

    fn disk(&self) -> String {
        self.disk.clone()
    }
}

pub(super) fn folder(state: &Path) -> PathBuf {
    state.join("fronts")
}

/// The notes of a guest, or of all guests.
fn notes(state: &Path, guest: Option<&str>) -> io::Result<Vec<Noted>> {
    let mut found = noted::notes::<Note>(&folder(state))?;
    found.retain(|noted| guest.is_none_or(|guest| noted.note.guest == guest));
    Ok(found)
}

impl Noted {
    fn front(&self) -> Front {
        Front {
            node: self.note.node.clone(),
            socket: self.folder().socket(),
            export: self.note.export.clone(),
        }
    }

    /// Ends supervisor and server with their guest, and sets the image aside where that has moved away.
    async fn end(&mut self, moved: bool) -> Result<(), FrontError> {
        self.stop().await?;
        if moved && self.note.arriving.is_none() {
            set_aside(&self.note.image).map_err(|error| self.error(&error))?;
        }
        self.remove()
    }
}

/// The front ends of a departing guest, which tell of its writes as long as this is kept.
pub(in crate::agent::migration) struct Fronts {
    watches: Vec<Watch>,
    below: Vec<(DiskNodes, Front)>,
}

impl Fronts {
    /// Of a guest whose disks stay where they are.
    pub(in crate::agent::migration) fn none() -> Self {
        Self {
            watches: Vec::new(),
            below: Vec::new(),
        }
    }

    /// What they were put between.
    pub(in crate::agent::migration) fn below(&self) -> &[(DiskNodes, Front)] {
        &self.below
    }

    /// Puts front ends below the disks of a guest, and tells of its writes from then on. After an
    /// error [`take_out`] has to be called.
    pub(in crate::agent::migration) async fn put_in(
        state: &Path,
        guest: &Guest,
        qmp: &Qmp,
        disks: &[LocalDisk],
        (sending, verify): (&Arc<Sending>, bool),
    ) -> Result<Self, FrontError> {
        let mut fronts = Self::none();
        for (n, disk) in disks.iter().enumerate() {
            let of_disk = |why: &dyn Display| FrontError::new(&disk.spec.name, why);
            let device = device(guest.description(), &disk.spec.name);
            let device = device.map_err(|why| of_disk(&why))?;
            let nodes = nodes(guest, qmp, &device).await;
            let nodes = nodes.map_err(|error| of_disk(&error))?;
            let left = may_be_left(disk).then(|| LeftDisk {
                migration: sending.migration(),
                region: disk.spec.id,
                blocks: disk.spec.blocks,
                grows: disk.grows(),
                digest_key: sending.digest_key().0,
                verify,
            });
            let (size, image_use) = shown(disk.grows());
            let of = Below {
                disk: &disk.spec.name,
                image: &disk.image,
                device,
                nodes: &nodes,
                size,
                image_use,
                arriving: None,
                left,
            };
            let mut noted = make(state, guest, n, of).map_err(|error| of_disk(&error))?;
            let watch = Watch::begin(disk, &noted.folder(), sending);
            fronts.watches.push(watch.map_err(|error| of_disk(&error))?);
            noted.supervise().await?;
            fronts.below.push((nodes, noted.front()));
        }
        let below = fronts.below.iter();
        let pairs: Vec<_> = below.map(|(nodes, front)| (nodes, front)).collect();
        let inserted = disk::insert_all(qmp, &pairs).await;
        let still = inserted.map_err(|error| FrontError::new("", &error))?;
        tracing::info!(
            guest = guest.name(),
            ?still,
            "reached through the front end"
        );
        for disk in disks {
            let told = block_in_place(|| disk.tell_holes(sending));
            told.map_err(|error| FrontError::new(&disk.spec.name, &error))?;
        }
        Ok(fronts)
    }

    /// Whether what was copied of the disks can be trusted.
    pub(in crate::agent::migration) fn check(&self) -> Result<(), ApiError> {
        let checks = self.watches.iter().map(Watch::check);
        let missed = checks.collect::<Result<(), _>>();
        missed.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))
    }

    /// Waits until every write of a guest that stands still was heard of.
    pub(in crate::agent::migration) async fn caught_up(&self) -> Result<(), ApiError> {
        for watch in &self.watches {
            let caught_up = watch.caught_up().await;
            caught_up.map_err(|error| ApiError::new(ErrorCode::Internal, error.to_string()))?;
        }
        Ok(())
    }
}

/// The path of a disk's device in QEMU.
pub(super) fn device(guest: &GuestDescription, disk: &str) -> Result<String, String> {
    let Some(hardware) = &guest.hardware else {
        return Ok(format!("/machine/peripheral/blk-{disk}/virtio-backend"));
    };
    let mut devices = hardware.devices.iter();
    let device = devices.find(|device| device.serves.as_deref() == Some(disk));
    let id = device.and_then(|device| Some((device.id.as_deref()?, &device.model)));
    let Some((id, model)) = id else {
        return Err("its device has no `id` in QEMU: nothing can be put below it".to_owned());
    };
    let below = match model.starts_with("virtio-blk") {
        true => "/virtio-backend",
        false => "",
    };
    Ok(format!("/machine/peripheral/{id}{below}"))
}

async fn nodes(guest: &Guest, qmp: &Qmp, device: &str) -> Result<DiskNodes, String> {
    let pid = guest.pid().ok_or("its QEMU has no process")?;
    let line = fs::read(format!("/proc/{pid}/cmdline")).map_err(|error| error.to_string())?;
    let words = line.split(|byte| *byte == 0);
    let words: Vec<String> = words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect();
    let found = disk::find(qmp, &words, device).await;
    found.map_err(|error| error.to_string())
}

pub(super) fn random_name() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Makes the folder of a front end, and notes that it is there.
fn make(state: &Path, guest: &Guest, n: usize, below: Below<'_>) -> io::Result<Noted> {
    let above = folder(state);
    noted::create_above(&above)?;
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
        let text = "a front end from an earlier move is still below it: see the agent's log";
        return Err(io::Error::other(text));
    }
    let pid = guest.pid().unwrap_or_default();
    let uid = fs::metadata(format!("/proc/{pid}"))?.uid();
    let ours = nix::unistd::geteuid().as_raw();
    let export = random_name()?;
    let note = Note {
        guest: guest.name().to_owned(),
        disk: below.disk.to_owned(),
        image: below.image.to_owned(),
        device: below.device,
        nodes: Some(below.nodes.clone()),
        node: format!("lh-{}", &random_name()?[..16]),
        export: export.clone(),
        helper: None,
        runs: false,
        arriving: below.arriving,
        left: below.left,
    };
    let noted = Noted::new(folder, note);
    noted.write()?;
    // What an agent left that died before it had noted anything.
    noted.folder().remove().map_err(io::Error::other)?;
    let spec = FrontSpec {
        image: below.image.to_owned(),
        size: below.size,
        locks: Some(below.image_use),
        name: ExportName::new(export).ok_or_else(|| io::Error::other("no name for it"))?,
        qemu_uid: (uid != ours).then_some(uid),
        arriving: below.arriving.is_some(),
        fetched: None,
    };
    FrontFolder::create(noted.path(), &spec).map_err(io::Error::other)?;
    Ok(noted)
}

/// Takes out what stands below the disks of a guest that stays here, if anything does.
pub(in crate::agent::migration) async fn take_out(
    state: &Path,
    guest: &Guest,
    qmp: &Qmp,
) -> Result<(), FrontError> {
    let of_guest = |why: &dyn Display| FrontError::new("", why);
    let mut noted = notes(state, Some(guest.name())).map_err(|error| of_guest(&error))?;
    if noted.is_empty() {
        return Ok(());
    }
    let status = qmp.query("query-status").await;
    let status = status.map_err(|error| of_guest(&error))?;
    let runs = status["running"].as_bool().unwrap_or(false);
    let mut below = Vec::new();
    for noted in &mut noted {
        // Somebody must answer while QEMU lets go of it.
        noted.keep_answering().await?;
        let nodes = match &noted.note.nodes {
            Some(nodes) => Ok(nodes.clone()),
            None => nodes(guest, qmp, &noted.note.device).await,
        };
        below.push((nodes.map_err(|error| noted.error(&error))?, noted.front()));
        noted.note.runs |= runs;
        noted.write().map_err(|error| noted.error(&error))?;
    }
    for noted in &noted {
        let given = block_in_place(|| noted.control().give_locks());
        given.map_err(|error| noted.error(&error))?;
    }
    let pairs: Vec<_> = below.iter().map(|(nodes, front)| (nodes, front)).collect();
    let removed = disk::remove_all(qmp, &pairs).await;
    let still = removed.map_err(|error| of_guest(&error))?;
    tracing::info!(
        guest = guest.name(),
        ?still,
        "its disks are used directly again"
    );
    let stands_still = !runs && noted.iter().any(|noted| noted.note.runs);
    if stands_still && status["status"] == "paused" {
        let woken = qmp.execute("cont", serde_json::json!({}), COMMAND_TIMEOUT);
        woken.await.map_err(|error| of_guest(&error))?;
    }
    for noted in &mut noted {
        noted.stop().await?;
        noted.remove()?;
    }
    Ok(())
}

/// A disk that comes, and where its image was made.
pub(in crate::agent::migration) struct Comes {
    pub(in crate::agent::migration) pulled: Pulled,
    pub(in crate::agent::migration) name: String,
    pub(in crate::agent::migration) image: PathBuf,
    /// Whether its image grows.
    pub(in crate::agent::migration) grows: bool,
}

/// Puts front ends below disks of a guest that comes, and waits for it in its QEMU. After an error
/// the guest's QEMU has to be ended, and then [`ended`] called.
pub(in crate::agent::migration) async fn put_in_for(
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
        let device = device(guest.description(), &disk.name);
        let device = device.map_err(|why| of_disk(&why))?;
        let nodes = nodes(guest, qmp, &device).await;
        let nodes = nodes.map_err(|error| of_disk(&error))?;
        let (size, image_use) = shown(disk.grows);
        let of = Below {
            device,
            nodes: &nodes,
            disk: &disk.name,
            image: &disk.image,
            size,
            image_use,
            arriving: Some(Coming {
                pulled: disk.pulled,
                ..coming
            }),
            left: None,
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

/// A disk of a guest that has come, of which something may still be at the source.
pub(in crate::agent::migration) struct Incomplete {
    pub(in crate::agent::migration) name: String,
    pub(in crate::agent::migration) image: PathBuf,
    pub(in crate::agent::migration) pulled: Pulled,
    pub(in crate::agent::migration) folder: FrontFolder,
    pub(in crate::agent::migration) masks: Masks,
    pub(in crate::agent::migration) digest_key: [u8; 32],
}

/// The disks of a guest that a migration has brought, as far as their source has said what it had left.
pub(in crate::agent::migration) fn incomplete(
    state: &Path,
    guest: &str,
    migration: MigrationId,
) -> io::Result<Vec<Incomplete>> {
    let mut found = Vec::new();
    for noted in notes(state, Some(guest))? {
        let Some(coming) = noted.note.arriving.filter(|one| one.migration == migration) else {
            continue;
        };
        let folder = noted.folder();
        let masks = Masks::read(&folder.stored_masks()).map_err(io::Error::other)?;
        if let Some(masks) = masks {
            found.push(Incomplete {
                name: noted.note.disk,
                image: noted.note.image,
                pulled: coming.pulled,
                folder,
                masks,
                digest_key: coming.digest_key,
            });
        }
    }
    Ok(found)
}

/// The disks of a guest that has gone, of which something may be left here, and their images.
pub(in crate::agent::migration) fn left(
    state: &Path,
    guest: &str,
    migration: MigrationId,
) -> io::Result<Vec<(LeftDisk, String, PathBuf)>> {
    let of = |noted: Noted| {
        let left = noted.note.left.filter(|left| left.migration == migration)?;
        Some((left, noted.note.disk, noted.note.image))
    };
    Ok(notes(state, Some(guest))?
        .into_iter()
        .filter_map(of)
        .collect())
}

/// Has somebody answer for a guest's disks, and hold their images' locks, also after the host was
/// started anew.
pub(in crate::agent::migration) async fn keep_answering(
    state: &Path,
    guest: &str,
) -> Result<(), FrontError> {
    let noted = notes(state, Some(guest)).map_err(|error| FrontError::new("", &error))?;
    for mut noted in noted {
        noted.keep_answering().await?;
    }
    Ok(())
}

/// Ends what stood below the disks of a guest whose QEMU has ended. Where it has moved away, what is
/// left of its disks is set aside.
pub(in crate::agent::migration) async fn ended(state: &Path, guest: &str, moved: bool) {
    let noted = match notes(state, Some(guest)) {
        Ok(noted) => noted,
        Err(error) => {
            return tracing::error!(guest, %error, "cannot look for its front ends");
        }
    };
    for mut noted in noted {
        if let Err(error) = noted.end(moved).await {
            tracing::error!(guest, %error, "something of a front end is left over");
        }
    }
}

/// What the image of a disk is called when its guest has moved away.
pub(crate) fn set_aside_as(image: &Path) -> PathBuf {
    let mut name = image.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(MOVED);
    image.with_file_name(name)
}

/// Gives the image of a disk that is elsewhere now another name, so that nobody starts from it.
fn set_aside(image: &Path) -> io::Result<()> {
    match fs::symlink_metadata(image) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(file) if file.is_file() => {
            fs::rename(image, set_aside_as(image))?;
            File::open(image.parent().unwrap_or(Path::new("/")))?.sync_all()
        }
        // A volume has the name that it has.
        Ok(_) => Ok(()),
    }
}

/// Whether a disk of a guest is still reached through a front end that uses this image.
pub(in crate::agent::migration) fn uses(state: &Path, image: &Path) -> io::Result<bool> {
    let noted = notes(state, None)?;
    Ok(noted.iter().any(|noted| noted.note.image == image))
}

impl Context {
    /// Takes out what still stands below the disks of guests that no migration is busy with: what an
    /// earlier agent has left, or could not be taken out.
    pub(in crate::agent::migration) async fn sweep_fronts(&self) -> bool {
        let state = &self.parts.config.state;
        let found = match notes(state, None) {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(%error, "cannot look for front ends of disks");
                return false;
            }
        };
        let done = found.into_iter().filter(|noted| !self.comes_yet(noted));
        let mut guests: Vec<String> = done.map(|noted| noted.note.guest).collect();
        guests.dedup();
        let mut clean = true;
        for guest in guests {
            let Ok(_reservation) = self.registry.take(&guest, Taken::Locally) else {
                clean = false;
                continue;
            };
            if let Err(error) = self.sweep_fronts_of(&guest).await {
                tracing::error!(guest, %error, "its disks are still used through the front end");
                clean = false;
            }
        }
        clean
    }

    /// Whether somebody has yet to say what becomes of a disk that comes, or it is not all here.
    fn comes_yet(&self, noted: &Noted) -> bool {
        let Some(coming) = noted.note.arriving else {
            return false;
        };
        let masks = Masks::read(&noted.folder().stored_masks()).ok().flatten();
        let is_compared = !noted.folder().unwritten_masks().exists();
        if is_compared && masks.is_some_and(|masks| masks.missing.is_empty()) {
            return false;
        }
        let journal = self.parts.config.state.join("journal");
        let right = self.rights.get(&noted.note.guest).ok().flatten();
        let ours = right.is_some_and(|right| right.holder == longhaul_storage::Holder::Here);
        ours || journal.join(file_name(coming.migration)).exists()
    }

    /// Takes out, or ends, what stands below a guest's disks.
    pub(in crate::agent::migration) async fn sweep_fronts_of(
        &self,
        guest: &str,
    ) -> Result<(), FrontError> {
        let state = &self.parts.config.state;
        let of_guest = |why: &dyn Display| FrontError::new("", why);
        let left = notes(state, Some(guest)).map_err(|error| of_guest(&error))?;
        if left.is_empty() {
            return Ok(());
        }
        let found = super::super::left::find(self, guest).map_err(|error| of_guest(&error))?;
        match found {
            Some(found) => {
                let qmp = found.connect().await.map_err(|error| of_guest(&error))?;
                take_out(state, &found, &qmp).await
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

    /// Does so again and again until nothing is left.
    pub(in crate::agent::migration) fn keep_sweeping_fronts(self: &Arc<Self>) {
        let context = self.clone();
        tokio::spawn(async move {
            while !context.sweep_fronts().await {
                sleep(AGAIN_EVERY).await;
            }
        });
    }
}
