//! The memory cache: the RAM of guests that left, in files, for their return. Each guest has one
//! sparse file with its RAM blocks one after the other.
//!
//! Nothing depends on these files, and their content is not trusted: every reader compares digests.
//! So they have no header, are not made durable, and may be torn, changed or removed at any time.

use crate::host::start_error::StartError;
use longhaul_protocol::units::{parse_bytes, parse_duration, show_bytes};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use longhaul_storage::files::{RealFiles, create_folder};
use nix::sys::statvfs::statvfs;
use serde::Deserialize;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// The default folder, in the state folder.
const FOLDER: &str = "memory";
/// The end of a file's name, after its guest's name.
const SUFFIX: &str = ".memory";
const LIMIT_DEFAULT: u64 = 16 << 30;
const LIMIT_MIN: u64 = 1 << 20;
const AGE_DEFAULT: Duration = Duration::from_secs(7 * 24 * 3600);
const AGE_MIN: Duration = Duration::from_secs(60);
/// Number of blocks that are read, written and synced at once.
const PIECE_BLOCKS: u64 = 1024;
/// Limit on the pause between two pieces. A pause is as long as the piece took.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The part of the file system that stays free: one in this number.
const FREE_ONE_IN: u64 = 20;

/// The configuration of the memory cache.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeptMemoryConfig {
    folder: Option<PathBuf>,
    /// Limit on the size of all files together.
    limit: Option<String>,
    max_age: Option<String>,
}

impl KeptMemoryConfig {
    /// Returns an error if a value is invalid.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(folder) = self.folder.as_ref().filter(|folder| !folder.is_absolute()) {
            return Err(format!(
                "`kept_memory.folder = {folder:?}`: the path must be absolute (begin with `/`)"
            ));
        }
        self.limit_bytes().and(self.age().map(drop))
    }

    fn limit_bytes(&self) -> Result<u64, String> {
        let Some(text) = &self.limit else {
            return Ok(LIMIT_DEFAULT);
        };
        let bytes = parse_bytes(text).map_err(|error| format!("`kept_memory.limit`: {error}"))?;
        match bytes >= LIMIT_MIN {
            true => Ok(bytes),
            false => Err(format!(
                "`kept_memory.limit = {text:?}`: 1MiB at least; without [kept_memory] nothing is \
                 kept"
            )),
        }
    }

    fn age(&self) -> Result<Duration, String> {
        let Some(text) = &self.max_age else {
            return Ok(AGE_DEFAULT);
        };
        let age =
            parse_duration(text).map_err(|error| format!("`kept_memory.max_age`: {error}"))?;
        match age >= AGE_MIN {
            true => Ok(age),
            false => Err(format!(
                "`kept_memory.max_age = {text:?}`: 1min at least; without [kept_memory] nothing \
                 is kept"
            )),
        }
    }
}

/// The memory cache.
#[derive(Debug)]
pub(crate) struct KeptMemory {
    folder: PathBuf,
    limit_bytes: u64,
    max_age: Duration,
}

/// The part of a guest's memory that was written to its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Written {
    /// The number of bytes in blocks that are not zero.
    pub(crate) bytes: u64,
    /// Whether all memory was written.
    pub(crate) whole: bool,
}

/// A guest's memory that can be read.
pub(crate) trait Memory {
    /// Returns the lengths of the regions, in blocks.
    fn regions(&self) -> Vec<u64>;
    /// Reads blocks of a region. An error ends the writing, and the file keeps what was written.
    fn read(&self, region: usize, range: BlockRange, into: &mut [u8]) -> Result<(), String>;
    /// Waits while other tasks need this host. Returns false if the writing has to end now.
    fn may_go_on(&self) -> bool;
}

/// The file of a guest.
struct Found {
    guest: String,
    path: PathBuf,
    bytes: u64,
    written: SystemTime,
}

impl KeptMemory {
    /// Opens the cache in the configured folder. Returns none if it is not configured.
    pub(crate) fn open(
        wanted: Option<&KeptMemoryConfig>,
        state: &Path,
    ) -> Result<Option<Arc<Self>>, StartError> {
        let Some(wanted) = wanted else {
            let left = Self {
                folder: state.join(FOLDER),
                limit_bytes: 0,
                max_age: Duration::ZERO,
            };
            // Removes files from a time when it was configured.
            left.sweep(&|_| true);
            return Ok(None);
        };
        let folder = wanted.folder.clone();
        let kept = Self {
            folder: folder.unwrap_or_else(|| state.join(FOLDER)),
            limit_bytes: wanted.limit_bytes().map_err(StartError::new)?,
            max_age: wanted.age().map_err(StartError::new)?,
        };
        create_folder(&RealFiles, &kept.folder).map_err(|error| {
            let folder = kept.folder.display();
            StartError::new(format!("cannot use the folder {folder}: {error}"))
                .hint("name another folder under [kept_memory], or remove that table")
        })?;
        Ok(Some(Arc::new(kept)))
    }

