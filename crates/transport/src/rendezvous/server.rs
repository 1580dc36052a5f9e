//! Accepts rendezvous connections, over QUIC and over TLS and TCP: handshake and Hello, within
//! limits. Who may do what is decided by who takes the connections.

use super::RendezvousProtocol;
use super::connect::{over_quic, over_tcp};
use super::link::RendezvousLink;
use super::socket::{ReachedAt, Relay, RelaySender, RelaySocket};
use super::tcp;
use crate::endpoint::{
    EndpointConfig, EndpointError, EndpointInner, HANDSHAKES_MAX, receive_hello, send_hello,
};
use crate::error::{CloseCode, ConnectError, LinkError};
use crate::identity::{Identity, host_id_of};
use crate::quic::{Incoming, Link, Runtime, TokioRuntime, VarInt};
use crate::tls::{self, ALPN_RENDEZVOUS};
use crate::trust::TrustStore;
use longhaul_protocol::HostId;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsStream};
use tracing::{debug, warn};

/// How far a connection may be ahead of its reader, in bytes.
const WINDOW_BYTES: u32 = 256 << 10;
/// How long an incompatible peer may take to report that itself.
const INCOMPATIBLE_LINGER: Duration = Duration::from_secs(2);
const LINKS_WAITING: usize = 64;
/// The pause after a connection could not be accepted: most often, too many files are open.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Where a rendezvous server listens, and what it speaks.
#[derive(Debug, Clone)]
pub struct RendezvousConfig {
    /// The UDP address.
    pub listen: SocketAddr,
    /// The TCP address, if any, for hosts whose UDP is blocked.
    pub listen_tcp: Option<SocketAddr>,
    /// The protocol.
    pub protocol: RendezvousProtocol,
    /// The time limit for a handshake and Hello.
    pub handshake_timeout: Duration,
}

/// The sockets of a rendezvous server.
pub struct RendezvousServer {
    inner: Arc<EndpointInner>,
    protocol: RendezvousProtocol,
    links: Mutex<mpsc::Receiver<RendezvousLink>>,
    sender: RelaySender,
    tcp_address: Option<SocketAddr>,
    accepting_tcp: Option<JoinHandle<()>>,
}

impl RendezvousServer {
    /// Binds the sockets and starts to listen. Requires a tokio runtime. `relay` judges relayed
    /// datagrams, within the task that receives them.
    pub fn bind(
        config: RendezvousConfig,
        identity: Identity,
        relay: Arc<dyn Relay>,
    ) -> Result<Self, EndpointError> {
        let protocol = config.protocol;
        let mut endpoint = EndpointConfig::new(config.listen, protocol.hello.clone());
        endpoint.handshake_timeout = config.handshake_timeout;
        let ipv6 = config.listen.is_ipv6();
        let mut sender = None;
        let trust = TrustStore::none();
        let alpns = [ALPN_RENDEZVOUS];
        let acceptor = tls::server(&identity, &alpns);
        let acceptor = acceptor.map_err(|error| EndpointError::Setup(error.to_string()))?;
        let inner = EndpointInner::open(endpoint, identity, trust, &alpns, |below| {
            let socket = TokioRuntime.wrap_udp_socket(below.socket)?;
            let reached_at = ReachedAt::default();
            let senders = socket.create_sender();
            sender = Some(RelaySender::new(senders, reached_at.clone(), ipv6));
            Ok(Box::new(RelaySocket::over(socket, relay, reached_at, ipv6)))
        })?;
        let Some(sender) = sender else {
            return Err(EndpointError::Setup("no socket was made".to_owned()));
        };
        let (links, taken) = mpsc::channel(LINKS_WAITING);
        let (mut tcp_address, mut accepting_tcp) = (None, None);
        if let Some(address) = config.listen_tcp {
            let error = |error| EndpointError::Tcp { address, error };
            let listener = std::net::TcpListener::bind(address).map_err(error)?;
            listener.set_nonblocking(true).map_err(error)?;
            let listener = TcpListener::from_std(listener).map_err(error)?;
            tcp_address = Some(listener.local_addr().map_err(error)?);
            accepting_tcp = Some(tokio::spawn(accept_tcp(
                listener,
                TlsAcceptor::from(Arc::new(acceptor)),
                (protocol.clone(), config.handshake_timeout),
                links.clone(),
            )));
        }
        tokio::spawn(accept_quic(inner.clone(), protocol.clone(), links));
        Ok(Self {
            inner,
            protocol,
            links: Mutex::new(taken),
            sender,
            tcp_address,
            accepting_tcp,
        })
    }

    /// Returns the address of the UDP socket.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.inner.local_address()
    }

    /// Returns the address of the TCP socket, if there is one.
    pub fn tcp_address(&self) -> Option<SocketAddr> {
        self.tcp_address
    }

    /// Returns what sends relayed datagrams that arrived over TCP.
    pub fn relay_sender(&self) -> &RelaySender {
        &self.sender
    }

    /// Returns the next connection whose key is proved. Safe to cancel.
    pub async fn accept(&self) -> Option<RendezvousLink> {
        self.links.lock().await.recv().await
    }

    /// Connects to another server over QUIC.
    pub async fn connect(
        &self,
        id: HostId,
        addresses: &[String],
    ) -> Result<RendezvousLink, ConnectError> {
        let inner = &self.inner;
        inner
            .connect_rendezvous(id, addresses, &self.protocol)
            .await
    }

    /// Ends all connections over QUIC, and stops listening.
    pub async fn close(&self, reason: &str) {
        self.stop_tcp();
        self.inner.close(reason).await;
    }
}

