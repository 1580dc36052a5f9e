//! Tests guests that stopped for a reason of their own, and QEMUs with settings of their own: both
//! are unchanged after an aborted move.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
mod payload;

use common::{MACHINES, does_not_load, emulators, machines};
use longhaul_hypervisor::memory::{Continuation, Event, Incoming, Outgoing, Settings, resume};
use payload::{Payload, Qemu, Spec};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);
/// Returns 16-bit code that writes to an I/O port: `mov dx, port; mov a, value; out dx, a`.
fn out_byte(port: u16, value: u8) -> Vec<u8> {
    let [low, high] = port.to_le_bytes();
    vec![0xba, low, high, 0xb0, value, 0xee]
}

fn out_word(port: u16, value: u16) -> Vec<u8> {
    let ([low, high], [v0, v1]) = (port.to_le_bytes(), value.to_le_bytes());
    vec![0xba, low, high, 0xb8, v0, v1, 0xef]
}

fn out_long(port: u16, value: u32) -> Vec<u8> {
    let ([low, high], value) = (port.to_le_bytes(), value.to_le_bytes());
    let mut code = vec![0xba, low, high, 0x66, 0xb8];
    code.extend(value);
    code.extend([0x66, 0xef]);
    code
}

/// Returns a firmware that does this and halts.
fn firmware(folder: &Path, code: &[Vec<u8>]) -> String {
    let mut image = vec![0x90; 0x10000];
    let code = [&[0xfa][..], &code.concat(), &[0xf4, 0xeb, 0xfd]].concat();
    image[..code.len()].copy_from_slice(&code);
    // jmp to the beginning of the image
    image[0xfff0..0xfff3].copy_from_slice(&[0xe9, 0x0d, 0x00]);
    let path = folder.join("own-firmware");
    std::fs::write(&path, image).unwrap();
    path.display().to_string()
}

/// Returns writes to ACPI's sleep control on a q35.
fn sleep(kind: u16) -> Vec<Vec<u8>> {
    const LPC: u32 = 0x8000_0000 | 0x1f << 11;
    vec![
        out_long(0xcf8, LPC | 0x40),
        out_long(0xcfc, 0x601),
        out_long(0xcf8, LPC | 0x44),
        out_byte(0xcfc, 0x80),
        out_word(0x604, 1 << 13 | kind << 10),
    ]
}

fn spec(emulator: &Path, machine: &str, bios: String, more: &[&str]) -> Spec {
    let mut spec = Spec::new(emulator, machine, Payload::NONE);
    spec.more = vec!["-bios".to_owned(), bios];
    spec.more.extend(more.iter().map(|word| (*word).to_owned()));
    spec
}

