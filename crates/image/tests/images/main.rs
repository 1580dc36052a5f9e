//! Images in repositories in folders and in a real S3 server, and disks that read them as they come.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod bases;
mod common;
mod disk;
mod folder;
mod qemu;
mod repository;
mod s3;
