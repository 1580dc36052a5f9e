//! Owns the UDP sockets of an endpoint: the main one, and those of searches.

use super::Dropped;
use crate::quic::{RecvMeta, Transmit, UdpSocketState};
use futures_util::task::AtomicWaker;
use longhaul_paths::SocketId;
use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll, ready};
use tokio::io::Interest;

/// The maximum number of sockets beside the main one.
pub const SOCKETS_MAX: usize = 512;

/// One UDP socket, for any number of senders and one receiver. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Socket {
    pub(crate) io: Arc<tokio::net::UdpSocket>,
    pub(crate) state: Arc<UdpSocketState>,
    ipv6: bool,
    offload: bool,
}

impl Socket {
    /// `offload`: whether many datagrams may be passed to the kernel at once.
    pub(crate) fn new(socket: std::net::UdpSocket, offload: bool) -> io::Result<Self> {
        let ipv6 = socket.local_addr()?.is_ipv6();
        let state = UdpSocketState::new((&socket).into())?;
        socket.set_nonblocking(true)?;
        Ok(Self {
            state: Arc::new(state),
            io: Arc::new(tokio::net::UdpSocket::from_std(socket)?),
            ipv6,
            offload,
        })
    }

    /// Returns an IPv4 address in the form for a dual-stack socket.
    pub(crate) fn mapped(&self, address: SocketAddr) -> SocketAddr {
        match address {
            SocketAddr::V4(v4) if self.ipv6 => {
                SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port())
            }
            address => address,
        }
    }

    /// Returns the number of datagrams that may be passed to the kernel at once.
    pub(crate) fn segments_max(&self) -> usize {
        match self.offload {
            true => self.state.max_gso_segments().get(),
            false => 1,
        }
    }

    pub(crate) fn poll_recv(
        &self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(context))?;
            let received = self.io.try_io(Interest::READABLE, || {
                self.state.recv((&self.io).into(), buffers, metas)
            });
            match received {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return Poll::Ready(received),
            }
        }
    }

    /// Sends if the socket has room, else fails with `WouldBlock`.
    pub(crate) fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.io
            .try_io(Interest::WRITABLE, || self.send_now(transmit))
    }

    /// As [`Self::try_send`], from any thread.
    pub(crate) fn send_now(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.state.try_send((&self.io).into(), transmit)
    }
}

/// The sockets of an endpoint.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) main: Socket,
    pub(crate) dropped: Arc<Dropped>,
    others: RwLock<HashMap<SocketId, Socket>>,
    last_id: AtomicU64,
    /// Changes with `others`.
    changes: AtomicU64,
    /// Wakes the task that receives.
    pub(crate) receiver: AtomicWaker,
}

impl Sockets {
    pub(crate) fn new(main: Socket, dropped: Arc<Dropped>) -> Self {
        Self {
            main,
            dropped,
            others: RwLock::default(),
            last_id: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            receiver: AtomicWaker::new(),
        }
    }

    pub(crate) fn get(&self, id: SocketId) -> Option<Socket> {
        if id == SocketId::MAIN {
            return Some(self.main.clone());
        }
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        others.get(&id).cloned()
    }

    /// Adds a socket. Its number is never used again.
    pub(crate) fn open(&self, socket: std::net::UdpSocket) -> io::Result<SocketId> {
        let socket = Socket::new(socket, self.main.offload)?;
        let mut others = self.others.write().unwrap_or_else(PoisonError::into_inner);
        if others.len() >= SOCKETS_MAX {
            let text = format!("there are {SOCKETS_MAX} sockets for searches already");
            return Err(io::Error::other(text));
        }
        let number = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let id = u32::try_from(number).map_err(|_| io::Error::other("no number is left"))?;
        others.insert(SocketId(id), socket);
        self.changed();
        Ok(SocketId(id))
    }

    /// Closes a socket; returns whether it was open.
    pub(crate) fn close(&self, id: SocketId) -> bool {
        let mut others = self.others.write().unwrap_or_else(PoisonError::into_inner);
        let was_open = others.remove(&id).is_some();
        self.changed();
        was_open
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        self.receiver.wake();
    }

    /// Renews the list of a receiver if the sockets have changed.
    pub(crate) fn renew(&self, seen: &mut u64, list: &mut Vec<(SocketId, Socket)>) {
        let changes = self.changes.load(Ordering::Acquire);
        if *seen == changes {
            return;
        }
        *seen = changes;
        list.truncate(1);
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        list.extend(others.iter().map(|(id, socket)| (*id, socket.clone())));
    }
}
