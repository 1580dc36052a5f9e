//! Sends QUIC's datagrams: to addresses as they are, and to peers on the way that is used now.

use super::socket::{Socket, Sockets};
use crate::quic::{Transmit, UdpSender};
use crate::routes::{Departure, RelayLeg, Routes};
use longhaul_paths::SocketId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;
use tracing::debug;

/// The maximum length of what the kernel segments: an IPv6 packet without its headers.
pub(crate) const BATCH_BYTES_MAX: usize = 65_535 - 48;

type Writable = Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>;

/// The sender of one task.
pub(crate) struct Sender {
    sockets: Arc<Sockets>,
    routes: Routes,
    /// Waits for room in this socket.
    waiting: Option<(SocketId, Writable)>,
    scratch: Vec<u8>,
}

impl Sender {
    pub(crate) fn new(sockets: Arc<Sockets>, routes: Routes) -> Self {
        Self {
            sockets,
            routes,
            waiting: None,
            scratch: Vec::new(),
        }
    }

    fn poll_on(
        &mut self,
        id: SocketId,
        socket: &Socket,
        transmit: &Transmit<'_>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match socket.try_send(transmit) {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    // QUIC sends again what matters. Probes of the MTU fail by design.
                    if !crate::quic::is_msg_size_err(&error) {
                        self.sockets.dropped.count_unsent(1);
                        debug!(%error, to = %transmit.destination, "cannot send");
                    }
                    return Poll::Ready(Ok(()));
                }
            }
            let waiting = match &mut self.waiting {
                Some((other, waiting)) if *other == id => waiting,
                slot => {
                    let io = socket.io.clone();
                    let writable: Writable = Box::pin(async move { io.writable().await });
                    &mut slot.insert((id, writable)).1
                }
            };
            let writable = ready!(waiting.as_mut().poll(context));
            self.waiting = None;
            writable?;
        }
    }

    fn poll_direct(
        &mut self,
        id: SocketId,
        address: SocketAddr,
        transmit: &Transmit<'_>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let Some(socket) = self.sockets.get(id) else {
            self.sockets.dropped.count_unroutable(1);
            return Poll::Ready(Ok(()));
        };
        let mut transmit = transmit.clone();
        transmit.destination = socket.mapped(address);
        transmit.src_ip = None;
        self.poll_on(id, &socket, &transmit, context)
    }

    fn poll_relayed(
        &mut self,
        relay: SocketAddr,
        session: SessionId,
        transmit: &Transmit<'_>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let stride = transmit.segment_size.unwrap_or(transmit.contents.len());
        let mut scratch = std::mem::take(&mut self.scratch);
        add_headers(session, transmit.contents, stride, &mut scratch);
        let socket = self.sockets.main.clone();
        let wrapped = Transmit {
            destination: socket.mapped(relay),
            // The relay's IP packets are other ones.
            ecn: None,
            contents: &scratch,
            segment_size: transmit.segment_size.map(|size| size + relay::HEADER_BYTES),
            src_ip: None,
        };
        let sent = match scratch.len() > BATCH_BYTES_MAX {
            true => {
                self.sockets.dropped.count_unsent(1);
                Poll::Ready(Ok(()))
            }
            false => self.poll_on(SocketId::MAIN, &socket, &wrapped, context),
        };
        self.scratch = scratch;
        sent
    }
}

impl UdpSender for Sender {
    fn poll_send(
        self: Pin<&mut Self>,
        transmit: &Transmit<'_>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match this.routes.departure(transmit.destination) {
            Departure::Plain => {
                let socket = this.sockets.main.clone();
                this.poll_on(SocketId::MAIN, &socket, transmit, context)
            }
            Departure::Direct(id, address) => this.poll_direct(id, address, transmit, context),
            Departure::Relayed(RelayLeg::Udp(relay), session) => {
                this.poll_relayed(relay, session, transmit, context)
            }
            Departure::Relayed(RelayLeg::Tcp(queue), session) => {
                let stride = transmit.segment_size.unwrap_or(transmit.contents.len());
                let dropped = into_queue(&queue, session, transmit.contents, stride);
                this.sockets.dropped.count_unsent(dropped);
                Poll::Ready(Ok(()))
            }
            Departure::Nowhere => {
                this.sockets.dropped.count_unroutable(1);
                Poll::Ready(Ok(()))
            }
        }
    }

    fn max_transmit_segments(&self) -> NonZeroUsize {
        let max = self.sockets.main.segments_max();
        NonZeroUsize::new(max).unwrap_or(NonZeroUsize::MIN)
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

/// Writes datagrams with the header of a relay's session before each.
pub(crate) fn add_headers(session: SessionId, datagrams: &[u8], stride: usize, into: &mut Vec<u8>) {
    let header = relay::header(session);
    into.clear();
    for datagram in datagrams.chunks(stride.max(1)) {
        into.extend_from_slice(&header);
        into.extend_from_slice(datagram);
    }
}

/// Puts datagrams into the queue of a relay's TCP connection. Returns the number of those for which
/// there was no room.
pub(crate) fn into_queue(
    queue: &mpsc::Sender<Vec<u8>>,
    session: SessionId,
    datagrams: &[u8],
    stride: usize,
) -> u64 {
    let header = relay::header(session);
    let chunks = datagrams.chunks(stride.max(1));
    let refused = chunks.filter(|datagram| {
        let datagram = [&header[..], datagram].concat();
        queue.try_send(datagram).is_err()
    });
    refused.count() as u64
}
