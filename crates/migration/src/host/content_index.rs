//! The content index of this host's files, for arriving guests. A thread of its own keeps the index
//! up to date, in a small share of the time.

use crate::host::base_images;
use crate::host::set_aside::set_aside_as;
use crate::host::start_error::StartError;
use longhaul_codec::{Digest, DigestKey, Hasher};
use longhaul_hypervisor::config::HostConfig;
use longhaul_image::Bases;
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::units::parse_bytes;
use longhaul_storage::content::{ContentIndex, Step, Writes};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The index's folder, in the state folder.
const FOLDER: &str = "content";
/// Limit on the share of the time for reading files, in percent.
const SHARE_PERCENT: u32 = 10;
/// Interval between checks for new or changed files.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Interval after which a file that is always being written is read again.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(3600);
/// Default amount of indexed content, in bytes. Its index takes about 330 MB of disk.
const CAPACITY_DEFAULT: u64 = 64 << 30;
const CAPACITY_MIN: u64 = 1 << 20;
const CAPACITY_MAX: u64 = 1 << 50;

/// The files that are indexed for arriving guests.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContentConfig {
    /// Files, and folders with files.
    #[serde(default)]
    files: Vec<PathBuf>,
    /// Whether images in the configuration are indexed too: the disks of guests that run here.
    #[serde(default)]
    disks: bool,
    /// Limit on the amount of indexed content.
    capacity: Option<String>,
}

impl ContentConfig {
    /// Returns an error if a value is invalid.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(path) = self.files.iter().find(|path| !path.is_absolute()) {
            return Err(format!(
                "`content.files` has {path:?}: the path must be absolute (begin with `/`)"
            ));
        }
        self.capacity_bytes().map(drop)
    }

    fn capacity_bytes(&self) -> Result<u64, String> {
        let Some(text) = &self.capacity else {
            return Ok(CAPACITY_DEFAULT);
        };
        let bytes = parse_bytes(text).map_err(|error| format!("`content.capacity`: {error}"))?;
        match (CAPACITY_MIN..=CAPACITY_MAX).contains(&bytes) {
            true => Ok(bytes),
            false => Err(format!(
                "`content.capacity = {text:?}`: from 1MiB to 1024TiB can be remembered"
            )),
        }
    }
}

/// The content index of this host.
pub struct Held {
    index: ContentIndex,
    hasher: Hasher,
    sources: Sources,
    stop: AtomicBool,
}

/// The files that are indexed.
struct Sources {
    /// Files that seldom change, and folders of such files.
    paths: Vec<PathBuf>,
    /// The disks of guests that run here.
    disks: Vec<PathBuf>,
    bases: Bases,
}

impl Sources {
    fn new(content: &ContentConfig, state: &Path, host: &HostConfig) -> Self {
        let images = host.images.values();
        let left = images.clone().map(|image| set_aside_as(&image.path));
        let disks = images.filter(|_| content.disks);
        Self {
            paths: content.files.iter().cloned().chain(left).collect(),
            disks: disks.map(|image| image.path.clone()).collect(),
            bases: base_images::of_host(state),
        }
    }

    /// Returns the files that exist now.
    fn files(&self) -> Vec<(PathBuf, Writes)> {
        let seldom = self.paths.iter().flat_map(|path| files_of(path));
        let seldom = seldom.chain(self.bases.all_whole());
        let always = self.disks.iter().flat_map(|path| files_of(path));
        // A guest's disk counts as a disk even if another path names it.
        let mut files: Vec<_> = always.map(|path| (path, Writes::Always)).collect();
        for path in seldom {
            if !files.iter().any(|(known, _)| *known == path) {
                files.push((path, Writes::Seldom));
            }
        }
        files
    }
}

