//! Tests parcels of files: whole, with devices that are lost or damaged, and interrupted.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod block;
mod fuzz_replay;
mod interrupted;
mod jobs;
mod lost;
mod machine;
mod moments;
mod python;
mod replicas;
mod stage;
mod stale;
mod steps;
