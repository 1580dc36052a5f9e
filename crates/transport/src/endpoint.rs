//! Owns the one UDP socket of a host, and the connections made and accepted on it.

mod candidates;
mod datagrams;
mod dial;
mod listen;
mod socket;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use candidates::{Candidates, canonical};
pub(crate) use dial::Dial;

use crate::bulk::{BulkOffers, STREAM_WINDOW_BYTES};
use crate::control::{Control, Peer};
use crate::error::{CloseCode, ConnectError, LinkError};
use crate::framing::Budget;
use crate::hello::{HELLO_HEAD_BYTES, Hello};
use crate::identity::Identity;
use crate::keeper::{self, CONCURRENT_PATHS_MAX, Spread};
use crate::mux::{Arrived, Dropped, Mux, Sender, Socket, Sockets};
use crate::paths::PathTo;
use crate::quic::{
    self, AsyncUdpSocket, CryptoError, HashedConnectionIdGenerator, HmacKey, IdleTimeout, Link,
    QuicServerConfig, RecvStream, SendStream, TransportConfig, VarInt, WeakConnectionHandle,
    header_bytes,
};
use crate::rate::{LimitedFactory, RateLimit};
use crate::routes::Routes;
use crate::stun::{self, Pending};
use crate::tls::{self, ALPN_BULK, ALPN_CONTROL};
use crate::trust::{TrustStore, TrustedHost};
use longhaul_protocol::HostId;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tracing::debug;

/// The maximum number of connections (control and bulk) with one peer at once.
pub const CONNECTIONS_PER_PEER_MAX: usize = 32;
/// The memory limit for unfinished control messages of one peer, in bytes.
pub const MESSAGES_BYTES_PER_PEER_MAX: usize = 8 << 20;
/// The maximum number of handshakes of unknown peers at once.
pub const HANDSHAKES_MAX: usize = 64;
/// How far all streams of a control connection together may be ahead of their readers, in bytes.
const CONTROL_WINDOW_BYTES: u32 = 8_000_000;
/// The same limit before the peer is known.
const OPENING_WINDOW_BYTES: u32 = 16_384;
const CONTROLS_WAITING: usize = 16;
const CLOSE_WITHIN: Duration = Duration::from_secs(1);
/// How long a host is dialled on the way to it before its configured addresses are.
const PEER_WITHIN: Duration = Duration::from_secs(3);
/// How long a way to a host without addresses may take to be found.
const WAY_WITHIN: Duration = Duration::from_secs(20);

/// The address and time limits of an endpoint.
#[derive(Debug, Clone)]
pub struct EndpointConfig {
    /// The address to listen on; port 0 for any.
    pub listen: SocketAddr,
    /// The Hello that peers get: the supported protocol versions, and the program's name.
    pub hello: Hello,
    /// The time limit for a peer's handshake and Hello.
    pub handshake_timeout: Duration,
    /// A connection without any packet for this time is lost. Keep it under 25 s: up to that the
    /// library probes a silent path every second, so traffic resumes within about a second after a
    /// cut link recovers.
    pub idle_timeout: Duration,
    /// The keep-alive interval of an idle connection.
    pub keep_alive: Duration,
    /// The keep-alive interval of a connection at rest (see [`Control::rest`]).
    pub keep_alive_at_rest: Duration,
    /// Whether to pass many datagrams to the kernel at once (UDP segmentation offload). To be
    /// switched off for network cards and kernels that do it wrong.
    pub segmentation_offload: bool,
    /// The network paths that are used at once to single hosts, by a trusted host's name or
    /// identity (at most [`PATHS_MAX`](crate::PATHS_MAX) each).
    pub paths: Vec<(String, Vec<PathTo>)>,
}

impl EndpointConfig {
    /// Returns the default configuration.
    pub fn new(listen: SocketAddr, hello: Hello) -> Self {
        Self {
            listen,
            hello,
            handshake_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(15),
            keep_alive: Duration::from_secs(1),
            keep_alive_at_rest: Duration::from_secs(5),
            segmentation_offload: true,
            paths: Vec::new(),
        }
    }
}

/// Why an endpoint could not be created.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The socket could not be bound.
    #[error("cannot listen on UDP {address}: {error}")]
    Socket {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The TCP socket of a rendezvous server could not be bound.
    #[error("cannot listen on TCP {address}: {error}")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        error: io::Error,
    },
    /// The identity or a setting is unsuitable for TLS or QUIC.
    #[error("cannot set up TLS and QUIC: {0}")]
    Setup(String),
}

