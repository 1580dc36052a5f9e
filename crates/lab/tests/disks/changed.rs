//! Tests changes of a guest's disks by its owner during a move, over a second monitor: the move is
//! given up, and the guest's writes are where the owner has put them.

use crate::monitor::Monitor;
use crate::stage::{DISK_BYTES, GUEST, LIMIT, Stage};
use longhaul_api::Phase;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::Move;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;

/// When the change is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    Begun,
    /// A part has been sent.
    UnderWay,
    /// Everything is ready for the guest to be stopped.
    Stopping,
}

const MOMENTS: [Moment; 3] = [Moment::Begun, Moment::UnderWay, Moment::Stopping];
/// The progress of a move at `UnderWay`, in bytes.
const UNDER_WAY_BYTES: u64 = 1 << 20;

/// Returns the hook that holds a move just before the guest is stopped, while a file exists.
pub(crate) fn holding_hook(folder: &std::path::Path) -> toml::Table {
    use std::os::unix::fs::PermissionsExt;
    let (hold, held) = (folder.join("hold"), folder.join("is-held"));
    let script = format!(
        "#!/bin/sh\n[ -e {hold} ] || exit 0\n: > {held}\nwhile [ -e {hold} ]; do sleep 0.02; done\n\
         rm {held}\n",
        hold = hold.display(),
        held = held.display()
    );
    let hook = folder.join("hold-hook");
    fs::write(&hook, script).unwrap();
    fs::set_permissions(&hook, fs::Permissions::from_mode(0o755)).unwrap();
    let text = format!(
        "[source]\nstopping = {{ command = [\"{}\"], within = \"120s\" }}",
        hook.display()
    );
    toml::from_str(&text).unwrap()
}

impl Stage {
    fn hold_file(&self) -> PathBuf {
        self.folders[0].join("hold")
    }

    /// Begins a move, and waits for that moment.
    fn moves_until(&self, moment: Moment, how: &str) -> Move {
        let mut words = vec!["--disks", how, "--patience", "3s"];
        match moment {
            Moment::Stopping => fs::write(self.hold_file(), "").unwrap(),
            _ => words.extend(["--bandwidth", "6mbit"]),
        }
        let to = self.lab.host(1).unwrap();
        let mut moving = self.product.migrate(0, GUEST, to, &words).unwrap();
        let began = moving.wait_for_phase(Phase::Precopy, LIMIT);
        assert!(began, "{}\n{}", moving.so_far().why(), self.logs());
        let come = || match moment {
            Moment::Begun => true,
            Moment::UnderWay => self
                .said(0)
                .is_some_and(|said| said.link.sent_bytes > UNDER_WAY_BYTES),
            Moment::Stopping => self.folders[0].join("is-held").exists(),
        };
        assert!(wait_until(LIMIT, come), "{}", self.logs());
        moving
    }
}

/// Returns the node that a disk's device uses.
fn top(owner: &mut Monitor, disk: &str) -> String {
    let devices = owner.ask("query-block");
    let device = devices.as_array().unwrap().iter();
    let path = format!("/machine/peripheral/blk-{disk}/virtio-backend");
    let mut device = device.filter(|device| device["qdev"] == *path);
    let node = &device.next().unwrap()["inserted"]["node-name"];
    node.as_str().unwrap().to_owned()
}

/// Completes a job once it is ready, and waits for its end.
fn complete(owner: &mut Monitor, job: &str) {
    let status = |job: &str, owner: &mut Monitor| {
        let jobs = owner.ask("query-jobs");
        let mut jobs = jobs.as_array().unwrap().iter();
        let found = jobs.find(|one| one["id"] == job);
        found.map(|one| one["status"].as_str().unwrap().to_owned())
    };
    let ready = || status(job, owner).is_none_or(|status| status == "ready");
    assert!(wait_until(LIMIT, ready));
    // A job stays ready until it is ordered to complete.
    if status(job, owner).is_some() {
        owner.ask_with("job-complete", &json!({"id": job}));
    }
    assert!(wait_until(LIMIT, || status(job, owner).is_none()));
}

/// A snapshot of a disk, which can be undone.
struct Snapshot {
    node: String,
    overlay: PathBuf,
}

impl Snapshot {
    fn of(stage: &Stage, owner: &mut Monitor, disk: &str, n: usize) -> Self {
        let node = format!("snap{n}");
        let overlay = stage.folders[0].join(format!("overlay-{n}"));
        let arguments = json!({"node-name": top(owner, disk), "snapshot-file": overlay,
            "snapshot-node-name": node, "format": "qcow2"});
        owner.ask_with("blockdev-snapshot-sync", &arguments);
        Self { node, overlay }
    }

