//! Fuzzes what a page server is told: `cargo +nightly fuzz run page_server`.
#![no_main]

#[path = "../src/page_server.rs"]
mod page_server;

libfuzzer_sys::fuzz_target!(|data: &[u8]| page_server::run(data));
