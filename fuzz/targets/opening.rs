//! The first bytes on a connection or stream, as a peer could send them:
//! `cargo +nightly fuzz run opening`.
#![no_main]

#[path = "../src/opening.rs"]
mod opening;

libfuzzer_sys::fuzz_target!(|data: &[u8]| opening::run(data));
