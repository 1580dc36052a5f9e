//! Offers what shares the endpoint's socket with QUIC: STUN, the frame plane, ways to peers.

use super::{Endpoint, canonical};
use crate::mux::{Datagrams, DroppedDatagrams};
use crate::plane::PlaneSocket;
use crate::quic::{PathId, Transmit};
use crate::routes::Routes;
use crate::stun::{Observation, Reflexive, ReflexiveError};
use longhaul_paths::SocketId;
use longhaul_protocol::HostId;
use std::io;
use std::net::SocketAddr;
use tokio::sync::mpsc;

impl Endpoint {
    /// Returns the address under which the agent at `address` sees this host's socket, asked over
    /// the same socket (STUN, RFC 8489). Gives up after 2.5 s. The answer is not authenticated: it
    /// may serve as a hint, and not as a proof.
    pub async fn reflexive(&self, address: SocketAddr) -> Result<Reflexive, ReflexiveError> {
        let socket = self.local_address().map_err(ReflexiveError::Send)?;
        self.inner
            .stun
            .ask(self.inner.mapped(address), socket)
            .await
    }

    /// Sends one STUN request with a number, from the main socket. An answer arrives at
    /// [`Self::observations`]; there may be many questions at once, and none is repeated.
    pub fn ask(&self, id: u64, address: SocketAddr) -> io::Result<()> {
        let request = self.inner.pending.question(id, address)?;
        let socket = &self.inner.sockets.main;
        socket.send_now(&Transmit {
            destination: socket.mapped(address),
            ecn: None,
            contents: &request,
            segment_size: None,
            src_ip: None,
        })
    }

    /// Returns where the answers to [`Self::ask`] arrive from now on.
    pub fn observations(&self) -> mpsc::Receiver<Observation> {
        self.inner.pending.answers()
    }

    /// Returns the numbers of datagrams that were received and belong to nothing here, and of those
    /// that could not be sent.
    pub fn dropped_datagrams(&self) -> DroppedDatagrams {
        self.inner.sockets.dropped.get()
    }

    /// Returns the ways to peers.
    pub fn routes(&self) -> &Routes {
        &self.inner.routes
    }

    /// Returns whether a connection with a host exists whose peer is at this address itself, and
    /// not at a peer address. QUIC would not take its datagrams from a peer address.
    pub fn is_connected_at(&self, id: HostId, address: SocketAddr) -> bool {
        let connections = self.inner.connections();
        let of_host = connections.get(&id).into_iter().flatten();
        let mut live = of_host.filter_map(|connection| connection.upgrade());
        live.any(|connection| {
            let path = connection.path(PathId::ZERO);
            let remote = path.and_then(|path| path.remote_address().ok());
            remote.is_some_and(|remote| canonical(remote) == canonical(address))
                && connection.close_reason().is_none()
        })
    }

    /// Sets the receiver of the frame plane's datagrams. Without one they are dropped.
    pub fn set_datagrams(&self, datagrams: Option<Box<dyn Datagrams>>) {
        self.inner.arrived.set(datagrams);
    }

    /// Returns what sends the frame plane's datagrams.
    pub fn plane_socket(&self) -> PlaneSocket {
        PlaneSocket::new(self.inner.sockets.clone(), self.inner.routes.clone())
    }

    /// Takes a datagram, with its header, that a relay sent over TCP. Returns false if it is
    /// dropped because too many wait.
    pub fn relayed(&self, server: HostId, datagram: Vec<u8>) -> bool {
        let taken = self.inner.arrived.push(server, datagram);
        self.inner.sockets.receiver.wake();
        taken
    }

    /// Opens another UDP socket, at any port, for a search.
    pub fn open_socket(&self) -> io::Result<SocketId> {
        let mut address = self.inner.config.listen;
        address.set_port(0);
        self.inner.sockets.open(super::socket::bind(address)?)
    }

    /// Closes a socket of [`Self::open_socket`]; returns whether it was open.
    pub fn close_socket(&self, id: SocketId) -> bool {
        self.inner.routes.socket_closed(id);
        self.inner.sockets.close(id)
    }

    /// Returns the local address of a socket.
    pub fn socket_address(&self, id: SocketId) -> Option<SocketAddr> {
        let socket = self.inner.sockets.get(id)?;
        socket.io.local_addr().ok()
    }
}
