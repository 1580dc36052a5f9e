//! Runs the fuzz targets on their seeds (`fuzz/seeds`), so that they need no nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/image_manifest.rs"]
mod image_manifest;
#[path = "../../../fuzz/src/image_stripe.rs"]
mod image_stripe;

use std::path::Path;

fn replay(target: &str, seeds_min: usize, run: fn(&[u8])) {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
    let mut seen = 0;
    for entry in std::fs::read_dir(seeds.join(target)).unwrap() {
        run(&std::fs::read(entry.unwrap().path()).unwrap());
        seen += 1;
    }
    assert!(seen >= seeds_min, "{seen} seeds of {target}");
}

#[test]
fn seeds_of_manifests_are_answered() {
    replay("image_manifest", 15, image_manifest::run);
}

#[test]
fn seeds_of_stripes_are_answered() {
    replay("image_stripe", 13, image_stripe::run);
}
