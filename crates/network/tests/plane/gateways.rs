//! Tests gateways at several hosts, through the kernel's routing and its translation of addresses.

use crate::world::*;
use longhaul_lab::netns::Namespace;
use longhaul_network::plane::{GatewayPlan, PlaneError};
use longhaul_network::tap::{Nat, NatGateway, Subnet, gateway_name, names};
use longhaul_overlay::Mac;
use longhaul_overlay::switch::Reason;
use longhaul_protocol::HostId;
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::thread;

/// A server that is not in a subnet of any host.
const SERVER: &str = "203.0.113.9:7000";
const BYTES: usize = 1 << 20;

fn addresses(last: u8) -> Vec<Subnet> {
    vec![Subnet {
        address: Ipv4Addr::new(10, 0, 0, last),
        prefix_bits: 24,
    }]
}

fn plan(here: bool, hosts: &[HostId]) -> GatewayPlan {
    GatewayPlan {
        mac: Mac([2, 0x6c, 0x68, 0, 0, 1]),
        addresses: addresses(1),
        here,
        hosts: hosts.to_vec(),
    }
}

fn set(host: &Host, plan: Option<&GatewayPlan>) -> Result<(), PlaneError> {
    host.namespace
        .enter(|| host.plane.set_gateway(BLUE, plan))
        .unwrap()
}

fn gateways() -> Vec<NatGateway> {
    vec![NatGateway {
        device: gateway_name(BLUE),
        bridge: names(BLUE).0,
        addresses: addresses(1),
    }]
}

fn apply(host: &Host, nat: &mut Nat, gateways: &[NatGateway]) {
    let applied = host.namespace.enter(|| nat.apply(gateways));
    applied.unwrap().unwrap();
}

fn forwards(host: &Host, interface: &str) -> String {
    let path = format!("/proc/sys/net/ipv4/conf/{interface}/forwarding");
    let text = host.namespace.enter(|| fs::read_to_string(path)).unwrap();
    text.unwrap_or_default().trim().to_owned()
}

/// Repeats what a client says, and tells where it came from.
fn serve(between: &Namespace) -> std::sync::mpsc::Receiver<IpAddr> {
    between
        .configure(
            "link set dev lo up\naddr add 203.0.113.9/32 dev lo\naddr add 10.77.0.100/24 dev x\n",
        )
        .unwrap();
    let bound = between.enter(|| {
        let listener = TcpListener::bind(SERVER).unwrap();
        (listener, UdpSocket::bind(SERVER).unwrap())
    });
    let (listener, socket) = bound.unwrap();
    let (came, from) = std::sync::mpsc::channel();
    let datagrams = came.clone();
    thread::spawn(move || {
        for mut client in listener.incoming().filter_map(Result::ok) {
            let _ = came.send(client.peer_addr().unwrap().ip());
            thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(length @ 1..) = client.read(&mut buffer) {
                    client.write_all(&buffer[..length]).unwrap();
                }
            });
        }
    });
    thread::spawn(move || {
        let mut word = [0; 64];
        while let Ok((length, client)) = socket.recv_from(&mut word) {
            let _ = datagrams.send(client.ip());
            socket.send_to(&word[..length], client).unwrap();
        }
    });
    from
}

/// Says a lot, and reads all of it again.
fn say(client: &mut TcpStream) {
    let said: Vec<u8> = (0..BYTES).map(|at| ((at * at) >> 7) as u8).collect();
    let mut heard = vec![0; BYTES];
    thread::scope(|scope| {
        let mut half = client.try_clone().unwrap();
        let said = &said;
        scope.spawn(move || half.write_all(said).unwrap());
        client.read_exact(&mut heard).unwrap();
    });
    assert!(said == heard, "other bytes came back");
}

