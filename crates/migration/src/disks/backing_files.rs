//! Backing files below disks that move. The description has each of them as a read-only disk, which
//! moves only if the destination lacks it. The overlay keeps the name in its header, and no host
//! opens a file by that name.

use crate::disks::base_images::Seen;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::config::Image;
use longhaul_protocol::guest::{Disk, GuestDescription};
use longhaul_storage::disk::qcow2;
use std::collections::BTreeMap;

/// Checks that the image of a disk and its QEMU agree with its description on its backing files.
pub(crate) fn check(
    images: &BTreeMap<String, Image>,
    guest: &GuestDescription,
    disk: &Disk,
    says: Option<&qcow2::Backing>,
    (seen, pid): (&Seen, i32),
) -> Result<(), ApiError> {
    let name = &disk.name;
    is_overlay(guest, disk, says)?;
    let seen = seen
        .as_ref()
        .map_err(|why| refused(format!("disk {name}: {why}")))?;
    let mut seen = seen.iter();
    let below = |disk: &&Disk| guest.backing(&disk.name);
    for level in std::iter::successors(guest.backing(name), below) {
        let other = |has: String| {
            let text = format!(
                "disk {name}: it was an overlay of image {}, and its QEMU has it on {has} now",
                level.image
            );
            let hint = format!(
                "attach to {} again (longhaul guests detach, then attach); if Longhaul launched \
                 it, shut it down and start it again",
                guest.name
            );
            refused(text).hint(hint)
        };
        let Some(backing) = seen.next() else {
            return Err(other("nothing".to_owned()));
        };
        let image = images.get(&level.image).ok_or_else(|| {
            refused(format!(
                "this host does not know the image {} any more",
                level.image
            ))
            .hint("name it under [images] in the agent's configuration")
        })?;
        let same = backing.is_in(&image.path, pid);
        let same = same.map_err(|error| refused(format!("disk {name}: {error}")))?;
        if !same {
            let file = backing.file.as_deref().unwrap_or(&backing.driver);
            return Err(other(format!("{file:?}")));
        }
    }
    Ok(())
}

/// Checks that an image is an overlay if it is described as one, and otherwise is none.
pub(crate) fn is_overlay(
    guest: &GuestDescription,
    disk: &Disk,
    says: Option<&qcow2::Backing>,
) -> Result<(), ApiError> {
    let (name, image) = (&disk.name, &disk.image);
    let (text, hint) = match (guest.backing(name), says) {
        (Some(_), Some(_)) | (None, None) => return Ok(()),
        (Some(backing), None) => (
            format!(
                "disk {name}: its QEMU has its image {image} on image {}, and the image names no \
                 backing file",
                backing.image
            ),
            "with the guest shut down: qemu-img rebase -u -F FORMAT -b BACKING IMAGE",
        ),
        (None, Some(says)) => (
            format!(
                "disk {name}: its image {image} is an overlay of {:?}, which the guest's \
                 description does not have",
                says.name
            ),
            "make one plain image of it: qemu-img convert -O qcow2 OLD NEW",
        ),
    };
    Err(refused(text).hint(hint))
}

fn refused(text: String) -> ApiError {
    ApiError::new(ErrorCode::Refused, text)
}
