//! Tests the Internet of a laboratory with real datagrams: what every kind of NAT maps and filters,
//! before and after a reboot, and what gets through between two of them. Needs root and nftables.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::time::Duration;

use longhaul_lab::internet::access::Access;
use longhaul_lab::internet::probe::{Behaviour, Dependence, examine};
use longhaul_lab::internet::{Router, Site, SitePlan, SitesPlan};
use longhaul_lab::lab::{Host, Lab};
use longhaul_lab::link::spec::LinkSpec;

/// A time limit for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
/// How long a datagram is awaited that may not come.
const PATIENCE: Duration = Duration::from_millis(300);
/// The round trip of an uplink, and of two.
const UPLINK: &str = "20mbit,4ms";
const RTT: Duration = Duration::from_millis(8);

use Dependence::{Address, AddressAndPort, Independent};

fn internet(purpose: &str, sites: &[&str]) -> Lab {
    let uplink: LinkSpec = UPLINK.parse().unwrap();
    let plan = SitesPlan {
        purpose: format!("test: {purpose}"),
        sites: sites
            .iter()
            .map(|text| SitePlan {
                access: text.parse::<Access>().unwrap(),
                uplink,
            })
            .collect(),
        servers: 1,
        backbone: uplink,
        seed: 1,
    };
    Lab::create_sites(&plan).unwrap()
}

fn server(lab: &Lab) -> &Host {
    lab.internet().unwrap().server(0).unwrap()
}

fn examined(lab: &Lab, host: &Host) -> Option<Behaviour> {
    examine(host, server(lab), RTT).unwrap()
}

