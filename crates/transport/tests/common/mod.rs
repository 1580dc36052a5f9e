//! Provides two hosts on the loopback interface, and a lossy path between them.
#![allow(dead_code, unreachable_pub)]

use longhaul_transport::*;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::UdpSocket;

/// A time limit long enough for the slowest machine; successful tests do not wait for it.
pub const LONG: Duration = Duration::from_secs(120);

pub const ALL: Scope = Scope {
    may_query: true,
    may_send_guests: true,
};

pub struct Host {
    pub endpoint: Endpoint,
    pub identity: Identity,
    pub folder: tempfile::TempDir,
}

pub fn hello(min: u16, max: u16) -> Hello {
    Hello {
        version_min: min,
        version_max: max,
        software: format!("longhaul test {max}"),
        incarnation: None,
    }
}

pub fn config() -> EndpointConfig {
    EndpointConfig::new("127.0.0.1:0".parse().unwrap(), hello(1, 1))
}

pub fn host_in(folder: &Path, config: EndpointConfig) -> (Endpoint, Identity) {
    let identity = Identity::load_or_create(folder).unwrap();
    let trust = TrustStore::open(&folder.join(TRUST_FILE)).unwrap();
    let endpoint = Endpoint::bind(config, identity.clone(), trust).unwrap();
    (endpoint, identity)
}

impl Host {
    pub fn new(config: EndpointConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (endpoint, identity) = host_in(folder.path(), config);
        Self {
            endpoint,
            identity,
            folder,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.endpoint.local_address().unwrap()
    }

    pub fn trust(&self, name: &str, other: &Host, scope: Scope) {
        self.trust_at(name, other, scope, other.address());
    }

    pub fn trust_at(&self, name: &str, other: &Host, scope: Scope, address: SocketAddr) {
        let host = TrustedHost {
            name: name.to_owned(),
            id: other.identity.host_id(),
            addresses: vec![address.to_string()],
            scope,
        };
        self.endpoint.trust().replace(host).unwrap();
    }
}

/// Returns `alpha` and `beta`, which trust each other.
pub fn pair(config: EndpointConfig) -> (Host, Host) {
    let (alpha, beta) = (Host::new(config.clone()), Host::new(config));
    alpha.trust("beta", &beta, ALL);
    beta.trust("alpha", &alpha, ALL);
    (alpha, beta)
}

/// Returns both ends of a control connection from `alpha` to `beta`.
pub async fn connected(alpha: &Host, beta: &Host) -> (Control, Control) {
    let (here, there) = tokio::join!(alpha.endpoint.connect("beta"), beta.endpoint.accept());
    (here.unwrap(), there.unwrap())
}

pub fn binding(epoch: u32) -> BulkBinding {
    BulkBinding {
        attempt: longhaul_protocol::AttemptId {
            migration: longhaul_protocol::MigrationId([7; 8]),
            attempt: longhaul_protocol::Attempt(1),
        },
        epoch: longhaul_protocol::Epoch(epoch),
    }
}

/// Returns both ends of a bulk connection beside a control connection.
pub async fn bulk(
    here: &Control,
    there: &Control,
    config: BulkConfig,
) -> (BulkSender, BulkReceiver) {
    let offer = there.offer_bulk(binding(1), LONG).unwrap();
    let token = offer.token().clone();
    let (sender, receiver) = tokio::join!(
        here.connect_bulk(&token, binding(1), config),
        offer.accept()
    );
    (sender.unwrap(), receiver.unwrap())
}

/// Forwards datagrams between one client and a server; can drop some or all.
pub struct Road {
    pub address: SocketAddr,
    pub cut: Arc<AtomicBool>,
    pub lost: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl Road {
    /// Drops every `lose_every`-th datagram in each direction (0: none).
    pub async fn new(server: SocketAddr, lose_every: u64) -> Self {
        let outside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let inside = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = outside.local_addr().unwrap();
        let (cut, lost) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (cut2, lost2) = (cut.clone(), lost.clone());
        let task = tokio::spawn(async move {
            let (mut out, mut back) = (vec![0; 65536], vec![0; 65536]);
            let mut client = None;
            let mut seen = 0;
            loop {
                let (bytes, to_server) = tokio::select! {
                    received = outside.recv_from(&mut out) => {
                        let Ok((length, from)) = received else { continue };
                        client = Some(from);
                        (&out[..length], true)
                    }
                    received = inside.recv_from(&mut back) => {
                        let Ok((length, _)) = received else { continue };
                        (&back[..length], false)
                    }
                };
                seen += 1;
                let drop = lose_every > 0 && seen % lose_every == 0;
                if drop || cut2.load(Ordering::Relaxed) {
                    lost2.fetch_add(1, Ordering::Relaxed);
                } else if to_server {
                    let _ = inside.send_to(bytes, server).await;
                } else if let Some(client) = client {
                    let _ = outside.send_to(bytes, client).await;
                }
            }
        });
        Self {
            address,
            cut,
            lost,
            task,
        }
    }
}

impl Drop for Road {
    fn drop(&mut self) {
        self.task.abort();
    }
}
