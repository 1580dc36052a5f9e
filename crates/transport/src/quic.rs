//! Wraps the QUIC library; no other module names it (see `docs/decisions/0003-quic-library.md`).

pub(crate) use noq::congestion::{Bbr3Config, Controller, ControllerFactory, ControllerMetrics};
pub(crate) use noq::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
pub(crate) use noq::crypto::{CryptoError, HmacKey};
pub(crate) use noq::udp::{RecvMeta, Transmit, UdpSocketState, is_msg_size_err};
pub(crate) use noq::{
    AsyncUdpSocket, ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig,
    IdleTimeout, Incoming, PathId, ReadError, RecvStream, Runtime, SendStream, ServerConfig,
    TokioRuntime, TransportConfig, UdpSender, VarInt, WeakConnectionHandle, WriteError,
};
pub(crate) use noq_proto::{HashedConnectionIdGenerator, RttEstimator};

use crate::error::{CloseCode, LinkError, REASON_BYTES_MAX};
use longhaul_protocol::HostId;
use rustls::pki_types::CertificateDer;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A connection, and the reason for which this side closed it, if it did. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    address: SocketAddr,
    closed_here: Arc<OnceLock<String>>,
}

impl Link {
    pub(crate) fn new(connection: Connection, address: SocketAddr) -> Self {
        Self {
            connection,
            address,
            closed_here: Arc::new(OnceLock::new()),
        }
    }

    /// Closes the connection; unacknowledged data is dropped.
    pub(crate) fn close(&self, code: CloseCode, reason: &str) {
        let mut cut = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(cut) {
            cut -= 1;
        }
        // Only the first reason counts.
        let _ = self.closed_here.set(reason.to_owned());
        self.connection
            .close(code.varint(), &reason.as_bytes()[..cut]);
    }

    /// Returns why the connection has ended; `None` while it has not.
    pub(crate) fn lost(&self) -> Option<LinkError> {
        self.connection
            .close_reason()
            .map(|error| self.error(error))
    }

    pub(crate) fn error(&self, error: ConnectionError) -> LinkError {
        match (error, self.closed_here.get()) {
            (ConnectionError::LocallyClosed, Some(reason)) => LinkError::ClosedHere {
                reason: reason.clone(),
            },
            (error, _) => error.into(),
        }
    }

    /// Returns the state of the connection after a failure of one of its streams.
    pub(crate) fn lost_or_cut(&self) -> LinkError {
        self.lost()
            .unwrap_or_else(|| LinkError::Failed("a stream was reset by the other host".to_owned()))
    }

    pub(crate) async fn closed(&self) -> LinkError {
        let error = self.connection.closed().await;
        self.error(error)
    }

    /// Returns the peer's address, which may change while the connection lives.
    pub(crate) fn address(&self) -> SocketAddr {
        let path = self.connection.path(PathId::ZERO);
        let address = path.and_then(|path| path.remote_address().ok());
        address.unwrap_or(self.address)
    }

    /// Leaves only the keep-alives of a connection at rest.
    pub(crate) fn rest(&self) {
        if let Some(path) = self.connection.path(PathId::ZERO) {
            // Fails only when the path is closed, and then it sends none.
            let _ = path.set_keep_alive_interval(None);
        }
    }

    /// Sends a packet that the peer acknowledges. A peer whose agent was restarted answers with a
    /// reset instead, which ends the connection.
    pub(crate) fn ping(&self) {
        if let Some(path) = self.connection.path(PathId::ZERO) {
            // Fails only when the path is closed: the connection has ended.
            let _ = path.ping();
        }
    }

    /// Returns the smoothed round-trip time.
    pub(crate) fn rtt(&self) -> Duration {
        self.connection.rtt(PathId::ZERO).unwrap_or_default()
    }

    /// Returns the identity whose key the peer proved.
    pub(crate) fn peer_id(&self) -> Option<HostId> {
        let identity = self.connection.peer_identity()?;
        let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        crate::identity::host_id_of(chain.first()?).ok()
    }
}
