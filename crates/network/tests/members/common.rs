//! Servers and hosts in one process, each with its own sockets and folder.

use longhaul_network::member::{self, Event, Handle, Options, Status, Stored, connect_server};
use longhaul_protocol::HostId;
use longhaul_realm::enrolment::{Authorisation, TokenId};
use longhaul_realm::key::SigningKey;
use longhaul_realm::member::Kept;
use longhaul_realm::protocol::{ToHost, ToServer};
use longhaul_realm::ruleset::{
    HostEntry, NetworkEntry, NetworkId, Ruleset, Scope, ServerEntry, SignedRuleset, VlanPolicy,
};
use longhaul_realm::signed::sign;
use longhaul_realm::token::Token;
use longhaul_realm::wire::{decode, encode};
use longhaul_rendezvous::{Limits, Options as ServerOptions, Rendezvous, StartError};
use longhaul_transport::{
    Endpoint, EndpointConfig, Hello, Identity, Received, RendezvousProtocol, TRUST_FILE, TrustStore,
};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Reached only when something is broken.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
const SOFTWARE: &str = "test 1";

pub(crate) fn key(seed: u8) -> SigningKey {
    SigningKey::from_seed(&[seed; 32]).unwrap()
}

pub(crate) fn now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

pub(crate) struct Server {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) running: Option<Rendezvous>,
    pub(crate) entry: ServerEntry,
    listen: SocketAddr,
    tcp: SocketAddr,
}

async fn begin(folder: &Path, listen: SocketAddr, tcp: SocketAddr) -> Rendezvous {
    let options = ServerOptions {
        listen,
        listen_tcp: Some(tcp),
        listen_stun: None,
        state: folder.to_owned(),
        realms: vec![key(1).public().realm()],
        limits: Limits::default(),
        software: SOFTWARE.to_owned(),
    };
    // The sockets of a server that was stopped are free when its last task has ended.
    let started = async {
        loop {
            match Rendezvous::start(options.clone()).await {
                Ok(running) => return running,
                Err(StartError::Socket(_)) => tokio::task::yield_now().await,
                Err(error) => panic!("{error}"),
            }
        }
    };
    timeout(LIMIT, started).await.unwrap()
}

impl Server {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let running = begin(folder.path(), any, any).await;
        let listen = running.local_address().unwrap();
        let tcp = running.tcp_address().unwrap();
        let entry = ServerEntry {
            id: running.id(),
            addresses: vec![listen.to_string()],
        };
        Self {
            folder,
            running: Some(running),
            entry,
            listen,
            tcp,
        }
    }

    pub(crate) async fn stop(&mut self) {
        self.running.take().unwrap().stop().await;
    }

    /// Starts it again, at the same addresses and with the same store.
    pub(crate) async fn restart(&mut self) {
        self.running = Some(begin(self.folder.path(), self.listen, self.tcp).await);
    }

    /// Its entry for a host that no UDP leaves: a silent UDP address, and its TCP address.
    pub(crate) fn by_tcp(&self, silent: &std::net::UdpSocket) -> ServerEntry {
        let silent = silent.local_addr().unwrap().to_string();
        ServerEntry {
            id: self.entry.id,
            addresses: vec![silent, format!("tcp/{}", self.tcp)],
        }
    }

    pub(crate) fn version(&self) -> u64 {
        let running = self.running.as_ref().unwrap();
        running.version(key(1).public().realm()).unwrap()
    }
}

pub(crate) struct Host {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) endpoint: Endpoint,
    pub(crate) handle: Option<Handle>,
    pub(crate) events: Option<mpsc::Receiver<Event>>,
    task: Option<JoinHandle<()>>,
}

impl Host {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let identity = Identity::load_or_create(folder.path()).unwrap();
        let trust = TrustStore::open(&folder.path().join(TRUST_FILE)).unwrap();
        let hello = Hello {
            version_min: 1,
            version_max: 1,
            software: SOFTWARE.to_owned(),
            incarnation: None,
        };
        let config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), hello);
        let endpoint = Endpoint::bind(config, identity, trust).unwrap();
        Self {
            folder,
            endpoint,
            handle: None,
            events: None,
            task: None,
        }
    }

    pub(crate) fn id(&self) -> HostId {
        self.endpoint.host_id()
    }

    pub(crate) fn address(&self) -> String {
        self.endpoint.local_address().unwrap().to_string()
    }

    pub(crate) fn run(&mut self, stored: Stored) {
        stored.write(self.folder.path()).unwrap();
        let (events, taken) = mpsc::channel(1000);
        let (handle, task) = member::start(Options {
            endpoint: self.endpoint.clone(),
            folder: self.folder.path().to_owned(),
            stored,
            software: SOFTWARE.to_owned(),
            events: Some(events),
        })
        .unwrap();
        (self.handle, self.events, self.task) = (Some(handle), Some(taken), Some(task));
    }

    /// Starts with a ruleset.
    pub(crate) fn run_with(&mut self, ruleset: &SignedRuleset, servers: Vec<ServerEntry>) {
        self.run(Stored {
            realm: ruleset.key.realm(),
            servers,
            kept: Kept {
                ruleset: Some(ruleset.clone()),
                enrolments: Vec::new(),
            },
        });
    }

    /// Starts with a token.
    pub(crate) fn join(&mut self, token: &Token) {
        self.run(Stored::of_token(token, self.id(), now_s()).unwrap());
    }

    pub(crate) async fn stop(&mut self) {
        self.handle.take().unwrap().stop().await;
        timeout(LIMIT, self.task.take().unwrap())
            .await
            .unwrap()
            .unwrap();
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.handle.as_ref().unwrap()
    }

    /// Waits for a state.
    pub(crate) async fn until(&self, what: &str, is: impl Fn(&Status) -> bool) -> Arc<Status> {
        let mut status = self.handle().status();
        let waited = timeout(LIMIT, status.wait_for(|status| is(status))).await;
        let found = waited.map(|waited| waited.unwrap().clone());
        found.unwrap_or_else(|_| panic!("{what}: {:#?}", self.handle().status().borrow()))
    }

    pub(crate) async fn until_registered(&self) -> Arc<Status> {
        self.until("registered", Status::is_registered).await
    }

    /// Waits for an event.
    pub(crate) async fn event<T>(&mut self, wanted: impl Fn(Event) -> Option<T>) -> T {
        let events = self.events.as_mut().unwrap();
        let next = async {
            loop {
                if let Some(found) = wanted(events.recv().await.unwrap()) {
                    return found;
                }
            }
        };
        timeout(LIMIT, next).await.unwrap()
    }
}

