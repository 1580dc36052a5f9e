//! Verifies that an image at the source is still the one that the guest has left, before a later
//! agent reads missing blocks from it.
//!
//! ```text
//! STATE/fronts/GUEST.N.content   digests of samples of the image, as the guest left it
//! STATE/fronts/GUEST.N.accept    created by an operator: another file has the same content
//! ```

use crate::disks::blocks_of;
use crate::disks::export_notes::{ACCEPT, CONTENT, beside, forget};
use crate::disks::exports::{self, LeftDisk, Noted};
use crate::host::atomic_file;
use longhaul_protocol::MigrationId;
use longhaul_storage::disk::qcow2::end_bytes;
use longhaul_storage::disk::{ContentDigests, Disk as _, ImageIdentity, RawDisk, is_volume};
use serde::{Deserialize, Serialize};
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Limit on the size of a file of digests, in bytes.
const CONTENT_BYTES_MAX: u64 = 64 << 10;

/// An image at the source, of which blocks may be missing at the destination.
pub(crate) struct LeftImage {
    pub(crate) left: LeftDisk,
    pub(crate) disk: String,
    pub(crate) image: PathBuf,
    /// The folder of the disk's export. The files of this module are named after it.
    pub(crate) export: PathBuf,
}

/// The digests of an image, from one migration of its guest.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    migration: MigrationId,
    digests: ContentDigests,
}

impl LeftImage {
    /// Opens the image. Fails if it is not the one that the guest has left, unless an operator has
    /// accepted it.
    pub(crate) fn open(&self) -> io::Result<RawDisk> {
        let disk = RawDisk::open_to_read(&self.image).map_err(io::Error::other)?;
        let blocks = blocks_of(disk.size_bytes());
        let fits = match self.left.grows {
            true => blocks <= self.left.blocks,
            // A disk may be smaller than its volume.
            false if is_volume(&self.image) => blocks >= self.left.blocks,
            false => blocks == self.left.blocks,
        };
        if !fits {
            return Err(self.other(&"it has another length"));
        }
        if self.left.grows && is_volume(&self.image) {
            disk.ends_at(end_bytes(&disk).map_err(|why| self.other(&why))?);
        }
        let accept = self.file(ACCEPT);
        if accept.exists() {
            tracing::warn!(
                image = %self.image.display(),
                accept = %accept.display(),
                "is used whatever image it is"
            );
            return Ok(disk);
        }
        if let Some(identity) = &self.left.identity {
            let same = ImageIdentity::of(&disk)?.check(identity);
            same.map_err(|why| self.other(&why))?;
        }
        if let Some(digests) = self.digests()? {
            let same = digests.check(&disk)?;
            same.map_err(|why| self.other(&why))?;
        }
        Ok(disk)
    }

    fn other(&self, why: &dyn Display) -> io::Error {
        let (image, disk) = (self.image.display(), &self.disk);
        io::Error::other(format!(
            "{image} is not the image that the guest has left of disk {disk}: {why}. Nothing is \
             sent from it. Put the guest's own image back under this name. If this one has the \
             same content, create the file {}",
            self.file(ACCEPT).display()
        ))
    }

    /// Records digests of the image. The guest must have left it, so that nothing writes to it.
    fn note_content(&self) -> io::Result<()> {
        if self.left.identity.is_none() || self.digests()?.is_some() {
            return Ok(());
        }
        let content = Content {
            migration: self.left.migration,
            digests: ContentDigests::take(&self.open()?)?,
        };
        let text = serde_json::to_vec(&content).map_err(io::Error::other)?;
        atomic_file::write(&self.file(CONTENT), &text)?;
        match Noted::is_noted(&self.export) {
            true => Ok(()),
            // The destination has all blocks by now.
            false => forget(&self.export),
        }
    }

    fn digests(&self) -> io::Result<Option<ContentDigests>> {
        let path = self.file(CONTENT);
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut text = Vec::new();
        file.take(CONTENT_BYTES_MAX).read_to_end(&mut text)?;
        let content: Content = serde_json::from_slice(&text)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
        Ok((content.migration == self.left.migration).then_some(content.digests))
    }

    fn file(&self, what: &str) -> PathBuf {
        beside(&self.export, what)
    }
}

