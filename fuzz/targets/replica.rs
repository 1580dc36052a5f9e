//! Fuzzes what a host keeps of another one's disks, and what that one sends:
//! `cargo +nightly fuzz run replica`.
#![no_main]

#[path = "../src/replica.rs"]
mod replica;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    replica::run(data);
});
