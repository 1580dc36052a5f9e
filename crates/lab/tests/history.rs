//! Tests guests that write to local disks, killed at any moment or stopped: the disks' content is
//! judged from outside. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

use longhaul_lab::guest::disks::{Cache, LocalDisk, local_disks};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::guest::{HistoryGuest, Setup};
use longhaul_lab::history::images::{Record, RecordedDisk};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::product::{Product, Settings, channel_socket};
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const LIMIT: Duration = Duration::from_secs(120);
const DISK_BYTES: u64 = 32 << 20;
/// Both formats, every cache mode, with and without an I/O thread.
const KINDS: [&str; 3] = [
    "raw,none,iothread",
    "qcow2,writeback,iothread",
    "raw,writethrough",
];

/// Guests under TCG share two cores badly: one at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Boots a guest with disks on a host of its own, and passes it to a function that ends it; the
/// remaining content is judged.
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
    let seed = seed();
    let setup = Setup {
        host,
        files: &KernelFiles::make_with_history(folder).unwrap(),
        qemu: &qemu,
        accelerator: "tcg",
        machine_version: version,
    };
    let guest = HistoryGuest::start(&setup, &task(&disks, seed)).unwrap();
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

fn task(disks: &[LocalDisk], seed: u64) -> Task<'_> {
    Task {
        disks,
        seed,
        depth: 8,
        work: Work::default(),
    }
}

/// Returns a new seed each time; a failure prints it.
fn seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = now.as_nanos() as u64 >> 8;
    eprintln!("history of seed {seed}");
    seed
}

/// Checks that the judge detects damage: a raw image of zeros is not the guest's.
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
            guest.history().wait_for(300, LIMIT).unwrap();
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
            guest.history().wait_for(300, LIMIT).unwrap();
            let record = guest.stop().unwrap();
            assert!(
                record.quiet && record.mask == 0 && record.done >= 300,
                "{record:?}"
            );
            record
        });
    }
}

/// Returns hosts' configurations for the images of shared disks.
fn images(disks: &[LocalDisk]) -> toml::Table {
    let image = |disk: &LocalDisk| {
        let table = toml::Table::from_iter([
            ("path".to_owned(), disk.path.display().to_string().into()),
            ("format".to_owned(), disk.kind.format.name().into()),
            ("direct".to_owned(), (disk.kind.cache == Cache::None).into()),
        ]);
        (disk.image.clone(), toml::Value::from(table))
    };
    let images: toml::Table = disks.iter().map(image).collect();
    toml::Table::from_iter([("images".to_owned(), images.into())])
}

#[test]
fn shared_disks_hold_everything_after_moves_there_and_back() {
    for version in ["10.0", "7.2"] {
        if let Err(error) = installed::qemu(version) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED history: {error}");
            return;
        }
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let mut lab = Lab::create(&Plan {
        purpose: "test: history that moves".to_owned(),
        hosts: 2,
        link: "1gbit,0ms".parse().unwrap(),
        seed: 1,
    })
    .unwrap();
    let folder = lab.shared_folder().unwrap();
    let kinds = ["raw,none", "qcow2,none"].map(|kind| kind.parse().unwrap());
    let disks = local_disks(&folder, DISK_BYTES, &kinds);
    for disk in &disks {
        disk.create().unwrap();
    }
    let files = KernelFiles::make_with_history(lab.host(0).unwrap().folder()).unwrap();
    let settings = Settings {
        qemus: vec!["7.2".to_owned(), "10.0".to_owned()],
        accelerator: "tcg".to_owned(),
    };
    let product = Product::start_with(&mut lab, &files, &settings, &images(&disks)).unwrap();
    let mut guest = description(&Tiny::calm("moved"), &disks);
    guest.disks.iter_mut().for_each(|disk| disk.shared = true);
    let seed = seed();
    // Slow enough for its memory to be moved by a busy machine.
    let work = Work {
        operations_per_s: 50,
        ..Work::default()
    };
    let task = Task {
        depth: 4,
        work,
        ..task(&disks, seed)
    };
    let mut history = History::new(&task);
    for host in lab.hosts() {
        let socket = |channel: &str| channel_socket(host, &guest.name, channel);
        history.listen(socket).unwrap();
    }
    product.start_guest(&lab, 0, &guest).unwrap();
    history.begin(&task).unwrap();
    let mut operations = 60;
    for from in 0..2 {
        history.wait_for(operations, LIMIT).unwrap();
        let to = lab.host(1 - from).unwrap();
        let moving = product.migrate(from, &guest.name, to, &[]).unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert!(finished.completed(), "{}", finished.why());
        // It goes on at its current host.
        operations = history.heard().told.done + 40;
    }
    history.wait_for(operations, LIMIT).unwrap();
    history.stop().unwrap();
    product.stop_guest(0, &guest.name).unwrap();
    let mut record = history.finish().unwrap();
    assert!(record.quiet && record.errors == 0, "{record:?}");
    // The guest's QEMU was killed: the flushed content of the qcow2 image must be there.
    record.disks[1].keeps_acknowledged = false;
    let judgement = record.judge(&folder).unwrap();
    assert_eq!(judgement.findings, [], "seed {seed}, {record:?}");
    a_lost_write_would_be_found(&folder, &record, &disks);
}
