//! Volumes of an arriving guest: their places here, and those that Proxmox VE allocates for it.

use super::arrival::{Expected, text};
use super::{CHANGE_TIMEOUT, Handoff, Proxmox};
use crate::accept;
use crate::device::{Content, Drive, is_state, state_bytes};
use crate::names::{self, VmId, VolumeName};
use crate::node;
use crate::notes::{Note, Volume};
use crate::storage::{Storages, format_of};
use longhaul_hypervisor::config::ImageFormat;
use std::fs;

/// The largest number of volumes of one guest in a folder that are looked at for a free name.
const VOLUMES_MAX: u32 = 1000;

/// A volume that is to be allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewVolume {
    pub(super) storage: String,
    /// Its name there, such as `101/vm-101-disk-0.raw`.
    pub(super) name: String,
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
    /// Returns whether a volume of a storage is to be one of the guest's.
    fn has(&self, volume: &(String, String)) -> bool {
        let (storage, name) = volume;
        let mut states = self.states.values();
        self.volumes.values().any(|it| it == volume)
            || states.any(|it| it.storage == *storage && it.name == *name)
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
        if is_cloud_init {
            // Proxmox VE knows it by its name.
            let file = format!("{id}/vm-{id}-cloudinit.{ending}");
            if let Some(path) = storage.path(&file) {
                return Ok((own.clone(), file, Volume { path, format }));
            }
        }
        let free = (0..VOLUMES_MAX).find_map(|number| {
            let stem = format!("vm-{id}-disk-{number}");
            let file = format!("{id}/{stem}.{ending}");
            let path = storage.path(&file)?;
            // No volume of another format has the number.
            let formats = ["raw", "qcow2", "vmdk"].map(|ending| format!("{id}/{stem}.{ending}"));
            let is_free = formats.iter().all(|file| {
                let path = storage.path(file);
                let named = (own.clone(), file.clone());
                path.is_none_or(|path| fs::symlink_metadata(path).is_err()) && !expected.has(&named)
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
            let volume = VolumeName {
                storage: storage.to_owned(),
                id: handoff.vmid,
                drive: key.to_owned(),
                format: format_of(name).ok_or_else(|| format!("`{key}` has no known format"))?,
            };
            let wanted = (&volume, expected.id, false);
            let place = self.place(wanted, &storages, (&node, expected));
            let (storage, name, _) =
                place.map_err(|(why, hint)| format!("{why} (hint: {hint})"))?;
            let new = NewVolume {
                storage,
                name,
                format: volume.format,
                bytes: state_bytes(key, drive),
            };
            expected.states.insert(key.to_owned(), new);
        }
        Ok(())
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

    /// Frees the volumes that were allocated for a guest that does not come.
    pub(super) async fn free(&self, guest: &str, note: &Note) -> Result<(), String> {
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
