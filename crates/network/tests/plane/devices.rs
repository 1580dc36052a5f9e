//! Tests what becomes of TAP devices and bridges.

use crate::world::*;
use longhaul_lab::netns::Namespace;
use longhaul_network::plane::{LocalPort, PlaneError, PlaneEvent};
use longhaul_network::tap::{Bridge, BridgeConfig, Tap, VlanFilter, leftovers, names};
use longhaul_overlay::offload::{Gso, Offloads, VirtioHeader};
use std::fs;

const ALL_OFFLOADS: Offloads = Offloads {
    checksum: true,
    tcp4: true,
    tcp6: true,
    ecn: true,
    udp: true,
};

fn exists(namespace: &Namespace, interface: &str) -> bool {
    let path = format!("/proc/sys/net/ipv4/conf/{interface}");
    namespace.enter(|| fs::metadata(path).is_ok()).unwrap()
}

fn setting(namespace: &Namespace, path: &str) -> String {
    let path = format!("/proc/sys/net/{path}");
    let text = namespace.enter(|| fs::read_to_string(path)).unwrap();
    text.unwrap().trim().to_owned()
}

#[test]
fn devices_are_removed_with_their_last_user_and_found_again() {
    if !is_root() {
        return;
    }
    let world = World::blue(Setup::default());
    let host = &world.hosts[0];
    let inside = &host.namespace;
    let (bridge, tap) = names(BLUE);
    assert!(exists(inside, &bridge) && exists(inside, &tap));
    for device in [&bridge, &tap] {
        let off = setting(inside, &format!("ipv6/conf/{device}/disable_ipv6"));
        assert_eq!(off, "1");
        assert_eq!(
            setting(inside, &format!("ipv4/conf/{device}/rp_filter")),
            "1"
        );
    }
    let again = inside
        .enter(|| host.plane.open_network(&world.network(BLUE, 1500)))
        .unwrap();
    assert!(matches!(again, Err(PlaneError::OpenAlready(BLUE))));
    let close = || inside.enter(|| host.plane.close_network(BLUE)).unwrap();
    // A guest still uses the bridge.
    let card = world.card(0, BLUE, "guest");
    assert!(!close().unwrap());
    assert!(exists(inside, &bridge) && !exists(inside, &tap));
    assert!(matches!(close(), Err(PlaneError::UnknownNetwork(BLUE))));
    let left = inside.enter(leftovers).unwrap().unwrap();
    assert_eq!(left.len(), 1);
    assert_eq!((left[0].network, left[0].ports), (BLUE, 1));
    assert!(!inside.enter(|| left[0].remove()).unwrap().unwrap());
    // The next agent uses it again, with the guest in it.
    world.open(0, &world.network(BLUE, 1400));
    let other = world.card(1, BLUE, "guest");
    card.reaches(&frame(ALL, mac(1), None, "after all"), &other);
    drop(card);
    eventually("the guest's device is gone", || !exists(inside, "guest"));
    assert!(close().unwrap());
    assert!(!exists(inside, &bridge) && !exists(inside, &tap));
    assert_eq!(inside.enter(leftovers).unwrap().unwrap(), []);
}

#[test]
fn what_a_killed_agent_left_is_removed() {
    if !is_root() {
        return;
    }
    let world = World::new(Setup::default());
    let inside = &world.hosts[0].namespace;
    let config = BridgeConfig {
        network: RED,
        mtu: 1500,
        vlans: VlanFilter::Transparent,
    };
    inside.enter(|| Bridge::open(&config)).unwrap().unwrap();
    // One with such a name that is not ours stays.
    let foreign = names(BLUE).0;
    inside
        .configure(&format!("link add {foreign} type bridge\n"))
        .unwrap();
    let left = inside.enter(leftovers).unwrap().unwrap();
    assert_eq!(
        left.iter().map(|left| left.network).collect::<Vec<_>>(),
        [RED]
    );
    assert!(inside.enter(|| left[0].remove()).unwrap().unwrap());
    assert!(!exists(inside, &names(RED).0) && exists(inside, &foreign));
}

#[test]
fn a_name_that_is_taken_is_an_error_that_says_so() {
    if !is_root() {
        return;
    }
    let world = World::new(Setup::default());
    let host = &world.hosts[0];
    let (bridge, tap) = names(BLUE);
    host.namespace
        .configure(&format!("link add {bridge} type veth peer name other\n"))
        .unwrap();
    let config = world.network(BLUE, 1500);
    let open = || {
        let opened = host.namespace.enter(|| host.plane.open_network(&config));
        opened.unwrap()
    };
    let error = open().unwrap_err().to_string();
    assert!(
        error.contains(&bridge) && error.contains("remove it"),
        "{error}"
    );
    assert!(!exists(&host.namespace, &tap));
    host.namespace
        .configure(&format!("link del {bridge}\n"))
        .unwrap();
    let taken = host.namespace.enter(|| Tap::open(&tap, ALL_OFFLOADS));
    let taken = taken.unwrap().unwrap();
    let error = open().unwrap_err().to_string();
    assert!(error.contains(&tap), "{error}");
    drop(taken);
    let mut small = config.clone();
    small.mtu = 1279;
    let refused = host.plane.open_network(&small);
    assert!(matches!(refused, Err(PlaneError::SmallMtu(1279))));
    eventually("the network opens", || open().is_ok());
}

