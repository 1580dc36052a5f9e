//! A destination's folder in memory, where an import can be killed, and the room can end.

use crate::lives::dice::{Dice, Killed};
use crate::room::{Places, Room};
use longhaul_storage::files::{Access, Files, OpenFile};
use nix::errno::Errno;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// A file: what it is now, and after a power cut.
#[derive(Debug, Default)]
struct Content {
    now: Vec<u8>,
    durable: Vec<u8>,
}

type Shared = Arc<Mutex<Content>>;

#[derive(Debug, Default)]
struct State {
    names: BTreeMap<PathBuf, Shared>,
    durable: BTreeMap<PathBuf, Shared>,
    /// Operations until the import is killed, or an operation fails with this.
    event: Option<(u64, Option<Errno>)>,
    is_dead: bool,
    has_failed: bool,
    free_bytes: u64,
}

/// The folder.
#[derive(Debug, Clone)]
pub(super) struct Memory(Arc<Mutex<State>>);

#[derive(Debug)]
struct Open {
    memory: Memory,
    content: Shared,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Memory {
    pub(super) fn new() -> Self {
        let state = State {
            free_bytes: 1 << 40,
            ..State::default()
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Plans that the import is killed at an operation, or that this fails.
    pub(super) fn plan(&self, event: Option<(u64, Option<Errno>)>) {
        let mut state = locked(&self.0);
        (state.event, state.is_dead, state.has_failed) = (event, false, false);
    }

    /// Returns whether an operation has failed as it was planned.
    pub(super) fn has_failed(&self) -> bool {
        locked(&self.0).has_failed
    }

    pub(super) fn set_free(&self, bytes: u64) {
        locked(&self.0).free_bytes = bytes;
    }

    /// Returns all files.
    pub(super) fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let state = locked(&self.0);
        let each = state.names.iter();
        each.map(|(path, content)| (path.clone(), locked(content).now.clone()))
            .collect()
    }

    /// Removes what was imported, as an operator does before another import.
    pub(super) fn clear_named(&self) {
        let mut state = locked(&self.0);
        let is_part = |path: &PathBuf| path.to_string_lossy().contains("/.");
        state.names.retain(|path, _| is_part(path));
        state.durable = state.names.clone();
    }

    pub(super) fn power_cut(&self, dice: &mut Dice) {
        let mut state = locked(&self.0);
        if dice.once_in(2) {
            state.names = state.durable.clone();
        }
        for content in state.names.values() {
            let mut content = locked(content);
            if content.now != content.durable {
                let length = content.now.len();
                let kept = dice.below(length as u64 + 1) as usize;
                content.now.truncate(kept);
                content.now.resize(length, 0);
            }
        }
    }

    fn operate(&self) -> io::Result<()> {
        let mut state = locked(&self.0);
        let event = match (state.event, state.is_dead) {
            (Some((0, event)), _) => event,
            (Some((left, event)), _) => {
                state.event = Some((left - 1, event));
                return Ok(());
            }
            (None, true) => None,
            (None, false) => return Ok(()),
        };
        state.event = None;
        match event {
            Some(errno) => {
                state.has_failed = true;
                Err(errno.into())
            }
            None => {
                state.is_dead = true;
                drop(state);
                resume_unwind(Box::new(Killed));
            }
        }
    }
}

impl Files for Memory {
    fn open(&self, _path: &Path, _access: Access) -> io::Result<Box<dyn OpenFile>> {
        Err(Errno::ENOSYS.into())
    }

    fn create_folder(&self, _path: &Path) -> io::Result<()> {
        Err(Errno::ENOSYS.into())
    }

    fn names(&self, _folder: &Path) -> io::Result<Vec<OsString>> {
        Err(Errno::ENOSYS.into())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate()?;
        let mut state = locked(&self.0);
        let content = state.names.remove(from).ok_or(Errno::ENOENT)?;
        state.names.insert(to.to_path_buf(), content);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        let mut state = locked(&self.0);
        state.names.remove(path).ok_or(Errno::ENOENT)?;
        Ok(())
    }

    fn sync_folder(&self, _folder: &Path, _what: &'static str) -> io::Result<()> {
        self.operate()?;
        let mut state = locked(&self.0);
        state.durable = state.names.clone();
        Ok(())
    }
}

impl Places for Memory {
    fn create(&self, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        self.operate()?;
        let mut state = locked(&self.0);
        let content = state.names.entry(path.to_path_buf()).or_default().clone();
        locked(&content).now.clear();
        Ok(Box::new(Open {
            memory: self.clone(),
            content,
        }))
    }

    fn room(&self, _folder: &Path) -> io::Result<Room> {
        Ok(Room {
            device: 1,
            free_bytes: locked(&self.0).free_bytes,
        })
    }
}

impl OpenFile for Open {
    fn length(&self) -> io::Result<u64> {
        Ok(locked(&self.content).now.len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let content = locked(&self.content);
        let from = offset as usize;
        let part = content.now.get(from..from + buffer.len());
        let part = part.ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(part);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.memory.operate()?;
        let mut content = locked(&self.content);
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        let length = content.now.len().max(to);
        content.now.resize(length, 0);
        content.now[from..to].copy_from_slice(bytes);
        Ok(())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.memory.operate()?;
        locked(&self.content).now.resize(length as usize, 0);
        Ok(())
    }

    fn reserve(&self, _length: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self, _what: &'static str) -> io::Result<()> {
        self.memory.operate()?;
        let mut content = locked(&self.content);
        content.durable = content.now.clone();
        Ok(())
    }
}