impl Held {
    /// Opens the index and starts its thread. Returns none if it is not configured.
    pub(crate) fn start(
        content: Option<&ContentConfig>,
        state: &Path,
        host: &HostConfig,
    ) -> Result<Option<Arc<Self>>, StartError> {
        let Some(content) = content else {
            return Ok(None);
        };
        let bytes = content.capacity_bytes().map_err(StartError::new)?;
        let index = ContentIndex::open(&state.join(FOLDER), bytes / BLOCK_SIZE as u64);
        let index = index.map_err(|error| {
            StartError::new(error.to_string()).hint(
                "remove the folder: it is a cache; or remove [content] from the configuration",
            )
        })?;
        let held = Arc::new(Self {
            hasher: Hasher::new(index.key()),
            index,
            sources: Sources::new(content, state, host),
            stop: AtomicBool::new(false),
        });
        held.forget_others();
        let builder = held.clone();
        let thread = thread::Builder::new().name("content".to_owned());
        let started = thread.spawn(move || builder.keep_up());
        started.map_err(|error| StartError::new(format!("cannot index content: {error}")))?;
        Ok(Some(held))
    }

    /// Returns the key of the index's digests.
    pub(crate) fn key(&self) -> DigestKey {
        self.index.key()
    }

    /// Returns whether the index has any content.
    pub(crate) fn has_content(&self) -> bool {
        self.index.files().iter().any(|(_, indexed)| *indexed > 0)
    }

    /// Returns whether a block has this digest.
    pub(crate) fn is(&self, block: &[u8; BLOCK_SIZE], digest: &Digest) -> bool {
        self.hasher.digest(block) == *digest
    }

    /// Reads a block with this digest from any indexed file. Returns false if none has it.
    pub(crate) fn read(&self, digest: &Digest, into: &mut [u8; BLOCK_SIZE]) -> bool {
        self.index.read(digest, into).is_some()
    }

    /// Stops the thread that reads files.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Removes files from the index that are no longer configured.
    fn forget_others(&self) {
        let wanted = self.sources.files();
        let known = self.index.files().into_iter().map(|(path, _)| path);
        for path in known.filter(|known| !wanted.iter().any(|(path, _)| path == known)) {
            if let Err(error) = self.index.forget(&path) {
                tracing::warn!(path = %path.display(), %error, "it may still be looked into");
            }
        }
    }

