//! A guest whose writes are tracked, and that knows what its disks have been.

use crate::stage::{Dice, Stage};
use longhaul_parcel::{Frozen, JobDisk, JobGuest, Tracking};
use longhaul_storage::disk::{Disk, ExportSize};
use longhaul_storage::front::tracking::{begin, tracked_disk};
use longhaul_storage::front::{FrontFolder, FrontSpec};
use longhaul_storage::nbd::ExportName;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub(crate) const MIB: u64 = 1 << 20;
/// Sizes of a guest's disks: whole batches, and a last chunk that is not whole.
pub(crate) const BYTES: [u64; 2] = [24 * MIB + 4096, 3 * MIB + 512];

/// The length of the records: that of a region, to which an image may grow.
pub(crate) const REGION_BYTES: u64 = 32 * MIB;

/// A write of the guest to both disks: its number at the beginning, and at another place.
#[derive(Debug, Clone)]
pub(crate) struct Operation {
    pub(crate) places: [u64; 2],
    /// Whether it writes what was there at first.
    pub(crate) reverts: bool,
}

/// A guest that runs here, and what it has written.
pub(crate) struct Machine {
    pub(crate) paths: Vec<PathBuf>,
    initial: Vec<Vec<u8>>,
    pub(crate) operations: Vec<Operation>,
    pub(crate) disks: Vec<Arc<dyn Disk>>,
    pub(crate) fronts: Exports,
    above: PathBuf,
    records: u64,
    pub(crate) size: ExportSize,
}

/// The exports that track its disks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Exports {
    fronts: Arc<Mutex<BTreeMap<PathBuf, FrontFolder>>>,
    pub(crate) agent: Option<Agent>,
}

/// The agent in a guest that freezes its file systems.
#[derive(Debug, Clone, Default)]
pub(crate) struct Agent {
    /// What it was asked.
    pub(crate) asked: Arc<Mutex<Vec<String>>>,
    pub(crate) refuses: bool,
    /// It thaws by itself.
    pub(crate) thaws: bool,
}

#[derive(Debug)]
struct FrozenGuest(Agent, String);

impl Tracking for Exports {
    fn export_of(&self, guest: &str, image: &Path) -> io::Result<Option<FrontFolder>> {
        assert!(["web", "db"].contains(&guest));
        Ok(self.fronts.lock().unwrap().get(image).cloned())
    }

    fn freeze(&self, guest: &str) -> Result<Option<Box<dyn Frozen>>, String> {
        let Some(agent) = &self.agent else {
            return Ok(None);
        };
        agent.asked.lock().unwrap().push(format!("freeze {guest}"));
        match agent.refuses {
            true => Err("no".into()),
            false => Ok(Some(Box::new(FrozenGuest(agent.clone(), guest.into())))),
        }
    }
}

impl Frozen for FrozenGuest {
    fn thaw(self: Box<Self>) -> Result<(), String> {
        let Self(agent, guest) = *self;
        agent.asked.lock().unwrap().push(format!("thaw {guest}"));
        match agent.thaws {
            true => Err("it was thawed".into()),
            false => Ok(()),
        }
    }
}

impl Machine {
    pub(crate) fn new(stage: &Stage, dice: &mut Dice) -> Self {
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
    pub(crate) fn is_tracked(&mut self) {
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
                socket: None,
            };
            let path = self.above.join(format!("f{}", self.records));
            let front = FrontFolder::create(&path, &spec).unwrap();
            begin(&front, REGION_BYTES).unwrap();
            disks.push(tracked_disk(&front).unwrap());
            let mut fronts = self.fronts.fronts.lock().unwrap();
            fronts.insert(image.clone(), front);
        }
        self.disks = disks;
    }

    /// It is shut down, and started again without being tracked.
    pub(crate) fn is_not_tracked(&mut self) {
        self.disks.clear();
        self.fronts.fronts.lock().unwrap().clear();
    }

    /// Returns what an operation writes to a disk, with the offsets.
    pub(crate) fn writes(
        &self,
        operation: &Operation,
        number: u64,
        disk: usize,
    ) -> [(u64, [u8; 8]); 2] {
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

    pub(crate) fn write(&mut self, dice: &mut Dice) {
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
    pub(crate) fn after(&self, operations: usize) -> Vec<Vec<u8>> {
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

    /// Returns its disks as those of two guests.
    pub(crate) fn two_guests(&self) -> Vec<JobGuest> {
        let disks = self.guest().disks.into_iter();
        disks
            .zip(["web", "db"])
            .map(|(disk, name)| JobGuest {
                name: name.into(),
                disks: vec![disk],
            })
            .collect()
    }

    pub(crate) fn guest(&self) -> JobGuest {
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

/// Asserts that imported disks are as the guest's once were, and returns after how many operations.
pub(crate) fn is_a_moment(machine: &Machine, disks: &[Vec<u8>]) -> usize {
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
