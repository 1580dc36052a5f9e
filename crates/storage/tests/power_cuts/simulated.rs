//! A simulated file system whose power is cut. Unsynced changes are dropped, kept or mixed at a
//! cut: each sector of 512 bytes independently has one of the contents written to it since its last
//! sync, or the one before; the length of a file independently is one of its lengths since then;
//! each creation, replacement or removal of a name independently has happened or not.

use crate::random::Random;
use longhaul_storage::files::{Access, Files, OpenFile};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard};

const SECTOR: usize = 512;
type Sector = [u8; SECTOR];

/// How often faults occur, in percent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    pub write_fails: u64,
    pub sync_fails: u64,
    /// Whether only reserved space is left.
    pub full: bool,
}

#[derive(Debug, Clone)]
pub struct Simulated(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    random: Random,
    nodes: Vec<Node>,
    /// Operations until the power is cut, or the process ends.
    left: u64,
    faults: Faults,
    suppressed: Option<&'static str>,
    syncs: BTreeSet<&'static str>,
}

#[derive(Debug)]
enum Node {
    File(Data),
    Folder(Names),
}

/// A file: its content as programs see it, and on the disk.
#[derive(Debug, Default)]
struct Data {
    seen: Vec<u8>,
    sectors: BTreeMap<usize, Sector>,
    length: usize,
    /// Contents written and not synced since, oldest first.
    new_sectors: BTreeMap<usize, Vec<Sector>>,
    new_lengths: Vec<usize>,
    reserved: usize,
    reserved_durably: usize,
}

#[derive(Debug, Default)]
struct Names {
    seen: BTreeMap<OsString, usize>,
    durable: BTreeMap<OsString, usize>,
    new: Vec<NewName>,
}

/// A name that was created or removed: a rename does both at once.
#[derive(Debug)]
struct NewName {
    given: Option<(OsString, usize)>,
    taken: Option<OsString>,
}

impl NewName {
    fn give(&self, names: &mut BTreeMap<OsString, usize>) {
        if let Some(old) = &self.taken {
            names.remove(old);
        }
        names.extend(self.given.clone());
    }
}

impl Data {
    /// Records the current sectors of a range as contents that may reach the disk.
    fn touch(&mut self, from: usize, to: usize) {
        for sector in from / SECTOR..to.div_ceil(SECTOR) {
            let mut content = [0; SECTOR];
            let seen = self.seen.get(sector * SECTOR..).unwrap_or_default();
            let length = seen.len().min(SECTOR);
            content[..length].copy_from_slice(&seen[..length]);
            self.new_sectors.entry(sector).or_default().push(content);
        }
    }

    fn resize(&mut self, length: usize) {
        let before = self.seen.len();
        self.seen.resize(length, 0);
        self.new_lengths.push(length);
        self.touch(length.min(before), length.max(before));
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if end > self.seen.len() {
            self.seen.resize(end, 0);
            self.new_lengths.push(end);
        }
        self.seen[offset..end].copy_from_slice(bytes);
        self.touch(offset, end);
    }

    fn has_space_for(&self, end: usize) -> bool {
        let used = self.seen.len().max(self.reserved).div_ceil(SECTOR);
        end.div_ceil(SECTOR) <= used
    }

    fn sync(&mut self) {
        for (sector, contents) in std::mem::take(&mut self.new_sectors) {
            self.sectors
                .extend(contents.last().map(|last| (sector, *last)));
        }
        self.length = self.new_lengths.pop().unwrap_or(self.length);
        self.new_lengths.clear();
        self.reserved_durably = self.reserved;
    }

    /// Lets any of the changes reach the disk, and forgets the others, though programs still see
    /// them.
    fn lose(&mut self, random: &mut Random) {
        for (sector, contents) in std::mem::take(&mut self.new_sectors) {
            let content = random.pick_or_none(&contents).copied();
            self.sectors
                .extend(content.map(|content| (sector, content)));
        }
        if let Some(length) = random.pick_or_none(&self.new_lengths) {
            self.length = *length;
        }
    }

