//! What happens to devices on their way, and whether an import then brings the right content.

use crate::cell::{BODY_BYTES, CELL_BYTES};
use crate::device::Device;
use crate::import::{ImportError, ImportedDisk, import_to};
use crate::key::DataKey;
use crate::layout::Layout;
use crate::lives::bench::Disk;
use crate::lives::dice::{Dice, Killed};
use crate::lives::life::{Life, Sealed};
use crate::lives::places::Memory;
use crate::reader::{Damage, OpenError, Parcel, Report};
use nix::errno::Errno;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};

/// What must come of an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The last version, and nothing is lost.
    Newest,
    /// An error that says that content is lost.
    Lost,
    /// Any error, or an earlier version that was sealed.
    Older,
    /// Any of them.
    Any,
}

/// The devices as they arrive.
struct Arrived {
    disks: Vec<Disk>,
    /// Whether each is given to the reader.
    given: Vec<bool>,
    /// A copy of one that is given beside it.
    twin: Option<(usize, Disk)>,
    /// Whether it is known which cells can be read: nothing is pulled in the middle, and the end of
    /// no block device is hidden.
    is_certain: bool,
}

/// Flips a bit in some part of a cell; returns whether it is in the name.
fn flip(disk: &mut Disk, row: u64, dice: &mut Dice) -> bool {
    let at = match dice.below(4) {
        // A header's length and document; the beginning of a log's cell.
        0 => dice.below(200),
        1 => dice.below(BODY_BYTES as u64),
        2 => BODY_BYTES as u64 + dice.below(32),
        _ => CELL_BYTES as u64 - 1 - dice.below(32),
    } as usize;
    let bit = 1 << dice.below(8);
    disk.change(row, |cell| cell[at] ^= bit);
    (BODY_BYTES..BODY_BYTES + 32).contains(&at)
}

impl Life {
    pub(super) fn ship(&mut self, is_whole: bool) {
        let arrived: Vec<Disk> = self.devices();
        for _ in 0..3 {
            self.counts.shipped += 1;
            let shipment = self.damaged(&arrived);
            let fate = self.fate(&shipment, is_whole);
            self.say(|| format!("shipped {:?}: {fate:?}", shipment.given));
            self.arrives(&shipment, fate);
        }
    }

    /// Imports with too little room, which writes nothing, and with enough.
    pub(super) fn needs_room(&mut self) -> bool {
        let is_whole = self.is_exported();
        if is_whole {
            let parcel = open(&self.at).expect("it is sealed");
            let key = self.key.clone().expect("it has begun");
            let memory = Memory::new();
            memory.set_free(0);
            let bring = || {
                import_to(&memory, &parcel, (&key, None), &mut |_, disk| {
                    Ok(Path::new("/out").join(&disk.name))
                })
            };
            let refused = bring();
            let Err(ImportError::Room { needed, free, .. }) = refused else {
                panic!("it is imported where it has no room: {refused:?}");
            };
            assert!(needed > free && free == 0);
            assert!(memory.files().is_empty());
            let all: u64 = self.source().sizes().iter().map(|size| size + 8192).sum();
            memory.set_free(all);
            let disks = bring().expect("there is room").disks;
            self.is_imported(&memory, &disks, 0);
        }
        is_whole
    }

    fn devices(&self) -> Vec<Disk> {
        let each = self.at.iter();
        each.map(|at| self.bench.with(at, |disk| disk.clone()))
            .collect()
    }

