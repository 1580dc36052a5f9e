//! What the paths have to know of the realm's rendezvous servers.

use crate::member::{Leg, LinkState};
use crate::reach::{Input, Reach};
use longhaul_paths::ServerConfig;
use longhaul_protocol::HostId;
use longhaul_realm::ruleset::ServerEntry;
use longhaul_transport::Endpoint;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use tokio::net::lookup_host;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The addresses of a server that its names have now.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) server: HostId,
    udp: Vec<SocketAddr>,
    tcp: Vec<SocketAddr>,
    stun: Vec<SocketAddr>,
}

#[derive(Debug)]
struct Server {
    entry: ServerEntry,
    registered: bool,
    udp: Vec<SocketAddr>,
    tcp: Vec<SocketAddr>,
    stun: Vec<SocketAddr>,
    /// The address of the connection over UDP.
    connected: Option<SocketAddr>,
    /// What takes relayed datagrams over TCP.
    queue: Option<mpsc::Sender<Vec<u8>>>,
    receiving: Option<JoinHandle<()>>,
    /// What the paths were told last.
    told: Option<SocketAddr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(receiving) = self.receiving.take() {
            receiving.abort();
        }
    }
}

impl Server {
    fn config(&self) -> ServerConfig {
        ServerConfig {
            id: self.entry.id,
            name: self.entry.addresses.first().cloned().unwrap_or_default(),
            addresses: [&self.udp[..], &self.stun].concat(),
            relays: true,
            tcp: self.entry.tcp_addresses().next().is_some(),
        }
    }

    fn address(&self) -> Option<SocketAddr> {
        let known = self.udp.first().or(self.tcp.first()).copied();
        self.connected.or(known).filter(|_| self.registered)
    }
}

/// The servers of this host.
#[derive(Debug)]
pub(super) struct Servers {
    endpoint: Endpoint,
    reach: Reach,
    resolved: mpsc::Sender<Resolved>,
    known: BTreeMap<HostId, Server>,
    configs: Vec<ServerConfig>,
}

impl Servers {
    pub(super) fn new(endpoint: Endpoint, reach: Reach, resolved: mpsc::Sender<Resolved>) -> Self {
        Self {
            endpoint,
            reach,
            resolved,
            known: BTreeMap::new(),
            configs: Vec::new(),
        }
    }

    /// Follows what the member says of its servers. Returns whether this host is registered
    /// elsewhere than before.
    pub(super) async fn follow(&mut self, links: &[LinkState]) -> bool {
        let is_there = |id: &HostId| links.iter().any(|link| link.server.id == *id);
        let gone: Vec<HostId> = self
            .known
            .keys()
            .filter(|id| !is_there(id))
            .copied()
            .collect();
        for id in gone {
            self.down(id).await;
            self.known.remove(&id);
        }
        let mut changed = false;
        for link in links {
            let id = link.server.id;
            let is_same = |known: &Server| known.entry == link.server;
            if !self.known.get(&id).is_some_and(is_same) {
                self.add(link.server.clone());
            }
            if let Some(known) = self.known.get_mut(&id) {
                changed |= known.registered != link.registered;
                known.registered = link.registered;
            }
        }
        self.tell().await;
        changed
    }

    fn add(&mut self, entry: ServerEntry) {
        let (resolved, asked) = (self.resolved.clone(), entry.clone());
        tokio::spawn(async move {
            let found = Resolved {
                server: asked.id,
                udp: resolve(asked.udp_addresses()).await,
                tcp: resolve(asked.tcp_addresses()).await,
                stun: resolve(asked.stun_addresses()).await,
            };
            // Fails only when the driver has stopped.
            let _ = resolved.send(found).await;
        });
        match self.known.get_mut(&entry.id) {
            Some(known) => known.entry = entry,
            None => {
                let server = Server {
                    entry: entry.clone(),
                    registered: false,
                    udp: Vec::new(),
                    tcp: Vec::new(),
                    stun: Vec::new(),
                    connected: None,
                    queue: None,
                    receiving: None,
                    told: None,
                };
                self.known.insert(entry.id, server);
            }
        }
    }

    pub(super) async fn resolved(&mut self, resolved: Resolved) {
        if let Some(known) = self.known.get_mut(&resolved.server) {
            (known.udp, known.tcp) = (resolved.udp, resolved.tcp);
            known.stun = resolved.stun;
        }
        self.tell().await;
    }

    /// A server is connected.
    pub(super) async fn up(&mut self, id: HostId, leg: Leg) {
        let Some(server) = self.known.get_mut(&id) else {
            // It follows with the member's status.
            return;
        };
        if let Some(receiving) = server.receiving.take() {
            receiving.abort();
        }
        match leg {
            Leg::Udp(address) => server.connected = Some(address),
            Leg::Tcp { send, mut receive } => {
                server.connected = None;
                server.queue = Some(send.clone());
                let endpoint = self.endpoint.clone();
                server.receiving = Some(tokio::spawn(async move {
                    while let Some(datagram) = receive.recv().await {
                        // If too many wait it is lost, as in a router.
                        endpoint.relayed(id, datagram.into());
                    }
                }));
                let queue = Some(send);
                self.reach.input(Input::Tcp { server: id, queue }).await;
            }
        }
        self.tell().await;
    }

    /// A server is not connected any more.
    pub(super) async fn down(&mut self, id: HostId) {
        let Some(server) = self.known.get_mut(&id) else {
            return;
        };
        (server.connected, server.registered) = (None, false);
        if server.queue.take().is_some() {
            let queue = None;
            self.reach.input(Input::Tcp { server: id, queue }).await;
        }
        self.tell().await;
    }

    /// The paths want a relay over TCP: they get the connection that there is.
    pub(super) async fn open_tcp(&self, id: HostId) {
        let queue = self.known.get(&id).and_then(|server| server.queue.clone());
        self.reach.input(Input::Tcp { server: id, queue }).await;
    }

    /// Returns whether this host is registered at a server.
    pub(super) fn is_registered(&self) -> bool {
        self.known.values().any(|server| server.registered)
    }

    /// Tells the paths what has changed.
    async fn tell(&mut self) {
        let configs: Vec<ServerConfig> = self.known.values().map(Server::config).collect();
        if configs != self.configs {
            self.configs.clone_from(&configs);
            self.reach.input(Input::Servers(configs)).await;
        }
        for (id, server) in &mut self.known {
            let address = server.address();
            if server.told != address {
                server.told = address;
                let server = *id;
                self.reach.input(Input::Attached { server, address }).await;
            }
        }
    }
}

async fn resolve(addresses: impl Iterator<Item = &str>) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for address in addresses {
        match lookup_host(address).await {
            Ok(resolved) => found.extend(resolved),
            Err(error) => tracing::warn!(address, %error, "a rendezvous server has no address"),
        }
    }
    found
}
