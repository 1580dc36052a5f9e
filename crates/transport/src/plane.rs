//! Sends the datagrams of the frame plane, from any thread, on the socket that QUIC uses.

#[cfg(test)]
mod tests;

use crate::mux::{BATCH_BYTES_MAX, Socket, Sockets, add_headers, into_queue};
use crate::quic::{Transmit, is_msg_size_err};
use crate::routes::{Departure, RelayLeg, Routes, Way};
use longhaul_protocol::HostId;
use longhaul_realm::relay::HEADER_BYTES;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

/// How long a batch waits for room in the socket, in milliseconds.
const ROOM_WITHIN_MS: u8 = 20;

/// Why datagrams were not sent. They are counted as dropped.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// The peer has no session at the relay, or the relay cannot be reached.
    #[error("the relay has no session with this host")]
    NoSession,
    /// The socket is closed.
    #[error("socket {0} is closed")]
    NoSocket(u32),
    /// A datagram is longer than the interface carries.
    #[error("datagrams of {0} bytes are longer than the interface carries")]
    TooLong(usize),
    /// The socket, or the connection to a relay over TCP, has no room.
    #[error("no room to send")]
    Full,
    /// The system refuses them.
    #[error("cannot send: {0}")]
    Io(io::Error),
}

/// Sends batches of datagrams to peers. Cheap to clone.
#[derive(Clone)]
pub struct PlaneSocket {
    sockets: Arc<Sockets>,
    routes: Routes,
}

impl PlaneSocket {
    pub(crate) fn new(sockets: Arc<Sockets>, routes: Routes) -> Self {
        Self { sockets, routes }
    }

    /// Sends datagrams of `stride` bytes each to a peer on a way; the last one may be shorter. They
    /// go to the kernel in as few calls as possible (UDP segmentation offload). With a full socket
    /// buffer this waits up to 20 ms, and drops the rest. Blocks the thread for that time.
    pub fn send(
        &self,
        peer: HostId,
        way: Way,
        datagrams: &[u8],
        stride: usize,
    ) -> Result<(), PlaneError> {
        if datagrams.is_empty() {
            return Ok(());
        }
        let stride = stride.clamp(1, datagrams.len());
        let dropped = &self.sockets.dropped;
        match self.routes.departure_on(peer, way) {
            Departure::Direct(id, address) => match self.sockets.get(id) {
                Some(socket) => self.send_on(&socket, address, datagrams, stride),
                None => {
                    dropped.count_unroutable(1);
                    Err(PlaneError::NoSocket(id.0))
                }
            },
            Departure::Relayed(RelayLeg::Udp(relay), session) => {
                let mut wrapped = Vec::new();
                let headers = datagrams.len().div_ceil(stride) * HEADER_BYTES;
                wrapped.reserve_exact(datagrams.len() + headers);
                add_headers(session, datagrams, stride, &mut wrapped);
                self.send_on(&self.sockets.main, relay, &wrapped, stride + HEADER_BYTES)
            }
            Departure::Relayed(RelayLeg::Tcp(queue), session) => {
                match into_queue(&queue, session, datagrams, stride) {
                    0 => Ok(()),
                    refused => {
                        dropped.count_unsent(refused);
                        Err(PlaneError::Full)
                    }
                }
            }
            Departure::Plain | Departure::Nowhere => {
                dropped.count_unroutable(1);
                Err(PlaneError::NoSession)
            }
        }
    }

    fn send_on(
        &self,
        socket: &Socket,
        address: SocketAddr,
        datagrams: &[u8],
        stride: usize,
    ) -> Result<(), PlaneError> {
        let destination = socket.mapped(address);
        let mut rest = datagrams;
        while !rest.is_empty() {
            let segments = socket.segments_max().min(BATCH_BYTES_MAX / stride).max(1);
            let (batch, later) = rest.split_at(rest.len().min(segments * stride));
            let segmented = batch.len() > stride;
            let transmit = Transmit {
                destination,
                ecn: None,
                contents: batch,
                segment_size: segmented.then_some(stride),
                src_ip: None,
            };
            match self.send_once(socket, &transmit) {
                Ok(()) => rest = later,
                // The socket's state has noted that: one by one from now on.
                Err(PlaneError::Io(error)) if segmented && socket.segments_max() == 1 => {
                    tracing::info!(%error, "the kernel does not segment datagrams");
                    self.sockets.dropped.count_segmentation_refused();
                }
                Err(PlaneError::TooLong(_)) => {
                    self.sockets.dropped.count_unsent(1);
                    return Err(PlaneError::TooLong(stride));
                }
                Err(error) => {
                    self.sockets.dropped.count_unsent(1);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn send_once(&self, socket: &Socket, transmit: &Transmit<'_>) -> Result<(), PlaneError> {
        let mut waited = false;
        loop {
            match socket.send_now(transmit) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if waited || !wait_for_room(socket) {
                        return Err(PlaneError::Full);
                    }
                    waited = true;
                }
                Err(error) if is_msg_size_err(&error) => {
                    return Err(PlaneError::TooLong(transmit.contents.len()));
                }
                Err(error) => return Err(PlaneError::Io(error)),
            }
        }
    }
}

/// Waits until a socket has room; returns whether it has.
fn wait_for_room(socket: &Socket) -> bool {
    let mut poll = [PollFd::new(socket.io.as_fd(), PollFlags::POLLOUT)];
    let polled = nix::poll::poll(&mut poll, PollTimeout::from(ROOM_WITHIN_MS));
    polled.is_ok_and(|ready| ready > 0)
}

impl fmt::Debug for PlaneSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlaneSocket")
    }
}