    /// Opens the file of a guest whose memory has this number of blocks.
    pub(crate) fn look(&self, guest: &str, blocks: u64) -> Option<File> {
        let file = open_plain(&self.path(guest))?;
        let bytes = blocks.checked_mul(BLOCK_SIZE as u64);
        let fits = |found: fs::Metadata| Some(found.len()) == bytes;
        file.metadata().is_ok_and(fits).then_some(file)
    }

    /// Removes files that are too old, files of guests that are here, and files beyond the limit.
    pub(crate) fn sweep(&self, is_here: &dyn Fn(&str) -> bool) {
        let done = self.files().and_then(|files| {
            for file in &files {
                let is_old = file.written.elapsed().is_ok_and(|age| age > self.max_age);
                if is_old || is_here(&file.guest) {
                    remove(&file.path)?;
                }
            }
            self.make_room(None).map(drop)
        });
        if let Err(error) = done {
            let folder = self.folder.display();
            tracing::warn!(%error, %folder, "what is kept of guests' memory cannot be looked \
                through");
        }
    }

    /// Replaces the file of a guest with the content of its memory. Removes the file if there is no
    /// room.
    pub(crate) fn write(&self, guest: &str, memory: &dyn Memory) -> io::Result<Written> {
        let path = self.path(guest);
        remove(&path)?;
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600);
        let written = self.fill(&file.open(&path)?, guest, memory);
        if written.is_err() {
            remove(&path)?;
        }
        written
    }

    fn fill(&self, file: &File, guest: &str, memory: &dyn Memory) -> io::Result<Written> {
        let regions = memory.regions();
        let blocks = regions
            .iter()
            .fold(0, |sum: u64, it| sum.saturating_add(*it));
        file.set_len(blocks.saturating_mul(BLOCK_SIZE as u64))?;
        let mut buffer = vec![0; PIECE_BLOCKS as usize * BLOCK_SIZE];
        let mut written = Written {
            bytes: 0,
            whole: false,
        };
        let mut first = 0;
        for (region, blocks) in regions.iter().enumerate() {
            for start in (0..*blocks).step_by(PIECE_BLOCKS as usize) {
                if !memory.may_go_on() {
                    return Ok(written);
                }
                let began = Instant::now();
                let range = BlockRange::new(start, PIECE_BLOCKS.min(blocks - start));
                let piece = &mut buffer[..range.count as usize * BLOCK_SIZE];
                if let Err(error) = memory.read(region, range, piece) {
                    tracing::info!(guest, error, "no more of its memory can be kept");
                    return Ok(written);
                }
                let bytes = write_content(file, first + start, piece)?;
                if bytes > 0 {
                    file.sync_data()?;
                    written.bytes += bytes;
                    if !self.make_room(Some(guest))? {
                        return Ok(written);
                    }
                }
                thread::sleep(began.elapsed().min(PAUSE_MAX));
            }
            first += blocks;
        }
        written.whole = true;
        Ok(written)
    }

    /// Removes the oldest files of other guests until the limit is met. Returns false if the file
    /// of this guest alone exceeds it. Fails if the file system has too little free space.
    fn make_room(&self, guest: Option<&str>) -> io::Result<bool> {
        let mut files = self.files()?;
        files.sort_by_key(|file| std::cmp::Reverse(file.written));
        let mut bytes = files.iter().map(|file| file.bytes).sum::<u64>();
        while bytes > self.limit_bytes {
            let Some(n) = files
                .iter()
                .rposition(|it| guest != Some(it.guest.as_str()))
            else {
                return Ok(false);
            };
            let oldest = files.remove(n);
            tracing::info!(
                guest = oldest.guest,
                "what was kept of its memory makes room"
            );
            remove(&oldest.path)?;
            bytes -= oldest.bytes;
        }
        if guest.is_some() {
            require_room(&self.folder)?;
        }
        Ok(true)
    }

    fn files(&self) -> io::Result<Vec<Found>> {
        let entries = match fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            let guest = name.to_str().and_then(|name| name.strip_suffix(SUFFIX));
            let Some(guest) = guest else { continue };
            let found = match entry.metadata() {
                // It has been removed since.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            if found.is_file() {
                files.push(Found {
                    guest: guest.to_owned(),
                    path: entry.path(),
                    bytes: found.blocks() * 512,
                    written: found.modified()?,
                });
            }
        }
        Ok(files)
    }

    /// Returns the file of a guest. Guest names are validated before and fit a file name.
    fn path(&self, guest: &str) -> PathBuf {
        self.folder.join(format!("{guest}{SUFFIX}"))
    }
}

