//! Fuzzes what a device of a parcel can hold: `cargo +nightly fuzz run parcel`.
#![no_main]

#[path = "../src/parcel.rs"]
mod parcel;

libfuzzer_sys::fuzz_target!(|data: &[u8]| parcel::run(data));
