//! Tests volumes on loop devices over sparse files. Needs root; skipped where no loop device can be
//! made.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr)]

use longhaul_storage::disk::{
    Disk as _, Found, ImageIdentity, RawDisk, Volume, VolumeError, Zeros,
};
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 40 * MIB;

struct Loop {
    folder: TempDir,
    device: PathBuf,
}

impl Loop {
    /// Shows a sparse file; `None` where the host does not permit that.
    fn make() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("behind");
        File::create(&path).unwrap().set_len(BYTES).unwrap();
        let device = Self::show(&path)?;
        Some(Self { folder, device })
    }

    fn show(path: &Path) -> Option<PathBuf> {
        let mut show = Command::new("losetup");
        let shown = show.args(["--find", "--show"]).arg(path).output().ok()?;
        if !shown.status.success() {
            eprintln!("SKIPPED volumes: {shown:?}");
            return None;
        }
        Some(String::from_utf8(shown.stdout).unwrap().trim().into())
    }

    fn allocated(&self) -> u64 {
        File::open(&self.device).unwrap().sync_all().unwrap();
        let behind = fs::metadata(self.folder.path().join("behind"));
        behind.unwrap().blocks() * 512
    }

    fn write(&self, byte: u64, content: &[u8]) {
        let file = File::options().write(true).open(&self.device).unwrap();
        file.write_all_at(content, byte).unwrap();
        file.sync_all().unwrap();
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let mut detach = Command::new("losetup");
        let _ = detach.arg("--detach").arg(&self.device).status();
    }
}

#[test]
fn a_volume_is_taken_once_and_not_while_a_process_has_it() {
    let Some(shown) = Loop::make() else { return };
    let volume = Volume::take(&shown.device).unwrap();
    assert_eq!(
        (volume.size_bytes(), volume.look().unwrap()),
        (BYTES, Found::Zeros)
    );
    let again = Volume::take(&shown.device);
    assert!(matches!(again, Err(VolumeError::Busy { .. })), "{again:?}");
    let disk = RawDisk::over(&volume, BYTES).unwrap();
    drop(volume);
    // The disk keeps it.
    Volume::take(&shown.device).unwrap_err();
    drop(disk);
    let file = File::open(&shown.device).unwrap();
    let mut holds = Command::new("sleep")
        .arg("100")
        .stdin(file)
        .spawn()
        .unwrap();
    let busy = Volume::take(&shown.device).unwrap_err().to_string();
    holds.kill().unwrap();
    holds.wait().unwrap();
    assert!(
        busy.contains(&format!("process {} (sleep)", holds.id())),
        "{busy}"
    );
    let volume = Volume::take(&shown.device).unwrap();
    let identity = volume.identity().unwrap();
    let disk = RawDisk::open_to_read(&shown.device).unwrap();
    assert!(ImageIdentity::of(&disk).unwrap().is_surely(&identity));
    let other = Loop::make().unwrap();
    let other = Volume::take(&other.device).unwrap().identity().unwrap();
    assert!(!other.is_surely(&identity));
}

#[test]
fn a_disk_on_a_volume_has_nothing_of_what_was_there_and_stays_thin() {
    let Some(shown) = Loop::make() else { return };
    let former = vec![7; 8 * MIB as usize];
    shown.write(4 * MIB, &former);
    shown.write(BYTES - MIB, &former[..MIB as usize]);
    let size = 39 * MIB + 512;
    let volume = Volume::take(&shown.device).unwrap();
    assert!(matches!(volume.look().unwrap(), Found::Content { .. }));
    RawDisk::over(&volume, BYTES + 512).unwrap_err();
    let disk = RawDisk::over(&volume, size).unwrap();
    assert_eq!(disk.size_bytes(), size);
    // Used in an order of its own, before and while it is cleared.
    let mut read = vec![1; MIB as usize];
    disk.read(5 * MIB, &mut read).unwrap();
    assert!(read == vec![0; MIB as usize]);
    disk.write(6 * MIB + 5, b"new").unwrap();
    assert!(!disk.clear_next().unwrap());
    disk.zero(30 * MIB..31 * MIB, Zeros::MayBeHole).unwrap();
    disk.write(37 * MIB, b"later").unwrap();
    disk.write(size, b"x").unwrap_err();
    while !disk.clear_next().unwrap() {}
    disk.flush().unwrap();
    let mut expected = vec![0; size as usize];
    expected[6 * MIB as usize + 5..][..3].copy_from_slice(b"new");
    expected[37 * MIB as usize..][..5].copy_from_slice(b"later");
    let mut found = vec![1; size as usize];
    disk.read(0, &mut found).unwrap();
    assert!(found == expected);
    // What is behind the disk's last block is not touched.
    let mut behind = vec![0; MIB as usize - 4096];
    let file = File::open(&shown.device).unwrap();
    file.read_exact_at(&mut behind, 39 * MIB + 4096).unwrap();
    assert!(behind == vec![7; behind.len()]);
    assert!(shown.allocated() <= 3 * MIB, "{}", shown.allocated());
}
