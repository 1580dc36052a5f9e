//! Tests raw disks without a format node: the device uses the file's node directly.

use crate::common::emulators;
use crate::load::Load;
use crate::setting::{Setting, assert_same, nobody_is_connected, picture};
use longhaul_hypervisor::disk::{InsertError, insert, insert_all, remove_all};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use serde_json::json;
use std::path::Path;
use std::time::Duration;

async fn switches_under_load(emulator: &Path, iothread: bool) {
    let setting = Setting::direct();
    let qemu = setting.guest(emulator, iothread).await;
    let before = picture(&qemu).await;
    let load = Load::find(&qemu).await;
    let server = setting.serve();
    let disks = [(&setting.nodes, &setting.front)];
    for _ in 0..4 {
        load.goes_on(6).await;
        if iothread {
            let refusal = insert(&qemu.qmp, &setting.nodes, &setting.front)
                .await
                .unwrap_err();
            assert!(matches!(refusal, InsertError::Runs(_)), "{refusal}");
        }
        let stood = insert_all(&qemu.qmp, &disks).await.unwrap();
        assert_eq!(stood > Duration::ZERO, iothread);
        insert_all(&qemu.qmp, &disks).await.unwrap();
        load.goes_on(6).await;
        assert!(server.connections() >= 1);
        let stood = remove_all(&qemu.qmp, &disks).await.unwrap();
        assert_eq!(stood > Duration::ZERO, iothread);
        nobody_is_connected(&server).await;
    }
    load.goes_on(6).await;
    assert_same(&before, &picture(&qemu).await);
    assert_eq!(qemu.state().await, "running");
    let stopped = qemu.qmp.execute("stop", json!({}), COMMAND_TIMEOUT);
    stopped.await.unwrap();
    load.check(&setting.content());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_a_format_node_goes_through_the_front_end_and_back() {
    for (_, emulator) in emulators() {
        for iothread in [false, true] {
            switches_under_load(&emulator, iothread).await;
        }
    }
}
