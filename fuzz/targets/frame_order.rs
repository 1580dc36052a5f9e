//! Fuzzes sequences of dependent frames: `cargo +nightly fuzz run frame_order`.
#![no_main]

#[path = "../src/frame_order.rs"]
mod frame_order;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    frame_order::run(data);
});
