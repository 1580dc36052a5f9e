//! Dials rendezvous servers, from the host's one UDP socket or over TCP.

use super::RendezvousProtocol;
use super::link::{
    Carrier, ReceiverKind, RendezvousHandle, RendezvousLink, RendezvousReceiver, RendezvousSender,
    SenderKind, TcpState,
};
use super::tcp::{self, DATAGRAMS_WAITING};
use crate::endpoint::{Candidates, Dial, Endpoint, EndpointInner, receive_hello, send_hello};
use crate::error::{CloseCode, ConnectError, LinkError};
use crate::framing::{MessageReader, MessageWriter};
use crate::quic::{Link, RecvStream, SendStream};
use crate::rate::RateLimit;
use crate::tls::{self, ALPN_RENDEZVOUS, ExpectedServer, SERVER_NAME};
use longhaul_protocol::HostId;
use rustls::pki_types::ServerName;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::{TlsConnector, TlsStream};

impl Endpoint {
    /// Connects to a rendezvous server over QUIC, from this host's UDP socket. The server must
    /// prove the key of `id`.
    pub async fn connect_rendezvous(
        &self,
        id: HostId,
        addresses: &[String],
        protocol: &RendezvousProtocol,
    ) -> Result<RendezvousLink, ConnectError> {
        self.inner.connect_rendezvous(id, addresses, protocol).await
    }

    /// Connects to a rendezvous server over TLS and TCP, for a host whose UDP is blocked. The
    /// addresses are tried one after the other.
    pub async fn connect_rendezvous_tcp(
        &self,
        id: HostId,
        addresses: &[String],
        protocol: &RendezvousProtocol,
    ) -> Result<RendezvousLink, ConnectError> {
        let name = name_of(id);
        let mut tried = Vec::new();
        for address in addresses {
            let limit = self.inner.config.handshake_timeout;
            let dial = dial_tcp(&self.inner, id, address, protocol);
            match timeout(limit, dial).await {
                Ok(Ok(link)) => return Ok(link),
                Ok(Err(error @ ConnectError::Incompatible(_))) => return Err(error),
                Ok(Err(ConnectError::Lost { error, .. })) => {
                    tried.push((address.clone(), error.to_string()));
                }
                Ok(Err(error)) => tried.push((address.clone(), error.to_string())),
                Err(_) => tried.push((address.clone(), LinkError::TimedOut.to_string())),
            }
        }
        Err(ConnectError::Unreachable { name, tried })
    }
}

fn name_of(id: HostId) -> String {
    let id = id.to_string();
    format!("rendezvous server {}", id.get(..19).unwrap_or(&id))
}

impl EndpointInner {
    pub(crate) async fn connect_rendezvous(
        &self,
        id: HostId,
        addresses: &[String],
        protocol: &RendezvousProtocol,
    ) -> Result<RendezvousLink, ConnectError> {
        let dial = Dial {
            expected: Some(id),
            name: name_of(id),
            alpn: ALPN_RENDEZVOUS,
            limit: RateLimit::default(),
            paths: Vec::new(),
        };
        let candidates = Candidates::configured(addresses);
        let (link, _) = self.dial_any(&dial, candidates).await?;
        let hellos = async {
            let streams = link.connection.open_bi().await;
            let (mut send, mut receive) = streams.map_err(|error| link.error(error))?;
            send_hello(&link, &mut send, &protocol.hello).await?;
            receive_hello(&link, &mut receive).await
        };
        let theirs = timeout(self.config.handshake_timeout, hellos).await;
        let theirs = theirs.unwrap_or_else(|_| {
            link.close(CloseCode::BadOpening, "the Hello did not come in time");
            Err(LinkError::TimedOut)
        });
        let theirs = theirs.map_err(|error| dial.error(error))?;
        if let Err(error) = protocol.hello.agree(&theirs) {
            link.close(CloseCode::Incompatible, &error.to_string());
            return Err(error.into());
        }
        let streams = link.connection.open_bi().await;
        let streams = streams.map_err(|error| dial.error(link.error(error)))?;
        Ok(over_quic(link, id, streams, protocol))
    }
}

/// Returns the connection on a stream of its own, after the Hellos.
pub(super) fn over_quic(
    link: Link,
    peer: HostId,
    (send, receive): (SendStream, RecvStream),
    protocol: &RendezvousProtocol,
) -> RendezvousLink {
    link.rest();
    let limit = protocol.message_bytes_max;
    let writer = MessageWriter::new(link.clone(), send, limit);
    let reader = MessageReader::new(link.clone(), receive, limit);
    RendezvousLink {
        handle: RendezvousHandle {
            peer,
            carrier: Carrier::Quic(link.clone()),
        },
        sender: RendezvousSender(SenderKind::Quic(writer, link)),
        receiver: RendezvousReceiver(ReceiverKind::Quic(reader)),
    }
}

/// Returns the connection on a TLS stream, after the Hellos.
pub(super) fn over_tcp(
    stream: TlsStream<TcpStream>,
    (peer, address, began): (HostId, SocketAddr, Instant),
    protocol: &RendezvousProtocol,
) -> RendezvousLink {
    let (datagrams, waiting) = mpsc::channel(DATAGRAMS_WAITING);
    let state = TcpState::new(address, began.elapsed(), datagrams);
    let limits = (protocol.message_bytes_max, protocol.datagram_bytes_max);
    let (writer, reader) = tcp::start(stream, state.clone(), waiting, limits);
    RendezvousLink {
        handle: RendezvousHandle {
            peer,
            carrier: Carrier::Tcp(state),
        },
        sender: RendezvousSender(SenderKind::Tcp(writer)),
        receiver: RendezvousReceiver(ReceiverKind::Tcp(reader)),
    }
}

async fn dial_tcp(
    endpoint: &EndpointInner,
    id: HostId,
    address: &str,
    protocol: &RendezvousProtocol,
) -> Result<RendezvousLink, ConnectError> {
    let lost = |text: String| ConnectError::Lost {
        name: name_of(id),
        error: LinkError::Failed(text),
    };
    let failed = |error: std::io::Error| lost(error.to_string());
    let expected = ExpectedServer::new(Some(id));
    let tls = tls::client(&endpoint.identity, expected.clone(), ALPN_RENDEZVOUS);
    let tls = tls.map_err(|error| lost(error.to_string()))?;
    let name = ServerName::try_from(SERVER_NAME).map_err(|error| lost(error.to_string()))?;
    let stream = TcpStream::connect(address).await.map_err(failed)?;
    tcp::prepare(&stream).map_err(failed)?;
    let to = stream.peer_addr().map_err(failed)?;
    let began = Instant::now();
    let stream = TlsConnector::from(Arc::new(tls))
        .connect(name, stream)
        .await;
    let mut stream = match (stream, expected.found()) {
        (Ok(stream), _) => TlsStream::from(stream),
        (Err(_), Some(found)) if found != id => {
            return Err(ConnectError::IdentityChanged {
                name: name_of(id),
                expected: id,
                found,
                address: address.to_owned(),
            });
        }
        (Err(error), _) => return Err(failed(error)),
    };
    let hello = &protocol.hello;
    let theirs = tcp::greet(&mut stream, hello, true).await;
    let theirs = theirs.map_err(|error| ConnectError::Lost {
        name: name_of(id),
        error,
    })?;
    hello.agree(&theirs)?;
    Ok(over_tcp(stream, (id, to, began), protocol))
}
