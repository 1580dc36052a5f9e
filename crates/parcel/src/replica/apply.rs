//! Brings the images of a replica from one version to the next.

use super::document::{Document, ReplicaVersion, Stage};
use super::error::{ReplicaError, io_at};
use super::records::{Collected, RecordWriter, Records};
use super::{DIGEST_BYTES, DIGESTS_AT_ONCE, OpenDisk, Replica, UNKNOWN, chunks_of, length_of};
use crate::record::{CHUNK_BYTES, Packer, is_zero};
use crate::room::Stamp;
use crate::tree::{Tree, text};
use longhaul_storage::files::Files;
use ring::digest::{Context, SHA256};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// What undo logs are called, before the number of their version.
const UNDO: &str = "undo.";

fn remove(files: &dyn Files, path: &Path) -> Result<(), ReplicaError> {
    match files.remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_at(path)(error)),
        _ => Ok(()),
    }
}

impl Replica {
    /// Returns the undo log that turns a version into an earlier one.
    pub(super) fn undo_file(&self, version: u64, earlier: u64) -> PathBuf {
        self.folder.join(format!("{UNDO}{version}.{earlier}"))
    }

    /// Returns the undo logs that turn each version into the one before.
    pub(super) fn undo_files(&self) -> impl Iterator<Item = PathBuf> {
        let pairs = self.document.versions.windows(2);
        pairs.filter_map(|pair| match pair {
            [earlier, version] => Some(self.undo_file(version.version, earlier.version)),
            _ => None,
        })
    }

    /// Brings the images to the last version that is durable.
    pub(super) fn recover(&mut self) -> Result<(), ReplicaError> {
        if self.is_in_doubt {
            // Whatever its name has now is made durable, before files that it needs are removed.
            let document = Document::read(&*self.files, &self.folder)?;
            self.document = document.ok_or(ReplicaError::Contradiction("its document is gone"))?;
            self.save()?;
        }
        let Some(stage) = self.document.stage.clone() else {
            self.prune()?;
            return self.tidy();
        };
        self.opened = self.document.stamps.iter().map(|it| it.file).collect();
        let sizes = stage.version.disks.iter().map(|disk| disk.bytes);
        let sizes: Vec<u64> = sizes.collect();
        let paths = self.document.spec.disks.iter().map(|disk| &disk.path);
        let paths: Vec<PathBuf> = paths.cloned().collect();
        self.open.clear();
        for (at, (path, bytes)) in paths.iter().zip(sizes).enumerate() {
            let disk = self.open_disk(at, path, bytes)?;
            self.open.push(disk);
        }
        self.apply(stage)?;
        self.open.clear();
        Ok(())
    }

    /// Returns the stamps of the images.
    pub(super) fn stamps(&self) -> Result<Vec<Stamp>, ReplicaError> {
        let disks = self.document.spec.disks.iter();
        let each = disks.map(|disk| self.files.stamp(&disk.path).map_err(io_at(&disk.path)));
        each.collect()
    }

    /// Checks that the images are those that the newest version has left, and reads them if they
    /// may be others.
    ///
    /// # Errors
    /// When one is missing, or does not have what the newest version says.
    pub fn check_images(&mut self) -> Result<(), ReplicaError> {
        if self.stamps()? == self.document.stamps {
            return Ok(());
        }
        self.verify(&mut |_| ())?;
        let mut document = self.document.clone();
        document.stamps = self.stamps()?;
        self.replace(document)
    }

    /// Returns which files the images are.
    pub(super) fn image_files(&self) -> Result<Vec<(u64, u64)>, ReplicaError> {
        Ok(self.stamps()?.iter().map(|stamp| stamp.file).collect())
    }

    /// Returns whether the images are still the files that were opened.
    pub(super) fn are_those_opened(&self) -> Result<bool, ReplicaError> {
        Ok(self.image_files()? == self.opened)
    }

    /// Removes files that belong to no version.
    pub(super) fn tidy(&self) -> Result<(), ReplicaError> {
        let needed: BTreeSet<PathBuf> = self.undo_files().collect();
        let names = self.files.names(&self.folder);
        for name in names.map_err(io_at(&self.folder))? {
            let path = self.folder.join(&name);
            let is_undo = name.to_string_lossy().starts_with(UNDO);
            if is_undo && !needed.contains(&path) || path == Collected::file(&self.folder) {
                remove(&*self.files, &path)?;
            }
        }
        Ok(())
    }

