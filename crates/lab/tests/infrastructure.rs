//! Tests real hosts and links in network namespaces: the behaviour of links, and what is removed
//! with a laboratory. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use longhaul_lab::error::LabError;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::process::{run, wait_until};
use longhaul_lab::registry::Registry;

/// A time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

fn plan(purpose: &str, link: &str) -> Plan {
    Plan {
        purpose: purpose.to_owned(),
        hosts: 2,
        link: link.parse().unwrap(),
        seed: 1,
    }
}

#[test]
fn laboratories_do_not_disturb_each_other() {
    let first = Lab::create(&plan("test: first", "10mbit,20ms")).unwrap();
    let second = Lab::create(&plan("test: second", "10mbit,20ms")).unwrap();
    assert_ne!(first.id(), second.id());
    let reaches = |lab: &Lab| {
        let mut ping = Command::new("ping");
        ping.args([
            "-n",
            "-q",
            "-c",
            "3",
            "-i",
            "0.2",
            "-W",
            "10",
            lab.hosts()[1].address(),
        ]);
        lab.hosts()[0].output(&mut ping)
    };
    reaches(&first).unwrap();
    reaches(&second).unwrap();
    drop(first);
    reaches(&second).unwrap();
}

#[test]
fn what_is_mounted_below_a_dead_laboratory_goes_with_it_and_nothing_else() {
    let registry = Registry::of_this_machine();
    let [kept, dead] = ["test: kept", "test: dead"].map(|it| registry.enter(it).unwrap());
    let mounted = [&kept, &dead].map(|claim| {
        let room = claim.record.data.join("paris/a room");
        for folder in [room.clone(), room.join("within")] {
            fs::create_dir_all(&folder).unwrap();
            let mut mount = Command::new("mount");
            run(mount.args(["-t", "tmpfs", "tmpfs"]).arg(&folder)).unwrap();
            fs::write(folder.join("file"), "x").unwrap();
        }
        room
    });
    // A file that is open keeps a mount busy.
    let open = fs::File::open(mounted[1].join("within/file")).unwrap();
    drop(dead); // as when its owner dies: the lock is free, all else remains
    // Another test may have swept it already.
    registry.sweep().unwrap();
    assert!(!mounted[1].parent().unwrap().parent().unwrap().exists());
    assert!(mounted[0].join("within/file").exists());
    kept.remove().unwrap();
    assert!(!kept.record.data.exists());
    drop(open);
}

#[test]
fn a_link_is_what_was_asked_for() {
    // Slow, so that a busy machine keeps up with it.
    let asked = "5mbit,100ms,loss=10%";
    let lab = Lab::create(&plan("test: measure", asked)).unwrap();
    let measured = lab.measure_link(asked.parse().unwrap()).unwrap();
    assert!(measured.loss > 0.0, "{measured:?}");
    // A measured link does not match another specification.
    let error = lab.measure_link("5mbit,30ms,loss=10%".parse().unwrap());
    assert!(matches!(error, Err(LabError::Link(_))), "{error:?}");
}

#[test]
fn a_link_is_cut_heals_and_changes_while_it_runs() {
    let lab = Lab::create(&plan("test: cut", "10mbit,4ms")).unwrap();
    let control = lab.link(0, 1).unwrap();
    let [from, to] = [0, 1].map(|host| {
        let host = lab.host(host).unwrap();
        let address = format!("{}:7000", host.address());
        host.namespace()
            .enter(|| UdpSocket::bind(address))
            .unwrap()
            .unwrap()
    });
    let target = to.local_addr().unwrap();
    let send = |byte: u8| {
        from.send_to(&[byte], target).unwrap();
    };
    let mut buffer = [0];
    to.set_read_timeout(Some(LIMIT)).unwrap();
    send(1);
    to.recv(&mut buffer).unwrap();
    assert_eq!(buffer, [1]);

    control.cut(Duration::from_secs(3600)).unwrap();
    send(2);
    let lost = || control.stats().unwrap().forth.dropped_cut;
    assert!(wait_until(LIMIT, || lost() == 1));
    control.heal().unwrap();
    send(3);
    to.recv(&mut buffer).unwrap();
    assert_eq!(buffer, [3], "what was sent into the cut never comes");

    control
        .change("10mbit,4ms,loss=100%".parse().unwrap())
        .unwrap();
    send(4);
    assert!(wait_until(LIMIT, || control
        .stats()
        .unwrap()
        .forth
        .dropped_loss
        == 1));
    control.change("10mbit,4ms".parse().unwrap()).unwrap();
    send(5);
    to.recv(&mut buffer).unwrap();
    assert_eq!(buffer, [5]);

    // One byte in UDP, IP and Ethernet. A frame is counted after it was delivered.
    let bytes = 3 * (1 + 8 + 20 + 14);
    let carried = || control.stats().unwrap().forth.carried_bytes;
    assert!(wait_until(LIMIT, || carried() == bytes), "{}", carried());
    let stats = control.stats().unwrap();
    assert_eq!(stats.forth.offered_frames, 5);
    assert_eq!(stats.back.offered_frames, 0);
}