    fn cut(&mut self, random: &mut Random) {
        self.lose(random);
        self.new_lengths.clear();
        self.seen = vec![0; self.length.div_ceil(SECTOR) * SECTOR];
        for (sector, content) in &self.sectors {
            let place = self.seen.get_mut(sector * SECTOR..(sector + 1) * SECTOR);
            if let Some(place) = place {
                place.copy_from_slice(content);
            }
        }
        self.seen.truncate(self.length);
        // Content behind the end never becomes visible again.
        let kept = self.length.div_ceil(SECTOR);
        self.sectors.retain(|sector, _| *sector < kept);
        if let Some(last) = self.sectors.get_mut(&(self.length / SECTOR)) {
            last[self.length % SECTOR..].fill(0);
        }
        if random.percent(50) {
            self.reserved = self.reserved_durably;
        }
        self.reserved_durably = self.reserved;
    }
}

impl Names {
    fn give(&mut self, new: NewName) {
        new.give(&mut self.seen);
        self.new.push(new);
    }

    fn sync(&mut self) {
        let Self { durable, new, .. } = self;
        new.drain(..).for_each(|new| new.give(durable));
    }

    /// Lets some of the first changes reach the disk; the others stay pending, since a file system
    /// that loses a change of its own stops working.
    fn lose(&mut self, random: &mut Random) {
        let Self { durable, new, .. } = self;
        let first = random.below(new.len() as u64 + 1) as usize;
        new.drain(..first).for_each(|new| new.give(durable));
    }

    fn cut(&mut self, random: &mut Random) {
        self.new.retain(|_| random.percent(50));
        self.sync();
        self.seen = self.durable.clone();
    }
}

fn off() -> io::Error {
    io::Error::other("the power is off")
}

impl State {
    /// Counts an operation. At the last one the power is cut, before or after it is done.
    fn begin(&mut self) -> io::Result<bool> {
        match self.left {
            0 => Err(off()),
            1 => {
                self.left = 0;
                if self.random.percent(50) {
                    Ok(false)
                } else {
                    Err(off())
                }
            }
            _ => {
                self.left -= 1;
                Ok(true)
            }
        }
    }

    fn find(&self, path: &Path) -> io::Result<usize> {
        let mut node = 0;
        for component in path.components() {
            if let Component::Normal(name) = component {
                let names = self.folder(node)?;
                node = *names.seen.get(name).ok_or(io::ErrorKind::NotFound)?;
            }
        }
        Ok(node)
    }

