//! Fuzzes datagrams of the frame plane: `cargo +nightly fuzz run overlay_datagram`.
#![no_main]

#[path = "../src/overlay_datagram.rs"]
mod overlay_datagram;

libfuzzer_sys::fuzz_target!(|data: &[u8]| _ = overlay_datagram::run(data));
