//! Runs the fuzz targets on their seeds (`fuzz/seeds`), so that they need no nightly compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../fuzz/src/qemu_stream.rs"]
mod qemu_stream;
#[path = "../../../fuzz/src/return_path.rs"]
mod return_path;

use std::path::Path;

fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let mut seeds = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        run(&std::fs::read(entry.unwrap().path()).unwrap());
        seeds += 1;
    }
    assert!(seeds >= 4, "{target}: {seeds} seeds");
}

#[test]
fn seeds_of_streams_are_answered() {
    replay("qemu_stream", qemu_stream::run);
}

#[test]
fn seeds_of_return_paths_are_answered() {
    replay("return_path", return_path::run);
}
