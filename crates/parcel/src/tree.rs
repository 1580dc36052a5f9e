//! The digest of a disk: SHA-256 of the SHA-256 digests of its chunks, which are in a file.

use ring::digest::{Context, SHA256, digest};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

const DIGEST_BYTES: u64 = 32;

/// The digests of a disk's chunks.
#[derive(Debug)]
pub(crate) struct Tree(File);

impl Tree {
    /// Opens the file, or creates it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Ok(Self(options.open(path)?))
    }

    /// Opens a file that exists, to read it.
    pub(crate) fn open_to_read(path: &Path) -> io::Result<Self> {
        Ok(Self(File::open(path)?))
    }

    /// Returns the digest of a chunk.
    pub(crate) fn of_chunk(content: &[u8]) -> [u8; 32] {
        let digest = digest(&SHA256, content);
        digest.as_ref().first_chunk().copied().unwrap_or_default()
    }

    /// Keeps the digests of this number of chunks, and continues behind them.
    pub(crate) fn cut(&mut self, chunks: u64) -> io::Result<()> {
        let bytes = chunks * DIGEST_BYTES;
        if self.0.metadata()?.len() < bytes {
            return Err(io::Error::other(
                "digests are missing in it: remove the job",
            ));
        }
        self.0.set_len(bytes)?;
        self.0.seek(SeekFrom::Start(bytes))?;
        Ok(())
    }

    /// Replaces the first digests of a file by those of another, durably.
    pub(crate) fn replace_first(path: &Path, by: &Path, chunks: u64) -> io::Result<()> {
        if chunks == 0 {
            return Ok(());
        }
        let mut all = std::fs::read(by)?;
        all.truncate((chunks * DIGEST_BYTES) as usize);
        let old = std::fs::read(path)?;
        all.extend_from_slice(old.get(all.len()..).unwrap_or_default());
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&all)?;
        file.sync_all()?;
        std::fs::rename(&new, path)?;
        File::open(path.parent().unwrap_or(path))?.sync_all()
    }

    /// Adds the digest of the next chunk.
    pub(crate) fn push(&mut self, digest: [u8; 32]) -> io::Result<()> {
        self.0.write_all(&digest)
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    /// Returns the digest of all, in hexadecimal digits.
    pub(crate) fn digest(&mut self) -> io::Result<String> {
        self.0.seek(SeekFrom::Start(0))?;
        let mut read = BufReader::new(&self.0);
        let (mut whole, mut part) = (Context::new(&SHA256), [0; 4096]);
        loop {
            match read.read(&mut part)? {
                0 => return Ok(text(whole.finish().as_ref())),
                length => whole.update(part.get(..length).unwrap_or_default()),
            }
        }
    }
}

/// The digests of the version before, if there is one.
#[derive(Debug)]
pub(crate) struct Before(Option<File>);

impl Before {
    /// Opens the file, if it exists.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self(None)),
            opened => Ok(Self(Some(opened?))),
        }
    }

    /// Returns the digests of chunks; `None` for those that did not exist.
    pub(crate) fn digests(&self, chunks: Range<u64>) -> io::Result<Vec<Option<[u8; 32]>>> {
        chunks
            .map(|chunk| {
                let mut digest = [0; DIGEST_BYTES as usize];
                let Some(file) = &self.0 else {
                    return Ok(None);
                };
                match file.read_exact_at(&mut digest, chunk * DIGEST_BYTES) {
                    Ok(()) => Ok(Some(digest)),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
                    Err(error) => Err(error),
                }
            })
            .collect()
    }
}

/// Returns bytes as hexadecimal digits.
pub(crate) fn text(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
