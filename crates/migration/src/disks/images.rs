//! The images that are created for the disks of an arriving guest.
//!
//! ```text
//! STATE/arriving/MIGRATION[.KIND].note   which images were created, so that they can be removed
//! ```
//!
//! The journal alone decides about them: they stay if it gives the guest to this host, and are
//! removed if it says that the guest does not come.

use crate::context::Context;
use crate::disks::export_notes::remove_if_there;
use crate::disks::exports;
use crate::disks::fate::{Fate, fate};
pub(crate) use crate::disks::fate::{invalid, refused};
use crate::disks::volumes::{self, Begins};
use crate::disks::{blocks_of, has_format};
use crate::host::notes::{self, All, NoteStore};
use crate::host::writable;
use longhaul_hypervisor::config::VolumeContent;
use longhaul_hypervisor::process::Account;
use longhaul_protocol::disk::{DiskFormat, OfferedDisk, Pulled};
use longhaul_protocol::guest::{Disk, GuestDescription};
use longhaul_protocol::message::{Check, Offer, Refusal, RefusalCode, Verdict};
use longhaul_protocol::units::show_bytes;
use longhaul_protocol::{MigrationId, RegionId, RegionKind, RegionSpec};
use longhaul_storage::disk::{Disk as _, ExportSize, RawDisk, Volume, Zeros, is_volume, qcow2};
use nix::sys::statvfs::statvfs;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::task::block_in_place;

/// Space that stays free on a file system beside the disks, in bytes.
const SPARE_BYTES: u64 = 64 << 20;

/// The beginning of a volume that is cleared before QEMU opens it, in bytes. In a qcow2 image, QEMU
/// reads its tables there.
const CLEARED_FIRST: usize = 64 << 20;

/// Where the image of a disk is on this host.
#[derive(Debug)]
pub(crate) enum Room {
    /// A file will be made at this path.
    File(PathBuf),
    /// It will be written to this volume.
    Volume(volumes::Room),
    /// The manager of the guest will allocate a volume.
    Absent {
        /// The name of the image.
        image: String,
        /// Where the volume will be.
        path: PathBuf,
    },
}

impl Room {
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::File(path) | Self::Absent { path, .. } => path,
            Self::Volume(room) => room.volume.path(),
        }
    }
}

/// An offered disk, and the place of its image on this host.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) offered: OfferedDisk,
    room: Room,
}

impl Place {
    pub(crate) fn region(&self) -> RegionId {
        self.offered.region
    }

    pub(crate) fn path(&self) -> &Path {
        self.room.path()
    }

    /// Returns the volume that the disk is written to, if it is not written to a file.
    pub(crate) fn volume(&self) -> Option<&Volume> {
        match &self.room {
            Room::File(_) | Room::Absent { .. } => None,
            Room::Volume(room) => Some(&room.volume),
        }
    }

    /// Returns the size that its disk export shows.
    pub(crate) fn export_size(&self) -> ExportSize {
        match &self.room {
            Room::File(path) | Room::Absent { path, .. } => {
                exports::shown(grows(&self.offered), path).0
            }
            // QEMU may use all of it for a qcow2 image. A raw disk that is smaller has its size in
            // the format node above.
            Room::Volume(room) => ExportSize::Bytes(room.volume.size_bytes()),
        }
    }

    /// Returns the header that QEMU needs to open the image. It is shorter than a block. No image
    /// of this format has an all-zero first block, so the source always overwrites it.
    fn beginning(&self) -> Result<Vec<u8>, qcow2::Qcow2Error> {
        match &self.offered.format {
            DiskFormat::Raw => Ok(Vec::new()),
            DiskFormat::Qcow2(image) => qcow2::header_alone(image),
        }
    }

    fn size(&self) -> ExportSize {
        match grows(&self.offered) {
            true => ExportSize::Bytes(self.offered.image_bytes),
            false => ExportSize::OfFile,
        }
    }

