//! Runs the fuzz targets on their seeds (`fuzz/seeds`), so that they need no nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/arriving.rs"]
mod arriving;
#[path = "../../../fuzz/src/content_index.rs"]
mod content_index;
#[path = "../../../fuzz/src/journal.rs"]
mod journal;
#[path = "../../../fuzz/src/nbd.rs"]
mod nbd;
#[path = "../../../fuzz/src/qcow2_header.rs"]
mod qcow2_header;
#[path = "../../../fuzz/src/qcow2_opening.rs"]
mod qcow2_opening;

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
fn seeds_of_arriving_disks_are_answered() {
    replay("arriving", 8, arriving::run);
}

#[test]
fn seeds_of_content_indices_are_answered() {
    replay("content_index", 16, content_index::run);
}

#[test]
fn seeds_of_journals_are_answered() {
    replay("journal", 8, journal::run);
}

#[test]
fn seeds_of_nbd_clients_are_answered() {
    replay("nbd", 10, nbd::run);
}

#[test]
fn seeds_of_qcow2_headers_are_answered() {
    replay("qcow2_header", 8, qcow2_header::run);
}

#[test]
fn seeds_of_qcow2_images_that_are_opened_are_answered() {
    replay("qcow2_opening", 6, qcow2_opening::run);
}
