//! Tests images that grow while they are used: qcow2, with snapshots and bitmaps in them.

use crate::changed::{execute, job_is};
use crate::common::emulators;
use crate::load::Load;
use crate::payload::Qemu;
use crate::setting::{Setting, assert_same, nobody_is_connected, picture, qemu_img};
use longhaul_hypervisor::disk::{InsertError, RemoveError, insert, insert_all, remove, remove_all};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// Returns the image's content at the time of the snapshot.
fn with_a_snapshot(setting: &Setting) -> Vec<u8> {
    let image = setting.image.to_str().unwrap();
    qemu_img(&["snapshot", "-c", "before", image]);
    setting.content()
}

async fn add_bitmap(qemu: &Qemu) {
    let bitmap = json!({"node": "d0", "name": "kept", "persistent": true});
    let added = qemu
        .qmp
        .execute("block-dirty-bitmap-add", bitmap, COMMAND_TIMEOUT);
    added.await.unwrap();
}

/// Lets QEMU quit regularly, which is when it saves the bitmap.
async fn quit(qemu: Qemu) {
    let _ = qemu.qmp.execute("quit", json!({}), COMMAND_TIMEOUT).await;
    let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    waitid(Id::Pid(Pid::from_raw(qemu.pid())), ended).unwrap();
}

async fn grows_through_the_front_end(emulator: &Path, iothread: bool, named: bool) {
    let setting = Setting::qcow2(named);
    let at_snapshot = with_a_snapshot(&setting);
    let qemu = setting.guest(emulator, iothread).await;
    add_bitmap(&qemu).await;
    let before = picture(&qemu).await;
    let load = Load::find(&qemu).await;
    let server = setting.serve();
    for _ in 0..3 {
        load.goes_on(6).await;
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        let length = std::fs::metadata(&setting.image).unwrap().len();
        load.goes_on(20).await;
        let grown = std::fs::metadata(&setting.image).unwrap().len();
        assert!(grown > length, "the image does not grow");
        let refusal = remove(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap_err();
        assert!(matches!(refusal, RemoveError::Runs(_)), "{refusal}");
        let disks = [(&setting.nodes, &setting.front)];
        let stood = remove_all(&qemu.qmp, &disks).await.unwrap();
        assert!(stood > Duration::ZERO);
        assert_eq!(qemu.state().await, "running");
        nobody_is_connected(&server).await;
    }
    load.goes_on(20).await;
    assert_same(&before, &picture(&qemu).await);
    let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
    stopped.await.unwrap();
    load.check(&setting.content());
    quit(qemu).await;
    what_else_is_in_it_was_kept(&setting, &at_snapshot);
}

fn what_else_is_in_it_was_kept(setting: &Setting, at_snapshot: &[u8]) {
    let image = setting.image.to_str().unwrap();
    qemu_img(&["check", image]);
    let info: Value = serde_json::from_str(&qemu_img(&["info", "--output=json", image])).unwrap();
    let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
    assert_eq!(bitmap["name"], "kept");
    assert_eq!(bitmap["flags"], json!(["auto"]), "it is not to be used");
    let to = setting.folder.path().join("snapshot");
    let to = to.to_str().unwrap();
    qemu_img(&["convert", "-l", "before", "-O", "raw", image, to]);
    assert!(std::fs::read(to).unwrap() == at_snapshot);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_grows_goes_through_the_front_end_and_back() {
    for (_, emulator) in emulators() {
        for (iothread, named) in [(false, false), (true, true)] {
            grows_through_the_front_end(&emulator, iothread, named).await;
        }
    }
}

/// The command line names the backing node that the image had, and the image has none since.
#[tokio::test(flavor = "multi_thread")]
async fn an_image_made_independent_stays_so() {
    for (_, emulator) in emulators() {
        for deleted in [false, true] {
            let setting = Setting::qcow2(true);
            let qemu = setting.guest(&emulator, false).await;
            let load = Load::find(&qemu).await;
            execute(
                &qemu,
                "block-stream",
                json!({"job-id": "s", "device": "d0"}),
            )
            .await;
            job_is(&qemu, "").await;
            if deleted {
                execute(&qemu, "blockdev-del", json!({"node-name": "b0"})).await;
            }
            let before = picture(&qemu).await;
            assert!(!before.iter().any(|line| line.contains("\"backing\"")));
            let server = setting.serve();
            let disks = [(&setting.nodes, &setting.front)];
            insert_all(&qemu.qmp, &disks).await.unwrap();
            load.goes_on(10).await;
            let within = picture(&qemu).await;
            assert!(!within.iter().any(|line| line.contains("\"backing\"")));
            remove_all(&qemu.qmp, &disks).await.unwrap();
            nobody_is_connected(&server).await;
            load.goes_on(3).await;
            assert_same(&before, &picture(&qemu).await);
            execute(&qemu, "stop", json!({})).await;
            load.check(&setting.content());
        }
    }
}

#[tokio::test]
async fn an_image_that_could_not_be_opened_again_is_left_alone() {
    for (_, emulator) in emulators() {
        let setting = Setting::qcow2(false);
        let qemu = setting.guest(&emulator, false).await;
        let before = picture(&qemu).await;
        let server = setting.serve();
        let elsewhere = setting.folder.path().join("elsewhere");
        std::fs::rename(&setting.image, &elsewhere).unwrap();
        let refusal = insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap_err();
        assert!(matches!(refusal, InsertError::Refused(_)), "{refusal}");
        std::fs::rename(&elsewhere, &setting.image).unwrap();
        assert_same(&before, &picture(&qemu).await);
        insert(&qemu.qmp, &setting.nodes, &setting.front)
            .await
            .unwrap();
        // A missing image is not given back, and the guest goes on.
        std::fs::rename(&setting.image, &elsewhere).unwrap();
        let disks = [(&setting.nodes, &setting.front)];
        let refusal = remove_all(&qemu.qmp, &disks).await.unwrap_err();
        assert!(matches!(refusal, RemoveError::Refused(_)), "{refusal}");
        assert_eq!(qemu.state().await, "running");
        std::fs::rename(&elsewhere, &setting.image).unwrap();
        remove_all(&qemu.qmp, &disks).await.unwrap();
        assert_same(&before, &picture(&qemu).await);
        drop(server);
    }
}
