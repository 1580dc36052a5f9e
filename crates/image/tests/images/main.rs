//! Tests images in repositories in folders and in a real S3 server, and disks that are read while
//! they are fetched.
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
