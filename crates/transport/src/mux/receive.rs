//! Receives from all sockets of an endpoint, keeps QUIC's datagrams, and takes out the others.

use super::socket::{Socket, Sockets};
use super::sort::{Kept, Outlet, Source, sort};
use super::{DatagramKind, Datagrams, Dropped, Sender};
use crate::quic::{AsyncUdpSocket, RecvMeta, UdpSender};
use crate::routes::{Routes, Way};
use crate::stun::{self, Pending};
use longhaul_paths::SocketId;
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use tracing::debug;

/// The maximum number of bytes for QUIC that wait for the next receive.
const WAITING_BYTES_MAX: usize = 4 << 20;
/// The maximum number of datagrams from relays' TCP connections that wait.
const ARRIVED_MAX: usize = 1024;

/// What other tasks give to the one that receives.
#[derive(Default)]
pub(crate) struct Arrived {
    datagrams: Mutex<Option<Box<dyn Datagrams>>>,
    relayed: Mutex<VecDeque<(HostId, Vec<u8>)>>,
}

impl Arrived {
    /// Sets the receiver of the frame plane's datagrams.
    pub(crate) fn set(&self, datagrams: Option<Box<dyn Datagrams>>) {
        *self.datagrams() = datagrams;
    }

    fn datagrams(&self) -> std::sync::MutexGuard<'_, Option<Box<dyn Datagrams>>> {
        let datagrams = self.datagrams.lock();
        datagrams.unwrap_or_else(PoisonError::into_inner)
    }

    fn relayed(&self) -> std::sync::MutexGuard<'_, VecDeque<(HostId, Vec<u8>)>> {
        self.relayed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a datagram from a relay's TCP connection; returns false if too many wait.
    pub(crate) fn push(&self, server: HostId, datagram: Vec<u8>) -> bool {
        let mut relayed = self.relayed();
        let has_room = relayed.len() < ARRIVED_MAX;
        if has_room {
            relayed.push_back((server, datagram));
        }
        has_room
    }
}

impl fmt::Debug for Arrived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Arrived")
    }
}

/// Datagrams of one source for QUIC that wait for the next receive.
#[derive(Debug)]
struct Waiting {
    bytes: Vec<u8>,
    stride: usize,
    from: SocketAddr,
}

/// The socket below QUIC.
#[derive(Debug)]
pub(crate) struct Mux {
    pub(super) sockets: Arc<Sockets>,
    routes: Routes,
    arrived: Arc<Arrived>,
    server: stun::Server,
    pending: Arc<Pending>,
    /// The main socket first.
    polled: Vec<(SocketId, Socket)>,
    changes: u64,
    /// The place in `polled` that is polled first.
    turn: usize,
    waiting: Queue,
}

#[derive(Debug, Default)]
struct Queue {
    entries: VecDeque<Waiting>,
    bytes: usize,
}

impl Mux {
    pub(crate) fn new(
        sockets: Arc<Sockets>,
        routes: Routes,
        arrived: Arc<Arrived>,
        pending: Arc<Pending>,
    ) -> Self {
        let sender = Sender::new(sockets.clone(), routes.clone());
        Self {
            server: stun::Server::new(Box::pin(sender)),
            polled: vec![(SocketId::MAIN, sockets.main.clone())],
            sockets,
            routes,
            arrived,
            pending,
            changes: 0,
            turn: 0,
            waiting: Queue::default(),
        }
    }

