//! Tests networks that span sites: guests move between hosts behind NATs, which only a rendezvous
//! server introduces, and their connections go on.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, boot, show_logs_of_failure, tiny};
use longhaul_lab::agent::Agent;
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::clients::{Client, Loop, download, session};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles, Tiny, network};
use longhaul_lab::installed;
use longhaul_lab::internet::{SitePlan, SitesPlan};
use longhaul_lab::lab::Lab;
use longhaul_lab::netns::Namespace;
use longhaul_lab::process::wait_until;
use longhaul_lab::product::{Product, Settings, channel_socket};
use longhaul_lab::realm::{Realm, path_to};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const UPLINK: &str = "100mbit,10ms";
const QEMU: &str = "10.0";

/// Guests under TCG share two cores badly: one test at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Sites of an Internet, an agent on each host, and a realm with all of them.
struct World {
    realm: Realm,
    product: Product,
    lab: Lab,
    _turn: MutexGuard<'static, ()>,
}

impl World {
    /// Creates it; `None` where QEMU is not installed and need not be.
    fn create(purpose: &str, sites: &[&str], servers: usize) -> Option<Self> {
        Self::create_with(purpose, sites, servers, |_| toml::Table::new())
    }

    /// Creates it, with tables of the first host's configuration, which are made once the sites
    /// are there.
    fn create_with(
        purpose: &str,
        sites: &[&str],
        servers: usize,
        of_first: impl FnOnce(&Lab) -> toml::Table,
    ) -> Option<Self> {
        if let Err(error) = installed::qemu(QEMU) {
            assert!(!installed::all_required(), "{error}");
            eprintln!("SKIPPED {purpose}: {error}");
            return None;
        }
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let uplink = UPLINK.parse().unwrap();
        let plan = SitesPlan {
            purpose: format!("test: {purpose}"),
            sites: sites
                .iter()
                .map(|access| SitePlan {
                    access: access.parse().unwrap(),
                    uplink,
                })
                .collect(),
            servers,
            backbone: uplink,
            seed: 1,
        };
        let mut lab = Lab::create_sites(&plan).unwrap();
        let files = KernelFiles::make(lab.host(0).unwrap().folder()).unwrap();
        let settings = Settings {
            qemus: vec![QEMU.to_owned()],
            accelerator: "tcg".to_owned(),
        };
        let first = of_first(&lab);
        let more = |host| match host {
            0 => first.clone(),
            _ => toml::Table::new(),
        };
        let product = Product::start_each_with(&mut lab, &files, &settings, more).unwrap();
        let realm = Realm::create(&lab).unwrap();
        let world = Self {
            realm,
            product,
            lab,
            _turn: turn,
        };
        world.realm.join(&world.lab, &world.agents()).unwrap();
        Some(world)
    }

    fn agent(&self, host: usize) -> &Agent {
        self.product.agent(host).unwrap()
    }

    /// Boots a guest on the first host. Its arena is heard on the first two.
    fn boot(&self, guest: &Tiny) -> Arena {
        let mut arena = Arena::new();
        for host in 0..2 {
            let host = self.lab.host(host).unwrap();
            let socket = channel_socket(host, &guest.name, CHANNEL_NAME);
            arena.attach(&socket).unwrap();
        }
        let start = || {
            let described = guest.description();
            let started = self.product.start_guest(&self.lab, 0, &described);
            started.unwrap();
        };
        let end = || self.product.stop_guest(0, &guest.name).unwrap();
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes: 32 << 20,
            working_set_bytes: 4 << 20,
            pages_per_s: 200,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 100,
            seed: 7,
        };
        boot(&mut arena, &workload, start, end);
        arena
    }

    fn agents(&self) -> Vec<&Agent> {
        let hosts = 0..self.lab.hosts().len();
        hosts.map(|host| self.agent(host)).collect()
    }

    /// Waits until one host reaches another in this way.
    fn reaches(&self, from: usize, to: usize, kind: &str) {
        let to = self.agent(to).name();
        let mut said = String::new();
        let reached = wait_until(LIMIT, || {
            let (is, text) = path_to(self.agent(from), to).unwrap();
            said = text;
            is.as_deref() == Some(kind)
        });
        let from = self.agent(from).name();
        assert!(reached, "{from} does not reach {to} {kind}: {said}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        show_logs_of_failure(&self.product);
    }
}

