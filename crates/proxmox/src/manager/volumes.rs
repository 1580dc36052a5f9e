//! Volumes of an arriving guest: their places here, and those that Proxmox VE allocates for it.

use super::arrival::{Expected, text};
use super::{CHANGE_TIMEOUT, Handoff, POLL, Proxmox, lock};
use crate::accept;
use crate::device::{Content, Drive, is_state, state_bytes};
use crate::names::{self, VmId, VolumeName};
use crate::node;
use crate::notes::{Note, Role, Volume};
use crate::storage::{Storage, Storages, format_of};
use longhaul_hypervisor::config::ImageFormat;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::task::block_in_place;

/// The largest number of volumes of one guest in a folder that are looked at for a free name.
const VOLUMES_MAX: u32 = 1000;

/// The intervals between attempts to free volumes: the first and the longest one.
const FREE_INTERVALS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(60)];

/// The time limit for the path of a new volume to appear.
const APPEARS: Duration = Duration::from_secs(20);

/// A volume that is to be allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewVolume {
    pub(super) storage: String,
    /// Its name there, such as `101/vm-101-disk-0.raw`.
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) format: ImageFormat,
    pub(super) bytes: u64,
}

impl NewVolume {
    /// As Proxmox VE's commands name it.
    fn id(&self) -> String {
        format!("{}:{}", self.storage, self.name)
    }
}

impl Expected {
    /// Returns whether a path is to be that of a volume of the guest. Two storages may be on one
    /// volume group.
    fn has(&self, path: &Path) -> bool {
        let states = self.states.values().map(|state| &state.path);
        let mut paths = self
            .places
            .values()
            .map(|volume| &volume.path)
            .chain(states);
        paths.any(|it| it == path)
    }
}

impl Proxmox {
    /// Returns the place of a volume here: its storage, its name there, and its path.
    pub(super) fn place(
        &self,
        (volume, id, is_cloud_init): (&VolumeName, VmId, bool),
        storages: &Storages,
        (node, expected): (&str, &Expected),
    ) -> Result<(String, String, Volume), (String, String)> {
        let from = &volume.storage;
        let own = self.config.proxmox.storages.get(from).unwrap_or(from);
        let hint = || {
            let fit = storages.all().filter(|it| it.refuses(node).is_none());
            let fit: Vec<&str> = fit.map(|it| it.id.as_str()).collect();
            format!(
                "in the configuration there: [proxmox.storages] {from:?} = \"STORAGE\" (there are: \
                 {})",
                fit.join(", ")
            )
        };
        let Some(storage) = storages.get(own) else {
            let text = format!("it has no storage {own}, for volumes of {from}");
            return Err((text, hint()));
        };
        if let Some(why) = storage.refuses(node) {
            return Err((format!("{why} (for volumes of {from})"), hint()));
        }
        let ending = names::ending(volume.format);
        let format = volume.format;
        if storage.allocates() && format != ImageFormat::Raw {
            let text = format!(
                "storage {own} has raw volumes only, and {} is a qcow2 file on {from}",
                volume.drive
            );
            return Err((text, hint()));
        }
        let named = |stem: &str| match storage.allocates() {
            true => stem.to_owned(),
            false => format!("{id}/{stem}.{ending}"),
        };
        if is_cloud_init {
            // Proxmox VE knows it by its name.
            let file = named(&format!("vm-{id}-cloudinit"));
            if let Some(path) = storage.path(&file) {
                return Ok((own.clone(), file, Volume { path, format }));
            }
        }
        let there = match storage.allocates() {
            true => block_in_place(|| {
                let listing = node::volumes(own, id);
                tokio::runtime::Handle::current().block_on(listing)
            })
            .map_err(|error| (error.to_string(), "pvesm status".to_owned()))?,
            false => Vec::new(),
        };
        let free = (0..VOLUMES_MAX).find_map(|number| {
            let stem = format!("vm-{id}-disk-{number}");
            let file = named(&stem);
            let path = storage.path(&file)?;
            // No volume of another format has the number.
            let formats = match storage.allocates() {
                true => vec![file.clone()],
                false => ["raw", "qcow2", "vmdk"]
                    .map(|ending| format!("{id}/{stem}.{ending}"))
                    .into(),
            };
            let is_free = formats.iter().all(|file| {
                let path = storage.path(file);
                path.is_none_or(|path| fs::symlink_metadata(&path).is_err() && !expected.has(&path))
                    && !there.contains(&format!("{own}:{file}"))
            });
            is_free.then_some((file, path))
        });
        let Some((file, path)) = free else {
            return Err((
                format!("storage {own} has no free name for a volume"),
                hint(),
            ));
        };
        Ok((own.clone(), file, Volume { path, format }))
    }

