//! Fuzzes the input of an arriving disk's server: `cargo +nightly fuzz run arriving`.
#![no_main]

#[path = "../src/arriving.rs"]
mod arriving;

libfuzzer_sys::fuzz_target!(|data: &[u8]| arriving::run(data));
