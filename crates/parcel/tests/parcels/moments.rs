//! Exports of disks whose writes are tracked: each version is a moment of a guest's disks, and
//! lacks nothing, whatever is interrupted.

use crate::stage::{Dice, Stage};
use longhaul_parcel::{
    Device, Disk as ParcelDisk, Guest, ImportedDisk, Job, JobDisk, JobGuest, Parcel, Settings,
    Step, Tracking, import,
};
use longhaul_storage::disk::{Disk, ExportSize};
use longhaul_storage::front::tracking::{begin, tracked_disk};
use longhaul_storage::front::{FrontFolder, FrontSpec};
use longhaul_storage::nbd::ExportName;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const DEVICES: usize = 3;
/// Sizes of a guest's disks: whole batches, and a last chunk that is not whole.
const BYTES: [u64; 2] = [24 * MIB + 4096, 3 * MIB + 512];

/// The length of the records: that of a region, to which an image may grow.
const REGION_BYTES: u64 = 32 * MIB;

/// A write of the guest to both disks: its number at the beginning, and at another place.
#[derive(Debug, Clone)]
struct Operation {
    places: [u64; 2],
    /// Whether it writes what was there at first.
    reverts: bool,
}

/// A guest that runs here, and what it has written.
struct Machine {
    paths: Vec<PathBuf>,
    initial: Vec<Vec<u8>>,
    operations: Vec<Operation>,
    disks: Vec<Arc<dyn Disk>>,
    fronts: Exports,
    above: PathBuf,
    records: u64,
    size: ExportSize,
}

/// The exports that track its disks.
#[derive(Debug, Clone, Default)]
struct Exports(Arc<Mutex<BTreeMap<PathBuf, FrontFolder>>>);

impl Tracking for Exports {
    fn export_of(&self, guest: &str, image: &Path) -> io::Result<Option<FrontFolder>> {
        assert_eq!(guest, "web");
        Ok(self.0.lock().unwrap().get(image).cloned())
    }
}

impl Machine {
    fn new(stage: &Stage, dice: &mut Dice) -> Self {
        let initial: Vec<Vec<u8>> = BYTES
            .iter()
            .map(|bytes| dice.bytes(*bytes as usize))
            .collect();
        let paths = initial.iter().enumerate().map(|(number, content)| {
            let path = stage.path().join(format!("vd{number}.raw"));
            fs::write(&path, content).unwrap();
            path
        });
        let paths: Vec<PathBuf> = paths.collect();
        Self {
            paths,
            initial,
            operations: Vec::new(),
            disks: Vec::new(),
            fronts: Exports::default(),
            above: stage.path().to_owned(),
            records: 0,
            size: ExportSize::Bytes(1 << 40),
        }
    }

    /// Its writes are tracked from now on, in new records.
    fn is_tracked(&mut self) {
        let mut disks = Vec::new();
        for image in &self.paths {
            self.records += 1;
            let spec = FrontSpec {
                image: image.clone(),
                size: self.size,
                locks: None,
                name: ExportName::new(format!("{:032}", self.records)).unwrap(),
                qemu_uid: None,
                arriving: false,
                tracked: true,
                fetched: None,
            };
            let path = self.above.join(format!("f{}", self.records));
            let front = FrontFolder::create(&path, &spec).unwrap();
            begin(&front, REGION_BYTES).unwrap();
            disks.push(tracked_disk(&front).unwrap());
            self.fronts.0.lock().unwrap().insert(image.clone(), front);
        }
        self.disks = disks;
    }

    /// It is shut down, and started again without being tracked.
    fn is_not_tracked(&mut self) {
        self.disks.clear();
        self.fronts.0.lock().unwrap().clear();
    }

    /// Returns what an operation writes to a disk, with the offsets.
    fn writes(&self, operation: &Operation, number: u64, disk: usize) -> [(u64, [u8; 8]); 2] {
        let at = operation.places[disk];
        let initial = self.initial[disk].get(at as usize..at as usize + 8);
        let bytes = match (operation.reverts, initial) {
            (true, Some(initial)) => initial.try_into().unwrap(),
            // It was beyond the end.
            (true, None) => [0; 8],
            (false, _) => (!number).to_le_bytes(),
        };
        [(0, number.to_le_bytes()), (at, bytes)]
    }

