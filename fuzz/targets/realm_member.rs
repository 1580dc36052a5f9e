//! Fuzzes the file in which a host keeps its realm: `cargo +nightly fuzz run realm_member`.
#![no_main]

#[path = "../src/realm_member.rs"]
mod realm_member;

libfuzzer_sys::fuzz_target!(|data: &[u8]| realm_member::run(data));
