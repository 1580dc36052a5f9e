//! Runs a host: an endpoint, its paths, and a frame plane of probes alone.

use super::rendezvous::{HELLO, Rendezvous, SERVER};
use longhaul_network::reach::{self, Config, Input, Outside, PeerStatus, Reach};
use longhaul_overlay::NetworkId;
use longhaul_overlay::seal::{
    EXPORTER_LABEL, HEADER_BYTES, KeyLimits, Kind, Opener, Sealer, Side, Suite, TAG_BYTES, halves,
};
use longhaul_paths::Tuning;
use longhaul_protocol::HostId;
use longhaul_transport::*;
use std::fs::File;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// A time limit for the slowest machine; successful tests do not wait for it.
pub(crate) const LONG: Duration = Duration::from_secs(180);

/// Puts this thread into a network namespace.
pub(crate) fn enter(namespace: Option<File>) {
    if let Some(namespace) = namespace {
        nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// A running host. It stops when it is dropped.
pub(crate) struct Host {
    pub(crate) id: HostId,
    pub(crate) endpoint: Endpoint,
    pub(crate) reach: Reach,
    pub(crate) plane: Arc<Plane>,
    _folder: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The keys of the one peer.
#[derive(Default)]
pub(crate) struct Plane {
    halves: Mutex<Option<(Sealer, Opener, HostId)>>,
    socket: OnceLock<PlaneSocket>,
    reach: OnceLock<Reach>,
    start: OnceLock<Instant>,
    pub(crate) controls: Mutex<Vec<Control>>,
}

impl Plane {
    fn now(&self) -> Duration {
        self.start.get_or_init(Instant::now).elapsed()
    }

    /// Takes the keys of a control connection.
    fn connected(&self, control: Control) {
        let exported = control.export(EXPORTER_LABEL).unwrap();
        let side = match control.dialled() {
            true => Side::Dialler,
            false => Side::Listener,
        };
        let (suite, limits) = (Suite::Aes256Gcm, KeyLimits::default());
        let (sealer, opener) = halves(self.now(), &exported, side, suite, limits).unwrap();
        let peer = control.peer().host.id;
        *self.halves.lock().unwrap() = Some((sealer, opener, peer));
        self.controls.lock().unwrap().push(control);
    }

    fn seal(&self, peer: HostId, way: Way, payload: &[u8]) -> bool {
        let now = self.now();
        let mut halves = self.halves.lock().unwrap();
        let Some((sealer, opener, of)) = &mut *halves else {
            return false;
        };
        assert_eq!(*of, peer);
        let mut datagram = vec![0; HEADER_BYTES];
        datagram.extend(payload);
        datagram.extend([0; TAG_BYTES]);
        let (kind, network) = (Kind::PathProbe, NetworkId(0));
        sealer
            .seal(now, opener.seen(), kind, network, &mut datagram)
            .unwrap();
        let socket = self.socket.get().unwrap();
        // A network that is cut has no route for a moment.
        socket.send(peer, way, &datagram, datagram.len()).is_ok()
    }
}

/// Receives for a plane.
struct Receiver(Arc<Plane>);

impl Datagrams for Receiver {
    fn take(&mut self, way: &Way, datagrams: &mut [u8], stride: usize) {
        let now = self.0.now();
        let mut halves = self.0.halves.lock().unwrap();
        let Some((sealer, opener, peer)) = &mut *halves else {
            return;
        };
        for datagram in datagrams.chunks_mut(stride) {
            let Ok(opened) = opener.open(now, datagram) else {
                continue;
            };
            sealer.confirmed(opened.seen);
            if let (Kind::PathProbe, Some(reach)) = (opened.kind, self.0.reach.get()) {
                reach.try_input(Input::Probe {
                    peer: *peer,
                    way: *way,
                    payload: opened.payload.to_vec(),
                });
            }
        }
    }

    fn flush(&mut self) {}
}

/// Connects what the paths need with the rest of the host.
struct Wires {
    id: HostId,
    endpoint: Endpoint,
    rendezvous: Rendezvous,
    plane: Arc<Plane>,
    dialling: bool,
}

impl Outside for Wires {
    fn signal(&mut self, to: HostId, _via: Way, bytes: Vec<u8>) {
        self.rendezvous.signal(self.id, to, bytes);
    }

    fn open_relay(&mut self, server: HostId, peer: HostId) {
        assert_eq!(server, SERVER);
        self.rendezvous.open_relay(self.id, peer);
    }

    fn open_tcp(&mut self, _: HostId) {
        panic!("the server has no TCP");
    }

    fn close_tcp(&mut self, _: HostId) {}

    fn seal_probe(&mut self, peer: HostId, way: Way, payload: &[u8]) -> bool {
        self.plane.seal(peer, way, payload)
    }

    fn batches(&self, _: HostId) -> u64 {
        0
    }

    fn used(&mut self, peer: HostId, way: Option<Way>) {
        let server = Way::Direct {
            socket: SocketId::MAIN,
            address: self.rendezvous.address(),
        };
        let hello = [&[HELLO][..], &self.id.0].concat();
        let socket = self.plane.socket.get().unwrap();
        socket.send(peer, server, &hello, hello.len()).unwrap();
        if way.is_none() || self.id > peer || std::mem::replace(&mut self.dialling, true) {
            return;
        }
        let (endpoint, plane) = (self.endpoint.clone(), self.plane.clone());
        tokio::spawn(async move {
            loop {
                match endpoint.connect_peer(peer).await {
                    Ok(control) => return plane.connected(control),
                    // Under load a handshake may take longer than its limit.
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        });
    }
}

impl Host {
    /// Starts a host with this identity in a namespace. It trusts `peer`.
    pub(crate) fn start(
        folder: tempfile::TempDir,
        peer: HostId,
        listen: &str,
        rendezvous: &Rendezvous,
        namespace: Option<File>,
    ) -> Self {
        let path = folder.path().to_owned();
        let (tell, told) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let rendezvous = rendezvous.clone();
        let listen = listen.parse().unwrap();
        let thread = std::thread::spawn(move || {
            enter(namespace);
            runtime().block_on(async {
                let identity = Identity::load_or_create(&path).unwrap();
                let trust = TrustStore::open(&path.join(TRUST_FILE)).unwrap();
                let trusted = TrustedHost {
                    name: "other".to_owned(),
                    id: peer,
                    addresses: vec!["192.0.2.1:1".to_owned()],
                    scope: Scope {
                        may_query: true,
                        may_send_guests: true,
                    },
                };
                trust.replace(trusted).unwrap();
                let hello = Hello {
                    version_min: 1,
                    version_max: 1,
                    software: "longhaul test".to_owned(),
                    incarnation: None,
                };
                let config = EndpointConfig::new(listen, hello);
                let endpoint = Endpoint::bind(config, identity, trust).unwrap();
                let (reach, plane) = wire(&endpoint, &rendezvous);
                let (accepting, accepted) = (endpoint.clone(), plane.clone());
                tokio::spawn(async move {
                    while let Some(control) = accepting.accept().await {
                        accepted.connected(control);
                    }
                });
                tell.send((endpoint.clone(), reach, plane)).unwrap();
                let _ = stopped.await;
                endpoint.close("the test is over").await;
            });
        });
        let (endpoint, reach, plane) = told.recv().unwrap();
        Self {
            id: endpoint.host_id(),
            endpoint,
            reach,
            plane,
            _folder: folder,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Returns how the only peer is reached.
    pub(crate) fn peer(&self) -> Option<PeerStatus> {
        self.reach.status().borrow().peers.first().cloned()
    }

    /// Waits until the peer is reached as wanted.
    pub(crate) async fn reaches(&self, what: &str, wanted: impl Fn(&PeerStatus) -> bool) {
        let mut status = self.reach.status();
        let waits = status.wait_for(|status| status.peers.iter().any(&wanted));
        if tokio::time::timeout(LONG, waits).await.is_err() {
            let text = self.peer().map(|peer| peer.text());
            panic!("not {what} in time: {text:?}");
        }
    }

    /// Waits for the control connection.
    pub(crate) async fn control(&self) -> Control {
        let start = Instant::now();
        loop {
            if let Some(control) = self.plane.controls.lock().unwrap().last() {
                return control.clone();
            }
            assert!(
                start.elapsed() < LONG,
                "{:?}",
                self.peer().map(|p| p.text())
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn wire(endpoint: &Endpoint, rendezvous: &Rendezvous) -> (Reach, Arc<Plane>) {
    let plane = Arc::<Plane>::default();
    let _ = plane.socket.set(endpoint.plane_socket());
    endpoint.set_datagrams(Some(Box::new(Receiver(plane.clone()))));
    let wires = Wires {
        id: endpoint.host_id(),
        endpoint: endpoint.clone(),
        rendezvous: rendezvous.clone(),
        plane: plane.clone(),
        dialling: false,
    };
    let config = Config {
        servers: vec![rendezvous.config()],
        configured: Vec::new(),
        may_search: true,
        tuning: Tuning::default(),
    };
    let reach = reach::start(endpoint.clone(), config, wires).unwrap();
    let _ = plane.reach.set(reach.clone());
    (reach, plane)
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("a host has failed");
        }
    }
}
