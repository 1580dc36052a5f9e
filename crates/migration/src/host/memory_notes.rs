//! What a later agent must know of guests whose memory follows when they run at the destination.
//!
//! ```text
//! STATE/following/GUEST.arriving   at the destination: its page server, and what was missing when
//!                                  QEMU loaded the guest
//! STATE/following/GUEST.left       at the source: its stopped QEMU, or its memory file, holds what
//!                                  is missing there
//! ```
//!
//! A note survives the agent, and need not survive the host: neither does the guest. Notes are not
//! synced: the destination writes its note while the guest is stopped. The note of a complete
//! memory file is: it outlives the host.

use crate::host::atomic_file;
use longhaul_engine::remaining::Remaining;
use longhaul_hypervisor::helper::Helper;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::{MigrationId, RegionSpec};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Limit on the size of a note, in bytes: of a guest of 1 TiB, each of whose chunks lacks others.
const BYTES_MAX: u64 = 512 << 20;

/// A region of a guest's memory, and its blocks that were missing when QEMU loaded the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ArrivingRegion {
    pub(crate) spec: RegionSpec,
    pub(crate) missing: Vec<Remaining>,
}

impl ArrivingRegion {
    /// Returns how many blocks were missing.
    pub(crate) fn blocks(&self) -> u64 {
        let blocks = |part: &Remaining| u64::from(part.chunks) * u64::from(part.mask.count_ones());
        self.missing.iter().map(blocks).sum()
    }
}

/// The memory of a guest at its destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ArrivingNote {
    pub(crate) migration: MigrationId,
    pub(crate) digest_key: [u8; 32],
    pub(crate) pulled: Pulled,
    /// QEMU's stream up to and including its list of RAM blocks.
    pub(crate) prelude: Vec<u8>,
    pub(crate) regions: Vec<ArrivingRegion>,
    /// Whether all of it is here.
    pub(crate) whole: bool,
    /// The page server. It says what is missing, as long as it runs.
    #[serde(default)]
    pub(crate) server: Option<Helper>,
}

/// The memory file of a guest that has left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FileNote {
    /// The blocks that it has when it is complete, for each region: all that were missing at the
    /// destination when QEMU loaded the guest.
    pub(crate) blocks: Vec<Vec<Remaining>>,
    /// Set when all of them are on disk.
    pub(crate) complete: Option<Complete>,
}

/// A complete memory file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Complete {
    /// Size of its content that is not zero, in bytes.
    pub(crate) bytes: u64,
    /// Time since the handover, in milliseconds, unless the agent was restarted meanwhile.
    pub(crate) after_ms: Option<u64>,
}

/// The memory of a guest that has left, in its stopped QEMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LeftNote {
    pub(crate) migration: MigrationId,
    pub(crate) digest_key: [u8; 32],
    pub(crate) regions: Vec<RegionSpec>,
    /// Its memory file, if one is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file: Option<FileNote>,
}

/// A kind of note.
pub(crate) trait MemoryNote: Serialize + DeserializeOwned {
    /// The end of the files' names.
    const ENDING: &'static str;

    /// Returns the migration that it belongs to.
    fn migration(&self) -> MigrationId;

    /// Writes it. An earlier one of the guest is replaced.
    fn write(&self, state: &Path, guest: &str) -> io::Result<()> {
        let path = path::<Self>(state, guest);
        create_folder(state)?;
        let new = path.with_extension("new");
        let written = || {
            let mut options = OpenOptions::new();
            let options = options.create(true).write(true).truncate(true).mode(0o600);
            options.open(&new)?.write_all(&serde_json::to_vec(self)?)?;
            fs::rename(&new, &path)
        };
        written().map_err(|error| named(&path, &error))
    }

    /// Writes it so that it outlives the host. An earlier one of the guest is replaced.
    fn write_durably(&self, state: &Path, guest: &str) -> io::Result<()> {
        let path = path::<Self>(state, guest);
        create_folder(state)?;
        let written = || {
            File::open(state)?.sync_all()?;
            atomic_file::write(&path, &serde_json::to_vec(self)?)
        };
        written().map_err(|error| named(&path, &error))
    }

    /// Reads a guest's note of this migration, if there is one.
    fn read(state: &Path, guest: &str, migration: MigrationId) -> io::Result<Option<Self>> {
        let path = path::<Self>(state, guest);
        let read = || -> io::Result<Self> {
            let mut bytes = Vec::new();
            File::open(&path)?.take(BYTES_MAX).read_to_end(&mut bytes)?;
            Ok(serde_json::from_slice(&bytes)?)
        };
        match read() {
            Ok(note) => Ok(Some(note).filter(|note| note.migration() == migration)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(named(&path, &error)),
        }
    }

    /// Removes a guest's note. Does nothing if there is none.
    fn forget(state: &Path, guest: &str) -> io::Result<()> {
        let path = path::<Self>(state, guest);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(named(&path, &error)),
            _ => Ok(()),
        }
    }
}

impl MemoryNote for ArrivingNote {
    const ENDING: &'static str = "arriving";

    fn migration(&self) -> MigrationId {
        self.migration
    }
}

impl MemoryNote for LeftNote {
    const ENDING: &'static str = "left";

    fn migration(&self) -> MigrationId {
        self.migration
    }
}

const FOLDER: &str = "following";

/// Returns the folder of the notes.
pub(crate) fn folder(state: &Path) -> PathBuf {
    state.join(FOLDER)
}

/// Creates the folder of the notes.
pub(crate) fn create_folder(state: &Path) -> io::Result<()> {
    let folder = folder(state);
    let mut builder = DirBuilder::new();
    let built = builder.recursive(true).mode(0o700).create(&folder);
    built.map_err(|error| named(&folder, &error))
}

fn path<N: MemoryNote>(state: &Path, guest: &str) -> PathBuf {
    folder(state).join(format!("{guest}.{}", N::ENDING))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_protocol::RegionId;

    #[test]
    fn a_note_is_of_its_migration_and_of_its_side() {
        let state = tempfile::tempdir().unwrap();
        let state = state.path();
        let id = |byte| MigrationId([byte; 8]);
        let spec = RegionSpec {
            id: RegionId(0),
            name: "pc.ram".to_owned(),
            blocks: 64,
            durable: false,
            starts_zero: true,
        };
        let note = LeftNote {
            migration: id(1),
            digest_key: [7; 32],
            regions: vec![spec],
            file: None,
        };
        assert_eq!(LeftNote::read(state, "web-7", id(1)).unwrap(), None);
        note.write(state, "web-7").unwrap();
        assert_eq!(LeftNote::read(state, "web-7", id(1)).unwrap(), Some(note));
        assert_eq!(LeftNote::read(state, "web-7", id(2)).unwrap(), None);
        assert_eq!(ArrivingNote::read(state, "web-7", id(1)).unwrap(), None);
        fs::write(path::<LeftNote>(state, "web-7"), "{").unwrap();
        let error = LeftNote::read(state, "web-7", id(1)).unwrap_err();
        assert!(error.to_string().contains("web-7.left"), "{error}");
        LeftNote::forget(state, "web-7").unwrap();
        LeftNote::forget(state, "web-7").unwrap();
        assert_eq!(LeftNote::read(state, "web-7", id(1)).unwrap(), None);
    }
}
