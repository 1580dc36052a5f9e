//! Tests the launcher as a manager of guests, on real QEMUs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Host, MACHINES, emulators, guest};
use longhaul_hypervisor::Qmp;
use longhaul_hypervisor::launch::Role;
use longhaul_hypervisor::manager::{
    Commit, CommitError, Found, GuestManager, IncomingGuest, LaunchIncomingError, Launched, Lease,
    Stays,
};
use longhaul_hypervisor::qmp::COMMAND_TIMEOUT;
use longhaul_protocol::HostId;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use std::fs;
use std::time::Duration;

const NAME: &str = "web-7";
const SENDER: HostId = HostId([7; 32]);

async fn launch(manager: &dyn GuestManager) -> Launched {
    let incoming = IncomingGuest {
        description: guest(MACHINES[0]),
        generation: 1,
        bases: Default::default(),
        sizes: Default::default(),
        sender: SENDER,
        managed: None,
    };
    manager.launch_incoming(incoming).await.unwrap()
}

async fn status(qmp: &Qmp) -> String {
    let status = qmp.query("query-status").await.unwrap();
    status["status"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn an_arriving_guest_is_launched_committed_and_aborted() {
    let host = Host::new();
    let manager: &dyn GuestManager = &host.launcher();
    let Launched {
        guest,
        lease,
        socket,
        ..
    } = launch(manager).await;
    assert_eq!(status(lease.qmp()).await, "inmigrate");
    assert!(socket.starts_with(host.state()), "{}", socket.display());
    let [Found::Running(found)] = &manager.list().unwrap()[..] else {
        panic!("{:?}", manager.list());
    };
    assert_eq!((found.name(), found.pid()), (NAME, guest.pid()));
    assert_eq!((found.sender(), found.generation()), (Some(SENDER), 1));
    // There is one lease.
    let second = manager.lease(found, Duration::from_millis(300)).await;
    assert!(second.is_err());
    let commit = Commit {
        generation: 2,
        runs: false,
        follows: false,
        cookie: Default::default(),
    };
    let committed = manager.commit(&guest, Some(&lease), commit).await;
    committed.unwrap();
    assert_eq!(status(lease.qmp()).await, "inmigrate");
    drop(lease);
    let found = manager.find(NAME).unwrap().unwrap();
    assert_eq!((found.sender(), found.generation()), (Some(SENDER), 2));
    let lease = manager.lease(&found, COMMAND_TIMEOUT).await.unwrap();
    // Only the guest with that name is ended.
    for other in ["", ".", "..", "web-70"] {
        manager.abort_incoming(other, None).await.unwrap();
    }
    assert!(manager.find(NAME).unwrap().is_some());
    let aborted = manager.abort_incoming(NAME, Some(&lease)).await;
    aborted.unwrap();
    assert!(manager.list().unwrap().is_empty());
    manager.abort_incoming(NAME, None).await.unwrap();
}

#[tokio::test]
async fn a_guest_without_an_emulator_is_unsuitable() {
    let host = Host::new();
    let manager: &dyn GuestManager = &host.launcher();
    let incoming = IncomingGuest {
        description: guest("pc-q35-1.0"),
        generation: 1,
        bases: Default::default(),
        sizes: Default::default(),
        sender: SENDER,
        managed: None,
    };
    let error = manager.launch_incoming(incoming).await.unwrap_err();
    assert!(
        matches!(&error, LaunchIncomingError::Unsuitable(why) if why.contains("pc-q35-1.0")),
        "{error:?}"
    );
    assert!(manager.list().unwrap().is_empty());
}

#[tokio::test]
async fn a_commit_without_an_answer_is_repeated_by_the_next_agent() {
    let host = Host::new();
    let manager: &dyn GuestManager = &host.launcher();
    let Launched { guest, lease, .. } = launch(manager).await;
    kill(Pid::from_raw(guest.pid().unwrap()), Signal::SIGKILL).unwrap();
    guest.ended().await.unwrap();
    let commit = Commit {
        generation: 2,
        runs: true,
        follows: false,
        cookie: Default::default(),
    };
    let generation = || match &manager.list().unwrap()[..] {
        [Found::Ended(guest)] => guest.generation(),
        other => panic!("{other:?}"),
    };
    let committed = manager.commit(&guest, Some(&lease), commit.clone()).await;
    assert!(matches!(committed, Err(CommitError::Unknown(_))));
    assert_eq!(generation(), 1);
    let committed = manager.commit(&guest, None, commit).await;
    assert!(matches!(committed, Err(CommitError::Unknown(_))));
    assert_eq!(generation(), 2);
    manager.confirm(NAME, None).await.unwrap();
    assert!(manager.list().unwrap().is_empty());
}

#[tokio::test]
async fn a_committed_guest_runs_and_its_generation_is_recorded() {
    let host = Host::new();
    let (emulator, _) = &emulators()[0];
    let description = guest(MACHINES[0]);
    let (guest, qmp) = host
        .launch(&description, emulator, Role::Fresh)
        .await
        .unwrap();
    let (guest, mut lease) = (guest.handle(), Some(Lease::from(qmp)));
    let manager: &dyn GuestManager = &host.launcher();
    for (generation, restarted) in [(5, false), (6, true)] {
        let held = lease.take().unwrap();
        held.qmp().query("stop").await.unwrap();
        lease = (!restarted).then_some(held);
        let commit = Commit {
            generation,
            runs: true,
            follows: false,
            cookie: Default::default(),
        };
        let committed = manager.commit(&guest, lease.as_ref(), commit).await;
        committed.unwrap();
        if restarted {
            lease = Some(manager.lease(&guest, COMMAND_TIMEOUT).await.unwrap());
        }
        assert_eq!(status(lease.as_ref().unwrap().qmp()).await, "running");
        let found = manager.find(NAME).unwrap().unwrap();
        assert_eq!(found.generation(), generation);
    }
    manager.confirm(NAME, lease.as_ref()).await.unwrap();
}

#[tokio::test]
async fn a_guest_that_stays_is_as_before() {
    for (emulator, _) in emulators() {
        let host = Host::new();
        let description = guest(MACHINES[0]);
        let launched = host.launch(&description, &emulator, Role::Fresh).await;
        let (guest, qmp) = launched.unwrap();
        let (guest, lease) = (guest.handle(), Lease::from(qmp.clone()));
        let manager: &dyn GuestManager = &host.launcher();
        let bandwidth = async || {
            let all = qmp.query("query-migrate-parameters").await.unwrap();
            all["max-bandwidth"].as_u64().unwrap()
        };
        let before = bandwidth().await;
        let socket = manager.depart(&guest, &lease, Default::default());
        let socket = socket.await.unwrap().socket;
        assert!(socket.starts_with(host.state()), "{}", socket.display());
        let changed = json!({"max-bandwidth": before / 2});
        let set = qmp.execute("migrate-set-parameters", changed, COMMAND_TIMEOUT);
        set.await.unwrap();
        let stays = Stays::Interrupted {
            ran: true,
            stopped: false,
        };
        // The move stopped it.
        manager.note_stop(&guest, true).unwrap();
        qmp.query("stop").await.unwrap();
        let aborted = manager.abort_outgoing(&guest, &lease, stays).await;
        aborted.unwrap();
        assert_eq!(status(&qmp).await, "running");
        assert_eq!(bandwidth().await, before);
        // Its owner stopped it.
        qmp.query("stop").await.unwrap();
        let aborted = manager.abort_outgoing(&guest, &lease, stays).await;
        aborted.unwrap();
        assert_eq!(status(&qmp).await, "paused");
        manager.confirm(NAME, Some(&lease)).await.unwrap();
        assert!(manager.list().unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_guest_with_a_damaged_record_is_ended_by_its_lease() {
    let host = Host::new();
    let manager: &dyn GuestManager = &host.launcher();
    let Launched { guest, lease, .. } = launch(manager).await;
    let record = host.state().join("guests").join(NAME).join("record.toml");
    fs::write(&record, "generation = 'x'").unwrap();
    let [found @ Found::Damaged { .. }] = &manager.list().unwrap()[..] else {
        panic!("{:?}", manager.list());
    };
    assert_eq!((found.name(), found.sender()), (NAME, Some(SENDER)));
    assert_eq!(found.description(), Some(guest.description()));
    let aborted = manager.abort_incoming(NAME, Some(&lease)).await;
    aborted.unwrap();
    guest.ended().await.unwrap();
    assert!(manager.list().unwrap().is_empty());
}