/// A host's connections to other hosts. Cheap to clone; call [`Endpoint::close`] at the end.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) inner: Arc<EndpointInner>,
    accepted: Arc<tokio::sync::Mutex<mpsc::Receiver<Control>>>,
}

pub(crate) struct EndpointInner {
    pub(crate) config: EndpointConfig,
    pub(crate) identity: Identity,
    pub(crate) trust: TrustStore,
    pub(crate) bulk_offers: BulkOffers,
    pub(crate) probed: Arc<AtomicBool>,
    quic: quic::Endpoint,
    stun: stun::Client,
    pending: Arc<Pending>,
    sockets: Arc<Sockets>,
    routes: Routes,
    arrived: Arc<Arrived>,
    handshakes: Arc<Semaphore>,
    connections: Mutex<HashMap<HostId, Vec<WeakConnectionHandle>>>,
    budgets: Mutex<HashMap<HostId, Budget>>,
    worked: Mutex<Worked>,
}

/// The address at which each host answered last.
type Worked = HashMap<HostId, SocketAddr>;

impl Endpoint {
    /// Binds the socket and starts to listen. Requires a tokio runtime.
    pub fn bind(
        config: EndpointConfig,
        identity: Identity,
        trust: TrustStore,
    ) -> Result<Self, EndpointError> {
        let alpns = [ALPN_CONTROL, ALPN_BULK];
        let inner = EndpointInner::open(config, identity, trust, &alpns, |below| {
            let Below {
                sockets,
                routes,
                arrived,
                pending,
                ..
            } = below;
            Ok(Box::new(Mux::new(sockets, routes, arrived, pending)))
        })?;
        let (sender, accepted) = mpsc::channel(CONTROLS_WAITING);
        tokio::spawn(listen::listen(inner.clone(), sender));
        Ok(Self {
            inner,
            accepted: Arc::new(tokio::sync::Mutex::new(accepted)),
        })
    }

    /// Returns the address of the socket.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.inner.local_address()
    }

    /// Returns this host's identity.
    pub fn host_id(&self) -> HostId {
        self.inner.identity.host_id()
    }

    /// Returns the trust store.
    pub fn trust(&self) -> &TrustStore {
        &self.inner.trust
    }

    /// Opens a control connection to a trusted host, at the first of its addresses that answers.
    /// They are dialled in parallel, each a little after the one before.
    pub async fn connect(&self, name: &str) -> Result<Control, ConnectError> {
        let host = self.inner.trusted(name)?;
        self.connect_to(host).await
    }

    /// Connects to the trusted host with this identity, under whatever name it is trusted now;
    /// `name`
    /// is for errors.
    pub async fn connect_id(&self, id: HostId, name: &str) -> Result<Control, ConnectError> {
        let host = self.inner.trust.by_id(id)?;
        let host = host.ok_or_else(|| ConnectError::NotTrusted(name.to_owned()))?;
        self.connect_to(host).await
    }

    /// Opens a control connection to a trusted host at its peer address, so over the way that
    /// [`Routes`] has for it.
    pub async fn connect_peer(&self, id: HostId) -> Result<Control, ConnectError> {
        let host = self.inner.trust.by_id(id)?;
        let host = host.ok_or_else(|| ConnectError::NotTrusted(id.to_string()))?;
        let dial = Dial {
            expected: Some(host.id),
            name: host.name.clone(),
            alpn: ALPN_CONTROL,
            limit: RateLimit::default(),
            paths: Vec::new(),
        };
        let address = self.inner.routes.peer_address(id);
        let link = self.inner.dial(&dial, address).await?;
        self.inner.greet(link, host, address, &dial).await
    }

    async fn connect_to(&self, host: TrustedHost) -> Result<Control, ConnectError> {
        let dial = Dial {
            expected: Some(host.id),
            name: host.name.clone(),
            alpn: ALPN_CONTROL,
            limit: RateLimit::default(),
            paths: self.inner.paths_to(&host),
        };
        let (link, address) = self.dial_host(&host, &dial).await?;
        self.inner.greet(link, host, address, &dial).await
    }

    /// Dials a host on the way to it, if it is a peer, or at its configured addresses.
    pub(crate) async fn dial_host(
        &self,
        host: &TrustedHost,
        dial: &Dial,
    ) -> Result<(Link, SocketAddr), ConnectError> {
        let routes = &self.inner.routes;
        if routes.way(host.id).is_none()
            && dial.addresses(&host.addresses).is_empty()
            && !routes.find_way(host.id, WAY_WITHIN).await
        {
            return Err(ConnectError::NoWay(host.name.clone()));
        }
        if routes.way(host.id).is_some() {
            // Its datagrams come from its peer address, whatever its real one is.
            let address = routes.peer_address(host.id);
            let dialled = self.inner.dial(dial, address);
            if host.addresses.is_empty() {
                return dialled.await.map(|link| (link, address));
            }
            match tokio::time::timeout(PEER_WITHIN, dialled).await {
                Ok(Ok(link)) => return Ok((link, address)),
                Ok(Err(error)) => debug!(host = host.name, %error, "no answer on its way"),
                Err(_) => debug!(host = host.name, "no answer on its way in time"),
            }
        }
        let candidates = Candidates::configured(&dial.addresses(&host.addresses));
        self.inner.dial_any(dial, candidates).await
    }

    /// Returns the next control connection from a trusted host; `None` after [`Endpoint::close`].
    /// The caller must check what the host may do ([`Control::allows`]). Safe to cancel.
    pub async fn accept(&self) -> Option<Control> {
        self.accepted.lock().await.recv().await
    }

    /// Returns the identity of the host at an address, which people compare before they trust it.
    pub async fn identify(&self, address: &str) -> Result<HostId, ConnectError> {
        let dial = Dial {
            expected: None,
            name: address.to_owned(),
            alpn: ALPN_CONTROL,
            limit: RateLimit::default(),
            paths: Vec::new(),
        };
        let candidates = Candidates::configured(&[address.to_owned()]);
        let (link, _) = self.inner.dial_any(&dial, candidates).await?;
        let id = link.peer_id();
        link.close(CloseCode::Done, "only asked who is here");
        id.ok_or_else(|| dial.error(LinkError::Failed("no certificate".to_owned())))
    }

    /// Ends all connections with a host, for example when it is no longer trusted.
    pub fn disconnect(&self, id: HostId, code: CloseCode, reason: &str) {
        let mut connections = self.inner.connections();
        for connection in connections.remove(&id).unwrap_or_default() {
            if let Some(connection) = connection.upgrade() {
                connection.close(code.varint(), reason.as_bytes());
            }
        }
    }

    /// Ends all connections and stops listening.
    pub async fn close(&self, reason: &str) {
        self.inner.close(reason).await;
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({:?})", self.inner.identity)
    }
}

