//! Fuzzes what arrives in a realm: `cargo +nightly fuzz run rendezvous`.
#![no_main]

#[path = "../src/rendezvous.rs"]
mod rendezvous;

libfuzzer_sys::fuzz_target!(|data: &[u8]| rendezvous::run(data));
