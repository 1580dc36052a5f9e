//! Starts and stops a server: store, sockets, tasks.

use crate::connection;
use crate::others;
use crate::shared::{Shared, now};
use crate::store::{Lock, Store, StoreError};
use longhaul_protocol::HostId;
use longhaul_realm::key::RealmId;
use longhaul_realm::relay::RelayCounters;
use longhaul_realm::ruleset::StoreId;
use longhaul_realm::server::{Config, Counters, Input, Limits, Server};
use longhaul_realm::signed::DocumentError;
use longhaul_transport::{
    EndpointError, Identity, IdentityError, RendezvousConfig, RendezvousProtocol, RendezvousServer,
    serve_stun,
};
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout_at};

/// The time limit for a handshake and Hello.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The shortest time between two looks for the next time-out.
const REST: Duration = Duration::from_millis(20);

/// What a server is.
#[derive(Debug, Clone)]
pub struct Options {
    /// The UDP address.
    pub listen: SocketAddr,
    /// The TCP address, for hosts whose UDP is blocked.
    pub listen_tcp: Option<SocketAddr>,
    /// Another UDP address, which only tells hosts their own address (STUN).
    pub listen_stun: Option<SocketAddr>,
    /// The folder of its identity and store.
    pub state: PathBuf,
    /// The realms that it serves.
    pub realms: Vec<RealmId>,
    /// Its limits.
    pub limits: Limits,
    /// Name and version of the program, for Hellos.
    pub software: String,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The identity.
    #[error("this server's identity cannot be used: {0}")]
    Identity(#[from] IdentityError),
    /// A socket.
    #[error("{0}: another program may use the port")]
    Socket(#[from] EndpointError),
    /// The socket for STUN.
    #[error("cannot listen on UDP {0}: {1}")]
    Stun(SocketAddr, io::Error),
    /// A stored document does not verify.
    #[error(
        "the store has a document that its realm did not sign: {0}; restore a backup, or move the \
         store away and publish the ruleset again"
    )]
    Document(#[from] DocumentError),
    /// The system.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The system gives no random numbers.
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

/// A running server.
#[derive(Debug)]
pub struct Rendezvous {
    shared: Arc<Shared>,
    transport: Arc<RendezvousServer>,
    store: Option<Store>,
    store_id: StoreId,
    id: HostId,
    tasks: Vec<JoinHandle<()>>,
    _lock: Lock,
}

impl Rendezvous {
    /// Starts a server. Requires a tokio runtime with several threads.
    pub async fn start(options: Options) -> Result<Self, StartError> {
        let lock = Lock::take(&options.state)?;
        let identity = Identity::load_or_create(&options.state)?;
        let id = identity.host_id();
        let (database, durable) = Store::open(&options.state)?;
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(StartError::Random)?;
        let start = Instant::now();
        let config = Config {
            id,
            realms: options.realms,
            limits: options.limits,
        };
        let seed = u64::from_le_bytes(seed);
        let server = Server::new(config, &durable, seed, now(start))?;
        let shared = Shared::new(server, start);
        let told = shared.clone();
        let store = Store::start(database, move |writes, durable| {
            for write in writes {
                told.input(match durable {
                    true => Input::Persisted(*write),
                    false => Input::PersistFailed(*write),
                });
            }
        })?;
        shared.set_writes(store.orders());
        let config = RendezvousConfig {
            listen: options.listen,
            listen_tcp: options.listen_tcp,
            protocol: RendezvousProtocol::new(options.software),
            handshake_timeout: HANDSHAKE,
        };
        let transport = Arc::new(RendezvousServer::bind(config, identity, shared.clone())?);
        let mut tasks = vec![
            tokio::spawn(accept(shared.clone(), transport.clone())),
            tokio::spawn(others::dial_all(shared.clone(), transport.clone(), id)),
            tokio::spawn(time_out(shared.clone())),
        ];
        if let Some(address) = options.listen_stun {
            let bound = UdpSocket::bind(address).await;
            let socket = bound.map_err(|error| StartError::Stun(address, error))?;
            tasks.push(tokio::spawn(async move {
                let error = serve_stun(&socket).await;
                tracing::error!(%address, %error, "STUN is not answered any more");
            }));
        }
        Ok(Self {
            shared,
            transport,
            store: Some(store),
            store_id: durable.store,
            id,
            tasks,
            _lock: lock,
        })
    }

    /// Returns the server's identity.
    pub fn id(&self) -> HostId {
        self.id
    }

    /// Returns the id of its store.
    pub fn store_id(&self) -> StoreId {
        self.store_id
    }

    /// Returns the address of the UDP socket.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.transport.local_address()
    }

    /// Returns the address of the TCP socket, if there is one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.transport.tcp_address()
    }

    /// Returns what it counts.
    pub fn counters(&self) -> (Counters, RelayCounters) {
        self.shared
            .read(|server| (server.counters(), server.relay().counters()))
    }

    /// Returns the version of a realm's ruleset.
    pub fn version(&self, realm: RealmId) -> Option<u64> {
        self.shared
            .read(|server| server.membership(realm).map(|known| known.version()))
    }

    /// Ends all connections and writes what waits.
    pub async fn stop(mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        let reason = "the rendezvous server stops";
        self.shared.end_all(reason);
        self.transport.close(reason).await;
        self.shared.set_writes(None);
        let store = self.store.take();
        if tokio::task::spawn_blocking(move || drop(store))
            .await
            .is_err()
        {
            tracing::error!("the store was not closed");
        }
    }
}

/// The thread of the store ends when nothing can ask it for writes.
impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        self.shared.set_writes(None);
    }
}

async fn accept(shared: Arc<Shared>, transport: Arc<RendezvousServer>) {
    while let Some(link) = transport.accept().await {
        tokio::spawn(connection::serve(shared.clone(), transport.clone(), link));
    }
}

/// Tells the state machine when its time comes.
async fn time_out(shared: Arc<Shared>) {
    loop {
        let changed = shared.changed.notified();
        tokio::pin!(changed);
        changed.as_mut().enable();
        let due = shared.read(Server::next_timeout);
        let left = due.map(|due| due.saturating_sub(shared.now().steady));
        match left {
            Some(Duration::ZERO) => shared.input(Input::Timeout),
            Some(left) => {
                let at = tokio::time::Instant::now() + left;
                // Either way the next time-out is looked for.
                let _ = timeout_at(at, changed).await;
            }
            None => changed.await,
        }
        sleep(REST).await;
    }
}
