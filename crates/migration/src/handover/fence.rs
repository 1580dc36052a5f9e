//! Fencing: keeps a guest that left from being started here, under its own name or as another guest
//! with its disks.
//!
//! The rights decide by a guest's name. In addition, every guest that leaves has a *mark*, which
//! lists its disks by their paths on this host. A mark is written before anything moves. It applies
//! whenever the right is not here, so no mark is ever missing.

use crate::context::Context;
use crate::host::hooks::Step;
use crate::host::marks::Mark;
use crate::host::right::Holder;
use crate::status::failure;
use crate::status::registry::Taken;
use longhaul_api::{ApiError, Check, ErrorCode};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::config::HostConfig;
use longhaul_protocol::guest::{GuestDescription, Manager};
use longhaul_storage::disk::is_volume;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the images that a guest may write, with links resolved on this host.
pub(crate) fn disks(config: &HostConfig, guest: &GuestDescription) -> Vec<PathBuf> {
    guest
        .written_images()
        .filter_map(|name| config.image(name))
        .map(|image| match is_volume(&image.path) {
            // What the links to volumes lead to differs from boot to boot.
            true => image.path,
            false => found(&image.path),
        })
        .collect()
}

fn found(path: &Path) -> PathBuf {
    // A guest cannot be started from a missing image either.
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns the first of the disks that belongs to a marked guest of another name.
fn taken<'a>(marks: &'a [Mark], guest: &str, disks: &'a [PathBuf]) -> Option<(&'a Mark, &'a Path)> {
    let others = marks.iter().filter(|mark| mark.guest != guest);
    others
        .flat_map(|mark| mark.disks.iter().map(move |disk| (mark, disk)))
        .find(|(_, disk)| {
            let mut disks = disks.iter();
            disks.any(|own| own == *disk || found(own) == found(disk))
        })
        .map(|(mark, disk)| (mark, disk.as_path()))
}

impl Context {
    /// Marks a guest that is about to leave.
    pub(crate) fn mark(
        &self,
        guest: &GuestDescription,
        host: &str,
        next: u64,
    ) -> Result<(), ApiError> {
        let mark = Mark {
            guest: guest.name.clone(),
            host: host.to_owned(),
            generation: next,
            disks: disks(&self.parts.config.hypervisor, guest),
        };
        self.marks.set(&mark).map_err(|error| {
            failure::internal(&format!("cannot mark {} as leaving: {error}", guest.name))
        })
    }

    /// Removes the mark of a guest that is here again. A mark that cannot be removed does no harm.
    pub(crate) fn unmark(&self, guest: &str) {
        if let Err(error) = self.marks.remove(guest) {
            tracing::warn!(guest, %error, "its mark as one that left stays");
        }
    }

    /// Removes the marks of guests that belong to this host again.
    pub(crate) fn sweep_marks(&self) {
        let is_here = |mark: &Mark| {
            let right = self.right(&mark.guest);
            right.holder == Holder::Here && right.moving.is_none()
        };
        if let Err(error) = self.marks.remove_if(is_here) {
            tracing::warn!(%error, "marks of guests that left");
        }
    }

    /// Checks what else could start a guest here after it has left.
    pub(crate) fn starter_check(&self, guest: &Guest) -> Check {
        let name = guest.name();
        let hint = "docs/operating.md, \"Fencing\", says what a hook must do";
        if let Some(by) = guest.owner().manager() {
            let text = match by {
                Manager::Libvirt => format!("{by} forgets {name} here when it has moved"),
                Manager::Proxmox => {
                    format!("{by} keeps {name} stopped and locked here when it has moved")
                }
            };
            return Check::ok("fencing", text);
        }
        let starter = match self.parts.guests.starter(guest) {
            Ok(Some(starter)) => starter,
            Ok(None) => return Check::warn("fencing", format!("{name} has no process"), hint),
            Err(error) => {
                let text = format!("cannot tell what started {name} here: {error}");
                return Check::warn("fencing", text, hint);
            }
        };
        let has_hook = self.parts.config.hooks.has(Step::Released);
        match starter.fence_hint() {
            None => Check::ok(
                "fencing",
                format!("started by {starter}, which will not start it here again"),
            ),
            Some(_) if has_hook => Check::ok(
                "fencing",
                format!("started by {starter}; the hook `released` keeps that from doing it again"),
            ),
            Some(how) => Check::warn(
                "fencing",
                format!(
                    "started by {starter}, which could start a second copy of {name} here after \
                     it has moved: there is no hook `released` that prevents it"
                ),
                format!("what such a hook must do: {how}; docs/operating.md, \"Fencing\""),
            ),
        }
    }
}

