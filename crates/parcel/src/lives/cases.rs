//! What lives of parcels have found, one by one.

use crate::cell::BODY_BYTES;
use crate::device::{Device, DeviceError};
use crate::import::{ImportError, import_to};
use crate::job::{Job, JobDisk, JobError, JobGuest};
use crate::key::DataKey;
use crate::lives::bench::{Bench, Disk, Event};
use crate::lives::dice::Dice;
use crate::lives::places::Memory;
use crate::media::MEDIA;
use crate::reader::{OpenError, Parcel};
use crate::record::{CHUNK_BYTES, Chunk, Guest, Record, Version, VersionDisk};
use crate::tree::{Tree, text};
use crate::writer::{Settings, WriteError, Writer};
use ring::digest::{SHA256, digest};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Devices in memory, and a disk to export.
struct Case {
    bench: Bench,
    at: Vec<PathBuf>,
    root: TempDir,
    parity: u8,
}

impl Case {
    /// Creates files and block devices.
    fn new(blocks: &[bool], parity: u8) -> Self {
        let (root, bench) = (tempfile::tempdir().unwrap(), Bench::new());
        let mut at = Vec::new();
        for (number, is_block) in blocks.iter().enumerate() {
            let path = root.path().join(format!("device-{number}"));
            // What is in it is on the bench.
            fs::create_dir(&path).unwrap();
            let mut dice = Dice(number as u64);
            bench.add(&path, Disk::new(*is_block, 2000, &mut dice));
            at.push(path);
        }
        let media = std::sync::Arc::new(bench.clone());
        MEDIA.with(|set| *set.borrow_mut() = Some(media));
        let case = Self {
            bench,
            at,
            root,
            parity,
        };
        case.fill(1);
        case
    }

    fn disk(&self) -> PathBuf {
        self.root.path().join("disk")
    }

    /// Writes the disk.
    fn fill(&self, seed: u64) {
        let content = Dice(seed).bytes(30 * CHUNK_BYTES + 100);
        fs::write(self.disk(), content).unwrap();
    }

    fn folder(&self) -> PathBuf {
        self.root.path().join("job")
    }

    fn settings(&self) -> Settings {
        Settings {
            name: "box".into(),
            to: "paris".into(),
            parity: self.parity,
            now: 1,
        }
    }

    fn create(&self) -> Result<Job, JobError> {
        let disk = JobDisk {
            name: "disk".into(),
            path: self.disk(),
        };
        let guest = JobGuest {
            name: "web".into(),
            disks: vec![disk],
        };
        let devices = (&self.at[..], None);
        Job::create(&self.folder(), &self.settings(), devices, vec![guest])
    }

    fn top_up(&self, seed: u64) -> Result<(), JobError> {
        self.fill(seed);
        let mut job = Job::open(&self.folder())?;
        job.top_up()?;
        job.run(2, &mut |_| ()).map(drop)
    }

    fn disks(&self) -> Vec<Disk> {
        let each = self.at.iter();
        each.map(|at| self.bench.with(at, |disk| disk.clone()))
            .collect()
    }

    fn put_back(&self, disks: &[Disk]) {
        for (at, disk) in self.at.iter().zip(disks) {
            self.bench.with(at, |it| *it = disk.clone());
        }
    }

    fn open(&self) -> Result<Parcel, OpenError> {
        let each = self.at.iter();
        Parcel::open(each.map(|at| Device::open(at, false).unwrap()).collect())
    }

    /// Imports, and returns the names of all files.
    fn import(&self, key: &DataKey) -> Result<Vec<PathBuf>, ImportError> {
        let memory = Memory::new();
        let parcel = self.open().unwrap();
        let imported = import_to(&memory, &parcel, (key, None), &mut |_, disk| {
            Ok(Path::new("/out").join(&disk.name))
        });
        let files = memory.files().into_keys().collect();
        imported.map(|_| files)
    }
}

