//! The NBD server under clients that others wrote, and under clients that mean it ill.
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
mod waiting;