    fn damaged(&mut self, disks: &[Disk]) -> Arrived {
        let count = disks.len() as u64;
        let mut shipment = Arrived {
            disks: disks.to_vec(),
            given: vec![true; disks.len()],
            twin: None,
            is_certain: true,
        };
        let survives = u64::from(self.parity);
        let lost = match self.dice.below(6) {
            0 => survives + 1,
            1 | 2 => 0,
            _ => self.dice.below(survives + 1),
        };
        for _ in 0..lost.min(count) {
            let which = self.dice.below(count) as usize;
            shipment.given[which] = false;
        }
        let copies = self.copies().len() as u64;
        if copies > 0 && self.dice.once_in(4) {
            let which = self.dice.below(copies) as usize;
            let (device, copy) = self.copies()[which].clone();
            self.say(|| format!("an older copy of device {device}"));
            match self.dice.once_in(4) {
                true => shipment.twin = Some((device, copy)),
                false => shipment.disks[device] = copy,
            }
        }
        let flips = match self.dice.below(4) {
            0 => 0,
            1 => self.dice.below(30),
            _ => self.dice.below(4),
        };
        let mut damaged = Vec::new();
        for _ in 0..flips {
            let which = self.dice.below(count) as usize;
            let disk = &mut shipment.disks[which];
            let rows = disk.rows();
            let Some(row) = self.pick_row(&rows) else {
                continue;
            };
            let (mut hides, how) = (false, self.dice.below(8));
            damaged.push((which, row, how));
            match how {
                0 => {
                    disk.change(row, |cell| cell.fill(0));
                    hides = true;
                }
                1 => {
                    disk.bad.insert(row);
                    hides = true;
                }
                2 => {
                    // Another cell in its place.
                    let from = rows[self.dice.below(rows.len() as u64) as usize];
                    let other = disk.cell(from).map(<[u8]>::to_vec).unwrap_or_default();
                    disk.change(row, |cell| cell.copy_from_slice(&other));
                }
                _ => hides = flip(disk, row, &mut self.dice),
            }
            shipment.is_certain &= !(hides && disk.is_block);
        }
        self.say(|| format!("damaged (device, row, how): {damaged:?}"));
        if self.dice.once_in(10) {
            let which = self.dice.below(count) as usize;
            let disk = &mut shipment.disks[which];
            if !disk.is_block {
                let length = self.dice.below(disk.length + 1);
                disk.truncate(length);
            }
        }
        if self.dice.once_in(8) {
            let which = self.dice.below(count) as usize;
            shipment.disks[which].reads_left = Some(self.dice.below(60));
            shipment.is_certain = false;
        }
        shipment
    }

    /// Returns a row: often that of the first or of the last header.
    fn pick_row(&mut self, rows: &[u64]) -> Option<u64> {
        match self.dice.below(8) {
            0 => rows.first(),
            1 => rows.last(),
            _ => rows.get(self.dice.below(rows.len() as u64) as usize),
        }
        .copied()
    }

    /// Says what must come of it, from what the devices were when they were sealed.
    fn fate(&self, shipment: &Arrived, is_whole: bool) -> Fate {
        if !shipment.is_certain || shipment.twin.is_some() {
            return Fate::Any;
        }
        let Some(sealed) = self.sealed.last().filter(|_| is_whole) else {
            return Fate::Older;
        };
        let header = &sealed.header;
        let is_intact = |device: usize, row: u64| {
            let disk = &shipment.disks[device];
            let was = sealed.devices[device].cell(row);
            shipment.given[device]
                && !disk.bad.contains(&row)
                && was.is_some()
                && disk.cell(row) == was
        };
        let devices = 0..shipment.disks.len();
        let is_newest =
            |device: &usize| header.devices[*device] > header.row && is_intact(*device, header.row);
        if !devices.clone().any(|device| is_newest(&device)) {
            return Fate::Older;
        }
        let damaged = self.damage(sealed, &is_intact);
        match damaged
            .iter()
            .all(|(_, devices)| devices.len() <= self.parity.into())
        {
            true => Fate::Newest,
            false => Fate::Lost,
        }
    }

    /// Returns the rows of data that are not as they were, and the devices on which they are not.
    fn damage(
        &self,
        sealed: &Sealed,
        is_intact: &dyn Fn(usize, u64) -> bool,
    ) -> Vec<(u64, Vec<usize>)> {
        let mut damaged = Vec::new();
        for earlier in &sealed.header.earlier {
            let layout = Layout::new(&earlier.devices, self.parity).expect("our own");
            for row in earlier.first + 1..earlier.end {
                let devices = layout.devices(row).into_iter();
                let is_missing = |device: &usize| !is_intact(*device, row);
                let missing: Vec<usize> = devices.filter(is_missing).collect();
                if !missing.is_empty() {
                    damaged.push((row, missing));
                }
            }
        }
        damaged
    }

