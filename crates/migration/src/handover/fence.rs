//! Fencing: keeps a guest that left from being started here, under its own name or as another guest
//! with its disks.
//!
//! The rights decide by a guest's name. In addition, every guest that leaves has a *mark*, which
//! lists its disks by their paths on this host. A mark is written before anything moves. It applies
//! whenever the right is not here, so no mark is ever missing.

use crate::context::{Context, Holder};
use crate::host::atomic_file;
use crate::host::hooks::Step;
use crate::status::failure;
use crate::status::registry::Taken;
use longhaul_api::{ApiError, Check, ErrorCode};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::config::HostConfig;
use longhaul_protocol::guest::GuestDescription;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Limit on the size of a mark file, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// The mark of a guest that left or is leaving.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Mark {
    pub(crate) guest: String,
    /// The destination, by its name on this host.
    pub(crate) host: String,
    /// The generation of the right after the migration.
    pub(crate) generation: u64,
    /// The files and devices that the guest may write.
    pub(crate) disks: Vec<PathBuf>,
}

/// The folder of all marks.
#[derive(Debug)]
pub(crate) struct Marks {
    folder: PathBuf,
}

impl Marks {
    /// Opens the folder. Creates it if it does not exist.
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        atomic_file::remove_unfinished(folder)?;
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    /// Writes a mark durably. Replaces an older mark of the same guest.
    pub(crate) fn set(&self, mark: &Mark) -> io::Result<()> {
        let text = toml::to_string(mark).map_err(io::Error::other)?;
        atomic_file::write(&self.path(&mark.guest), text.as_bytes())
    }

    /// Removes a guest's mark.
    pub(crate) fn remove(&self, guest: &str) -> io::Result<()> {
        match fs::remove_file(self.path(guest)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Reads all marks.
    pub(crate) fn all(&self) -> io::Result<Vec<Mark>> {
        let mut marks = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "toml") {
                continue;
            }
            let mut text = String::new();
            let read = File::open(&path)?
                .take(FILE_BYTES_MAX)
                .read_to_string(&mut text);
            let mark = read.and_then(|_| toml::from_str(&text).map_err(io::Error::other));
            marks.push(mark.map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?);
        }
        Ok(marks)
    }

    /// Returns the file of a guest's mark. Guest names are validated before and fit a file name.
    fn path(&self, guest: &str) -> PathBuf {
        self.folder.join(format!("{guest}.toml"))
    }
}

/// Returns the images that a guest may write, with links resolved on this host.
pub(crate) fn disks(config: &HostConfig, guest: &GuestDescription) -> Vec<PathBuf> {
    guest
        .written_images()
        .filter_map(|name| config.images.get(name))
        .map(|image| found(&image.path))
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
        .find(|(_, disk)| disks.contains(&found(disk)) || disks.contains(disk))
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
        let sweep = || -> io::Result<()> {
            for mark in self.marks.all()? {
                let right = self.right(&mark.guest);
                if right.holder == Holder::Here && right.moving.is_none() {
                    self.marks.remove(&mark.guest)?;
                }
            }
            Ok(())
        };
        if let Err(error) = sweep() {
            tracing::warn!(%error, "marks of guests that left");
        }
    }

    /// Checks what else could start a guest here after it has left.
    pub(crate) fn starter_check(&self, guest: &Guest) -> Check {
        let name = guest.name();
        let hint = "docs/operating.md, \"Fencing\", says what a hook must do";
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
    fn marks_are_kept_replaced_and_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let marks = Marks::open(&folder.path().join("marks")).unwrap();
        marks.set(&mark("web-7", &[])).unwrap();
        let newer = mark("web-7", &["/srv/a".into()]);
        marks.set(&newer).unwrap();
        assert_eq!(marks.all().unwrap(), [newer]);
        marks.remove("web-7").unwrap();
        marks.remove("web-7").unwrap();
        assert!(marks.all().unwrap().is_empty());
        let unfinished = folder.path().join("marks/web-7.new");
        fs::write(&unfinished, "").unwrap();
        let marks = Marks::open(&folder.path().join("marks")).unwrap();
        assert!(!unfinished.exists());
        fs::write(folder.path().join("marks/web-7.toml"), "guest = 7").unwrap();
        let error = marks.all().unwrap_err().to_string();
        assert!(error.contains("web-7.toml"), "{error}");
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