/// What an endpoint makes its socket for QUIC of.
pub(crate) struct Below {
    /// Another descriptor of the main socket.
    pub(crate) socket: UdpSocket,
    pub(crate) sockets: Arc<Sockets>,
    pub(crate) routes: Routes,
    pub(crate) arrived: Arc<Arrived>,
    pub(crate) pending: Arc<Pending>,
}

impl EndpointInner {
    /// Binds the socket. `wrap` returns what QUIC uses in its place.
    pub(crate) fn open(
        config: EndpointConfig,
        identity: Identity,
        trust: TrustStore,
        alpns: &[&[u8]],
        wrap: impl FnOnce(Below) -> io::Result<Box<dyn AsyncUdpSocket>>,
    ) -> Result<Arc<Self>, EndpointError> {
        let setup = |error: &dyn fmt::Display| EndpointError::Setup(error.to_string());
        let socket = socket::bind(config.listen).map_err(|error| EndpointError::Socket {
            address: config.listen,
            error,
        })?;
        let server = tls::server(&identity, alpns).map_err(|e| setup(&e))?;
        let server = QuicServerConfig::try_from(server).map_err(|e| setup(&e))?;
        let mut server = quic::ServerConfig::with_crypto(Arc::new(server));
        let mut transport = server_transport(&config).map_err(|e| setup(&e))?;
        if alpns.contains(&ALPN_BULK) {
            transport.max_concurrent_multipath_paths(CONCURRENT_PATHS_MAX);
        }
        server
            .transport_config(Arc::new(transport))
            .max_incoming(HANDSHAKES_MAX * 4)
            .incoming_buffer_size(64 << 10)
            .incoming_buffer_size_total(4 << 20);
        let other = socket.try_clone().map_err(|e| setup(&e))?;
        let socket = Socket::new(socket, config.segmentation_offload).map_err(|e| setup(&e))?;
        let sockets = Arc::new(Sockets::new(socket, Arc::<Dropped>::default()));
        let routes = Routes::new(config.listen.is_ipv6());
        let (arrived, pending) = (Arc::<Arrived>::default(), Arc::<Pending>::default());
        let below = Below {
            socket: other,
            sockets: sockets.clone(),
            routes: routes.clone(),
            arrived: arrived.clone(),
            pending: pending.clone(),
        };
        let sender = Sender::new(sockets.clone(), routes.clone());
        let stun = stun::Client::new(Box::pin(sender), pending.clone());
        let quic = quic::Endpoint::new_with_abstract_socket(
            quic_config(&identity),
            Some(server),
            wrap(below).map_err(|e| setup(&e))?,
            Arc::new(quic::TokioRuntime),
        );
        let quic = quic.map_err(|e| setup(&e))?;
        Ok(Arc::new(Self {
            config,
            identity,
            trust,
            bulk_offers: BulkOffers::default(),
            probed: Arc::default(),
            quic,
            stun,
            pending,
            sockets,
            routes,
            arrived,
            handshakes: Arc::new(Semaphore::new(HANDSHAKES_MAX)),
            connections: Mutex::default(),
            budgets: Mutex::default(),
            worked: Mutex::default(),
        }))
    }

