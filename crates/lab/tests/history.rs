//! Guests that write to disks of their own, killed at any moment or stopped: what their disks hold
//! is judged from outside. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_lab::guest::KernelFiles;
use longhaul_lab::guest::disks::{LocalDisk, local_disks};
use longhaul_lab::history::guest::{HistoryGuest, Setup};
use longhaul_lab::history::images::{Record, RecordedDisk};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const LIMIT: Duration = Duration::from_secs(120);
const DISK_BYTES: u64 = 32 << 20;
/// With both formats, every cache, with and without a thread of their own.
const KINDS: [&str; 3] = [
    "raw,none,iothread",
    "qcow2,writeback,iothread",
    "raw,writethrough",
];

/// Guests under TCG share two cores badly: one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Boots a guest with disks on a host of its own, and gives it to be ended; what it left is judged.
fn judged(version: &str, kinds: &[&str], end: impl Fn(HistoryGuest) -> Record) {
    let qemu = match installed::qemu(version) {
        Ok(qemu) => qemu,
        Err(error) => {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED history: {error}");
            return;
        }
    };
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::create(&Plan {
        purpose: "test: history".to_owned(),
        hosts: 1,
        link: "1gbit,0ms".parse().unwrap(),
        seed: 1,
    })
    .unwrap();
    let host = lab.host(0).unwrap();
    let folder = host.folder();
    let kinds: Vec<_> = kinds.iter().map(|kind| kind.parse().unwrap()).collect();
    let disks = local_disks(folder, DISK_BYTES, &kinds);
    for disk in &disks {
        disk.create().unwrap();
    }
    let seed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64
        >> 8;
    eprintln!("history of seed {seed}");
    let guest = HistoryGuest::start(&Setup {
        host,
        files: &KernelFiles::make(folder).unwrap(),
        qemu: &qemu,
        accelerator: "tcg",
        machine_version: version,
        disks: &disks,
        seed,
        depth: 8,
        work: Work::default(),
    })
    .unwrap();
    let record = end(guest);
    assert_eq!((record.errors, &record.first_error), (0, &None));
    let judgement = record.judge(folder).unwrap();
    assert_eq!(judgement.findings, [], "seed {seed}, {record:?}");
    assert_eq!(judgement.sectors, disks.len() as u64 * (DISK_BYTES / 512));
    assert!(judgement.newest.is_some(), "{judgement:?}");
    assert!(
        judgement.flushed.iter().all(Option::is_some),
        "{judgement:?}"
    );
    a_lost_write_would_be_found(folder, &record, &disks);
}

/// The judge is not blind: a whole raw image of zeros is not what the guest left.
fn a_lost_write_would_be_found(folder: &Path, record: &Record, disks: &[LocalDisk]) {
    let disk = &disks[0];
    fs::remove_file(&disk.path).unwrap();
    disk.create().unwrap();
    assert!(record.judge(folder).unwrap().wrong_sectors > 100);
}

#[test]
fn disks_hold_what_they_must_when_qemu_is_killed() {
    for version in ["10.0", "7.2"] {
        judged(version, &KINDS, |guest| {
            guest.wait_for(300, LIMIT).unwrap();
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            thread::sleep(Duration::from_millis(u64::from(now.subsec_nanos()) % 500));
            let record = guest.kill().unwrap();
            assert!(!record.quiet && record.done >= 300, "{record:?}");
            let strict = |disk: &RecordedDisk| disk.keeps_acknowledged;
            let strict: Vec<bool> = record.disks.iter().map(strict).collect();
            assert_eq!(strict, [true, false, true]);
            record
        });
    }
}

#[test]
fn disks_hold_everything_when_the_guest_is_stopped() {
    for version in ["10.0", "7.2"] {
        judged(version, &KINDS, |guest| {
            guest.wait_for(300, LIMIT).unwrap();
            let record = guest.stop().unwrap();
            assert!(
                record.quiet && record.mask == 0 && record.done >= 300,
                "{record:?}"
            );
            record
        });
    }
}
