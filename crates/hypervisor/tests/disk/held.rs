//! Tests disks whose nodes are held: nodes that other clients created, removals after a crash at
//! each step, refusals, and a migration that is given up.

use crate::changed::{execute, job_is};
use crate::common::emulators;
use crate::load::Load;
use crate::payload::Qemu;
use crate::setting::{PATIENCE, Setting, assert_same, exact_picture, nobody_is_connected};
use longhaul_hypervisor::disk::{
    FindError, InsertError, RemoveError, device_of, find, insert_all, refusals, remove_all,
};
use longhaul_storage::disk::{ImageLock, ImageUse};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

const WORDS: [&str; 2] = [
    "-drive file=FILE,format=FORMAT,if=virtio",
    "-object iothread,id=io0 -drive file=FILE,format=FORMAT,if=none,id=drive0 \
     -device virtio-blk-pci,drive=drive0,iothread=io0",
];

async fn started(setting: &Setting, emulator: &Path, words: &str) -> Qemu {
    let words = words.replace("FILE", setting.image.to_str().unwrap());
    let words = words.replace("FORMAT", setting.format());
    let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
    setting.given(emulator, "q35", &words).await
}

/// Returns the name of the disk's top node.
async fn top(qemu: &Qemu) -> String {
    let drives = qemu.qmp.query("query-block").await.unwrap();
    let drives = drives.as_array().unwrap().iter();
    let mut tops = drives.filter_map(|drive| drive["inserted"]["node-name"].as_str());
    tops.next().unwrap().to_owned()
}

