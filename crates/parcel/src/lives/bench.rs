//! Devices in memory: what was not synced may be lost, and they can be pulled, full and damaged.

use crate::bisect::PROBES;
use crate::cell::{BODY_BYTES, CELL_BYTES, Cell, Kind, Name};
use crate::device::DeviceError;
use crate::header::Header;
use crate::lives::dice::{Dice, Killed};
use crate::media::{Found, Media, Medium};
use nix::errno::Errno;
use ring::digest::{SHA256, digest};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

const CELL: u64 = CELL_BYTES as u64;
const PAGE: usize = 512;

type Bytes = Arc<[u8]>;

/// What happens at an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// The process ends before it, in the middle of it, or after it.
    Kill,
    /// The device is pulled.
    Pull,
    /// This operation fails.
    Fail,
    /// The device has no room for more than this.
    Full,
}

/// What a device has, now and after a power cut.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    pub(super) is_block: bool,
    /// The cells that it has room for.
    pub(super) cells: u64,
    /// The cells that it says it has room for when it is made.
    pub(super) says: u64,
    /// Whether the file was made.
    pub(super) is_made: bool,
    now: BTreeMap<u64, Bytes>,
    durable: BTreeMap<u64, Bytes>,
    /// The length of a file.
    pub(super) length: u64,
    durable_length: u64,
    pub(super) is_pulled: bool,
    /// Rows that cannot be read.
    pub(super) bad: BTreeSet<u64>,
    /// Reads until it is pulled.
    pub(super) reads_left: Option<u64>,
    /// Operations until an event.
    event: Option<(u64, Event)>,
    /// Each device has dice of its own: the order in which threads use devices changes nothing.
    pub(super) dice: Dice,
}

impl Disk {
    pub(super) fn new(is_block: bool, cells: u64, dice: &mut Dice) -> Self {
        Self {
            is_block,
            cells,
            says: cells,
            is_made: is_block,
            now: BTreeMap::new(),
            durable: BTreeMap::new(),
            length: 0,
            durable_length: 0,
            is_pulled: false,
            bad: BTreeSet::new(),
            reads_left: None,
            event: None,
            dice: Dice(dice.next()),
        }
    }

    /// Erases it: a file is gone, and so are the first cells of a block device.
    pub(super) fn erase(&mut self) {
        match self.is_block {
            true => {
                self.now.retain(|row, _| *row >= PROBES);
            }
            false => {
                (self.is_made, self.length) = (false, 0);
                self.now.clear();
            }
        }
        self.settle();
    }

    pub(super) fn cell(&self, row: u64) -> Option<&[u8]> {
        self.now.get(&row).map(|cell| &**cell)
    }

    pub(super) fn rows(&self) -> Vec<u64> {
        self.now.keys().copied().collect()
    }

    /// Changes a cell behind the writer's back.
    pub(super) fn change(&mut self, row: u64, change: impl FnOnce(&mut [u8])) {
        if let Some(cell) = self.now.get_mut(&row) {
            let mut bytes = cell.to_vec();
            change(&mut bytes);
            *cell = bytes.into();
        }
        self.durable = self.now.clone();
    }

    /// Cuts a file.
    pub(super) fn truncate(&mut self, length: u64) {
        self.length = self.length.min(length);
        self.cut_cells();
        self.settle();
    }

    fn cut_cells(&mut self) {
        let length = self.length;
        self.now.retain(|row, _| row * CELL < length);
        if let Some(cell) = self.now.get_mut(&(length / CELL)) {
            let mut bytes = cell.to_vec();
            bytes[(length % CELL) as usize..].fill(0);
            *cell = bytes.into();
        }
    }

    fn settle(&mut self) {
        self.durable = self.now.clone();
        self.durable_length = self.length;
    }

    /// Leaves what a power cut can leave of what was not synced.
    pub(super) fn cut(&mut self) {
        let dice = &mut self.dice;
        let none: Bytes = vec![0; CELL_BYTES].into();
        let rows: BTreeSet<u64> = self
            .now
            .keys()
            .chain(self.durable.keys())
            .copied()
            .collect();
        for row in rows {
            let old = self.durable.get(&row).unwrap_or(&none).clone();
            let new = self.now.get(&row).unwrap_or(&none).clone();
            if Arc::ptr_eq(&old, &new) {
                continue;
            }
            let left: Bytes = match dice.below(3) {
                0 => old,
                1 => new,
                _ => {
                    let pages = new.chunks(PAGE).zip(old.chunks(PAGE));
                    let parts = pages.flat_map(|(new, old)| match dice.below(4) {
                        0 => old,
                        _ => new,
                    });
                    parts.copied().collect::<Vec<u8>>().into()
                }
            };
            self.now.insert(row, left);
        }
        if !self.is_block {
            let more = self.length.saturating_sub(self.durable_length);
            self.length = match dice.below(3) {
                0 => self.durable_length,
                1 => self.length,
                _ => self.durable_length + dice.below(more + 1),
            };
            self.cut_cells();
        }
        self.settle();
    }
}

