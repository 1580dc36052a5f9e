//! The messages between the page server and the agent on a Unix socket: 32 bytes each, four
//! little-endian numbers, followed by content where a message has some.
//!
//! ```text
//! server ──Empty──▶ agent             it has no QEMU yet
//! agent  ──Begin, Known..., Serve──▶  QEMU's socket (SCM_RIGHTS, with the first byte of Begin)
//!        ◀──Serves, Want...──
//!        ──Give..., End──▶
//!
//! server ──Missing..., Serves, Want...──▶ a later agent
//! ```

use longhaul_protocol::limits::{PRELUDE_BYTES_MAX, REGIONS_MAX};
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::io;

/// Bytes of every message, without its content.
pub const MESSAGE_BYTES: usize = 32;
/// Limit on the pages that one message brings.
pub const PAGES_MAX: u64 = 64;
/// The send buffers of this socket and of QEMU's, in bytes. A page that the guest waits for is
/// behind what they hold.
pub(in crate::memory) const SEND_BUFFER_BYTES: usize = 64 << 10;
/// Limit on the ranges that one message has.
pub const RANGES_MAX: usize = 1 << 13;
/// Bytes of a range in a message's content: its first page and its length.
const RANGE_BYTES: usize = 8;

/// What an agent knows of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Known {
    /// QEMU lacks them.
    Missing,
    /// QEMU got them, and must not get them again.
    Given,
}

/// A message of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToServer {
    /// The head of the source's stream follows, and QEMU's socket comes with it.
    Begin {
        /// Bytes of the head, up to and including the list of RAM blocks.
        prelude_bytes: usize,
    },
    /// Ranges of pages follow. Pages that no such message names are there, or zero.
    Known {
        /// The place of their block in the head's list.
        block: usize,
        /// How many ranges.
        ranges: usize,
        /// What is known of them.
        known: Known,
    },
    /// Everything is known: take what QEMU says from now on.
    Serve {
        /// Whether QEMU's post-copy is paused, and has to go on.
        resume: bool,
    },
    /// Give QEMU missing pages.
    Give {
        /// The place of their block in the head's list.
        block: usize,
        /// The pages, at most [`PAGES_MAX`].
        pages: BlockRange,
        /// Whether they are zero. Their content follows otherwise.
        zero: bool,
    },
    /// The devices are loaded: end the stream, if no page is missing.
    End,
}

/// A message of a page server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToAgent {
    /// It has no QEMU.
    Empty,
    /// Ranges of missing pages follow.
    Missing {
        /// The place of their block in the head's list.
        block: usize,
        /// How many ranges.
        ranges: usize,
    },
    /// It serves QEMU. All missing pages were named before.
    Serves,
    /// The guest waits for missing pages.
    Want {
        /// The place of their block in the head's list.
        block: usize,
        /// The pages.
        pages: BlockRange,
    },
}

/// A message of either side.
pub trait Message: Copy + Sized {
    /// Returns its bytes.
    fn to_bytes(self) -> [u8; MESSAGE_BYTES];
    /// Parses a message.
    fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self>;
    /// Returns the number of bytes that follow it.
    fn content_bytes(self) -> usize;
}

fn message(words: [u64; 4]) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn words(bytes: &[u8; MESSAGE_BYTES]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// Returns the error for bytes without a meaning.
pub(super) fn not_understood() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "not a message of this version of the page server",
    )
}

fn at_most(word: u64, max: usize) -> io::Result<usize> {
    let word = usize::try_from(word).map_err(|_| not_understood())?;
    (word <= max).then_some(word).ok_or_else(not_understood)
}

fn block(word: u64) -> io::Result<usize> {
    at_most(word, REGIONS_MAX)
}

fn flag(word: u64) -> io::Result<bool> {
    Ok(at_most(word, 1)? == 1)
}

fn pages(start: u64, count: u64) -> io::Result<BlockRange> {
    let max = u64::from(u32::MAX);
    let fits = count > 0 && count <= PAGES_MAX && start <= max - count;
    fits.then(|| BlockRange::new(start, count))
        .ok_or_else(not_understood)
}

