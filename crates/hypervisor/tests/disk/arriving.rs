//! Tests the disk export below a disk of an arriving guest: present from the start, or inserted
//! before the guest runs, and removed while it runs.

use crate::common::emulators;
use crate::load::Load;
use crate::payload::Qemu;
use crate::setting::{Setting, assert_same, picture};
use longhaul_hypervisor::disk::{insert_all, remove_all};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// When the disk export is inserted below the disk of the destination's QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Its nodes are created so.
    FromTheStart,
    /// While it waits for the guest.
    Waiting,
    /// When the guest is loaded, and does not run yet.
    Loaded,
}

async fn execute(qemu: &Qemu, command: &str, arguments: Value) {
    let done = qemu.qmp.execute(command, arguments, COMMAND_TIMEOUT).await;
    done.unwrap();
}

async fn state(qemu: &Qemu, expected: &str) {
    let until = Instant::now() + PATIENCE;
    while qemu.state().await != expected {
        assert!(Instant::now() < until, "it does not come to {expected}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn migrate(source: &Qemu, destination: &Qemu) {
    // QEMU 7.2 would read the image's header when the guest is loaded, and not when it runs.
    let late = json!([{"capability": "late-block-activate", "state": true}]);
    let capabilities = json!({"capabilities": late});
    execute(destination, "migrate-set-capabilities", capabilities).await;
    let uri = format!("unix:{}", destination.folder.path().join("in").display());
    execute(destination, "migrate-incoming", json!({"uri": uri})).await;
    let parameters = json!({"max-bandwidth": 1 << 30});
    execute(source, "migrate-set-parameters", parameters).await;
    execute(source, "migrate", json!({"uri": uri})).await;
    state(source, "postmigrate").await;
    state(destination, "paused").await;
}

/// Moves a guest from one image to another, whose content arrives when the guest has stopped.
async fn arrives(emulator: &Path, setting: fn() -> Setting, iothread: bool, moment: Moment) {
    let (there, here) = (setting(), setting());
    let source = there.guest(emulator, iothread).await;
    let load = Load::find(&source).await;
    let server = here.serve();
    let spec = match moment {
        Moment::FromTheStart => here.spec_through_the_front_end(emulator, iothread),
        _ => here.spec(emulator, iothread),
    };
    let destination = Qemu::waiting(&spec).await;
    let disks = [(&here.nodes, &here.front)];
    if moment == Moment::Waiting {
        insert_all(&destination.qmp, &disks).await.unwrap();
    }
    load.goes_on(20).await;
    migrate(&source, &destination).await;
    here.take_content(&there);
    if moment == Moment::Loaded {
        insert_all(&destination.qmp, &disks).await.unwrap();
    }
    assert!(server.connections() >= 1);
    execute(&destination, "cont", json!({})).await;
    let load = Load::find(&destination).await;
    load.goes_on(20).await;
    remove_all(&destination.qmp, &disks).await.unwrap();
    assert_eq!(destination.state().await, "running");
    assert_eq!(server.stop(PATIENCE), 0);
    load.goes_on(20).await;
    let after = picture(&destination).await;
    execute(&destination, "stop", json!({})).await;
    load.check(&here.content());
    drop((source, destination));
    // As if no node had been inserted.
    let ordinary = here.guest(emulator, iothread).await;
    Load::find(&ordinary).await.goes_on(1).await;
    assert_same(&picture(&ordinary).await, &after);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_disk_arrives_on_the_front_end_and_leaves_it() {
    for (_, emulator) in emulators() {
        for moment in [Moment::FromTheStart, Moment::Waiting, Moment::Loaded] {
            arrives(&emulator, Setting::new, false, moment).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_without_a_format_node_arrives_on_the_front_end_and_leaves_it() {
    for (_, emulator) in emulators() {
        arrives(&emulator, Setting::direct, true, Moment::Waiting).await;
        arrives(&emulator, Setting::direct, false, Moment::Loaded).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_grows_arrives_on_the_front_end_and_leaves_it() {
    for (_, emulator) in emulators() {
        for moment in [Moment::FromTheStart, Moment::Waiting, Moment::Loaded] {
            arrives(&emulator, || Setting::qcow2(true), false, moment).await;
        }
    }
}
