//! Hosts in network namespaces, joined by a bridge, each with a frame plane of its own.

use crate::udp::{Udp, UdpOutlet, receive, way_to};
use longhaul_lab::netns::{Namespace, command};
use longhaul_network::plane::{
    LocalPort, NetworkConfig, NetworkStatus, PeerStatus, Plane, PlaneConfig, PlaneEvent,
    PlaneOutputs,
};
use longhaul_network::tap::{VlanFilter, names};
use longhaul_overlay::NetworkId;
use longhaul_overlay::seal::{Side, Suite};
use longhaul_overlay::switch::Vlans;
use longhaul_protocol::HostId;
use longhaul_transport::{Endpoint, EndpointConfig, Hello, Identity, TRUST_FILE, TrustStore};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// A time limit long enough for the slowest machine; successful tests do not wait for it.
pub(crate) const LONG: Duration = Duration::from_secs(90);
pub(crate) const BLUE: NetworkId = NetworkId(0xb1);
pub(crate) const RED: NetworkId = NetworkId(0x4ed0_0000_0000_0001);
const PORT: u16 = 7399;

static WORLDS: AtomicU32 = AtomicU32::new(0);

/// Waits until something is so.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "not in {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Says why tests are left out, if they cannot run here.
pub(crate) fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("left out: network namespaces need root");
    }
    root
}

pub(crate) struct Host {
    pub(crate) id: HostId,
    pub(crate) namespace: Namespace,
    pub(crate) plane: Plane,
    pub(crate) udp: Arc<Udp>,
    pub(crate) outputs: PlaneOutputs,
    pub(crate) address: SocketAddr,
    receiver: Option<(UnixStream, JoinHandle<()>)>,
    /// What carries the frame plane in the place of `udp`.
    endpoint: Option<(Endpoint, Runtime, TempDir)>,
}

/// Hosts on one Ethernet, fully meshed.
pub(crate) struct World {
    name: String,
    between: Namespace,
    pub(crate) hosts: Vec<Host>,
    stations: Vec<String>,
}

/// How the hosts of a world are.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) hosts: usize,
    /// The MTU of the path between hosts, which their own interfaces do not know.
    pub(crate) path_mtu: u32,
    pub(crate) config: PlaneConfig,
    pub(crate) suite: Suite,
    /// Whether the frame plane shares the socket of QUIC, as in an agent.
    pub(crate) endpoint: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            hosts: 2,
            path_mtu: 1500,
            config: PlaneConfig::default(),
            suite: Suite::Aes256Gcm,
            endpoint: false,
        }
    }
}

pub(crate) fn id(host: usize) -> HostId {
    HostId([host as u8 + 1; 32])
}

/// The secret of a connection between two hosts.
pub(crate) fn secret(one: usize, other: usize, connection: u8) -> [u8; 32] {
    let mut secret = [connection; 32];
    secret[..2].copy_from_slice(&[one.min(other) as u8, one.max(other) as u8]);
    secret
}

fn side(here: usize, there: usize) -> Side {
    if here < there {
        Side::Dialler
    } else {
        Side::Listener
    }
}

/// Binds QUIC's endpoint inside a namespace.
fn endpoint(namespace: &Namespace, address: SocketAddr) -> (Endpoint, Runtime, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let identity = Identity::load_or_create(folder.path()).unwrap();
    let trust = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        software: "longhaul test".to_owned(),
        incarnation: None,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let bound = namespace.enter(|| {
        let _inside = runtime.enter();
        Endpoint::bind(EndpointConfig::new(address, hello), identity, trust)
    });
    (bound.unwrap().unwrap(), runtime, folder)
}

impl World {
    /// Two hosts or more, each with its configuration.
    pub(crate) fn mixed(configs: &[PlaneConfig]) -> Self {
        let setup = Setup {
            hosts: configs.len(),
            ..Setup::default()
        };
        Self::made(&setup, |host| configs[host].clone())
    }

    pub(crate) fn new(setup: Setup) -> Self {
        Self::made(&setup, |_| setup.config.clone())
    }

    fn made(setup: &Setup, config: impl Fn(usize) -> PlaneConfig) -> Self {
        let number = WORLDS.fetch_add(1, Ordering::Relaxed);
        let name = format!("lhplane-{}-{number}", std::process::id());
        let between = Namespace::create(&format!("{name}-x")).unwrap();
        between
            .configure("link add x type bridge\nlink set dev x up\n")
            .unwrap();
        let mut world = Self {
            name,
            between,
            hosts: Vec::new(),
            stations: Vec::new(),
        };
        for host in 0..setup.hosts {
            let host = world.host(host, setup, config(host));
            world.hosts.push(host);
        }
        for one in 0..setup.hosts {
            for other in (0..setup.hosts).filter(|other| *other != one) {
                world.connect(one, other, 0, setup.suite);
            }
        }
        world
    }

    /// Returns two hosts with the network blue.
    pub(crate) fn blue(setup: Setup) -> Self {
        let world = Self::new(setup);
        world.open_all(BLUE, 1500);
        world
    }

