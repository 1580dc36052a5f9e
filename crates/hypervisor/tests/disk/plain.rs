//! Tests raw disks with a format node.

use crate::common::emulators;
use crate::load::{Load, boot_disk};
use crate::setting::{NAME, PATIENCE, Setting, assert_same, nobody_is_connected, picture};
use longhaul_hypervisor::disk::{InsertError, RemoveError, insert, remove};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_storage::disk::{Disk, ExportSize, ImageLock, ImageUse, RawDisk, Zeros};
use longhaul_storage::nbd::{Export, ExportName, Limits, Server};
use serde_json::json;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

async fn switches_under_load(emulator: &Path, setting: Setting, iothread: bool) {
    let qemu = setting.guest(emulator, iothread).await;
    let before = picture(&qemu).await;
    let load = Load::find(&qemu).await;
    let mut server = setting.serve();
    for round in 0..4 {
        load.goes_on(6).await;
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        load.goes_on(6).await;
        assert!(
            server.connections() >= 1,
            "the disk is used around the disk export"
        );
        if round % 2 == 0 {
            // Cut off in the middle of requests; its socket stays.
            assert_eq!(server.stop(Duration::ZERO), 0);
            server = setting.serve();
            load.goes_on(6).await;
        }
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        nobody_is_connected(&server).await;
    }
    load.goes_on(6).await;
    assert_eq!(server.stop(PATIENCE), 0);
    assert_same(&before, &picture(&qemu).await);
    assert_eq!(qemu.state().await, "running");
    let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
    stopped.await.unwrap();
    load.check(&std::fs::read(&setting.image).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_under_load_goes_through_the_front_end_and_back() {
    for (_, emulator) in emulators() {
        for iothread in [false, true] {
            switches_under_load(&emulator, Setting::new(), iothread).await;
        }
    }
}

/// A block device backed by a file.
struct Device(PathBuf);

impl Device {
    /// Returns `None` where the test may not create one.
    fn of(file: &Path) -> Option<Self> {
        std::fs::write(file, boot_disk()).unwrap();
        let mut losetup = Command::new("losetup");
        let made = losetup.args(["--find", "--show"]).arg(file).output().ok()?;
        let path = String::from_utf8(made.stdout).unwrap();
        let made = made.status.success();
        made.then(|| Self(path.trim().into()))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let mut losetup = Command::new("losetup");
        let _ = losetup.arg("--detach").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_block_device_under_load_goes_through_the_front_end_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let Some(device) = Device::of(&folder.path().join("device")) else {
        eprintln!("skipped: nobody may make a block device here");
        return;
    };
    for (_, emulator) in emulators() {
        switches_under_load(&emulator, Setting::on_device(&device.0), false).await;
    }
    let disk = RawDisk::open(&device.0, ExportSize::OfFile).unwrap();
    assert_eq!(disk.size_bytes(), boot_disk().len() as u64);
    RawDisk::open(&device.0, ExportSize::Bytes(1 << 30)).unwrap_err();
    // Parts of blocks, and whole ones.
    disk.write(0, &[7; 8192]).unwrap();
    disk.zero(100..5000, Zeros::MayBeHole).unwrap();
    disk.discard(6000..6001).unwrap();
    disk.zero(7168..8192, Zeros::MayBeHole).unwrap();
    let mut expected = [7; 8192];
    expected[100..5000].fill(0);
    expected[7168..].fill(0);
    let mut content = [1; 8192];
    disk.read(0, &mut content).unwrap();
    assert!(content == expected);
    disk.flush().unwrap();
    let extents = disk.extents(0..8192, 10).unwrap();
    assert_eq!((extents.len(), extents[0].hole), (1, false));
}

#[tokio::test]
async fn what_cannot_be_inserted_leaves_the_guest_as_it_was() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, false).await;
        let before = picture(&qemu).await;
        let server = setting.serve();
        let mut wrong = setting.front.clone();
        wrong.export = "another name".to_owned();
        let refusal = insert(&qemu.qmp, &setting.nodes, &wrong).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Refused(_)), "{refusal}");
        wrong.socket = setting.folder.path().join("nobody");
        let refusal = insert(&qemu.qmp, &setting.nodes, &wrong).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Refused(_)), "{refusal}");
        // A disk smaller than the guest's is not inserted below it.
        std::fs::write(setting.folder.path().join("small"), [0; 512]).unwrap();
        let small = setting.folder.path().join("small");
        let small = RawDisk::open(&small, ExportSize::OfFile).unwrap();
        let listener = UnixListener::bind(setting.folder.path().join("nbd2")).unwrap();
        let exports = vec![Export {
            name: ExportName::new(NAME.to_owned()).unwrap(),
            disk: Arc::new(small),
        }];
        let small = Server::start(listener, exports, Limits::default(), |_| ()).unwrap();
        let mut front = setting.front.clone();
        front.socket = setting.folder.path().join("nbd2");
        let refusal = insert(&qemu.qmp, &setting.nodes, &front).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Size { .. }), "{refusal}");
        assert_eq!(small.stop(PATIENCE), 0);
        assert_same(&before, &picture(&qemu).await);
        // Removing an absent export succeeds; doing it twice is harmless.
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        let mut other = setting.front.clone();
        other.node = "n1".to_owned();
        let refusal = insert(&qemu.qmp, &setting.nodes, &other).await.unwrap_err();
        assert!(matches!(refusal, InsertError::Other(_)), "{refusal}");
        let refusal = remove(&qemu.qmp, &setting.nodes, &other).await.unwrap_err();
        assert!(matches!(refusal, RemoveError::Other(_)), "{refusal}");
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        assert_same(&before, &picture(&qemu).await);
        drop(server);
    }
}

#[tokio::test]
async fn locks_pass_to_the_front_end_and_back() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, false).await;
        let disk = setting.disk();
        let server = setting.serve();
        let lock = ImageLock::beside(disk.file(), ImageUse::Raw).unwrap();
        lock.check().expect_err("the guest's QEMU holds its own");
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        lock.check().unwrap();
        let refusal = remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap_err();
        assert!(matches!(refusal, RemoveError::Refused(_)), "{refusal}");
        assert!(refusal.to_string().contains("lock"), "{refusal}");
        drop(lock);
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        ImageLock::alone(disk.file(), ImageUse::Raw).expect_err("the guest's QEMU has them again");
        drop(server);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_of_an_io_thread_gets_its_file_back_while_the_guest_stands_still() {
    for (_, emulator) in emulators() {
        let setting = Setting::new();
        let qemu = setting.guest(&emulator, true).await;
        let load = Load::find(&qemu).await;
        let server = setting.serve();
        load.goes_on(6).await;
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        load.goes_on(6).await;
        let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
        stopped.await.unwrap();
        remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        let goes_on = qemu.qmp.execute("cont", json!({}), COMMAND_TIMEOUT);
        goes_on.await.unwrap();
        load.goes_on(6).await;
        nobody_is_connected(&server).await;
    }
}