#[test]
fn a_guest_moves_between_hosts_behind_nats_and_its_connections_go_on() {
    let sites = ["port-restricted", "port-restricted", "none"];
    let Some(mut world) = World::create("networks", &sites, 1) else {
        return;
    };
    let agents = world.agents();
    world
        .realm
        .create_network(&world.lab, network::NETWORK, &agents)
        .unwrap();
    for (from, to) in [(0, 1), (0, 2), (1, 2)] {
        world.reaches(from, to, "direct");
        world.reaches(to, from, "direct");
    }
    let bridge = world.realm.bridge(world.agent(2), network::NETWORK);
    world.lab.add_clients_at(2, &bridge.unwrap()).unwrap();

    let mut guest = tiny("served", Chipset::Q35, QEMU, 1);
    guest.serves_clients = true;
    let mut arena = world.boot(&guest);

    for from in 0..2 {
        let loops: [Loop; 2] = [download, session];
        let clients = world.lab.clients().unwrap();
        let all = loops.map(|run| Client::start(clients, run).unwrap());
        for client in &all {
            assert!(
                wait_until(LIMIT, || client.has_ended() || client.answers() > 10),
                "not served"
            );
        }
        let to = world.lab.host(1 - from).unwrap();
        let moving = world.product.migrate(from, &guest.name, to, &[]).unwrap();
        let finished = moving.finish(LIMIT).unwrap();
        assert!(finished.completed(), "{}", finished.why());
        for client in &all {
            let before = client.answers();
            assert!(wait_until(LIMIT, || client.has_ended()
                || client.answers() > before + 10));
        }
        let seen = all.map(|client| client.finish().unwrap());
        eprintln!("{:?}: {seen:?}", finished.report.unwrap().downtime);
        let verified = arena.verify(LIMIT).unwrap();
        assert_eq!(verified.errors, 0, "{:?}", arena.faults());
    }
    world.product.stop_guest(0, &guest.name).unwrap();
}

#[test]
fn hosts_reach_each_other_through_whatever_their_nats_let_through() {
    let kinds = ["full-cone", "restricted", "port-restricted", "symmetric"];
    let sites = [&kinds[..], &["symmetric", "no-udp"]].concat();
    let Some(world) = World::create("ways through NATs", &sites, 1) else {
        return;
    };
    world
        .realm
        .create_network(&world.lab, "blue", &world.agents())
        .unwrap();
    for first in 0..sites.len() {
        for second in first + 1..sites.len() {
            let relayed = sites[second] == "no-udp"
                || (sites[first], sites[second]) == ("symmetric", "symmetric");
            world.reaches(first, second, if relayed { "relayed" } else { "direct" });
        }
    }
}

#[test]
fn hosts_reach_each_other_behind_one_nat_and_over_ipv6() {
    let sites = ["2*port-restricted", "ipv6", "port-restricted+ipv6"];
    let Some(world) = World::create("one NAT, and IPv6", &sites, 1) else {
        return;
    };
    world
        .realm
        .create_network(&world.lab, "blue", &world.agents())
        .unwrap();
    // Two behind one NAT, one with IPv6 alone, one with both families.
    let [first, second, ipv6, both] = [0, 1, 2, 3];
    world.reaches(first, second, "direct");
    world.reaches(first, both, "direct");
    world.reaches(ipv6, both, "direct");
    // They have no family in common.
    world.reaches(first, ipv6, "relayed");
}

/// What a server on the Internet sees of a guest that calls it.
#[derive(Debug, Default)]
struct Called {
    /// Where connections that stay come from, and how many words came on them.
    kept: Vec<IpAddr>,
    words: u64,
    /// Where connections come from that end after one word.
    once: Vec<IpAddr>,
    /// Where datagrams come from, all of one socket.
    datagrams: Vec<IpAddr>,
}

fn lock(called: &Mutex<Called>) -> MutexGuard<'_, Called> {
    called.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Repeats each word of a connection.
fn answer(mut client: TcpStream, called: &Mutex<Called>) -> std::io::Result<()> {
    let from = client.peer_addr()?.ip();
    client.set_nodelay(true)?;
    let mut word = [0; 8];
    loop {
        client.read_exact(&mut word)?;
        client.write_all(&word)?;
        let mut called = lock(called);
        match u64::from_le_bytes(word) {
            u64::MAX => called.once.push(from),
            0 => called.kept.push(from),
            _ => called.words += 1,
        }
    }
}