    /// Receives from the first socket, from the one whose turn it is on, that has something.
    fn poll_sockets(
        &mut self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<(SocketId, usize)>> {
        self.sockets.renew(&mut self.changes, &mut self.polled);
        let count = self.polled.len();
        for offset in 0..count {
            let place = (self.turn + offset) % count;
            let (id, socket) = &self.polled[place];
            match socket.poll_recv(context, buffers, metas) {
                Poll::Pending => {}
                Poll::Ready(Ok(received)) => {
                    self.turn = (place + 1) % count;
                    return Poll::Ready(Ok((*id, received)));
                }
                Poll::Ready(Err(error)) if *id == SocketId::MAIN => {
                    return Poll::Ready(Err(error));
                }
                // It is found dead by its silence.
                Poll::Ready(Err(error)) => debug!(socket = id.0, %error, "cannot receive"),
            }
        }
        Poll::Pending
    }

    /// Sorts what a socket received.
    fn sort(&mut self, socket: SocketId, buffers: &mut [IoSliceMut<'_>], metas: &mut [RecvMeta]) {
        let Self {
            sockets,
            routes,
            arrived,
            server,
            pending,
            waiting,
            ..
        } = self;
        let dropped = &*sockets.dropped;
        let mut outlet = Sorted {
            routes,
            server,
            pending,
            waiting,
            dropped,
            datagrams: &mut arrived.datagrams(),
            socket,
            from: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
            to: None,
            frames: false,
        };
        for (buffer, meta) in buffers.iter_mut().zip(metas) {
            let received = &mut buffer[..meta.len];
            let arrival = outlet.routes.arrival(socket, meta.addr);
            let Some(arrival) = arrival.filter(|_| !received.is_empty()) else {
                dropped.count(DatagramKind::Other, 1);
                meta.len = 0;
                continue;
            };
            (outlet.from, outlet.to) = (meta.addr, meta.dst_ip);
            let address = crate::endpoint::canonical(meta.addr);
            let source = Source {
                way: Way::Direct { socket, address },
                address: arrival.address,
                server: arrival.server,
            };
            let kept = sort(received, meta.stride, &source, &mut outlet);
            (meta.len, meta.stride, meta.addr) = (kept.length, kept.stride, kept.from);
            if arrival.is_peer || kept.relayed {
                // Ways change, and the connection stays.
                meta.dst_ip = None;
            }
            if kept.relayed {
                meta.ecn = None;
            }
        }
        outlet.finish();
    }

    /// Sorts what relays sent over TCP.
    fn sort_relayed(&mut self) {
        let relayed = std::mem::take(&mut *self.arrived.relayed());
        if relayed.is_empty() {
            return;
        }
        let mut outlet = Sorted {
            routes: &self.routes,
            server: &mut self.server,
            pending: &self.pending,
            waiting: &mut self.waiting,
            dropped: &self.sockets.dropped,
            datagrams: &mut self.arrived.datagrams(),
            socket: SocketId::MAIN,
            from: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
            to: None,
            frames: false,
        };
        for (server, mut datagram) in relayed {
            let source = Source {
                way: Way::Relayed { server },
                address: outlet.from,
                server: Some(server),
            };
            let stride = datagram.len();
            let kept = sort(&mut datagram, stride, &source, &mut outlet);
            let Kept { from, stride, .. } = kept;
            if kept.length > 0 {
                outlet.left(from, &datagram[..kept.length], stride);
            }
        }
        outlet.finish();
    }
}

impl Queue {
    fn push(&mut self, from: SocketAddr, datagram: &[u8], stride: usize) -> bool {
        if self.bytes + datagram.len() > WAITING_BYTES_MAX {
            return false;
        }
        self.bytes += datagram.len();
        match self.entries.back_mut() {
            // A receive takes 64 KiB at least.
            Some(last)
                if (last.from, last.stride) == (from, stride)
                    && last.bytes.len().is_multiple_of(stride.max(1))
                    && last.bytes.len() + datagram.len() < 1 << 15 =>
            {
                last.bytes.extend_from_slice(datagram);
            }
            _ => self.entries.push_back(Waiting {
                bytes: datagram.to_vec(),
                stride,
                from,
            }),
        }
        true
    }

    /// Moves what waits into the buffers of a receive; returns how many were filled.
    fn deliver(&mut self, buffers: &mut [IoSliceMut<'_>], metas: &mut [RecvMeta]) -> usize {
        let mut filled = 0;
        for (buffer, meta) in buffers.iter_mut().zip(metas) {
            let Some(waiting) = self.entries.pop_front() else {
                break;
            };
            self.bytes -= waiting.bytes.len();
            // Buffers have room for everything that one receive can bring.
            let length = waiting.bytes.len().min(buffer.len());
            buffer[..length].copy_from_slice(&waiting.bytes[..length]);
            *meta = RecvMeta::default();
            meta.addr = waiting.from;
            meta.len = length;
            meta.stride = waiting.stride;
            filled += 1;
        }
        filled
    }
}

/// Takes what one receive brings beside QUIC's datagrams.
struct Sorted<'a> {
    routes: &'a Routes,
    server: &'a mut stun::Server,
    pending: &'a Pending,
    waiting: &'a mut Queue,
    dropped: &'a Dropped,
    datagrams: &'a mut Option<Box<dyn Datagrams>>,
    socket: SocketId,
    from: SocketAddr,
    to: Option<IpAddr>,
    /// Frames were passed on.
    frames: bool,
}

impl Sorted<'_> {
    fn finish(self) {
        if let (true, Some(datagrams)) = (self.frames, self.datagrams) {
            datagrams.flush();
        }
    }
}

impl Outlet for Sorted<'_> {
    fn relayed_from(&mut self, server: HostId, session: SessionId) -> Option<SocketAddr> {
        self.routes.relayed_from(server, session)
    }

    fn frames(&mut self, way: Way, datagrams: &mut [u8], stride: usize) {
        match self.datagrams {
            Some(receiver) => {
                receiver.take(&way, datagrams, stride);
                self.frames = true;
            }
            None => {
                let count = datagrams.len().div_ceil(stride.max(1));
                self.dropped.count(DatagramKind::Frame, count);
            }
        }
    }

    fn stun(&mut self, datagram: &[u8]) {
        let taken = self.socket == SocketId::MAIN
            && (self.server.answer(datagram, self.from, self.to)
                || self.pending.answered(datagram, self.from, self.to));
        if !taken {
            self.dropped.count(DatagramKind::Stun, 1);
        }
    }

    fn dropped(&mut self, kind: DatagramKind, _datagram: &[u8]) {
        self.dropped.count(kind, 1);
    }

    fn left(&mut self, from: SocketAddr, datagram: &[u8], stride: usize) {
        if !self.waiting.push(from, datagram, stride) {
            self.dropped.count(DatagramKind::Quic, 1);
        }
    }
}

impl AsyncUdpSocket for Mux {
    fn create_sender(&self) -> Pin<Box<dyn UdpSender>> {
        Box::pin(Sender::new(self.sockets.clone(), self.routes.clone()))
    }

    fn poll_recv(
        &mut self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.sockets.receiver.register(context.waker());
        self.sort_relayed();
        let waited = self.waiting.deliver(buffers, metas);
        if waited > 0 {
            return Poll::Ready(Ok(waited));
        }
        let (socket, count) = ready!(self.poll_sockets(context, buffers, metas))?;
        self.sort(socket, &mut buffers[..count], &mut metas[..count]);
        // A count without any QUIC makes the library poll again, within its time limit.
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.sockets.main.io.local_addr()
    }

    fn max_receive_segments(&self) -> NonZeroUsize {
        self.sockets.main.state.gro_segments()
    }

    fn may_fragment(&self) -> bool {
        self.sockets.main.state.may_fragment()
    }
}
