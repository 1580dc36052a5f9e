//! Fuzzes what libvirt's daemons send, and the XML of a domain that arrives:
//! `cargo +nightly fuzz run libvirt`.
#![no_main]

#[path = "../src/libvirt.rs"]
mod libvirt;

libfuzzer_sys::fuzz_target!(|data: &[u8]| libvirt::run(data));
