//! The content index on disk: the blocks that this host's files hold, found by digest.
//!
//! The index is a cache and may be wrong: a block that it finds is read and hashed before it is
//! returned. It consists of two files, a [`Catalogue`] of files and a [`Table`] of blocks; parts
//! that are truncated, of another version or about changed files are discarded.
//! docs/content-index.md describes the format.

mod catalogue;
mod indexing;
mod table;

pub use catalogue::{Catalogue, CatalogueFault, FILES_MAX, Writes};
pub use indexing::{Indexing, Step};
pub use table::{PAGE_BYTES, PAGE_ENTRIES, Page, PageEntry};

use crate::files::{RealFiles, create_folder};
use catalogue::{Identity, Known};
use longhaul_codec::{Digest, DigestKey, Hasher};
use longhaul_protocol::BLOCK_SIZE;
use nix::fcntl::{Flock, FlockArg};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use table::Table;

/// Bytes in a block.
pub(crate) const BLOCK_BYTES: u64 = BLOCK_SIZE as u64;
/// Files that are kept open.
const OPEN_MAX: usize = 64;

/// A reason why the index is unusable.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// The system refused.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Another process uses it.
    #[error("the content index in {} is in use by another process", .0.display())]
    InUse(PathBuf),
    /// The catalogue is full.
    #[error("the content index knows {FILES_MAX} files: forget some of them first")]
    Full,
    /// The file's name cannot be stored.
    #[error("{} cannot be indexed: {reason}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: &'static str,
    },
}

pub(crate) fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ContentError {
    let path = path.to_owned();
    move |source| ContentError::Io { what, path, source }
}

/// A block that was found and verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// The file that holds it.
    pub path: PathBuf,
    /// Its offset in the file.
    pub offset: u64,
}

/// The index.
#[derive(Debug)]
pub struct ContentIndex {
    folder: PathBuf,
    table: Table,
    hasher: Hasher,
    key: DigestKey,
    state: Mutex<State>,
    _lock: Flock<File>,
}

#[derive(Debug)]
struct State {
    catalogue: Catalogue,
    /// Open files by slot.
    open: HashMap<u16, Arc<File>>,
}

