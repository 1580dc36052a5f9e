//! Tests guests that move with a disk: their writes are judged from outside after each move, and
//! after interrupted moves. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod base;
mod changed;
#[path = "../common/monitor.rs"]
mod monitor;
mod parcel;
mod replica;
mod rest;
mod stage;
mod tracked;
mod volumes;

use longhaul_api::{Outcome, Phase};
use longhaul_lab::installed;
use longhaul_lab::process::wait_until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use stage::{DISK_BYTES, GUEST, IDLE_BYTES, LIMIT, Stage};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

/// A busy machine has no link of 400 Mbit/s: passes that must fit 300 ms may take minutes there.
const SOON: [&str; 2] = ["--downtime", "1s"];

fn there_and_back(version: &str) {
    let kinds = ["raw,none", "qcow2,writeback"];
    let Some(stage) = Stage::with_idle(version, "400mbit,2ms", &kinds) else {
        return;
    };
    let allocated = |path: PathBuf| fs::metadata(path).unwrap().blocks() * 512;
    // A file of the destination has the content of the idle disk; with QEMU 10 it is another
    // guest's disk.
    let idle = kinds.len();
    let new = stage.folders[1].join("new");
    fs::create_dir(&new).unwrap();
    fs::copy(stage.image_of(0, idle), new.join("copy")).unwrap();
    fs::rename(new, stage.folders[1].join("held")).unwrap();
    let log = stage.product.agent(1).unwrap().log().to_owned();
    let known = || {
        fs::read_to_string(&log)
            .unwrap()
            .contains("its content is known")
    };
    assert!(wait_until(LIMIT, known), "{}", stage.logs());
    let there = stage.moves_with(0, "auto", &SOON);
    let bytes = &there.bytes;
    assert!(bytes.kept_bytes > Some(IDLE_BYTES * 9 / 10), "{bytes:?}");
    assert!(allocated(stage.image(1)) < DISK_BYTES + (1 << 20));
    // It returns to the files that it left, of which a part was changed.
    let left = fs::read(stage.set_aside(0, idle)).unwrap();
    let blocks = left.chunks(4096).enumerate();
    let changed = blocks.flat_map(|(n, block)| match n % 3 {
        0 => vec![0x55; block.len()],
        _ => block.to_vec(),
    });
    fs::write(stage.set_aside(0, idle), changed.collect::<Vec<u8>>()).unwrap();
    let back = stage.moves_with(1, "mirror", &SOON);
    let bytes = &back.bytes;
    assert!(bytes.kept_bytes > Some(IDLE_BYTES / 2), "{bytes:?}");
    assert!(bytes.rejected_bytes > Some(IDLE_BYTES / 4), "{bytes:?}");
    stage.moves_all(0, "hybrid", &SOON);
    assert!(allocated(stage.image(1)) < DISK_BYTES + (1 << 20));
    stage.moves_all(1, "postcopy", &SOON);
    stage.judge(0);
}

