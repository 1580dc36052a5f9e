//! Records: what a parcel's log consists of.

use crate::cell::SCALE;
use crate::header::Bytes16;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt;
use std::io;
use zstd::bulk::Compressor;
use zstd::zstd_safe::compress_bound;

/// Bytes of a chunk; the last one of a disk may be shorter.
pub const CHUNK_BYTES: usize = (256 << 10) / SCALE;
/// The most bytes of a record, without its kind and length.
pub(crate) const RECORD_BYTES_MAX: usize = (1 << 20) / SCALE;
const DISKS_MAX: usize = 256;
const NAME_BYTES_MAX: usize = 255;
pub(crate) const DISK_BYTES_MAX: u64 = 1 << 50;
/// Bytes of a chunk record before its content.
const CHUNK_HEADER_BYTES: usize = 20;
/// A higher level costs more time than devices take to write what it saves.
const ZSTD_LEVEL: i32 = 1;

pub(crate) const KIND_GUEST: u8 = 1;
pub(crate) const KIND_CHUNK: u8 = 2;
pub(crate) const KIND_VERSION: u8 = 3;

/// Why a record cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It is not JSON of the format.
    #[error("a record cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// It is of a kind that the format does not have.
    #[error("a record is of the unknown kind {0}")]
    Kind(u8),
    /// It has an impossible length, or impossible content.
    #[error("a record contradicts the format: {0}")]
    Contradiction(&'static str),
    /// Its content cannot be compressed, or decompressed.
    #[error("the content of chunk {chunk} cannot be decompressed or compressed: {error}")]
    Compression {
        /// The chunk.
        chunk: u64,
        /// What the library says.
        error: io::Error,
    },
}

/// A disk of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Its number.
    pub disk: u32,
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// The bytes that it took of its file system when it was exported, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<u64>,
}

/// A guest whose disks are in the parcel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Guest {
    /// Its number.
    pub guest: u32,
    /// Its name.
    pub name: String,
    /// Its disks.
    pub disks: Vec<Disk>,
    /// What a destination needs to start it.
    pub description: Value,
}

/// Identifies a moment that several guests share: 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MomentId(pub(crate) Bytes16);

impl fmt::Display for MomentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A disk as a version has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionDisk {
    /// Its number.
    pub disk: u32,
    /// The digest of its content, in hexadecimal digits.
    pub digest: String,
}

/// A state of all disks of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The guest.
    pub guest: u32,
    /// Its number: it only grows.
    pub version: u64,
    /// When it was taken, in seconds since 1970.
    pub time: u64,
    /// Whether all disks are as they were at one moment.
    pub consistent: bool,
    /// Whether the guest's agent had frozen its file systems at that moment.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub frozen: bool,
    /// The moment, if guests of a group share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moment: Option<MomentId>,
    /// Its disks.
    pub disks: Vec<VersionDisk>,
}

/// A part of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The guest.
    pub guest: u32,
    /// The disk.
    pub disk: u32,
    /// The number of the chunk.
    pub chunk: u64,
    /// Its content; `None` if it is all zeros.
    pub content: Option<Vec<u8>>,
}

/// A record of the log.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// A guest, before its chunks.
    Guest(Guest),
    /// A part of a disk.
    Chunk(Chunk),
    /// A state that is complete.
    Version(Version),
}

/// Whether a guest or a disk may be called so: the name becomes that of a file.
fn is_name(name: &str) -> bool {
    let is_plain = |c: char| c != '/' && !c.is_control();
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.chars().all(is_plain)
        && !matches!(name, "." | "..")
}

impl Guest {
    fn check(&self) -> Result<(), RecordError> {
        let fault = |what| Err(RecordError::Contradiction(what));
        if self.disks.len() > DISKS_MAX {
            return fault("a guest has too many disks");
        }
        if self.disks.iter().any(|disk| disk.bytes > DISK_BYTES_MAX) {
            return fault("a disk is too large");
        }
        let names = self.disks.iter().map(|disk| disk.name.as_str());
        if !names.clone().chain([self.name.as_str()]).all(is_name) {
            return fault("a guest or a disk has an impossible name");
        }
        let numbers: BTreeSet<u32> = self.disks.iter().map(|disk| disk.disk).collect();
        match (numbers.len(), names.collect::<BTreeSet<_>>().len())
            == (self.disks.len(), self.disks.len())
        {
            true => Ok(()),
            false => fault("two disks have one number or name"),
        }
    }
}

