//! Replicas: what a destination keeps of a guest's disks, version by version.
//!
//! The images have the newest version. An earlier one is restored with *undo logs*, each of which
//! has what one version replaced. Records of the next version are collected beside the images, and
//! applied when all of them are durable: whenever the host stops, the images have a whole version,
//! or get it when the replica is opened again.

mod apply;
mod document;
mod error;
pub(crate) mod patch;
mod records;
mod restore;
mod retention;
#[cfg(test)]
mod tests;

pub use document::{ReplicaDisk, ReplicaId, ReplicaSpec, ReplicaVersion, ReplicaVersionDisk};
pub use error::ReplicaError;
pub use retention::Retention;

use crate::lock::{FolderLock, lock_folder};
use crate::record::{CHUNK_BYTES, Chunk, Guest, Packer, Record, Version, is_zero};
use crate::room::{Places, used_bytes};
use crate::tree::Tree;
use document::{CHUNKS_MAX, Document};
use error::io_at;
use longhaul_storage::files::{Access, OpenFile, RealFiles};
use patch::{KIND_PATCH, Patch};
use records::Collected;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a chunk's digest.
const DIGEST_BYTES: u64 = 32;
/// In the place of a digest that is not known. A chunk that nothing was noted of has it too: the
/// file of digests is sparse there.
const UNKNOWN: [u8; 32] = [0; 32];
/// Digests that are read or written at once.
const DIGESTS_AT_ONCE: usize = 4096;

/// A replica.
#[derive(Debug)]
pub struct Replica {
    files: Arc<dyn Places>,
    folder: PathBuf,
    document: Document,
    /// The disks, while records arrive.
    open: Vec<OpenDisk>,
    /// The files that they were when they were opened.
    opened: Vec<(u64, u64)>,
    /// What arrives, if there is a version already.
    collected: Option<Collected>,
    /// Encodes chunks that were patched.
    packer: Packer,
    /// Whether it is not known which document is durable.
    is_in_doubt: bool,
    /// Keeps other processes away.
    lock: Option<FolderLock>,
}

/// A disk while records arrive.
#[derive(Debug)]
struct OpenDisk {
    image: Box<dyn OpenFile>,
    /// The digests of the chunks that the image has.
    digests: Box<dyn OpenFile>,
    /// Bytes of the version that arrives.
    bytes: u64,
}

fn chunks_of(bytes: u64) -> u64 {
    bytes.div_ceil(CHUNK_BYTES as u64)
}

/// Returns the last chunk of a disk that grows, if it becomes longer: its digest changes then.
fn grown_chunk(from: u64, to: u64) -> Option<u64> {
    let is_grown = to > from && !from.is_multiple_of(CHUNK_BYTES as u64);
    is_grown.then_some(from / CHUNK_BYTES as u64)
}

/// Returns the length of a chunk.
fn length_of(chunk: u64, bytes: u64) -> usize {
    let from = chunk * CHUNK_BYTES as u64;
    bytes.saturating_sub(from).min(CHUNK_BYTES as u64) as usize
}

impl Replica {
    /// Makes a replica. `folder` is its own, and its parent exists. Images that exist are compared
    /// with what arrives.
    ///
    /// # Errors
    /// When there is one, or the folder cannot be written.
    pub fn make(folder: &Path, spec: ReplicaSpec) -> Result<Self, ReplicaError> {
        let mut replica = Self::make_in(Arc::new(RealFiles), folder, spec)?;
        replica.lock = Some(Self::locked(folder, &replica.document.spec.guest)?);
        Ok(replica)
    }

    fn locked(folder: &Path, name: &str) -> Result<FolderLock, ReplicaError> {
        let lock = lock_folder(folder).map_err(io_at(folder))?;
        lock.ok_or_else(|| ReplicaError::Busy(name.to_owned()))
    }

    pub(crate) fn make_in(
        files: Arc<dyn Places>,
        folder: &Path,
        spec: ReplicaSpec,
    ) -> Result<Self, ReplicaError> {
        match files.create_folder(folder) {
            // One that was interrupted before its document was there is made again.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            created => created.map_err(io_at(folder))?,
        }
        let parent = folder.parent().unwrap_or(folder);
        files
            .sync_folder(parent, "the replica's folder")
            .map_err(io_at(parent))?;
        if Document::read(&*files, folder)?.is_some() {
            return Err(ReplicaError::Exists(spec.guest));
        }
        let document = Document::of(spec)?;
        document.save(&*files, folder)?;
        Ok(Self::with(files, folder, document))
    }

