//! Tests the client of libvirt's protocol with libvirt's own daemons and client. Needs root.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod agents;
mod confined;
mod deaths;
mod following;
mod modular;
#[path = "../common/monitor.rs"]
mod monitor;
mod newest;
mod people;
mod phases;
mod stage;
