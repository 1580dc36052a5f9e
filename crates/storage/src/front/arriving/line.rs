//! What a server of an arriving disk and its pump say to each other, on a Unix socket: 32 bytes each, four
//! little-endian numbers, with the content of blocks behind those that bring some.
//!
//! ```text
//! pump ──Listed──▶ server            the masks are there: requests are done as they say
//!      ──Blocks, Zeros──▶            what was missing
//!      ──Barrier──▶ ... ◀──Reached── all that came before is on the disk, and noted
//!      ──Unreadable──▶               the source cannot read these
//!      ◀──State, Want, Superseded, Failed, Whole, Broken──
//! ```

use crate::front::message::{message, not_understood, words};
use longhaul_engine::chunk::CHUNK_BLOCKS;
use longhaul_protocol::{BLOCK_SIZE, BlockRange};
use std::io;

pub use crate::front::message::MESSAGE_BYTES;

/// Blocks that one message brings, at most.
pub const BLOCKS_MAX: u64 = CHUNK_BLOCKS;
/// Blocks that one message names, at most: as many as an engine counts.
const NAMED_MAX: u64 = u32::MAX as u64;

/// What a pump says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToServer {
    /// What is missing stands in the file of masks.
    Listed,
    /// The content of these blocks follows.
    Blocks(BlockRange),
    /// These blocks are zero.
    Zeros(BlockRange),
    /// Say when all of this was done.
    Barrier(u64),
    /// The source cannot read these blocks now.
    Unreadable(BlockRange),
}

/// What a server says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToPump {
    /// How it is; said first, and when it has changed.
    State {
        /// Blocks that are missing.
        missing_blocks: u64,
        /// Requests of the guest that wait for some.
        waiting: u64,
    },
    /// Everything from before this barrier was done.
    Reached(u64),
    /// The guest waits for these blocks.
    Want(BlockRange),
    /// These blocks need not come any more.
    Superseded(BlockRange),
    /// What came cannot be written: an error of the system, by its number.
    Failed(i32),
    /// Nothing is missing any more, durably.
    Whole,
    /// Something could not be made durable, for this error of the system: nothing will be whole until the host is
    /// started anew.
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
    /// As it travels.
    pub fn to_bytes(self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Listed => message([1, 0, 0, 0]),
            Self::Blocks(range) => message([2, range.start, range.count, 0]),
            Self::Zeros(range) => message([3, range.start, range.count, 0]),
            Self::Barrier(number) => message([4, number, 0, 0]),
            Self::Unreadable(range) => message([5, range.start, range.count, 0]),
        }
    }

    /// What came.
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

    /// Bytes of content that follow it.
    pub fn content_bytes(self) -> usize {
        match self {
            Self::Blocks(range) => range.count as usize * BLOCK_SIZE,
            _ => 0,
        }
    }
}

impl ToPump {
    /// As it travels.
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

    /// What came.
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
