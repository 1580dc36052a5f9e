//! Fuzzes a client of the disk server: `cargo +nightly fuzz run nbd`.
#![no_main]

#[path = "../src/nbd.rs"]
mod nbd;

libfuzzer_sys::fuzz_target!(|data: &[u8]| nbd::run(data));
