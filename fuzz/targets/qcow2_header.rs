//! Fuzzes the header of an image from a guest's owner: `cargo +nightly fuzz run qcow2_header`.
#![no_main]

#[path = "../src/qcow2_header.rs"]
mod qcow2_header;

libfuzzer_sys::fuzz_target!(|data: &[u8]| qcow2_header::run(data));
