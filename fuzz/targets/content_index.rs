//! Fuzzes a content index from a disk: `cargo +nightly fuzz run content_index`.
#![no_main]

#[path = "../src/content_index.rs"]
mod content_index;

libfuzzer_sys::fuzz_target!(|data: &[u8]| content_index::run(data));
