//! The file layer: the file system operations that journals, rights and masks use, so that tests
//! can replace them by a simulation of power cuts.

mod real;

pub use real::RealFiles;

use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::path::Path;

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// For reading; it must exist.
    Read,
    /// For reading and writing; it must exist.
    Write,
    /// For reading and writing; it is created where it is missing.
    Create,
}

/// A file system.
///
/// Nothing is durable before it is synced: a file's content and length by [`OpenFile::sync`], names
/// by the [`Files::sync_folder`] of their folder. A sync gets a description of what it makes
/// durable, for errors; tests suppress single syncs by it.
pub trait Files: Debug + Send + Sync {
    /// Opens a file.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>>;
    /// Creates a folder in an existing one; only its owner may use it.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Returns the names in a folder.
    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>>;
    /// Renames a file within its folder, in place of a file with the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file. It may exist again after a power cut.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a folder durable.
    fn sync_folder(&self, folder: &Path, what: &'static str) -> io::Result<()>;
}

/// An open file.
pub trait OpenFile: Debug + Send + Sync {
    /// Returns its length in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Reads until the buffer is full.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Writes all of the bytes.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Truncates it, or extends it with zeros.
    fn set_length(&self, length: u64) -> io::Result<()>;
    /// Reserves space for the first `length` bytes, so that writing them cannot fail for want of
    /// it. File systems that do not support this are used without it.
    fn reserve(&self, length: u64) -> io::Result<()>;
    /// Makes its content durable.
    fn sync(&self, what: &'static str) -> io::Result<()>;
    /// Makes its content durable if neither its length nor its space has changed.
    fn sync_content(&self, what: &'static str) -> io::Result<()> {
        self.sync(what)
    }
}

/// Reads a whole file; `None` when it is longer than the limit.
pub(crate) fn read_whole(file: &dyn OpenFile, length_max: u64) -> io::Result<Option<Vec<u8>>> {
    let length = file.length()?;
    if length > length_max {
        return Ok(None);
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_at(0, &mut bytes)?;
    Ok(Some(bytes))
}

/// Creates or replaces a whole file, durably.
pub fn replace(
    files: &dyn Files,
    path: &Path,
    bytes: &[u8],
    [content, name]: [&'static str; 2],
) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let new = Path::new(&new);
    let file = files.open(new, Access::Create)?;
    file.set_length(0)?;
    file.write_at(0, bytes)?;
    file.sync(content)?;
    files.rename(new, path)?;
    files.sync_folder(parent(path), name)
}

/// Returns the folder of a name.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    }
}

/// Creates a folder and its missing parents: when this returns, it exists even after a power cut.
pub fn create_folder(files: &dyn Files, folder: &Path) -> io::Result<()> {
    let missing = match files.names(folder) {
        Ok(_) => false,
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(error),
    };
    if folder.parent().is_none() {
        return Ok(());
    }
    if missing {
        // The parent first: an existing folder must be in a durable one.
        create_folder(files, parent(folder))?;
        files.create_folder(folder)?;
    }
    // An existing folder may have been created just before an agent ended.
    match files.sync_folder(parent(folder), "the folder's name") {
        // This folder was created by an account that may write to the parent.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !missing => Ok(()),
        other => other,
    }
}
