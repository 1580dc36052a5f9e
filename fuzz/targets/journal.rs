//! Fuzzes a journal from a disk: `cargo +nightly fuzz run journal`.
#![no_main]

#[path = "../src/journal.rs"]
mod journal;

libfuzzer_sys::fuzz_target!(|data: &[u8]| journal::run(data));
