//! The volumes (block devices) that disks of guests arrive on, and leave.
//!
//! A volume cannot be made, renamed or removed as a file can. So a note says whose disk is on it:
//!
//! ```text
//! STATE/volumes/HASH.note   named by the volume's path, valid for the volume's identity
//! ```
//!
//! | on the volume | an arriving disk may be written to it |
//! |---|---|
//! | zeros | if the configuration calls it empty |
//! | this guest's disk, as the guest left it | yes |
//! | a part of this guest's disk, from an aborted move | if the configuration has `volume` |
//! | something that no note knows | if the configuration says that it may be overwritten |
//! | the disk of another guest that arrived here, or left | no |

use crate::context::Context;
use crate::disks::fate::{Fate, fate, refused};
use crate::host::notes::{self, All, NoteStore};
use crate::status::failure;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::config::{HostConfig, Image, ImageFormat, VolumeContent};
use longhaul_hypervisor::process::Account;
use longhaul_protocol::MigrationId;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::Refusal;
use longhaul_protocol::units::show_bytes;
use longhaul_storage::disk::{
    ContentDigests, Found, ImageIdentity, RawDisk, Volume, VolumeError, is_volume,
};
use nix::unistd::getgrouplist;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Whose disk is on a volume.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Note {
    guest: String,
    disk: String,
    path: PathBuf,
    identity: ImageIdentity,
    /// The size of a raw disk, which may be smaller than its volume.
    #[serde(default)]
    bytes: Option<u64>,
    state: State,
    /// Digests of the volume's content, taken when the guest did not use it any more.
    #[serde(default)]
    content: Option<ContentDigests>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum State {
    /// The disk arrives. `generation` is that of the right after the migration.
    Arriving {
        migration: MigrationId,
        generation: u64,
    },
    /// The guest has arrived.
    Here,
    /// The guest has moved away.
    Left,
    /// The guest did not come: a part of its disk may be on it.
    Aborted,
}

impl notes::Note for Note {
    const FOLDER: &'static str = "volumes";
}

/// Returns the notes in a state folder.
pub(crate) fn notes_in(state: &Path) -> NoteStore<Note> {
    NoteStore::of(state)
}

/// Returns the name of the note for a path (FNV-1a).
fn name_of(path: &Path) -> String {
    let bytes = path.as_os_str().as_encoded_bytes().iter();
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// Returns the note of a volume. Fails if a note cannot be read, since it may be this volume's.
fn of(state: &Path, identity: &ImageIdentity) -> io::Result<Option<Note>> {
    let All { notes, unreadable } = notes_in(state).all()?;
    if let Some((_, error)) = unreadable.into_iter().next() {
        return Err(error);
    }
    let mut notes = notes.into_iter().map(|(_, note)| note);
    Ok(notes.find(|note| identity.is_surely(&note.identity)))
}

/// Writes the note of a volume, in the place of all others of it.
fn write(state: &Path, note: &Note) -> io::Result<()> {
    let store = notes_in(state);
    let name = name_of(&note.path);
    store.write(&name, note)?;
    for (other, older) in store.all()?.notes {
        if other != name && note.identity.is_surely(&older.identity) {
            store.remove(&other)?;
        }
    }
    Ok(())
}

fn identity_of(path: &Path) -> io::Result<(RawDisk, ImageIdentity)> {
    let disk = RawDisk::open_to_read(path).map_err(io::Error::other)?;
    let identity = ImageIdentity::of(&disk)?;
    Ok((disk, identity))
}

impl Note {
    /// Returns whether the volume has the content that it had when the guest stopped using it.
    /// False if that was not recorded.
    fn is_unchanged(&self, disk: &RawDisk) -> io::Result<bool> {
        match &self.content {
            Some(digests) => Ok(digests.check(disk)?.is_ok()),
            None => Ok(false),
        }
    }
}

/// Why the content of a volume does not count after an aborted move.
const ABORTED: &str = "with a part of this guest's disk, from an aborted move";

/// A volume that an arriving disk may be written to.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) volume: Volume,
    /// Why its content does not count, in words.
    pub(crate) why: &'static str,
}

/// The volume of an image that a disk of a guest arrives for.
struct Asked<'a> {
    context: &'a Context,
    guest: &'a str,
    name: &'a str,
    image: &'a Image,
    of_disk: &'a str,
}