    /// Returns a warning if its volume is large enough only for strategies that send the whole disk
    /// before the switchover.
    fn is_tight(&self, here: &str) -> Option<Check> {
        let Room::Volume(room) = &self.room else {
            return None;
        };
        let offered = &self.offered;
        let (has, needed) = (room.volume.size_bytes(), offered.image_bytes);
        let is_tight = grows(offered) && offered.pulled == Pulled::Nothing && has < needed;
        is_tight.then(|| Check {
            verdict: Verdict::Warning,
            text: format!(
                "{here} has a volume of {} for disk {}, and the move is refused with --disks \
                 hybrid or postcopy: its qcow2 image may take {} while it moves",
                show_bytes(has),
                offered.name,
                show_bytes(needed)
            ),
            hint: Some("move it without these, or enlarge the volume".to_owned()),
        })
    }

    /// Returns an error if its volume is too small.
    fn check_size(&self, here: &str) -> Result<(), Refusal> {
        let Room::Volume(room) = &self.room else {
            return Ok(());
        };
        let OfferedDisk {
            name,
            image_bytes,
            allocated_bytes,
            format,
            pulled,
            ..
        } = &self.offered;
        let needed = match format {
            DiskFormat::Raw => *image_bytes,
            // The list of missing blocks is of the whole region.
            DiskFormat::Qcow2(_) if *pulled != Pulled::Nothing => *image_bytes,
            // The length that it has now, and all of its disk.
            DiskFormat::Qcow2(image) => {
                let now = image_bytes.saturating_sub(qcow2::growth_bytes(image));
                now.max(*allocated_bytes).max(qcow2::full_bytes(image))
            }
        };
        volumes::check_size(here, name, &room.volume, needed)
    }
}

/// Returns whether the image of a disk grows. Its final length is known when the guest has stopped.
pub(crate) fn grows(disk: &OfferedDisk) -> bool {
    matches!(disk.format, DiskFormat::Qcow2(_))
}

/// Returns the place for a disk of a description, if an image can be created there.
pub(crate) fn look_for_room(
    context: &Context,
    guest: &GuestDescription,
    name: &str,
) -> Result<Room, Refusal> {
    let described = guest.disks.iter().find(|disk| disk.name == name);
    let moves = |disk: &&Disk| disk.is_local() || disk.moves_if_lacking();
    let Some(described) = described.filter(moves) else {
        return Err(invalid(format!(
            "{name} is not a disk of {} that moves",
            guest.name
        )));
    };
    let of = format!("disk {name}");
    let known = context.parts.config.hypervisor.image(&described.image);
    if let Some(image) = &known
        && image.volume == Some(VolumeContent::Absent)
    {
        let here = &context.parts.config.name;
        return match fs::symlink_metadata(&image.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Room::Absent {
                image: described.image.clone(),
                path: image.path.clone(),
            }),
            // Nothing says that it is this guest's.
            _ => {
                let text = format!("{here} has a volume already where that of {of} was to be");
                Err(refused(text, "try again"))
            }
        };
    }
    if let Some(image) = context.parts.config.hypervisor.image(&described.image)
        && is_volume(&image.path)
    {
        let here = &context.parts.config.name;
        let busy = exports::uses(&context.parts.config.state, &image.path);
        if busy.map_err(|error| invalid(format!("{here}: {error}")))? {
            let text = format!("{here} is not done yet with the volume of {of}");
            return Err(refused(text, format!("on {here}: wait a moment")));
        }
        let image = (described.image.as_str(), &image);
        return volumes::look(context, &guest.name, image, &of).map(Room::Volume);
    }
    free_path(context, &described.image, &of).map(Room::File)
}

