//! Tests a QEMU that completes although it is held: its guest is stopped as briefly as possible.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout
)]

mod common;
mod payload;

use common::emulators;
use longhaul_hypervisor::memory::{Event, Outgoing};
use longhaul_hypervisor::qmp;
use payload::{Payload, Qemu, Spec};
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::broadcast::Receiver;

const LIMIT: Duration = Duration::from_secs(300);

async fn settings(qemu: &Qemu) -> (serde_json::Value, serde_json::Value) {
    let capabilities = qemu.qmp.query("query-migrate-capabilities").await.unwrap();
    let parameters = qemu.qmp.query("query-migrate-parameters").await.unwrap();
    (capabilities, parameters)
}

/// Returns how long a guest was stopped, by QEMU's own clock.
async fn next_stop(events: &mut Receiver<qmp::Event>) -> Duration {
    let mut stopped = None;
    loop {
        let event = tokio::time::timeout(LIMIT, events.recv()).await;
        let event = event.expect("an event").unwrap();
        match (event.name.as_str(), stopped) {
            ("STOP", _) => stopped = Some(event.at),
            ("RESUME", Some(stopped)) => return event.at.saturating_sub(stopped),
            _ => {}
        }
    }
}

/// Returns a QEMU of 11.1 whose machine type promises to wait for the acknowledgement, and which
/// does not.
fn unheld(emulator: &std::path::Path) -> Spec {
    let mut spec = Spec::new(emulator, "pc-q35-11.0", Payload::BUSY);
    spec.more = ["-global", "migration.switchover-ack-legacy=off"]
        .map(str::to_owned)
        .to_vec();
    spec
}

/// Returns the time from STOP to the end of the migration where everything is read at once: QEMU's
/// own time.
async fn own_stop(spec: &Spec) -> Duration {
    let source = Qemu::running(spec).await;
    let mut events = source.qmp.events();
    let socket = source.folder.path().join("bare");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        std::io::copy(&mut stream, &mut std::io::sink())
    });
    for (command, arguments) in [
        (
            "migrate-set-capabilities",
            json!({"capabilities": [{"capability": "events", "state": true}]}),
        ),
        (
            "migrate-set-parameters",
            json!({"downtime-limit": 2_000_000, "max-bandwidth": 0}),
        ),
        (
            "migrate",
            json!({"uri": format!("unix:{}", socket.display())}),
        ),
    ] {
        source.qmp.execute(command, arguments, LIMIT).await.unwrap();
    }
    let mut stopped = Duration::ZERO;
    loop {
        let event = tokio::time::timeout(LIMIT, events.recv()).await;
        let event = event.expect("an event").unwrap();
        match (event.name.as_str(), event.data["status"].as_str()) {
            ("STOP", _) => stopped = event.at,
            ("MIGRATION", Some("completed")) => return event.at.saturating_sub(stopped),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_that_ignores_the_hold_does_not_keep_its_guest_stopped() {
    let Some((_, path)) = emulators().into_iter().find(|(label, _)| label == "11.1") else {
        println!("QEMU 11.1 is not here (scripts/install lab): NOT tested with it");
        return;
    };
    let spec = unheld(&path);
    let own = own_stop(&spec).await;
    for in_first_pass in [true, false] {
        let source = Qemu::running(&spec).await;
        let before = settings(&source).await;
        let mut events = source.qmp.events();
        let memory = Arc::new(source.memory().await);
        let socket = source.folder.path().join("outgoing");
        let started = Outgoing::start(&source.qmp, memory, &socket, None).await;
        let (outgoing, _) = started.unwrap();
        let eager = json!({"downtime-limit": if in_first_pass { 2_000_000 } else { 1 }});
        let set = source
            .qmp
            .execute("migrate-set-parameters", eager, LIMIT)
            .await;
        set.unwrap();
        let failed = async {
            loop {
                match outgoing.next_event().await {
                    Event::Failed(why) => return why,
                    Event::Held { pass, .. } => {
                        outgoing.next_pass();
                        if pass >= 2 {
                            let eager = json!({"downtime-limit": 2_000_000});
                            let set = source
                                .qmp
                                .execute("migrate-set-parameters", eager, LIMIT)
                                .await;
                            set.unwrap();
                        }
                    }
                    _ => {}
                }
            }
        };
        let why = tokio::time::timeout(LIMIT, failed).await.expect("given up");
        let stopped = next_stop(&mut events).await;
        println!("stopped for {stopped:?} (by QEMU itself: {own:?}): {why}");
        assert!(why.contains("though it was held"), "{why}");
        // On a busy machine; docs/decisions/0002 has the figures of a quiet one.
        assert!(stopped < own + Duration::from_secs(2), "{stopped:?}");
        assert!(source.is_writing(spec.payload).await, "the guest goes on");
        outgoing.abort().await.unwrap();
        assert_eq!(source.state().await, "running");
        assert_eq!(settings(&source).await, before);
    }
}
