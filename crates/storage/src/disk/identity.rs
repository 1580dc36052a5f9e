//! Recognises the image of a disk, so that another one under the same path is not taken for it.
//!
//! Device and inode identify a file, and its serial number or UUID a volume. The digests of a few
//! places also detect an image whose content was replaced.

use super::{Disk, RawDisk};
use crate::front::arriving::masks::{Boot, this_boot};
use nix::sys::stat::{major, minor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::UNIX_EPOCH;

/// Parts of an image of which one place each is digested.
const PARTS: u64 = 32;
/// Length of a digested place, in bytes.
const PLACE_BYTES: u64 = 64 << 10;
/// Where the first partition of most disks begins: its file system changes at each mount.
const FIRST_PARTITION: u64 = 1 << 20;
/// Limit on the digests that are read.
const DIGESTS_MAX: usize = 2 * PARTS as usize;
/// Limit on a file of sysfs, in bytes.
const ATTRIBUTE_BYTES_MAX: u64 = 4096;
/// Files of sysfs that name a whole device for good, the best first.
const NAMES: [&str; 5] = ["wwid", "device/wwid", "serial", "device/serial", "md/uuid"];

/// What identifies an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageIdentity {
    /// The boot of the host in which it was seen: device numbers are only valid in one.
    boot: Boot,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Kind {
    File {
        device: u64,
        inode: u64,
        /// The time of its creation since 1970, where the file system knows it.
        born_ns: Option<u64>,
    },
    Volume {
        device: u64,
        /// Its name in the hardware or in the device mapper, if it has one.
        id: Option<String>,
    },
}

/// How an image differs from the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OtherImage {
    /// One is a file, the other a volume.
    #[error("a file is a volume now, or the reverse")]
    Kind,
    /// It is another file.
    #[error("it is another file (another inode, or another time of creation)")]
    File,
    /// It is on another file system.
    #[error("it is on another file system")]
    FileSystem,
    /// It is another volume.
    #[error("it is another volume (another serial number, UUID or device)")]
    Volume,
    /// Its content has changed.
    #[error("its content at byte {0} has changed")]
    Content(u64),
}

impl ImageIdentity {
    /// Returns the identity of an open image.
    pub fn of(disk: &RawDisk) -> io::Result<Self> {
        Self::of_file(disk.file())
    }

    pub(super) fn of_file(file: &File) -> io::Result<Self> {
        let file = file.metadata()?;
        let kind = match file.file_type().is_block_device() {
            true => Kind::Volume {
                device: file.rdev(),
                id: volume_id(Path::new("/sys"), file.rdev()),
            },
            false => Kind::File {
                device: file.dev(),
                inode: file.ino(),
                born_ns: born_ns(&file),
            },
        };
        Ok(Self {
            boot: this_boot()?,
            kind,
        })
    }

    /// Returns whether this is certainly the volume that was seen before: by its name in the
    /// hardware or the device mapper, or within one boot by its number.
    pub fn is_surely(&self, before: &Self) -> bool {
        match (&self.kind, &before.kind) {
            (
                Kind::Volume { device, id },
                Kind::Volume {
                    device: device_before,
                    id: id_before,
                },
            ) => match (id, id_before) {
                (Some(id), Some(id_before)) => id == id_before,
                (None, None) => self.boot == before.boot && device == device_before,
                _ => false,
            },
            _ => false,
        }
    }

