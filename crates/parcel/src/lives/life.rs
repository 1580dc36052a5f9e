//! The life of a parcel at its source.

use crate::cell::{CELL_BYTES, Cell, Kind, Name};
use crate::device::{DeviceError, SYNC_ROWS};
use crate::header::Header;
use crate::job::{Job, JobError, Step};
use crate::key::DataKey;
use crate::lives::Counts;
use crate::lives::bench::{Bench, Disk, Event};
use crate::lives::dice::{Dice, Killed};
use crate::lives::source::Source;
use crate::media::MEDIA;
use crate::reader::Parcel;
use crate::record::{Guest, Record};
use crate::writer::{Position, Settings, WriteError, Writer};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;

/// A version that was sealed.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) header: Header,
    /// The times between which it was exported.
    pub(super) times: (u64, u64),
    /// The sizes that its disks had when its export began.
    pub(super) sizes: Vec<u64>,
    /// What the devices were when it was sealed.
    pub(super) devices: Vec<Disk>,
}

/// How a command ended.
enum Ended<T> {
    Done(T),
    Failed(JobError),
    Killed,
}

pub(super) struct Life {
    pub(super) dice: Dice,
    pub(super) bench: Bench,
    /// Where the devices are.
    pub(super) at: Vec<PathBuf>,
    pub(super) parity: u8,
    pub(super) source: Arc<Mutex<Source>>,
    pub(super) sealed: Vec<Sealed>,
    pub(super) key: Option<DataKey>,
    pub(super) counts: Counts,
    folder: PathBuf,
    root: TempDir,
    says: bool,
    /// Copies of devices that were made at some time.
    copies: Vec<(usize, Disk)>,
    /// Whether a device has less room than it says, or little.
    is_tight: bool,
    /// When the export of this version began, and the sizes of the disks.
    begun: Option<(u64, Vec<u64>)>,
    planned: Option<Event>,
    is_damaged: bool,
}

fn in_memory() -> TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory),
        false => tempfile::tempdir(),
    }
    .expect("a folder")
}

/// Runs a command that may be killed.
fn ended<T>(run: impl FnOnce() -> Result<T, JobError>) -> Ended<T> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(done)) => Ended::Done(done),
        Ok(Err(error)) => Ended::Failed(error),
        Err(panic) if panic.is::<Killed>() => Ended::Killed,
        Err(panic) => resume_unwind(panic),
    }
}

