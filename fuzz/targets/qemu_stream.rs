//! Fuzzes QEMU's migration stream: `cargo +nightly fuzz run qemu_stream`.
#![no_main]

#[path = "../src/qemu_stream.rs"]
mod qemu_stream;

libfuzzer_sys::fuzz_target!(|data: &[u8]| qemu_stream::run(data));
