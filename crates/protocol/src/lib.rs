//! The protocol between two agents: ids, units, limits, messages and their versions.
//!
//! This crate holds only data and does no I/O; [`wire`] and [`piece`] define the bytes of every
//! message, and `docs/wire.md` is the normative description.

pub mod disk;
pub mod files;
pub mod flows;
pub mod guest;
pub mod hardware;
pub mod held_frames;
pub mod id;
pub mod limits;
pub mod machine;
pub mod message;
pub mod piece;
pub mod port;
pub mod region;
pub mod replica;
pub mod terminal;
pub mod units;
pub mod versions;
pub mod wire;

pub use id::{
    Attempt, AttemptId, Epoch, Generation, HostId, INCARNATION_BYTES, Incarnation, MigrationId,
    StoreId,
};
pub use region::{BLOCK_SIZE, BlockRange, RegionId, RegionKind, RegionSpec};