    /// Finds places for the volumes whose content QEMU has in its stream.
    pub(super) fn place_states(
        &self,
        handoff: &Handoff,
        expected: &mut Expected,
    ) -> Result<(), String> {
        let config = accept::read_foreign(&handoff.config).map_err(text)?;
        let storages = node::storages().map_err(text)?;
        let node = node::name().map_err(text)?;
        for (key, value) in config.settings().filter(|(key, _)| is_state(key)) {
            let read = Drive::read(value);
            let content = read.as_ref().map(|drive| drive.content);
            let (Some(drive), Some(Content::Volume { storage, name })) = (&read, content) else {
                return Err(format!("`{key}` is no volume"));
            };
            let own = self.config.proxmox.storages.get(storage);
            let own = storages.get(own.map_or(storage, String::as_str));
            let format = match own.is_some_and(Storage::allocates) {
                // QEMU writes the content: any format will do.
                true => Some(ImageFormat::Raw),
                false => format_of(name),
            };
            let volume = VolumeName {
                storage: storage.to_owned(),
                id: handoff.vmid,
                drive: key.to_owned(),
                format: format.ok_or_else(|| format!("`{key}` has no known format"))?,
            };
            let wanted = (&volume, expected.id, false);
            let place = self.place(wanted, &storages, (&node, expected));
            let (storage, name, at) =
                place.map_err(|(why, hint)| format!("{why} (hint: {hint})"))?;
            let new = NewVolume {
                storage,
                name,
                path: at.path,
                format: volume.format,
                bytes: state_bytes(key, drive),
            };
            expected.states.insert(key.to_owned(), new);
        }
        Ok(())
    }

    /// Allocates the volume of a disk of an arriving guest. Returns whether it is one of Proxmox
    /// VE's.
    pub(super) async fn allocate_disk(
        &self,
        guest: &str,
        image: &str,
        bytes: u64,
    ) -> Result<bool, String> {
        let expected = lock(&self.shared.expected).get(guest).cloned();
        let Some(expected) = expected else {
            return Ok(false);
        };
        let Some(new) = expected.new.get(image) else {
            return Ok(false);
        };
        let note = self.arriving(guest, &expected).map_err(text)?;
        self.notes.write(guest, &note).map_err(text)?;
        let new = NewVolume {
            bytes,
            ..new.clone()
        };
        self.allocate(guest, expected.id, &new).await?;
        let size = size_of(&new.path)
            .await
            .map_err(|error| format!("{}: {error}", new.id()))?;
        match size == bytes {
            true => Ok(true),
            // The guest would see another disk.
            false => Err(format!(
                "{} has {size} bytes, and the disk has {bytes} (at its source: qm disk resize to \
                 what the storage can have)",
                new.id()
            )),
        }
    }

    /// Allocates a volume of an arriving guest. A note is durable before.
    pub(super) async fn allocate(
        &self,
        guest: &str,
        id: VmId,
        new: &NewVolume,
    ) -> Result<(), String> {
        let volume = new.id();
        let there = node::volumes(&new.storage, id).await.map_err(text)?;
        if there.contains(&volume) {
            return Err(format!("volume {volume} was made meanwhile: try again"));
        }
        let noted = self.notes.change(guest, |note| {
            note.allocated.insert(volume.clone());
        });
        noted.map_err(text)?;
        let file = new.name.rsplit('/').next().unwrap_or(&new.name);
        let (number, kib) = (id.to_string(), new.bytes.div_ceil(1024).to_string());
        let format = names::ending(new.format);
        let arguments = [
            "alloc",
            &new.storage,
            &number,
            file,
            &kib,
            "--format",
            format,
        ];
        let said = node::run("pvesm", &arguments, CHANGE_TIMEOUT).await;
        let said = said.map_err(text)?;
        match said.contains(&format!("'{volume}'")) {
            true => Ok(()),
            false => Err(format!(
                "pvesm alloc has not made {volume}, but says {said:?}"
            )),
        }
    }

    /// Frees the volumes that were allocated for a guest that does not come, and ends the note
    /// about it.
    pub(super) async fn free_volumes(&self, guest: &str, note: &Note) -> Result<(), String> {
        self.free_all(guest, note).await?;
        match note.before {
            Some(_) => {
                let noted = self.notes.change(guest, |note| {
                    note.role = Role::Left;
                    note.before = None;
                });
                noted.map_err(text)
            }
            None => self.notes.forget(guest).map_err(text),
        }
    }

    /// Frees what was allocated for a guest whose QEMU was not started.
    pub(super) async fn free_unlaunched(&self, guest: &str) -> Result<(), String> {
        let note = self.notes.read(guest).map_err(text)?;
        let waits = |note: &Note| note.role == Role::Arrives && !note.allocated.is_empty();
        let Some(note) = note.filter(waits) else {
            return Ok(());
        };
        match node::running(note.id).map_err(text)? {
            None => self.end_arriving(guest).await,
            Some(_) => Ok(()),
        }
    }

