//! What two agents say to each other: ids, units, limits, messages and their versions.
//!
//! Everything here is data. Nothing in this crate does I/O; the bytes of every message are given
//! by [`wire`] and [`piece`], and `docs/wire.md` is the normative description.

pub mod disk;
pub mod files;
pub mod guest;
pub mod hardware;
pub mod id;
pub mod limits;
pub mod machine;
pub mod message;
pub mod piece;
pub mod region;
pub mod units;
pub mod wire;

pub use id::{Attempt, Epoch, Generation, HostId, INCARNATION_BYTES, Incarnation, MigrationId};
pub use region::{BLOCK_SIZE, BlockRange, RegionId, RegionSpec};