fn socket(host: &Host, port: u16) -> UdpSocket {
    let address: IpAddr = host.address().parse().unwrap();
    let bound = host.namespace().enter(|| UdpSocket::bind((address, port)));
    let socket = bound.unwrap().unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Sends one byte and returns the sender's address as it arrives.
fn send(from: &UdpSocket, to: &UdpSocket, byte: u8) -> SocketAddr {
    from.send_to(&[byte], to.local_addr().unwrap()).unwrap();
    let mut buffer = [0; 2];
    let (length, seen) = to.recv_from(&mut buffer).unwrap();
    assert_eq!((length, buffer[0]), (1, byte));
    seen
}

fn receive(socket: &UdpSocket) -> u8 {
    let mut buffer = [0; 2];
    assert_eq!(socket.recv(&mut buffer).unwrap(), 1);
    buffer[0]
}

/// Asserts that nothing came. What was sent before `beacon` got its answer had the time to arrive:
/// the way keeps the order.
fn assert_nothing(socket: &UdpSocket, beacon: &UdpSocket, far: &UdpSocket) {
    let seen = send(beacon, far, 99);
    far.send_to(&[100], seen).unwrap();
    assert_eq!(receive(beacon), 100);
    socket.set_nonblocking(true).unwrap();
    let nothing = socket.recv(&mut [0; 2]);
    assert_eq!(nothing.unwrap_err().kind(), ErrorKind::WouldBlock);
    socket.set_nonblocking(false).unwrap();
}

fn site(lab: &Lab, index: usize) -> &Site {
    lab.internet().unwrap().site(index).unwrap()
}

fn router(lab: &Lab, index: usize) -> &Router {
    site(lab, index).router().unwrap()
}

#[test]
fn every_nat_maps_and_filters_as_its_kind_does() {
    let expected = [
        ("none", Some((Independent, Independent))),
        ("full-cone", Some((Independent, Independent))),
        ("restricted", Some((Independent, Address))),
        ("port-restricted", Some((Independent, AddressAndPort))),
        ("symmetric", Some((AddressAndPort, AddressAndPort))),
        ("no-udp", None),
    ];
    let lab = internet("kinds of NATs", &expected.map(|(kind, _)| kind));
    for (index, (kind, wanted)) in expected.into_iter().enumerate() {
        let found = examined(&lab, &lab.hosts()[index]);
        let what = found.map(|it| (it.mapping, it.filtering));
        assert_eq!(what, wanted, "{kind}: {found:?}");
        let Some(found) = found else { continue };
        assert_eq!(found.is_translated(), kind != "none", "{found:?}");
        if let Some(address) = site(&lab, index).address() {
            assert_eq!(found.seen.ip().to_string(), address);
        }
    }
    // Where UDP is blocked, TCP gets through.
    let far = server(&lab);
    let listen = || TcpListener::bind((far.address(), 0));
    let listener = far.namespace().enter(listen).unwrap().unwrap();
    let target = listener.local_addr().unwrap();
    let host = &lab.hosts()[5];
    let connected = host
        .namespace()
        .enter(|| TcpStream::connect_timeout(&target, LIMIT));
    drop(connected.unwrap().unwrap());
    let (_, from) = listener.accept().unwrap();
    assert_eq!(from.ip().to_string(), site(&lab, 5).address().unwrap());
}

#[test]
fn a_carriers_nat_adds_to_the_sites_and_ipv6_has_a_firewall_alone() {
    let expected = [
        ("full-cone/port-restricted", Independent, AddressAndPort),
        ("port-restricted/full-cone", Independent, AddressAndPort),
        ("restricted/full-cone", Independent, Address),
        ("full-cone/symmetric", AddressAndPort, AddressAndPort),
        ("ipv6", Independent, AddressAndPort),
        ("full-cone+ipv6", Independent, Independent),
    ];
    let lab = internet("carriers", &expected.map(|(kind, ..)| kind));
    for (index, (kind, mapping, filtering)) in expected.into_iter().enumerate() {
        let host = &lab.hosts()[index];
        let found = examined(&lab, host).expect(kind);
        let what = (found.mapping, found.filtering);
        assert_eq!(what, (mapping, filtering), "{kind}: {found:?}");
        assert_eq!(found.is_translated(), kind != "ipv6", "{kind}: {found:?}");
        assert_eq!(host.addresses().len(), 1 + usize::from(index == 5));
    }
    let stacked = site(&lab, 0).routers();
    assert_eq!(stacked.len(), 2);
    // With IPv4 or without, an IPv6 address is the host's own, and only what was asked for gets in.
    let of_site: IpAddr = lab.hosts()[5].addresses()[1].parse().unwrap();
    let of_server = server(&lab).addresses().iter();
    let of_server: Vec<IpAddr> = of_server.map(|it| it.parse().unwrap()).collect();
    let of_server = of_server.into_iter().find(IpAddr::is_ipv6).unwrap();
    let open = |host: &Host, address: IpAddr| {
        let bound = host.namespace().enter(|| UdpSocket::bind((address, 0)));
        let socket = bound.unwrap().unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    };
    let [asked, beacon] = [0, 1].map(|_| open(&lab.hosts()[5], of_site));
    let far = open(server(&lab), of_server);
    far.send_to(&[1], asked.local_addr().unwrap()).unwrap();
    assert_nothing(&asked, &beacon, &far);
    assert_eq!(send(&asked, &far, 2), asked.local_addr().unwrap());
    far.send_to(&[3], asked.local_addr().unwrap()).unwrap();
    assert_eq!(receive(&asked), 3);
}

#[test]
fn two_hosts_behind_one_nat_share_its_address_and_not_their_ports() {
    let kinds = [
        "2*full-cone",
        "2*restricted",
        "2*port-restricted",
        "2*symmetric",
        "2*none",
    ];
    let lab = internet("two hosts", &kinds);
    let far = socket(server(&lab), 7400);
    for (index, kind) in kinds.into_iter().enumerate() {
        let hosts = &lab.hosts()[2 * index..2 * index + 2];
        // Both use the port of an agent.
        let [first, second] = [0, 1].map(|it| socket(&hosts[it], 7400));
        let seen = [&first, &second].map(|from| send(from, &far, 1));
        assert_ne!(seen[0], seen[1], "{kind}");
        assert_eq!(seen[0].ip() == seen[1].ip(), kind != "2*none", "{kind}");
        for (byte, (host, seen)) in (10..).zip([(&first, seen[0]), (&second, seen[1])]) {
            far.send_to(&[byte], seen).unwrap();
            assert_eq!(receive(host), byte, "{kind}");
        }
        // They reach each other inside, but not by their public address.
        assert_eq!(send(&first, &second, 2), first.local_addr().unwrap());
        if kind != "2*none" {
            first.send_to(&[3], seen[1]).unwrap();
            let beacon = socket(&hosts[1], 0);
            assert_nothing(&second, &beacon, &far);
        }
    }
}

#[test]
fn a_rebooted_nat_forgets_its_mappings_and_a_rebound_one_gives_others() {
    let kinds = ["full-cone", "restricted", "port-restricted", "symmetric"];
    let lab = internet("reboots", &kinds);
    let far = socket(server(&lab), 0);
    for (index, kind) in kinds.into_iter().enumerate() {
        let host = &lab.hosts()[index];
        let [near, beacon] = [0, 1].map(|_| socket(host, 0));
        let seen = send(&near, &far, 1);
        far.send_to(&[2], seen).unwrap();
        assert_eq!(receive(&near), 2, "{kind}");

        router(&lab, index).reboot().unwrap();
        far.send_to(&[3], seen).unwrap();
        assert_nothing(&near, &beacon, &far);
        let again = send(&near, &far, 4);
        far.send_to(&[5], again).unwrap();
        assert_eq!(receive(&near), 5, "{kind}");
        let kept = near.local_addr().unwrap().port();
        if kind != "symmetric" {
            assert_eq!((seen.port(), again.port()), (kept, kept), "{kind}");
        }

        let before = examined(&lab, host).unwrap();
        router(&lab, index).rebind().unwrap();
        let rebound = send(&near, &far, 6);
        assert_ne!(rebound, again, "{kind}");
        far.send_to(&[7], again).unwrap();
        assert_nothing(&near, &beacon, &far);
        far.send_to(&[8], rebound).unwrap();
        assert_eq!(receive(&near), 8, "{kind}");
        let after = examined(&lab, host).unwrap();
        let what = |it: Behaviour| (it.mapping, it.filtering);
        assert_eq!(what(before), what(after), "{kind}");
    }
}

/// One side of a pair that wants to connect.
struct Side {
    socket: UdpSocket,
    /// Where the other side is expected, and then where it was seen.
    target: SocketAddr,
    heard: bool,
}

impl Side {
    /// Takes what came, and answers where it came from.
    fn listen(&mut self) {
        let mut buffer = [0; 2];
        while let Ok((_, from)) = self.socket.recv_from(&mut buffer) {
            self.heard = true;
            self.target = from;
            if buffer[0] == 1 {
                self.socket.send_to(&[2], from).unwrap();
                return;
            }
        }
    }
}

/// Returns whether two hosts reach each other after each was told how a server sees the other.
fn connect(lab: &Lab, first: usize, second: usize) -> bool {
    let far = socket(server(lab), 0);
    let sockets = [first, second].map(|index| socket(&lab.hosts()[index], 0));
    let seen = [0, 1].map(|side| send(&sockets[side], &far, 0));
    let [one, other] = sockets;
    let mut sides = [(one, seen[1]), (other, seen[0])].map(|(socket, target)| {
        socket.set_read_timeout(Some(PATIENCE / 2)).unwrap();
        Side {
            socket,
            target,
            heard: false,
        }
    });
    for _ in 0..6 {
        for side in &sides {
            side.socket.send_to(&[1], side.target).unwrap();
        }
        for side in &mut sides {
            side.listen();
        }
        if sides.iter().all(|side| side.heard) {
            return true;
        }
    }
    false
}

#[test]
fn holes_are_punched_where_real_nats_let_them() {
    let kinds = ["full-cone", "restricted", "port-restricted", "symmetric"];
    let lab = internet("hole punching", &kinds);
    for first in 0..kinds.len() {
        for second in first + 1..kinds.len() {
            let wanted = (kinds[first], kinds[second]) != ("port-restricted", "symmetric");
            let found = connect(&lab, first, second);
            assert_eq!(found, wanted, "{} and {}", kinds[first], kinds[second]);
        }
    }
    drop(lab);
    let alike = [
        "port-restricted",
        "port-restricted",
        "symmetric",
        "symmetric",
    ];
    let lab = internet("hole punching", &alike);
    assert!(connect(&lab, 0, 1), "both port-restricted");
    assert!(!connect(&lab, 2, 3), "both symmetric");
}

#[test]
fn an_uplink_is_what_was_asked_for_and_nothing_of_a_laboratory_remains() {
    let lab = internet(
        "uplinks",
        &["symmetric", "2*port-restricted/symmetric+ipv6"],
    );
    let internet = lab.internet().unwrap();
    for site in internet.sites() {
        internet.measure_uplink(site).unwrap();
    }
    // Private addresses are the same at every site.
    let [first, second] = [0, 1].map(|index| lab.hosts()[index].address());
    assert_eq!(first, second);
    let client = internet.client();
    let far = socket(server(&lab), 0);
    let seen = send(&socket(client, 0), &far, 1);
    assert_eq!(seen.ip().to_string(), client.address());
    assert_eq!(internet.backbone().count(), 2);

    let record = lab.record().clone();
    let hosts = record.hosts.iter().map(|host| host.namespace.clone());
    let all: Vec<String> = hosts.chain(record.routers.clone()).collect();
    assert_eq!(all.len(), 3 + 2 + 6, "{all:?}");
    let exists = |name: &String| Path::new("/run/netns").join(name).exists();
    assert!(all.iter().all(exists));
    drop(lab);
    assert!(!all.iter().any(exists));
}