pub(crate) fn rules(version: u64, hosts: &[(&Host, &str)], servers: &[&ServerEntry]) -> Ruleset {
    let entry = |(host, name): &(&Host, &str)| HostEntry {
        id: host.id(),
        name: (*name).to_owned(),
        site: "lab".to_owned(),
        scope: Scope {
            may_query: true,
            may_send_guests: true,
        },
        token: None,
    };
    Ruleset {
        realm: key(1).public().realm(),
        version,
        issued_s: now_s(),
        expires_s: now_s() + 86_400,
        hosts: hosts.iter().map(entry).collect(),
        networks: vec![NetworkEntry {
            id: NetworkId([1; 8]),
            name: "blue".to_owned(),
            members: hosts.iter().map(|(host, _)| host.id()).collect(),
            vlans: VlanPolicy::Untagged,
            mtu: 1500,
            gateway: None,
        }],
        removed: Vec::new(),
        revoked: Vec::new(),
        servers: servers.iter().copied().cloned().collect(),
        arbiter: None,
    }
}

pub(crate) fn signed(rules: &Ruleset) -> SignedRuleset {
    sign(rules, &key(1)).unwrap().signed().clone()
}

/// Signs for a realm with another key.
pub(crate) fn signed_by(mut rules: Ruleset, seed: u8) -> SignedRuleset {
    rules.realm = key(seed).public().realm();
    sign(&rules, &key(seed)).unwrap().signed().clone()
}

pub(crate) fn token(name: &str, servers: Vec<ServerEntry>) -> Token {
    let mut id = [0; 16];
    id.iter_mut()
        .zip(name.bytes())
        .for_each(|(to, from)| *to = from);
    let authorisation = Authorisation {
        realm: key(1).public().realm(),
        token: TokenId(id),
        key: key(1).public(),
        name: name.to_owned(),
        site: "lab".to_owned(),
        scope: Scope::default(),
        networks: vec![NetworkId([1; 8])],
        issued_s: now_s() - 100,
        expires_s: now_s() + 3600,
        confirm_s: now_s() + 86_400,
    };
    Token::make(authorisation, [9; 32], servers, &key(1)).unwrap()
}

/// Gives a server a message as somebody who is not registered; returns the answers up to one of
/// this kind.
pub(crate) async fn tell(from: &Host, server: &ServerEntry, message: ToServer) -> ToHost {
    let protocol = RendezvousProtocol::new(SOFTWARE.to_owned());
    let link = connect_server(&from.endpoint, server, &protocol).await;
    let mut link = link.unwrap();
    link.sender.send(encode(&message).unwrap()).await.unwrap();
    loop {
        let received = timeout(LIMIT, link.receiver.recv()).await.unwrap().unwrap();
        let Some(Received::Message(bytes)) = received else {
            panic!("{received:?}");
        };
        match decode(&bytes).unwrap() {
            ToHost::Enrolments(_) => {}
            other => return other,
        }
    }
}

/// Gives a server a ruleset, which it must take.
pub(crate) async fn publish(server: &ServerEntry, ruleset: &SignedRuleset) {
    let operator = Host::new();
    let answer = tell(&operator, server, ToServer::Ruleset(ruleset.clone())).await;
    assert_eq!(answer, ToHost::Ruleset(ruleset.clone()));
}

/// Starts two hosts that are registered at a server.
pub(crate) async fn two_members(server: &Server) -> (Host, Host) {
    let (mut paris, mut oslo) = (Host::new(), Host::new());
    let both = signed(&rules(
        1,
        &[(&paris, "paris"), (&oslo, "oslo")],
        &[&server.entry],
    ));
    publish(&server.entry, &both).await;
    paris.run_with(&both, Vec::new());
    oslo.run_with(&both, Vec::new());
    paris.until_registered().await;
    oslo.until_registered().await;
    (paris, oslo)
}