    fn keep_up(&self) {
        let mut readings = Readings::default();
        while !self.stop.load(Ordering::Relaxed) {
            for (path, writes) in self.sources.files() {
                let old = readings.is_old(&path, Instant::now());
                if old && let Err(error) = self.index.read_again(&path) {
                    tracing::debug!(%error, "not read again");
                }
                if !self.index.is_current(&path, writes) {
                    self.add(&path, writes);
                }
                if writes == Writes::Always && (old || !readings.0.contains_key(&path)) {
                    readings.0.insert(path, Instant::now());
                }
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn add(&self, path: &Path, writes: Writes) {
        let indexed = self.index.index(path, writes);
        let done = indexed.and_then(|indexing| indexing.run(SHARE_PERCENT, &self.stop));
        match done {
            Ok(Step::Done) => tracing::info!(path = %path.display(), "its content is known"),
            Ok(Step::More) => {}
            Err(error) => tracing::debug!(%error, "not indexed"),
        }
    }
}

/// The time of the last reading of each file that is always being written.
#[derive(Debug, Default)]
struct Readings(HashMap<PathBuf, Instant>);

impl Readings {
    /// Returns whether the last reading of a file is old enough to read it again.
    fn is_old(&self, path: &Path, now: Instant) -> bool {
        let at = self.0.get(path);
        at.is_some_and(|at| now.saturating_duration_since(*at) >= READ_AGAIN_AFTER)
    }
}

/// Returns a file, or the files in a folder.
fn files_of(path: &Path) -> Vec<PathBuf> {
    let is_file = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.is_file());
    match fs::read_dir(path) {
        Ok(entries) => {
            let paths = entries.flatten().map(|entry| entry.path());
            let mut files: Vec<PathBuf> = paths.filter(is_file).collect();
            files.sort();
            files
        }
        Err(_) => Some(path.to_owned()).filter(is_file).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_image::ImageId;
    use std::os::unix::fs::PermissionsExt;
    use std::time::UNIX_EPOCH;

    #[test]
    fn folders_are_looked_into_and_links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("b"), "b").unwrap();
        fs::write(path("a"), "a").unwrap();
        fs::create_dir(path("c")).unwrap();
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        assert_eq!(files_of(folder.path()), [path("a"), path("b")]);
        assert_eq!(files_of(&path("a")), [path("a")]);
        assert!(files_of(&path("link")).is_empty() && files_of(&path("none")).is_empty());
    }

    #[test]
    fn files_disks_and_whole_base_images_are_looked_into() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let bases = Bases::new(path("bases"));
        fs::create_dir(path("bases")).unwrap();
        let id = |name: &[u8]| ImageId(longhaul_image::Digest::of(name));
        for name in ["vda.raw", "copy", "bases/other"] {
            fs::write(path(name), name).unwrap();
        }
        let whole = bases.path(id(b"whole"));
        for base in [&whole, &bases.path(id(b"coming"))] {
            fs::write(base, "base").unwrap();
        }
        let sources = Sources {
            paths: vec![path("copy"), path("vda.raw"), path("vda.raw.moved")],
            disks: vec![path("vda.raw"), path("vdb.raw")],
            bases,
        };
        let disk = (path("vda.raw"), Writes::Always);
        let copy = (path("copy"), Writes::Seldom);
        assert_eq!(sources.files(), [disk.clone(), copy.clone()]);
        // The mode of a complete base image.
        let mut mode = fs::metadata(&whole).unwrap().permissions();
        mode.set_mode(0o444);
        let file = fs::File::open(&whole).unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1))
            .unwrap();
        fs::set_permissions(&whole, mode).unwrap();
        assert_eq!(sources.files(), [disk, copy, (whole, Writes::Seldom)]);
    }

    #[test]
    fn what_is_no_longer_named_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let index = ContentIndex::open(&path("index"), 1024).unwrap();
        let stop = AtomicBool::new(false);
        for name in ["kept", "other"] {
            fs::write(path(name), vec![name.len() as u8; 2 * BLOCK_SIZE]).unwrap();
            let indexing = index.index(&path(name), Writes::Seldom).unwrap();
            assert_eq!(indexing.run(100, &stop).unwrap(), Step::Done);
        }
        let held = Held {
            hasher: Hasher::new(index.key()),
            index,
            sources: Sources {
                paths: vec![path("kept")],
                disks: Vec::new(),
                bases: Bases::new(path("bases")),
            },
            stop,
        };
        let known = || held.index.files().into_iter().map(|(path, _)| path);
        assert_eq!(known().count(), 2);
        held.forget_others();
        assert_eq!(known().collect::<Vec<_>>(), [path("kept")]);
    }

    #[test]
    fn a_file_that_is_written_all_the_time_is_read_again_after_a_while() {
        let (path, began) = (Path::new("/a"), Instant::now());
        let readings = Readings(HashMap::from([(path.to_owned(), began)]));
        let is_old = |path, seconds| readings.is_old(path, began + Duration::from_secs(seconds));
        assert!(!is_old(path, 3599) && is_old(path, 3600));
        assert!(!is_old(Path::new("/b"), 3600), "it has not been read yet");
    }

    #[test]
    fn sizes_and_paths_are_checked() {
        let config = |files: &str, capacity: Option<&str>| ContentConfig {
            files: vec![files.into()],
            disks: false,
            capacity: capacity.map(str::to_owned),
        };
        assert!(config("/srv", None).check().is_ok());
        assert!(config("/srv", Some("1TiB")).check().is_ok());
        for wrong in [
            config("srv", None),
            config("/srv", Some("many")),
            config("/srv", Some("1KiB")),
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
    }
}
