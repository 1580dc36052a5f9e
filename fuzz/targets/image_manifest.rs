//! Fuzzes a manifest of a base image from a store: `cargo +nightly fuzz run image_manifest`.
#![no_main]

#[path = "../src/image_manifest.rs"]
mod image_manifest;

libfuzzer_sys::fuzz_target!(|data: &[u8]| image_manifest::run(data));
