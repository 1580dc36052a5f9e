//! A disk that stands on a base image, which both hosts have from a repository.

use crate::stage::{GUEST, LIMIT, OnBase, Room, Stage};
use longhaul_api::Report;
use longhaul_lab::process::wait_until;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// What the guest has written to that disk: a byte, where, and how much.
const WRITTEN: (u8, u64, u64) = (9, 1 << 20, 100 << 10);

fn base_of(stage: &Stage, host: usize) -> PathBuf {
    let id = &stage.on_base.as_ref().unwrap().id;
    stage.state(host).join("bases").join(format!("{id}.raw"))
}

fn moves(stage: &Stage, from: usize, how: &str) -> Report {
    let to = stage.lab.host(1 - from).unwrap();
    let words = ["--disks", how, "--verify"];
    let moving = stage.product.migrate(from, GUEST, to, &words).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    stage.goes_on();
    for host in [0, 1] {
        stage.nothing_is_left(host);
        for disk in 0..2 {
            let image = stage.image_of(host, disk);
            assert_eq!(image.exists(), host != from, "{image:?}");
        }
    }
    *finished.report.unwrap()
}

/// The move does not come about, and changes nothing.
fn does_not(stage: &Stage) -> String {
    let to = stage.lab.host(1).unwrap();
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(!finished.completed());
    stage.stays();
    finished.why()
}

/// The guest reads there what the base image has, and what was written.
fn reads_right(stage: &Stage, host: usize) {
    let reads = |byte: u8, at: u64, bytes: u64| {
        let said = stage.io_of_guest(host, &format!("read -P {byte} {at} {bytes}"));
        let right = said.contains(&format!("read {bytes}/{bytes}"));
        assert!(right, "{said}\n{}", stage.logs());
    };
    let (byte, bytes) = OnBase::PATTERN;
    reads(byte, 0, bytes as u64);
    let (byte, at, bytes) = WRITTEN;
    reads(byte, at, bytes);
    // Behind the end of the base image.
    reads(0, OnBase::DISK_BYTES - 4096, 4096);
}

/// QEMU has this host's base image open, and none of the other's.
fn stands_on_its_own(stage: &Stage, host: usize) {
    let flat = json!({ "flat": true });
    let nodes = stage
        .monitor(host)
        .ask_with("query-named-block-nodes", &flat);
    let nodes: Vec<Value> = nodes.as_array().unwrap().clone();
    let files: Vec<&str> = nodes
        .iter()
        .filter_map(|node| node["file"].as_str())
        .collect();
    let has = |host: usize| files.contains(&base_of(stage, host).to_str().unwrap());
    assert_eq!((has(host), has(1 - host)), (true, false), "{files:?}");
}

/// Puts files away, and back.
struct Away(PathBuf, PathBuf);

impl Away {
    fn take(path: PathBuf) -> Self {
        let away = path.with_extension("away");
        fs::rename(&path, &away).unwrap();
        Self(path, away)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        fs::rename(&self.1, &self.0).unwrap();
    }
}

#[test]
fn a_disk_on_a_base_image_moves_without_it() {
    let Some(stage) = Stage::on_a_base("10.0", "400mbit,2ms") else {
        return;
    };
    let (byte, at, bytes) = WRITTEN;
    let said = stage.io_of_guest(0, &format!("write -P {byte} {at} {bytes}"));
    assert!(said.contains(&format!("wrote {bytes}/{bytes}")), "{said}");
    let on_base = stage.on_base.as_ref().unwrap();
    let (id, repository) = (on_base.id.clone(), on_base.repository.clone());
    let content = on_base.content.clone();
    let fetch = format!("longhaul image fetch {}", &id[..12]);

    // Paris has nothing of it, and cannot have it.
    let away = Away::take(repository.clone());
    let why = does_not(&stage);
    assert!(
        why.contains("cannot have the base image") && why.contains(&fetch),
        "{why}"
    );
    drop(away);
    let room = Room::make(&stage.state(1).join("bases"), "40m");
    let why = does_not(&stage);
    assert!(why.contains("free for base images"), "{why}");
    drop(room);
    fs::remove_dir(stage.state(1).join("bases")).unwrap();
    let away = Away::take(repository.join("images").join(&id));
    assert!(does_not(&stage).contains("cannot have the base image"));
    drop(away);
    // A stripe of it is something else.
    let stripes = fs::read_dir(repository.join("stripes")).unwrap();
    let folder = stripes.map(|folder| folder.unwrap().path()).max().unwrap();
    let stripe = fs::read_dir(folder)
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let good = fs::read(&stripe).unwrap();
    fs::write(&stripe, "something else").unwrap();
    let why = does_not(&stage);
    assert!(
        why.contains("does not come") && why.contains(&fetch),
        "{why}"
    );
    let log = fs::read_to_string(stage.product.agent(1).unwrap().log()).unwrap();
    assert!(log.contains("is damaged"), "{log}");
    fs::write(&stripe, good).unwrap();
    // Lyon's own is not what it was, or may not be.
    let base = base_of(&stage, 0);
    fs::set_permissions(&base, fs::Permissions::from_mode(0o644)).unwrap();
    let why = does_not(&stage);
    assert!(why.contains("does not have as a whole"), "{why}");
    fs::set_permissions(&base, fs::Permissions::from_mode(0o444)).unwrap();

    let there = moves(&stage, 0, "precopy");
    let base = there.disks.iter().find_map(|disk| disk.base.clone());
    assert_eq!(base, Some(id));
    // What came before the bad stripe was found is not fetched again.
    let read = there.repository_bytes.unwrap();
    assert!((100 << 10..4 << 20).contains(&read), "{read}");
    let travelled = there.disks.iter().find(|disk| disk.name == "vdb").unwrap();
    assert!(travelled.image_bytes < 1 << 20, "{travelled:?}");
    assert!(fs::read(base_of(&stage, 1)).unwrap() == content);
    stands_on_its_own(&stage, 1);
    reads_right(&stage, 1);
    stage.judge(1);
}

#[test]
fn a_disk_on_a_base_image_comes_back_and_starts_anew() {
    let Some(mut stage) = Stage::on_a_base("7.2", "400mbit,2ms") else {
        return;
    };
    let (byte, at, bytes) = WRITTEN;
    stage.io_of_guest(0, &format!("write -P {byte} {at} {bytes}"));
    moves(&stage, 0, "mirror");
    stands_on_its_own(&stage, 1);
    let back = moves(&stage, 1, "auto");
    assert_eq!(back.repository_bytes, Some(0), "it is there already");
    stands_on_its_own(&stage, 0);
    reads_right(&stage, 0);
    moves(&stage, 0, "precopy");
    stage.halt(1);

    // Its image names a file of the other host's, which is not what is opened.
    let other = Away::take(base_of(&stage, 0));
    let file = stage
        .lab
        .host(0)
        .unwrap()
        .folder()
        .join(format!("{GUEST}.toml"));
    let words = ["guests", "start", file.to_str().unwrap()];
    let start = || stage.product.agent(1).unwrap().run(&words);
    let own = Away::take(base_of(&stage, 1));
    let refused = start().unwrap_err().to_string();
    assert!(refused.contains("longhaul image fetch"), "{refused}");
    drop(own);
    start().unwrap();
    let up = || stage.product.guest(1, GUEST).unwrap().is_some();
    assert!(wait_until(LIMIT, up));
    stands_on_its_own(&stage, 1);
    reads_right(&stage, 1);
    drop(other);
    stage.product.stop_guest(1, GUEST).unwrap();
    stage.judge_halted(1);
}