impl ContentIndex {
    /// Opens the index in a folder, for this number of blocks, or creates a new one if the folder's
    /// index is unusable. It takes about 20 bytes of disk per block, and never holds more blocks
    /// than that.
    pub fn open(folder: &Path, blocks: u64) -> Result<Self, ContentError> {
        create_folder(&RealFiles, folder).map_err(failed("make", folder))?;
        let lock = lock(folder)?;
        let pages = Table::pages_for(blocks);
        let catalogue = Catalogue::read(&folder.join(catalogue::NAME));
        let path = folder.join(table::NAME);
        let catalogue = match catalogue {
            Ok(mut catalogue) if catalogue.pages == pages && path.exists() => {
                // The content of a file that has changed is unknown.
                catalogue.retire(has_changed);
                catalogue
            }
            // Damaged, of another version or size, or missing: the index is recreated, with a key
            // that no earlier digest was made with.
            Ok(_) | Err(_) => {
                match std::fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(failed("remove", &path)(error));
                    }
                    Ok(()) | Err(_) => {}
                }
                Catalogue::new(pages).map_err(failed("begin", folder))?
            }
        };
        catalogue.write(folder).map_err(failed("write", folder))?;
        let table = Table::open(&path, pages).map_err(failed("open", &path))?;
        let key = catalogue.key();
        let state = State {
            catalogue,
            open: HashMap::new(),
        };
        Ok(Self {
            folder: folder.to_owned(),
            table,
            hasher: Hasher::new(key),
            key,
            state: Mutex::new(state),
            _lock: lock,
        })
    }

    /// Returns the key of its digests, with which callers hash the blocks that they look up.
    pub fn key(&self) -> DigestKey {
        self.key
    }

    /// Returns the known files, and the length of each one's indexed part.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        let state = self.state();
        let files = state.catalogue.files.iter().filter(|known| known.is_live());
        files
            .map(|known| (known.path.clone(), known.indexed_bytes))
            .collect()
    }

    /// Returns whether a whole file is in the index: in its current state or, if it is written
    /// constantly, in its state at the time of reading.
    pub fn is_current(&self, path: &Path, writes: Writes) -> bool {
        let Ok(identity) = Identity::of_path(path) else {
            return false;
        };
        let state = self.state();
        let mut files = state.catalogue.files.iter();
        files.any(|known| {
            let is_it = known.is_live() && known.path == path && known.has_writes(writes);
            is_it && known.is_still(&identity) && known.indexed_bytes >= known.identity.size_bytes
        })
    }

    /// Reads a block with this content from any file that has it, and verifies the buffer against
    /// the digest. Returns `None` where no file is known to have it.
    pub fn read(&self, digest: &Digest, block: &mut [u8; BLOCK_SIZE]) -> Option<Found> {
        let page = self.table.read(digest).ok()?;
        for entry in page.entries().filter(|entry| entry.may_be(digest)) {
            let Some((path, file)) = self.file(entry.slot, entry.generation) else {
                continue;
            };
            let offset = entry.block * BLOCK_BYTES;
            let read = file.read_exact_at(block, offset);
            if read.is_ok() && self.hasher.digest(block) == *digest {
                return Some(Found { path, offset });
            }
            self.doubt(entry.slot, entry.generation);
        }
        None
    }

    /// Schedules a file to be read again from its beginning; its entries stay valid until then.
    pub fn read_again(&self, path: &Path) -> Result<(), ContentError> {
        let mut state = self.state();
        let files = state.catalogue.files.iter_mut();
        for known in files.filter(|known| known.path == path) {
            known.indexed_bytes = 0;
        }
        self.write(&mut state)
    }

    /// Forgets a file: none of its blocks is found any more.
    pub fn forget(&self, path: &Path) -> Result<(), ContentError> {
        let mut state = self.state();
        state.catalogue.retire(|known| known.path == path);
        self.write(&mut state)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, state: &mut State) -> Result<(), ContentError> {
        let State { catalogue, open } = state;
        open.retain(|slot, _| catalogue.slot(*slot).is_some_and(|known| known.is_live()));
        catalogue
            .write(&self.folder)
            .map_err(failed("write", &self.folder))
    }

    /// Returns the open file of a slot in that generation.
    fn file(&self, slot: u16, generation: u16) -> Option<(PathBuf, Arc<File>)> {
        let mut state = self.state();
        if !state.catalogue.is_live(slot, generation) {
            return None;
        }
        let path = state.catalogue.slot(slot)?.path.clone();
        if let Some(file) = state.open.get(&slot) {
            return Some((path, file.clone()));
        }
        let file = Arc::new(File::open(&path).ok()?);
        if state.open.len() >= OPEN_MAX {
            state.open.clear();
        }
        state.open.insert(slot, file.clone());
        Some((path, file))
    }

    /// Checks after a mismatch whether the file is still the one that was indexed.
    fn doubt(&self, slot: u16, generation: u16) {
        let mut state = self.state();
        let Some(known) = state.catalogue.slot(slot) else {
            return;
        };
        let path = known.path.clone();
        if known.generation == generation && has_changed(known) {
            state.catalogue.retire(|known| known.path == path);
            // If this cannot be recorded now, it is detected again when the index is opened.
            let _ = self.write(&mut state);
        }
    }
}

/// Returns whether a file differs from the known one.
fn has_changed(known: &Known) -> bool {
    !Identity::of_path(&known.path).is_ok_and(|now| known.is_still(&now))
}

fn lock(folder: &Path) -> Result<Flock<File>, ContentError> {
    let path = folder.join("lock");
    let mut options = OpenOptions::new();
    let file = options.create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(failed("open", &path))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(ContentError::InUse(folder.to_owned())),
        Err((_, error)) => Err(failed("lock", &path)(error.into())),
    }
}
