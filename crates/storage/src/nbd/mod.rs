//! The NBD server that exports disks to QEMU on a Unix socket while they move.
//!
//! The protocol is that of <https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md>,
//! whose sections the comments name. [`handshake`] and [`request`] are pure; [`connection`] moves
//! bytes between them and a [`crate::disk::Disk`], over any stream; the [`Server`] owns the sockets
//! and threads. docs/disks.md lists the features that are offered and those that are not.

pub mod connection;
pub mod handshake;
pub mod request;
mod server;
mod turns;

pub use handshake::ExportName;
pub use server::{Export, Limits, Notice, Server, ServerError};
pub(crate) use turns::client_is_gone;
pub use turns::others_go_on;