/// Returns the path of an image of the configuration, if a file can be created there. `of` says
/// what the image is for.
pub(crate) fn free_path(context: &Context, image: &str, of: &str) -> Result<PathBuf, Refusal> {
    let config = &context.parts.config;
    let here = &config.name;
    // Unknown names are also refused by the check of the whole description.
    let Some(known) = config.hypervisor.image(image) else {
        let text = format!("{here} does not know the image {image}");
        return Err(refused(text, "name it under [images] in its configuration"));
    };
    let path = known.path;
    // The refusal does not show paths of this host to the peer.
    let refusal = |what: &str, hint: &str| {
        let text = format!("{here} {what} the image {image} of {of}");
        refused(text, format!("on {here}: {hint}"))
    };
    if fs::symlink_metadata(&path).is_ok() {
        return Err(refusal(
            "has a file already at the path of, and does not write over,",
            "move that file away: it may be an older copy of this disk",
        ));
    }
    if path.starts_with("/dev") {
        return Err(refusal(
            "would have to make a volume for",
            "make the volume, which must exist before a guest comes (lvcreate), or give the image \
             a path for a file",
        ));
    }
    // A manager's folder for a guest's volumes is made with the first of them.
    let by_manager = !config.hypervisor.images.contains_key(image);
    let folder = path.parent();
    let above = folder.filter(|_| by_manager).and_then(Path::parent);
    let place = match folder.is_some_and(Path::is_dir) {
        true => &path,
        false if above.is_some_and(Path::is_dir) => folder.unwrap_or(&path),
        false => {
            let hint = "make the folder of its path, or name it elsewhere";
            return Err(refusal("has no folder for", hint));
        }
    };
    if let Err(unwritable) = writable::check(place) {
        tracing::warn!(hint = unwritable.hint, "{}", unwritable.text);
        let hint = "longhaul doctor says what the agent's unit lacks (ReadWritePaths=)";
        return Err(refusal("may not write in the folder of", hint));
    }
    let busy = exports::uses(&config.state, &path);
    if busy.map_err(|error| invalid(format!("{here}: {error}")))? {
        return Err(refusal("is not done yet with", "wait a moment"));
    }
    Ok(path)
}

/// Returns the paths for the disks of an offer. Creates nothing.
pub(crate) fn places(
    context: &Context,
    offer: &Offer,
    disks: &[OfferedDisk],
) -> Result<Vec<Place>, Refusal> {
    let here = &context.parts.config.name;
    let memory = offer
        .regions
        .iter()
        .take_while(|region| region.kind() == RegionKind::Memory);
    let regions = &offer.regions[memory.count()..];
    let fit = |(region, disk): (&RegionSpec, &OfferedDisk)| {
        let blocks = blocks_of(disk.image_bytes);
        region.kind() == RegionKind::Disk
            && region.id == disk.region
            && region.blocks == blocks
            && blocks > 0
    };
    let named = |name: &str| disks.iter().filter(|disk| disk.name == name).count() == 1;
    // Read-only images move only if this host lacks them.
    let all = offer.guest.disks.iter().filter(|disk| {
        let offered = disks.iter().any(|offered| offered.name == disk.name);
        disk.is_local() || disk.moves_if_lacking() && offered
    });
    if regions.len() != disks.len()
        || !regions.iter().zip(disks).all(fit)
        || !all.clone().all(|disk| named(&disk.name))
        || all.count() != disks.len()
    {
        return Err(invalid(format!(
            "{here}: the disks of the offer are not those of its guest"
        )));
    }
    let places: Result<Vec<Place>, Refusal> = disks
        .iter()
        .map(|disk| place(context, &offer.guest, disk))
        .collect();
    let places = places?;
    enough_room(here, &places)?;
    Ok(places)
}

/// Returns the place of a disk, or why it cannot be here.
fn place(
    context: &Context,
    guest: &GuestDescription,
    disk: &OfferedDisk,
) -> Result<Place, Refusal> {
    let here = &context.parts.config.name;
    let room = look_for_room(context, guest, &disk.name)?;
    let described = guest.disks.iter().find(|one| one.name == disk.name);
    let config = &context.parts.config.hypervisor;
    let image = described.and_then(|described| config.image(&described.image));
    if image.is_some_and(|image| !has_format(&image, &disk.format)) {
        let text = format!(
            "{here} has another format for disk {} than it has now",
            disk.name
        );
        return Err(refused(
            text,
            "give its image the same `format` on both hosts",
        ));
    }
    let whole = disk.pulled == Pulled::Nothing && disk.base.is_none();
    if described.is_some_and(|disk| disk.read_only) && !whole {
        let text = format!("{here}: disk {} is read-only, and comes whole", disk.name);
        return Err(invalid(text));
    }
    if !grows(disk) && disk.base.is_some() {
        let text = format!("{here}: disk {} is raw, and stands on nothing", disk.name);
        return Err(invalid(text));
    }
    let place = Place {
        offered: disk.clone(),
        room,
    };
    place.check_size(here)?;
    let beginning = place.beginning();
    beginning.map_err(|error| invalid(format!("{here}: disk {}: {error}", disk.name)))?;
    Ok(place)
}