#[derive(Debug)]
struct State {
    disks: BTreeMap<PathBuf, Disk>,
    /// The nonces of generations, by the parcel and the number.
    nonces: HashMap<([u8; 8], u32), [u8; 16]>,
    /// What each nonce was used for.
    used: HashMap<([u8; 16], u16, u64), Vec<u8>>,
    faults: Vec<String>,
}

type Hook = Box<dyn FnMut() + Send>;

/// All devices.
#[derive(Clone)]
pub(super) struct Bench {
    state: Arc<Mutex<State>>,
    /// What happens between operations.
    hook: Arc<Mutex<Option<Hook>>>,
}

impl std::fmt::Debug for Bench {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bench")
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn io_at(path: &Path, errno: Errno) -> DeviceError {
    DeviceError::Io {
        path: path.to_path_buf(),
        error: errno.into(),
    }
}

impl Bench {
    pub(super) fn new() -> Self {
        let state = State {
            disks: BTreeMap::new(),
            nonces: HashMap::new(),
            used: HashMap::new(),
            faults: Vec::new(),
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            hook: Arc::new(Mutex::new(None)),
        }
    }

    pub(super) fn add(&self, at: &Path, disk: Disk) {
        locked(&self.state).disks.insert(at.to_path_buf(), disk);
    }

    /// Sets what happens between operations.
    pub(super) fn set_hook(&self, hook: Option<Hook>) {
        *locked(&self.hook) = hook;
    }

    /// Lets something happen at an operation of a device; nothing if there is no device.
    pub(super) fn plan(&self, event: Option<(&Path, u64, Event)>) {
        let mut state = locked(&self.state);
        for (path, disk) in &mut state.disks {
            disk.event = event.and_then(|(at, after, what)| (at == path).then_some((after, what)));
        }
    }

    /// Returns whether what was planned has not happened.
    pub(super) fn is_planned(&self) -> bool {
        let state = locked(&self.state);
        state.disks.values().any(|disk| disk.event.is_some())
    }

    pub(super) fn with<R>(&self, at: &Path, act: impl FnOnce(&mut Disk) -> R) -> R {
        act(locked(&self.state).disks.get_mut(at).expect("a device"))
    }

    /// Returns what nobody may do and someone did.
    pub(super) fn faults(&self) -> Vec<String> {
        locked(&self.state).faults.clone()
    }

    pub(super) fn power_cut(&self) {
        let mut state = locked(&self.state);
        state.disks.values_mut().for_each(Disk::cut);
    }

    fn medium(&self, at: &Path) -> Box<dyn Medium> {
        Box::new(OnBench {
            bench: self.clone(),
            at: at.to_path_buf(),
        })
    }
}

impl Media for Bench {
    fn make(&self, at: &Path, name: &str) -> Result<Found, DeviceError> {
        let mut state = locked(&self.state);
        let disk = state.disks.get_mut(at).ok_or(io_at(at, Errno::ENOENT))?;
        if disk.is_pulled {
            return Err(io_at(at, Errno::ENOENT));
        }
        if !disk.is_block && disk.is_made {
            return Err(DeviceError::NotEmpty(at.join(name)));
        }
        disk.is_made = true;
        Ok(Found {
            path: at.to_path_buf(),
            medium: self.medium(at),
            is_block: disk.is_block,
            bytes: disk.says * CELL,
        })
    }

    fn find(&self, at: &Path, _writable: bool) -> Result<Found, DeviceError> {
        let state = locked(&self.state);
        let disk = state.disks.get(at).filter(|disk| !disk.is_pulled);
        let disk = disk.filter(|disk| disk.is_block || disk.is_made);
        let disk = disk.ok_or(io_at(at, Errno::ENOENT))?;
        Ok(Found {
            path: at.to_path_buf(),
            medium: self.medium(at),
            is_block: disk.is_block,
            bytes: match disk.is_block {
                true => disk.cells * CELL,
                false => disk.length,
            },
        })
    }

    fn place(&self, at: &Path) -> io::Result<PathBuf> {
        Ok(at.to_path_buf())
    }
}

/// An open device.
#[derive(Debug)]
struct OnBench {
    bench: Bench,
    at: PathBuf,
}

/// How much of an operation takes place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Done {
    Nothing,
    Part,
    All,
}

impl OnBench {
    /// Runs an operation that changes the device.
    fn operate(&self, act: impl Fn(&mut Disk, Done)) -> io::Result<()> {
        if let Some(hook) = &mut *locked(&self.bench.hook) {
            hook();
        }
        let mut state = locked(&self.bench.state);
        let disk = state.disks.get_mut(&self.at).expect("a device");
        if disk.is_pulled {
            return Err(Errno::EIO.into());
        }
        let due = match &mut disk.event {
            None => None,
            Some((0, event)) => Some(*event),
            Some((left, _)) => {
                *left -= 1;
                None
            }
        };
        let Some(due) = due else {
            act(disk, Done::All);
            return Ok(());
        };
        disk.event = None;
        if due == Event::Full {
            let used = disk.rows().last().map_or(0, |last| last + 1);
            disk.cells = disk.cells.min(used);
            return Err(Errno::ENOSPC.into());
        }
        let done = [Done::Nothing, Done::Part, Done::All][disk.dice.below(3) as usize];
        act(disk, done);
        match due {
            Event::Kill => {
                drop(state);
                resume_unwind(Box::new(Killed));
            }
            Event::Pull => {
                // What is on its way is lost.
                disk.cut();
                disk.is_pulled = true;
            }
            Event::Fail | Event::Full => {}
        }
        Err(Errno::EIO.into())
    }

