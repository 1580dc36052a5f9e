//! A rendezvous server that is only as good as the tests need: it answers STUN and relays by
//! session over UDP, and passes on signals in memory.

use longhaul_network::reach::{Input, Reach};
use longhaul_paths::ServerConfig;
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay;
use longhaul_transport::binding_answer;
use std::collections::HashMap;
use std::fs::File;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UdpSocket;

pub(crate) const SERVER: HostId = HostId([100; 32]);
/// The first byte of a datagram by which a host tells its address. A real server knows it from the
/// host's connection.
pub(crate) const HELLO: u8 = 61;

#[derive(Default)]
struct Shared {
    hosts: Mutex<HashMap<HostId, Reach>>,
    sessions: Mutex<HashMap<[HostId; 2], SessionId>>,
    /// Where hosts said hello from.
    addresses: Mutex<HashMap<HostId, SocketAddr>>,
    relayed: AtomicU64,
}

/// A running server. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Rendezvous {
    shared: Arc<Shared>,
    addresses: [SocketAddr; 2],
}

impl Rendezvous {
    /// Starts it at an address, in a namespace.
    pub(crate) fn start(ip: [u8; 4], namespace: Option<File>) -> Self {
        let shared = Arc::<Shared>::default();
        let (tell, told) = std::sync::mpsc::channel();
        let of_task = shared.clone();
        // Ends with the process.
        std::thread::spawn(move || {
            super::host::enter(namespace);
            let runtime = super::host::runtime();
            runtime.block_on(async {
                let main = UdpSocket::bind((std::net::Ipv4Addr::from(ip), 0))
                    .await
                    .unwrap();
                let other = UdpSocket::bind((std::net::Ipv4Addr::from(ip), 0))
                    .await
                    .unwrap();
                tell.send([main.local_addr().unwrap(), other.local_addr().unwrap()])
                    .unwrap();
                tokio::join!(serve(&main, &of_task), serve(&other, &of_task));
            });
        });
        Self {
            shared,
            addresses: told.recv().unwrap(),
        }
    }

    /// Returns the entry of this server in a host's list.
    pub(crate) fn config(&self) -> ServerConfig {
        ServerConfig {
            id: SERVER,
            name: "lyon-rendezvous".to_owned(),
            addresses: self.addresses.to_vec(),
            relays: true,
            tcp: false,
        }
    }

    /// Returns the address of the relay.
    pub(crate) fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    /// Returns the number of datagrams that were relayed.
    pub(crate) fn relayed(&self) -> u64 {
        self.shared.relayed.load(Ordering::Relaxed)
    }

    /// Registers a host, and tells all hosts of each other.
    pub(crate) fn register(&self, id: HostId, reach: &Reach) {
        let mut hosts = self.shared.hosts.lock().unwrap();
        hosts.insert(id, reach.clone());
        assert!(reach.try_input(Input::Attached {
            server: SERVER,
            address: Some(self.addresses[0]),
        }));
        for (one, reach) in hosts.iter() {
            for other in hosts.keys().filter(|other| *other != one) {
                assert!(reach.try_input(Input::Present {
                    peer: *other,
                    server: SERVER,
                    present: true,
                }));
            }
        }
    }

    pub(crate) fn signal(&self, from: HostId, to: HostId, bytes: Vec<u8>) {
        let hosts = self.shared.hosts.lock().unwrap();
        if let Some(host) = hosts.get(&to) {
            assert!(host.try_input(Input::Signal { from, bytes }));
        }
    }

    /// Opens a session, or finds the one that two hosts have, and tells both.
    pub(crate) fn open_relay(&self, from: HostId, to: HostId) {
        let mut pair = [from, to];
        pair.sort_unstable();
        let mut sessions = self.shared.sessions.lock().unwrap();
        let next = SessionId(sessions.len() as u32 + 1);
        let session = *sessions.entry(pair).or_insert(next);
        let hosts = self.shared.hosts.lock().unwrap();
        for (host, peer) in [(from, to), (to, from)] {
            if let Some(reach) = hosts.get(&host) {
                assert!(reach.try_input(Input::RelayOpened {
                    server: SERVER,
                    session,
                    peer,
                }));
            }
        }
    }
}

async fn serve(socket: &UdpSocket, shared: &Shared) {
    let mut bytes = vec![0; 2048];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut bytes).await else {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        };
        let datagram = &bytes[..length];
        if let Some(answer) = binding_answer(datagram, from) {
            let _ = socket.send_to(&answer, from).await;
        } else if let [HELLO, id @ ..] = datagram {
            let id = HostId(*id.first_chunk().unwrap());
            shared.addresses.lock().unwrap().insert(id, from);
        } else if let Some(to) = forward(datagram, from, shared) {
            shared.relayed.fetch_add(1, Ordering::Relaxed);
            let _ = socket.send_to(datagram, to).await;
        }
    }
}

/// Returns where a relayed datagram goes.
fn forward(datagram: &[u8], from: SocketAddr, shared: &Shared) -> Option<SocketAddr> {
    let (session, _) = relay::parse(datagram).ok()?;
    let sessions = shared.sessions.lock().unwrap();
    let (ends, _) = sessions.iter().find(|(_, id)| **id == session)?;
    let addresses = shared.addresses.lock().unwrap();
    let [one, two] = ends.map(|host| addresses.get(&host).copied());
    match Some(from) {
        from if from == one => two,
        from if from == two => one,
        _ => None,
    }
}
