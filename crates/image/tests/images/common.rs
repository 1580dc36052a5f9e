//! Disks to import, and a store that is sometimes unreachable.

use longhaul_image::store::{FolderStore, Key, Listing, Store, StoreError};
use longhaul_image::{Digest, ImageId, ImportOptions, Imported, Repository, STRIPE_BYTES, import};
use longhaul_storage::disk::{Disk, Extent, Zeros};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const STRIPE: usize = STRIPE_BYTES as usize;
/// Generous: no test waits this long on a working machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A disk of bytes in memory: each letter is a stripe filled with it, a space is a hole, a dot is
/// zeros that take space.
pub(crate) struct Letters(pub(crate) Vec<u8>);

impl std::fmt::Debug for Letters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Letters({})", String::from_utf8_lossy(&self.0))
    }
}

pub(crate) fn letters(text: &str) -> Letters {
    Letters(text.as_bytes().to_vec())
}

/// Returns the content of a letter's stripe, which differs in each of its blocks.
pub(crate) fn stripe(letter: u8) -> Vec<u8> {
    match letter {
        b' ' | b'.' => vec![0; STRIPE],
        letter => (0..STRIPE)
            .map(|place| letter.wrapping_add((place / 4096) as u8))
            .collect(),
    }
}

impl Disk for Letters {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64 * STRIPE_BYTES
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let letter = self.0[offset as usize / STRIPE];
        assert_ne!(letter, b' ', "a hole was read");
        if letter == b'!' {
            return Err(io::Error::other("unreadable sector"));
        }
        buffer.copy_from_slice(&stripe(letter)[..buffer.len()]);
        Ok(())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        unreachable!("an import does not write")
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn zero(&self, _range: Range<u64>, _zeros: Zeros) -> io::Result<()> {
        unreachable!("an import does not write")
    }

    fn discard(&self, _range: Range<u64>) -> io::Result<()> {
        unreachable!("an import does not write")
    }

    fn extents(&self, range: Range<u64>, _count_max: usize) -> io::Result<Vec<Extent>> {
        let hole = self.0[range.start as usize / STRIPE] == b' ';
        Ok(vec![Extent {
            length_bytes: STRIPE_BYTES - range.start % STRIPE_BYTES,
            hole,
        }])
    }
}

/// Imports a disk without a name.
pub(crate) fn imported(repository: &Repository, text: &str) -> Imported {
    let options = ImportOptions::default();
    import(repository, &letters(text), &options, &|_| {}).unwrap()
}

/// A repository in a folder, with a store that a test controls.
pub(crate) struct Told {
    pub(crate) store: Arc<Unsteady>,
    pub(crate) repository: Repository,
    pub(crate) folder: TempDir,
}

impl Told {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Unsteady {
            inner: FolderStore::new(&folder.path().join("repository")),
            mood: Mutex::default(),
            changed: Condvar::new(),
        });
        Self {
            repository: Repository::open_or_make(store.clone()).unwrap(),
            store,
            folder,
        }
    }

    pub(crate) fn import(&self, text: &str) -> ImageId {
        imported(&self.repository, text).id
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mood {
    pub(crate) away: bool,
    /// Whether reads of stripes block.
    pub(crate) held: bool,
    /// The stripes whose reads block.
    pub(crate) waiting: Vec<Digest>,
    /// The requested stripes, in order.
    pub(crate) asked: Vec<Digest>,
}

/// A store in a folder that is sometimes unreachable, and counts requests.
#[derive(Debug)]
pub(crate) struct Unsteady {
    inner: FolderStore,
    mood: Mutex<Mood>,
    changed: Condvar,
}

impl Unsteady {
    pub(crate) fn set(&self, change: impl FnOnce(&mut Mood)) {
        change(&mut self.mood.lock().unwrap());
        self.changed.notify_all();
    }

    pub(crate) fn get_mood<T>(&self, value: impl FnOnce(&Mood) -> T) -> T {
        value(&self.mood.lock().unwrap())
    }

    /// Waits until this number of reads block.
    pub(crate) fn wait_for_waiting(&self, count: usize) -> Vec<Digest> {
        wait_until(|| self.get_mood(|mood| mood.waiting.len() >= count));
        self.get_mood(|mood| mood.waiting.clone())
    }

    fn answers(&self) -> Result<(), StoreError> {
        match self.get_mood(|mood| mood.away) {
            true => Err(StoreError::Away {
                store: self.place(),
                reason: "it is told to be".to_owned(),
            }),
            false => Ok(()),
        }
    }
}

impl Store for Unsteady {
    fn place(&self) -> String {
        self.inner.place()
    }

    fn get(&self, key: &Key, length_max: u64) -> Result<Vec<u8>, StoreError> {
        self.answers()?;
        if let Key::Stripe(digest) = key {
            self.set(|mood| {
                mood.asked.push(*digest);
                mood.waiting.push(*digest);
            });
            let mut mood = self.mood.lock().unwrap();
            while mood.held {
                mood = self.changed.wait(mood).unwrap();
            }
            mood.waiting.retain(|waiting| waiting != digest);
        }
        self.inner.get(key, length_max)
    }

    fn has(&self, key: &Key) -> Result<bool, StoreError> {
        self.answers()?;
        self.inner.has(key)
    }

    fn put(&self, key: &Key, bytes: &[u8]) -> Result<(), StoreError> {
        self.answers()?;
        self.inner.put(key, bytes)
    }

    fn settle(&self) -> Result<(), StoreError> {
        self.inner.settle()
    }

    fn remove(&self, key: &Key) -> Result<(), StoreError> {
        self.answers()?;
        self.inner.remove(key)
    }

    fn list(&self, listing: Listing) -> Result<Vec<String>, StoreError> {
        self.answers()?;
        self.inner.list(listing)
    }

    fn tidy(&self) -> Result<(), StoreError> {
        self.inner.tidy()
    }
}

pub(crate) fn wait_until(holds: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited for too long");
        std::thread::sleep(Duration::from_millis(2));
    }
}