/// Returns why disks that would come do not fit here: their places exist, and are too small or of
/// another format.
pub(crate) fn misfits(
    context: &Context,
    guest: &GuestDescription,
    disks: &[OfferedDisk],
) -> Vec<Check> {
    let (mut places, mut refusals) = (Vec::new(), Vec::new());
    // A disk without a place is reported for the guest itself.
    let has_place = |disk: &&OfferedDisk| look_for_room(context, guest, &disk.name).is_ok();
    for disk in disks.iter().filter(has_place) {
        match place(context, guest, disk) {
            Ok(place) => places.push(place),
            Err(refusal) => refusals.push(refusal),
        }
    }
    let here = &context.parts.config.name;
    refusals.extend(enough_room(here, &places).err());
    let check = |refusal: Refusal| Check {
        verdict: Verdict::Refused,
        text: refusal.text,
        hint: refusal.hint,
    };
    let tight = places.iter().filter_map(|place| place.is_tight(here));
    tight.chain(refusals.into_iter().map(check)).collect()
}

/// Returns the free space of a folder's file system, in bytes, if it can be read.
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    let free = statvfs(folder).ok()?;
    Some(free.blocks_available() * free.fragment_size())
}

pub(crate) fn is_too_little(free: u64, needed: u64) -> bool {
    needed.saturating_add(SPARE_BYTES) > free
}

/// Checks that the file systems have the space that the disks use at the source.
fn enough_room(here: &str, places: &[Place]) -> Result<(), Refusal> {
    let folder = |place: &Place| match &place.room {
        // The folder itself may not be made yet.
        Room::File(path) => {
            let mut above = path.ancestors().skip(1);
            above.find(|it| it.is_dir()).map(Path::to_owned)
        }
        Room::Volume(_) | Room::Absent { .. } => None,
    };
    for place in places {
        let Some(above) = folder(place) else { continue };
        let Some(free) = free_bytes(&above) else {
            continue;
        };
        let same = places
            .iter()
            .filter(|other| folder(other) == Some(above.clone()));
        let needed: u64 = same.map(|other| other.offered.allocated_bytes).sum();
        let whole: u64 = places
            .iter()
            .filter(|other| folder(other) == Some(above.clone()) && !grows(&other.offered))
            .map(|other| other.offered.image_bytes)
            .sum();
        if !is_too_little(free, needed) && is_too_little(free, whole) {
            tracing::warn!(
                free = show_bytes(free),
                used = show_bytes(needed),
                sizes = show_bytes(whole),
                "the guest's disks fit because they are not full: their file system may fill up"
            );
        }
        if is_too_little(free, needed) {
            let text = format!(
                "{here} has {} free for the guest's disks, and they take {}",
                show_bytes(free),
                show_bytes(needed)
            );
            return Err(refused(
                text,
                "make room there, or name the images elsewhere",
            ));
        }
    }
    Ok(())
}

/// The images that were created for a guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Note {
    guest: String,
    /// The generation of the right after the migration.
    generation: u64,
    images: Vec<Made>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Made {
    path: PathBuf,
    /// The temporary name, until the file's identity is noted.
    fresh: PathBuf,
    /// Device and inode of the file.
    file: Option<(u64, u64)>,
}

impl notes::Note for Note {
    const FOLDER: &'static str = "arriving";
}

fn store(context: &Context) -> NoteStore<Note> {
    notes_in(&context.parts.config.state)
}

/// Returns the notes in a state folder.
pub(crate) fn notes_in(state: &Path) -> NoteStore<Note> {
    NoteStore::of(state)
}

