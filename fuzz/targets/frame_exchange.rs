//! Fuzzes frames between a source and a destination that differ:
//! `cargo +nightly fuzz run frame_exchange`.
#![no_main]

#[path = "../src/frame_exchange.rs"]
mod frame_exchange;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    frame_exchange::run(data);
});