impl Message for ToServer {
    fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Begin { prelude_bytes } => message([1, prelude_bytes as u64, 0, 0]),
            Self::Known {
                block,
                ranges,
                known,
            } => {
                let given = known == Known::Given;
                message([2, block as u64, ranges as u64, u64::from(given)])
            }
            Self::Serve { resume } => message([3, u64::from(resume), 0, 0]),
            Self::Give { block, pages, zero } => {
                let kind = if zero { 5 } else { 4 };
                message([kind, block as u64, pages.start, pages.count])
            }
            Self::End => message([6, 0, 0, 0]),
        }
    }

    fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self> {
        match words(bytes) {
            [1, prelude_bytes, 0, 0] => Ok(Self::Begin {
                prelude_bytes: at_most(prelude_bytes, PRELUDE_BYTES_MAX)?,
            }),
            [2, of, ranges, given] => Ok(Self::Known {
                block: block(of)?,
                ranges: at_most(ranges, RANGES_MAX)?,
                known: match flag(given)? {
                    true => Known::Given,
                    false => Known::Missing,
                },
            }),
            [3, resume, 0, 0] => Ok(Self::Serve {
                resume: flag(resume)?,
            }),
            [kind @ (4 | 5), of, start, count] => Ok(Self::Give {
                block: block(of)?,
                pages: pages(start, count)?,
                zero: kind == 5,
            }),
            [6, 0, 0, 0] => Ok(Self::End),
            _ => Err(not_understood()),
        }
    }

    fn content_bytes(self) -> usize {
        match self {
            Self::Begin { prelude_bytes } => prelude_bytes,
            Self::Known { ranges, .. } => ranges * RANGE_BYTES,
            Self::Give {
                pages, zero: false, ..
            } => pages.count as usize * BLOCK_SIZE,
            Self::Give { zero: true, .. } | Self::Serve { .. } | Self::End => 0,
        }
    }
}

impl Message for ToAgent {
    fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Empty => message([1, 0, 0, 0]),
            Self::Missing { block, ranges } => message([2, block as u64, ranges as u64, 0]),
            Self::Serves => message([3, 0, 0, 0]),
            Self::Want { block, pages } => message([4, block as u64, pages.start, pages.count]),
        }
    }

    fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self> {
        match words(bytes) {
            [1, 0, 0, 0] => Ok(Self::Empty),
            [2, of, ranges, 0] => Ok(Self::Missing {
                block: block(of)?,
                ranges: at_most(ranges, RANGES_MAX)?,
            }),
            [3, 0, 0, 0] => Ok(Self::Serves),
            [4, of, start, count] => Ok(Self::Want {
                block: block(of)?,
                pages: pages(start, count)?,
            }),
            _ => Err(not_understood()),
        }
    }

    fn content_bytes(self) -> usize {
        match self {
            Self::Missing { ranges, .. } => ranges * RANGE_BYTES,
            Self::Empty | Self::Serves | Self::Want { .. } => 0,
        }
    }
}

/// Appends messages with these ranges; `head` makes the message for a number of ranges.
pub(in crate::memory) fn put_ranges<M: Message>(
    ranges: &[BlockRange],
    head: impl Fn(usize) -> M,
    out: &mut Vec<u8>,
) {
    for part in ranges.chunks(RANGES_MAX) {
        out.extend(head(part.len()).to_bytes());
        for range in part {
            out.extend((range.start as u32).to_le_bytes());
            out.extend((range.count as u32).to_le_bytes());
        }
    }
}

/// Returns the ranges in a message's content.
pub(in crate::memory) fn ranges(content: &[u8]) -> impl Iterator<Item = BlockRange> {
    let words = |bytes: &[u8; RANGE_BYTES]| {
        let both = u64::from_le_bytes(*bytes);
        BlockRange::new(both & u64::from(u32::MAX), both >> 32)
    };
    content.as_chunks().0.iter().map(words)
}