/// Has the manager of a guest allocate the volumes of its disks that are not there.
pub(crate) async fn allocate(
    context: &Context,
    guest: &str,
    places: &mut [Place],
) -> Result<(), Refusal> {
    let here = &context.parts.config.name;
    for place in places {
        let Room::Absent { image, .. } = &place.room else {
            continue;
        };
        let (image, bytes) = (image.clone(), place.offered.image_bytes);
        let of = format!("disk {}", place.offered.name);
        let failed = |why: &str| Refusal {
            code: RefusalCode::QemuFailed,
            text: format!("{here}: no volume can be allocated for {of}: {why}"),
            hint: None,
        };
        let guests = &context.parts.guests;
        match guests.allocate(guest, &image, bytes).await {
            Ok(true) => {}
            Ok(false) => return Err(failed("no manager of guests has its storage")),
            Err(error) => return Err(failed(&error.to_string())),
        }
        let known = context.parts.config.hypervisor.image(&image);
        let known = known.ok_or_else(|| failed("its image has no name any more"))?;
        let look = || volumes::look(context, guest, (&image, &known), &of);
        place.room = Room::Volume(block_in_place(look)?);
        place.check_size(here)?;
    }
    Ok(())
}

/// Creates the images of an offer's disks.
pub(crate) fn make(
    context: &Context,
    offer: &Offer,
    places: &[Place],
) -> io::Result<Vec<Arc<RawDisk>>> {
    let new = |place: &Place| {
        let Room::File(path) = &place.room else {
            return Ok(None);
        };
        Ok(Some(NewImage {
            path: path.clone(),
            beginning: place.beginning().map_err(io::Error::other)?,
            bytes: place.offered.image_bytes,
        }))
    };
    let new = places.iter().filter_map(|place| new(place).transpose());
    let new: Vec<NewImage> = new.collect::<io::Result<_>>()?;
    for folder in new.iter().filter_map(|image| image.path.parent()) {
        match fs::create_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    create(context, offer, None, &new)?;
    let open = |place: &Place| {
        let disk = match &place.room {
            Room::File(path) => RawDisk::open(path, place.size()).map_err(io::Error::other)?,
            Room::Volume(room) => write_over(context, offer, place, room)?,
            Room::Absent { path, .. } => {
                let text = format!("{} was not allocated", path.display());
                return Err(io::Error::other(text));
            }
        };
        Ok(Arc::new(disk))
    };
    places.iter().map(open).collect()
}

/// Begins to write a disk to its volume: from here on, the volume's former content does not count.
fn write_over(
    context: &Context,
    offer: &Offer,
    place: &Place,
    room: &volumes::Room,
) -> io::Result<RawDisk> {
    let OfferedDisk {
        name, image_bytes, ..
    } = &place.offered;
    let raw = !grows(&place.offered);
    let begins = Begins {
        guest: &offer.guest.name,
        disk: name,
        volume: &room.volume,
        bytes: raw.then_some(*image_bytes),
        migration: offer.migration,
        generation: offer.generation.0 + 1,
    };
    volumes::begin(&context.parts.config.state, &begins)?;
    tracing::info!(
        guest = offer.guest.name,
        disk = name,
        volume = %room.volume.path().display(),
        was = room.why,
        "the disk is written to its volume"
    );
    let bytes = match raw {
        true => *image_bytes,
        false => room.volume.size_bytes().min(*image_bytes),
    };
    let disk = RawDisk::over(&room.volume, bytes).map_err(io::Error::other)?;
    let beginning = place.beginning().map_err(io::Error::other)?;
    let first = (disk.size_bytes()).min(CLEARED_FIRST as u64);
    if !raw {
        disk.zero(0..first, Zeros::MayBeHole)?;
    }
    disk.write(0, &beginning)?;
    Ok(disk)
}

/// An image that is to be created.
pub(crate) struct NewImage {
    pub(crate) path: PathBuf,
    /// Its first bytes. All others are zero.
    pub(crate) beginning: Vec<u8>,
    /// Its length.
    pub(crate) bytes: u64,
}

/// Creates images for an offered guest. Each is noted before it gets its name: they are removed if
/// the guest does not come. Each `kind` has a note of its own.
pub(crate) fn create(
    context: &Context,
    offer: &Offer,
    kind: Option<&str>,
    images: &[NewImage],
) -> io::Result<()> {
    if images.is_empty() {
        return Ok(());
    }
    let store = store(context);
    let migration = offer.migration;
    let name = kind.map_or(migration.to_string(), |kind| format!("{migration}.{kind}"));
    let fresh = |image: &NewImage| {
        let mut name = OsString::from(&image.path);
        name.push(format!(".{migration}"));
        PathBuf::from(name)
    };
    let made = images.iter().map(|image| Made {
        path: image.path.clone(),
        fresh: fresh(image),
        file: None,
    });
    let mut note = Note {
        guest: offer.guest.name.clone(),
        generation: offer.generation.0 + 1,
        images: made.collect(),
    };
    store.write(&name, &note)?;
    let run_as = context.parts.config.hypervisor.qemu.run_as.as_deref();
    let account = run_as
        .map(Account::of)
        .transpose()
        .map_err(io::Error::other)?;
    for (made, image) in note.images.iter_mut().zip(images) {
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600);
        let file = file.open(&made.fresh)?;
        file.write_all_at(&image.beginning, 0)?;
        file.set_len(image.bytes)?;
        if let Some(account) = &account {
            nix::unistd::fchown(&file, Some(account.uid), Some(account.gid))?;
        }
        let about = file.metadata()?;
        made.file = Some((about.dev(), about.ino()));
        file.sync_all()?;
    }
    store.write(&name, &note)?;
    for made in &note.images {
        // A link, unlike a rename, does not replace a file that someone else has put there.
        fs::hard_link(&made.fresh, &made.path)?;
        fs::remove_file(&made.fresh)?;
        File::open(made.path.parent().unwrap_or(Path::new("/")))?.sync_all()?;
    }
    Ok(())
}