/// Returns the images here of a guest that has left, of which blocks may be missing at the
/// destination.
pub(crate) fn left(
    state: &Path,
    guest: &str,
    migration: MigrationId,
) -> io::Result<Vec<LeftImage>> {
    let of = |noted: Noted| {
        let export = noted.path().to_owned();
        let exports::Note {
            left, disk, image, ..
        } = noted.note;
        Some(LeftImage {
            left: left.filter(|left| left.migration == migration)?,
            disk,
            image,
            export,
        })
    };
    Ok(exports::notes(state, guest)?
        .into_iter()
        .filter_map(of)
        .collect())
}

/// Records digests of the images of a guest that has left.
pub(crate) fn note_content(state: &Path, guest: &str, migration: MigrationId) {
    let noted = left(state, guest, migration)
        .and_then(|left| left.iter().try_for_each(LeftImage::note_content));
    if let Err(error) = noted {
        // Device and inode still identify the images.
        tracing::warn!(guest, %error, "no digests of its images are kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::RegionId;
    use std::fs;
    use std::os::unix::fs::FileExt;

    const MIGRATION: MigrationId = MigrationId([7; 8]);
    const BYTES: usize = 1 << 20;

    fn left(state: &Path) -> LeftImage {
        let folder = &exports::folder(state);
        fs::create_dir(folder).unwrap();
        let image = folder.join("disk.raw");
        fs::write(&image, vec![7; BYTES]).unwrap();
        fs::write(folder.join("web-7.0.note"), "").unwrap();
        let disk = RawDisk::open_to_read(&image).unwrap();
        LeftImage {
            left: LeftDisk {
                migration: MIGRATION,
                region: RegionId(1),
                blocks: blocks_of(BYTES as u64),
                grows: false,
                digest_key: [1; 32],
                verify: false,
                identity: Some(ImageIdentity::of(&disk).unwrap()),
            },
            disk: "vda".to_owned(),
            image,
            export: folder.join("web-7.0"),
        }
    }

    fn refusal(left: &LeftImage) -> String {
        left.open().unwrap_err().to_string()
    }

    #[test]
    fn another_file_of_the_same_length_is_refused_until_a_person_accepts_it() {
        let folder = tempfile::tempdir().unwrap();
        let left = left(folder.path());
        left.open().unwrap();
        let own = exports::folder(folder.path()).join("own");
        fs::rename(&left.image, &own).unwrap();
        fs::copy(&own, &left.image).unwrap();
        let why = refusal(&left);
        let accept = exports::folder(folder.path()).join("web-7.0.accept");
        assert!(why.contains("another inode"), "{why}");
        assert!(why.contains(&*left.image.to_string_lossy()), "{why}");
        assert!(why.contains(&*accept.to_string_lossy()), "{why}");
        fs::write(&accept, "").unwrap();
        left.open().unwrap();
        forget(&left.export).unwrap();
        refusal(&left);
        fs::rename(&own, &left.image).unwrap();
        left.open().unwrap();
    }

    #[test]
    fn content_that_was_replaced_in_place_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let left = left(folder.path());
        left.note_content().unwrap();
        left.open().unwrap();
        let file = fs::OpenOptions::new().write(true).open(&left.image);
        file.unwrap().write_all_at(b"older", 10).unwrap();
        let why = refusal(&left);
        assert!(why.contains("its content at byte 0"), "{why}");
        // A second call does not record the changed content as the guest's.
        left.note_content().unwrap();
        refusal(&left);
        // Digests of an earlier migration of this guest do not count.
        let mut other = left;
        other.left.migration = MigrationId([8; 8]);
        other.open().unwrap();
        fs::write(other.file(CONTENT), "{").unwrap();
        refusal(&other);
        forget(&other.export).unwrap();
        other.open().unwrap();
        // When the export's note is gone, the digests are removed.
        fs::remove_file(exports::folder(folder.path()).join("web-7.0.note")).unwrap();
        other.note_content().unwrap();
        assert!(!other.file(CONTENT).exists());
        forget(&other.export).unwrap();
    }

    #[test]
    fn what_an_earlier_agent_has_noted_is_known_by_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let mut left = left(folder.path());
        left.left.identity = None;
        left.note_content().unwrap();
        assert!(!left.file(CONTENT).exists());
        left.open().unwrap();
        left.left.blocks += 1;
        assert!(refusal(&left).contains("another length"));
        left.left.grows = true;
        left.open().unwrap();
    }
}