    fn with(files: Arc<dyn Places>, folder: &Path, document: Document) -> Self {
        Self {
            files,
            folder: folder.to_path_buf(),
            document,
            open: Vec::new(),
            opened: Vec::new(),
            collected: None,
            packer: Packer::default(),
            is_in_doubt: true,
            lock: None,
        }
    }

    /// Opens a replica, and brings its images to the last version that is durable. `None` if there
    /// is none in the folder.
    ///
    /// # Errors
    /// When it cannot be read, another process uses it, or an image of a version that was being
    /// applied cannot be written.
    pub fn open(folder: &Path) -> Result<Option<Self>, ReplicaError> {
        let Some(document) = Document::read(&RealFiles, folder)? else {
            return Ok(None);
        };
        let lock = Self::locked(folder, &document.spec.guest)?;
        let mut replica = Self::open_in(Arc::new(RealFiles), folder)?;
        if let Some(replica) = &mut replica {
            replica.lock = Some(lock);
        }
        Ok(replica)
    }

    pub(crate) fn open_in(
        files: Arc<dyn Places>,
        folder: &Path,
    ) -> Result<Option<Self>, ReplicaError> {
        let Some(document) = Document::read(&*files, folder)? else {
            return Ok(None);
        };
        let mut replica = Self::with(files, folder, document);
        replica.recover()?;
        Ok(Some(replica))
    }