#[test]
fn a_first_header_that_cannot_be_written_leaves_nothing() {
    for after in 0..2 {
        let case = Case::new(&[false, true, false], 1);
        case.bench.plan(Some((&case.at[1], after, Event::Fail)));
        let failed = case.create();
        assert!(matches!(failed, Err(JobError::Write(_))), "{failed:?}");
        assert!(!case.folder().exists());
        case.create().unwrap().run(1, &mut |_| ()).unwrap();
    }
}

#[test]
fn an_export_that_puts_nothing_takes_no_generation() {
    let case = Case::new(&[false, false], 1);
    case.create().unwrap();
    fs::rename(case.disk(), case.root.path().join("away")).unwrap();
    for _ in 0..200 {
        let failed = Job::open(&case.folder()).unwrap().run(1, &mut |_| ());
        assert!(matches!(failed, Err(JobError::Disk(_))), "{failed:?}");
    }
    fs::rename(case.root.path().join("away"), case.disk()).unwrap();
    let mut job = Job::open(&case.folder()).unwrap();
    let parcel = job.run(1, &mut |_| ()).unwrap();
    assert_eq!(parcel.header().generation, 3);
    assert_eq!(case.import(job.key()).unwrap(), [Path::new("/out/disk")]);
}

#[test]
fn an_older_copy_of_a_device_is_refused_before_anything_is_written() {
    for is_block in [false, true] {
        let case = Case::new(&[is_block; 3], 1);
        case.create().unwrap().run(1, &mut |_| ()).unwrap();
        let old = case.disks();
        case.top_up(2).unwrap();
        let now = case.disks();
        case.bench.with(&case.at[1], |disk| *disk = old[1].clone());
        let refused = case.top_up(3);
        let is_refused = |error: &JobError| {
            matches!(
                error,
                JobError::Write(WriteError::OtherDevice { device: 1, .. })
            )
        };
        assert!(refused.as_ref().is_err_and(is_refused), "{refused:?}");
        for (at, was) in case.at.iter().zip([&now[0], &old[1], &now[2]]) {
            assert_eq!(case.bench.with(at, |disk| disk.rows()), was.rows());
        }
        case.put_back(&now);
        let mut job = Job::open(&case.folder()).unwrap();
        job.run(2, &mut |_| ()).unwrap();
        assert_eq!(case.import(job.key()).unwrap().len(), 1);
    }
}

#[test]
fn devices_that_were_continued_separately_are_refused() {
    let case = Case::new(&[false; 3], 1);
    case.create().unwrap().run(1, &mut |_| ()).unwrap();
    let (disks, document) = (case.disks(), case.folder().join("job.json"));
    let digests = case.folder().join("digests.0.0.1");
    let saved = [&document, &digests].map(|path| fs::read(path).unwrap());
    case.top_up(2).unwrap();
    let one = case.disks();
    // The host is set back to a backup, and so are copies of the devices.
    case.put_back(&disks);
    fs::write(&document, &saved[0]).unwrap();
    fs::write(&digests, &saved[1]).unwrap();
    case.top_up(3).unwrap();
    assert!(case.open().is_ok());
    case.bench.with(&case.at[0], |disk| *disk = one[0].clone());
    let refused = case.open();
    assert!(matches!(refused, Err(OpenError::Forked(_))), "{refused:?}");
}