    /// Checks that what has arrived makes the images what the version says.
    pub(super) fn check_digests(&self, version: &ReplicaVersion) -> Result<(), ReplicaError> {
        let none = BTreeMap::new();
        let changed = self.collected.as_ref().map_or(&none, |it| &it.chunks);
        let disks = self.document.spec.disks.iter().zip(&self.open);
        for (at, ((disk, open), expected)) in disks.zip(&version.disks).enumerate() {
            let digest = open.digest(|chunk| changed.get(&(at, chunk)).map(|(_, digest)| *digest));
            let path = self.digests_file(at);
            if digest.map_err(io_at(&path))?.as_ref() != Some(&expected.digest) {
                return Err(ReplicaError::Digest(disk.name.clone()));
            }
        }
        Ok(())
    }

    /// Makes a version that has arrived durable, and brings the images to it.
    pub(super) fn commit(
        &mut self,
        mut collected: Collected,
        version: ReplicaVersion,
    ) -> Result<(), ReplicaError> {
        collected.sync()?;
        self.has_room(&collected)?;
        self.write_undo(&collected, version.version)?;
        let stage = Stage {
            version,
            bytes: collected.bytes(),
        };
        // From here on it is the version that the images get, whatever happens.
        let mut document = self.document.clone();
        document.stage = Some(stage.clone());
        self.replace(document)?;
        self.apply(stage)
    }

    /// Checks that the images and the undo log have room for what has arrived, if nothing of it is
    /// allocated yet.
    fn has_room(&self, collected: &Collected) -> Result<(), ReplicaError> {
        let bytes = collected.chunks.len() as u64 * CHUNK_BYTES as u64;
        let mut needed: BTreeMap<u64, (PathBuf, u64, u64)> = BTreeMap::new();
        let mut add = |folder: &Path, bytes: u64| -> Result<(), ReplicaError> {
            let room = self.files.room(folder).map_err(io_at(folder))?;
            let entry = (folder.to_path_buf(), room.free_bytes, 0);
            needed.entry(room.device).or_insert(entry).2 += bytes;
            Ok(())
        };
        add(&self.folder, bytes)?;
        for (at, disk) in self.document.spec.disks.iter().enumerate() {
            let chunks = collected.chunks.range((at, 0)..(at + 1, 0)).count() as u64;
            let folder = disk.path.parent().unwrap_or(&disk.path);
            add(folder, chunks * CHUNK_BYTES as u64)?;
        }
        let mut all = needed.into_values();
        match all.find(|(_, free, needed)| needed > free) {
            None => Ok(()),
            Some((folder, free, needed)) => Err(ReplicaError::Room {
                folder,
                needed,
                free,
            }),
        }
    }

    /// Writes what the images have in the place of what has arrived.
    fn write_undo(&self, collected: &Collected, version: u64) -> Result<(), ReplicaError> {
        let last = self.document.versions.last();
        let path = self.undo_file(version, last.map_or(0, |last| last.version));
        let mut packer = Packer::default();
        let mut writer = RecordWriter::create(&*self.files, &self.new_undo_file())?;
        let mut content = vec![0; CHUNK_BYTES];
        for (at, chunk) in collected.chunks.keys() {
            let had = last.and_then(|last| last.disks.get(*at));
            let length = had.map_or(0, |had| length_of(*chunk, had.bytes));
            let open = self.open.get(*at).zip(self.document.spec.disks.get(*at));
            let (Some((open, disk)), 1..) = (open, length) else {
                continue;
            };
            let content = content.get_mut(..length).unwrap_or_default();
            let read = open.image.read_at(chunk * CHUNK_BYTES as u64, content);
            read.map_err(io_at(&disk.path))?;
            let some = Some(&*content).filter(|content| !is_zero(content));
            writer.put(&packer.encode((0, *at as u32, *chunk), some)?)?;
        }
        self.name_undo(writer, &path)
    }

    /// Returns the name of an undo log while it is written.
    fn new_undo_file(&self) -> PathBuf {
        self.folder.join(format!("{UNDO}new"))
    }

    /// Makes an undo log durable that was written, and gives it its name.
    fn name_undo(&self, mut writer: RecordWriter, path: &Path) -> Result<(), ReplicaError> {
        writer.sync()?;
        let renamed = self.files.rename(&self.new_undo_file(), path);
        renamed.map_err(io_at(path))?;
        let synced = self.files.sync_folder(&self.folder, "the undo log's name");
        synced.map_err(io_at(&self.folder))
    }

