//! Tests `longhaul doctor` and its self-test: real moves on this machine, and no remains, however
//! it ends.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{command, qemu, qemu_table};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Returns a folder for all temporary files, with a configuration in it.
fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("agent.toml");
    let text = format!("{}[qemu.emulators]\nqemu = {:?}\n", qemu_table(), qemu());
    std::fs::write(&config, text).unwrap();
    std::fs::create_dir(folder.path().join("t")).unwrap();
    (folder, config)
}

fn doctor(folder: &Path, config: &Path, more: &[&str]) -> Command {
    let mut command = command(&folder.join("no-agent.sock"));
    command
        .env("TMPDIR", folder.join("t"))
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .args(["doctor", "--config"])
        .arg(config)
        .args(more);
    command
}

/// Fails when a file or process of an ended test still exists.
fn nothing_is_left(folder: &Path) {
    let left: Vec<_> = std::fs::read_dir(folder.join("t")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let name = folder.display().to_string();
    for entry in std::fs::read_dir("/proc").unwrap() {
        let line = std::fs::read(entry.unwrap().path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        assert!(!line.contains(&name), "{line}");
    }
}

#[test]
fn the_self_test_moves_its_guest_and_leaves_nothing() {
    let (folder, config) = folder();
    let test = ["--self-test", "--moves", "2"];
    let output = doctor(folder.path(), &config, &test).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}{errors}");
    assert!(text.contains("2 of 2 moves verified"), "{text}");
    assert_eq!(text.matches("compared equal").count(), 2, "{text}");
    nothing_is_left(folder.path());
}

#[test]
fn an_interrupted_self_test_leaves_nothing() {
    let (folder, config) = folder();
    let test = ["--self-test", "--moves", "1000"];
    let mut child = doctor(folder.path(), &config, &test)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The second line is the first move; the next is under way.
    let seen: Vec<String> = lines.take(2).map(Result::unwrap).collect();
    assert!(seen[1].contains("move  1/1000"), "{seen:?}");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(common::wait(&mut child).code(), Some(130));
    nothing_is_left(folder.path());
}

#[test]
fn the_doctor_names_what_is_wrong_and_what_to_do() {
    let (folder, config) = folder();
    let output = doctor(folder.path(), &config, &[]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // No agent answers: that is a fault, reported with its remedy.
    assert_eq!(output.status.code(), Some(1), "{text}");
    for expected in [
        "✓ configuration",
        "✓ QEMU",
        "accelerator",
        "✗ agent",
        "to do:",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    nothing_is_left(folder.path());
}
