//! Fuzzes rendezvous connections over TCP: `cargo +nightly fuzz run rendezvous_tcp`.
#![no_main]

#[path = "../src/rendezvous_tcp.rs"]
mod rendezvous_tcp;

libfuzzer_sys::fuzz_target!(|data: &[u8]| rendezvous_tcp::run(data));
