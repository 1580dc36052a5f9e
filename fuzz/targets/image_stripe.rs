//! Fuzzes a stripe of a base image from a store: `cargo +nightly fuzz run image_stripe`.
#![no_main]

#[path = "../src/image_stripe.rs"]
mod image_stripe;

libfuzzer_sys::fuzz_target!(|data: &[u8]| image_stripe::run(data));