#[test]
fn the_host_does_not_speak_in_its_networks() {
    if !is_root() {
        return;
    }
    let world = World::blue(Setup::default());
    let (here, there) = (world.card(0, BLUE, "card"), world.card(1, BLUE, "card"));
    // Who has the address of the host? Both its guests and those of the other one ask.
    for (number, card) in [(1, &here), (2, &there)] {
        let mut question = [ALL, mac(number)].concat();
        question.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        question.extend(mac(number));
        question.extend([10, 77, 0, 99, 0, 0, 0, 0, 0, 0, 10, 77, 0, 1]);
        question.resize(60, 0);
        card.send(&question);
        card.send(&frame(ALL, mac(number), None, "end"));
    }
    for (number, card) in [(2, &here), (1, &there)] {
        let end = frame(ALL, mac(number), None, "end");
        let got = card.until("the other's frames", |got| *got == end);
        let known = [mac(1), mac(2)];
        for frame in got {
            assert!(known.iter().any(|mac| frame[6..12] == *mac), "{frame:x?}");
        }
    }
}

#[test]
fn a_device_that_is_taken_away_is_reported() {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup::default());
    let tap = names(BLUE).1;
    let host = &world.hosts[0];
    host.namespace
        .configure(&format!("link del {tap}\n"))
        .unwrap();
    world.hosts[0].event("the loss is reported", |event| {
        matches!(event, PlaneEvent::TapLost { network: BLUE, .. })
    });
    // It can be closed and opened again.
    let host = &world.hosts[0];
    let closed = host.namespace.enter(|| host.plane.close_network(BLUE));
    assert!(closed.unwrap().unwrap());
    world.open(0, &world.network(BLUE, 1500));
    let cards = [0, 1].map(|host| world.card(host, BLUE, "card"));
    cards[0].reaches(&frame(ALL, mac(1), None, "again"), &cards[1]);
}

#[test]
fn an_offload_that_the_kernel_refuses_is_switched_off_once() {
    if !is_root() {
        return;
    }
    let world = World::new(Setup::default());
    let inside = &world.hosts[0].namespace;
    let tap = inside.enter(|| Tap::open("lhtest", ALL_OFFLOADS)).unwrap();
    let tap = tap.unwrap();
    inside.configure("link set dev lhtest up\n").unwrap();
    assert!(tap.offloads().tcp4 && tap.offloads().tcp6);
    let mut scratch = Vec::new();
    let plain = frame(ALL, mac(1), None, "plain");
    assert_eq!(
        tap.write(&VirtioHeader::default(), &plain, &mut scratch),
        None
    );
    assert_eq!(tap.counters().written, 1);
    // The kernel looks at the checksum's place and finds nothing.
    let bad = VirtioHeader {
        needs_checksum: true,
        gso: Gso::Tcp4,
        segment_bytes: 100,
        checksum_start: 60_000,
        checksum_offset: 16,
        ..VirtioHeader::default()
    };
    let switched: Vec<Offloads> = (0..20)
        .filter_map(|_| tap.write(&bad, &plain, &mut scratch))
        .collect();
    assert_eq!(switched.len(), 1, "{switched:?}");
    assert!(!switched[0].tcp4 && switched[0].tcp6 && switched[0].checksum);
    assert_eq!(tap.offloads(), switched[0]);
    let counters = tap.counters();
    assert_eq!((counters.switched_off, counters.refused), (1, 20));
    assert_eq!(
        tap.write(&VirtioHeader::default(), &plain, &mut scratch),
        None
    );
    assert_eq!(tap.counters().written, 2);
}

#[test]
fn a_device_without_a_bridge_has_the_name_that_is_asked_for() {
    if !is_root() {
        return;
    }
    let world = World::new(Setup::default());
    let mut config = world.network(BLUE, 1500);
    for host in 0..2 {
        config.port = LocalPort::Tap(format!("own{host}"));
        world.open(host, &config);
        world.hosts[host]
            .namespace
            .configure(&format!("addr add 10.0.0.{}/24 dev own{host}\n", host + 1))
            .unwrap();
    }
    ping(&world.hosts[0].namespace, "10.0.0.2");
    let host = &world.hosts[0];
    let closed = host.namespace.enter(|| host.plane.close_network(BLUE));
    assert!(closed.unwrap().unwrap());
    eventually("the device is gone", || !exists(&host.namespace, "own0"));
}
