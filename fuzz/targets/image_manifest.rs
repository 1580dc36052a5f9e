//! A manifest of a base image, as a store could give it: `cargo +nightly fuzz run image_manifest`.
#![no_main]

#[path = "../src/image_manifest.rs"]
mod image_manifest;

libfuzzer_sys::fuzz_target!(|data: &[u8]| image_manifest::run(data));
