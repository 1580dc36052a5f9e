//! Fuzzes a frame of blocks from a peer: `cargo +nightly fuzz run frame_decode`.
#![no_main]

#[path = "../src/frame_decode.rs"]
mod frame_decode;

libfuzzer_sys::fuzz_target!(|data: &[u8]| frame_decode::run(data));
