//! Fuzzes QEMU's return path: `cargo +nightly fuzz run return_path`.
#![no_main]

#[path = "../src/return_path.rs"]
mod return_path;

libfuzzer_sys::fuzz_target!(|data: &[u8]| return_path::run(data));
