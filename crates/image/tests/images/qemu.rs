//! Tests QEMU's tools on an overlay of an incomplete image, as a guest's disk will be.

use crate::common::{PATIENCE, STRIPE, Told, stripe};
use longhaul_image::ImageDisk;
use longhaul_storage::nbd::{Export, ExportName, Limits, Server};
use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::Arc;

const NAME: &str = "5d41402abc4b2a76b9719d911017c592";

/// Returns a program of QEMU's; `None` (with a message) where it is missing and may be.
fn program(name: &str) -> Option<Command> {
    if Command::new(name).arg("--version").output().is_ok() {
        return Some(Command::new(name));
    }
    let required = std::env::var_os("LONGHAUL_LAB_REQUIRE_ALL").is_some_and(|value| value != "0");
    assert!(!required, "no {name} here: scripts/install lab");
    eprintln!("skipped: no {name} here (scripts/install lab)");
    None
}

fn succeed(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
}

#[test]
fn an_overlay_reads_the_image_through_the_front_end_and_keeps_what_is_written() {
    let (Some(mut create), Some(mut io)) = (program("qemu-img"), program("qemu-io")) else {
        return;
    };
    let told = Told::new();
    let id = told.import("ab cd");
    let folder = told.folder.path();
    let cache = folder.join("cache");
    let disk = ImageDisk::open(told.repository.clone(), id, &cache, PATIENCE, |notice| {
        panic!("{notice:?}");
    });
    let disk = Arc::new(disk.unwrap());
    let exports = vec![Export {
        name: ExportName::new(NAME.to_owned()).unwrap(),
        disk: disk.clone(),
    }];
    let listener = UnixListener::bind(folder.join("nbd")).unwrap();
    let server = Server::start(listener, exports, Limits::default(), |_| {}).unwrap();
    let base = format!("nbd+unix:///{NAME}?socket={}", folder.join("nbd").display());
    let overlay = folder.join("guest.qcow2");
    succeed(
        create
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base])
            .arg(&overlay),
    );

    // A part of a cluster is written: the rest of it is read from the image.
    io.args(["-f", "qcow2", "-c", "write -q -P 0x77 300k 3k"])
        .arg(&overlay);
    succeed(&mut io);
    assert_eq!(disk.fetched_bytes(), STRIPE as u64, "only what was needed");
    let out = folder.join("out.raw");
    let convert = ["convert", "-f", "qcow2", "-O", "raw"];
    succeed(
        Command::new("qemu-img")
            .args(convert)
            .args([&overlay, &out]),
    );
    let mut expected: Vec<u8> = b"ab cd".iter().flat_map(|letter| stripe(*letter)).collect();
    expected[300 << 10..303 << 10].fill(0x77);
    assert!(fs::read(&out).unwrap() == expected);
    assert_eq!(disk.fetched_bytes(), 4 * STRIPE as u64);
    drop(server);

    // The image is complete: the file takes its place.
    let whole = cache.join(format!("{id}.raw"));
    succeed(
        Command::new("qemu-img")
            .args(["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b"])
            .args([&whole, &overlay]),
    );
    succeed(
        Command::new("qemu-img")
            .args(convert)
            .args([&overlay, &out]),
    );
    assert!(fs::read(&out).unwrap() == expected);
}
