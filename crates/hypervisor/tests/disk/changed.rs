//! Tests changes below a disk by other clients while a disk export is in place: a snapshot, a
//! mirror that takes over, another medium. The change is detected, the disk export is removed, and
//! the guest keeps its writes.

use crate::common::emulators;
use crate::load::Load;
use crate::payload::Qemu;
use crate::setting::{Setting, nobody_is_connected, qemu_img};
use longhaul_hypervisor::disk::{Layout, insert_all, remove_all};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const SIZE: &str = "17825792";

type Make = fn() -> Setting;

const KINDS: [(&str, Make); 4] = [
    ("raw", Setting::new),
    ("raw without a format node", Setting::direct),
    ("qcow2", || Setting::qcow2(false)),
    ("qcow2 with named backing", || Setting::qcow2(true)),
];

pub(crate) async fn execute(qemu: &Qemu, command: &str, arguments: Value) {
    let done = qemu.qmp.execute(command, arguments, COMMAND_TIMEOUT).await;
    done.unwrap_or_else(|error| panic!("{command}: {error}"));
}

/// Makes one change, and returns the guest's image afterwards.
async fn do_it(what: &str, qemu: &Qemu, setting: &Setting) -> PathBuf {
    let overlay = setting.folder.path().join("overlay");
    let top = setting.top();
    match what {
        "snapshot-sync" => {
            let arguments = json!({"node-name": top, "snapshot-file": overlay,
                "snapshot-node-name": "snap0", "format": "qcow2"});
            execute(qemu, "blockdev-snapshot-sync", arguments).await;
        }
        "snapshot" => {
            let [image, made] = [&setting.image, &overlay].map(|path| path.to_str().unwrap());
            qemu_img(&[
                "create",
                "-q",
                "-u",
                "-f",
                "qcow2",
                "-b",
                image,
                "-F",
                setting.format(),
                made,
                SIZE,
            ]);
            let node = json!({"driver": "qcow2", "node-name": "snap0", "backing": null,
                "file": {"driver": "file", "filename": overlay}});
            execute(qemu, "blockdev-add", node).await;
            let arguments = json!({"node": top, "overlay": "snap0"});
            execute(qemu, "blockdev-snapshot", arguments).await;
        }
        "mirror" => {
            let image = overlay.to_str().unwrap();
            qemu_img(&["create", "-q", "-f", "qcow2", image, SIZE]);
            let node = json!({"driver": "qcow2", "node-name": "m0",
                "file": {"driver": "file", "filename": overlay}});
            execute(qemu, "blockdev-add", node).await;
            let arguments = json!({"job-id": "theirs", "device": top, "target": "m0",
                "sync": "full"});
            execute(qemu, "blockdev-mirror", arguments).await;
            job_is(qemu, "ready").await;
            execute(qemu, "job-complete", json!({"id": "theirs"})).await;
            job_is(qemu, "").await;
        }
        other => panic!("{other}"),
    }
    overlay
}

pub(crate) async fn job_is(qemu: &Qemu, status: &str) {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let jobs = qemu.qmp.query("query-jobs").await.unwrap();
        let jobs = jobs.as_array().unwrap();
        if jobs
            .first()
            .map_or("", |job| job["status"].as_str().unwrap())
            == status
        {
            return;
        }
        assert!(Instant::now() < until, "{jobs:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn goes_on_after(what: &str, setting: &Setting, qemu: &Qemu) {
    let load = Load::find(qemu).await;
    let before = Layout::look(&qemu.qmp, &[]).await.unwrap();
    let server = setting.serve();
    load.goes_on(6).await;
    let disks = [(&setting.nodes, &setting.front)];
    insert_all(&qemu.qmp, &disks).await.unwrap();
    load.goes_on(20).await;
    let fronts = [(setting.nodes.clone(), setting.front.clone())];
    let look = || async { Layout::look(&qemu.qmp, &fronts).await.unwrap() };
    // The disk export itself is not a change.
    before.compare(&look().await).unwrap();
    let now_used = do_it(what, qemu, setting).await;
    load.goes_on(20).await;
    let changed = before.compare(&look().await).unwrap_err();
    eprintln!("{changed}");
    assert!(changed.to_string().contains("overlay"), "{changed}");
    remove_all(&qemu.qmp, &disks).await.unwrap();
    nobody_is_connected(&server).await;
    load.goes_on(20).await;
    let jobs = qemu.qmp.query("query-jobs").await.unwrap();
    assert_eq!(jobs, json!([]), "nothing of ours is left");
    let nodes = qemu.qmp.query("query-named-block-nodes").await.unwrap();
    assert!(!nodes.to_string().contains("\"n0\""), "{nodes}");
    let nodes = nodes.as_array().unwrap().iter();
    for file in nodes.filter_map(|node| node["image"]["backing-filename"].as_str()) {
        assert!(!file.contains("nbd"), "{file}");
    }
    qemu.qmp.query("stop").await.unwrap();
    drop(server);
    let raw = setting.folder.path().join("content");
    let [image, to] = [&now_used, &raw].map(|path| path.to_str().unwrap());
    qemu_img(&["convert", "-U", "-f", "qcow2", "-O", "raw", image, to]);
    load.check(&std::fs::read(raw).unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_owner_does_is_noticed_and_the_guest_keeps_its_writes() {
    for (label, emulator) in emulators() {
        for (kind, make) in KINDS {
            for what in ["snapshot-sync", "snapshot", "mirror"] {
                eprintln!("{label}: {kind}: {what}");
                let setting = make();
                let qemu = setting.guest(&emulator, false).await;
                goes_on_after(what, &setting, &qemu).await;
            }
        }
    }
}