    fn folder(&self, node: usize) -> io::Result<&Names> {
        match self.nodes.get(node) {
            Some(Node::Folder(names)) => Ok(names),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn folder_mut(&mut self, path: &Path) -> io::Result<&mut Names> {
        let node = self.find(path)?;
        match self.nodes.get_mut(node) {
            Some(Node::Folder(names)) => Ok(names),
            _ => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    fn create(&mut self, path: &Path, node: Node) -> io::Result<usize> {
        let (folder, name) = split(path)?;
        let number = self.nodes.len();
        self.folder_mut(folder)?.give(NewName {
            given: Some((name.to_owned(), number)),
            taken: None,
        });
        self.nodes.push(node);
        Ok(number)
    }

    fn data(&mut self, node: usize) -> io::Result<&mut Data> {
        match self.nodes.get_mut(node) {
            Some(Node::File(data)) => Ok(data),
            _ => Err(io::ErrorKind::IsADirectory.into()),
        }
    }

    /// Returns whether a sync is effective.
    fn syncs(&mut self, what: &'static str) -> bool {
        self.syncs.insert(what);
        self.suppressed != Some(what)
    }
}

fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let parts = path.parent().zip(path.file_name());
    parts.ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

/// Returns the answer of an operation; an error if the power was cut: it may have been done.
fn answer<T>(on: bool, value: T) -> io::Result<T> {
    if on { Ok(value) } else { Err(off()) }
}

impl Simulated {
    /// Creates an empty file system in which the sync of that name is suppressed.
    pub fn new(seed: u64, suppressed: Option<&'static str>) -> Self {
        Self(Arc::new(Mutex::new(State {
            random: Random::new(seed),
            nodes: vec![Node::Folder(Names::default())],
            left: 0,
            faults: Faults::default(),
            suppressed,
            syncs: BTreeSet::new(),
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Switches the power on for this number of operations.
    pub fn power_on(&self, operations: u64, faults: Faults) {
        let mut state = self.state();
        state.left = operations;
        state.faults = faults;
    }

    pub fn is_on(&self) -> bool {
        self.state().left > 0
    }

    /// Cuts the power.
    pub fn cut(&self) {
        let mut state = self.state();
        let State { nodes, random, .. } = &mut *state;
        for node in nodes {
            match node {
                Node::File(data) => data.cut(random),
                Node::Folder(names) => names.cut(random),
            }
        }
    }

    /// Returns the names of the requested syncs.
    pub fn syncs(&self) -> BTreeSet<&'static str> {
        self.state().syncs.clone()
    }
}

impl Files for Simulated {
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        let mut state = self.state();
        let on = state.begin()?;
        let node = match state.find(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && access == Access::Create => {
                state.create(path, Node::File(Data::default()))?
            }
            found => found?,
        };
        let file = SimulatedFile {
            files: self.clone(),
            node,
        };
        answer(on, Box::new(file))
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let on = state.begin()?;
        match state.find(path) {
            Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        state.create(path, Node::Folder(Names::default()))?;
        answer(on, ())
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        let mut state = self.state();
        let on = state.begin()?;
        let names = state
            .folder(state.find(folder)?)?
            .seen
            .keys()
            .cloned()
            .collect();
        answer(on, names)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        let on = state.begin()?;
        let node = state.find(from)?;
        let (folder, old) = split(from)?;
        let (same, name) = split(to)?;
        assert_eq!(folder, same, "a rename within a folder");
        state.folder_mut(folder)?.give(NewName {
            given: Some((name.to_owned(), node)),
            taken: Some(old.to_owned()),
        });
        answer(on, ())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        let on = state.begin()?;
        state.find(path)?;
        let (folder, name) = split(path)?;
        state.folder_mut(folder)?.give(NewName {
            given: None,
            taken: Some(name.to_owned()),
        });
        answer(on, ())
    }

    fn sync_folder(&self, folder: &Path, what: &'static str) -> io::Result<()> {
        let mut state = self.state();
        let on = state.begin()?;
        let fails = state.faults.sync_fails;
        if !state.syncs(what) {
            return answer(on, ());
        }
        let mut random = state.random.fork();
        let names = state.folder_mut(folder)?;
        if random.percent(fails) {
            names.lose(&mut random);
            return Err(io::Error::other("simulated: the sync failed"));
        }
        names.sync();
        answer(on, ())
    }
}

#[derive(Debug)]
struct SimulatedFile {
    files: Simulated,
    node: usize,
}

impl OpenFile for SimulatedFile {
    fn length(&self) -> io::Result<u64> {
        let mut state = self.files.state();
        let on = state.begin()?;
        let length = state.data(self.node)?.seen.len() as u64;
        answer(on, length)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut state = self.files.state();
        let on = state.begin()?;
        let from = offset as usize;
        let seen = &state.data(self.node)?.seen;
        let bytes = seen.get(from..from + buffer.len());
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        answer(on, ())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.files.state();
        let on = state.begin()?;
        let faults = state.faults;
        let mut random = state.random.fork();
        let data = state.data(self.node)?;
        let fits = !faults.full || data.has_space_for(offset as usize + bytes.len());
        if !fits || random.percent(faults.write_fails) {
            let part = random.below(bytes.len() as u64 + 1) as usize;
            if fits {
                data.write(offset as usize, &bytes[..part]);
            }
            return Err(io::ErrorKind::StorageFull.into());
        }
        data.write(offset as usize, bytes);
        answer(on, ())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        let mut state = self.files.state();
        let on = state.begin()?;
        let data = state.data(self.node)?;
        data.resize(length as usize);
        data.reserved = 0;
        answer(on, ())
    }

    fn reserve(&self, length: u64) -> io::Result<()> {
        let mut state = self.files.state();
        let on = state.begin()?;
        let full = state.faults.full;
        let data = state.data(self.node)?;
        if full && !data.has_space_for(length as usize) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        data.reserved = data.reserved.max(length as usize);
        answer(on, ())
    }

    fn sync(&self, what: &'static str) -> io::Result<()> {
        let mut state = self.files.state();
        let on = state.begin()?;
        let fails = state.faults.sync_fails;
        if !state.syncs(what) {
            return answer(on, ());
        }
        let mut random = state.random.fork();
        let data = state.data(self.node)?;
        if random.percent(fails) {
            data.lose(&mut random);
            return Err(io::Error::other("simulated: the sync failed"));
        }
        data.sync();
        answer(on, ())
    }
}
