//! The file layer: what journals, rights and masks ask of a file system, and no more, so that tests can
//! put one beneath them whose power is cut.

mod real;

pub use real::RealFiles;

use std::ffi::OsString;
use std::fmt::Debug;
use std::io;
use std::path::Path;

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// For reading; it must be there.
    Read,
    /// For reading and writing; it must be there.
    Write,
    /// For reading and writing; it is made where it is missing.
    Create,
}

/// A file system.
///
/// Nothing is durable before it is synced: what a file holds and how long it is by its own
/// [`OpenFile::sync`], names by the [`Files::sync_folder`] of the folder that they are in. A sync
/// is told what it makes durable, in the words of an error; tests leave out one sync at a time by
/// these words.
pub trait Files: Debug + Send + Sync {
    /// Opens a file.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn OpenFile>>;
    /// Makes a folder whose parent is there; only its owner may use it.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// The names in a folder.
    fn names(&self, folder: &Path) -> io::Result<Vec<OsString>>;
    /// Gives a file another name in its folder, in place of the file that had it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file. It may be there again after a power cut.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes the names in a folder durable.
    fn sync_folder(&self, folder: &Path, what: &'static str) -> io::Result<()>;
}

/// An open file.
pub trait OpenFile: Debug + Send + Sync {
    /// Its length in bytes.
    fn length(&self) -> io::Result<u64>;
    /// Reads until the buffer is full.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Writes all of the bytes.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Cuts it off, or fills it up with zeros.
    fn set_length(&self, length: u64) -> io::Result<()>;
    /// Sets space aside for the first so many bytes, so that writing them cannot fail for want of
    /// it. File systems that cannot do this are taken as they are.
    fn reserve(&self, length: u64) -> io::Result<()>;
    /// Makes what it holds durable.
    fn sync(&self, what: &'static str) -> io::Result<()>;
    /// The same of a file whose length and space have not changed.
    fn sync_content(&self, what: &'static str) -> io::Result<()> {
        self.sync(what)
    }
}

/// Reads a whole file; `None` when it is longer than that.
pub(crate) fn read_whole(file: &dyn OpenFile, length_max: u64) -> io::Result<Option<Vec<u8>>> {
    let length = file.length()?;
    if length > length_max {
        return Ok(None);
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_at(0, &mut bytes)?;
    Ok(Some(bytes))
}

/// Makes a file, durably, or replaces it as a whole.
pub(crate) fn replace(
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

/// The folder that a name is in.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    }
}

/// Makes a folder and those above it where they are missing: when this returns, it is there after
/// a power cut.
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
        // The one above first: a folder that is there is in one that is there for good.
        create_folder(files, parent(folder))?;
        files.create_folder(folder)?;
    }
    // One that is there may have been made just before an agent was ended.
    match files.sync_folder(parent(folder), "the folder's name") {
        // Whoever may write to the folder above made this one.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !missing => Ok(()),
        other => other,
    }
}