impl Record {
    /// Returns the record's kind, and the rest of it.
    ///
    /// # Errors
    /// When it is larger than the format allows, or has names that it does not allow.
    pub fn encode(&self) -> Result<(u8, Vec<u8>), RecordError> {
        let (kind, rest) = match self {
            Self::Guest(guest) => {
                guest.check()?;
                (KIND_GUEST, serde_json::to_vec(guest)?)
            }
            Self::Chunk(chunk) => (KIND_CHUNK, chunk.encode()?),
            Self::Version(version) => (KIND_VERSION, serde_json::to_vec(version)?),
        };
        match rest.len() <= RECORD_BYTES_MAX {
            true => Ok((kind, rest)),
            false => Err(RecordError::Contradiction("it is longer than 1 MiB")),
        }
    }

    /// Reads a record of this kind.
    ///
    /// # Errors
    /// When it is not one of the format.
    pub fn decode(kind: u8, rest: &[u8]) -> Result<Self, RecordError> {
        match kind {
            KIND_GUEST => {
                let guest: Guest = serde_json::from_slice(rest)?;
                guest.check()?;
                Ok(Self::Guest(guest))
            }
            KIND_CHUNK => Ok(Self::Chunk(Chunk::decode(rest)?)),
            KIND_VERSION => {
                let version: Version = serde_json::from_slice(rest)?;
                let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
                let is_digest = |text: &str| text.len() == 64 && text.bytes().all(is_digit);
                match version.disks.iter().all(|disk| is_digest(&disk.digest)) {
                    true => Ok(Self::Version(version)),
                    false => Err(RecordError::Contradiction("a digest has not 64 digits")),
                }
            }
            kind => Err(RecordError::Kind(kind)),
        }
    }
}

/// Encodes chunks one after another: memory for that is needed once.
#[derive(Default)]
pub(crate) struct Packer {
    compressor: Option<Compressor<'static>>,
    packed: Vec<u8>,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Packer")
    }
}

impl Packer {
    /// Compresses content.
    fn pack(&mut self, content: &[u8]) -> io::Result<()> {
        let compressor = match &mut self.compressor {
            Some(compressor) => compressor,
            none => none.insert(Compressor::new(ZSTD_LEVEL)?),
        };
        self.packed.clear();
        self.packed.reserve(compress_bound(content.len()));
        compressor.compress_to_buffer(content, &mut self.packed)?;
        Ok(())
    }

    /// Returns the record of a chunk without its kind, from the numbers of the guest, the disk and
    /// the chunk. `None` is a chunk of zeros.
    pub(crate) fn encode(
        &mut self,
        (guest, disk, chunk): (u32, u32, u64),
        content: Option<&[u8]>,
    ) -> Result<Vec<u8>, RecordError> {
        let (encoding, content) = match content {
            None => (0_u8, &[][..]),
            Some(content) if content.len() > CHUNK_BYTES => {
                return Err(RecordError::Contradiction("a chunk is longer than 256 KiB"));
            }
            Some(content) => {
                let packed = self.pack(content);
                packed.map_err(|error| RecordError::Compression { chunk, error })?;
                match self.packed.len() < content.len() {
                    true => (2, &self.packed[..]),
                    false => (1, content),
                }
            }
        };
        let mut rest = Vec::with_capacity(CHUNK_HEADER_BYTES + content.len());
        rest.extend(guest.to_le_bytes());
        rest.extend(disk.to_le_bytes());
        rest.extend(chunk.to_le_bytes());
        rest.extend([encoding, 0, 0, 0]);
        rest.extend(content);
        Ok(rest)
    }
}

/// Returns the numbers of the disk and the chunk of a chunk's record.
pub(crate) fn chunk_of(rest: &[u8]) -> Option<(u32, u64)> {
    let (_, rest) = rest.split_first_chunk::<4>()?;
    let (disk, rest) = rest.split_first_chunk()?;
    let (chunk, _) = rest.split_first_chunk()?;
    Some((u32::from_le_bytes(*disk), u64::from_le_bytes(*chunk)))
}

/// Returns whether all bytes are zero; many at a time.
pub(crate) fn is_zero(content: &[u8]) -> bool {
    let mut parts = content.chunks(64);
    parts.all(|part| part.iter().fold(0, |bits, byte| bits | byte) == 0)
}

