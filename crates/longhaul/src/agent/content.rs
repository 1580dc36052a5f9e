//! What the files of this host hold, for guests that come here: the content index, which a thread of its own
//! keeps up to date for a small share of the time.

use crate::agent::config::Config;
use crate::agent::migration::set_aside_as;
use crate::agent::state::StartError;
use longhaul_codec::{Digest, DigestKey, Hasher};
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::units::parse_bytes;
use longhaul_storage::content::{ContentIndex, Step};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// The index's folder in the state folder.
const FOLDER: &str = "content";
/// The share of the time that reading files may take.
const SHARE_PERCENT: u32 = 10;
/// How often it is looked whether files have come or changed.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Content that is remembered where nothing is said: some 330 MB of disk.
const CAPACITY_DEFAULT: u64 = 64 << 30;
const CAPACITY_MIN: u64 = 1 << 20;
const CAPACITY_MAX: u64 = 1 << 50;

/// Which files guests that come here may find their blocks in.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ContentConfig {
    /// Files, and folders of files.
    files: Vec<PathBuf>,
    /// How much content is remembered.
    capacity: Option<String>,
}

impl ContentConfig {
    /// What is wrong with it.
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
pub(crate) struct Held {
    index: ContentIndex,
    hasher: Hasher,
    /// Files, and folders of files.
    paths: Vec<PathBuf>,
    stop: AtomicBool,
}

impl Held {
    /// Opens the index, where the configuration wants one, and begins to build it.
    pub(crate) fn start(config: &Config) -> Result<Option<Arc<Self>>, StartError> {
        let Some(content) = &config.content else {
            return Ok(None);
        };
        let bytes = content.capacity_bytes().map_err(StartError::new)?;
        let index = ContentIndex::open(&config.state.join(FOLDER), bytes / BLOCK_SIZE as u64);
        let index = index.map_err(|error| {
            StartError::new(error.to_string()).hint(
                "remove the folder: it is a cache; or remove [content] from the configuration",
            )
        })?;
        let images = config.hypervisor.images.values();
        let left = images.map(|image| set_aside_as(&image.path));
        let held = Arc::new(Self {
            hasher: Hasher::new(index.key()),
            index,
            paths: content.files.iter().cloned().chain(left).collect(),
            stop: AtomicBool::new(false),
        });
        let builder = held.clone();
        let thread = thread::Builder::new().name("content".to_owned());
        let started = thread.spawn(move || builder.keep_up());
        started.map_err(|error| StartError::new(format!("cannot index content: {error}")))?;
        Ok(Some(held))
    }

    /// The key of its digests.
    pub(crate) fn key(&self) -> DigestKey {
        self.index.key()
    }

    /// Whether it knows of any content.
    pub(crate) fn has_content(&self) -> bool {
        self.index.files().iter().any(|(_, indexed)| *indexed > 0)
    }

    /// Whether a block has this digest.
    pub(crate) fn is(&self, block: &[u8; BLOCK_SIZE], digest: &Digest) -> bool {
        self.hasher.digest(block) == *digest
    }

    /// Reads a block with this digest from whatever file has it; false where none is known to.
    pub(crate) fn read(&self, digest: &Digest, into: &mut [u8; BLOCK_SIZE]) -> bool {
        self.index.read(digest, into).is_some()
    }

    /// The agent stops: so does reading files.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn keep_up(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            for path in self.paths.iter().flat_map(|path| files_of(path)) {
                if !self.index.is_current(&path) {
                    self.add(&path);
                }
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn add(&self, path: &Path) {
        let indexed = self.index.index(path);
        let done = indexed.and_then(|indexing| indexing.run(SHARE_PERCENT, &self.stop));
        match done {
            Ok(Step::Done) => tracing::info!(path = %path.display(), "its content is known"),
            Ok(Step::More) => {}
            Err(error) => tracing::debug!(%error, "not indexed"),
        }
    }
}

/// A file, or the files of a folder.
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
    fn sizes_and_paths_are_checked() {
        let config = |files: &str, capacity: Option<&str>| ContentConfig {
            files: vec![files.into()],
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
