//! A volume (block device) that an image is to be written to: whether something uses it, and
//! whether something is on it.

use super::identity::ImageIdentity;
use nix::errno::Errno;
use nix::libc;
use nix::sys::stat::{major, minor};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// The beginning and the end of a volume that are read completely, in bytes: tables, superblocks
/// and labels are there.
const EDGE_BYTES: u64 = 1 << 20;
/// Places between them that are read.
const SAMPLES: u64 = 512;
const SAMPLE_BYTES: u64 = 4096;
/// How often, and at which interval, a process is checked that has the volume open: udev reads
/// volumes for a moment.
const LOOKS: usize = 10;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Limit on the open files of a process that are examined.
const FILES_MAX: usize = 65_536;
/// What the beginnings of volumes are recognised by: the offset, the bytes, and what it is.
const SIGNATURES: [(usize, &[u8], &str); 14] = [
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (0, b"QFI\xfb", "a qcow2 image"),
    (0, b"XFSB", "a file system (XFS)"),
    (3, b"NTFS    ", "a file system (NTFS)"),
    (512, b"EFI PART", "a partition table (GPT)"),
    (512, b"LABELONE", "a physical volume of LVM"),
    (1080, b"\x53\xef", "a file system (ext2 to ext4)"),
    (1024, b"\x10\x20\xf5\xf2", "a file system (F2FS)"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4096, b"\xfc\x4e\x2b\xa9", "a part of a RAID (md)"),
    (4120, b"\xc6\x85\x73\xf6", "a cache (bcache)"),
    (65_600, b"_BHRfS_M", "a file system (btrfs)"),
    (131_072, b"\x0c\xb1\xba\0\0\0\0\0", "a part of a ZFS pool"),
    (510, b"\x55\xaa", "a boot sector or partition table"),
];

/// A reason why a volume is not used. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The path is no block device.
    #[error("{} is not a block device", .0.display())]
    NoVolume(PathBuf),
    /// It can only be read.
    #[error("{} is read-only", .0.display())]
    ReadOnly(PathBuf),
    /// Something uses it.
    #[error("{} is in use: {by}", path.display())]
    Busy {
        /// The volume.
        path: PathBuf,
        /// What uses it, for the host's own log.
        by: String,
    },
    /// The system refused.
    #[error("cannot open the volume {}: {error}", path.display())]
    Io {
        /// The volume.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
}

/// What is on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Zeros in all places that were read.
    Zeros,
    /// Something else.
    Content {
        /// The first byte of the place where it is.
        byte: u64,
        /// What it is, if it is recognised.
        what: Option<&'static str>,
    },
}

/// A volume that nothing else uses. While it is open, it cannot be mounted, nor become a part of
/// another device.
#[derive(Debug)]
pub struct Volume {
    path: PathBuf,
    file: File,
    bytes: u64,
}

/// Returns whether a path names a block device, possibly by a link.
pub fn is_volume(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|file| file.file_type().is_block_device())
}

impl Volume {
    /// Opens a volume for writing, if nothing else on this host uses it.
    pub fn take(path: &Path) -> Result<Self, VolumeError> {
        let failed = |error| VolumeError::Io {
            path: path.to_owned(),
            error,
        };
        let busy = |by: String| VolumeError::Busy {
            path: path.to_owned(),
            by,
        };
        let about = fs::metadata(path).map_err(failed)?;
        if !about.file_type().is_block_device() {
            return Err(VolumeError::NoVolume(path.to_owned()));
        }
        let sysfs = sysfs(about.rdev());
        if fs::read_to_string(sysfs.join("ro")).is_ok_and(|ro| ro.trim() == "1") {
            return Err(VolumeError::ReadOnly(path.to_owned()));
        }
        if let Some(holder) = first_entry(&sysfs.join("holders")) {
            return Err(busy(format!("it is a part of {holder}")));
        }
        let mut options = OpenOptions::new();
        // On a block device, O_EXCL fails if it is mounted, swapped to, or a part of another one.
        let options = options.read(true).write(true).custom_flags(libc::O_EXCL);
        let mut file = options.open(path).map_err(|error| {
            match error.raw_os_error().map(Errno::from_raw) {
                Some(Errno::EBUSY) => {
                    busy("it is mounted, or a part of another device, or open elsewhere".to_owned())
                }
                Some(Errno::EROFS) => VolumeError::ReadOnly(path.to_owned()),
                _ => failed(error),
            }
        })?;
        let bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        if let Some(user) = lasting_user(about.rdev()).map_err(failed)? {
            return Err(busy(user));
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
        })
    }

    /// Returns its path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns its size.
    pub fn size_bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns its identity.
    pub fn identity(&self) -> io::Result<ImageIdentity> {
        ImageIdentity::of_file(&self.file)
    }

    /// Reads its beginning, its end and places between them.
    pub fn look(&self) -> io::Result<Found> {
        look(&self.file, self.bytes)
    }

    /// Returns the open file. As long as it is open, the volume is taken.
    pub(super) fn try_clone_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }
}

