//! A destination's folder in memory, where an import can be killed, and the room can end.

use crate::lives::dice::{Dice, Killed};
use crate::room::{Places, Room, Stamp};
use longhaul_storage::files::{Access, Files, OpenFile};
use nix::errno::Errno;
use std::collections::{BTreeMap, BTreeSet};
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
    /// How often it was written.
    written: i64,
}

/// Bytes that are written as a whole, or not at all.
const SECTOR_BYTES: usize = 64;

type Shared = Arc<Mutex<Content>>;

#[derive(Debug, Default)]
struct State {
    names: BTreeMap<PathBuf, Shared>,
    durable: BTreeMap<PathBuf, Shared>,
    folders: BTreeSet<PathBuf>,
    /// Operations until the import is killed, or an operation fails with this.
    event: Option<(u64, Option<Errno>)>,
    is_dead: bool,
    has_failed: bool,
    free_bytes: u64,
}

/// The folder.
#[derive(Debug, Clone)]
pub(crate) struct Memory(Arc<Mutex<State>>);

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
    pub(crate) fn new() -> Self {
        let state = State {
            free_bytes: 1 << 40,
            ..State::default()
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Plans that the import is killed at an operation, or that this fails.
    pub(crate) fn plan(&self, event: Option<(u64, Option<Errno>)>) {
        let mut state = locked(&self.0);
        (state.event, state.is_dead, state.has_failed) = (event, false, false);
    }

    /// Returns whether an operation has failed as it was planned.
    pub(crate) fn has_failed(&self) -> bool {
        locked(&self.0).has_failed
    }

    pub(crate) fn set_free(&self, bytes: u64) {
        locked(&self.0).free_bytes = bytes;
    }

    /// Returns all files.
    pub(crate) fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let state = locked(&self.0);
        let each = state.names.iter();
        each.map(|(path, content)| (path.clone(), locked(content).now.clone()))
            .collect()
    }

    /// Removes what was imported, as an operator does before another import.
    pub(crate) fn clear_named(&self) {
        let mut state = locked(&self.0);
        let is_part = |path: &PathBuf| path.to_string_lossy().contains("/.");
        state.names.retain(|path, _| is_part(path));
        state.durable = state.names.clone();
    }

    pub(crate) fn power_cut(&self, dice: &mut Dice) {
        let mut state = locked(&self.0);
        if dice.once_in(2) {
            state.names = state.durable.clone();
        }
        for content in state.names.values() {
            let mut content = locked(content);
            let Content { now, durable, .. } = &mut *content;
            if dice.once_in(2) {
                now.resize(durable.len(), 0);
            }
            // Of each sector either the old content or the new one is there.
            for (sector, new) in now.chunks_mut(SECTOR_BYTES).enumerate() {
                if dice.once_in(2) {
                    continue;
                }
                let from = sector * SECTOR_BYTES;
                let old = durable.get(from..).unwrap_or_default();
                let old = old.iter().chain(std::iter::repeat(&0));
                new.iter_mut().zip(old).for_each(|(new, old)| *new = *old);
            }
            *durable = now.clone();
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
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>> {
        if access == Access::Create {
            self.operate()?;
        }
        let mut state = locked(&self.0);
        let content = match (state.names.get(path), access) {
            (Some(content), _) => content.clone(),
            (None, Access::Create) => state.names.entry(path.to_path_buf()).or_default().clone(),
            (None, _) => return Err(Errno::ENOENT.into()),
        };
        Ok(Box::new(Open {
            memory: self.clone(),
            content,
        }))
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        // Names of files are what counts.
        match locked(&self.0).folders.insert(path.to_path_buf()) {
            true => Ok(()),
            false => Err(Errno::EEXIST.into()),
        }
    }

    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>> {
        let state = locked(&self.0);
        let inside = state
            .names
            .keys()
            .filter(|path| path.parent() == Some(folder));
        Ok(inside
            .filter_map(|path| path.file_name())
            .map(OsString::from)
            .collect())
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

    fn stamp(&self, path: &Path) -> io::Result<Stamp> {
        let state = locked(&self.0);
        let shared = state.names.get(path).ok_or(Errno::ENOENT)?;
        let content = locked(shared);
        Ok(Stamp {
            file: (1, Arc::as_ptr(shared) as u64),
            written: (content.written, 0),
            bytes: content.now.len() as u64,
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
        let operated = self.memory.operate();
        // A write that fails may have written a part.
        let bytes = match &operated {
            Ok(()) => bytes,
            Err(_) => bytes.get(..bytes.len() / 2).unwrap_or_default(),
        };
        let mut content = locked(&self.content);
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        let length = content.now.len().max(to);
        content.now.resize(length, 0);
        content.now[from..to].copy_from_slice(bytes);
        content.written += 1;
        operated
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.memory.operate()?;
        let mut content = locked(&self.content);
        content.written += i64::from(content.now.len() as u64 != length);
        content.now.resize(length as usize, 0);
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