/// Adds the nodes of an insertion, and exchanges the disk's node, as far as a step.
async fn insert_until(step: usize, qemu: &Qemu, setting: &Setting) {
    let graph = qemu.qmp.query("x-debug-query-block-graph").await.unwrap();
    let top = top(qemu).await;
    let nodes = graph["nodes"].as_array().unwrap();
    let by_name = nodes.iter().find(|node| node["name"] == *top).unwrap();
    let mut edges = graph["edges"].as_array().unwrap().iter();
    let edge = edges.find(|edge| edge["parent"] == by_name["id"] && edge["name"] == "file");
    let child = &edge.unwrap()["child"];
    let file = nodes.iter().find(|node| node["id"] == *child).unwrap();
    let file = file["name"].as_str().unwrap();
    let front = &setting.front;
    let reopen = async |below: &str| {
        let line = format!("qemu-io {top} \"reopen -o file={below}\"");
        let said = qemu.qmp.hmp(&line, PATIENCE).await.unwrap();
        assert_eq!(said, "");
    };
    let server = json!({"type": "unix", "path": front.socket});
    let node = json!({"driver": "nbd", "node-name": front.node, "export": front.export,
        "server": server, "discard": "unmap"});
    let hold = json!({"driver": "raw", "node-name": format!("{}-hold", front.node), "file": file});
    if step >= 1 {
        execute(qemu, "blockdev-add", node).await;
    }
    if step >= 2 {
        execute(qemu, "blockdev-add", hold).await;
    }
    if step >= 3 {
        reopen(&front.node).await;
    }
    if step >= 4 {
        reopen(file).await;
    }
    if step >= 5 {
        execute(qemu, "blockdev-del", json!({"node-name": front.node})).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_died_at_any_step_leaves_nothing() {
    for (label, emulator) in emulators() {
        for qcow2 in [false, true] {
            let mut setting = Setting::plain(qcow2);
            let qemu = started(&setting, &emulator, WORDS[0]).await;
            setting.find(&qemu).await;
            let load = Load::find(&qemu).await;
            let before = exact_picture(&qemu).await;
            let server = setting.serve();
            for step in 0..=5 {
                for inserts in [false, true] {
                    eprintln!("{label}: qcow2: {qcow2}, step {step}, goes on: {inserts}");
                    execute(&qemu, "stop", json!({})).await;
                    insert_until(step, &qemu, &setting).await;
                    execute(&qemu, "cont", json!({})).await;
                    load.goes_on(2).await;
                    // The next agent reads the nodes in the note.
                    let noted = serde_json::to_string(&setting.nodes).unwrap();
                    let nodes = serde_json::from_str(&noted).unwrap();
                    let disks = [(&nodes, &setting.front)];
                    if inserts {
                        insert_all(&qemu.qmp, &disks).await.unwrap();
                        load.goes_on(2).await;
                        assert!(server.connections() >= 1);
                    }
                    remove_all(&qemu.qmp, &disks).await.unwrap();
                    nobody_is_connected(&server).await;
                    assert_same(&before, &exact_picture(&qemu).await);
                }
            }
            load.goes_on(3).await;
            execute(&qemu, "stop", json!({})).await;
            load.check(&setting.content());
        }
    }
}

/// The nodes after a snapshot and after a mirror that took over are on no command line.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_other_clients_have_changed_is_taken_as_it_is() {
    for (label, emulator) in emulators() {
        for (what, words) in [
            ("snapshot", WORDS[0]),
            ("mirror", WORDS[0]),
            ("mirror", WORDS[1]),
        ] {
            eprintln!("{label}: {what}");
            let mut setting = Setting::plain(what == "snapshot");
            let qemu = started(&setting, &emulator, words).await;
            let load = Load::find(&qemu).await;
            let made = setting.folder.path().join("made");
            let device = top(&qemu).await;
            match what {
                "snapshot" => {
                    let arguments = json!({"device": "virtio0", "snapshot-file": made,
                        "format": "qcow2"});
                    execute(&qemu, "blockdev-snapshot-sync", arguments).await;
                }
                _ => {
                    let arguments = json!({"job-id": "theirs", "device": device, "target": made,
                        "sync": "full", "format": "raw"});
                    execute(&qemu, "drive-mirror", arguments).await;
                    job_is(&qemu, "ready").await;
                    let busy = device_of(&qemu.qmp, qemu.pid(), &setting.image).await;
                    let busy = find(&qemu.qmp, qemu.pid(), &busy.unwrap())
                        .await
                        .unwrap_err();
                    assert!(busy.to_string().contains("job"), "{busy}");
                    execute(&qemu, "job-complete", json!({"id": "theirs"})).await;
                    job_is(&qemu, "").await;
                }
            }
            let gone = device_of(&qemu.qmp, qemu.pid(), &setting.image).await;
            assert!(matches!(gone, Err(FindError::Nodes(_))), "{gone:?}");
            setting.image = made;
            setting.find(&qemu).await;
            let before = exact_picture(&qemu).await;
            let server = setting.serve();
            let disks = [(&setting.nodes, &setting.front)];
            insert_all(&qemu.qmp, &disks).await.unwrap();
            load.goes_on(10).await;
            assert!(server.connections() >= 1);
            remove_all(&qemu.qmp, &disks).await.unwrap();
            nobody_is_connected(&server).await;
            load.goes_on(3).await;
            assert_same(&before, &exact_picture(&qemu).await);
            execute(&qemu, "stop", json!({})).await;
            load.check(&setting.content());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_disk_that_cannot_be_exchanged_is_used_as_before() {
    for (_, emulator) in emulators() {
        for (qcow2, words) in [(false, WORDS[0]), (true, WORDS[0]), (true, WORDS[1])] {
            let mut setting = Setting::plain(qcow2);
            let qemu = started(&setting, &emulator, words).await;
            setting.find(&qemu).await;
            let load = Load::find(&qemu).await;
            let before = exact_picture(&qemu).await;
            let server = setting.serve();
            let mut wrong = setting.front.clone();
            wrong.export = "another name".to_owned();
            let refusal = insert_all(&qemu.qmp, &[(&setting.nodes, &wrong)]).await;
            assert!(
                matches!(refusal, Err(InsertError::Refused(_))),
                "{refusal:?}"
            );
            assert_same(&before, &exact_picture(&qemu).await);
            let disks = [(&setting.nodes, &setting.front)];
            insert_all(&qemu.qmp, &disks).await.unwrap();
            load.goes_on(5).await;
            let image_use = if qcow2 {
                ImageUse::Growing
            } else {
                ImageUse::Raw
            };
            let lock = ImageLock::alone(setting.disk().file(), image_use).unwrap();
            for _ in 0..3 {
                let refusal = remove_all(&qemu.qmp, &disks).await.unwrap_err();
                assert!(matches!(refusal, RemoveError::Refused(_)), "{refusal}");
                assert!(refusal.to_string().contains("lock"), "{refusal}");
                assert_eq!(qemu.state().await, "running");
                load.goes_on(3).await;
            }
            drop(lock);
            remove_all(&qemu.qmp, &disks).await.unwrap();
            nobody_is_connected(&server).await;
            load.goes_on(3).await;
            assert_same(&before, &exact_picture(&qemu).await);
            execute(&qemu, "stop", json!({})).await;
            load.check(&setting.content());
        }
    }
}

/// The guest is stopped for good as the source of a migration, and goes on here after all.
#[tokio::test(flavor = "multi_thread")]
async fn a_held_disk_is_used_again_after_a_migration_that_came_to_nothing() {
    for (label, emulator) in emulators() {
        for (qcow2, words) in [(false, WORDS[0]), (true, WORDS[0]), (true, WORDS[1])] {
            eprintln!("{label}: qcow2: {qcow2}, {words}");
            let mut setting = Setting::plain(qcow2);
            let qemu = started(&setting, &emulator, words).await;
            setting.find(&qemu).await;
            let load = Load::find(&qemu).await;
            let before = exact_picture(&qemu).await;
            let server = setting.serve();
            let disks = [(&setting.nodes, &setting.front)];
            insert_all(&qemu.qmp, &disks).await.unwrap();
            load.goes_on(5).await;
            execute(
                &qemu,
                "migrate-set-parameters",
                json!({"max-bandwidth": 1 << 30}),
            )
            .await;
            execute(&qemu, "migrate", json!({"uri": "exec:cat > /dev/null"})).await;
            let until = Instant::now() + PATIENCE;
            while qemu.state().await != "postmigrate" {
                assert!(Instant::now() < until, "it does not end");
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            execute(&qemu, "cont", json!({})).await;
            load.goes_on(3).await;
            remove_all(&qemu.qmp, &disks).await.unwrap();
            nobody_is_connected(&server).await;
            load.goes_on(3).await;
            assert_same(&before, &exact_picture(&qemu).await);
            execute(&qemu, "stop", json!({})).await;
            load.check(&setting.content());
        }
    }
}

#[tokio::test]
async fn disks_that_cannot_be_taken_are_named_beforehand_with_what_to_do() {
    for (_, emulator) in emulators() {
        let setting = Setting::plain(false);
        let [vmdk, part] = ["vmdk", "part"].map(|name| setting.folder.path().join(name));
        let image = vmdk.to_str().unwrap();
        crate::setting::qemu_img(&["create", "-q", "-f", "vmdk", image, "1M"]);
        std::fs::write(&part, [0; 1 << 20]).unwrap();
        let words = format!(
            "{} -drive file={image},format=vmdk,if=virtio \
             -drive file={},format=raw,size=65536,if=virtio",
            WORDS[0],
            part.display()
        );
        let qemu = started(&setting, &emulator, &words).await;
        let gone = setting.folder.path().join("gone");
        let disks = [
            ("vda", &*setting.image),
            ("vdb", &*vmdk),
            ("vdc", &*part),
            ("vdd", &*gone),
        ];
        let found = refusals(&qemu.qmp, qemu.pid(), &disks).await.unwrap();
        let expected = [
            ("disk vdb", "`vmdk`"),
            ("disk vdc", "only a part"),
            ("disk vdd", "none of its devices"),
        ];
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (blocker, (disk, why)) in found.iter().zip(expected) {
            assert!(
                blocker.text.contains(disk) && blocker.text.contains(why),
                "{blocker:?}"
            );
            assert!(!blocker.hint.is_empty());
        }
        let nodes: Value = qemu.qmp.query("query-named-block-nodes").await.unwrap();
        assert!(!nodes.to_string().contains("lh-"));
    }
}