/// Received bytes, of which the last message may be incomplete.
#[derive(Debug, Default)]
pub(in crate::memory) struct Inbox {
    held: Vec<u8>,
    at: usize,
}

impl Inbox {
    pub(in crate::memory) fn fill(&mut self, bytes: &[u8]) {
        self.held.drain(..self.at);
        self.at = 0;
        self.held.extend_from_slice(bytes);
    }

    /// Takes the next whole message, and its content.
    pub(in crate::memory) fn next<M: Message>(&mut self) -> io::Result<Option<(M, &[u8])>> {
        let rest = self.held.get(self.at..).unwrap_or_default();
        let Some((head, rest)) = rest.split_first_chunk() else {
            return Ok(None);
        };
        let message = M::from_bytes(head)?;
        let length = message.content_bytes();
        let Some(content) = rest.get(..length) else {
            return Ok(None);
        };
        self.at += MESSAGE_BYTES + length;
        Ok(Some((message, content)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_their_bytes_and_nothing_else_is_one() {
        let range = BlockRange::new(9, 64);
        for message in [
            ToServer::Begin { prelude_bytes: 700 },
            ToServer::Known {
                block: 3,
                ranges: RANGES_MAX,
                known: Known::Given,
            },
            ToServer::Serve { resume: true },
            ToServer::Give {
                block: 1,
                pages: range,
                zero: false,
            },
            ToServer::Give {
                block: 1,
                pages: range,
                zero: true,
            },
            ToServer::End,
        ] {
            assert_eq!(ToServer::from_bytes(&message.to_bytes()).unwrap(), message);
        }
        for message in [
            ToAgent::Empty,
            ToAgent::Missing {
                block: 2,
                ranges: 1,
            },
            ToAgent::Serves,
            ToAgent::Want {
                block: 2,
                pages: range,
            },
        ] {
            assert_eq!(ToAgent::from_bytes(&message.to_bytes()).unwrap(), message);
        }
        for wrong in [
            [0, 0, 0, 0],
            [1, PRELUDE_BYTES_MAX as u64 + 1, 0, 0],
            [2, 0, RANGES_MAX as u64 + 1, 0],
            [2, 0, 1, 2],
            [2, REGIONS_MAX as u64 + 1, 1, 0],
            [3, 2, 0, 0],
            [4, 0, 0, 65],
            [5, 0, u64::MAX, 1],
            [5, 0, 1, 0],
            [6, 0, 1, 0],
            [7, 0, 0, 0],
        ] {
            ToServer::from_bytes(&message(wrong)).unwrap_err();
        }
        for wrong in [
            [1, 1, 0, 0],
            [2, 0, 1, 1],
            [3, 1, 0, 0],
            [4, 0, 0, 0],
            [5, 0, 0, 0],
        ] {
            ToAgent::from_bytes(&message(wrong)).unwrap_err();
        }
    }

    #[test]
    fn a_message_in_pieces_is_one_message() {
        let given = [BlockRange::new(7, 3), BlockRange::new(1 << 31, 1)];
        let mut bytes = Vec::new();
        put_ranges(
            &given,
            |ranges| ToAgent::Missing { block: 4, ranges },
            &mut bytes,
        );
        bytes.extend(ToAgent::Serves.to_bytes());
        for piece in [1, 5, 32, 47, bytes.len()] {
            let mut inbox = Inbox::default();
            let mut found = Vec::new();
            for part in bytes.chunks(piece) {
                inbox.fill(part);
                while let Some((message, content)) = inbox.next::<ToAgent>().unwrap() {
                    found.push((message, ranges(content).collect::<Vec<_>>()));
                }
            }
            let missing = ToAgent::Missing {
                block: 4,
                ranges: 2,
            };
            assert_eq!(
                found,
                [(missing, given.to_vec()), (ToAgent::Serves, Vec::new())]
            );
        }
    }
}