/// An agent's death leaves the disk to the disk export, which the next agent removes. The guest
/// does not notice the death of the disk export itself.
#[test]
fn a_guest_keeps_its_disks_whatever_becomes_of_its_move() {
    let kinds = ["raw,writeback", "qcow2,none"];
    let Some(mut stage) = Stage::with("10.0", "400mbit,2ms", &kinds, None) else {
        return;
    };
    // Another file has taken the place of a disk.
    let used = stage.image(0).with_extension("used");
    fs::rename(stage.image(0), &used).unwrap();
    fs::copy(&used, stage.image(0)).unwrap();
    let to = stage.lab.host(1).unwrap();
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let refused = stage.ended(moving);
    let why = refused.why();
    assert!(why.contains("is not the file that its QEMU uses"), "{why}");
    fs::rename(used, stage.image(0)).unwrap();
    stage.stays();
    for how in ["precopy", "mirror"] {
        let moving = stage.begins(how);
        stage.product.agent_mut(0).unwrap().kill().unwrap();
        stage.goes_on();
        assert!(moving.finish(LIMIT).is_ok_and(|end| !end.completed()));
        stage
            .product
            .agent_mut(0)
            .unwrap()
            .restart(stage.lab.host(0).unwrap())
            .unwrap();
        stage.stays();

        let moving = stage.begins(how);
        stage.product.agent_mut(1).unwrap().kill().unwrap();
        let finished = stage.ended(moving);
        assert!(!finished.completed(), "{}", finished.why());
        stage
            .product
            .agent_mut(1)
            .unwrap()
            .restart(stage.lab.host(1).unwrap())
            .unwrap();
        stage.stays();

        let moving = stage.begins(how);
        stage
            .product
            .agent(0)
            .unwrap()
            .run(&["cancel", GUEST])
            .unwrap();
        let finished = stage.ended(moving);
        assert_eq!(
            finished.outcome,
            Some(Outcome::Aborted),
            "{}",
            finished.why()
        );
        stage.stays();
    }
    let moving = stage.begins("precopy");
    let growing = fs::File::options().write(true).open(stage.image_of(0, 1));
    let growing = growing.unwrap();
    growing
        .set_len(growing.metadata().unwrap().len() + (1 << 30))
        .unwrap();
    let failed = stage.ended(moving);
    assert!(
        failed.why().contains("has grown by more"),
        "{}",
        failed.why()
    );
    stage.stays();

    let words = ["--disks", "precopy", "--bandwidth", "40mbit", "--verify"];
    let mut moving = stage
        .product
        .migrate(0, GUEST, stage.lab.host(1).unwrap(), &words)
        .unwrap();
    assert!(moving.wait_for_phase(Phase::Precopy, LIMIT));
    for part in ["tell", "supervise"] {
        let killed = stage.fronts(part);
        assert_eq!(killed.len(), stage.disks.len(), "{part}");
        for pid in killed {
            kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        }
        stage.goes_on();
    }
    let finished = stage.ended(moving);
    assert!(finished.completed(), "{}\n{}", finished.why(), stage.logs());
    let verified = finished.report.unwrap().verify.unwrap();
    assert_eq!(
        (verified.disks as usize, verified.different_blocks),
        (stage.disks.len(), 0)
    );
    stage.goes_on();
    stage.nothing_is_left(0);
    stage.judge(1);
}

#[test]
fn a_disk_moves_with_its_guest_of_qemu_10() {
    there_and_back("10.0");
}

#[test]
fn a_disk_moves_with_its_guest_of_qemu_7_2() {
    if !installed::is_its_day(1, 2) {
        return;
    }
    there_and_back("7.2");
}

#[test]
fn a_disk_moves_with_its_guest_of_qemu_11_1() {
    if !installed::is_its_day(0, 2) {
        return;
    }
    there_and_back("11.1");
}

/// The guest of a pc with two processors, whose memory and disks follow it.
fn a_pc_is_followed(version: &str) {
    let kinds = ["raw,writeback", "qcow2,none"];
    let Some(stage) = Stage::of_pc(version, "400mbit,2ms", &kinds) else {
        return;
    };
    stage.moves_all(0, "hybrid", &SOON);
    stage.moves_all(1, "postcopy", &SOON);
    stage.judge(0);
}

#[test]
fn a_disk_follows_its_guest_of_a_pc_of_qemu_7_2() {
    if !installed::is_its_day(0, 3) {
        return;
    }
    a_pc_is_followed("7.2");
}

#[test]
fn a_disk_follows_its_guest_of_a_pc_of_qemu_10() {
    if !installed::is_its_day(1, 3) {
        return;
    }
    a_pc_is_followed("10.0");
}

#[test]
fn a_disk_follows_its_guest_of_a_pc_of_qemu_11_1() {
    if !installed::is_its_day(2, 3) {
        return;
    }
    a_pc_is_followed("11.1");
}

