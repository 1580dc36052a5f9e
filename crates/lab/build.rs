//! Builds the user space of the `tiny` guest as static programs: the arena, the program that runs a
//! history on the guest's disks, and the one that writes files.
//!
//! They have no dependencies, so the compiler alone is sufficient: no second target must be
//! installed and nothing is downloaded. `lab` embeds the programs (`src/guest/initramfs.rs`).

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=arena/src");
    println!("cargo::rerun-if-changed=files/src");
    println!("cargo::rerun-if-changed=history/src");
    let output = PathBuf::from(variable("OUT_DIR"));
    compile("arena", "arena/src/main.rs", &output.join("arena"), &[]);
    compile("files", "files/src/main.rs", &output.join("files"), &[]);
    let library = output.join("liblonghaul_history.rlib");
    let kind = ["--crate-type".into(), "lib".into()];
    compile("longhaul_history", "history/src/lib.rs", &library, &kind);
    let mut with_library = OsString::from("longhaul_history=");
    with_library.push(&library);
    let external = ["--extern".into(), with_library];
    compile(
        "history",
        "history/src/main.rs",
        &output.join("history"),
        &external,
    );
}

/// Compiles a crate for guests, whose processors may be old and which have no libraries.
fn compile(name: &str, source: &str, output: &Path, more: &[OsString]) {
    let status = Command::new(variable("RUSTC"))
        .args(["--crate-name", name, "--edition", "2024", "--cap-lints"])
        .arg("allow")
        .args([
            "-C",
            "opt-level=3",
            "-C",
            "panic=abort",
            "-C",
            "strip=symbols",
        ])
        .args([
            "-C",
            "target-feature=+crt-static",
            "-C",
            "relocation-model=static",
        ])
        .args(["--target", &variable("TARGET"), "-o"])
        .arg(output)
        .args(more)
        .arg(source)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("{name} could not be compiled: {status}")),
        Err(error) => fail(&format!("rustc could not be started: {error}")),
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| fail(&format!("{name} not set")))
}

fn fail(problem: &str) -> ! {
    println!("cargo::error={problem}");
    exit(1)
}
