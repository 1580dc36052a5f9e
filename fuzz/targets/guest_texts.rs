//! Fuzzes texts about a guest that something else started: `cargo +nightly fuzz run guest_texts`.
#![no_main]

#[path = "../src/guest_texts.rs"]
mod guest_texts;

libfuzzer_sys::fuzz_target!(|data: &[u8]| guest_texts::run(data));