    fn write(&mut self, dice: &mut Dice) {
        let reverts = !self.operations.is_empty() && dice.below(3) == 0;
        let places = match reverts {
            // Those of one of the last operations.
            true => {
                let back = 1 + dice.below(4.min(self.operations.len() as u64)) as usize;
                self.operations[self.operations.len() - back].places
            }
            false => {
                let mut places = BYTES.map(|bytes| 4096 + dice.below(bytes / 8 - 512) * 8);
                if self.size != ExportSize::OfFile && dice.below(4) == 0 {
                    // The last image grows.
                    let bytes = fs::metadata(&self.paths[1]).unwrap().len();
                    places[1] = (bytes / 512 + 1 + dice.below(900)) * 512 - 8;
                }
                places
            }
        };
        let operation = Operation { places, reverts };
        let number = self.operations.len() as u64 + 1;
        for (disk, path) in self.paths.iter().enumerate() {
            for (at, bytes) in self.writes(&operation, number, disk) {
                match self.disks.get(disk) {
                    Some(tracked) => tracked.write(at, &bytes).unwrap(),
                    None => {
                        let file = OpenOptions::new().write(true).open(path).unwrap();
                        file.write_all_at(&bytes, at).unwrap();
                    }
                }
            }
        }
        self.operations.push(operation);
    }

    /// Returns its disks after some operations.
    fn after(&self, operations: usize) -> Vec<Vec<u8>> {
        let mut disks = self.initial.clone();
        let first = &self.operations[..operations];
        for (number, operation) in (1..).zip(first) {
            for (disk, content) in disks.iter_mut().enumerate() {
                for (at, bytes) in self.writes(operation, number, disk) {
                    let end = at as usize + 8;
                    content.resize(content.len().max(end), 0);
                    content[at as usize..end].copy_from_slice(&bytes);
                }
            }
        }
        disks
    }

    fn guest(&self) -> JobGuest {
        let disks = self.paths.iter().zip(0..).map(|(path, number)| JobDisk {
            name: format!("vd{number}"),
            path: path.clone(),
        });
        JobGuest {
            name: "web".into(),
            disks: disks.collect(),
        }
    }
}

fn create(stage: &Stage, machine: &Machine) -> PathBuf {
    let folder = stage.path().join("box");
    let settings = Settings {
        name: "box".into(),
        to: "paris".into(),
        parity: 1,
        now: 7,
    };
    let devices: Vec<PathBuf> = (0..DEVICES).map(|device| stage.folder(device)).collect();
    let limit = Some(200 * MIB);
    Job::create(&folder, &settings, (&devices, limit), vec![machine.guest()]).unwrap();
    folder
}

/// Returns what is imported without one of the devices, and its version.
fn imported(stage: &Stage, job: &Job, up_to: Option<u64>, dice: &mut Dice) -> (u64, Vec<Vec<u8>>) {
    let lost = dice.below(DEVICES as u64) as usize;
    let there = job.devices().iter().enumerate();
    let there = there.filter(|(number, _)| *number != lost);
    let devices = there.map(|(_, path)| Device::open(path, false).unwrap());
    let parcel = Parcel::open(devices.collect()).unwrap();
    let out = stage.path().join(format!("out-{}", dice.next()));
    fs::create_dir(&out).unwrap();
    let mut place = |_: &Guest, disk: &ParcelDisk| Ok(out.join(&disk.name));
    let (disks, _): (Vec<ImportedDisk>, _) = import(&parcel, job.key(), up_to, &mut place).unwrap();
    let contents = disks
        .iter()
        .map(|disk| fs::read(&disk.path).unwrap())
        .collect();
    assert_eq!(fs::read_dir(&out).unwrap().count(), disks.len());
    fs::remove_dir_all(&out).unwrap();
    (disks[0].version, contents)
}

/// Asserts that imported disks are as the guest's once were, and returns after how many operations.
fn is_a_moment(machine: &Machine, disks: &[Vec<u8>]) -> usize {
    let number = match machine.operations.is_empty() {
        true => 0,
        false => u64::from_le_bytes(disks[0][..8].try_into().unwrap()) as usize,
    };
    let number = if number > machine.operations.len() {
        0
    } else {
        number
    };
    let expected = machine.after(number);
    for (disk, (found, expected)) in disks.iter().zip(&expected).enumerate() {
        let differs = found
            .iter()
            .zip(expected)
            .position(|(found, expected)| found != expected);
        assert!(
            differs.is_none() && found.len() == expected.len(),
            "disk {disk} differs at {differs:?} from what it was after {number} operations"
        );
    }
    number
}

