//! Wraps the QUIC library; no other module names it (see `docs/decisions/0003-quic-library.md`).

pub(crate) use noq::congestion::{Bbr3Config, Controller, ControllerFactory, ControllerMetrics};
pub(crate) use noq::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
pub(crate) use noq::crypto::{CryptoError, HmacKey};
pub(crate) use noq::udp::{RecvMeta, Transmit, UdpSocketState, is_msg_size_err};
pub(crate) use noq::{
    AsyncUdpSocket, ClientConfig, Connection, ConnectionError, Endpoint, EndpointConfig, FourTuple,
    IdleTimeout, Incoming, PathEvent, PathEvents, PathId, PathStats, PathStatus, ReadError,
    RecvStream, Runtime, SendStream, ServerConfig, TokioRuntime, TransportConfig, UdpSender,
    VarInt, WeakConnectionHandle, WriteError,
};
pub(crate) use noq_proto::{HashedConnectionIdGenerator, RttEstimator};

use crate::error::{CloseCode, LinkError, REASON_BYTES_MAX};
use crate::paths::{PathTo, PathTraffic};
use longhaul_protocol::HostId;
use rustls::pki_types::CertificateDer;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// The size of a UDP header and of the IP header before it, by address family.
pub(crate) fn header_bytes(address: SocketAddr) -> u64 {
    match address.ip().to_canonical() {
        IpAddr::V4(_) => 28,
        IpAddr::V6(_) => 48,
    }
}

/// The maximum number of addresses of lost paths that a connection remembers.
const GONE_PATHS_MAX: usize = 64;

/// The network paths of a connection, as its keeper last saw them. Without a keeper there is the
/// path on which it was made.
#[derive(Debug)]
pub(crate) struct View {
    /// The paths that carry data now.
    pub(crate) up: Vec<(PathId, PathTo)>,
    /// The paths that were given up, and may still count data as under way.
    pub(crate) draining: Vec<PathId>,
    /// Datagrams and bytes, sent and received, on paths that are gone.
    pub(crate) gone: BTreeMap<PathTo, [u64; 4]>,
    /// The path for what is not spread over all.
    pub(crate) best: PathId,
    /// Whether the connection is at rest, and needs one path alone.
    pub(crate) at_rest: bool,
}

impl View {
    /// Adds what a path that is gone has carried. Of a peer whose address changes all the time, not
    /// all are remembered.
    pub(crate) fn note_gone(&mut self, path: PathTo, stats: &PathStats) {
        if self.gone.len() >= GONE_PATHS_MAX && !self.gone.contains_key(&path) {
            return;
        }
        let sum = self.gone.entry(path).or_default();
        let (tx, rx) = (&stats.udp_tx, &stats.udp_rx);
        let more = [tx.datagrams, tx.bytes, rx.datagrams, rx.bytes];
        for (sum, more) in sum.iter_mut().zip(more) {
            *sum += more;
        }
    }
}

/// A connection, and the reason for which this side closed it, if it did. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Link {
    pub(crate) connection: Connection,
    address: SocketAddr,
    view: Arc<Mutex<View>>,
    closed_here: Arc<OnceLock<String>>,
}

impl Link {
    pub(crate) fn new(connection: Connection, address: SocketAddr) -> Self {
        let first = PathTo {
            to: address,
            from: None,
        };
        Self {
            connection,
            address,
            view: Arc::new(Mutex::new(View {
                up: vec![(PathId::ZERO, first)],
                draining: Vec::new(),
                gone: BTreeMap::new(),
                best: PathId::ZERO,
                at_rest: false,
            })),
            closed_here: Arc::new(OnceLock::new()),
        }
    }

    /// Returns the view of the paths, for their keeper.
    pub(crate) fn view(&self) -> Arc<Mutex<View>> {
        self.view.clone()
    }

    fn viewed(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the statistics of the paths that carry data now.
    pub(crate) fn path_stats(&self) -> Vec<PathStats> {
        let view = self.viewed();
        let ids = view.up.iter().map(|(id, _)| *id);
        ids.filter_map(|id| self.connection.path_stats(id))
            .collect()
    }

    /// Returns the congestion windows of paths that were given up with data under way, in bytes.
    pub(crate) fn draining_bytes(&self) -> u64 {
        let view = self.viewed();
        let ids = view.draining.iter();
        ids.filter_map(|id| Some(self.connection.path_stats(*id)?.cwnd))
            .sum()
    }

    /// Returns what each path has carried.
    pub(crate) fn traffic(&self) -> Vec<PathTraffic> {
        let view = self.viewed();
        let mut sums: BTreeMap<PathTo, (bool, [u64; 4])> = view
            .gone
            .iter()
            .map(|(path, sum)| (*path, (false, *sum)))
            .collect();
        for (id, path) in &view.up {
            let Some(stats) = self.connection.path_stats(*id) else {
                continue;
            };
            let (is_up, sum) = sums.entry(*path).or_default();
            *is_up = true;
            let (tx, rx) = (&stats.udp_tx, &stats.udp_rx);
            let more = [tx.datagrams, tx.bytes, rx.datagrams, rx.bytes];
            for (sum, more) in sum.iter_mut().zip(more) {
                *sum += more;
            }
        }
        let traffic = sums.into_iter().map(|(path, (is_up, sum))| {
            let [sent, sent_bytes, received, received_bytes] = sum;
            let header = header_bytes(path.to);
            PathTraffic {
                path,
                is_up,
                sent_bytes: sent_bytes + sent * header,
                received_bytes: received_bytes + received * header,
            }
        });
        traffic.collect()
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
        let path = self.connection.path(self.viewed().best);
        let address = path.and_then(|path| path.remote_address().ok());
        address.unwrap_or(self.address)
    }

    /// Leaves only the keep-alives of a connection at rest, and one path.
    pub(crate) fn rest(&self) {
        let mut view = self.viewed();
        view.at_rest = true;
        for (id, _) in &view.up {
            if let Some(path) = self.connection.path(*id) {
                // Fails only when the path is closed, and then it sends none.
                let _ = path.set_keep_alive_interval(None);
            }
        }
    }

    /// Sends a packet that the peer acknowledges. A peer whose agent was restarted answers with a
    /// reset instead, which ends the connection.
    pub(crate) fn ping(&self) {
        for (id, _) in &self.viewed().up {
            if let Some(path) = self.connection.path(*id) {
                // Fails only when the path is closed: nothing is heard on it.
                let _ = path.ping();
            }
        }
    }

    /// Returns the smoothed round-trip time of the path for what is not spread over all.
    pub(crate) fn rtt(&self) -> Duration {
        let best = self.viewed().best;
        self.connection.rtt(best).unwrap_or_default()
    }

    /// Returns the identity whose key the peer proved.
    pub(crate) fn peer_id(&self) -> Option<HostId> {
        let identity = self.connection.peer_identity()?;
        let chain = identity.downcast::<Vec<CertificateDer<'static>>>().ok()?;
        crate::identity::host_id_of(chain.first()?).ok()
    }
}