/// Returns an error if the file system of this folder has too little free space for guests' memory.
pub(crate) fn require_room(folder: &Path) -> io::Result<()> {
    let room = statvfs(folder)?;
    if room.blocks_available() >= room.blocks() / FREE_ONE_IN {
        return Ok(());
    }
    let free = room.blocks_available() * room.fragment_size();
    let text = format!(
        "{} has {} left, and a twentieth of it stays free",
        folder.display(),
        show_bytes(free)
    );
    Err(io::Error::new(io::ErrorKind::StorageFull, text))
}

/// Returns how much of guests' memory fits the file system of this folder, in bytes.
pub(crate) fn room_bytes(folder: &Path) -> io::Result<u64> {
    let room = statvfs(folder)?;
    let stays_free = room.blocks() / FREE_ONE_IN;
    let blocks = room.blocks_available().saturating_sub(stays_free);
    Ok(blocks.saturating_mul(room.fragment_size()))
}

/// Writes the blocks that are not zero, starting at a block of the file. Returns the bytes written.
pub(crate) fn write_content(file: &File, block: u64, content: &[u8]) -> io::Result<u64> {
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    let (mut from, mut written) = (0, 0);
    let blocks: Vec<(bool, &[u8])> = content
        .chunks(BLOCK_SIZE)
        .map(|block| (is_zero(block), block))
        .collect();
    for run in blocks.chunk_by(|(one, _), (next, _)| one == next) {
        let end = from + run.len() * BLOCK_SIZE;
        if run.iter().any(|(is_zero, _)| !is_zero) {
            file.write_all_at(&content[from..end], block * BLOCK_SIZE as u64 + from as u64)?;
            written += (end - from) as u64;
        }
        from = end;
    }
    Ok(written)
}