fn sysfs(device: u64) -> PathBuf {
    PathBuf::from(format!(
        "/sys/dev/block/{}:{}",
        major(device),
        minor(device)
    ))
}

fn first_entry(folder: &Path) -> Option<String> {
    let entry = fs::read_dir(folder).ok()?.next()?.ok()?;
    Some(entry.file_name().to_string_lossy().into_owned())
}

/// Returns a process that has the volume open, and keeps it open.
fn lasting_user(device: u64) -> io::Result<Option<String>> {
    let mut before = users(device)?;
    for _ in 0..LOOKS {
        if before.is_empty() {
            return Ok(None);
        }
        thread::sleep(LOOK_EVERY);
        let now = users(device)?;
        before.retain(|user| now.contains(user));
    }
    let user = before.into_iter().next();
    Ok(user.map(|(pid, name)| format!("process {pid} ({name}) has it open")))
}

/// Returns the processes that have a block device open, except this one.
fn users(device: u64) -> io::Result<Vec<(u32, String)>> {
    let has_open = |folder: &Path| {
        let Ok(files) = fs::read_dir(folder.join("fd")) else {
            // It has ended, or is another user's that this agent may not inspect.
            return false;
        };
        files.flatten().take(FILES_MAX).any(|file| {
            let about = fs::metadata(file.path());
            about.is_ok_and(|it| it.file_type().is_block_device() && it.rdev() == device)
        })
    };
    let mut users = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        if pid != std::process::id() && has_open(&entry.path()) {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            users.push((pid, name.trim().to_owned()));
        }
    }
    Ok(users)
}

fn look(file: &File, bytes: u64) -> io::Result<Found> {
    let mut beginning = vec![0; EDGE_BYTES.min(bytes) as usize];
    file.read_exact_at(&mut beginning, 0)?;
    if let Some(at) = first_content(&beginning) {
        let is_there = |&(at, magic, _): &(usize, &[u8], &'static str)| {
            beginning.get(at..at + magic.len()) == Some(magic)
        };
        return Ok(Found::Content {
            byte: at,
            what: SIGNATURES.iter().find(|it| is_there(it)).map(|it| it.2),
        });
    }
    let end = bytes.saturating_sub(EDGE_BYTES);
    let mut buffer = vec![0; SAMPLE_BYTES as usize];
    for sample in 0..SAMPLES {
        let at = (u128::from(bytes) * u128::from(sample) / u128::from(SAMPLES)) as u64;
        let at = at / SAMPLE_BYTES * SAMPLE_BYTES;
        if at + SAMPLE_BYTES > end || at < EDGE_BYTES {
            continue;
        }
        file.read_exact_at(&mut buffer, at)?;
        if let Some(found) = first_content(&buffer) {
            let byte = at + found;
            return Ok(Found::Content { byte, what: None });
        }
    }
    let mut ending = vec![0; (bytes - end) as usize];
    file.read_exact_at(&mut ending, end)?;
    Ok(match first_content(&ending) {
        Some(found) => Found::Content {
            byte: end + found,
            what: None,
        },
        None => Found::Zeros,
    })
}

fn first_content(bytes: &[u8]) -> Option<u64> {
    let at = bytes.iter().position(|byte| *byte != 0)?;
    u64::try_from(at).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(bytes: u64, parts: &[(u64, &[u8])]) -> Found {
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        for (at, part) in parts {
            file.write_all_at(part, *at).unwrap();
        }
        look(&file, bytes).unwrap()
    }

    #[test]
    fn what_is_on_a_volume_is_found_and_named() {
        const MIB: u64 = 1 << 20;
        assert_eq!(with(64 * MIB, &[]), Found::Zeros);
        assert_eq!(with(3000, &[]), Found::Zeros);
        let content = |byte, what| Found::Content { byte, what };
        for (offset, magic, what) in SIGNATURES {
            let found = with(64 * MIB, &[(offset as u64, magic)]);
            let Found::Content { byte, what: named } = found else {
                panic!("{what}")
            };
            assert!(byte >= offset as u64 && named == Some(what), "{found:?}");
        }
        let gpt: [(u64, &[u8]); 2] = [(510, b"\x55\xaa"), (512, b"EFI PART")];
        let gpt = with(64 * MIB, &gpt);
        assert_eq!(gpt, content(510, Some("a partition table (GPT)")));
        for at in [7, MIB - 1, 32 * MIB, 64 * MIB - 1] {
            assert_eq!(with(64 * MIB, &[(at, b"x")]), content(at, None));
        }
    }

    #[test]
    fn what_is_no_volume_is_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "content").unwrap();
        assert!(!is_volume(&path) && !is_volume(&folder.path().join("none")));
        let refusal = Volume::take(&path).unwrap_err();
        assert!(matches!(refusal, VolumeError::NoVolume(_)));
        let gone = Volume::take(&folder.path().join("none"));
        assert!(matches!(gone, Err(VolumeError::Io { .. })));
    }
}