    fn note(&self, row: u64, bytes: &[u8]) {
        let mut state = locked(&self.bench.state);
        let mut cell = Cell::new();
        cell.bytes_mut().copy_from_slice(bytes);
        let Some(name) = cell.name() else {
            let fault = format!("row {row}: a cell without a name is written");
            return state.faults.push(fault);
        };
        let disk = &state.disks[&self.at];
        // On a block device a torn header is not seen, and another one may replace it.
        let before = disk.cell(row).and_then(|cell| {
            let was = Name::decode(&cell[BODY_BYTES..BODY_BYTES + 32])?;
            (was.parcel == name.parcel).then_some(())
        });
        let is_within = !disk.is_block && row * CELL < disk.length;
        if before.is_some() || is_within {
            let fault = format!("{}: row {row} is written again", self.at.display());
            state.faults.push(fault);
        }
        match name.kind {
            Kind::Header => {
                let (header, _) = Header::decode(&name, cell.body()).expect("our own");
                let key = (name.parcel, name.generation);
                state.nonces.insert(key, header.nonce.0);
            }
            Kind::Data => {
                let Some(nonce) = state.nonces.get(&(name.parcel, name.generation)).copied() else {
                    let fault = format!("row {row} is of a generation without a header");
                    return state.faults.push(fault);
                };
                let sum = digest(&SHA256, bytes).as_ref().to_vec();
                let key = (nonce, name.device, row);
                let was = state.used.insert(key, sum.clone());
                if was.is_some_and(|was| was != sum) {
                    let fault = format!("row {row}: a nonce is used for other content");
                    state.faults.push(fault);
                }
            }
            Kind::Parity => {}
        }
    }
}

impl Medium for OnBench {
    fn length(&self) -> io::Result<u64> {
        let state = locked(&self.bench.state);
        let disk = &state.disks[&self.at];
        match disk.is_pulled {
            true => Err(Errno::EIO.into()),
            false => Ok(disk.length),
        }
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut state = locked(&self.bench.state);
        let disk = state.disks.get_mut(&self.at).expect("a device");
        match &mut disk.reads_left {
            Some(0) => disk.is_pulled = true,
            Some(left) => *left -= 1,
            None => {}
        }
        let (row, from) = (at / CELL, (at % CELL) as usize);
        if disk.is_pulled || disk.bad.contains(&row) {
            return Err(Errno::EIO.into());
        }
        let size = match disk.is_block {
            true => disk.cells * CELL,
            false => disk.length,
        };
        if at + bytes.len() as u64 > size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match disk.now.get(&row) {
            Some(cell) => bytes.copy_from_slice(&cell[from..from + bytes.len()]),
            None => bytes.fill(0),
        }
        Ok(())
    }

    fn write_at(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let row = at / CELL;
        assert!(
            at.is_multiple_of(CELL) && bytes.len() == CELL_BYTES,
            "whole cells"
        );
        if bytes.iter().any(|byte| *byte != 0) {
            self.note(row, bytes);
        }
        let is_full = {
            let state = locked(&self.bench.state);
            let disk = &state.disks[&self.at];
            row >= disk.cells && !disk.is_pulled
        };
        let new: Bytes = bytes.into();
        self.operate(|disk, done| {
            let done = match is_full {
                // Behind the end of a block device there is nothing.
                true if disk.is_block => Done::Nothing,
                true => done.min_part(),
                false => done,
            };
            let none: Bytes = vec![0; CELL_BYTES].into();
            let old = disk.now.get(&row).unwrap_or(&none).clone();
            let (left, length) = match done {
                Done::Nothing => return,
                Done::All => (new.clone(), CELL),
                Done::Part => {
                    let part = disk.dice.below(CELL) as usize;
                    let left = [&new[..part], &old[part..]].concat();
                    (left.into(), part as u64)
                }
            };
            if length > 0 {
                disk.now.insert(row, left);
                disk.length = disk.length.max(row * CELL + length);
            }
        })?;
        match is_full {
            true => Err(Errno::ENOSPC.into()),
            false => Ok(()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.operate(|disk, done| match done {
            Done::All => disk.settle(),
            Done::Part => {
                // Some of it is written back, and the rest is lost: a later sync does not try it.
                disk.cut();
            }
            Done::Nothing => {}
        })
    }

    fn forget(&self) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        let mut state = locked(&self.bench.state);
        let disk = state.disks.get_mut(&self.at).expect("a device");
        if disk.is_pulled {
            return Err(Errno::EIO.into());
        }
        disk.erase();
        Ok(())
    }
}

impl Done {
    fn min_part(self) -> Self {
        match self {
            Self::All => Self::Part,
            other => other,
        }
    }
}