    /// Commits the guest's writes since then into the image below.
    fn commit(self, owner: &mut Monitor) {
        let job = json!({"job-id": "commit", "device": self.node});
        owner.ask_with("block-commit", &job);
        complete(owner, "commit");
        fs::remove_file(self.overlay).unwrap();
    }
}

/// Returns the backing file in an overlay's header.
fn backing_of(owner: &mut Monitor, node: &str) -> Value {
    let nodes = owner.ask_with("query-named-block-nodes", &json!({"flat": true}));
    let mut nodes = nodes.as_array().unwrap().iter();
    let node = nodes.find(|one| one["node-name"] == node).unwrap();
    node["image"]["backing-filename"].clone()
}

#[test]
fn a_snapshot_gives_a_move_up_and_the_guest_keeps_what_it_wrote() {
    let kinds = ["raw,writeback", "qcow2,writeback"];
    let Some(stage) = Stage::with_owner("10.0", "400mbit,2ms", &kinds) else {
        return;
    };
    let mut owner = stage.owner(0);
    for (strategy, how) in ["precopy", "mirror", "hybrid", "postcopy"]
        .iter()
        .enumerate()
    {
        for (at, moment) in MOMENTS.into_iter().enumerate() {
            let n = strategy * MOMENTS.len() + at;
            let disk = (strategy + at) % 2;
            eprintln!("{how}, {moment:?}, {}", kinds[disk]);
            let moving = stage.moves_until(moment, how);
            let snapshot = Snapshot::of(&stage, &mut owner, ["vda", "vdb"][disk], n);
            // It writes to the overlay, and syncs it.
            stage.goes_on();
            // If nothing holds the move.
            let _ = fs::remove_file(stage.hold_file());
            let ended = stage.ended(moving);
            assert!(!ended.completed(), "the move took no notice");
            let why = ended.why();
            assert!(why.contains("has changed"), "{why}\n{}", stage.logs());
            stage.stays();
            let backing = backing_of(&mut owner, &snapshot.node);
            let image = stage.image_of(0, disk);
            assert_eq!(backing, json!(image), "{how}, {moment:?}");
            snapshot.commit(&mut owner);
            stage.goes_on();
        }
    }
    stage.judge(0);
}

#[test]
fn what_is_under_way_on_a_guests_disks_is_in_its_plan() {
    let kinds = ["raw,writeback", "qcow2,writeback"];
    let Some(stage) = Stage::with_owner("10.0", "400mbit,2ms", &kinds) else {
        return;
    };
    let mut owner = stage.owner(0);
    let to = stage.lab.host(1).unwrap();
    let refused = |what: &str| {
        let mut plan = stage.product.agent(0).unwrap().command().unwrap();
        let planned = plan.args(["plan", GUEST, "--to", to.name()]).output();
        let planned = String::from_utf8(planned.unwrap().stdout).unwrap();
        assert!(planned.contains(what), "{planned}");
        let ended = stage.product.migrate(0, GUEST, to, &[]).unwrap();
        let ended = stage.ended(ended);
        assert!(ended.why().contains(what), "{}", ended.why());
        stage.stays();
    };
    let target = json!({"driver": "null-co", "node-name": "nowhere", "size": DISK_BYTES});
    owner.ask_with("blockdev-add", &target);
    let top = top(&mut owner, "vda");
    let backup = json!({"job-id": "nightly", "device": top, "target": "nowhere", "sync": "none"});
    owner.ask_with("blockdev-backup", &backup);
    refused("job nightly (backup");
    owner.ask_with("job-cancel", &json!({"id": "nightly"}));
    complete(&mut owner, "nightly");
    let path = stage.folders[0].join("nbd");
    let address = json!({"type": "unix", "data": {"path": path}});
    owner.ask_with("nbd-server-start", &json!({"addr": address}));
    let export = json!({"type": "nbd", "id": "pull", "node-name": top});
    owner.ask_with("block-export-add", &export);
    refused("export pull (nbd)");
    owner.ask_with("nbd-server-stop", &json!({}));
    for (n, disk) in ["vda", "vdb"].into_iter().enumerate() {
        let snapshot = Snapshot::of(&stage, &mut owner, disk, n);
        refused("and not on its image");
        snapshot.commit(&mut owner);
    }
    // With all that undone it moves, with its writes.
    stage.moves(0, "precopy");
    stage.judge(1);
}
