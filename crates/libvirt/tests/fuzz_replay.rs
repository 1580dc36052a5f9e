//! Replays the inputs of the fuzz target.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../../fuzz/src/libvirt.rs"]
mod libvirt;

#[test]
fn inputs_of_the_fuzz_target() {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/libvirt");
    let entries = std::fs::read_dir(seeds).unwrap();
    let inputs = entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    assert!(inputs.map(|input| libvirt::run(&input)).count() > 0);
}