impl Context {
    /// Refuses a guest whose disks belong to another guest that has left or is moving.
    pub(crate) fn may_use_disks(&self, guest: &GuestDescription) -> Result<(), ApiError> {
        let marks = self.marks.all().map_err(|error| {
            failure::internal(&format!("cannot tell which disks moved away: {error}"))
                .hint("nothing is started before that file is corrected or removed")
        })?;
        let disks = disks(&self.parts.config.hypervisor, guest);
        let away: Vec<Mark> = marks
            .into_iter()
            .filter(|mark| {
                let leaves = matches!(self.registry.taken(&mark.guest), Some(Taken::Moving(..)));
                leaves || self.right(&mark.guest).holder != Holder::Here
            })
            .collect();
        match taken(&away, &guest.name, &disks) {
            None => Ok(()),
            Some((mark, disk)) => {
                let Mark {
                    guest: owner,
                    host,
                    generation,
                    ..
                } = mark;
                let text = format!(
                    "{} may not run here: its disk {} belongs to {owner}, which was handed to \
                     {host} (generation {generation})",
                    guest.name,
                    disk.display()
                );
                Err(ApiError::new(ErrorCode::GuestElsewhere, text).hint(format!(
                    "two guests that write to one disk destroy it; `longhaul guests` says where \
                     {owner} is"
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(guest: &str, disks: &[PathBuf]) -> Mark {
        Mark {
            guest: guest.to_owned(),
            host: "paris-2".to_owned(),
            generation: 5,
            disks: disks.to_vec(),
        }
    }

    #[test]
    fn a_disk_is_known_under_every_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk.raw");
        let link = folder.path().join("link.raw");
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let image = |path: &Path| format!("path = {path:?}\nformat = \"raw\"\n");
        let config: HostConfig = toml::from_str(&format!(
            "[qemu.emulators]\n[images.first]\n{}[images.second]\n{}[images.gone]\n{}",
            image(&file),
            image(&link),
            image(&folder.path().join("gone.raw")),
        ))
        .unwrap();
        let guest = |name: &str, image: &str, read_only: bool| -> GuestDescription {
            toml::from_str(&format!(
                "name = {name:?}\nmachine = \"pc-q35-7.2\"\ncpu = \"qemu64\"\nvcpus = 1\n\
                 memory_mib = 64\n[[disks]]\nname = \"vda\"\nimage = {image:?}\nshared = true\n\
                 read_only = {read_only}\n"
            ))
            .unwrap()
        };
        let left = [mark(
            "web-7",
            &disks(&config, &guest("web-7", "first", false)),
        )];
        let taken_by = |name: &str, image: &str, read_only: bool| {
            let disks = disks(&config, &guest(name, image, read_only));
            taken(&left, name, &disks).map(|(mark, _)| mark.guest.clone())
        };
        let owner = Some("web-7".to_owned());
        assert_eq!(taken_by("copy", "first", false), owner);
        assert_eq!(taken_by("copy", "second", false), owner);
        assert_eq!(taken_by("copy", "gone", false), None);
        assert_eq!(taken_by("copy", "unknown", false), None);
        // A guest that only reads does no harm. The rights decide about the guest's own name.
        assert_eq!(taken_by("copy", "second", true), None);
        assert_eq!(taken_by("web-7", "first", false), None);
    }
}
