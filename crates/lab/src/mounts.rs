//! Unmounts all file systems that are mounted below a folder.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};

use crate::error::{During, LabError};

/// The field of a line of mountinfo that holds the mount point (proc_pid_mountinfo(5)).
const MOUNT_POINT: usize = 4;

/// Unmounts everything below a folder, the deepest first, even if it is in use. The folder itself
/// may be a mount point, and may be missing.
///
/// # Errors
/// When the mounts cannot be read, or one of them cannot be removed (it needs root).
pub(crate) fn unmount_below(folder: &Path) -> Result<(), LabError> {
    // The kernel lists paths without symbolic links.
    let folder = match fs::canonicalize(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.during(|| format!("find {}", folder.display()))?,
    };
    let mounts = "/proc/self/mountinfo";
    let mounts = fs::read(mounts).during(|| format!("read {mounts}"))?;
    for point in points_below(&mounts, &folder) {
        // Detached, it is gone from the tree while a process still has a file of it open.
        umount2(&point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)
            .during(|| format!("unmount {}", point.display()))?;
    }
    Ok(())
}

/// Returns the mount points below a folder, the deepest first.
fn points_below(mountinfo: &[u8], folder: &Path) -> Vec<PathBuf> {
    let lines = mountinfo.split(|byte| *byte == b'\n');
    let fields = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(MOUNT_POINT));
    let mut points: Vec<PathBuf> = fields
        .map(|point| PathBuf::from(OsString::from_vec(unescaped(point))))
        .filter(|point| point != folder && point.starts_with(folder))
        .collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.components().count()));
    points
}

/// Returns a field in which the kernel wrote spaces, tabs, newlines and backslashes as a backslash
/// and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        match rest {
            [
                b'\\',
                a @ b'0'..=b'3',
                b @ b'0'..=b'7',
                c @ b'0'..=b'7',
                after @ ..,
            ] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_below_a_folder_is_found_and_the_deepest_first() {
        let mountinfo = b"\
            21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n\
            30 21 0:40 / /data/a1 rw - tmpfs tmpfs rw\n\
            31 30 0:41 / /data/a1/paris/room rw - tmpfs tmpfs rw\n\
            32 31 0:42 / /data/a1/paris/room/two\\040words\\134x rw - tmpfs tmpfs rw\n\
            33 31 0:42 / /data/a1/paris/room rw - tmpfs tmpfs rw\n\
            34 21 0:43 / /data/a10/paris/room rw - tmpfs tmpfs rw\n\
            35 21 0:44 / /data rw - tmpfs tmpfs rw\n";
        assert_eq!(
            points_below(mountinfo, Path::new("/data/a1")),
            [
                "/data/a1/paris/room/two words\\x",
                "/data/a1/paris/room",
                "/data/a1/paris/room"
            ]
            .map(PathBuf::from)
        );
        assert_eq!(
            points_below(mountinfo, Path::new("/data/a10/paris/room")),
            [""; 0].map(PathBuf::from)
        );
    }
}
