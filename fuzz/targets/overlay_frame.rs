//! Fuzzes frames of a network's guests and members: `cargo +nightly fuzz run overlay_frame`.
#![no_main]

#[path = "../src/overlay_frame.rs"]
mod overlay_frame;

libfuzzer_sys::fuzz_target!(|data: &[u8]| _ = overlay_frame::run(data));
