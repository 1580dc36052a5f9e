//! Tests that what stations send arrives whole: every protocol, path and offload.

use crate::world::*;
use longhaul_lab::netns::{Namespace, command};
use longhaul_network::plane::{LocalPort, PlaneConfig, PlaneEvent};
use longhaul_network::tap::VlanFilter;
use longhaul_overlay::offload::Offloads;
use longhaul_overlay::seal::{Kind, Suite};
use longhaul_overlay::switch::{Reason, Vlans};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::Ordering;

const TRANSFER_BYTES: usize = 6 << 20;
/// Headers of IPv4 and UDP.
const OUTER_BYTES: usize = 28;

fn pattern(seed: u8) -> Vec<u8> {
    let byte = |at: usize| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed;
    (0..TRANSFER_BYTES).map(byte).collect()
}

fn stream(stream: TcpStream, sends: Vec<u8>) -> std::thread::JoinHandle<Vec<u8>> {
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    let mut reads = stream.try_clone().unwrap();
    std::thread::spawn(move || {
        let writer = std::thread::spawn(move || {
            (&stream).write_all(&sends).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        reads.read_to_end(&mut got).unwrap();
        writer.join().unwrap();
        got
    })
}

/// Sends bytes both ways at once over TCP, and compares them.
#[track_caller]
pub(crate) fn transfer(client: &Namespace, server: &Namespace, at: &str) {
    let address: SocketAddr = format!("{at}:0").parse().unwrap();
    let listener = server.enter(|| TcpListener::bind(address)).unwrap();
    let listener = listener.unwrap();
    let address = listener.local_addr().unwrap();
    let connected = client.enter(|| TcpStream::connect(address)).unwrap();
    let there = listener.accept().unwrap().0;
    let (one, other) = (pattern(1), pattern(2));
    let here = stream(connected.unwrap(), one.clone());
    let there = stream(there, other.clone());
    assert!(there.join().unwrap() == one, "what the client sent");
    assert!(here.join().unwrap() == other, "what the server sent");
}

/// Sends datagrams of one length until one comes back.
#[track_caller]
fn echo(client: &Namespace, server: &Namespace, at: &str, bytes: usize) {
    let address: SocketAddr = format!("{at}:0").parse().unwrap();
    let bind = |namespace: &Namespace, address| {
        let socket = namespace.enter(|| UdpSocket::bind(address)).unwrap();
        let socket = socket.unwrap();
        socket
            .set_read_timeout(Some(std::time::Duration::from_millis(300)))
            .unwrap();
        socket
    };
    let there = bind(server, address);
    let any = if address.is_ipv4() {
        "0.0.0.0:0"
    } else {
        "[::]:0"
    };
    let here = bind(client, any.parse().unwrap());
    let sent: Vec<u8> = pattern(3)[..bytes].to_vec();
    eventually("a datagram comes back", || {
        let mut buffer = vec![0; 1 << 16];
        here.send_to(&sent, there.local_addr().unwrap()).unwrap();
        let Ok((length, from)) = there.recv_from(&mut buffer) else {
            return false;
        };
        there.send_to(&buffer[..length], from).unwrap();
        here.recv(&mut buffer)
            .is_ok_and(|length| buffer[..length] == sent)
    });
}

/// Everything between two stations.
#[track_caller]
fn everything(a: &Namespace, b: &Namespace) {
    for (to, at) in [("10.0.0.2", "10.0.0.2"), ("fd00::2", "[fd00::2]")] {
        ping(a, to);
        transfer(a, b, at);
        transfer(a, b, at);
        // A whole frame, and packets of several.
        for bytes in [1, 1400, 1452, 1472, 9000, 60_000] {
            echo(a, b, at, bytes);
        }
    }
}

#[test]
fn all_protocols_pass_both_ways_as_super_frames() {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup::default());
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    world.wait_for_mtu(1472);
    everything(&a, &b);
    for host in 0..2 {
        let status = world.network_status(host, BLUE);
        let device = status.device;
        assert!(
            status.offloads.tcp4 && status.offloads.checksum,
            "{status:?}"
        );
        assert!(device.read_bytes / device.read > 2000, "{device:?}");
        assert!(device.written_bytes / device.written > 2000, "{device:?}");
        assert_eq!((device.malformed, device.refused, device.full), (0, 0, 0));
        let plane = world.hosts[host].plane.status().counters;
        assert!(plane.merged < plane.segments / 2, "{plane:?}");
        assert_eq!((plane.foreign, plane.uncuttable), (0, 0));
        let peer = world.peer_status(host, 1 - host);
        assert_eq!(peer.session.opened.forged + peer.session.opened.replayed, 0);
        assert!(peer.session.pulses < 100 && peer.connected && !peer.silent);
    }
}

#[test]
fn segments_of_tcp_are_short_and_fill_datagrams() {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup::default());
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    world.wait_for_mtu(1472);
    for at in ["10.0.0.2", "[fd00::2]"] {
        *world.hosts[0].udp.tapped.lock().unwrap() = Some(Vec::new());
        transfer(&a, &b, at);
        let tapped = world.hosts[0].udp.tapped.lock().unwrap().take();
        let short = |datagram: &Vec<u8>| datagram[0] == Kind::ShortSegment as u8;
        let sent = tapped.unwrap().into_iter().map(|(_, datagram)| datagram);
        let (short, other): (Vec<_>, Vec<_>) = sent.partition(short);
        let bytes = |datagrams: &[Vec<u8>]| datagrams.iter().map(Vec::len).sum::<usize>();
        assert!(bytes(&short) > 10 * bytes(&other), "{at}");
        let full = short.iter().filter(|datagram| datagram.len() == 1472);
        assert!(full.count() > short.len() / 2, "{at}");
    }
}