    pub(crate) fn local_address(&self) -> io::Result<SocketAddr> {
        self.quic.local_addr()
    }

    /// Ends all connections and stops listening.
    pub(crate) async fn close(&self, reason: &str) {
        let code = CloseCode::ShuttingDown.varint();
        self.quic.close(code, reason.as_bytes());
        // Peers that do not acknowledge the close in time notice it by their idle time-out.
        let _ = tokio::time::timeout(CLOSE_WITHIN, self.quic.wait_idle()).await;
    }

    pub(crate) fn trusted(&self, name: &str) -> Result<TrustedHost, ConnectError> {
        let host = self.trust.by_name(name)?;
        host.ok_or_else(|| ConnectError::NotTrusted(name.to_owned()))
    }

    /// Returns the network paths that are used at once to a host.
    pub(crate) fn paths_to(&self, host: &TrustedHost) -> Vec<PathTo> {
        let paths = &self.config.paths;
        let is_its = |key: &str| key == host.name || key.parse() == Ok(host.id);
        let found = paths.iter().find(|(key, _)| is_its(key));
        let mut found = found.map_or(Vec::new(), |(_, paths)| paths.clone());
        for path in &mut found {
            path.to = self.mapped(path.to);
        }
        found
    }

    /// Opens the other network paths of a connection that this host has dialled. A peer of a realm
    /// has one way at a time.
    pub(crate) fn open_paths(&self, link: &Link, dial: &Dial, spread: Spread) {
        if self.routes.peer_of(link.address()).is_none() {
            keeper::open(link, &dial.paths, spread);
        }
    }

    /// Performs the dialler's side of the Hello.
    async fn greet(
        self: &Arc<Self>,
        link: Link,
        host: TrustedHost,
        address: SocketAddr,
        dial: &Dial,
    ) -> Result<Control, ConnectError> {
        let theirs = tokio::time::timeout(self.config.handshake_timeout, async {
            let streams = link.connection.open_bi().await;
            let (mut send, mut receive) = streams.map_err(|error| link.error(error))?;
            send_hello(&link, &mut send, &self.config.hello).await?;
            receive_hello(&link, &mut receive).await
        });
        let theirs = theirs.await.unwrap_or_else(|_| {
            link.close(CloseCode::BadOpening, "the Hello did not come in time");
            Err(LinkError::TimedOut)
        });
        let theirs = theirs.map_err(|error| dial.error(error))?;
        match self.config.hello.agree(&theirs) {
            Ok(version) => {
                self.open_paths(&link, dial, Spread::Best);
                Ok(self.control(link, host, address, theirs, version, true))
            }
            Err(error) => {
                link.close(CloseCode::Incompatible, &error.to_string());
                Err(error.into())
            }
        }
    }