/// Returns the volume of an image, if a disk of a guest may be written to it. Changes nothing.
pub(crate) fn look(
    context: &Context,
    guest: &str,
    (name, image): (&str, &Image),
    of_disk: &str,
) -> Result<Room, Refusal> {
    let asked = Asked {
        context,
        guest,
        name,
        image,
        of_disk,
    };
    let volume = asked.take()?;
    let why = asked.permission(&volume)?;
    Ok(Room { volume, why })
}

impl Asked<'_> {
    /// Returns a refusal. It does not show paths of this host to the peer.
    fn refusal(&self, what: &str, hint: &str) -> Refusal {
        let here = &self.context.parts.config.name;
        let (name, of_disk) = (self.name, self.of_disk);
        let text = format!("{here} {what} the volume of the image {name} of {of_disk}");
        refused(text, format!("on {here}: {hint}"))
    }

    fn unknown(&self, error: &io::Error) -> Refusal {
        tracing::error!(image = self.name, %error, "cannot tell what is on its volume");
        self.refusal("cannot read", "the agent's log says why")
    }

    /// Takes the volume, if nothing else uses it.
    fn take(&self) -> Result<Volume, Refusal> {
        let config = &self.context.parts.config;
        let path = &self.image.path;
        let volume = Volume::take(path).map_err(|error| {
            tracing::warn!(image = self.name, %error, "its volume cannot be used");
            let (what, hint) = match error {
                VolumeError::Busy { .. } => (
                    "has something that uses",
                    "the agent's log says what uses it: let that end, or correct the image's path",
                ),
                VolumeError::ReadOnly(_) => (
                    "may only read",
                    "make it writable (blockdev --setrw, or lvchange --permission rw)",
                ),
                VolumeError::NoVolume(_) | VolumeError::Io { .. } => (
                    "cannot open",
                    "the agent's log says why; the agent's unit may need DeviceAllow=",
                ),
            };
            self.refusal(what, hint)
        })?;
        let run_as = config.hypervisor.qemu.run_as.as_deref();
        match qemu_may_use(run_as, path).map_err(|error| self.unknown(&error))? {
            true => Ok(volume),
            false => Err(self.refusal(
                "has a user for QEMU that may not use",
                "give the user of QEMU (`run_as`) access to it, by a udev rule or by the volume's \
                 group",
            )),
        }
    }

    /// Returns why the volume's content does not count, in words.
    fn permission(&self, volume: &Volume) -> Result<&'static str, Refusal> {
        if self.image.volume == Some(VolumeContent::Absent) {
            // Notes are of volumes that had its place, or its number, before.
            return Ok("allocated for it");
        }
        let state = &self.context.parts.config.state;
        let read = || -> io::Result<_> {
            let note = of(state, &volume.identity()?)?;
            let (disk, _) = identity_of(volume.path())?;
            let same = note.as_ref().map(|note| note.is_unchanged(&disk));
            Ok((note, same.transpose()?.unwrap_or_default()))
        };
        let (note, is_unchanged) = read().map_err(|error| self.unknown(&error))?;
        let word = self.image.volume;
        if let Some(note) = &note {
            match note.state {
                _ if note.guest != self.guest && note.state != State::Aborted => {
                    return Err(self.belongs_to(note));
                }
                _ if note.guest != self.guest => {}
                State::Left if is_unchanged => return Ok("as this guest left it"),
                State::Aborted if is_unchanged && word.is_some() => return Ok(ABORTED),
                State::Arriving { .. } if word.is_some() => return Ok(ABORTED),
                _ => {}
            }
        }
        match (volume.look().map_err(|error| self.unknown(&error))?, word) {
            (Found::Zeros, Some(_)) => Ok("empty"),
            (Found::Content { .. }, Some(VolumeContent::Overwrite)) if note.is_none() => {
                Ok("with content that may be overwritten")
            }
            (Found::Zeros, None) => Err(self.refusal(
                "has no word in its configuration that a guest may be written to",
                "write `volume = \"empty\"` below its path, if it is the right one",
            )),
            (Found::Content { byte, what }, _) => {
                let what = what.unwrap_or("content");
                let text = format!("does not write over {what} (at byte {byte}) in");
                let hint = "use another volume; or if nothing on it is needed, zero it \
                            (blkdiscard --zeroout) and write `volume = \"empty\"` below its path";
                Err(self.refusal(&text, hint))
            }
        }
    }

    /// Returns the refusal for a volume with the disk of another guest.
    fn belongs_to(&self, note: &Note) -> Refusal {
        let state = &self.context.parts.config.state;
        let file = shown(&notes_in(state).path(&name_of(&note.path)));
        let owner = &note.guest;
        let text = format!("has the disk of {owner}, which a move brought to it or left on it, in");
        let hint = format!(
            "use another volume; or if {owner} needs that disk no longer, remove the note {file} \
             in the state folder"
        );
        self.refusal(&text, &hint)
    }
}