#[test]
fn a_block_device_that_had_a_longer_parcel_is_used_again() {
    let case = Case::new(&[true; 3], 1);
    case.create().unwrap().run(1, &mut |_| ()).unwrap();
    for seed in 2..8 {
        case.top_up(seed).unwrap();
    }
    fs::remove_dir_all(case.folder()).unwrap();
    // The first cell alone is not enough.
    case.bench
        .with(&case.at[2], |disk| disk.change(0, |cell| cell.fill(0)));
    case.bench.with(&case.at[0], Disk::erase);
    case.bench.with(&case.at[1], Disk::erase);
    let refused = case.create();
    assert!(
        matches!(refused, Err(JobError::Device(DeviceError::NotEmpty(_)))),
        "{refused:?}"
    );
    case.bench.with(&case.at[2], Disk::erase);
    let mut job = case.create().unwrap();
    let sealed = job.run(1, &mut |_| ()).unwrap();
    assert_eq!(case.open().unwrap().id(), sealed.id());
    // Also when its first header is damaged.
    for at in &case.at[..2] {
        case.bench
            .with(at, |disk| disk.change(0, |cell| cell[BODY_BYTES] ^= 1));
    }
    assert_eq!(case.open().unwrap().id(), sealed.id());
    assert_eq!(case.import(job.key()).unwrap().len(), 1);
}

#[test]
fn bad_sectors_do_not_hide_the_end_of_a_block_device() {
    let case = Case::new(&[true; 3], 1);
    let mut job = case.create().unwrap();
    job.run(1, &mut |_| ()).unwrap();
    // Where bisection probes first.
    let probed = 900..1300;
    case.bench.with(&case.at[1], |disk| disk.bad.extend(probed));
    let parcel = case.open().unwrap();
    assert!(parcel.device(1).is_some());
    assert!(parcel.verify(&mut |_| ()).is_clean());
}

#[test]
fn a_lost_guest_record_is_a_loss_and_no_contradiction() {
    let case = Case::new(&[false], 0);
    let mut job = case.create().unwrap();
    let parcel = job.run(1, &mut |_| ()).unwrap();
    let first = parcel.header().earlier[1].first + 1;
    case.bench
        .with(&case.at[0], |disk| disk.change(first, |cell| cell[9] ^= 1));
    let failed = case.import(job.key());
    assert!(matches!(failed, Err(ImportError::Lost(1))), "{failed:?}");
}

/// A parcel that is written record by record.
struct Records {
    case: Case,
    writer: Writer,
    key: DataKey,
}

impl Records {
    fn new() -> Self {
        let case = Case::new(&[false, false], 1);
        let devices = case.at.iter().enumerate();
        let devices = devices.map(|(n, at)| Device::create(at, &n.to_string(), None).unwrap());
        let key = DataKey::from_bytes([5; 32]);
        let writer = Writer::create(devices.collect(), &case.settings(), &key).unwrap();
        Self { case, writer, key }
    }

    fn guest(&mut self, guest: u32, disk: &str) {
        let disk = crate::record::Disk {
            disk: 0,
            name: disk.into(),
            bytes: 100,
            used: None,
        };
        let guest = Guest {
            guest,
            name: format!("guest-{guest}"),
            disks: vec![disk],
            description: serde_json::Value::Null,
        };
        self.writer.put(&Record::Guest(guest)).unwrap();
    }

    fn chunk(&mut self, guest: u32, fill: u8) {
        let chunk = Chunk {
            guest,
            disk: 0,
            chunk: 0,
            content: Some(vec![fill; 100]),
        };
        self.writer.put(&Record::Chunk(chunk)).unwrap();
    }

    fn version(&mut self, guest: u32, fill: u8) {
        let sum = digest(&SHA256, &Tree::of_chunk(&[fill; 100]));
        let version = Version {
            guest,
            version: 1,
            time: 1,
            consistent: false,
            frozen: false,
            moment: None,
            disks: vec![VersionDisk {
                disk: 0,
                digest: text(sum.as_ref()),
            }],
        };
        self.writer.put(&Record::Version(version)).unwrap();
    }

    /// Seals and imports it, and returns all files.
    fn import(self) -> Result<Vec<(PathBuf, Vec<u8>)>, ImportError> {
        self.writer.seal(&mut |_| ()).unwrap();
        let memory = Memory::new();
        let parcel = self.case.open().unwrap();
        let imported = import_to(&memory, &parcel, (&self.key, None), &mut |_, disk| {
            Ok(Path::new("/out").join(&disk.name))
        });
        let files = memory.files();
        assert!(imported.is_ok() || files.is_empty());
        imported.map(|_| files.into_iter().collect())
    }
}

