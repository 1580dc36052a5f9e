//! Writes a version of a replica to other files.

use super::error::{ReplicaError, io_at};
use super::records::Records;
use super::{Replica, chunks_of, length_of};
use crate::record::{CHUNK_BYTES, is_zero};
use crate::tree::{Tree, text};
use longhaul_storage::files::{Access, OpenFile};
use ring::digest::{Context, SHA256};
use std::path::{Path, PathBuf};

impl Replica {
    /// Writes a version to new files, one for each disk, and reads them back. The replica stays as
    /// it is. `progress` gets the bytes that were copied.
    ///
    /// # Errors
    /// When there is no such version, a file exists or cannot be written, or what was read back is
    /// not the version. Then nothing is left.
    pub fn restore(
        &self,
        version: u64,
        to: &[PathBuf],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ReplicaError> {
        let mut created = Vec::new();
        let restored = self.restore_to(version, to, &mut created, progress);
        if restored.is_err() {
            for path in created {
                // The error is the one to be told: this one's file is said in it, or is in the way.
                let _ = self.files.remove(&path);
            }
        }
        restored
    }

    fn restore_to(
        &self,
        version: u64,
        to: &[PathBuf],
        created: &mut Vec<PathBuf>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), ReplicaError> {
        let versions = &self.document.versions;
        let wanted = versions.iter().find(|it| it.version == version);
        let wanted = wanted.ok_or(ReplicaError::NoVersion(version))?;
        if to.len() != wanted.disks.len() {
            return Err(ReplicaError::Contradiction(
                "it has another number of disks",
            ));
        }
        let mut copied = 0;
        let mut files: Vec<(Box<dyn OpenFile>, &Path)> = Vec::new();
        for ((disk, path), had) in self.document.spec.disks.iter().zip(to).zip(&wanted.disks) {
            match self.files.open(path, Access::Read) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(io_at(path)(error)),
                Ok(_) => return Err(io_at(path)(std::io::ErrorKind::AlreadyExists.into())),
            }
            let file = self.files.create(path).map_err(io_at(path))?;
            created.push(path.clone());
            let image = self.files.open(&disk.path, Access::Read);
            let image = image.map_err(io_at(&disk.path))?;
            file.set_length(had.bytes).map_err(io_at(path))?;
            let mut content = vec![0; CHUNK_BYTES];
            for chunk in 0..chunks_of(had.bytes) {
                let length = length_of(chunk, had.bytes);
                let content = content.get_mut(..length).unwrap_or_default();
                let from = chunk * CHUNK_BYTES as u64;
                image.read_at(from, content).map_err(io_at(&disk.path))?;
                if !is_zero(content) {
                    file.write_at(from, content).map_err(io_at(path))?;
                }
                copied += length as u64;
                progress(copied);
            }
            files.push((file, path));
        }
        // The newest first: each undo log turns one version into the one before.
        let pairs = versions.windows(2).rev().filter_map(|pair| match pair {
            [older, newer] if older.version >= version => Some((newer, older)),
            _ => None,
        });
        for (newer, older) in pairs {
            let log = self.undo_file(newer.version, older.version);
            for record in Records::open(&*self.files, &log, None)? {
                let chunk = record?;
                let at = chunk.disk as usize;
                let target = files.get(at).zip(wanted.disks.get(at));
                let Some(((file, path), had)) = target else {
                    return Err(ReplicaError::Contradiction("a chunk is of no disk"));
                };
                // A chunk that was longer in between is cut.
                let length = length_of(chunk.chunk, had.bytes);
                let content = chunk.content.unwrap_or_else(|| vec![0; length]);
                let content = content.get(..length).unwrap_or(&content);
                if content.is_empty() {
                    continue;
                }
                let written = file.write_at(chunk.chunk * CHUNK_BYTES as u64, content);
                written.map_err(io_at(path))?;
            }
        }
        for (((file, path), had), disk) in files
            .iter()
            .zip(&wanted.disks)
            .zip(&self.document.spec.disks)
        {
            file.sync("the restored disk").map_err(io_at(path))?;
            let digest = digest_of(&**file, had.bytes).map_err(io_at(path))?;
            if digest != had.digest {
                return Err(ReplicaError::Digest(disk.name.clone()));
            }
            let parent = path.parent().unwrap_or(path);
            let synced = self.files.sync_folder(parent, "the restored disk's name");
            synced.map_err(io_at(parent))?;
        }
        Ok(())
    }

    /// Reads the images, and checks that they have the newest version. `progress` gets the bytes
    /// that were read.
    ///
    /// # Errors
    /// When one cannot be read, or is damaged.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<(), ReplicaError> {
        let newest = self.newest().ok_or(ReplicaError::NoVersion(1))?;
        let mut read = 0;
        for (disk, had) in self.document.spec.disks.iter().zip(&newest.disks) {
            let fails = io_at(&disk.path);
            let image = self.files.open(&disk.path, Access::Read).map_err(&fails)?;
            let digest = digest_of(&*image, had.bytes).map_err(fails)?;
            if digest != had.digest {
                return Err(ReplicaError::Digest(disk.name.clone()));
            }
            read += had.bytes;
            progress(read);
        }
        Ok(())
    }
}

/// Reads a disk, and returns its digest.
fn digest_of(file: &dyn OpenFile, bytes: u64) -> std::io::Result<String> {
    let (mut whole, mut content) = (Context::new(&SHA256), vec![0; CHUNK_BYTES]);
    for chunk in 0..chunks_of(bytes) {
        let content = content.get_mut(..length_of(chunk, bytes));
        let content = content.unwrap_or_default();
        file.read_at(chunk * CHUNK_BYTES as u64, content)?;
        whole.update(&Tree::of_chunk(content));
    }
    Ok(text(whole.finish().as_ref()))
}