#[test]
fn the_socket_of_quic_carries_all_of_it() {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup {
        endpoint: true,
        ..Setup::default()
    });
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    world.wait_for_mtu(1472);
    everything(&a, &b);
    for host in 0..2 {
        let device = world.network_status(host, BLUE).device;
        assert!(device.written_bytes / device.written > 2000, "{device:?}");
    }
}

fn small_path(mtu: u32, suite: Suite) {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup {
        path_mtu: mtu,
        suite,
        ..Setup::default()
    });
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    // Before the path's MTU is known, and after.
    ping(&a, "10.0.0.2");
    let most = mtu as usize - OUTER_BYTES;
    world.wait_for_mtu(most - 8);
    everything(&a, &b);
    for host in 0..2 {
        let peer = world.peer_status(host, 1 - host);
        assert!((most - 8..=most).contains(&peer.mtu_bytes), "{peer:?}");
        assert!(peer.fragments.frames > 0, "{peer:?}");
    }
}

#[test]
fn frames_of_1500_pass_a_path_of_1400() {
    small_path(1400, Suite::Aes256Gcm);
}

#[test]
fn frames_of_1500_pass_a_path_of_1280() {
    small_path(1280, Suite::ChaCha20Poly1305);
}

#[test]
fn hosts_with_and_without_offloads_understand_each_other() {
    if !is_root() {
        return;
    }
    let checksum = Offloads {
        checksum: true,
        ..Offloads::default()
    };
    for offloads in [Offloads::default(), checksum] {
        let with = PlaneConfig::default();
        let without = PlaneConfig {
            offloads,
            ..PlaneConfig::default()
        };
        let mut world = World::mixed(&[with, without]);
        world.open_all(BLUE, 1500);
        let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
        world.wait_for_mtu(1472);
        everything(&a, &b);
        let status = world.network_status(1, BLUE);
        assert_eq!(status.offloads, offloads);
        assert!(status.device.in_software > 0, "{status:?}");
        assert!(status.device.read_bytes / status.device.read < 1515);
    }
}

