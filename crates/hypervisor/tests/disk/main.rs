//! Tests inserting the disk export below a disk in use, and removing it, with real QEMUs.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod arriving;
mod changed;
#[path = "../common/mod.rs"]
mod common;
mod direct;
mod forms;
mod growing;
mod held;
mod load;
#[path = "../payload/mod.rs"]
mod payload;
mod plain;
mod setting;
mod supervised;