    /// Reads what is said of a replica, and changes nothing.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn look(folder: &Path) -> Result<Option<(ReplicaSpec, Vec<ReplicaVersion>)>, ReplicaError> {
        let document = Document::read(&RealFiles, folder)?;
        Ok(document.map(|document| (document.spec, document.versions)))
    }

    /// Returns what the replica is of.
    pub fn spec(&self) -> &ReplicaSpec {
        &self.document.spec
    }

    /// Changes what the source says of the replica: its id, how often there is a version, and which
    /// are kept, from the next time on that it is opened or begins one.
    ///
    /// # Errors
    /// When that cannot be made durable.
    pub fn follow(
        &mut self,
        id: ReplicaId,
        every_s: u64,
        keep: Retention,
    ) -> Result<(), ReplicaError> {
        let mut document = self.document.clone();
        (document.spec.id, document.spec.every_s) = (id, every_s);
        document.spec.keep = keep.limited(u32::MAX);
        match document == self.document {
            true => Ok(()),
            false => self.replace(document),
        }
    }

    /// Returns the versions that can be restored, from the earliest one.
    pub fn versions(&self) -> &[ReplicaVersion] {
        &self.document.versions
    }

    /// Returns the newest version.
    pub fn newest(&self) -> Option<&ReplicaVersion> {
        self.document.versions.last()
    }

    /// Begins to receive a version of disks of these sizes. What arrived of an earlier one and is
    /// not complete is forgotten.
    ///
    /// # Errors
    /// When there are other disks than the replica has, one has become smaller, or files cannot be
    /// opened.
    pub fn begin(&mut self, sizes: &[u64]) -> Result<(), ReplicaError> {
        // What an error has interrupted goes on.
        self.recover()?;
        self.keeps_images()?;
        self.collected = None;
        let known = std::mem::take(&mut self.open);
        if sizes.len() != self.document.spec.disks.len() {
            return Err(ReplicaError::Contradiction(
                "it has another number of disks",
            ));
        }
        let versions = self.document.versions.last();
        let is_same = known.iter().map(|disk| &disk.bytes).eq(sizes);
        if versions.is_none() && is_same && self.are_those_opened()? {
            // What has arrived of the first version is in the images.
            self.open = known;
            return Ok(());
        }
        let paths: Vec<PathBuf> = self
            .document
            .spec
            .disks
            .iter()
            .map(|disk| disk.path.clone())
            .collect();
        for (at, (path, bytes)) in paths.iter().zip(sizes).enumerate() {
            let had = versions.and_then(|version| version.disks.get(at));
            if had.is_some_and(|had| *bytes < had.bytes) {
                return Err(ReplicaError::Contradiction("a disk has become smaller"));
            }
            let disk = match versions {
                Some(_) => self.open_disk(at, path, *bytes)?,
                None => self.open_first(at, path, *bytes)?,
            };
            self.open.push(disk);
        }
        self.opened = self.image_files()?;
        self.collected = match self.document.versions.last() {
            None => None,
            Some(newest) => {
                let mut collected = Collected::begin(&*self.files, &self.folder)?;
                for (at, (had, bytes)) in newest.disks.iter().zip(sizes).enumerate() {
                    if let Some(chunk) = grown_chunk(had.bytes, *bytes) {
                        collected.forget((at, chunk));
                    }
                }
                Some(collected)
            }
        };
        Ok(())
    }

    /// Forgets all versions if the images have something else, after the guest has been here for
    /// example: what arrives is compared with them.
    fn keeps_images(&mut self) -> Result<(), ReplicaError> {
        if self.document.versions.is_empty() {
            return Ok(());
        }
        match self.check_images() {
            Err(ReplicaError::Digest(_)) => {}
            Err(ReplicaError::Io { error, .. }) if is_missing(&error) => {}
            checked => return checked,
        }
        let mut document = self.document.clone();
        document.versions.clear();
        document.stamps.clear();
        self.open.clear();
        self.replace(document)?;
        self.tidy()
    }

    fn digests_file(&self, disk: usize) -> PathBuf {
        self.folder.join(format!("digests.{disk}"))
    }

    /// Opens a disk that has a version.
    fn open_disk(&self, at: usize, path: &Path, bytes: u64) -> Result<OpenDisk, ReplicaError> {
        let digests = self.digests_file(at);
        Ok(OpenDisk {
            image: self.files.open(path, Access::Write).map_err(io_at(path))?,
            digests: self
                .files
                .open(&digests, Access::Write)
                .map_err(io_at(&digests))?,
            bytes,
        })
    }

    /// Opens the image of a disk of which there is no version, and finds out what it has.
    fn open_first(&self, at: usize, path: &Path, bytes: u64) -> Result<OpenDisk, ReplicaError> {
        let fails = io_at(path);
        let image = match self.files.open(path, Access::Write) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let created = self.files.create(path).map_err(&fails)?;
                let parent = path.parent().unwrap_or(path);
                let synced = self.files.sync_folder(parent, "the image's name");
                synced.map_err(io_at(parent))?;
                created
            }
            opened => opened.map_err(&fails)?,
        };
        let had = image.length().map_err(&fails)?;
        // What is beyond the end is not compared.
        image.set_length(bytes).map_err(&fails)?;
        let path = self.digests_file(at);
        let digests = self.files.create(&path).map_err(io_at(&path))?;
        let disk = OpenDisk {
            image,
            digests,
            bytes,
        };
        disk.digest_all(had.min(bytes)).map_err(fails)?;
        Ok(disk)
    }

    /// Returns the digests of chunks of a disk, as the images have them.
    ///
    /// # Errors
    /// When there are no such chunks, or they cannot be read.
    pub fn digests(&self, disk: usize, first: u64, count: usize) -> Result<Vec<u8>, ReplicaError> {
        const NONE: ReplicaError = ReplicaError::Contradiction("there are no such chunks");
        let disk = self.open.get(disk).ok_or(NONE)?;
        let mut digests = vec![0; count.min(DIGESTS_AT_ONCE) * DIGEST_BYTES as usize];
        let read = disk
            .digests
            .read_at(first.saturating_mul(DIGEST_BYTES), &mut digests);
        read.map_err(|_| NONE)?;
        Ok(digests)
    }

    /// Returns how many chunks of a disk have digests.
    ///
    /// # Errors
    /// When there is no such disk, or its file cannot be read.
    pub fn known_chunks(&self, disk: usize) -> Result<u64, ReplicaError> {
        let none = ReplicaError::Contradiction("there is no such disk");
        let length = self.open.get(disk).ok_or(none)?.digests.length();
        Ok(length.map_err(io_at(&self.digests_file(disk)))? / DIGEST_BYTES)
    }

    /// Takes a record.
    ///
    /// # Errors
    /// When it is not one of this replica, a version does not have the digests that it says, or a
    /// file cannot be written. Then the version that arrives is lost, and the last one stays.
    pub fn put(&mut self, kind: u8, rest: &[u8]) -> Result<(), ReplicaError> {
        if kind == KIND_PATCH {
            return self.put_patch(&Patch::decode(rest)?);
        }
        match Record::decode(kind, rest)? {
            Record::Guest(guest) => self.put_guest(&guest),
            Record::Chunk(chunk) => self.put_chunk(chunk, rest),
            Record::Version(version) => self.put_version(version),
        }
    }

    /// The sizes of a moment may be larger than those that were known when the version began.
    fn put_guest(&mut self, guest: &Guest) -> Result<(), ReplicaError> {
        let spec = &self.document.spec;
        let names = guest.disks.iter().map(|disk| &disk.name);
        if guest.name != spec.guest || !names.eq(spec.disks.iter().map(|disk| &disk.name)) {
            return Err(ReplicaError::Contradiction("it is of another guest"));
        }
        for (at, (open, disk)) in self.open.iter_mut().zip(&guest.disks).enumerate() {
            if disk.bytes < open.bytes {
                return Err(ReplicaError::Contradiction("a disk has become smaller"));
            }
            if let Some(chunk) = grown_chunk(open.bytes, disk.bytes) {
                match &mut self.collected {
                    Some(collected) => collected.forget((at, chunk)),
                    None => {
                        let path = self.folder.join(format!("digests.{at}"));
                        let noted = open.digests.write_at(chunk * DIGEST_BYTES, &UNKNOWN);
                        noted.map_err(io_at(&path))?;
                    }
                }
            }
            open.bytes = disk.bytes;
        }
        Ok(())
    }

    /// Returns which blocks of a chunk have other digests here, from the lowest bit on. All, if
    /// nothing is there to be compared.
    ///
    /// # Errors
    /// When there is no such chunk, or it cannot be read.
    pub fn differing(&self, disk: usize, chunk: u64, digests: &[u8]) -> Result<u64, ReplicaError> {
        Ok(match self.content_of(disk, chunk)? {
            Some(content) => patch::differing(&content, digests),
            None => u64::MAX,
        })
    }

    /// Returns what the newest version has of a chunk; `None` if there is no version, or the chunk
    /// has arrived already.
    fn content_of(&self, at: usize, chunk: u64) -> Result<Option<Vec<u8>>, ReplicaError> {
        const WRONG: ReplicaError = ReplicaError::Contradiction("a chunk is of no disk");
        let open = self.open.get(at).ok_or(WRONG)?;
        let had = self.newest().and_then(|newest| newest.disks.get(at));
        let (Some(collected), Some(had)) = (&self.collected, had) else {
            return Ok(None);
        };
        if chunk > CHUNKS_MAX || collected.has((at, chunk)) {
            return Ok(None);
        }
        let mut content = vec![0; length_of(chunk, had.bytes)];
        let read = open.image.read_at(chunk * CHUNK_BYTES as u64, &mut content);
        let path = self.document.spec.disks.get(at).map(|disk| &disk.path);
        read.map_err(io_at(path.unwrap_or(&self.folder)))?;
        Ok(Some(content))
    }

    fn put_patch(&mut self, patch: &Patch) -> Result<(), ReplicaError> {
        const WRONG: ReplicaError = ReplicaError::Contradiction("a patch does not fit");
        let at = patch.disk as usize;
        let bytes = self.open.get(at).map_or(0, |open| open.bytes);
        if length_of(patch.chunk, bytes) != patch.length {
            return Err(WRONG);
        }
        let content = self.content_of(at, patch.chunk)?.ok_or(WRONG)?;
        let (content, digest) = patch.apply(content).ok_or(WRONG)?;
        let content = Some(&*content).filter(|content| !is_zero(content));
        let rest = self.packer.encode((0, patch.disk, patch.chunk), content)?;
        let collected = self.collected.as_mut().ok_or(WRONG)?;
        collected.add((at, patch.chunk), &rest, digest)
    }

    fn put_chunk(&mut self, chunk: Chunk, rest: &[u8]) -> Result<(), ReplicaError> {
        const WRONG: ReplicaError = ReplicaError::Contradiction("a chunk is of no disk");
        let at = chunk.disk as usize;
        let open = self.open.get(at).ok_or(WRONG)?;
        let length = length_of(chunk.chunk, open.bytes);
        let fits = chunk.content.as_ref().is_none_or(|it| it.len() == length);
        if length == 0 || !fits {
            return Err(WRONG);
        }
        let content = chunk.content.unwrap_or_else(|| vec![0; length]);
        let digest = Tree::of_chunk(&content);
        match &mut self.collected {
            Some(collected) => collected.add((at, chunk.chunk), rest, digest),
            None => {
                let written = open.write(chunk.chunk, &content, &digest);
                written.map_err(|error| {
                    let path = self.document.spec.disks.get(at).map(|disk| &disk.path);
                    let error = io_at(path.unwrap_or(&self.folder))(error);
                    // The image may have another content than its digest says.
                    self.open.clear();
                    error
                })
            }
        }
    }

    /// Makes durable what has arrived.
    ///
    /// # Errors
    /// When that fails.
    pub fn sync(&mut self) -> Result<(), ReplicaError> {
        match &mut self.collected {
            Some(collected) => collected.sync(),
            // Without a version nothing is known of the images after a crash, and all is compared.
            None => Ok(()),
        }
    }

    fn put_version(&mut self, version: Version) -> Result<(), ReplicaError> {
        let last = self.newest().map_or(0, |last| last.version);
        if version.version <= last || version.disks.len() != self.open.len() {
            return Err(ReplicaError::Contradiction("it is not the next version"));
        }
        let sizes: Vec<u64> = self.open.iter().map(|disk| disk.bytes).collect();
        let arrived = ReplicaVersion::of(version, &sizes);
        self.check_digests(&arrived)?;
        match self.collected.take() {
            Some(collected) => self.commit(collected, arrived)?,
            None => self.commit_first(arrived)?,
        }
        self.begin(&sizes)
    }

    /// The first version is in the images already.
    fn commit_first(&mut self, version: ReplicaVersion) -> Result<(), ReplicaError> {
        for (disk, open) in self.document.spec.disks.iter().zip(&self.open) {
            let fails = io_at(&disk.path);
            open.image.set_length(open.bytes).map_err(&fails)?;
            open.image.sync("the image").map_err(&fails)?;
            open.digests.sync("the digests").map_err(fails)?;
        }
        if !self.are_those_opened()? {
            self.open.clear();
            return Err(ReplicaError::Replaced);
        }
        let folder = &self.folder;
        let synced = self.files.sync_folder(folder, "the digests' names");
        synced.map_err(io_at(folder))?;
        let mut document = self.document.clone();
        document.versions.push(version);
        document.stamps = self.stamps()?;
        self.replace(document)
    }

    /// Makes another document durable.
    fn replace(&mut self, document: Document) -> Result<(), ReplicaError> {
        // If it fails, either of them may be there.
        self.is_in_doubt = true;
        document.save(&*self.files, &self.folder)?;
        self.document = document;
        self.is_in_doubt = false;
        Ok(())
    }

    /// Makes the document durable.
    fn save(&mut self) -> Result<(), ReplicaError> {
        self.replace(self.document.clone())
    }

    /// Returns how many bytes the images and the undo logs take; images whose size is unknown count
    /// as none.
    pub fn used_bytes(&self) -> u64 {
        let images = self
            .document
            .spec
            .disks
            .iter()
            .map(|disk| disk.path.clone());
        let undo = self.undo_files();
        images
            .chain(undo)
            .filter_map(|path| used_bytes(&path))
            .sum()
    }
}