/// Starts a server on the first server of the Internet, whose threads stay until the tests end.
/// Returns its address.
fn serve(world: &World, called: &Arc<Mutex<Called>>) -> String {
    const PORT: u16 = 7000;
    let server = world.lab.internet().unwrap().server(0).unwrap();
    let v4 = server.addresses().iter().find(|it| !it.contains(':'));
    let address = format!("{}:{PORT}", v4.unwrap());
    let namespace = server.namespace();
    let bound = namespace.enter(|| {
        let listener = TcpListener::bind(&address).unwrap();
        (listener, UdpSocket::bind(&address).unwrap())
    });
    let (listener, socket) = bound.unwrap();
    let shared = called.clone();
    thread::spawn(move || {
        for client in listener.incoming().filter_map(Result::ok) {
            let called = shared.clone();
            // A client that goes away ends its thread.
            thread::spawn(move || drop(answer(client, &called)));
        }
    });
    let shared = called.clone();
    thread::spawn(move || {
        let mut word = [0; 8];
        while let Ok((length, from)) = socket.recv_from(&mut word) {
            lock(&shared).datagrams.push(from.ip());
            // Any may be lost.
            let _ = socket.send_to(&word[..length], from);
        }
    });
    address
}

/// Returns what a host says of the gateway of a network.
fn gateway(agent: &Agent, network: &str) -> serde_json::Value {
    let said = agent.run(&["--json", "host", "realm"]).unwrap();
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let networks = said["realm"]["networks"].as_array().unwrap();
    let found = networks.iter().find(|found| found["name"] == network);
    found.unwrap()["gateway"].clone()
}

#[test]
fn a_guest_that_moved_leaves_by_the_near_gateway_and_its_connections_by_the_old_one() {
    let sites = ["port-restricted", "port-restricted"];
    let Some(world) = World::create("gateways", &sites, 1) else {
        return;
    };
    let network = network::NETWORK;
    world
        .realm
        .create_network(&world.lab, network, &world.agents())
        .unwrap();
    let words = ["network", "gateway", network, "--address", "10.78.0.1/24"];
    world.realm.operate(&world.lab, &words).unwrap();
    world.realm.publish(&world.lab).unwrap();
    for agent in world.agents() {
        let mut said = serde_json::Value::Null;
        let open = wait_until(LIMIT, || {
            said = gateway(agent, network);
            said["device"].is_string() && said["error"].is_null()
        });
        assert!(open, "{}: {said}", agent.name());
    }
    world.reaches(0, 1, "direct");
    world.reaches(1, 0, "direct");
    let called = Arc::<Mutex<Called>>::default();
    let server = serve(&world, &called);
    let seen = |what: &dyn Fn(&Called) -> bool, why: &str| {
        let is_so = wait_until(LIMIT, || what(&lock(&called)));
        assert!(is_so, "{why}: {:?}", lock(&called));
    };
    let internet = world.lab.internet().unwrap();
    let [lyon, paris] = [0, 1].map(|site| -> IpAddr {
        let site = internet.site(site).unwrap();
        site.address().unwrap().parse().unwrap()
    });

    let mut guest = tiny("calls", Chipset::Q35, QEMU, 1);
    guest.serves_clients = true;
    guest.calls = Some(format!("10.78.0.1,{server}"));
    let _arena = world.boot(&guest);
    let calls = |it: &Called| it.words > 20 && it.once.len() > 1 && it.datagrams.len() > 20;
    seen(&calls, "the guest does not get out");
    {
        // A boot that was tried again has called before.
        let mut called = lock(&called);
        let all = [&called.kept, &called.once, &called.datagrams];
        assert!(all.into_iter().flatten().all(|from| *from == lyon));
        called.kept.clear();
        called.once.clear();
    }

    let to = world.lab.host(1).unwrap();
    let moving = world.product.migrate(0, &guest.name, to, &[]).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    assert!(finished.completed(), "{}", finished.why());
    let (words, datagrams) = {
        let called = lock(&called);
        (called.words, called.datagrams.len())
    };
    seen(
        &|it| it.once.contains(&paris),
        "nothing leaves by the near gateway",
    );
    seen(&|it| it.words > words + 20, "the connection has ended");
    seen(
        &|it| it.datagrams.len() > datagrams + 20,
        "the datagrams have ended",
    );
    let called = lock(&called);
    assert!(called.kept.is_empty(), "another connection: {called:?}");
    let flows: Vec<&IpAddr> = called.datagrams.iter().collect();
    assert!(flows.iter().all(|from| **from == lyon), "{called:?}");
    let first_near = called.once.iter().position(|from| *from == paris);
    let after = &called.once[first_near.unwrap()..];
    assert!(after.iter().all(|from| *from == paris), "{called:?}");
    let said = gateway(world.agent(1), network);
    assert!(said["elsewhere"].as_u64() >= Some(2), "{said}");
    drop(called);
    world.product.stop_guest(1, &guest.name).unwrap();
}

