//! The files of a guest that do not move with it. Both hosts must have identical copies or share
//! them. The source locks its files and sends their digests. The destination checks for the locks
//! and compares the digests.

use crate::host::base_images;
use longhaul_hypervisor::config::{HostConfig, ImageFormat};
pub(crate) use longhaul_protocol::files::Staying;
use longhaul_protocol::files::{FileKind, staying};
use longhaul_protocol::guest::GuestDescription;
use longhaul_storage::disk::qcow2::{self, Qcow2Error};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Limit on the length of a chain of backing files.
const BACKING_MAX: u8 = 4;

/// A file as this host has it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) staying: Staying,
    pub(crate) path: PathBuf,
    /// The format of an image. None for other files.
    pub(crate) format: Option<String>,
    /// Whether its backing file is an image of the description, and counts by itself.
    pub(crate) is_overlay: bool,
}

/// Returns all files that a guest's description names and that do not move, with their paths here.
/// For a name that this host does not know, returns the file without a path.
pub(crate) fn of_guest(
    config: &HostConfig,
    guest: &GuestDescription,
) -> Vec<Result<Place, Staying>> {
    let mut places = Vec::new();
    let stays = |file: &Staying| {
        // A file of the firmware's variables that no other host sees moves along.
        let image = config.image(&file.name);
        guest.variables() != Some(&file.name) || !image.is_some_and(|image| image.local)
    };
    for staying in staying(guest).into_iter().filter(stays) {
        let kernel = || config.kernels.get(&staying.name);
        let image = config.image(&staying.name);
        let image = image.filter(|_| staying.kind == FileKind::Image);
        let path = match staying.kind {
            FileKind::Image => image.as_ref().map(|image| &image.path),
            FileKind::Firmware => config.firmware.get(&staying.name),
            FileKind::Kernel => kernel().map(|files| &files.kernel),
            FileKind::Initrd | FileKind::Backing(_) => None,
        };
        let path = path.cloned();
        let initrd = kernel().filter(|_| staying.kind == FileKind::Kernel);
        let initrd = initrd.and_then(|files| files.initrd.clone());
        let initrd = initrd.map(|path| Place {
            staying: Staying {
                kind: FileKind::Initrd,
                ..staying.clone()
            },
            path,
            format: None,
            is_overlay: false,
        });
        let format = image.map(|image| match image.format {
            ImageFormat::Raw => "raw".to_owned(),
            ImageFormat::Qcow2 => "qcow2".to_owned(),
        });
        let disk = guest.disk_of(&staying.name);
        let disk = disk.filter(|_| staying.kind == FileKind::Image);
        let is_overlay = disk.is_some_and(|disk| guest.backing(&disk.name).is_some());
        places.push(match path {
            Some(path) => Ok(Place {
                staying,
                path,
                format,
                is_overlay,
            }),
            None => Err(staying),
        });
        places.extend(initrd.map(Ok));
    }
    places
}

/// Returns the backing file that an image's header names, and that QEMU opens by that name.
pub(crate) fn stands_on(place: &Place) -> Result<Option<Place>, String> {
    if place.is_overlay {
        return Ok(None);
    }
    let number = match (place.staying.kind, place.format.as_deref()) {
        (FileKind::Image, Some("qcow2")) => 1,
        (FileKind::Backing(number), format) if format != Some("raw") => number.saturating_add(1),
        _ => return Ok(None),
    };
    let head = base_images::head(&place.path).map_err(|error| error.to_string())?;
    let backing = match qcow2::read(&head) {
        Ok(head) => head.backing,
        // The content of the image is in another file.
        Err(error @ Qcow2Error::DataFile) => return Err(error.to_string()),
        // QEMU reports an image that is invalid.
        Err(_) => None,
    };
    let Some(backing) = backing else {
        return Ok(None);
    };
    let name = &backing.name;
    if name
        .split('/')
        .next()
        .is_some_and(|first| first.contains(':'))
    {
        return Err(format!("it stands on {name:?}, which is no path of a file"));
    }
    if number > BACKING_MAX {
        return Err(format!("it stands on more than {BACKING_MAX} others"));
    }
    let folder = place.path.parent().unwrap_or(Path::new("/"));
    Ok(Some(Place {
        staying: Staying {
            kind: FileKind::Backing(number),
            read_only: true,
            ..place.staying.clone()
        },
        path: folder.join(name),
        format: backing.format,
        is_overlay: false,
    }))
}

/// Opens a file of any type for reading, without blocking.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(nix::libc::O_NONBLOCK);
    options.open(path)
}

/// Returns whether a file can be an image.
pub(crate) fn is_file_or_volume(about: &Metadata) -> bool {
    about.is_file() || about.file_type().is_block_device()
}
