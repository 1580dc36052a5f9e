//! Tests the NBD server with foreign clients and with hostile ones.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod client;
mod common;
mod disk_errors;
mod front;
mod handshake;
mod hostile;
mod locks;
mod requests;
mod tools;
mod tracking;
mod waiting;