/// Returns the name of a file with the name of its folder.
fn shown(file: &Path) -> String {
    let name = |path: &Path| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    };
    let folder = file.parent().map(name).unwrap_or_default();
    format!("{folder}/{}", name(file))
}

/// Returns whether the user that QEMU runs as may read and write a volume.
fn qemu_may_use(run_as: Option<&str>, path: &Path) -> io::Result<bool> {
    let Some(user) = run_as else {
        return Ok(true);
    };
    let account = Account::of(user).map_err(io::Error::other)?;
    let about = fs::metadata(path)?;
    let name = CString::new(account.name).map_err(io::Error::other)?;
    let groups = getgrouplist(&name, account.gid)?;
    let groups: Vec<u32> = groups.into_iter().map(|group| group.as_raw()).collect();
    let uid = account.uid.as_raw();
    let owner = (about.mode(), about.uid(), about.gid());
    Ok(has_access(owner, uid, &groups))
}

fn has_access((mode, owner, group): (u32, u32, u32), uid: u32, groups: &[u32]) -> bool {
    let both = match (uid, uid == owner, groups.contains(&group)) {
        (0, ..) => return true,
        (_, true, _) => 0o600,
        (_, false, true) => 0o060,
        (_, false, false) => 0o006,
    };
    mode & both == both
}

/// Returns an error if a volume is too small for a disk.
pub(crate) fn check_size(
    here: &str,
    disk: &str,
    volume: &Volume,
    needed: u64,
) -> Result<(), Refusal> {
    let bytes = volume.size_bytes();
    if bytes >= needed {
        return Ok(());
    }
    let text = format!(
        "{here} has a volume of {} for disk {disk}, which needs {}",
        show_bytes(bytes),
        exact(needed, bytes)
    );
    let hint = format!("on {here}: make the volume larger (lvextend), or name another one");
    Err(refused(text, hint))
}

/// Shows a size that is larger than another one, in bytes if they look the same otherwise.
fn exact(needed: u64, than: u64) -> String {
    match needed.saturating_sub(than) < than / 100 {
        true => format!("{needed} bytes (it has {than})"),
        false => show_bytes(needed),
    }
}

/// A disk that is about to be written to a volume.
pub(crate) struct Begins<'a> {
    pub(crate) guest: &'a str,
    pub(crate) disk: &'a str,
    pub(crate) volume: &'a Volume,
    /// The size of a raw disk.
    pub(crate) bytes: Option<u64>,
    pub(crate) migration: MigrationId,
    /// The generation of the right after the migration.
    pub(crate) generation: u64,
}

/// Notes durably that a disk is about to be written to a volume. From here on, its former content
/// does not count.
pub(crate) fn begin(state: &Path, begins: &Begins<'_>) -> io::Result<()> {
    let note = Note {
        guest: begins.guest.to_owned(),
        disk: begins.disk.to_owned(),
        path: begins.volume.path().to_owned(),
        identity: begins.volume.identity()?,
        bytes: begins.bytes,
        state: State::Arriving {
            migration: begins.migration,
            generation: begins.generation,
        },
        content: None,
    };
    write(state, &note)
}

