//! Fuzzes signals and probes of paths: `cargo +nightly fuzz run reach`.
#![no_main]

#[path = "../src/reach.rs"]
mod reach;

libfuzzer_sys::fuzz_target!(|data: &[u8]| reach::run(data));
