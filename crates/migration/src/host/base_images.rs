//! Base images: which one the image of a disk is an overlay of, and this host's files of them.
//!
//! ```text
//! STATE/bases/ID.raw   a base image, in the layout of crate `image`
//! ```

use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::config::{HostConfig, ImageFormat};
use longhaul_hypervisor::disk;
use longhaul_hypervisor::disk::base::Base;
use longhaul_image::{Bases, ImageId};
use longhaul_protocol::guest::GuestDescription;
use longhaul_storage::disk::qcow2::{self, Backing, HEAD_BYTES};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Returns the base images of this host.
pub fn of_host(state: &Path) -> Bases {
    Bases::new(state.join(disk::BASES))
}

/// Why an image's backing file is not a base image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unfit {
    /// The backing file is another file.
    #[error("its image stands on {0:?} (a backing file), which is no base image")]
    Other(String),
    /// The backing file would be read in another format, which may name further files.
    #[error("its image says that the base image below it is in {0}, and base images are raw")]
    Format(String),
    /// QEMU would guess the format from content, which then decides what else is opened.
    #[error("its image does not say that the base image below it is raw")]
    NoFormat,
}

impl Unfit {
    /// Returns a hint for the operator.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Other(_) => {
                "make it one plain image while the guest runs, by QMP: {\"execute\": \
                 \"block-stream\", \"arguments\": {\"job-id\": \"flatten\", \
                 \"device\": \"NODE\"}}, where NODE is the disk's format node \
                 (query-named-block-nodes; disk-NAME if Longhaul has launched the guest), and wait \
                 until query-block-jobs is empty; or with the guest shut down: \
                 qemu-img convert -O qcow2 OLD NEW; or longhaul image import, longhaul image \
                 fetch, and qemu-img rebase -u -F raw -b with the path that fetch tells"
            }
            Self::Format(_) | Self::NoFormat => {
                "with the guest shut down: qemu-img rebase -u -F raw -b BASE IMAGE"
            }
        }
    }
}

/// Returns the base image that an image's header names. The name only selects a base image. It
/// never decides which file is opened.
pub(crate) fn named(backing: &Backing) -> Result<ImageId, Unfit> {
    let path = Path::new(&backing.name);
    let id = Bases::named(path).filter(|_| path.is_absolute());
    let id = id.ok_or_else(|| Unfit::Other(backing.name.clone()))?;
    match backing.format.as_deref() {
        Some("raw") => Ok(id),
        Some(other) => Err(Unfit::Format(other.to_owned())),
        None => Err(Unfit::NoFormat),
    }
}

/// Reads the first bytes of an image, which contain its header.
pub(crate) fn head(image: &Path) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    File::open(image)?
        .take(HEAD_BYTES as u64)
        .read_to_end(&mut head)?;
    Ok(head)
}

/// Returns this host's files of the base images of a guest's disks, by disk name. An image that
/// came from another host names a path on that host.
pub fn for_launch(
    config: &HostConfig,
    guest: &GuestDescription,
) -> Result<BTreeMap<String, Base>, ApiError> {
    let bases = of_host(&config.state);
    let mut found = BTreeMap::new();
    for disk in guest.disks.iter().filter(|disk| disk.is_local()) {
        let image = config.image(&disk.image);
        let Some(image) = image.filter(|image| image.format == ImageFormat::Qcow2) else {
            continue;
        };
        // QEMU reports an image that is unreadable or invalid.
        let head = head(&image.path)
            .ok()
            .and_then(|head| qcow2::read(&head).ok());
        let backing = head.and_then(|head| head.backing);
        let Some(id) = backing.and_then(|backing| named(&backing).ok()) else {
            continue;
        };
        let whole = bases.whole(id).map_err(|error| {
            let text = format!("disk {}: {error}", disk.name);
            ApiError::new(ErrorCode::Internal, text)
        })?;
        if whole.is_none() {
            return Err(not_here(&disk.name, id));
        }
        found.insert(disk.name.clone(), Base::File(bases.path(id)));
    }
    Ok(found)
}

/// Returns the error for a base image that this host does not have completely.
pub(crate) fn not_here(disk: &str, id: ImageId) -> ApiError {
    let short = id.short();
    let text = format!(
        "disk {disk}: its image stands on base image {short}, which this host does not have as a \
         whole"
    );
    ApiError::new(ErrorCode::Refused, text).hint(format!("longhaul image fetch {short}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_image::Digest;

    #[test]
    fn an_image_says_which_base_image_it_stands_on_and_nothing_else() {
        let id = ImageId(Digest::of(b"base"));
        let of = |name: &str, format: Option<&str>| {
            named(&Backing {
                name: name.to_owned(),
                format: format.map(str::to_owned),
            })
        };
        let path = format!("/anywhere/{id}.raw");
        assert_eq!(of(&path, Some("raw")), Ok(id));
        assert_eq!(of(&path, None), Err(Unfit::NoFormat));
        let qcow2 = of(&path, Some("qcow2")).unwrap_err();
        assert_eq!(qcow2, Unfit::Format("qcow2".to_owned()));
        for other in [
            format!("{id}.raw"),
            format!("/anywhere/{id}.qcow2"),
            format!("/anywhere/{id}"),
            format!("json:{{\"file\":\"/{id}.raw"),
            format!("nbd://{id}.raw"),
            "/etc/shadow".to_owned(),
        ] {
            let refusal = of(&other, Some("raw")).unwrap_err();
            assert_eq!(refusal, Unfit::Other(other));
        }
    }
}