#[test]
fn guests_get_out_by_a_gateway_and_their_flows_stay_there() {
    if !is_root() {
        return;
    }
    let mut world = World::new(Setup {
        hosts: 3,
        ..Setup::default()
    });
    world.open_all(BLUE, 1500);
    let from = serve(world.between());
    let mut nats = [Nat::default(), Nat::default()];
    for (host, nat) in world.hosts.iter().zip(&mut nats) {
        host.namespace
            .configure("route add default via 10.77.0.100 dev outer\n")
            .unwrap();
        set(host, Some(&plan(true, &[id(0), id(1)]))).unwrap();
        apply(host, nat, &gateways());
    }
    // The third host has no gateway, and uses that of the first one.
    set(&world.hosts[2], Some(&plan(false, &[id(0), id(1)]))).unwrap();
    let guest = world.station(2, BLUE, 7);
    guest
        .configure("route add default via 10.0.0.1 dev g\n")
        .unwrap();
    let connect = || {
        let connected = guest.enter(|| TcpStream::connect(SERVER)).unwrap();
        let came = from.recv_timeout(LONG).unwrap();
        (connected.unwrap(), came.to_string())
    };
    let socket = guest
        .enter(|| UdpSocket::bind("0.0.0.0:0"))
        .unwrap()
        .unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let ask = || {
        socket.send_to(b"word", SERVER).unwrap();
        let mut word = [0; 64];
        assert_eq!(socket.recv(&mut word).unwrap(), 4);
        from.recv_timeout(LONG).unwrap().to_string()
    };
    let (mut first, came) = connect();
    assert_eq!(
        (came, ask()),
        ("10.77.0.1".to_owned(), "10.77.0.1".to_owned())
    );
    say(&mut first);

    // The second one is nearer from now on.
    set(&world.hosts[2], Some(&plan(false, &[id(1), id(0)]))).unwrap();
    let (mut second, came) = connect();
    assert_eq!(came, "10.77.0.2");
    say(&mut first);
    say(&mut second);
    assert_eq!(ask(), "10.77.0.1");
    // Echoes are answered by the gateway, and nothing else is.
    let reached = |port: u16| {
        let socket = guest
            .enter(|| UdpSocket::bind("0.0.0.0:0"))
            .unwrap()
            .unwrap();
        socket.connect(("10.0.0.1", port)).unwrap();
        socket.send(b"word").unwrap();
    };
    let own = world.hosts[1]
        .namespace
        .enter(|| UdpSocket::bind("0.0.0.0:9"));
    let own = own.unwrap().unwrap();
    own.set_nonblocking(true).unwrap();
    reached(9);
    let pinged = guest.enter(|| {
        std::process::Command::new("ping")
            .args(["-c1", "-W60", "10.0.0.1"])
            .output()
    });
    assert!(
        pinged.unwrap().unwrap().status.success(),
        "no answer to an echo"
    );
    assert!(own.recv(&mut [0; 64]).is_err(), "a guest reaches its host");

    let status = world.network_status(2, BLUE);
    assert_eq!(status.switch.not_forwarded(Reason::GatewaySpoofed), 0);
    assert!(status.flows.flows >= 3 && status.flows.elsewhere == status.flows.flows);
    for (host, nat) in world.hosts.iter().zip(&mut nats) {
        // Someone removes all rules: they come back.
        let run = |words: &[&str]| {
            let run = || std::process::Command::new("nft").args(words).output();
            host.namespace.enter(run).unwrap().unwrap().stdout
        };
        run(&["flush", "ruleset"]);
        apply(host, nat, &gateways());
        let table = String::from_utf8(run(&["list", "ruleset"])).unwrap();
        assert!(
            table.contains("masquerade") && table.contains("\"outer\""),
            "{table}"
        );
        assert_eq!(
            (forwards(host, "outer"), forwards(host, "all")),
            ("1".into(), "0".into())
        );
        // A killed agent leaves its rules; the next one finds what they opened.
        *nat = Nat::default();
        apply(host, nat, &[]);
        assert_eq!(forwards(host, "outer"), "0");
        set(host, None).unwrap();
        assert_eq!(
            forwards(host, &gateway_name(BLUE)),
            "",
            "the device is gone"
        );
        assert_eq!(run(&["list", "ruleset"]), b"");
    }
}

#[test]
fn a_gateway_in_a_subnet_of_its_host_is_refused() {
    if !is_root() {
        return;
    }
    let world = World::blue(Setup::default());
    let host = &world.hosts[0];
    let device = gateway_name(BLUE);
    let mut wrong = plan(true, &[id(1)]);
    wrong.addresses[0].address = Ipv4Addr::new(10, 77, 0, 200);
    let error = set(host, Some(&wrong)).unwrap_err().to_string();
    assert!(error.contains("10.77.0.0/24 on outer"), "{error}");
    eventually("no device stays", || forwards(host, &device).is_empty());
    assert_eq!(world.network_status(0, BLUE).gateway, None);
    // Another address, another MAC address, and the end of the network.
    set(host, Some(&plan(true, &[]))).unwrap();
    let made = world.network_status(0, BLUE).gateway.unwrap();
    assert_eq!(made.0, device);
    let mut other = plan(true, &[]);
    other.mac = Mac([2, 0x6c, 0x68, 0, 0, 2]);
    set(host, Some(&other)).unwrap();
    assert_eq!(forwards(host, &device), "1");
    let closed = host.namespace.enter(|| host.plane.close_network(BLUE));
    assert!(closed.unwrap().unwrap());
    assert_eq!(forwards(host, &device), "");
    let gone = set(host, Some(&other));
    assert!(matches!(gone, Err(PlaneError::UnknownNetwork(BLUE))));
}