/// Notes durably that a guest has moved away from a volume, whose content it does not use any more.
pub(crate) fn left(state: &Path, guest: &str, disk: &str, path: &Path) -> io::Result<()> {
    let (opened, identity) = identity_of(path)?;
    let before = of(state, &identity).ok().flatten();
    let before = before.filter(|note| note.guest == guest);
    let note = Note {
        guest: guest.to_owned(),
        disk: disk.to_owned(),
        path: path.to_owned(),
        identity,
        bytes: before.and_then(|note| note.bytes),
        state: State::Left,
        content: Some(ContentDigests::take(&opened)?),
    };
    write(state, &note)
}

/// Notes what has become of disks that were arriving. The journals decide.
pub(crate) fn sweep(context: &Context) {
    let state = &context.parts.config.state;
    let All { notes, unreadable } = match notes_in(state).all() {
        Ok(all) => all,
        Err(error) => return tracing::error!(%error, "cannot look for notes of volumes"),
    };
    for (_, error) in unreadable {
        tracing::error!(%error, "no disk arrives on a volume before this note is readable");
    }
    for (name, note) in notes {
        let guest = note.guest.clone();
        if let Err(error) = sweep_one(context, &name, note) {
            tracing::error!(guest, note = name, %error, "what is on its volume is not noted");
        }
    }
}

fn sweep_one(context: &Context, name: &str, mut note: Note) -> io::Result<()> {
    let State::Arriving {
        migration,
        generation,
    } = note.state
    else {
        return Ok(());
    };
    note.state = match fate(context, migration, (&note.guest, generation))? {
        Fate::Open => return Ok(()),
        Fate::Stay => State::Here,
        // It was allocated for the guest, and is freed.
        Fate::Go if is_gone(&note.path) => {
            return notes_in(&context.parts.config.state).remove(name);
        }
        Fate::Go => {
            let (disk, identity) = identity_of(&note.path)?;
            // Another volume has this path now.
            if !identity.is_surely(&note.identity) {
                return notes_in(&context.parts.config.state).remove(name);
            }
            note.content = Some(ContentDigests::take(&disk)?);
            State::Aborted
        }
    };
    notes_in(&context.parts.config.state).write(name, &note)
}

