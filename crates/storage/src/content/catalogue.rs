//! The catalogue of files in the content index, with the metadata that shows whether a file has
//! changed.

use crate::files::{Access, Files, RealFiles, read_whole, replace};
use longhaul_codec::DigestKey;
use serde::{Deserialize, Serialize};
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The name of the catalogue's file.
pub(super) const NAME: &str = "catalogue";
/// The first bytes of the file, including the format's version.
const MAGIC: &[u8; 8] = b"LHFILES\x01";
/// Bytes of the checksum that follows.
const CHECKSUM_BYTES: usize = 32;
/// Longest file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Most files.
pub const FILES_MAX: usize = 4096;
/// Longest name of a file.
pub(super) const PATH_BYTES_MAX: usize = 4096;
/// The last generation of a slot, which is not used again after it.
const GENERATION_LAST: u16 = u16::MAX;

/// A file's identity and the time of its last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
    pub(super) size_bytes: u64,
    modified_s: i64,
    modified_ns: i64,
    changed_s: i64,
    changed_ns: i64,
}

impl Identity {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size_bytes: metadata.len(),
            modified_s: metadata.mtime(),
            modified_ns: metadata.mtime_nsec(),
            changed_s: metadata.ctime(),
            changed_ns: metadata.ctime_nsec(),
        }
    }

    pub(super) fn of_path(path: &Path) -> io::Result<Self> {
        Ok(Self::of(&fs::metadata(path)?))
    }

    /// Returns whether both identities are the same file, regardless of writes in between.
    fn is_same_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// How a file is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Writes {
    /// Rarely: once it has changed, all of its entries are invalid.
    #[default]
    Seldom,
    /// Constantly: most of its entries are assumed to be valid still.
    Always,
}

/// A file that is or was indexed; its place in the catalogue is its slot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
    /// The current generation: entries of other generations of this slot are invalid.
    pub(super) generation: u16,
    /// The length of the indexed part.
    pub(super) indexed_bytes: u64,
    live: bool,
    #[serde(default)]
    writes: Writes,
}

impl Known {
    /// Returns whether a file with this identity is still the known one.
    pub(super) fn is_still(&self, now: &Identity) -> bool {
        match self.writes {
            Writes::Seldom => self.identity == *now,
            Writes::Always => self.identity.is_same_file(now),
        }
    }

    /// Returns whether the file was entered with this kind of writes.
    pub(super) fn has_writes(&self, writes: Writes) -> bool {
        self.writes == writes
    }

    pub(super) fn is_live(&self) -> bool {
        self.live
    }
}

/// A reason why a catalogue is unusable.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueFault {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is not a catalogue, or of another version.
    #[error("it does not begin as a catalogue does")]
    Magic,
    /// It is truncated or damaged.
    #[error("its checksum is wrong")]
    Checksum,
    /// Its content is invalid.
    #[error("what it says cannot be: {0}")]
    Content(String),
}

/// The indexed files, and the parameters of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Catalogue {
    /// Pages of the table.
    pub(super) pages: u64,
    key: [u8; 32],
    pub(super) files: Vec<Known>,
}

