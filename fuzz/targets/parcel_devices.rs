//! Fuzzes all devices of a parcel at once: `cargo +nightly fuzz run parcel_devices`.
#![no_main]

#[path = "../src/parcel_devices.rs"]
mod parcel_devices;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    parcel_devices::run(data);
});
