//! Requests and replies ("Transmission"), independent of sockets and disks.

use super::handshake::{ALLOCATION_ID, PAYLOAD_BYTES_MAX};
use crate::disk::{Extent, Zeros};
use nix::errno::Errno;
use std::io;
use std::ops::Range;

/// The magic number of a request ("Request message").
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The magic number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The magic number of a part of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Length of a request before its payload.
pub const REQUEST_BYTES: usize = 28;
/// Longest header before the data of a read, in either kind of reply.
pub const READ_HEADER_BYTES_MAX: usize = 28;
/// Limit on the extents in one reply; the client queries the rest again.
pub const EXTENTS_MAX: usize = 1024;

/// Commands ("Request types").
mod command {
    pub(super) const READ: u16 = 0;
    pub(super) const WRITE: u16 = 1;
    pub(super) const DISC: u16 = 2;
    pub(super) const FLUSH: u16 = 3;
    pub(super) const TRIM: u16 = 4;
    pub(super) const WRITE_ZEROES: u16 = 6;
    pub(super) const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request ("Command flags").
mod flag {
    pub(super) const FUA: u16 = 1 << 0;
    pub(super) const NO_HOLE: u16 = 1 << 1;
    pub(super) const REQ_ONE: u16 = 1 << 3;
}

/// Parts of a structured reply ("Structured reply types").
mod chunk {
    pub(super) const DONE: u16 = 1;
    pub(super) const NONE: u16 = 0;
    pub(super) const OFFSET_DATA: u16 = 1;
    pub(super) const BLOCK_STATUS: u16 = 5;
    pub(super) const ERROR: u16 = 1 << 15 | 1;
}

/// A hole, which reads as zeros ("`base:allocation` metadata context").
const STATE_HOLE_AND_ZERO: u32 = 1 << 0 | 1 << 1;

/// A fault of the client that ends its connection at once ("Terminating the transmission phase").
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The magic number of a request is missing: client and server disagree on their position in
    /// the stream.
    #[error("no NBD request ({0:#x})")]
    Magic(u32),
    /// A write is too long to be read and discarded.
    #[error("a write of {0} bytes")]
    TooLong(u32),
}

/// An error code of the protocol ("Error values").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdErrno(u32);

impl NbdErrno {
    /// The request is invalid.
    pub const EINVAL: Self = Self(22);
    /// There is no such space.
    pub const ENOSPC: Self = Self(28);
    /// The request is too large.
    pub const EOVERFLOW: Self = Self(75);

    /// Returns the code of a disk's error: its own errno where the protocol has it.
    pub fn of(error: &io::Error) -> Self {
        let errno = error.raw_os_error().map(Errno::from_raw);
        Self(match errno {
            Some(Errno::EPERM | Errno::EACCES | Errno::EROFS) => 1,
            Some(Errno::ENOMEM) => 12,
            Some(Errno::EINVAL) => return Self::EINVAL,
            Some(Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG) => return Self::ENOSPC,
            Some(_) | None => 5,
        })
    }

    /// Returns its number on the wire.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// A request as on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    flags: u16,
    command: u16,
    /// The value that identifies its replies.
    pub cookie: u64,
    offset: u64,
    length: u32,
}

/// The operation of a request; its range lies within the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Task {
    /// Read.
    Read(Range<u64>),
    /// Write the payload from this offset on.
    Write {
        /// The first byte.
        offset: u64,
        /// Whether it must be durable before the reply.
        durable: bool,
    },
    /// Make durable what was answered before.
    Flush,
    /// Discard the content.
    Discard {
        /// The bytes.
        range: Range<u64>,
        /// Whether that must be durable before the reply.
        durable: bool,
    },
    /// Zero a range.
    Zero {
        /// The bytes.
        range: Range<u64>,
        /// How their space may be treated.
        zeros: Zeros,
        /// Whether it must be durable before the reply.
        durable: bool,
    },
    /// Query allocation.
    Status {
        /// The bytes.
        range: Range<u64>,
        /// Limit on the extents.
        count_max: usize,
    },
    /// Disconnect.
    Disconnect,
}

