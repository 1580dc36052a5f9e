//! A journal, as a disk could hold it: `cargo +nightly fuzz run journal`.
#![no_main]

#[path = "../src/journal.rs"]
mod journal;

libfuzzer_sys::fuzz_target!(|data: &[u8]| journal::run(data));