async fn wait_for(qemu: &Qemu, state: &str) {
    let deadline = Instant::now() + LIMIT;
    while qemu.state().await != state {
        assert!(
            Instant::now() < deadline,
            "it is {}, not {state}",
            qemu.state().await
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn settings(qemu: &Qemu) -> (Value, Value) {
    let capabilities = qemu.qmp.query("query-migrate-capabilities").await.unwrap();
    let parameters = qemu.qmp.query("query-migrate-parameters").await.unwrap();
    (capabilities, parameters)
}

async fn outgoing(qemu: &Qemu) -> Result<(Outgoing, Vec<u8>), String> {
    let memory = Arc::new(qemu.memory().await);
    let path = qemu.folder.path().join("outgoing");
    let started = Outgoing::start(&qemu.qmp, memory, &path, None).await;
    let (outgoing, prelude) = started.map_err(|error| error.to_string())?;
    Ok((outgoing, prelude.bytes))
}

async fn held(outgoing: &Outgoing) {
    let held = async { while !matches!(outgoing.next_event().await, Event::Held { .. }) {} };
    tokio::time::timeout(LIMIT, held).await.unwrap();
}

/// Returns a disk that cannot be read.
fn broken_disk(folder: &Path) -> String {
    let image = folder.join("disk");
    std::fs::write(&image, vec![0; 1 << 20]).unwrap();
    json!({
        "driver": "raw", "node-name": "d0",
        "file": {
            "driver": "blkdebug", "image": {"driver": "file", "filename": image, "locking": "off"},
            "inject-error": [{"event": "none", "iotype": "read", "errno": 5}],
        },
    })
    .to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_io_error_stays_one() {
    let emulators = emulators();
    for (label, path) in &emulators {
        let folder = tempfile::tempdir().unwrap();
        let read = [(6, 0xe0), (2, 1), (3, 0), (4, 0), (5, 0), (7, 0x20)];
        let read = read.map(|(register, value)| out_byte(0x1f0 + register, value));
        let disk = broken_disk(folder.path());
        let bios = firmware(folder.path(), &read);
        let disk = [
            "-blockdev",
            &disk,
            "-device",
            "ide-hd,bus=ide.0,drive=d0,rerror=stop",
        ];
        let spec = spec(path, MACHINES[1], bios, &disk);
        let source = Qemu::running(&spec).await;
        wait_for(&source, "io-error").await;
        let before = settings(&source).await;
        for frozen in [false, true] {
            let (mut outgoing, _) = outgoing(&source).await.unwrap();
            held(&outgoing).await;
            if frozen {
                outgoing.freeze().await.unwrap();
            }
            outgoing.abort().await.unwrap();
            // Resumed after a freeze, it tried once more to read, and is stopped for good.
            let state = source.state().await;
            assert!(
                matches!(state.as_str(), "io-error" | "paused"),
                "{label}: {state}"
            );
            assert_eq!(settings(&source).await, before);
        }
        // To the same QEMU and to the newest.
        for (_, to) in [
            &(label.clone(), path.clone()),
            &emulators[emulators.len() - 1],
        ] {
            let source = Qemu::running(&spec).await;
            wait_for(&source, "io-error").await;
            let mut there = spec.clone();
            there.emulator = to.clone();
            let destination = Qemu::waiting(&there).await;
            let (mut outgoing, prelude) = outgoing(&source).await.unwrap();
            let socket = destination.folder.path().join("incoming");
            let incoming = Incoming::start(&destination.qmp, &socket, &prelude)
                .await
                .unwrap();
            held(&outgoing).await;
            let frozen = outgoing.freeze().await.unwrap();
            assert!(!frozen.was_running);
            let loaded = incoming.finish(&frozen.tail).await;
            if let Some(why) = does_not_load(path, to) {
                assert!(loaded.is_err(), "{why}");
                continue;
            }
            loaded.unwrap();
            assert_eq!(
                destination.state().await,
                "io-error",
                "{label} to {}",
                to.display()
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn states_without_a_way_back_are_refused_by_name() {
    for (label, path) in emulators() {
        let panic = vec![out_byte(0x505, 1)];
        for (state, code, more, expected) in [
            ("suspended", sleep(1), vec![], "wake it first"),
            (
                "shutdown",
                sleep(0),
                vec!["-no-shutdown"],
                "start it at the destination",
            ),
            (
                "guest-panicked",
                panic,
                vec!["-device", "pvpanic", "-action", "panic=pause"],
                "reset it first",
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let bios = firmware(folder.path(), &code);
            let source = Qemu::running(&spec(&path, machines(&label)[0], bios, &more)).await;
            wait_for(&source, state).await;
            let before = settings(&source).await;
            let error = outgoing(&source).await.unwrap_err();
            assert!(
                error.contains(state) && error.contains(expected),
                "{label}: {error}"
            );
            assert_eq!(source.state().await, state);
            assert_eq!(settings(&source).await, before);
        }
    }
}

/// Settings of an operator for migrations by QEMU itself.
async fn set_up(qemu: &Qemu) {
    let on = |name: &str| json!({"capability": name, "state": true});
    let capabilities = [
        "xbzrle",
        "auto-converge",
        "late-block-activate",
        "release-ram",
    ]
    .map(on);
    let credentials = json!({"qom-type": "tls-creds-anon", "id": "tls0", "endpoint": "client"});
    for (command, arguments) in [
        (
            "migrate-set-capabilities",
            json!({"capabilities": capabilities}),
        ),
        ("object-add", credentials),
        (
            "migrate-set-parameters",
            json!({
                "max-bandwidth": 1_234_567, "downtime-limit": 777, "tls-creds": "tls0",
                "tls-hostname": "elsewhere", "cpu-throttle-initial": 33,
            }),
        ),
    ] {
        qemu.qmp.execute(command, arguments, LIMIT).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_somebody_has_set_comes_back() {
    for (label, path) in emulators() {
        let spec = Spec::new(&path, machines(&label)[0], Payload::IDLE);
        let source = Qemu::running(&spec).await;
        set_up(&source).await;
        let before = settings(&source).await;
        let (moving, _) = outgoing(&source).await.unwrap();
        held(&moving).await;
        assert_ne!(settings(&source).await, before);
        moving.abort().await.unwrap();
        assert_eq!(settings(&source).await, before, "{label}: given up");

        // An agent that dies has kept them.
        let kept = source.folder.path().join("settings.json");
        Settings::restore_kept(&source.qmp, &kept).await.unwrap();
        Settings::look(&source.qmp)
            .await
            .unwrap()
            .keep(&kept)
            .unwrap();
        let (moving, _) = outgoing(&source).await.unwrap();
        held(&moving).await;
        // A second agent that dies in the same move does not take the changed ones for the old.
        Settings::look(&source.qmp)
            .await
            .unwrap()
            .keep(&kept)
            .unwrap();
        drop(moving);
        resume(&source.qmp, Continuation::Running).await.unwrap();
        assert_ne!(settings(&source).await, before);
        Settings::restore_kept(&source.qmp, &kept).await.unwrap();
        assert_eq!(settings(&source).await, before, "{label}: another agent");
        assert!(!kept.exists());
    }
}

/// A guest that its owner has paused is left alone; one that the move has stopped runs again.
#[tokio::test(flavor = "multi_thread")]
async fn only_a_stop_of_the_move_is_undone() {
    for (label, path) in emulators() {
        let spec = Spec::new(&path, machines(&label)[0], Payload::IDLE);
        let source = Qemu::running(&spec).await;
        let state = async || source.qmp.query("query-status").await.unwrap()["status"].clone();
        for (ran, stopped, expected) in [
            (true, false, "paused"),
            (true, true, "running"),
            (false, true, "paused"),
        ] {
            source.qmp.query("stop").await.unwrap();
            let how = Continuation::of(ran, stopped);
            resume(&source.qmp, how).await.unwrap();
            assert_eq!(state().await, expected, "{label}: {how:?}");
        }
        // The move is aborted while its owner has the guest paused.
        source.qmp.query("cont").await.unwrap();
        let (moving, _) = outgoing(&source).await.unwrap();
        held(&moving).await;
        source.qmp.query("stop").await.unwrap();
        moving.abort().await.unwrap();
        assert_eq!(state().await, "paused", "{label}: aborted");
    }
}
