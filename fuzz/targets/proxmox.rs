//! Fuzzes the file of an arriving guest of Proxmox VE, and the names of its volumes:
//! `cargo +nightly fuzz run proxmox`.
#![no_main]

#[path = "../src/proxmox.rs"]
mod proxmox;

libfuzzer_sys::fuzz_target!(|data: &[u8]| proxmox::run(data));