impl RendezvousServer {
    fn stop_tcp(&self) {
        if let Some(accepting) = &self.accepting_tcp {
            accepting.abort();
        }
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        self.stop_tcp();
    }
}

impl fmt::Debug for RendezvousServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RendezvousServer({:?})", self.inner.identity)
    }
}

async fn accept_quic(
    endpoint: Arc<EndpointInner>,
    protocol: RendezvousProtocol,
    links: mpsc::Sender<RendezvousLink>,
) {
    while let Some((incoming, permit)) = endpoint.next_handshake().await {
        let (endpoint, protocol) = (endpoint.clone(), protocol.clone());
        let links = links.clone();
        tokio::spawn(async move {
            let address = incoming.remote_address();
            let opened = open_quic(&endpoint, incoming, &protocol, permit).await;
            match opened {
                // Fails only when the server stops.
                Ok(link) => drop(links.send(link).await),
                Err(reason) => debug!(%address, reason, "refused a connection"),
            }
        });
    }
}

async fn open_quic(
    endpoint: &EndpointInner,
    incoming: Incoming,
    protocol: &RendezvousProtocol,
    permit: OwnedSemaphorePermit,
) -> Result<RendezvousLink, String> {
    let address = incoming.remote_address();
    let limit = endpoint.config.handshake_timeout;
    let handshake = async { incoming.accept()?.await };
    let connection = match timeout(limit, handshake).await {
        Ok(Ok(connection)) => connection,
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err("the handshake did not end in time".to_owned()),
    };
    let link = Link::new(connection, address);
    let Some(peer) = link.peer_id() else {
        link.close(CloseCode::IdentityUnknown, "no certificate");
        return Err("no certificate".to_owned());
    };
    let opening = timeout(limit, greet(&link, protocol)).await;
    drop(permit);
    let opening = opening.unwrap_or_else(|_| {
        let reason = "the opening exchange did not come in time".to_owned();
        Err((CloseCode::BadOpening, reason))
    });
    let streams = opening.map_err(|(code, reason)| {
        link.close(code, &reason);
        reason
    })?;
    Ok(over_quic(link, peer, streams, protocol))
}

type Streams = (crate::quic::SendStream, crate::quic::RecvStream);

async fn greet(link: &Link, protocol: &RendezvousProtocol) -> Result<Streams, (CloseCode, String)> {
    let bad = |error: LinkError| (CloseCode::BadOpening, error.to_string());
    let streams = link.connection.accept_bi().await;
    let (mut send, mut receive) = streams.map_err(|error| bad(link.error(error)))?;
    let theirs = receive_hello(link, &mut receive).await.map_err(bad)?;
    send_hello(link, &mut send, &protocol.hello)
        .await
        .map_err(bad)?;
    if let Err(error) = protocol.hello.agree(&theirs) {
        // The peer needs this side's Hello to report the same, so it closes first.
        let _ = timeout(INCOMPATIBLE_LINGER, link.closed()).await;
        return Err((CloseCode::Incompatible, error.to_string()));
    }
    let connection = &link.connection;
    connection.set_receive_window(VarInt::from_u32(WINDOW_BYTES));
    // The stream of the Hello counts until its end is acknowledged.
    connection.set_max_concurrent_bi_streams(VarInt::from_u32(2));
    let streams = connection.accept_bi().await;
    streams.map_err(|error| bad(link.error(error)))
}

async fn accept_tcp(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    (protocol, limit): (RendezvousProtocol, Duration),
    links: mpsc::Sender<RendezvousLink>,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    while !links.is_closed() {
        // It is never closed.
        let Ok(permit) = handshakes.clone().acquire_owned().await else {
            return;
        };
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "a TCP connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (acceptor, protocol) = (acceptor.clone(), protocol.clone());
        let links = links.clone();
        tokio::spawn(async move {
            let opened = timeout(limit, open_tcp(stream, address, &acceptor, &protocol)).await;
            drop(permit);
            match opened {
                // Fails only when the server stops.
                Ok(Ok(link)) => drop(links.send(link).await),
                Ok(Err(reason)) => debug!(%address, reason, "refused a connection over TCP"),
                Err(_) => debug!(%address, "a connection over TCP was not opened in time"),
            }
        });
    }
}

async fn open_tcp(
    stream: TcpStream,
    address: SocketAddr,
    acceptor: &TlsAcceptor,
    protocol: &RendezvousProtocol,
) -> Result<RendezvousLink, String> {
    let text = |error: io::Error| error.to_string();
    tcp::prepare(&stream).map_err(text)?;
    let began = Instant::now();
    let stream = acceptor.accept(stream).await.map_err(text)?;
    let session = stream.get_ref().1;
    if session.alpn_protocol() != Some(ALPN_RENDEZVOUS) {
        return Err("no ALPN of the rendezvous protocol".to_owned());
    }
    let certificates = session.peer_certificates();
    let certificate = certificates
        .and_then(<[_]>::first)
        .ok_or("no certificate")?;
    let peer = host_id_of(certificate).map_err(|error| error.to_string())?;
    let mut stream = TlsStream::from(stream);
    let hello = &protocol.hello;
    let theirs = tcp::greet(&mut stream, hello, false).await;
    let theirs = theirs.map_err(|error| error.to_string())?;
    hello.agree(&theirs).map_err(|error| error.to_string())?;
    Ok(over_tcp(stream, (peer, address, began), protocol))
}
