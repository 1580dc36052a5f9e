//! The fuzz target on its seeds (`fuzz/seeds`), so that no nightly compiler is needed for it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/journal.rs"]
mod journal;

use std::path::Path;

#[test]
fn seeds_of_journals_are_answered() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/journal");
    let mut seeds = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        journal::run(&std::fs::read(entry.unwrap().path()).unwrap());
        seeds += 1;
    }
    assert!(seeds >= 8, "{seeds} seeds");
}