/// Makes a station: an interface with an address, whose other end is a port of a bridge.
fn station(world: &World, host: usize, network: &str, address: &str) {
    let bridge = world.realm.bridge(world.agent(host), network).unwrap();
    let namespace = world.lab.host(host).unwrap().namespace();
    namespace
        .configure(&format!(
            "link add station type veth peer name port\n\
             link set dev port master {bridge} up\n\
             addr add {address}/24 dev station\n\
             link set dev station up\n"
        ))
        .unwrap();
}

fn station_socket(world: &World, host: usize, address: &str) -> UdpSocket {
    let namespace = world.lab.host(host).unwrap().namespace();
    let bound = namespace.enter(|| UdpSocket::bind((address, 9))).unwrap();
    let socket = bound.unwrap();
    socket
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    socket
}

/// Counts the frames that pass the public network, and those with `wanted` in them, until told.
fn capture(world: &World, wanted: &'static [u8], stop: &Arc<AtomicBool>) -> JoinHandle<[u64; 2]> {
    let name = world.lab.internet().unwrap().namespace().name().to_owned();
    let namespace = Namespace::open(&name).unwrap();
    let opened = namespace.enter(|| {
        let all = SockProtocol::EthAll;
        socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::SOCK_NONBLOCK,
            all,
        )
    });
    let opened = opened.unwrap().unwrap();
    let stop = stop.clone();
    thread::spawn(move || {
        let (mut frames, mut found) = (0, 0);
        let mut buffer = vec![0; 1 << 17];
        loop {
            match recv(opened.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(length) => {
                    let frame = &buffer[..length];
                    frames += 1;
                    let windows = frame.windows(wanted.len());
                    found += u64::from(windows.into_iter().any(|window| window == wanted));
                }
                Err(_) if stop.load(Ordering::Relaxed) => return [frames, found],
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        }
    })
}

#[test]
fn frames_are_sealed_reach_members_alone_and_a_removed_host_gets_none() {
    const SECRET: &[u8] = b"a secret of the blue network";
    let sites = ["none", "full-cone", "none"];
    let Some(world) = World::create("members alone", &sites, 1) else {
        return;
    };
    let [lyon, paris, oslo] = [0, 1, 2].map(|host| world.agent(host));
    let create = |name: &str, members: &[&Agent]| {
        let created = world.realm.create_network(&world.lab, name, members);
        created.unwrap();
    };
    create("blue", &[lyon, paris]);
    create("red", &[lyon, oslo]);
    // The same address in both networks.
    station(&world, 0, "blue", "10.79.0.1");
    station(&world, 1, "blue", "10.79.0.2");
    station(&world, 2, "red", "10.79.0.2");
    world.reaches(0, 1, "direct");
    world.reaches(0, 2, "direct");
    let stop = Arc::<AtomicBool>::default();
    let captured = capture(&world, SECRET, &stop);
    let at_lyon = station_socket(&world, 0, "10.79.0.1");
    let at_paris = station_socket(&world, 1, "10.79.0.2");
    let at_oslo = station_socket(&world, 2, "10.79.0.2");
    let mut buffer = [0; 64];
    let arrived = wait_until(LIMIT, || {
        at_lyon.send_to(SECRET, "10.79.0.2:9").unwrap();
        at_paris
            .recv(&mut buffer)
            .is_ok_and(|length| buffer[..length] == *SECRET)
    });
    assert!(arrived, "nothing gets through the network");
    for _ in 0..20 {
        at_lyon.send_to(SECRET, "10.79.0.2:9").unwrap();
        // Any may be lost.
        let _ = at_paris.recv(&mut buffer);
    }
    assert!(at_oslo.recv(&mut buffer).is_err(), "another network has it");
    stop.store(true, Ordering::Relaxed);
    let [frames, found] = captured.join().unwrap();
    assert!(frames > 10, "only {frames} frames were captured");
    assert_eq!(found, 0, "of {frames} frames");

    world
        .realm
        .operate(&world.lab, &["host", "remove", paris.name()])
        .unwrap();
    let version = world.realm.publish(&world.lab).unwrap();
    let published = Instant::now();
    let known = |agent: &Agent| -> u64 {
        let said = agent.run(&["--json", "host", "realm"]).unwrap();
        let said: serde_json::Value = serde_json::from_str(&said).unwrap();
        said["realm"]["version"].as_u64().unwrap()
    };
    assert!(wait_until(LIMIT, || known(lyon) == version));
    eprintln!("cut {:?} after publishing", published.elapsed());
    // What was on its way.
    while at_paris.recv(&mut buffer).is_ok() {}
    for _ in 0..20 {
        at_lyon.send_to(SECRET, "10.79.0.2:9").unwrap();
        let came = at_paris.recv(&mut buffer);
        assert!(came.is_err(), "a removed host gets frames");
    }
    let (kind, _) = path_to(lyon, paris.name()).unwrap();
    assert_eq!(kind, None);
}