    fn host(&self, number: usize, setup: &Setup, config: PlaneConfig) -> Host {
        let path_mtu = setup.path_mtu;
        let namespace = Namespace::create(&format!("{}-h{number}", self.name)).unwrap();
        let port = format!("p{number}");
        self.between
            .configure(&format!(
                "link add {port} type veth peer name outer netns {}\n\
                 link set dev {port} master x mtu {path_mtu} up\n",
                namespace.name(),
            ))
            .unwrap();
        let address = SocketAddr::from(([10, 77, 0, number as u8 + 1], PORT));
        namespace
            .configure(&format!(
                "addr add {}/24 dev outer\nlink set dev outer up\n",
                address.ip()
            ))
            .unwrap();
        let mut plain = address;
        plain.set_port(PORT + u16::from(setup.endpoint));
        let udp = namespace.enter(|| Udp::bind(plain)).unwrap().unwrap();
        let id = id(number);
        if setup.endpoint {
            let (endpoint, runtime, folder) = endpoint(&namespace, address);
            let outlet = endpoint.plane_socket();
            let (plane, inbox, outputs) = Plane::new(config, outlet, id).unwrap();
            endpoint.set_datagrams(Some(Box::new(inbox)));
            return Host {
                id,
                namespace,
                plane,
                udp,
                outputs,
                address,
                receiver: None,
                endpoint: Some((endpoint, runtime, folder)),
            };
        }
        let outlet = UdpOutlet(udp.clone());
        let (plane, inbox, outputs) = Plane::new(config, outlet, id).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let socket = udp.clone();
        let receiver = std::thread::spawn(move || receive(&socket, inbox, &stopped));
        Host {
            id,
            namespace,
            plane,
            udp,
            outputs,
            address,
            receiver: Some((stop, receiver)),
            endpoint: None,
        }
    }

    /// Gives a host the keys of a connection with another one, and the way to it.
    pub(crate) fn connect(&self, here: usize, there: usize, connection: u8, suite: Suite) {
        let plane = &self.hosts[here].plane;
        let secret = secret(here, there, connection);
        plane
            .connected(id(there), &secret, side(here, there), suite)
            .unwrap();
        let way = way_to(self.hosts[there].address);
        plane.set_way(id(there), Some(way)).unwrap();
    }

    /// Returns the namespace of the Ethernet between the hosts.
    pub(crate) fn between(&self) -> &Namespace {
        &self.between
    }

    pub(crate) fn members(&self) -> Vec<HostId> {
        self.hosts.iter().map(|host| host.id).collect()
    }

    pub(crate) fn network(&self, network: NetworkId, mtu: u16) -> NetworkConfig {
        NetworkConfig {
            id: network,
            members: self.members(),
            mtu,
            vlans: Vlans::all(),
            port: LocalPort::Bridge(VlanFilter::Transparent),
        }
    }

    pub(crate) fn open(&self, host: usize, config: &NetworkConfig) {
        let host = &self.hosts[host];
        let opened = host.namespace.enter(|| host.plane.open_network(config));
        opened.unwrap().unwrap();
    }

    /// Opens a network on all hosts.
    pub(crate) fn open_all(&self, network: NetworkId, mtu: u16) {
        let config = self.network(network, mtu);
        for host in 0..self.hosts.len() {
            self.open(host, &config);
        }
    }

    /// Adds a station with an IP stack of its own to a host's part of a network. Its interface is
    /// `g`; its addresses end with its number.
    pub(crate) fn station(&mut self, host: usize, network: NetworkId, number: u8) -> Namespace {
        let tag = self.stations.len();
        let station = Namespace::create(&format!("{}-s{tag}", self.name)).unwrap();
        self.stations.push(station.name().to_owned());
        let bridge = names(network).0;
        let port = format!("v{tag}");
        let here = &self.hosts[host].namespace;
        here.configure(&format!(
            "link add {port} type veth peer name g netns {}\n\
             link set dev {port} master {bridge} up\n",
            station.name()
        ))
        .unwrap();
        station
            .enter(|| fs::write("/proc/sys/net/ipv6/conf/g/disable_ipv6", "0"))
            .unwrap()
            .unwrap();
        let mac = format!("02:00:00:00:00:{number:02x}");
        station
            .configure(&format!(
                "link set dev g address {mac} up\naddr add 10.0.0.{number}/24 dev g\n\
                 addr add fd00::{number:x}/64 dev g nodad\n"
            ))
            .unwrap();
        station
    }