    /// Forgets the versions that are not kept.
    fn prune(&mut self) -> Result<(), ReplicaError> {
        let versions = &self.document.versions;
        let keeps = self.document.spec.keep.keeps(versions);
        let kept: Vec<usize> = (0..versions.len())
            .filter(|at| keeps.get(*at) == Some(&true))
            .collect();
        if kept.len() == versions.len() {
            return Ok(());
        }
        for pair in kept.windows(2) {
            let [earlier, later] = *pair else { continue };
            if let Some(versions) = versions.get(earlier..=later)
                && versions.len() > 2
            {
                self.merge_undo(versions)?;
            }
        }
        let mut document = self.document.clone();
        let mut keeps = keeps.into_iter();
        document.versions.retain(|_| keeps.next() == Some(true));
        self.replace(document)
    }

    /// Merges the undo logs between the first and the last of some versions into one.
    fn merge_undo(&self, versions: &[ReplicaVersion]) -> Result<(), ReplicaError> {
        let (Some(first), Some(last)) = (versions.first(), versions.last()) else {
            return Ok(());
        };
        let mut writer = RecordWriter::create(&*self.files, &self.new_undo_file())?;
        let mut known = BTreeSet::new();
        // What the earliest one has of a chunk is what the first version had.
        for pair in versions.windows(2) {
            let [earlier, version] = pair else { continue };
            let log = self.undo_file(version.version, earlier.version);
            let mut records = Records::open(&*self.files, &log, None)?;
            while let Some((rest, chunk)) = records.next_record()? {
                if known.insert((chunk.disk, chunk.chunk)) {
                    writer.put(&rest)?;
                }
            }
        }
        self.name_undo(writer, &self.undo_file(last.version, first.version))
    }

    /// Writes a version's records to the images. It may be done again.
    fn apply(&mut self, stage: Stage) -> Result<(), ReplicaError> {
        let arriving = Collected::file(&self.folder);
        let sizes = stage.version.disks.iter();
        let disks = self.document.spec.disks.iter();
        for ((open, disk), size) in self.open.iter_mut().zip(disks).zip(sizes) {
            open.bytes = size.bytes;
            let grown = open.image.set_length(open.bytes);
            grown.map_err(io_at(&disk.path))?;
        }
        let records = Records::open(&*self.files, &arriving, Some(stage.bytes))?;
        for record in records {
            let chunk = record?;
            let at = chunk.disk as usize;
            let disk = self.open.get(at).zip(self.document.spec.disks.get(at));
            let Some((open, disk)) = disk else {
                return Err(ReplicaError::Contradiction("a chunk is of no disk"));
            };
            let length = length_of(chunk.chunk, open.bytes);
            let content = chunk.content.unwrap_or_else(|| vec![0; length]);
            let digest = Tree::of_chunk(&content);
            let written = open.write(chunk.chunk, &content, &digest);
            written.map_err(io_at(&disk.path))?;
        }
        for (at, (open, disk)) in self.open.iter().zip(&self.document.spec.disks).enumerate() {
            let synced = open.image.sync("the image");
            synced.map_err(io_at(&disk.path))?;
            let synced = open.digests.sync("the digests");
            synced.map_err(io_at(&self.digests_file(at)))?;
        }
        if !self.are_those_opened()? {
            return Err(ReplicaError::Replaced);
        }
        let mut document = self.document.clone();
        document.versions.push(stage.version);
        document.stamps = self.stamps()?;
        document.stage = None;
        self.replace(document)?;
        self.prune()?;
        self.tidy()
    }
}

impl OpenDisk {
    /// Returns the digest of the image, with other digests for some chunks; `None` if one is
    /// missing.
    fn digest(&self, changed: impl Fn(u64) -> Option<[u8; 32]>) -> io::Result<Option<String>> {
        let known = self.digests.length()? / DIGEST_BYTES;
        let count = chunks_of(self.bytes);
        let mut whole = Context::new(&SHA256);
        for first in (0..count).step_by(DIGESTS_AT_ONCE) {
            let end = (first + DIGESTS_AT_ONCE as u64).min(count);
            let here = end.min(known).saturating_sub(first);
            let mut digests = vec![0; (here * DIGEST_BYTES) as usize];
            self.digests.read_at(first * DIGEST_BYTES, &mut digests)?;
            let mut digests = digests.chunks_exact(DIGEST_BYTES as usize);
            for chunk in first..end {
                let old = digests.next();
                let new = changed(chunk);
                let digest = new.as_ref().map(|new| &new[..]).or(old);
                match digest.filter(|digest| **digest != UNKNOWN) {
                    Some(digest) => whole.update(digest),
                    None => return Ok(None),
                }
            }
        }
        Ok(Some(text(whole.finish().as_ref())))
    }
}