fn is_gone(path: &Path) -> bool {
    let found = fs::metadata(path);
    found.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// Returns the sizes of a guest's raw disks that are smaller than their volumes, by the disks'
/// names.
pub fn sizes(
    config: &HostConfig,
    guest: &GuestDescription,
) -> Result<BTreeMap<String, u64>, ApiError> {
    let mut sizes = BTreeMap::new();
    for disk in guest.disks.iter().filter(|disk| disk.is_local()) {
        let image = config.image(&disk.image);
        let Some(image) = image.filter(|it| it.format == ImageFormat::Raw && is_volume(&it.path))
        else {
            continue;
        };
        let found = identity_of(&image.path).and_then(|(volume, identity)| {
            let note = of(&config.state, &identity)?;
            Ok((volume, note))
        });
        let (volume, note) = found.map_err(|error| {
            let text = format!("cannot tell the size of disk {}: {error}", disk.name);
            failure::internal(&text)
        })?;
        let note = note.filter(|note| note.guest == guest.name && note.disk == disk.name);
        let bytes = note.and_then(|note| note.bytes);
        if let Some(bytes) = bytes.filter(|bytes| *bytes < volume.file_bytes().unwrap_or(*bytes)) {
            sizes.insert(disk.name.clone(), bytes);
        }
    }
    Ok(sizes)
}

/// Refuses a guest with a volume that another guest has left, or on which a disk has arrived only
/// in part. A volume whose content has changed since is free.
pub(crate) fn may_use(context: &Context, guest: &GuestDescription) -> Result<(), ApiError> {
    let config = &context.parts.config;
    let images = guest.written_images();
    let images = images.filter_map(|name| config.hypervisor.image(name));
    for image in images.filter(|image| is_volume(&image.path)) {
        let found = identity_of(&image.path).and_then(|(disk, identity)| {
            let Some(note) = of(&config.state, &identity)? else {
                return Ok(None);
            };
            let stands = match note.state {
                State::Here => false,
                State::Arriving { .. } => note.guest != guest.name,
                State::Left => note.guest != guest.name && note.is_unchanged(&disk)?,
                State::Aborted => note.is_unchanged(&disk)?,
            };
            Ok(stands.then_some(note))
        });
        let found = found.map_err(|error| {
            failure::internal(&format!("cannot tell whose disk is on a volume: {error}"))
                .hint("nothing is started on a volume before that note is readable or removed")
        })?;
        if let Some(note) = found {
            return Err(in_the_way(&config.state, guest, &note));
        }
    }
    Ok(())
}

fn in_the_way(state: &Path, guest: &GuestDescription, note: &Note) -> ApiError {
    let (path, owner) = (note.path.display(), &note.guest);
    let what = match note.state {
        State::Left | State::Here => format!("the disk of {owner}, which moved away"),
        State::Arriving { .. } => format!("the disk of {owner}, which arrives"),
        State::Aborted => format!("a part of the disk of {owner}, whose move was aborted"),
    };
    let text = format!("{} may not run here: {path} has {what}", guest.name);
    let file = notes_in(state).path(&name_of(&note.path));
    ApiError::new(ErrorCode::GuestElsewhere, text).hint(format!(
        "write this guest's own image to the volume; or if that content is this guest's, remove {}",
        file.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_storage::disk::Disk as _;

    #[test]
    fn the_user_of_qemu_needs_both_permissions() {
        let brw = 0o060_660;
        assert!(has_access((brw, 0, 6), 0, &[]));
        assert!(has_access((brw, 0, 6), 1000, &[100, 6]));
        assert!(!has_access((brw, 0, 6), 1000, &[100]));
        assert!(has_access((brw, 1000, 6), 1000, &[]));
        // The owner's own permissions count, whatever the group may do.
        assert!(!has_access((0o060_460, 1000, 6), 1000, &[6]));
        assert!(has_access((0o060_666, 0, 0), 1000, &[100]));
        assert!(!has_access((0o060_664, 0, 0), 1000, &[100]));
    }

    #[test]
    fn sizes_that_look_the_same_are_shown_in_bytes() {
        assert_eq!(exact(2 << 30, 1 << 30), show_bytes(2 << 30));
        let shown = exact((4 << 30) + 512, 4 << 30);
        assert!(shown.contains("4294967808 bytes"), "{shown}");
    }

    /// A volume is a file here: its identity is not certain, as that of a device is.
    fn note(path: &Path, guest: &str, state: State) -> Note {
        let (disk, identity) = identity_of(path).unwrap();
        Note {
            guest: guest.to_owned(),
            disk: "vda".to_owned(),
            path: path.to_owned(),
            identity,
            bytes: Some(disk.size_bytes()),
            state,
            content: Some(ContentDigests::take(&disk).unwrap()),
        }
    }

    #[test]
    fn a_note_is_of_one_volume_and_of_its_content() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path();
        let path = state.join("volume");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        let arriving = State::Arriving {
            migration: MigrationId([7; 8]),
            generation: 3,
        };
        for is in [arriving, State::Here, State::Left, State::Aborted] {
            write(state, &note(&path, "web-7", is)).unwrap();
            let read = notes_in(state).read(&name_of(&path)).unwrap();
            assert_eq!((read.state, &*read.guest), (is, "web-7"));
            let (disk, identity) = identity_of(&path).unwrap();
            assert!(read.is_unchanged(&disk).unwrap());
            // A file is never certain to be the volume of a note.
            assert!(of(state, &identity).unwrap().is_none());
        }
        let left = notes_in(state).read(&name_of(&path)).unwrap();
        fs::write(&path, vec![8; 1 << 20]).unwrap();
        let (disk, identity) = identity_of(&path).unwrap();
        assert!(!left.is_unchanged(&disk).unwrap());
        let unknown = Note {
            content: None,
            ..left
        };
        assert!(!unknown.is_unchanged(&disk).unwrap());
        // An unreadable note may be that of any volume.
        fs::write(notes_in(state).path("0123"), "{").unwrap();
        let why = of(state, &identity).unwrap_err().to_string();
        assert!(why.contains("0123.note"), "{why}");
        assert_ne!(name_of(&path), name_of(state));
    }
}
