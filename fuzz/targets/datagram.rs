//! Fuzzes datagrams from anyone: `cargo +nightly fuzz run datagram`.
#![no_main]

#[path = "../src/datagram.rs"]
mod datagram;

libfuzzer_sys::fuzz_target!(|data: &[u8]| datagram::run(data));