    /// Returns an error unless this is the image that was seen before.
    pub fn check(&self, before: &Self) -> Result<(), OtherImage> {
        let same_boot = self.boot == before.boot;
        match (&self.kind, &before.kind) {
            (
                Kind::File {
                    device,
                    inode,
                    born_ns,
                },
                Kind::File {
                    device: device_before,
                    inode: inode_before,
                    born_ns: born_before,
                },
            ) => {
                let born_differs = born_ns
                    .zip(*born_before)
                    .is_some_and(|(now, old)| now != old);
                if inode != inode_before || born_differs {
                    return Err(OtherImage::File);
                }
                // Some file systems (NFS, btrfs) get another number at each mount.
                let real = major(*device) != 0 && major(*device_before) != 0;
                if same_boot && real && device != device_before {
                    return Err(OtherImage::FileSystem);
                }
                Ok(())
            }
            (
                Kind::Volume { device, id },
                Kind::Volume {
                    device: device_before,
                    id: id_before,
                },
            ) => {
                let same = match id_before {
                    Some(_) => id == id_before,
                    None => !same_boot || device == device_before,
                };
                if same {
                    Ok(())
                } else {
                    Err(OtherImage::Volume)
                }
            }
            _ => Err(OtherImage::Kind),
        }
    }
}

fn born_ns(file: &Metadata) -> Option<u64> {
    let born = file.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(born.as_nanos()).ok()
}

/// Returns a name of a block device that it keeps whatever its number; `None` if it has none.
fn volume_id(sysfs: &Path, device: u64) -> Option<String> {
    let number = format!("{}:{}", major(device), minor(device));
    let folder = fs::canonicalize(sysfs.join("dev/block").join(number)).ok()?;
    if let Some(uuid) = attribute(&folder, "dm/uuid") {
        return Some(format!("dm/uuid:{uuid}"));
    }
    match attribute(&folder, "partition") {
        Some(number) => {
            let whole = whole_device_id(folder.parent()?)?;
            Some(format!("{whole}, partition {number}"))
        }
        None => whole_device_id(&folder),
    }
}

fn whole_device_id(folder: &Path) -> Option<String> {
    let named = |name: &&str| Some(format!("{name}:{}", attribute(folder, name)?));
    let name = NAMES.iter().find_map(named);
    name.or_else(|| loop_id(folder))
}

/// Returns what a loop device shows: a file, by its inode and time of creation, and a part of it.
fn loop_id(folder: &Path) -> Option<String> {
    let path = attribute(folder, "loop/backing_file")?;
    let file = fs::metadata(path).ok()?;
    let born = born_ns(&file).map_or("unknown".to_owned(), |born| born.to_string());
    let offset = attribute(folder, "loop/offset")?;
    Some(format!("loop:{}, {born}, from {offset}", file.ino()))
}