impl Request {
    /// Parses a request.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, RequestError> {
        let magic = u32::from_be_bytes(field(bytes, 0));
        if magic != REQUEST_MAGIC {
            return Err(RequestError::Magic(magic));
        }
        Ok(Self {
            flags: u16::from_be_bytes(field(bytes, 4)),
            command: u16::from_be_bytes(field(bytes, 6)),
            cookie: u64::from_be_bytes(field(bytes, 8)),
            offset: u64::from_be_bytes(field(bytes, 16)),
            length: u32::from_be_bytes(field(bytes, 24)),
        })
    }

    /// Returns the length of its payload, which must be read whatever the answer is.
    pub fn payload_bytes(&self) -> Result<usize, RequestError> {
        if self.command != command::WRITE {
            return Ok(0);
        }
        match usize::try_from(self.length) {
            Ok(length) if self.length <= PAYLOAD_BYTES_MAX => Ok(length),
            Ok(_) | Err(_) => Err(RequestError::TooLong(self.length)),
        }
    }

    /// Returns its operation on a disk of this size, or the error for the reply.
    pub fn task(&self, size_bytes: u64, allocation: bool) -> Result<Task, NbdErrno> {
        let durable = self.flags & flag::FUA != 0;
        Ok(match self.command {
            command::READ => {
                self.only(0)?;
                let range = self.range(size_bytes, NbdErrno::EINVAL)?;
                if self.length > PAYLOAD_BYTES_MAX {
                    return Err(NbdErrno::EOVERFLOW);
                }
                Task::Read(range)
            }
            command::WRITE => {
                self.only(0)?;
                let offset = self.range(size_bytes, NbdErrno::ENOSPC)?.start;
                Task::Write { offset, durable }
            }
            command::DISC => Task::Disconnect,
            command::FLUSH => {
                self.only(0)?;
                if self.offset != 0 || self.length != 0 {
                    return Err(NbdErrno::EINVAL);
                }
                Task::Flush
            }
            command::TRIM => {
                self.only(0)?;
                let range = self.range(size_bytes, NbdErrno::EINVAL)?;
                Task::Discard { range, durable }
            }
            command::WRITE_ZEROES => {
                // FAST_ZERO is not offered, so it is an unknown flag.
                self.only(flag::NO_HOLE)?;
                let range = self.range(size_bytes, NbdErrno::ENOSPC)?;
                let zeros = match self.flags & flag::NO_HOLE {
                    0 => Zeros::MayBeHole,
                    _ => Zeros::Allocated,
                };
                Task::Zero {
                    range,
                    zeros,
                    durable,
                }
            }
            command::BLOCK_STATUS => {
                self.only(flag::REQ_ONE)?;
                let range = self.range(size_bytes, NbdErrno::EINVAL)?;
                if !allocation || range.is_empty() {
                    return Err(NbdErrno::EINVAL);
                }
                let count_max = match self.flags & flag::REQ_ONE {
                    0 => EXTENTS_MAX,
                    _ => 1,
                };
                Task::Status { range, count_max }
            }
            _ => return Err(NbdErrno::EINVAL),
        })
    }

    /// Refuses flags that the command does not have. FUA is valid for all of them.
    fn only(&self, flags: u16) -> Result<(), NbdErrno> {
        match self.flags & !(flags | flag::FUA) {
            0 => Ok(()),
            _ => Err(NbdErrno::EINVAL),
        }
    }

    fn range(&self, size_bytes: u64, beyond: NbdErrno) -> Result<Range<u64>, NbdErrno> {
        match self.offset.checked_add(u64::from(self.length)) {
            Some(end) if end <= size_bytes => Ok(self.offset..end),
            Some(_) | None => Err(beyond),
        }
    }
}

fn field<const N: usize>(bytes: &[u8; REQUEST_BYTES], place: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[place..place + N]);
    field
}

fn structured(reply: &mut Vec<u8>, kind: u16, cookie: u64, length: usize) {
    reply.extend(STRUCTURED_REPLY_MAGIC.to_be_bytes());
    reply.extend(chunk::DONE.to_be_bytes());
    reply.extend(kind.to_be_bytes());
    reply.extend(cookie.to_be_bytes());
    // Payloads are bounded by `PAYLOAD_BYTES_MAX` and `EXTENTS_MAX`.
    reply.extend((length as u32).to_be_bytes());
}

fn simple(reply: &mut Vec<u8>, error: u32, cookie: u64) {
    reply.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
    reply.extend(error.to_be_bytes());
    reply.extend(cookie.to_be_bytes());
}

/// The replies to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replies {
    /// Whether structured replies were agreed on.
    pub structured: bool,
}

impl Replies {
    /// Appends a reply of success.
    pub fn done(self, reply: &mut Vec<u8>, cookie: u64) {
        if self.structured {
            structured(reply, chunk::NONE, cookie, 0);
        } else {
            simple(reply, 0, cookie);
        }
    }

    /// Appends a reply of failure, with a text where the client accepts one.
    pub fn failed(self, reply: &mut Vec<u8>, cookie: u64, errno: NbdErrno, why: &str) {
        if !self.structured {
            return simple(reply, errno.0, cookie);
        }
        // The text is an error's message; a text has at most 4096 bytes.
        let why = why.get(..why.len().min(1024)).unwrap_or_default();
        structured(reply, chunk::ERROR, cookie, 6 + why.len());
        reply.extend(errno.0.to_be_bytes());
        reply.extend((why.len() as u16).to_be_bytes());
        reply.extend(why.as_bytes());
    }

    /// Appends the header before the data of a read, which has at least one byte.
    pub fn data(self, reply: &mut Vec<u8>, cookie: u64, offset: u64, length: usize) {
        if self.structured {
            structured(reply, chunk::OFFSET_DATA, cookie, 8 + length);
            reply.extend(offset.to_be_bytes());
        } else {
            simple(reply, 0, cookie);
        }
    }

    /// Appends the allocation, which has at least one extent.
    pub fn status(self, reply: &mut Vec<u8>, cookie: u64, extents: &[Extent]) {
        structured(reply, chunk::BLOCK_STATUS, cookie, 4 + 8 * extents.len());
        reply.extend(ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            // An extent lies within a request, whose length has 32 bits.
            reply.extend((extent.length_bytes as u32).to_be_bytes());
            let status = if extent.hole { STATE_HOLE_AND_ZERO } else { 0 };
            reply.extend(status.to_be_bytes());
        }
    }
}
