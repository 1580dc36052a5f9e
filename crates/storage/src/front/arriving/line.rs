//! The messages between the server of an arriving disk and its pump on a Unix socket: 32 bytes
//! each, four little-endian numbers, followed by the content of blocks where a message brings some.
//!
//! ```text
//! pump ──Listed──▶ server            the masks exist: requests follow them
//!      ──Blocks, Zeros──▶            missing blocks
//!      ──Barrier──▶ ... ◀──Reached── all earlier blocks are on the disk, and recorded
//!      ──Unreadable──▶               the source cannot read these
//!      ◀──State, Want, Superseded, Failed, Whole, Broken──
//! ```

use crate::front::message::{message, not_understood, words};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::io;

pub use crate::front::message::MESSAGE_BYTES;

/// Limit on the blocks that one message brings.
pub const BLOCKS_MAX: u64 = CHUNK_BLOCKS;
/// Limit on the blocks that one message names: as many as an engine counts.
const NAMED_MAX: u64 = u32::MAX as u64;

/// A message of a pump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToServer {
    /// The missing blocks are in the file of masks.
    Listed,
    /// The content of these blocks follows.
    Blocks(BlockRange),
    /// These blocks are zero.
    Zeros(BlockRange),
    /// Answer when all earlier messages have been carried out.
    Barrier(u64),
    /// The source cannot read these blocks now.
    Unreadable(BlockRange),
}

/// A message of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToPump {
    /// The server's state; sent first, and after each change.
    State {
        /// Number of missing blocks.
        missing_blocks: u64,
        /// Number of the guest's requests that wait for some.
        waiting: u64,
    },
    /// All messages before this barrier have been carried out.
    Reached(u64),
    /// The guest waits for these blocks.
    Want(BlockRange),
    /// These blocks need not arrive any more.
    Superseded(BlockRange),
    /// Arrived blocks cannot be written, with the system's error number.
    Failed(i32),
    /// No block is missing any more, durably.
    Whole,
    /// Something could not be made durable, with the system's error number: the disk does not count
    /// as complete until the host is restarted.
    Broken(i32),
}

fn range(start: u64, count: u64, count_max: u64) -> io::Result<BlockRange> {
    let fits = count > 0 && count <= count_max && start <= NAMED_MAX - count;
    fits.then(|| BlockRange::new(start, count))
        .ok_or_else(not_understood)
}

fn errno_of(word: u64) -> io::Result<i32> {
    i32::try_from(word).map_err(|_| not_understood())
}

impl ToServer {
    /// Returns the message's bytes.
    pub fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Listed => message([1, 0, 0, 0]),
            Self::Blocks(range) => message([2, range.start, range.count, 0]),
            Self::Zeros(range) => message([3, range.start, range.count, 0]),
            Self::Barrier(number) => message([4, number, 0, 0]),
            Self::Unreadable(range) => message([5, range.start, range.count, 0]),
        }
    }

    /// Parses a message.
    pub fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self> {
        match words(bytes) {
            [1, 0, 0, 0] => Ok(Self::Listed),
            [2, start, count, 0] => Ok(Self::Blocks(range(start, count, BLOCKS_MAX)?)),
            [3, start, count, 0] => Ok(Self::Zeros(range(start, count, BLOCKS_MAX)?)),
            [4, number, 0, 0] => Ok(Self::Barrier(number)),
            [5, start, count, 0] => Ok(Self::Unreadable(range(start, count, NAMED_MAX)?)),
            _ => Err(not_understood()),
        }
    }

    /// Returns the number of content bytes that follow it.
    pub fn content_bytes(self) -> usize {
        match self {
            Self::Blocks(range) => range.count as usize * BLOCK_SIZE,
            _ => 0,
        }
    }
}

impl ToPump {
    /// Returns the message's bytes.
    pub fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::State {
                missing_blocks,
                waiting,
            } => message([1, missing_blocks, waiting, 0]),
            Self::Reached(number) => message([2, number, 0, 0]),
            Self::Want(range) => message([3, range.start, range.count, 0]),
            Self::Superseded(range) => message([4, range.start, range.count, 0]),
            Self::Failed(errno) => message([5, u64::from(errno.unsigned_abs()), 0, 0]),
            Self::Whole => message([6, 0, 0, 0]),
            Self::Broken(errno) => message([7, u64::from(errno.unsigned_abs()), 0, 0]),
        }
    }

    /// Parses a message.
    pub fn from_bytes(bytes: &[u8; MESSAGE_BYTES]) -> io::Result<Self> {
        match words(bytes) {
            [1, missing_blocks, waiting, 0] => Ok(Self::State {
                missing_blocks,
                waiting,
            }),
            [2, number, 0, 0] => Ok(Self::Reached(number)),
            [3, start, count, 0] => Ok(Self::Want(range(start, count, NAMED_MAX)?)),
            [4, start, count, 0] => Ok(Self::Superseded(range(start, count, NAMED_MAX)?)),
            [5, errno, 0, 0] => Ok(Self::Failed(errno_of(errno)?)),
            [6, 0, 0, 0] => Ok(Self::Whole),
            [7, errno, 0, 0] => Ok(Self::Broken(errno_of(errno)?)),
            _ => Err(not_understood()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_their_bytes_and_nothing_else_is_one() {
        let range = BlockRange::new(9, 64);
        for message in [
            ToServer::Listed,
            ToServer::Blocks(range),
            ToServer::Zeros(range),
            ToServer::Barrier(7),
            ToServer::Unreadable(BlockRange::new(0, 1 << 20)),
        ] {
            assert_eq!(ToServer::from_bytes(&message.to_bytes()).unwrap(), message);
        }
        for message in [
            ToPump::State {
                missing_blocks: 5,
                waiting: 2,
            },
            ToPump::Reached(7),
            ToPump::Want(range),
            ToPump::Superseded(range),
            ToPump::Failed(28),
            ToPump::Whole,
            ToPump::Broken(5),
        ] {
            assert_eq!(ToPump::from_bytes(&message.to_bytes()).unwrap(), message);
        }
        for wrong in [
            [0, 0, 0, 0],
            [1, 1, 0, 0],
            [2, 0, 0, 0],
            [2, 0, 65, 0],
            [3, u64::MAX, 1, 0],
            [5, 0, 1 << 33, 0],
            [6, 0, 0, 0],
        ] {
            ToServer::from_bytes(&message(wrong)).unwrap_err();
        }
        for wrong in [
            [3, 0, 0, 0],
            [5, u64::MAX, 0, 0],
            [6, 1, 0, 0],
            [7, 1 << 40, 0, 0],
            [8, 0, 0, 0],
        ] {
            ToPump::from_bytes(&message(wrong)).unwrap_err();
        }
    }
}