/// Opens a regular file for reading. Does not follow a link, and does not block on a pipe.
pub(crate) fn open_plain(path: &Path) -> Option<File> {
    let mut options = OpenOptions::new();
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = options.read(true).custom_flags(flags).open(path).ok()?;
    let is_file = file.metadata().is_ok_and(|about| about.is_file());
    is_file.then_some(file)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::os::unix::fs::PermissionsExt;

    const MIB: u64 = 1 << 20;

    fn kept(folder: &Path, limit_bytes: u64) -> KeptMemory {
        KeptMemory {
            folder: folder.to_owned(),
            limit_bytes,
            max_age: AGE_DEFAULT,
        }
    }

    /// Memory with regions of these lengths, in which every third block has content. Reading fails
    /// after a number of pieces.
    struct Guest {
        regions: Vec<u64>,
        pieces: Cell<u64>,
        ends: Result<u64, u64>,
    }

    impl Guest {
        fn new(regions: &[u64]) -> Self {
            Self {
                regions: regions.to_vec(),
                pieces: Cell::new(0),
                ends: Ok(u64::MAX),
            }
        }

        fn content(region: usize, block: u64) -> u8 {
            match block % 3 {
                0 => 1 + region as u8,
                _ => 0,
            }
        }
    }

    impl Memory for Guest {
        fn regions(&self) -> Vec<u64> {
            self.regions.clone()
        }

        fn read(&self, region: usize, range: BlockRange, into: &mut [u8]) -> Result<(), String> {
            self.pieces.set(self.pieces.get() + 1);
            for (block, into) in range.blocks().zip(into.chunks_mut(BLOCK_SIZE)) {
                into.fill(Self::content(region, block));
            }
            match self.ends {
                Err(last) if self.pieces.get() > last => Err("it has ended".to_owned()),
                _ => Ok(()),
            }
        }

        fn may_go_on(&self) -> bool {
            self.ends.is_err() || self.ends.is_ok_and(|last| self.pieces.get() < last)
        }
    }

    #[test]
    fn regions_follow_one_another_and_zeros_are_holes() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path(), 64 * MIB);
        let written = kept.write("web", &Guest::new(&[3000, 5])).unwrap();
        let blocks = 1000 + 2;
        assert_eq!(written.bytes, blocks * BLOCK_SIZE as u64);
        assert!(written.whole);
        let file = kept.look("web", 3005).unwrap();
        let found = file.metadata().unwrap();
        assert_eq!(found.permissions().mode() & 0o777, 0o600);
        assert!(found.blocks() * 512 < 2 * written.bytes, "zeros take room");
        let mut content = [0; BLOCK_SIZE];
        for (block, expected) in [(0, 1), (1, 0), (2997, 1), (3000, 2), (3001, 0), (3003, 2)] {
            file.read_exact_at(&mut content, block * BLOCK_SIZE as u64)
                .unwrap();
            assert_eq!(content, [expected; BLOCK_SIZE], "block {block}");
        }
        assert!(kept.look("web", 3004).is_none(), "of another machine");
        assert!(kept.look("mail", 3005).is_none());
        // The guest left again with less memory.
        kept.write("web", &Guest::new(&[5])).unwrap();
        assert!(kept.look("web", 5).is_some());
    }

    #[test]
    fn what_was_written_stays_when_there_is_no_more_time_or_no_guest() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path(), 64 * MIB);
        for ends in [Ok(2), Err(2)] {
            let guest = Guest {
                ends,
                ..Guest::new(&[3 * PIECE_BLOCKS])
            };
            let written = kept.write("web", &guest).unwrap();
            assert!(!written.whole && written.bytes > 0, "{ends:?}");
            let file = kept.look("web", 3 * PIECE_BLOCKS).unwrap();
            let mut content = [0; BLOCK_SIZE];
            let last = 2 * PIECE_BLOCKS - 2;
            file.read_exact_at(&mut content, last * BLOCK_SIZE as u64)
                .unwrap();
            assert_eq!(content[0], Guest::content(0, last));
        }
    }

    #[test]
    fn the_oldest_make_room_and_one_guest_gets_no_more_than_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        // Each file has a third of 9 MiB.
        let third = Guest::new(&[9 * MIB / BLOCK_SIZE as u64]);
        let small = kept(folder.path(), 7 * MIB);
        for (age, guest) in [(200, "first"), (100, "second"), (0, "third")] {
            third.pieces.set(0);
            assert!(small.write(guest, &third).unwrap().whole);
            let file = File::options().write(true).open(small.path(guest)).unwrap();
            let at = SystemTime::now() - Duration::from_secs(age);
            file.set_modified(at).unwrap();
        }
        let there = |kept: &KeptMemory| {
            let mut guests: Vec<String> = kept
                .files()
                .unwrap()
                .into_iter()
                .map(|it| it.guest)
                .collect();
            guests.sort();
            guests
        };
        assert_eq!(there(&small), ["second", "third"]);
        let large = Guest::new(&[60 * MIB / BLOCK_SIZE as u64]);
        let written = small.write("large", &large).unwrap();
        assert!(!written.whole);
        assert_eq!(there(&small), ["large"]);
        assert!(small.files().unwrap()[0].bytes < 9 * MIB);
    }

    #[test]
    fn what_is_old_and_what_is_here_again_goes_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path(), 64 * MIB);
        let guest = Guest::new(&[3]);
        for name in ["web", "mail", "old"] {
            kept.write(name, &guest).unwrap();
        }
        let old = File::options().write(true).open(kept.path("old")).unwrap();
        let at = SystemTime::now() - AGE_DEFAULT - Duration::from_secs(60);
        old.set_modified(at).unwrap();
        fs::write(folder.path().join("web.txt"), "somebody's").unwrap();
        fs::create_dir(folder.path().join("a.memory")).unwrap();
        kept.sweep(&|guest| guest == "web");
        let mut names: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["a.memory", "mail.memory", "web.txt"]);
    }

    #[test]
    fn only_plain_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let kept = kept(folder.path(), 64 * MIB);
        let other = folder.path().join("other");
        fs::write(&other, vec![7; BLOCK_SIZE]).unwrap();
        std::os::unix::fs::symlink(&other, kept.path("web")).unwrap();
        assert!(kept.look("web", 1).is_none());
        // Writing does not follow the link either.
        kept.write("web", &Guest::new(&[1])).unwrap();
        assert_eq!(fs::read(&other).unwrap(), vec![7; BLOCK_SIZE]);
        // A missing folder is reported and has no other effect.
        let gone = KeptMemory {
            folder: folder.path().join("gone"),
            ..kept
        };
        assert!(gone.write("web", &Guest::new(&[1])).is_err());
        gone.sweep(&|_| true);
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let config = |text: &str| toml::from_str::<KeptMemoryConfig>(text).unwrap();
        for right in [
            "",
            "folder = \"/srv/kept\"\nlimit = \"1TiB\"\nmax_age = \"24h\"",
        ] {
            config(right).check().unwrap();
        }
        for (wrong, named) in [
            ("folder = \"kept\"", "kept_memory.folder"),
            ("limit = \"much\"", "kept_memory.limit"),
            ("limit = \"0\"", "without [kept_memory]"),
            ("max_age = \"0s\"", "without [kept_memory]"),
            ("max_age = \"7\"", "kept_memory.max_age"),
        ] {
            let error = config(wrong).check().unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