#[test]
fn lost_datagrams_cost_time_and_nothing_else() {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup::default());
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    world.wait_for_mtu(1472);
    for host in &world.hosts {
        host.udp.loses_one_of.store(100, Ordering::Relaxed);
    }
    everything(&a, &b);
}

#[test]
fn tags_pass_if_the_network_allows_them() {
    if !is_root() {
        return;
    }
    let world = World::new(Setup::default());
    let mut config = world.network(BLUE, 1500);
    config.vlans = Vlans::untagged();
    config.vlans.insert(7, 9);
    for host in 0..2 {
        world.open(host, &config);
    }
    let (x, y) = (world.card(0, BLUE, "x"), world.card(1, BLUE, "y"));
    x.send(&frame(ALL, mac(1), Some(10), "another VLAN"));
    x.send(&frame(ALL, mac(1), Some(9), "allowed"));
    let got = y.until("the allowed frame", |frame| frame[6..12] == mac(1));
    assert_eq!(got.last().unwrap(), &frame(ALL, mac(1), Some(9), "allowed"));
    let status = world.network_status(0, BLUE);
    assert_eq!(status.switch.not_forwarded(Reason::Vlan), 1);
}

/// Stations that send tags themselves, as super-frames.
#[test]
fn tagged_super_frames_pass() {
    if !is_root() {
        return;
    }
    let mut world = World::blue(Setup::default());
    let stations = [world.station(0, BLUE, 1), world.station(1, BLUE, 2)];
    for (number, station) in (1..).zip(&stations) {
        for vlan in [7, 8] {
            let made = station.configure(&format!(
                "link add link g name g.{vlan} type vlan id {vlan}\n\
                 link set dev g.{vlan} up\naddr add 10.{vlan}.0.{number}/24 dev g.{vlan}\n"
            ));
            if made.is_err() {
                eprintln!("left out: the kernel has no VLAN devices");
                return;
            }
        }
    }
    let [a, b] = &stations;
    world.wait_for_mtu(1472);
    for vlan in [7, 8] {
        ping(a, &format!("10.{vlan}.0.2"));
        transfer(a, b, &format!("10.{vlan}.0.2"));
    }
    ping(a, "10.0.0.2");
}

#[test]
fn ports_of_a_bridge_that_filters_are_in_their_vlans() {
    if !is_root() {
        return;
    }
    let world = World::new(Setup::default());
    let mut config = world.network(BLUE, 1500);
    config.port = LocalPort::Bridge(VlanFilter::Ports(Vlans::all()));
    for here in &world.hosts {
        let opened = here.namespace.enter(|| here.plane.open_network(&config));
        if let Err(error) = opened.unwrap() {
            assert!(error.to_string().contains("do not filter"), "{error}");
            eprintln!("left out: {error}");
            return;
        }
    }
    let cards = [0, 1].map(|host| {
        let (tagged, plain) = (
            world.card(host, BLUE, "tagged"),
            world.card(host, BLUE, "plain"),
        );
        let mut bridge = command("bridge");
        bridge.args([
            "vlan", "add", "dev", "tagged", "vid", "7", "pvid", "untagged",
        ]);
        world.hosts[host].namespace.output(&mut bridge).unwrap();
        let mut bridge = command("bridge");
        bridge.args(["vlan", "del", "dev", "tagged", "vid", "1"]);
        world.hosts[host].namespace.output(&mut bridge).unwrap();
        (tagged, plain)
    });
    let [(a7, a1), (b7, b1)] = cards;
    a7.reaches(&frame(ALL, mac(1), None, "in VLAN 7"), &b7);
    a1.send(&frame(ALL, mac(2), None, "in none"));
    let got = b1.until("the frame in no VLAN", |frame| frame[6..12] == mac(2));
    assert!(got.iter().all(|frame| frame[6..12] != mac(1)));
}