    fn control(
        self: &Arc<Self>,
        link: Link,
        host: TrustedHost,
        address: SocketAddr,
        hello: Hello,
        version: u16,
        dialled: bool,
    ) -> Control {
        let mut budgets = self.budgets.lock().unwrap_or_else(PoisonError::into_inner);
        let budget = budgets.entry(host.id);
        let budget = budget.or_insert_with(|| Budget::new(MESSAGES_BYTES_PER_PEER_MAX));
        let budget = budget.clone();
        let peer = Arc::new(Peer {
            host,
            address,
            software: hello.software,
            incarnation: hello.incarnation,
            version,
        });
        Control {
            link,
            peer,
            endpoint: self.clone(),
            dialled,
            budget,
        }
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, HashMap<HostId, Vec<WeakConnectionHandle>>> {
        let connections = self.connections.lock();
        connections.unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a connection with a peer; returns false when there are too many.
    fn register(&self, id: HostId, link: &Link) -> bool {
        let mut connections = self.connections();
        connections.retain(|_, list| {
            list.retain(WeakConnectionHandle::is_alive);
            !list.is_empty()
        });
        let list = connections.entry(id).or_default();
        if list.len() >= CONNECTIONS_PER_PEER_MAX {
            return false;
        }
        list.push(link.connection.weak_handle());
        true
    }
}

/// Returns the configuration of QUIC for a host. Both keys outlive the process, so that peers of a
/// restarted agent learn at once that their connections are gone.
fn quic_config(identity: &Identity) -> quic::EndpointConfig {
    let reset_key = ResetKey(identity.derived_secret("longhaul 2026 QUIC stateless reset"));
    let id_key = identity.derived_secret("longhaul 2026 QUIC connection ids");
    let id_key = id_key
        .first_chunk()
        .map_or(0, |key| u64::from_le_bytes(*key));
    let mut endpoint = quic::EndpointConfig::new(Arc::new(reset_key));
    endpoint.cid_generator(Arc::new(move || {
        Box::new(HashedConnectionIdGenerator::from_key(id_key))
    }));
    // Other kinds of datagrams share the socket, distinguished by their first byte.
    endpoint.grease_quic_bit(false);
    endpoint
}

pub(crate) async fn send_hello(
    link: &Link,
    send: &mut SendStream,
    hello: &Hello,
) -> Result<(), LinkError> {
    let sent = send.write_all(&hello.encode()).await;
    sent.map_err(|_| link.lost_or_cut())?;
    // Fails only when the stream was finished before.
    let _ = send.finish();
    Ok(())
}

/// Reads a Hello; anything else closes the connection.
pub(crate) async fn receive_hello(
    link: &Link,
    receive: &mut RecvStream,
) -> Result<Hello, LinkError> {
    let read = async {
        let mut head = [0; HELLO_HEAD_BYTES];
        let read = receive.read_exact(&mut head).await;
        read.map_err(|_| "the Hello was cut".to_owned())?;
        let length = Hello::decode_head(&head).map_err(|e| e.to_string())?;
        let mut body = vec![0; length];
        let read = receive.read_exact(&mut body).await;
        read.map_err(|_| "the Hello was cut".to_owned())?;
        match receive.read_chunk(1).await {
            Ok(None) => Hello::decode_body(&body).map_err(|e| e.to_string()),
            _ => Err("something follows the Hello on its stream".to_owned()),
        }
    };
    read.await.map_err(|reason| match link.lost() {
        Some(error) => error,
        None => {
            link.close(CloseCode::BadOpening, &reason);
            LinkError::Failed(reason)
        }
    })
}

fn common_transport(config: &EndpointConfig) -> Result<TransportConfig, String> {
    let idle = IdleTimeout::try_from(config.idle_timeout).map_err(|e| e.to_string())?;
    let mut transport = TransportConfig::default();
    transport
        .max_idle_timeout(Some(idle))
        .keep_alive_interval(Some(config.keep_alive_at_rest))
        .default_path_keep_alive_interval(Some(config.keep_alive))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
        .send_fairness(false)
        .datagram_receive_buffer_size(None)
        .enable_segmentation_offload(config.segmentation_offload)
        .congestion_controller_factory(Arc::new(LimitedFactory {
            limit: RateLimit::default(),
            header_bytes: header_bytes(config.listen),
        }));
    Ok(transport)
}

/// Returns the listener's transport configuration: an unknown peer may open one stream and send
/// little.
fn server_transport(config: &EndpointConfig) -> Result<TransportConfig, String> {
    let mut transport = common_transport(config)?;
    transport
        .receive_window(VarInt::from_u32(OPENING_WINDOW_BYTES))
        .max_concurrent_bidi_streams(VarInt::from_u32(1))
        .max_concurrent_uni_streams(VarInt::from_u32(0));
    Ok(transport)
}

/// Signs stateless resets.
struct ResetKey([u8; 32]);

impl HmacKey for ResetKey {
    fn sign(&self, data: &[u8], signature_out: &mut [u8]) {
        let hash = blake3::keyed_hash(&self.0, data);
        signature_out.copy_from_slice(hash.as_bytes());
    }

    fn signature_len(&self) -> usize {
        32
    }

    fn verify(&self, data: &[u8], signature: &[u8]) -> Result<(), CryptoError> {
        let signature: [u8; 32] = signature.try_into().map_err(|_| CryptoError)?;
        // The comparison of hashes of this type is constant-time.
        if blake3::keyed_hash(&self.0, data) == blake3::Hash::from(signature) {
            Ok(())
        } else {
            Err(CryptoError)
        }
    }
}
