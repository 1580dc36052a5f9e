//! Tests reading clocks from a real guest agent and real QEMUs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Host, MACHINES, emulators, guest};
use longhaul_hypervisor::guest_agent;
use longhaul_hypervisor::launch::Role;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The tolerance of a clock: the machine may be busy.
const NEAR_MS: u64 = 60_000;

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Debian's package `qemu-guest-agent`, which speaks the same over a socket as over its port.
#[tokio::test]
async fn a_real_guest_agent_tells_its_time() {
    let lab = std::env::var_os("LONGHAUL_LAB_DIR").unwrap_or("/var/lib/longhaul-lab".into());
    let places = [
        Path::new(&lab).join("guest-agent/usr/sbin/qemu-ga"),
        "/usr/sbin/qemu-ga".into(),
    ];
    let Some(program) = places.iter().find(|place| place.exists()) else {
        // Past the test's captured output, so that it is always visible.
        let said = "SKIPPED: no guest agent here: scripts/install lab";
        writeln!(std::io::stderr(), "{said}").unwrap();
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let port = folder.path().join("port");
    // It must not touch this machine's clock, whatever the command.
    let agent = Command::new(program)
        .args(["-m", "unix-listen", "-b", "guest-set-time", "-p"])
        .arg(&port)
        .arg("-t")
        .arg(folder.path())
        .arg("-f")
        .arg(folder.path().join("pid"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let _agent = Ended(agent);
    let until = Instant::now() + Duration::from_secs(60);
    let clock = loop {
        match guest_agent::set_right(&port).await {
            Ok(clock) => break clock,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(clock.by_agent && clock.before_ms.unsigned_abs() < NEAR_MS);
}

#[tokio::test]
async fn the_real_time_clock_is_read_and_nobody_is_at_the_port() {
    for (emulator, _) in emulators() {
        for machine in MACHINES {
            let host = Host::new();
            let (guest, qmp) = host
                .launch(&guest(machine), &emulator, Role::Fresh)
                .await
                .unwrap();
            let clock = guest_agent::real_time_clock(&qmp).await.unwrap();
            assert!(!clock.by_agent && !clock.set, "{clock:?}");
            assert!(clock.before_ms.unsigned_abs() < NEAR_MS, "{clock:?}");
            let port = guest.folder().channel(guest_agent::PORT);
            assert!(port.exists());
            assert!(!guest_agent::is_open(&qmp, &port).await);
            guest.stop(Some(&qmp)).await.unwrap();
        }
    }
}
