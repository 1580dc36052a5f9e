//! Fuzzes the first bytes on a connection or stream from a peer: `cargo +nightly fuzz run opening`.
#![no_main]

#[path = "../src/opening.rs"]
mod opening;

libfuzzer_sys::fuzz_target!(|data: &[u8]| opening::run(data));
