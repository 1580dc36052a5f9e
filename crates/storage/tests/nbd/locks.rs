//! Tests this crate's locks on images against QEMU's.

use crate::common::{output, program, succeed, wait_until};
use longhaul_storage::disk::{ExportSize, ImageLock, ImageUse, RawDisk};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A `qemu-io` that keeps the image open until it is ended.
struct Holder(Child);

impl Holder {
    fn new(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Its answer to a command shows that the image is open.
        child
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"length\n")
            .unwrap();
        let mut answer = String::new();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
        lines.read_line(&mut answer).unwrap();
        assert!(answer.contains("MiB"), "{answer}");
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn image(folder: &Path, format: &str) -> Option<std::path::PathBuf> {
    let path = folder.join(format);
    let create = ["create", "-q", "-f", format];
    succeed(program("qemu-img")?.args(create).arg(&path).arg("1M"));
    Some(path)
}

fn kinds() -> [(&'static str, ImageUse); 2] {
    [("raw", ImageUse::Raw), ("qcow2", ImageUse::Growing)]
}

#[test]
fn a_qemu_does_not_open_an_image_that_we_have_locked() {
    let folder = tempfile::tempdir().unwrap();
    for (format, image_use) in kinds() {
        let Some(path) = image(folder.path(), format) else {
            return;
        };
        let write = |shared: bool| {
            let mut command = program("qemu-io").unwrap();
            command.args(["-f", format, "-c", "write 0 512"]);
            output(command.args(shared.then_some("-U")).arg(&path))
        };
        let disk = RawDisk::open(&path, ExportSize::OfFile).unwrap();
        let lock = ImageLock::alone(disk.file(), image_use).unwrap();
        let (opened, why) = write(false);
        assert!(
            !opened && why.contains("Failed to get \"write\" lock"),
            "{why}"
        );
        // Not even one that shares all permissions it can.
        assert!(!write(true).0);
        // The lock can be released although the file stays open.
        drop(lock);
        let (opened, why) = write(false);
        assert!(opened, "{why}");
    }
}

#[test]
fn an_image_that_a_qemu_has_open_is_not_taken() {
    let folder = tempfile::tempdir().unwrap();
    for (format, image_use) in kinds() {
        let Some(path) = image(folder.path(), format) else {
            return;
        };
        let disk = RawDisk::open(&path, ExportSize::OfFile).unwrap();
        let holder = Holder::new(program("qemu-io").unwrap().args(["-f", format]).arg(&path));
        let refusal = ImageLock::alone(disk.file(), image_use).unwrap_err();
        assert!(
            refusal
                .to_string()
                .contains("somebody else uses this disk image")
        );
        // It can be taken beside the guest's own QEMU; from then on no other QEMU gets it.
        let lock = ImageLock::beside(disk.file(), image_use).unwrap();
        lock.check().unwrap_err();
        drop(holder);
        wait_until(|| lock.check().is_ok());
        let mut second = program("qemu-io").unwrap();
        let second = second.args(["-f", format, "-c", "write 0 512"]).arg(&path);
        assert!(!output(second).0);
    }
}