/// Returns whether a file is missing, or shorter than it was.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof
    )
}

impl OpenDisk {
    /// Digests the first bytes of the image, and zeros behind them.
    fn digest_all(&self, had: u64) -> io::Result<()> {
        let mut content = vec![0; CHUNK_BYTES];
        let mut digests = Vec::new();
        let zeros = Tree::of_chunk(&content);
        let count = chunks_of(self.bytes);
        for chunk in 0..count {
            let from = chunk * CHUNK_BYTES as u64;
            let length = length_of(chunk, self.bytes);
            let content = content.get_mut(..length).unwrap_or_default();
            let digest = match (from < had, length == CHUNK_BYTES) {
                (false, true) => zeros,
                _ => {
                    self.image.read_at(from, content)?;
                    Tree::of_chunk(content)
                }
            };
            digests.extend(digest);
            if digests.len() == DIGESTS_AT_ONCE * DIGEST_BYTES as usize || chunk + 1 == count {
                let behind = (chunk + 1) * DIGEST_BYTES - digests.len() as u64;
                self.digests.write_at(behind, &digests)?;
                digests.clear();
            }
        }
        Ok(())
    }

    /// Writes a chunk and its digest.
    fn write(&self, chunk: u64, content: &[u8], digest: &[u8; 32]) -> io::Result<()> {
        self.image.write_at(chunk * CHUNK_BYTES as u64, content)?;
        self.digests.write_at(chunk * DIGEST_BYTES, digest)
    }
}