impl Life {
    pub(super) fn new(seed: u64, says: bool) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let root = in_memory();
        let bench = Bench::new();
        let count = 1 + dice.below(5);
        let parity = dice.below(count.min(3)) as u8;
        let has_little = dice.once_in(8);
        let mut is_tight = has_little;
        let at: Vec<PathBuf> = (0..count)
            .map(|number| root.path().join(format!("device-{number}")))
            .collect();
        let has_blocks = dice.once_in(2);
        for path in &at {
            // What is in it is on the bench.
            fs::create_dir(path).expect("the folder is new");
            let is_block = has_blocks && dice.once_in(2);
            // The end of a block device is found by bisection.
            let cells = match (has_little, has_blocks) {
                (true, _) => 4 + dice.below(30),
                (false, true) => 4000 + dice.below(1000),
                (false, false) => 200 + dice.below(100),
            };
            let mut disk = Disk::new(is_block, cells, &mut dice);
            if dice.once_in(40) {
                disk.cells = 3 + dice.below(cells.min(20));
                is_tight = true;
            }
            bench.add(path, disk);
        }
        let source = Arc::new(Mutex::new(Source::new(root.path(), &mut dice)));
        let mut life = Self {
            folder: root.path().join("job"),
            dice,
            bench,
            at,
            parity,
            source,
            sealed: Vec::new(),
            key: None,
            counts: Counts {
                lives: 1,
                ..Counts::default()
            },
            root,
            says,
            copies: Vec::new(),
            is_tight,
            begun: None,
            planned: None,
            is_damaged: false,
        };
        MEDIA.with(|media| *media.borrow_mut() = Some(Arc::new(life.bench.clone())));
        if !life.is_tight && life.dice.once_in(8) {
            life.use_devices_before();
        }
        life.say(|| format!("{count} devices, parity {parity}, tight: {is_tight}"));
        life
    }

    pub(super) fn say(&self, what: impl FnOnce() -> String) {
        if self.says {
            eprintln!("{}", what());
        }
    }

    pub(super) fn source(&self) -> std::sync::MutexGuard<'_, Source> {
        self.source.lock().expect("no one has panicked with it")
    }

    /// Leaves another parcel on the devices, of which only the first cells were erased.
    fn use_devices_before(&mut self) {
        let key = DataKey::from_bytes([3; 32]);
        let devices = self.at.iter().map(|at| {
            let created = crate::device::Device::create(at, "old", None);
            created.expect("it is new")
        });
        let settings = Settings {
            name: "old".into(),
            to: "paris".into(),
            parity: self.parity,
            now: 1,
        };
        let mut old = Writer::create(devices.collect(), &settings, &key).expect("it begins");
        let record = Record::Guest(Guest {
            guest: 0,
            name: "old".into(),
            disks: Vec::new(),
            description: "x".repeat(CELL_BYTES / 2).into(),
        });
        for _ in 0..self.dice.below(60) {
            old.put(&record).expect("there is room");
        }
        old.seal(&mut |_| ()).expect("it is sealed");
        self.at
            .iter()
            .for_each(|at| self.bench.with(at, Disk::erase));
        self.say(|| "the devices were used before".to_owned());
    }

    pub(super) fn live(mut self) -> Counts {
        let writes = 2 + self.dice.below(20);
        let (source, mut dice) = (self.source.clone(), Dice(self.dice.next()));
        self.bench.set_hook(Some(Box::new(move || {
            if dice.once_in(writes) {
                let mut source = source.lock().expect("no one has panicked with it");
                source.write(&mut dice);
            }
        })));
        let topped_up = self.dice.below(3);
        let mut is_whole = self.create() && self.export();
        for _ in 0..topped_up {
            is_whole = is_whole && self.top_up();
        }
        self.bench.set_hook(None);
        self.counts.given_up += u64::from(!is_whole);
        let faults = self.bench.faults();
        assert!(faults.is_empty(), "{faults:?}");
        if self.key.is_some() {
            self.ship(is_whole);
        }
        MEDIA.with(|media| *media.borrow_mut() = None);
        self.counts.clone()
    }

    /// Exports without topping up.
    pub(super) fn is_exported(&mut self) -> bool {
        self.create() && self.export()
    }

    fn plan(&mut self, operations: u64) {
        let which = self.dice.below(self.at.len() as u64) as usize;
        let after = self.dice.below(operations);
        let what = match self.dice.below(8) {
            0..4 => Event::Kill,
            4 => Event::Pull,
            5 => Event::Full,
            _ => Event::Fail,
        };
        self.say(|| format!("planned: {what:?} of device {which} after {after} operations"));
        self.bench.plan(Some((&self.at[which], after, what)));
        self.planned = Some(what);
    }

    /// Returns whether what was planned has happened.
    fn has_happened(&mut self) -> bool {
        let happened = self.planned.take().filter(|_| !self.bench.is_planned());
        self.is_tight |= happened == Some(Event::Full);
        happened.is_some()
    }

    /// Begins the export. Returns false if that cannot be done.
    fn create(&mut self) -> bool {
        for attempt in 0.. {
            self.bench.plan(None);
            let is_planned = attempt < 3 && self.dice.once_in(2);
            if is_planned {
                self.plan(3);
            }
            let settings = Settings {
                name: "box".into(),
                to: "paris".into(),
                parity: self.parity,
                now: 1_800_000_000,
            };
            let guests = self.source().guests();
            let begun = self.source().now();
            let create = || Job::create(&self.folder, &settings, (&self.at, None), guests);
            let pulled = |life: &Self| {
                life.at
                    .iter()
                    .any(|at| life.bench.with(at, |it| it.is_pulled))
            };
            let run = ended(create);
            let has_happened = self.has_happened();
            match run {
                Ended::Done(job) => {
                    self.key = Some(job.key().clone());
                    self.begun = Some(begun);
                    return true;
                }
                Ended::Failed(error) => {
                    self.say(|| format!("it did not begin: {error}"));
                    self.counts.failed += 1;
                    assert!(has_happened || self.is_tight, "{error}");
                    assert!(!self.folder.exists());
                    let is_small = matches!(
                        error,
                        JobError::Device(DeviceError::Small { .. })
                            | JobError::Write(WriteError::Full)
                    );
                    if !is_planned || is_small {
                        return false;
                    }
                    let was_pulled = pulled(self);
                    self.replug();
                    let is_tight = self.is_tight;
                    let mut empty = self.at.iter().map(|at| {
                        self.bench.with(at, |disk| {
                            let is_empty = |cell: &[u8]| cell.iter().all(|byte| *byte == 0);
                            // A block device that refuses a write refuses that of zeros too.
                            let is_full = disk.is_block && is_tight;
                            is_full
                                || disk.cell(0).is_none_or(is_empty)
                                    && (disk.is_block || !disk.is_made)
                        })
                    });
                    assert!(
                        was_pulled || empty.all(|it| it),
                        "something is left: {error}"
                    );
                }
                Ended::Killed => {
                    self.counts.killed += 1;
                    self.say(|| "killed before it began".to_owned());
                    self.replug();
                    if self.dice.once_in(2) {
                        self.bench.power_cut();
                    }
                    let again = Job::open(&self.folder);
                    let again = again.and_then(|mut job| job.run(1, &mut |_| ()).map(drop));
                    assert!(matches!(again, Err(JobError::NoDevices(_))), "{again:?}");
                    fs::remove_dir_all(&self.folder).expect("it is there");
                }
            }
            // The operator does what the errors say.
            self.at
                .iter()
                .for_each(|at| self.bench.with(at, Disk::erase));
        }
        false
    }

    fn replug(&self) {
        for at in &self.at {
            self.bench.with(at, |disk| disk.is_pulled = false);
        }
    }

    /// Runs the export to its end, with interruptions. Returns false if it cannot come to it.
    fn export(&mut self) -> bool {
        let interruptions = self.dice.below(6);
        for attempt in 0..=interruptions {
            let is_planned = attempt < interruptions;
            self.bench.plan(None);
            let mut steps = u64::MAX;
            if is_planned {
                match self.dice.once_in(4) {
                    true => steps = 1 + self.dice.below(4),
                    false => self.plan(30),
                }
            }
            if self.dice.once_in(6) {
                self.misplace();
            }
            if self.dice.once_in(30) {
                self.damage_one();
            }
            let every = [Duration::ZERO, Duration::from_secs(36_000)];
            let every = every[self.dice.below(2) as usize];
            let job = Job::open(&self.folder).expect("it is there");
            let mut job = job.durable_every(every);
            let source = self.source.clone();
            let mut dice = Dice(self.dice.next());
            let run = ended(|| {
                job.run(1_800_000_000, &mut |step| {
                    if let Step::Exports { .. } = step {
                        source.lock().expect("no panic").write(&mut dice);
                    }
                    steps -= 1;
                    if steps == 0 {
                        resume_unwind(Box::new(Killed));
                    }
                })
            });
            drop(job);
            let has_happened = self.has_happened();
            match run {
                Ended::Done(parcel) => {
                    self.is_sealed(&parcel);
                    return true;
                }
                Ended::Failed(error) => {
                    self.counts.failed += 1;
                    self.say(|| format!("failed: {error}"));
                    let is_found = self.is_damaged
                        && matches!(
                            error,
                            JobError::Write(
                                WriteError::Damaged(_) | WriteError::OtherDevice { .. }
                            )
                        );
                    assert!(has_happened || self.is_tight || is_found, "{error}");
                    self.counts.damaged += u64::from(is_found);
                    if is_found {
                        return false;
                    }
                    if let JobError::Write(WriteError::Full) = error {
                        return false;
                    }
                }
                Ended::Killed => {
                    self.counts.killed += 1;
                    self.say(|| "killed".to_owned());
                }
            }
            self.replug();
            if self.dice.once_in(2) {
                self.say(|| "power cut".to_owned());
                self.bench.power_cut();
                self.forget_digests();
            }
            self.copy_one();
        }
        false
    }

    /// Keeps a copy of a device.
    fn copy_one(&mut self) {
        let which = self.dice.below(self.at.len() as u64) as usize;
        let copy = self.bench.with(&self.at[which], |disk| disk.clone());
        self.copies.push((which, copy));
    }

    fn document(&self) -> serde_json::Value {
        let text = fs::read(self.folder.join("job.json")).expect("a document");
        serde_json::from_slice(&text).expect("JSON")
    }

    pub(super) fn position(&self) -> Position {
        let document = self.document();
        serde_json::from_value(document["position"].clone()).expect("a position")
    }

    /// Leaves what a power cut can leave of digests that were not synced.
    fn forget_digests(&mut self) {
        let document = self.document();
        let number = |value: &serde_json::Value| value.as_u64().expect("a number");
        let next = &document["next"];
        let (guest, disk) = (number(&next["guest"]), number(&next["disk"]));
        let (chunk, version) = (number(&next["chunk"]), number(&document["version"]));
        for at in disk..disk + 4 {
            let path = self.folder.join(format!("digests.{guest}.{at}.{version}"));
            let Ok(mut digests) = fs::read(&path) else {
                continue;
            };
            let kept = match at == disk {
                true => chunk as usize * 32,
                false => 0,
            };
            let more = digests.len() - kept;
            digests.truncate(kept + self.dice.below(more as u64 + 1) as usize);
            if let Some(rest) = digests.get_mut(kept..) {
                rest.fill(self.dice.next() as u8);
            }
            fs::write(&path, digests).expect("there is room");
        }
    }

    /// Damages a cell that was written. The parcel is not sealed with it.
    fn damage_one(&mut self) {
        let which = self.dice.below(self.at.len() as u64) as usize;
        let (row, at) = (
            self.dice.next(),
            self.dice.below(CELL_BYTES as u64) as usize,
        );
        let row = self.bench.with(&self.at[which], |disk| {
            let rows = disk.rows();
            let row = rows.get(row as usize % rows.len().max(1)).copied();
            disk.change(row.unwrap_or(0), |cell| cell[at] ^= 1);
            row
        });
        self.say(|| format!("row {row:?} of device {which} is damaged"));
        self.is_damaged = true;
    }

    /// Plugs in wrong devices, which the export refuses, and then the right ones.
    fn misplace(&mut self) {
        let all = |life: &Self| -> Vec<Disk> {
            let each = life.at.iter();
            each.map(|at| life.bench.with(at, |disk| disk.clone()))
                .collect()
        };
        let right = all(self);
        let mut wrong = right.clone();
        let count = wrong.len() as u64;
        let mut must_fail = false;
        if count > 1 && self.dice.once_in(2) {
            let (x, y) = (
                self.dice.below(count) as usize,
                self.dice.below(count) as usize,
            );
            wrong.swap(x, y);
            must_fail = x != y;
        } else if !self.copies.is_empty() && !self.is_damaged {
            let which = self.dice.below(self.copies.len() as u64) as usize;
            let (device, copy) = self.copies[which].clone();
            // It is an older one if something durable is missing on it.
            let Position { header, end } = self.position();
            let rows = right[device].rows().into_iter();
            let mut rows = rows.filter(|row| (header..end).contains(row));
            must_fail = rows.any(|row| copy.cell(row) != right[device].cell(row));
            wrong[device] = copy;
        }
        if !must_fail {
            return;
        }
        self.counts.misplaced += 1;
        self.say(|| "a wrong device is plugged in".to_owned());
        for (at, disk) in self.at.iter().zip(wrong) {
            self.bench.with(at, |it| *it = disk);
        }
        self.bench.plan(None);
        let before = all(self);
        let mut job = Job::open(&self.folder).expect("it is there");
        let run = ended(|| job.run(1, &mut |_| ()));
        let Ended::Failed(error) = run else {
            panic!("a wrong device is accepted");
        };
        self.say(|| format!("it is refused: {error}"));
        for (old, new) in before.iter().zip(all(self)) {
            assert_eq!(old.rows(), new.rows(), "something is written: {error}");
        }
        for (at, disk) in self.at.iter().zip(right) {
            self.bench.with(at, |it| *it = disk);
        }
    }

    fn is_sealed(&mut self, parcel: &Parcel) {
        self.counts.sealed += 1;
        let header = parcel.header().clone();
        assert!(header.sealed);
        self.say(|| format!("sealed as generation {}", header.generation));
        let report = parcel.verify(&mut |_| ());
        assert!(report.is_clean(), "{report:?}");
        let (from, sizes) = self.begun.clone().expect("it has begun");
        let devices = self
            .at
            .iter()
            .map(|at| self.bench.with(at, |disk| disk.clone()));
        let sealed = Sealed {
            times: (from, self.source().time),
            sizes,
            devices: devices.collect(),
            header,
        };
        self.check_headers(&sealed);
        self.sealed.push(sealed);
        self.copy_one();
        if self.dice.once_in(4) {
            // A sealed one is not written again.
            let before = self.bench.with(&self.at[0], |disk| disk.rows());
            let mut job = Job::open(&self.folder).expect("it is there");
            job.run(1, &mut |_| ()).expect("it is sealed");
            assert_eq!(before, self.bench.with(&self.at[0], |disk| disk.rows()));
        }
    }

    /// Notes a version that is sealed on some devices, and returns its place.
    pub(super) fn is_sealed_in_part(&mut self, header: &Header) -> usize {
        let (from, sizes) = self.begun.clone().expect("it has begun");
        let sealed = Sealed {
            times: (from, self.source().time),
            sizes,
            devices: Vec::new(),
            header: header.clone(),
        };
        self.sealed.push(sealed);
        self.sealed.len() - 1
    }

    /// Checks that the last header is where it should be, on all devices that take part.
    fn check_headers(&self, sealed: &Sealed) {
        let header = &sealed.header;
        assert_eq!(self.position().header, header.row);
        for (number, disk) in sealed.devices.iter().enumerate() {
            let name = disk.cell(header.row).and_then(|bytes| {
                let mut cell = Cell::new();
                cell.bytes_mut().copy_from_slice(bytes);
                cell.name()
            });
            let expected = Name {
                kind: Kind::Header,
                device: number as u16,
                row: header.row,
                parcel: header.parcel.short(),
                generation: header.generation,
            };
            let takes_part = header.devices[number] > header.row;
            assert_eq!(name, takes_part.then_some(expected));
            assert!(takes_part || disk.rows().last() < Some(&(header.row + SYNC_ROWS)));
        }
    }

    fn top_up(&mut self) -> bool {
        for _ in 0..self.dice.below(6) {
            let mut dice = self.dice.clone();
            self.source().write(&mut dice);
            self.dice = dice;
        }
        if self.dice.once_in(2) {
            let mut dice = self.dice.clone();
            self.source().resize(&mut dice);
            self.dice = dice;
        }
        let begun = self.source().now();
        let mut job = Job::open(&self.folder).expect("it is there");
        job.top_up().expect("it is sealed");
        self.begun = Some(begun);
        self.say(|| "topped up".to_owned());
        self.export()
    }

    pub(super) fn folder(&self) -> &Path {
        self.root.path()
    }

    pub(super) fn copies(&self) -> &[(usize, Disk)] {
        &self.copies
    }
}