    fn arrives(&mut self, shipment: &Arrived, fate: Fate) {
        let mut paths = Vec::new();
        let disks = shipment.disks.iter().cloned().enumerate();
        let twin = shipment.twin.clone();
        for (number, (device, disk)) in disks.chain(twin.clone()).enumerate() {
            let path = self.folder().join(format!("arrived-{number}"));
            self.bench.add(&path, disk);
            if shipment.given[device] {
                let at = self.dice.below(paths.len() as u64 + 1) as usize;
                paths.insert(at, path);
            }
        }
        let key = self.key.clone().expect("it has begun");
        let Some(parcel) = self.opens(&paths, fate) else {
            return;
        };
        let generation = parcel.header().generation;
        let sealed = self.version_of(&parcel);
        let is_newest =
            self.sealed[sealed].header.generation == generation && sealed + 1 == self.sealed.len();
        match fate {
            Fate::Newest | Fate::Lost => assert!(is_newest),
            Fate::Older | Fate::Any => {}
        }
        self.counts.older += u64::from(!is_newest);
        let report = parcel.verify(&mut |_| ());
        self.say(|| format!("{report:?}"));
        self.is_reported(shipment, fate, &report);
        self.imports(&paths, &key, (sealed, &report, fate));
    }

    /// Returns which version a parcel has.
    fn version_of(&mut self, parcel: &Parcel) -> usize {
        let header = parcel.header();
        // A header that was not written to all devices seals the parcel where it is: everything was
        // read back before. The export has then gone on with the same version.
        let mut later = self.sealed.iter();
        let sealed = later.position(|it| it.header.generation >= header.generation);
        sealed.unwrap_or_else(|| self.is_sealed_in_part(header))
    }

    fn opens(&mut self, paths: &[PathBuf], fate: Fate) -> Option<Parcel> {
        match open(paths) {
            Ok(parcel) => Some(parcel),
            Err(error) => {
                self.say(|| format!("not opened: {error}"));
                self.counts.not_opened += 1;
                assert!(matches!(fate, Fate::Older | Fate::Any), "{error}");
                None
            }
        }
    }

    /// Checks that what is damaged is said.
    fn is_reported(&self, shipment: &Arrived, fate: Fate, report: &Report) {
        if fate != Fate::Newest && fate != Fate::Lost {
            return;
        }
        let sealed = self.sealed.last().expect("it is sealed");
        let is_intact = |device: usize, row: u64| {
            let disk = &shipment.disks[device];
            shipment.given[device]
                && !disk.bad.contains(&row)
                && disk.cell(row) == sealed.devices[device].cell(row)
        };
        assert_eq!(report.lost > 0, fate == Fate::Lost);
        let row = sealed.header.row;
        let takes_part = |device: &usize| sealed.header.devices[*device] > row;
        let devices = (0..shipment.disks.len()).filter(takes_part);
        let without = devices.filter(|device| !is_intact(*device, row));
        let mut damage = self.damage(sealed, &is_intact);
        damage.push((row, without.collect()));
        for (row, devices) in damage {
            for device in devices {
                let said = report.damage.iter().find(|(number, _)| *number == device);
                let is_said = said.is_some_and(|(_, damage)| match damage {
                    Damage::Absent => true,
                    Damage::Cells { rows, .. } => rows.contains(&row) || rows.len() >= 100,
                });
                assert!(is_said, "row {row} of device {device}");
            }
        }
    }