impl Catalogue {
    /// Creates a catalogue without files and with a new key.
    pub(super) fn new(pages: u64) -> io::Result<Self> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| io::Error::other(error.to_string()))?;
        Ok(Self {
            pages,
            key,
            files: Vec::new(),
        })
    }

    pub(super) fn key(&self) -> DigestKey {
        DigestKey(self.key)
    }

    /// Parses the output of [`Catalogue::bytes`].
    pub fn parse(bytes: &[u8]) -> Result<Self, CatalogueFault> {
        let rest = bytes.strip_prefix(MAGIC).ok_or(CatalogueFault::Magic)?;
        let (checksum, content) = rest
            .split_first_chunk::<CHECKSUM_BYTES>()
            .ok_or(CatalogueFault::Checksum)?;
        if blake3::hash(content) != *checksum {
            return Err(CatalogueFault::Checksum);
        }
        let wrong = |what: &str| CatalogueFault::Content(what.to_owned());
        let catalogue: Self = serde_json::from_slice(content)
            .map_err(|error| CatalogueFault::Content(error.to_string()))?;
        if catalogue.files.len() > FILES_MAX {
            return Err(wrong("too many files"));
        }
        let fits = |known: &Known| {
            known.generation > 0
                && known.path.is_absolute()
                && known.path.as_os_str().len() <= PATH_BYTES_MAX
        };
        if catalogue.pages == 0 || !catalogue.files.iter().all(fits) {
            return Err(wrong("a size, a name or a generation"));
        }
        Ok(catalogue)
    }

    /// Returns its stored form.
    pub fn bytes(&self) -> Result<Vec<u8>, CatalogueFault> {
        let content =
            serde_json::to_vec(self).map_err(|error| CatalogueFault::Content(error.to_string()))?;
        let checksum = blake3::hash(&content);
        Ok([MAGIC, &checksum.as_bytes()[..], &content].concat())
    }

    pub(super) fn read(path: &Path) -> Result<Self, CatalogueFault> {
        let file = RealFiles.open(path, Access::Read)?;
        let bytes = read_whole(&*file, FILE_BYTES_MAX)?;
        Self::parse(&bytes.ok_or(CatalogueFault::Checksum)?)
    }

    /// Replaces the file, durably.
    pub(super) fn write(&self, folder: &Path) -> io::Result<()> {
        let bytes = self.bytes().map_err(io::Error::other)?;
        let what = ["the catalogue", "the catalogue's name"];
        replace(&RealFiles, &folder.join(NAME), &bytes, what)
    }

    pub(super) fn slot(&self, slot: u16) -> Option<&Known> {
        self.files.get(usize::from(slot))
    }

    pub(super) fn slot_mut(&mut self, slot: u16) -> Option<&mut Known> {
        self.files.get_mut(usize::from(slot))
    }

    pub(super) fn is_live(&self, slot: u16, generation: u16) -> bool {
        let known = self.slot(slot);
        known.is_some_and(|known| known.live && known.generation == generation)
    }

    /// Returns the generation of each slot with an existing file; 0, which no entry has, for the
    /// others.
    pub(super) fn live(&self) -> Vec<u16> {
        let live = |known: &Known| if known.live { known.generation } else { 0 };
        self.files.iter().map(live).collect()
    }

    /// Invalidates the entries of these files.
    pub(super) fn retire(&mut self, which: impl Fn(&Known) -> bool) {
        for known in &mut self.files {
            if known.live && which(known) {
                known.live = false;
                known.indexed_bytes = 0;
            }
        }
    }

    /// Returns the slot of a file, in a new generation if the file is not the same as before.
    /// Returns `None` when no slot is free.
    pub(super) fn enter(&mut self, path: &Path, identity: Identity, writes: Writes) -> Option<u16> {
        let same = |known: &Known| {
            let is_it = known.live && known.path == path && known.has_writes(writes);
            is_it && known.is_still(&identity)
        };
        if let Some(slot) = self.files.iter().position(same) {
            self.files[slot].identity = identity;
            return u16::try_from(slot).ok();
        }
        self.retire(|known| known.path == path);
        let known = |generation| Known {
            path: path.to_owned(),
            identity,
            generation,
            indexed_bytes: 0,
            live: true,
            writes,
        };
        let free = |known: &Known| !known.live && known.generation < GENERATION_LAST;
        let slot = match self.files.iter().position(free) {
            Some(slot) => {
                self.files[slot] = known(self.files[slot].generation + 1);
                slot
            }
            None if self.files.len() < FILES_MAX => {
                self.files.push(known(1));
                self.files.len() - 1
            }
            None => return None,
        };
        u16::try_from(slot).ok()
    }
}
