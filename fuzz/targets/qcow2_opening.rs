//! Fuzzes the opening of an image from a guest's owner: `cargo +nightly fuzz run qcow2_opening`.
#![no_main]

#[path = "../src/qcow2_opening.rs"]
mod qcow2_opening;

libfuzzer_sys::fuzz_target!(|data: &[u8]| qcow2_opening::run(data));