    /// Frees what could not be freed at once. Continues until that is done. Meanwhile no other
    /// attempt brings the guest here.
    pub(super) fn free_later(&self, guest: &str) {
        if !lock(&self.shared.freeing).insert(guest.to_owned()) {
            return;
        }
        let (manager, guest) = (self.clone(), guest.to_owned());
        tokio::spawn(async move {
            manager.free_again(&guest).await;
            lock(&manager.shared.freeing).remove(&guest);
        });
    }

    async fn free_again(&self, guest: &str) {
        let [mut interval, longest] = FREE_INTERVALS;
        loop {
            tokio::time::sleep(interval).await;
            interval = (interval * 2).min(longest);
            let note = match self.notes.read(guest) {
                Ok(note) => note.filter(|note| note.role == Role::Arrives),
                Err(error) => return tracing::error!(guest, %error, "its note"),
            };
            let Some(note) = note.filter(|note| matches!(node::running(note.id), Ok(None))) else {
                return;
            };
            match self.free_volumes(guest, &note).await {
                Ok(()) => return,
                Err(error) => tracing::warn!(guest, error, "its volumes are not freed yet"),
            }
        }
    }

    async fn free_all(&self, guest: &str, note: &Note) -> Result<(), String> {
        for volume in &note.allocated {
            let storage = volume.split(':').next().unwrap_or_default();
            // It may never have been made.
            let there = node::volumes(storage, note.id).await.map_err(text)?;
            if there.contains(volume) {
                let freed = node::run("pvesm", &["free", volume], CHANGE_TIMEOUT).await;
                freed.map_err(text)?;
            }
            let noted = self.notes.change(guest, |note| {
                note.allocated.remove(volume);
            });
            noted.map_err(text)?;
        }
        Ok(())
    }
}

/// Returns why a volume cannot have the size that the disk has at the source, if one cannot.
pub(super) fn misfit(handoff: &Handoff, expected: &Expected) -> Option<String> {
    let storages = match node::storages() {
        Ok(storages) => storages,
        Err(error) => return Some(error.to_string()),
    };
    expected.new.iter().find_map(|(image, new)| {
        let drive = VolumeName::read(image)?.drive;
        let bytes = *handoff.sizes.get(&drive)?;
        let unit = unit_of(storages.get(&new.storage)?)?;
        (bytes % unit != 0).then(|| {
            let (storage, mib) = (&new.storage, unit >> 20);
            let next = bytes.div_ceil(unit) * mib;
            format!(
                "{drive} has {bytes} bytes, and volumes of storage {storage} have multiples of \
                 {mib} MiB (at its source: qm disk resize {} {drive} {next}M)",
                handoff.vmid
            )
        })
    })
}

/// Returns what the sizes of a storage's volumes are multiples of, in bytes.
fn unit_of(storage: &Storage) -> Option<u64> {
    let Some(group) = storage.group() else {
        return storage.unit();
    };
    let asked =
        block_in_place(|| tokio::runtime::Handle::current().block_on(node::extent_bytes(group)));
    match asked {
        Ok(bytes) => Some(bytes),
        Err(error) => {
            // Its default.
            tracing::info!(%error, group, "the size of its extents is not known");
            storage.unit()
        }
    }
}

/// Returns the size of a volume that was just allocated. Its path may come a little later.
async fn size_of(path: &Path) -> io::Result<u64> {
    let start = Instant::now();
    loop {
        let size = || File::open(path)?.seek(SeekFrom::End(0));
        match block_in_place(size) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && start.elapsed() < APPEARS => {
                tokio::time::sleep(POLL).await;
            }
            size => return size,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::arrival::tests::manager;
    use super::*;

    #[test]
    fn a_volume_gets_a_free_name() {
        let folder = tempfile::tempdir().unwrap();
        let manager = manager(folder.path());
        let volume = VolumeName {
            storage: "fast".to_owned(),
            id: 100,
            drive: "scsi0".to_owned(),
            format: ImageFormat::Raw,
        };
        let vz = folder.path().join("vz");
        let text = format!("dir: tank\n\tpath {}\n", vz.display());
        let storages = Storages::read(&text);
        let images = vz.join("images/101");
        fs::create_dir_all(&images).unwrap();
        fs::write(images.join("vm-101-disk-0.qcow2"), "").unwrap();
        let place = |is_cloud_init| {
            let none = Expected::default();
            let wanted = (&volume, 101, is_cloud_init);
            let (storage, file, _) = manager.place(wanted, &storages, ("one", &none)).unwrap();
            assert_eq!(storage, "tank");
            file
        };
        assert_eq!(place(false), "101/vm-101-disk-1.raw");
        assert_eq!(place(true), "101/vm-101-cloudinit.raw");
        let none = Storages::default();
        let missing = manager.place((&volume, 101, false), &none, ("one", &Expected::default()));
        assert!(missing.unwrap_err().1.contains("[proxmox.storages]"));
    }
}
