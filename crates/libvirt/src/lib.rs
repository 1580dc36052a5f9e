//! Guests of libvirt, by its own RPC protocol over a local socket.
//!
//! libvirt's C library does not offer the single phases of a migration to its users, and they are
//! what Longhaul needs: between them it decides which host may run the guest. So this crate speaks
//! the protocol of `libvirtd` and `virtqemud` itself: about thirty procedures of the programs
//! `remote` and `qemu` (libvirt's `remote_protocol.x`, `qemu_protocol.x`, `virnetprotocol.x`).
//! Published procedures do not change.
//!
//! | module | owns |
//! |---|---|
//! | [`xdr`] | the encoding of arguments and results (RFC 4506) |
//! | [`message`] | frames and their headers |
//! | [`connection`] | one connection to a daemon: calls, their answers, events |
//! | `capabilities` | what a daemon can do |
//! | [`domain`] | domains: which there are, their XML, their state |
//! | [`migration`] | the phases of a migration, version 3 |
//! | [`monitor`] | QMP with a domain's QEMU |
//! | `sockets` | sockets that a confined QEMU may use |
//! | [`xml`] | what Longhaul knows of a domain's XML |
//! | [`manager`] | libvirt as a manager of guests |

mod capabilities;
pub mod connection;
pub mod domain;
pub mod manager;
pub mod message;
pub mod migration;
pub mod monitor;
mod notes;
mod sockets;
pub mod xdr;
pub mod xml;

pub use capabilities::{DomainCapabilities, LaunchedWith};
pub use connection::{Connection, LibvirtError, Refusal};
pub use domain::{Domain, DomainState};