    /// Adds a guest's network card to a host's part of a network: frames are read and written.
    pub(crate) fn card(&self, host: usize, network: NetworkId, name: &str) -> Card {
        let here = &self.hosts[host].namespace;
        let file = here.enter(|| longhaul_lab::tap::open(name, 0)).unwrap();
        let file = file.unwrap();
        let bridge = names(network).0;
        here.enter(|| fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1"))
            .unwrap()
            .unwrap();
        here.configure(&format!("link set dev {name} master {bridge} up\n"))
            .unwrap();
        Card { file }
    }

    pub(crate) fn network_status(&self, host: usize, network: NetworkId) -> NetworkStatus {
        let status = self.hosts[host].plane.status();
        let found = status
            .networks
            .into_iter()
            .find(|found| found.id == network);
        found.unwrap()
    }

    pub(crate) fn peer_status(&self, host: usize, peer: usize) -> PeerStatus {
        let status = self.hosts[host].plane.status();
        let found = status
            .peers
            .into_iter()
            .find(|found| found.host == id(peer));
        found.unwrap()
    }

    /// Waits until both hosts know the path's MTU.
    pub(crate) fn wait_for_mtu(&self, at_least: usize) {
        for here in 0..self.hosts.len() {
            for there in (0..self.hosts.len()).filter(|there| *there != here) {
                eventually("the path's MTU is known", || {
                    self.peer_status(here, there).mtu_bytes >= at_least
                });
            }
        }
    }
}

impl Host {
    /// Waits for an event.
    pub(crate) fn event(&mut self, what: &str, is: impl Fn(&PlaneEvent) -> bool) {
        let events = &mut self.outputs.events;
        eventually(what, || {
            std::iter::from_fn(|| events.try_recv().ok()).any(|event| is(&event))
        });
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for mut host in self.hosts.drain(..) {
            let Host {
                namespace, plane, ..
            } = &host;
            for network in plane.networks() {
                let _ = namespace.enter(|| plane.close_network(network));
            }
            if let Some((stop, receiver)) = host.receiver.take() {
                drop(stop);
                let _ = receiver.join();
            }
            if let Some((endpoint, ..)) = &host.endpoint {
                endpoint.set_datagrams(None);
            }
            let name = host.namespace.name().to_owned();
            drop(host);
            let _ = Namespace::remove(&name);
        }
        for station in &self.stations {
            let _ = Namespace::remove(station);
        }
        let _ = Namespace::remove(self.between.name());
    }
}

/// A guest's network card.
pub(crate) struct Card {
    file: File,
}

impl Card {
    pub(crate) fn send(&self, frame: &[u8]) {
        (&self.file).write_all(frame).unwrap();
    }

    /// Returns the next frame; `None` after a while.
    fn next(&self, within: Duration) -> Option<Vec<u8>> {
        let mut files = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
        let within = PollTimeout::try_from(within).unwrap();
        if poll(&mut files, within).unwrap() == 0 {
            return None;
        }
        let mut buffer = vec![0; 70_000];
        let length = (&self.file).read(&mut buffer).unwrap();
        buffer.truncate(length);
        Some(buffer)
    }

    /// Returns the frames up to the first for which `is` holds, which is the last of them.
    #[track_caller]
    pub(crate) fn until(&self, what: &str, mut is: impl FnMut(&[u8]) -> bool) -> Vec<Vec<u8>> {
        let start = Instant::now();
        let mut frames = Vec::new();
        loop {
            let left = LONG.saturating_sub(start.elapsed());
            let frame = self.next(left);
            let frame = frame.unwrap_or_else(|| panic!("not in {LONG:?}: {what}"));
            frames.push(frame);
            if frames.last().is_some_and(|frame| is(frame)) {
                return frames;
            }
        }
    }

    /// Sends a frame again and again until another card gets it.
    #[track_caller]
    pub(crate) fn reaches(&self, frame: &[u8], other: &Self) {
        self.reaches_after(|| {}, frame, other);
    }

    /// The same, and does something before each.
    #[track_caller]
    pub(crate) fn reaches_after(&self, before: impl Fn(), frame: &[u8], other: &Self) {
        let start = Instant::now();
        loop {
            before();
            self.send(frame);
            while let Some(got) = other.next(Duration::from_millis(200)) {
                if got == frame {
                    return;
                }
            }
            assert!(start.elapsed() < LONG, "a frame does not arrive");
        }
    }
}

/// Makes a frame of a type for experiments (IEEE 802, 0x88b5).
pub(crate) fn frame(to: [u8; 6], from: [u8; 6], vlan: Option<u16>, text: &str) -> Vec<u8> {
    let mut frame = [to, from].concat();
    if let Some(vlan) = vlan {
        frame.extend([0x81, 0]);
        frame.extend(vlan.to_be_bytes());
    }
    frame.extend([0x88, 0xb5]);
    frame.extend(text.as_bytes());
    frame.resize(frame.len().max(60), 0);
    frame
}

pub(crate) const ALL: [u8; 6] = [0xff; 6];

pub(crate) fn mac(number: u8) -> [u8; 6] {
    [2, 0, 0, 0, 1, number]
}

/// Waits until a station answers another one.
#[track_caller]
pub(crate) fn ping(from: &Namespace, to: &str) {
    eventually("a ping is answered", || {
        let mut ping = command("ping");
        ping.args(["-n", "-c", "1", "-W", "2", to]);
        from.output(&mut ping).is_ok()
    });
}
