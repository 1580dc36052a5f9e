//! Reasons of a guest's disks that prevent a move now, even if the disks stay: a running job, an
//! export by QEMU itself, and a disk whose image is not the described one.

use crate::context::Context;
use crate::disks::exports;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::disk::{self, Drive, busy, drives};
use longhaul_hypervisor::observe::Blocker;
use longhaul_hypervisor::qmp::{Qmp, QmpError};
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Returns these reasons.
pub(crate) async fn find(
    context: &Context,
    guest: &Guest,
    qmp: &Qmp,
) -> Result<Vec<Blocker>, QmpError> {
    let (jobs, drives, exports) = tokio::try_join!(busy(qmp), drives(qmp), disk::exports(qmp))?;
    let mut found = jobs;
    found.extend(exports.into_iter().map(|export| {
        Blocker {
        text: format!(
            "QEMU exports the guest's disks: export {} ({}) of node {}, which a backup may read",
            export.id, export.kind, export.node
        ),
        hint: "let its client end, then remove it (QMP `block-export-del`), before the guest moves"
            .to_owned(),
    }
    }));
    let images = context.parts.config.hypervisor.all_images();
    let pid = guest.pid().unwrap_or(-1);
    let description = guest.description();
    // Backing files have a check of their own.
    let disks = description.disks.iter();
    for disk in disks.filter(|disk| !description.is_backing(&disk.name)) {
        let Some(image) = images.get(&disk.image) else {
            // Refused elsewhere, by name.
            continue;
        };
        let device = exports::named_device(guest, &disk.name);
        if let Some(file) = other_file(&drives, device.as_deref(), &image.path, pid) {
            found.push(Blocker {
                text: format!(
                    "disk {} stands on {file} now, and not on its image {}: a snapshot or a mirror \
                     was made while the guest ran",
                    disk.name,
                    image.path.display()
                ),
                hint: "commit the overlay (QMP `block-commit`), or shut the guest down and \
                       describe it with the image that it has now"
                    .to_owned(),
            });
        }
    }
    Ok(found)
}

/// Returns the file that a disk uses instead of its image, if it does. A device without an id is
/// known only by its image.
fn other_file(drives: &[Drive], device: Option<&str>, image: &Path, pid: i32) -> Option<String> {
    let Some(device) = device else {
        let known = image.exists() && !drives.iter().any(|drive| drive.has(image, pid));
        return known.then(|| "another image".to_owned());
    };
    let drive = drives.iter().find(|drive| drive.device == device)?;
    let file = drive.inserted.as_ref()?.file.as_deref()?;
    are_two(&drive.seen_file(pid)?, image).then(|| file.display().to_string())
}

/// Returns whether both exist and are different files or devices. A file that does not exist is
/// handled elsewhere.
fn are_two(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let found = fs::metadata(path).ok()?;
        let is_device = found.file_type().is_block_device();
        Some(match is_device {
            true => (true, found.rdev(), 0),
            false => (false, found.dev(), found.ino()),
        })
    };
    match (identity(one), identity(other)) {
        (Some(one), Some(other)) => one != other,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_by_two_names_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other, link] = ["one", "other", "link"].map(|name| folder.path().join(name));
        fs::write(&one, "a").unwrap();
        fs::write(&other, "a").unwrap();
        std::os::unix::fs::symlink(&one, &link).unwrap();
        assert!(!are_two(&one, &link));
        assert!(are_two(&one, &other));
        assert!(!are_two(&one, &folder.path().join("gone")));
    }
}