#[test]
fn a_guest_without_a_version_leaves_no_files() {
    let mut records = Records::new();
    for guest in 0..2 {
        records.guest(guest, &format!("disk-{guest}"));
        records.chunk(guest, 3);
    }
    records.version(0, 3);
    assert_eq!(
        records.import().unwrap(),
        [("/out/disk-0".into(), vec![3; 100])]
    );
}

#[test]
fn chunks_behind_the_last_version_do_not_count() {
    let mut records = Records::new();
    for guest in 0..2 {
        records.guest(guest, &format!("disk-{guest}"));
        records.chunk(guest, 3);
        records.version(guest, 3);
    }
    records.guest(1, "disk-1");
    records.chunk(1, 4);
    let each = ["/out/disk-0", "/out/disk-1"].map(|path| (path.into(), vec![3; 100]));
    assert_eq!(records.import().unwrap(), each);
}

#[test]
fn two_disks_in_one_place_are_refused() {
    let mut records = Records::new();
    for guest in 0..2 {
        records.guest(guest, "disk");
        records.chunk(guest, 3);
        records.version(guest, 3);
    }
    let refused = records.import();
    assert!(matches!(refused, Err(ImportError::Twice(_))), "{refused:?}");
}

#[test]
fn a_last_header_that_is_damaged_is_said() {
    let case = Case::new(&[false, true], 1);
    let mut job = case.create().unwrap();
    let row = job.run(1, &mut |_| ()).unwrap().header().row;
    case.bench
        .with(&case.at[1], |disk| disk.change(row, |cell| cell[9] ^= 1));
    let parcel = case.open().unwrap();
    let report = parcel.verify(&mut |_| ());
    assert_eq!((report.lost, report.damage.len()), (0, 1), "{report:?}");
    assert_eq!(case.import(job.key()).unwrap().len(), 1);
}

#[test]
fn a_device_with_damaged_headers_is_known_by_another_cell() {
    let case = Case::new(&[true, false], 1);
    case.create().unwrap().run(1, &mut |_| ()).unwrap();
    for seed in 2..30 {
        case.top_up(seed).unwrap();
    }
    let row = case.open().unwrap().header().row;
    for (device, at) in case.at.iter().enumerate() {
        let before = case.bench.with(at, |disk| disk.clone());
        let damage = |rows: std::ops::Range<u64>| {
            for row in rows {
                case.bench
                    .with(at, |disk| disk.change(row, |cell| cell[9] ^= 1));
            }
            case.open().unwrap().device(device).is_some()
        };
        // Its beginning and its last header are damaged, and then everything.
        assert!(damage(row..row + 1) && damage(0..256));
        assert!(!damage(256..row));
        case.bench.with(at, |disk| *disk = before);
    }
}

#[test]
fn headers_that_did_not_reach_a_device_do_not_hide_its_end() {
    let case = Case::new(&[true, true, false], 1);
    case.create().unwrap();
    for attempt in 0..12 {
        let which = attempt % 2;
        case.bench.plan(Some((&case.at[which], 0, Event::Fail)));
        let failed = Job::open(&case.folder()).unwrap().run(1, &mut |_| ());
        assert!(matches!(failed, Err(JobError::Write(_))), "{failed:?}");
        case.bench.with(&case.at[which], Disk::cut);
    }
    case.bench.plan(None);
    let mut job = Job::open(&case.folder()).unwrap();
    let sealed = job.run(1, &mut |_| ()).unwrap();
    for at in &case.at {
        let alone = Parcel::open(vec![Device::open(at, false).unwrap()]).unwrap();
        assert_eq!(alone.header().row, sealed.header().row);
    }
}
