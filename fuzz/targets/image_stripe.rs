//! A stripe of a base image, as a store could give it: `cargo +nightly fuzz run image_stripe`.
#![no_main]

#[path = "../src/image_stripe.rs"]
mod image_stripe;

libfuzzer_sys::fuzz_target!(|data: &[u8]| image_stripe::run(data));
