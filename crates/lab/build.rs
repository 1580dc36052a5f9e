//! Builds the arena, which is the whole user space of the `tiny` guest, as a static program.
//!
//! It has no dependencies, so the compiler alone is enough: no second target has to be installed
//! and nothing is fetched. `lab` carries the program in itself (`src/guest/initramfs.rs`).

use std::env;
use std::path::Path;
use std::process::{Command, exit};

fn main() {
    println!("cargo::rerun-if-changed=arena/src");
    let variable = |name: &str| env::var(name).unwrap_or_else(|_| fail(&format!("{name} not set")));
    let status = Command::new(variable("RUSTC"))
        .args([
            "--crate-name",
            "arena",
            "--edition",
            "2024",
            "--cap-lints",
            "allow",
        ])
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
        .arg(Path::new(&variable("OUT_DIR")).join("arena"))
        .arg("arena/src/main.rs")
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("the arena could not be compiled: {status}")),
        Err(error) => fail(&format!("rustc could not be started: {error}")),
    }
}

fn fail(problem: &str) -> ! {
    println!("cargo::error={problem}");
    exit(1)
}