fn attribute(folder: &Path, name: &str) -> Option<String> {
    let mut text = String::new();
    let file = File::open(folder.join(name)).ok()?;
    file.take(ATTRIBUTE_BYTES_MAX)
        .read_to_string(&mut text)
        .ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Digests of a few places of an image that nobody writes any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContentDigests {
    places: Vec<Place>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Place {
    byte: u64,
    length_bytes: u64,
    digest: String,
}

impl ContentDigests {
    /// Digests places with data, spread over the image.
    pub fn take(disk: &RawDisk) -> io::Result<Self> {
        let size = disk.size_bytes();
        let mut bytes = BTreeSet::new();
        for begin in (0..PARTS)
            .map(|part| part * (size / PARTS))
            .chain([FIRST_PARTITION])
        {
            let begin = begin / PLACE_BYTES * PLACE_BYTES;
            let end = (begin + (size / PARTS).max(PLACE_BYTES)).min(size);
            if begin < end
                && let Some(data) = first_data(disk, begin, end)?
            {
                bytes.insert(data);
            }
        }
        let place = |byte: u64| {
            let length_bytes = PLACE_BYTES.min(size - byte);
            Ok(Place {
                byte,
                length_bytes,
                digest: digest(disk, byte, length_bytes)?,
            })
        };
        let places = bytes.into_iter().map(place);
        Ok(Self {
            places: places.collect::<io::Result<_>>()?,
        })
    }

    /// Returns an error if the image has other content at one of these places.
    pub fn check(&self, disk: &RawDisk) -> io::Result<Result<(), OtherImage>> {
        if self.places.len() > DIGESTS_MAX {
            return Err(io::Error::other("there are too many digests of it"));
        }
        for place in &self.places {
            let within = place.byte.checked_add(place.length_bytes);
            if place.length_bytes > PLACE_BYTES || within.is_none_or(|end| end > disk.size_bytes())
            {
                return Ok(Err(OtherImage::Content(place.byte)));
            }
            if digest(disk, place.byte, place.length_bytes)? != place.digest {
                return Ok(Err(OtherImage::Content(place.byte)));
            }
        }
        Ok(Ok(()))
    }
}

/// Returns the first byte of a range that is not in a hole.
fn first_data(disk: &RawDisk, begin: u64, end: u64) -> io::Result<Option<u64>> {
    let mut byte = begin;
    // A hole is followed by data.
    for extent in disk.extents(begin..end, 2)? {
        if !extent.hole {
            return Ok(Some(byte));
        }
        byte += extent.length_bytes;
    }
    Ok(None)
}

fn digest(disk: &RawDisk, byte: u64, length_bytes: u64) -> io::Result<String> {
    let mut content = vec![0; length_bytes as usize];
    disk.read(byte, &mut content)?;
    let mut text = String::new();
    for byte in blake3::hash(&content).as_bytes() {
        // Writing to a text cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, symlink};

    fn identity(path: &Path) -> ImageIdentity {
        ImageIdentity::of(&RawDisk::open_to_read(path).unwrap()).unwrap()
    }

    #[test]
    fn a_copy_is_another_file_and_a_renamed_one_is_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        fs::write(&path, "content").unwrap();
        let before = identity(&path);
        let text = serde_json::to_string(&before).unwrap();
        assert_eq!(
            serde_json::from_str::<ImageIdentity>(&text).unwrap(),
            before
        );
        fs::rename(&path, folder.path().join("away")).unwrap();
        fs::copy(folder.path().join("away"), &path).unwrap();
        assert_eq!(identity(&path).check(&before), Err(OtherImage::File));
        fs::rename(folder.path().join("away"), &path).unwrap();
        assert_eq!(identity(&path).check(&before), Ok(()));
    }

    #[test]
    fn numbers_of_devices_count_within_one_boot() {
        let boot = |n: u8| [n; 16];
        let disk = nix::sys::stat::makedev(8, 1);
        let (other, anonymous) = (
            nix::sys::stat::makedev(8, 17),
            nix::sys::stat::makedev(0, 44),
        );
        let file = |n, device| ImageIdentity {
            boot: boot(n),
            kind: Kind::File {
                device,
                inode: 7,
                born_ns: None,
            },
        };
        let check = |now: ImageIdentity| now.check(&file(1, disk));
        assert_eq!(check(file(1, other)), Err(OtherImage::FileSystem));
        assert_eq!(check(file(2, other)), Ok(()));
        assert_eq!(check(file(1, anonymous)), Ok(()));
        let volume = |n, device, id: Option<&str>| ImageIdentity {
            boot: boot(n),
            kind: Kind::Volume {
                device,
                id: id.map(str::to_owned),
            },
        };
        let named = volume(1, disk, Some("wwid:a"));
        assert_eq!(volume(2, other, Some("wwid:a")).check(&named), Ok(()));
        for now in [volume(1, disk, Some("wwid:b")), volume(1, disk, None)] {
            assert_eq!(now.check(&named), Err(OtherImage::Volume));
        }
        assert!(volume(2, other, Some("wwid:a")).is_surely(&named));
        for now in [volume(1, disk, Some("wwid:b")), volume(1, disk, None)] {
            assert!(!now.is_surely(&named) && !named.is_surely(&now));
        }
        assert!(!file(1, disk).is_surely(&file(1, disk)));
        let unnamed = volume(1, disk, None);
        assert!(volume(1, disk, None).is_surely(&unnamed));
        assert!(!volume(2, disk, None).is_surely(&unnamed));
        assert_eq!(volume(1, disk, None).check(&unnamed), Ok(()));
        let other = volume(1, other, None);
        assert_eq!(other.check(&unnamed), Err(OtherImage::Volume));
        assert_eq!(check(other), Err(OtherImage::Kind));
    }

    #[test]
    fn a_volume_has_its_hardwares_name() {
        let sysfs = tempfile::tempdir().unwrap();
        let sysfs = sysfs.path();
        fs::create_dir_all(sysfs.join("dev/block")).unwrap();
        let device = |number: u64, folder: &str, files: &[(&str, &str)]| {
            let folder = sysfs.join(folder);
            for (name, text) in files {
                let file = folder.join(name);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, text).unwrap();
            }
            symlink(&folder, sysfs.join(format!("dev/block/8:{number}"))).unwrap();
        };
        device(0, "sda", &[("device/wwid", "naa.5000\n"), ("size", "1\n")]);
        device(1, "sda/sda1", &[("partition", "1\n")]);
        device(2, "dm-0", &[("dm/uuid", "LVM-abc\n"), ("wwid", "x\n")]);
        device(3, "dm-1", &[("dm/uuid", "\n")]);
        let behind = sysfs.join("behind");
        fs::write(&behind, "").unwrap();
        let shown = behind.to_string_lossy().into_owned();
        let files = [("loop/backing_file", &*shown), ("loop/offset", "0\n")];
        device(4, "loop4", &files);
        let id = |number| volume_id(sysfs, nix::sys::stat::makedev(8, number));
        assert_eq!(id(0).unwrap(), "device/wwid:naa.5000");
        assert_eq!(id(1).unwrap(), "device/wwid:naa.5000, partition 1");
        assert_eq!(id(2).unwrap(), "dm/uuid:LVM-abc");
        assert_eq!((id(3), id(5)), (None, None));
        let inode = fs::metadata(&behind).unwrap().ino();
        assert!(id(4).unwrap().starts_with(&format!("loop:{inode}, ")));
        fs::remove_file(&behind).unwrap();
        assert_eq!(id(4), None);
    }

    #[test]
    fn replaced_content_is_found_and_holes_are_not_read() {
        const MIB: u64 = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        let file = File::create(&path).unwrap();
        file.set_len(64 * MIB).unwrap();
        file.write_all_at(b"partitions", 0).unwrap();
        file.write_all_at(&[7; 100_000], 33 * MIB).unwrap();
        let disk = RawDisk::open_to_read(&path).unwrap();
        let digests = ContentDigests::take(&disk).unwrap();
        let text = serde_json::to_string(&digests).unwrap();
        let digests: ContentDigests = serde_json::from_str(&text).unwrap();
        assert!((2..=4).contains(&digests.places.len()), "{digests:?}");
        assert_eq!(digests.check(&disk).unwrap(), Ok(()));
        for byte in [3, 33 * MIB + 5] {
            let mut before = [0];
            disk.read(byte, &mut before).unwrap();
            file.write_all_at(b"!", byte).unwrap();
            let other = digests.check(&disk).unwrap();
            let place = byte / PLACE_BYTES * PLACE_BYTES;
            assert_eq!(other, Err(OtherImage::Content(place)));
            file.write_all_at(&before, byte).unwrap();
        }
        assert_eq!(digests.check(&disk).unwrap(), Ok(()));
        // A shorter one has no such place.
        file.set_len(MIB).unwrap();
        let shorter = RawDisk::open_to_read(&path).unwrap();
        assert!(digests.check(&shorter).unwrap().is_err());
        let short = folder.path().join("short.raw");
        fs::write(&short, "a").unwrap();
        let short = RawDisk::open_to_read(&short).unwrap();
        let digests = ContentDigests::take(&short).unwrap();
        assert_eq!(
            (digests.places.len(), digests.places[0].length_bytes),
            (1, 1)
        );
    }
}
