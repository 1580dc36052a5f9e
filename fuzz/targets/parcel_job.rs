//! Fuzzes what an export keeps in its folder: `cargo +nightly fuzz run parcel_job`.
#![no_main]

#[path = "../src/parcel_job.rs"]
mod parcel_job;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    parcel_job::run(data);
});