/// Runs a job, which is interrupted now and then, while the guest writes.
fn export(folder: &Path, machine: &mut Machine, dice: &mut Dice) -> Job {
    let mut interruptions = dice.below(4);
    loop {
        let job = Job::open(folder).unwrap().durable_every(Duration::ZERO);
        let mut job = job.with_tracking(machine.fronts.clone());
        let mut steps = match interruptions {
            0 => u64::MAX,
            _ => 1 + dice.below(12),
        };
        let run = catch_unwind(AssertUnwindSafe(|| {
            let run = job.run(8, &mut |step| {
                assert!(!matches!(step, Step::MomentLost { .. }), "{step:?}");
                for _ in 0..dice.below(3) {
                    machine.write(dice);
                }
                steps -= 1;
                assert!(steps > 0, "interrupted");
            });
            run.map(drop)
        }));
        match run {
            Ok(ended) => {
                ended.unwrap();
                return job;
            }
            Err(_) => interruptions -= 1,
        }
        for _ in 0..dice.below(3) {
            machine.write(dice);
        }
    }
}

#[test]
fn versions_of_tracked_disks_are_moments_and_lack_nothing() {
    for seed in 0..4 {
        let mut dice = Dice(seed);
        let stage = Stage::new(DEVICES);
        let mut machine = Machine::new(&stage, &mut dice);
        let folder = create(&stage, &machine);
        machine.is_tracked();
        let mut last = 0;
        let mut versions = Vec::new();
        for _ in 0..3 {
            let begun = machine.operations.len();
            let job = export(&folder, &mut machine, &mut dice);
            let (version, disks) = imported(&stage, &job, None, &mut dice);
            let moment = is_a_moment(&machine, &disks);
            versions.push((version, disks));
            assert!(
                moment >= begun && moment >= last,
                "{seed}: {last} {begun} {moment}"
            );
            last = moment;
            for _ in 0..dice.below(5) {
                machine.write(&mut dice);
            }
            match dice.below(4) {
                // It is started again, and tracked later: nobody knows what it wrote meanwhile.
                0 => {
                    machine.is_not_tracked();
                    machine.write(&mut dice);
                    machine.is_tracked();
                }
                1 => machine.is_tracked(),
                _ => {}
            }
            Job::open(&folder).unwrap().top_up().unwrap();
        }
        // Each of them can be had later, also while the next one is exported.
        let job = Job::open(&folder).unwrap();
        for (version, disks) in versions {
            let (found, content) = imported(&stage, &job, Some(version), &mut dice);
            assert!(found == version && content == disks, "{seed}: {version}");
        }
    }
}

#[test]
fn a_top_up_reads_only_what_may_have_changed() {
    let mut dice = Dice(1);
    let stage = Stage::new(DEVICES);
    let mut machine = Machine::new(&stage, &mut dice);
    machine.size = ExportSize::OfFile;
    let folder = create(&stage, &machine);
    machine.is_tracked();
    machine.write(&mut dice);
    let job = Job::open(&folder).unwrap();
    let mut job = job.with_tracking(machine.fronts.clone());
    job.run(8, &mut |_| ()).unwrap();
    // Behind the back of the export: a top-up that reads all of the disk would find it.
    let behind = 20 * MIB;
    let file = OpenOptions::new()
        .write(true)
        .open(&machine.paths[0])
        .unwrap();
    file.write_all_at(&[7; 8], behind).unwrap();
    let elsewhere = Operation {
        places: [8192, 8192],
        reverts: false,
    };
    for (disk, tracked) in machine.disks.iter().enumerate() {
        let number = machine.operations.len() as u64 + 1;
        for (at, bytes) in machine.writes(&elsewhere, number, disk) {
            tracked.write(at, &bytes).unwrap();
        }
    }
    machine.operations.push(elsewhere);
    let top_up = |machine: &Machine| {
        let mut job = Job::open(&folder)
            .unwrap()
            .with_tracking(machine.fronts.clone());
        job.top_up().unwrap();
        job.run(9, &mut |_| ()).unwrap();
        job
    };
    let job = top_up(&machine);
    let (_, disks) = imported(&stage, &job, None, &mut dice);
    let moment = is_a_moment(&machine, &disks);
    assert_eq!(moment, machine.operations.len());
    // In doubt, all of it is compared.
    machine.is_tracked();
    let job = top_up(&machine);
    let (_, disks) = imported(&stage, &job, None, &mut dice);
    assert_eq!(disks[0][behind as usize..behind as usize + 8], [7; 8]);
}