/// Removes the images of guests that do not come, and the notes of guests that have arrived. The
/// journals decide.
pub(crate) fn sweep(context: &Context) {
    let All { notes, unreadable } = match store(context).all() {
        Ok(all) => all,
        Err(error) => return tracing::error!(%error, "cannot look for images that were made"),
    };
    for (_, error) in unreadable {
        tracing::error!(%error, "what was made for a disk is left over");
    }
    for (name, note) in notes {
        if let Err(error) = sweep_one(context, &name, &note) {
            tracing::error!(note = name, %error, "what was made for a disk is left over");
        }
    }
    volumes::sweep(context);
}

fn sweep_one(context: &Context, name: &str, note: &Note) -> io::Result<()> {
    match fate(context, migration_of(name)?, (&note.guest, note.generation))? {
        Fate::Open => return Ok(()),
        Fate::Stay => {}
        Fate::Go => {
            tracing::info!(
                guest = note.guest,
                "removing the images that were made for it"
            );
            note.images.iter().try_for_each(Made::remove)?;
        }
    }
    store(context).remove(name)
}

/// Returns whether an image was created for a guest that has not come yet, or does not come: its
/// content is not complete, or it will be removed.
pub(crate) fn is_arriving(context: &Context, image: &Path) -> io::Result<bool> {
    for (name, note) in store(context).all()?.notes {
        let of = (&*note.guest, note.generation);
        if note.images.iter().any(|made| made.path == image)
            && fate(context, migration_of(&name)?, of)? != Fate::Stay
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the migration that a note is named after.
fn migration_of(name: &str) -> io::Result<MigrationId> {
    let migration = name.split('.').next().unwrap_or(name).parse();
    migration.map_err(|_| io::Error::other("it has no migration's name"))
}

impl Made {
    fn remove(&self) -> io::Result<()> {
        remove_if_there(&self.fresh)?;
        match fs::symlink_metadata(&self.path) {
            // Another file of this name was not created here.
            Ok(file) if Some((file.dev(), file.ino())) == self.file => remove_if_there(&self.path),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_file_that_was_made_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        fs::write(&path, "ours").unwrap();
        let about = fs::metadata(&path).unwrap();
        let mut made = Made {
            fresh: folder.path().join("disk.fresh"),
            file: Some((about.dev(), about.ino() + 1)),
            path: path.clone(),
        };
        made.remove().unwrap();
        assert!(path.exists());
        made.file = Some((about.dev(), about.ino()));
        made.remove().unwrap();
        assert!(!path.exists());
    }
}