#[test]
fn a_destination_without_room_is_refused_or_gives_the_move_up() {
    let room = Some("100m");
    let Some(stage) = Stage::with("10.0", "400mbit,2ms", &["raw,writeback"], room) else {
        return;
    };
    let filling = stage.folders[1].join("filling");
    let fill = |bytes: usize| {
        // As much as there is room for.
        let _ = fs::write(&filling, vec![1; bytes]);
    };
    let to = stage.lab.host(1).unwrap();
    let planned = |why: &str| {
        let plan = stage.plan(0);
        assert_eq!(plan["possible"], false, "{plan}");
        assert!(plan.to_string().contains(why), "{plan}");
    };
    fill(80 << 20);
    planned("free for");
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let refused = stage.ended(moving);
    assert!(refused.why().contains("free for"), "{}", refused.why());
    stage.stays();
    fs::write(stage.image(1), "somebody's").unwrap();
    planned("already");
    let moving = stage.product.migrate(0, GUEST, to, &[]).unwrap();
    let refused = stage.ended(moving);
    assert!(refused.why().contains("already"), "{}", refused.why());
    assert_eq!(fs::read(stage.image(1)).unwrap(), b"somebody's");
    fs::remove_file(stage.image(1)).unwrap();

    fs::remove_file(&filling).unwrap();
    let moving = stage.begins("precopy");
    fill(200 << 20);
    let failed = stage.ended(moving);
    assert!(failed.why().contains("No space left"), "{}", failed.why());
    stage.stays();

    fs::remove_file(&filling).unwrap();
    stage.moves(0, "precopy");
    stage.judge(1);
}

/// The guest's disk is complete on the guest's host; on the other, nothing remains but the files
/// set aside.
#[test]
fn a_disk_is_where_its_guest_is_whichever_agent_dies_in_the_hand_over() {
    let kinds = ["raw,writeback", "qcow2,writeback"];
    let Some(mut stage) = Stage::with("10.0", "400mbit,2ms", &kinds, None) else {
        return;
    };
    let mut from = 0;
    for (point, dies_at_source, how) in [
        ("source:before-send:list", true, "precopy"),
        ("destination:after-record:ready", false, "mirror"),
        ("source:after-record:released", true, "precopy"),
        ("destination:after-record:committed", false, "postcopy"),
        ("source:after-receipt:all-present", true, "hybrid"),
    ] {
        let dies = if dies_at_source { from } else { 1 - from };
        let fails = format!("{point}=kill");
        let host = stage.lab.host(dies).unwrap();
        let agent = stage.product.agent_mut(dies).unwrap();
        agent.restart_to_fail(host, &fails).unwrap();
        let to = stage.lab.host(1 - from).unwrap();
        let words = ["--disks", how, "--patience", "3s"];
        let moving = stage.product.migrate(from, GUEST, to, &words).unwrap();
        let agent = stage.product.agent_mut(dies).unwrap();
        assert!(wait_until(LIMIT, || agent.has_ended()), "{point}");
        agent.restart(host).unwrap();
        // It may have lost its agent, or not.
        let _ = moving.finish(LIMIT);
        stage.goes_on();
        stage.nothing_is_left(0);
        stage.nothing_is_left(1);
        let here = [0, 1].map(|host| stage.image(host).exists());
        assert_ne!(here[0], here[1], "{point}: {here:?}\n{}", stage.logs());
        let other = [0, 1].map(|host| stage.image_of(host, 1).exists());
        assert_eq!(here, other, "{point}\n{}", stage.logs());
        from = usize::from(here[1]);
    }
    stage.judge(from);
}

#[test]
fn a_mirrored_guest_does_not_wait_for_a_link_that_is_cut() {
    let kinds = ["raw,writeback", "qcow2,writeback"];
    let Some(stage) = Stage::with("7.2", "400mbit,2ms", &kinds, None) else {
        return;
    };
    let to = stage.lab.host(1).unwrap();
    let words = ["--disks", "mirror", "--bandwidth", "30mbit", "--verify"];
    let mut moving = stage.product.migrate(0, GUEST, to, &words).unwrap();
    assert!(moving.wait_for_phase(Phase::Precopy, LIMIT));
    let link = stage.lab.link(0, 1).unwrap();
    link.cut(Duration::from_secs(600)).unwrap();
    stage.goes_on();
    link.heal().unwrap();
    let finished = stage.ended(moving);
    let (why, logs) = (finished.why(), stage.logs());
    assert!(finished.completed(), "{why}\n{logs}");
    stage.goes_on();
    stage.judge(1);
}