#[test]
fn what_is_connected_goes_on_without_rendezvous_servers() {
    let sites = ["port-restricted", "symmetric"];
    let Some(mut world) = World::create("no rendezvous", &sites, 2) else {
        return;
    };
    let agents = world.agents();
    world
        .realm
        .create_network(&world.lab, "blue", &agents)
        .unwrap();
    station(&world, 0, "blue", "10.79.0.1");
    station(&world, 1, "blue", "10.79.0.2");
    world.reaches(0, 1, "direct");
    world.reaches(1, 0, "direct");
    let at_lyon = station_socket(&world, 0, "10.79.0.1");
    let at_paris = station_socket(&world, 1, "10.79.0.2");
    let mut buffer = [0; 64];
    let mut gets_through = |count: u32| {
        for _ in 0..count {
            assert!(wait_until(LIMIT, || {
                at_lyon.send_to(b"word", "10.79.0.2:9").unwrap();
                at_paris.recv(&mut buffer).is_ok()
            }));
        }
    };
    gets_through(1);
    // One server fails, then both.
    world.realm.kill_server(0).unwrap();
    gets_through(10);
    world.realm.kill_server(1).unwrap();
    gets_through(10);
    world.realm.restart_server(&world.lab, 0).unwrap();
    world.realm.restart_server(&world.lab, 1).unwrap();
    // An agent that restarts is connected again.
    let host = world.lab.host(1).unwrap();
    world.product.agent_mut(1).unwrap().restart(host).unwrap();
    gets_through(1);
    world.reaches(0, 1, "direct");
}

/// An address that programs take for one of the Internet. It is only in the laboratory.
const MAPPED: &str = "45.45.45.45";

#[test]
fn a_port_that_a_router_maps_makes_a_path_direct() {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&folders).any(|folder| folder.join("miniupnpd").is_file()) {
        assert!(!installed::all_required(), "miniupnpd is missing");
        eprintln!("SKIPPED mapped ports: miniupnpd is missing: sudo scripts/install lab");
        return;
    }
    for by in ["PCP", "UPnP"] {
        let mut mapper = None;
        let maps = |lab: &Lab| {
            let internet = lab.internet().unwrap();
            let site = internet.site(0).unwrap();
            let router = site.routers().last().unwrap();
            let folder = lab.host(0).unwrap().folder();
            mapper = Some(router.map_ports(folder, MAPPED, by == "UPnP").unwrap());
            let own = site.address().unwrap();
            internet
                .namespace()
                .configure(&format!("route add {MAPPED}/32 via {own}\n"))
                .unwrap();
            toml::Table::from_iter([("port_mapping".to_owned(), true.into())])
        };
        let sites = ["symmetric", "symmetric"];
        let Some(world) = World::create_with(&format!("mapped by {by}"), &sites, 1, maps) else {
            return;
        };
        let agents = world.agents();
        world
            .realm
            .create_network(&world.lab, network::NETWORK, &agents)
            .unwrap();
        world.reaches(0, 1, "direct");
        world.reaches(1, 0, "direct");
        let log = std::fs::read_to_string(world.agent(0).log()).unwrap();
        let says = format!("{MAPPED}:");
        let mapped = log
            .lines()
            .find(|line| line.contains("passes datagrams on"));
        let mapped = mapped.unwrap_or_else(|| panic!("{log}"));
        assert!(mapped.contains(&says) && mapped.contains(by), "{mapped}");
        drop(world);
        drop(mapper);
    }
}
