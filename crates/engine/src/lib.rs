//! The replication engine: source, destination, strategies, stop point and handover.
//!
//! The engine does no I/O and has no clock. It knows nothing of QEMU, disks or QUIC; where regions
//! differ, the difference is data of the region.

mod block_map;
pub mod choose;
pub mod chunk;
mod content_index;
pub mod destination;
pub mod forecast;
pub mod gang;
pub mod handover;
mod overwriting;
pub mod pace;
mod predict;
pub mod presence;
mod regions;
pub mod remaining;
mod rhythm;
mod share;
pub mod source;
pub mod stop;
pub mod strategy;
