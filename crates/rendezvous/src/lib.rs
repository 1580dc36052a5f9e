//! The rendezvous server: introduces the hosts of realms to each other and relays between them.
//!
//! ```text
//! UDP socket ─┬─ relayed datagrams ── judged, forwarded in place (GRO in, GSO out)
//!             ├─ STUN ── answered
//!             └─ QUIC ─┐
//! TCP socket ── TLS ───┴─ messages ── longhaul_realm::server::Server ── actions
//!                                          └── records ── SQLite, one thread ── durable
//! ```
//!
//! `docs/rendezvous.md` is the protocol, `longhaul_realm::server` its state machine. What a lock
//! guards here is that state machine: each message and each batch of relayed datagrams takes it
//! once.

mod connection;
mod others;
mod server;
mod shared;
mod store;

pub use longhaul_realm::server::Limits;
pub use server::{Options, Rendezvous, StartError};
pub use store::{STORE_FILE, StoreError, backup};
