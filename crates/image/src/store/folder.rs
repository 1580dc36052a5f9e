//! A store in a folder of a file system: each object is a file, written atomically.

use super::{FORMAT, Key, Listing, Store, StoreError};
use longhaul_storage::files::{Access, Files, OpenFile, RealFiles, create_folder};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The prefix of a file that is still being written.
const NEW: &str = ".new-";

/// A store in a folder.
#[derive(Debug)]
pub struct FolderStore {
    files: Arc<dyn Files>,
    folder: PathBuf,
    /// Folders of stripes whose names may not be durable.
    unsettled: Mutex<BTreeSet<PathBuf>>,
}

impl FolderStore {
    /// Returns the store in a folder, which need not exist.
    pub fn new(folder: &Path) -> Self {
        Self::new_in(Arc::new(RealFiles), folder)
    }

    /// Returns the store in a folder of a given file system.
    pub fn new_in(files: Arc<dyn Files>, folder: &Path) -> Self {
        Self {
            files,
            folder: folder.to_owned(),
            unsettled: Mutex::default(),
        }
    }

    fn path(&self, key: &Key) -> (PathBuf, PathBuf) {
        let (folder, name) = key.place();
        let folder = self.folder.join(folder);
        let file = folder.join(name);
        (folder, file)
    }

    fn refused(&self, what: impl Into<String>) -> impl FnOnce(io::Error) -> StoreError {
        let (what, store) = (what.into(), self.place());
        move |error| StoreError::Refused {
            what,
            store,
            reason: error.to_string(),
        }
    }

    /// Returns which is missing, the object or the whole repository.
    fn missing(&self, key: &Key) -> StoreError {
        let store = self.place();
        let format = self.folder.join(FORMAT);
        match self.files.open(&format, Access::Read) {
            Err(error) if *key != Key::Format => StoreError::Away {
                reason: format!("{}: {error}; is it mounted?", format.display()),
                store,
            },
            Ok(_) | Err(_) => StoreError::Missing {
                what: key.words(),
                store,
            },
        }
    }

    fn open(&self, key: &Key) -> Result<Box<dyn OpenFile>, StoreError> {
        let (_, path) = self.path(key);
        match self.files.open(&path, Access::Read) {
            Ok(file) => Ok(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.missing(key)),
            Err(error) => Err(self.refused(format!("open {}", key.words()))(error)),
        }
    }

    /// Creates a file, and its folder where that is missing.
    fn create(&self, folder: &Path, path: &Path) -> io::Result<Box<dyn OpenFile>> {
        match self.files.open(path, Access::Create) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make(folder)?;
                self.files.open(path, Access::Create)
            }
            other => other,
        }
    }

    /// Creates a folder and its parents.
    fn make(&self, folder: &Path) -> io::Result<()> {
        let quicker = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
        let mut made = create_folder(&*self.files, folder);
        // Another process may create one of them at the same time: then it exists at the next
        // attempt.
        for _ in folder.components() {
            match &made {
                Err(error) if quicker(error) => made = create_folder(&*self.files, folder),
                Ok(()) | Err(_) => break,
            }
        }
        made
    }

    fn write(&self, folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| io::Error::other(error.to_string()))?;
        let new = folder.join(format!("{NEW}{:016x}", u64::from_le_bytes(random)));
        let file = self.create(folder, &new)?;
        let written = file
            .write_at(0, bytes)
            .and_then(|()| file.sync("the object"))
            .and_then(|()| self.files.rename(&new, path));
        if written.is_err() {
            // It disturbs nothing; `tidy` tries again.
            let _ = self.files.remove(&new);
        }
        written
    }

    fn names(&self, folder: &Path) -> Result<Vec<String>, StoreError> {
        let names = match self.files.names(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            names => names.map_err(self.refused("list what is there"))?,
        };
        // Foreign names are ignored.
        let names = names.into_iter();
        Ok(names.filter_map(|name| name.into_string().ok()).collect())
    }

    fn note_unsettled(&self, folder: PathBuf) {
        let mut unsettled = self
            .unsettled
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        unsettled.insert(folder);
    }
}

impl Store for FolderStore {
    fn place(&self) -> String {
        self.folder.display().to_string()
    }

    fn get(&self, key: &Key, length_max: u64) -> Result<Vec<u8>, StoreError> {
        let file = self.open(key)?;
        let read = || {
            let length = file.length()?;
            if length > length_max {
                return Ok(None);
            }
            let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
            file.read_at(0, &mut bytes)?;
            Ok(Some(bytes))
        };
        let read = read().map_err(self.refused(format!("read {}", key.words())))?;
        read.ok_or_else(|| StoreError::TooLong {
            what: key.words(),
            store: self.place(),
        })
    }

    fn has(&self, key: &Key) -> Result<bool, StoreError> {
        match self.open(key) {
            Ok(_) => {
                self.note_unsettled(self.path(key).0);
                Ok(true)
            }
            Err(StoreError::Missing { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn put(&self, key: &Key, bytes: &[u8]) -> Result<(), StoreError> {
        let (folder, path) = self.path(key);
        let put = || {
            self.write(&folder, &path, bytes)?;
            match key {
                Key::Stripe(_) => self.note_unsettled(folder.clone()),
                _ => self.files.sync_folder(&folder, "the object's name")?,
            }
            Ok(())
        };
        put().map_err(self.refused(format!("write {}", key.words())))
    }

    fn settle(&self) -> Result<(), StoreError> {
        let mut unsettled = self
            .unsettled
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for folder in &*unsettled {
            self.files
                .sync_folder(folder, "the stripes' names")
                .map_err(self.refused("make stripes durable"))?;
        }
        unsettled.clear();
        Ok(())
    }

    fn remove(&self, key: &Key) -> Result<(), StoreError> {
        let (folder, path) = self.path(key);
        let remove = || {
            match self.files.remove(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
            match key {
                // A removed image must not reappear without its stripes. It may have been removed
                // by a process that ended before this sync.
                Key::Image(_) => match self.files.sync_folder(&folder, "the image's absence") {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                    synced => synced,
                },
                _ => Ok(()),
            }
        };
        remove().map_err(self.refused(format!("remove {}", key.words())))
    }

    fn list(&self, listing: Listing) -> Result<Vec<String>, StoreError> {
        let mut names = self.names(&self.folder.join(listing.folder()))?;
        names.retain(|name| !name.starts_with('.'));
        Ok(names)
    }

    fn tidy(&self) -> Result<(), StoreError> {
        let stripes = (0..=u8::MAX).map(Listing::Stripes);
        // Markers excepted: a waiting import leaves one at this time.
        let others = [Listing::Images, Listing::Names].map(Listing::folder);
        let folders = stripes.map(Listing::folder).chain(others);
        for folder in folders.map(|folder| self.folder.join(folder)) {
            for name in self.names(&folder)? {
                if name.starts_with(NEW) {
                    // An import that was overruled may still end, and remove or rename it.
                    match self.files.remove(&folder.join(name)) {
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        removed => removed.map_err(self.refused("remove what an import left"))?,
                    }
                }
            }
        }
        Ok(())
    }
}