#[test]
fn broadcast_and_multicast_reach_each_host_once() {
    if !is_root() {
        return;
    }
    let world = World::blue(Setup {
        hosts: 4,
        ..Setup::default()
    });
    let cards: Vec<Card> = (0..4).map(|host| world.card(host, BLUE, "card")).collect();
    for card in &cards[1..] {
        cards[0].reaches(&frame(ALL, mac(9), None, "begin"), card);
    }
    let group = [0x01, 0, 0x5e, 1, 2, 3];
    let sent = [
        frame(ALL, mac(1), None, "to all"),
        frame(group, mac(1), None, "to a group"),
        frame(mac(7), mac(1), None, "to an unknown address"),
        frame(ALL, mac(1), None, "end"),
    ];
    for frame in &sent {
        cards[0].send(frame);
    }
    for card in &cards[1..] {
        let got = card.until("the last frame", |frame| *frame == sent[3]);
        let got: Vec<_> = got.iter().filter(|frame| frame[6..12] == mac(1)).collect();
        assert_eq!(got, sent.iter().collect::<Vec<_>>());
    }
    // None came back to where it began.
    cards[1].send(&frame(mac(1), mac(3), None, "answer"));
    let got = cards[0].until("an answer", |frame| frame[6..12] == mac(3));
    assert!(got.iter().all(|frame| frame[6..12] != mac(1)));
}

#[test]
fn a_peer_may_go_on_from_another_address() {
    if !is_root() {
        return;
    }
    let mut setup = Setup::default();
    setup.config.session.roaming = true;
    let mut world = World::blue(setup);
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    ping(&a, "10.0.0.2");
    let mut address = world.hosts[1].address;
    address.set_port(9999);
    let udp = world.hosts[1].udp.clone();
    world.hosts[1]
        .namespace
        .enter(|| udp.rebind(address))
        .unwrap();
    // The peer does not know that, and sends something.
    ping(&b, "10.0.0.1");
    ping(&a, "10.0.0.2");
    world.hosts[0].event("the peer roamed", |event| {
        matches!(event, PlaneEvent::Roamed { .. })
    });
    let way = crate::udp::way_to(address);
    assert_eq!(world.peer_status(0, 1).way, Some(way));
    world.wait_for_mtu(1472);
    transfer(&a, &b, "10.0.0.2");
}

#[test]
fn new_connections_and_epochs_lose_nothing() {
    if !is_root() {
        return;
    }
    let mut setup = Setup::default();
    setup.config.session.keys.epoch_packets = 100;
    let mut world = World::blue(setup);
    let (a, b) = (world.station(0, BLUE, 1), world.station(1, BLUE, 2));
    world.wait_for_mtu(1472);
    transfer(&a, &b, "10.0.0.2");
    for connection in 1..4 {
        for (here, there) in [(0, 1), (1, 0)] {
            world.connect(here, there, connection, Suite::Aes256Gcm);
        }
        transfer(&a, &b, "10.0.0.2");
        ping(&b, "fd00::1");
    }
    for host in 0..2 {
        let session = world.peer_status(host, 1 - host).session;
        assert_eq!(session.connections, 4);
        assert_eq!(session.opened.forged, 0);
    }
}

#[test]
fn probes_travel_on_the_way_that_is_asked_for() {
    if !is_root() {
        return;
    }
    let mut world = World::new(Setup::default());
    let before = world.peer_status(1, 0).way;
    let way = crate::udp::way_to(world.hosts[1].address);
    world.hosts[0].plane.set_way(id(1), None).unwrap();
    world.hosts[0]
        .plane
        .seal_probe(id(1), way, b"a probe")
        .unwrap();
    let probes = &mut world.hosts[1].outputs.probes;
    let mut got = None;
    eventually("the probe arrives", || {
        got = probes.try_recv().ok();
        got.is_some()
    });
    let got = got.unwrap();
    assert_eq!((got.peer, &got.payload[..]), (id(0), &b"a probe"[..]));
    assert_eq!(got.way, crate::udp::way_to(world.hosts[0].address));
    assert_eq!(world.peer_status(1, 0).way, before);
    let long = world.hosts[0].plane.seal_probe(id(1), way, &[0; 1300]);
    assert!(long.is_err());
}