impl Chunk {
    fn encode(&self) -> Result<Vec<u8>, RecordError> {
        let content = self.content.as_deref();
        let content = content.filter(|content| !is_zero(content));
        Packer::default().encode((self.guest, self.disk, self.chunk), content)
    }

    pub(crate) fn decode(rest: &[u8]) -> Result<Self, RecordError> {
        const SHORT: RecordError = RecordError::Contradiction("a chunk is too short");
        let (guest, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let (disk, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let (chunk, rest) = rest.split_first_chunk().ok_or(SHORT)?;
        let ([encoding, zeros @ ..], content) = rest.split_first_chunk::<4>().ok_or(SHORT)?;
        if *zeros != [0; 3] {
            return Err(RecordError::Contradiction("a chunk has unknown flags"));
        }
        let chunk = u64::from_le_bytes(*chunk);
        if chunk > DISK_BYTES_MAX / CHUNK_BYTES as u64 {
            return Err(RecordError::Contradiction("a chunk is beyond any disk"));
        }
        let content = match (encoding, content.len()) {
            (0, 0) => None,
            (1, 1..=CHUNK_BYTES) => Some(content.to_vec()),
            (2, 1..) => {
                let frame = zstd::zstd_safe::find_frame_compressed_size(content);
                if frame != Ok(content.len()) {
                    return Err(RecordError::Contradiction("a chunk is not one frame"));
                }
                let unpacked = zstd::bulk::decompress(content, CHUNK_BYTES);
                Some(unpacked.map_err(|error| RecordError::Compression { chunk, error })?)
            }
            _ => {
                return Err(RecordError::Contradiction(
                    "a chunk has an impossible length",
                ));
            }
        };
        Ok(Self {
            guest: u32::from_le_bytes(*guest),
            disk: u32::from_le_bytes(*disk),
            chunk,
            content,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(content: Option<Vec<u8>>) -> Record {
        Record::Chunk(Chunk {
            guest: 1,
            disk: 2,
            chunk: 3 << 30,
            content,
        })
    }

    #[test]
    fn chunks_travel_in_the_shortest_encoding() {
        let noise: Vec<u8> = (0..CHUNK_BYTES as u64)
            .map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ ((n * n) >> 7) as u8)
            .collect();
        for (content, most) in [
            (None, 0),
            (Some(b"text ".repeat(CHUNK_BYTES / 6)), 1000),
            (Some(noise), CHUNK_BYTES),
        ] {
            let record = chunk(content);
            let (kind, rest) = record.encode().unwrap();
            assert!(rest.len() <= CHUNK_HEADER_BYTES + most, "{}", rest.len());
            assert_eq!(Record::decode(kind, &rest).unwrap(), record);
        }
        let zeros = chunk(Some(vec![0; 4096])).encode().unwrap();
        assert_eq!(zeros, chunk(None).encode().unwrap());
    }

    #[test]
    fn what_is_not_a_record_is_refused() {
        let (_, mut rest) = chunk(Some(vec![7; CHUNK_BYTES / 2])).encode().unwrap();
        for length in 0..rest.len() {
            assert!(
                Record::decode(KIND_CHUNK, &rest[..length]).is_err(),
                "{length}"
            );
        }
        rest[16] = 3;
        assert!(Record::decode(KIND_CHUNK, &rest).is_err());
        assert!(matches!(Record::decode(9, &[]), Err(RecordError::Kind(9))));
        assert!(Record::decode(KIND_GUEST, b"{}").is_err());
        // Two frames, or something behind one, are not one frame.
        let one = zstd::bulk::compress(&[7; 100], 1).unwrap();
        for behind in [&one[..], &[0]] {
            let (_, mut rest) = chunk(Some(vec![7; CHUNK_BYTES / 2])).encode().unwrap();
            assert_eq!(rest[16], 2);
            rest.truncate(CHUNK_HEADER_BYTES);
            rest.extend(one.iter().chain(behind));
            assert!(Record::decode(KIND_CHUNK, &rest).is_err());
        }
        // A small frame may not become something large.
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        let (_, mut rest) = chunk(Some(vec![7; CHUNK_BYTES / 2])).encode().unwrap();
        rest.truncate(CHUNK_HEADER_BYTES);
        rest.extend(bomb);
        assert!(Record::decode(KIND_CHUNK, &rest).is_err());
    }
}