    /// Imports, also with interruptions.
    fn imports(&mut self, paths: &[PathBuf], key: &DataKey, what: (usize, &Report, Fate)) {
        let (sealed, report, fate) = what;
        let memory = Memory::new();
        let interruptions = self.dice.below(3);
        for attempt in 0..=interruptions {
            let event = match self.dice.below(3) {
                0 => None,
                1 => Some(Errno::ENOSPC),
                _ => Some(Errno::EIO),
            };
            let is_planned = attempt < interruptions;
            let after = self.dice.below(120);
            memory.plan(is_planned.then_some((after, event)));
            // A reader that was killed is begun again.
            let Ok(parcel) = open(paths) else {
                assert_eq!(fate, Fate::Any);
                return;
            };
            // Where a device was pulled meanwhile, it may be an earlier version.
            let sealed = match fate {
                Fate::Any => self.version_of(&parcel),
                Fate::Newest | Fate::Lost | Fate::Older => sealed,
            };
            let before = memory.files();
            let run = catch_unwind(AssertUnwindSafe(|| {
                import_to(&memory, &parcel, (key, None), &mut |_, disk| {
                    Ok(Path::new("/out").join(&disk.name))
                })
            }));
            let outcome = match run {
                Ok(outcome) => outcome,
                Err(panic) if panic.is::<Killed>() => {
                    self.say(|| "the import is killed".to_owned());
                    if self.dice.once_in(2) {
                        memory.power_cut(&mut self.dice);
                    }
                    self.are_whole(&memory, sealed);
                    memory.clear_named();
                    continue;
                }
                Err(panic) => resume_unwind(panic),
            };
            match outcome {
                Ok(imported) => {
                    memory.power_cut(&mut self.dice);
                    self.is_imported(&memory, &imported.disks, sealed);
                    let read = imported.report;
                    assert!(read.lost == 0);
                    assert!(fate != Fate::Lost && (report.lost == 0 || fate == Fate::Any));
                    self.counts.imported += 1;
                    self.counts.recovered += u64::from(read.recovered > 0);
                    return;
                }
                Err(error) => {
                    self.say(|| format!("not imported: {error}"));
                    let is_lost =
                        matches!(error, ImportError::Lost(_) | ImportError::Unread { .. });
                    let is_io = matches!(error, ImportError::Io { .. });
                    assert!(is_lost || (is_io && is_planned), "{error}");
                    if is_io {
                        self.are_whole(&memory, sealed);
                        memory.clear_named();
                        continue;
                    }
                    // What fails may be the removal.
                    let is_new = |path: &PathBuf| !before.contains_key(path);
                    assert!(memory.has_failed() || !memory.files().keys().any(is_new));
                    // What verification calls good can be imported.
                    assert!(report.lost > 0 || fate == Fate::Any);
                    self.counts.lost += 1;
                    return;
                }
            }
        }
        panic!("an import that nothing interrupts has no end");
    }

    /// Checks that files that have their names are whole.
    fn are_whole(&self, memory: &Memory, sealed: usize) {
        for (path, content) in memory.files() {
            let name = path
                .file_name()
                .expect("a file")
                .to_string_lossy()
                .into_owned();
            if !name.starts_with('.') {
                self.is_right(&name, &content, &self.sealed[sealed]);
            }
        }
    }

    fn is_imported(&self, memory: &Memory, disks: &[ImportedDisk], sealed: usize) {
        let files = memory.files();
        assert_eq!(
            (files.len(), disks.len()),
            (self.source().count(), disks.len())
        );
        for disk in disks {
            let content = &files[&disk.path];
            assert_eq!(content.len() as u64, disk.bytes);
            self.is_right(&disk.disk, content, &self.sealed[sealed]);
        }
        assert_eq!(disks.len(), self.source().count());
    }

    fn is_right(&self, name: &str, content: &[u8], sealed: &Sealed) {
        let (_, number) = name.split_once('-').expect("a disk");
        let number: usize = number.parse().expect("a number");
        assert_eq!(content.len() as u64, sealed.sizes[number], "{name}");
        let never = self.source().never_was(number, content, sealed.times);
        assert_eq!(never, None, "{name} never had this content then");
    }
}

fn open(paths: &[PathBuf]) -> Result<Parcel, OpenError> {
    let devices = paths
        .iter()
        .filter_map(|path| Device::open(path, false).ok());
    Parcel::open(devices.collect())
}
