//! Shares one UDP socket between QUIC and other protocols, by the first byte of each datagram.

#[cfg(test)]
mod tests;

use crate::quic::{AsyncUdpSocket, RecvMeta, UdpSender};
use crate::stun::{self, Pending};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

/// What a datagram belongs to (RFC 7983, section 7, and RFC 9443, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatagramKind {
    /// STUN (RFC 8489).
    Stun,
    /// QUIC (RFC 9000). The QUIC bit is never greased, so that the ranges of other protocols stay
    /// free of it. TURN channels (64 to 79) count as QUIC, since the agent is no TURN client.
    Quic,
    /// Anything else: ZRTP, DTLS, RTP and what has no meaning.
    Other,
}

impl DatagramKind {
    /// Returns the kind of a datagram that starts with this byte.
    pub fn of(first: u8) -> Self {
        match first {
            0..=3 => Self::Stun,
            64..=127 | 192..=255 => Self::Quic,
            _ => Self::Other,
        }
    }
}

/// The numbers of datagrams that were received and dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedDatagrams {
    /// STUN messages that are malformed, not waited for, or too many.
    pub stun: u64,
    /// Datagrams of protocols that this host does not speak, and empty ones.
    pub other: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Dropped {
    stun: AtomicU64,
    other: AtomicU64,
}

impl Dropped {
    pub(crate) fn get(&self) -> DroppedDatagrams {
        DroppedDatagrams {
            stun: self.stun.load(Ordering::Relaxed),
            other: self.other.load(Ordering::Relaxed),
        }
    }
}

/// The socket below QUIC: keeps QUIC's datagrams where they are, and takes out the others.
#[derive(Debug)]
pub(crate) struct Mux {
    socket: Box<dyn AsyncUdpSocket>,
    server: stun::Server,
    pending: Arc<Pending>,
    dropped: Arc<Dropped>,
}

impl Mux {
    /// Returns the socket for QUIC, what asks others for this host's address over it, and what it
    /// drops.
    pub(crate) fn new(socket: Box<dyn AsyncUdpSocket>) -> (Self, stun::Client, Arc<Dropped>) {
        let pending = Arc::<Pending>::default();
        let client = stun::Client::new(socket.create_sender(), pending.clone());
        let dropped = Arc::<Dropped>::default();
        let mux = Self {
            server: stun::Server::new(socket.create_sender()),
            socket,
            pending,
            dropped: dropped.clone(),
        };
        (mux, client, dropped)
    }
}

impl AsyncUdpSocket for Mux {
    fn create_sender(&self) -> Pin<Box<dyn UdpSender>> {
        self.socket.create_sender()
    }

    fn poll_recv(
        &mut self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let Self {
            socket,
            server,
            pending,
            dropped,
        } = self;
        let count = ready!(socket.poll_recv(context, buffers, metas))?;
        for (buffer, meta) in buffers.iter_mut().zip(metas).take(count) {
            let received = &mut buffer[..meta.len];
            if received.is_empty() {
                dropped.other.fetch_add(1, Ordering::Relaxed);
            }
            let (from, to) = (meta.addr, meta.dst_ip);
            meta.len = keep_quic(received, meta.stride, |kind, datagram| {
                let (taken, counter) = match kind {
                    DatagramKind::Stun => {
                        let taken = server.answer(datagram, from, to)
                            || pending.answered(datagram, from, to);
                        (taken, &dropped.stun)
                    }
                    _ => (false, &dropped.other),
                };
                if !taken {
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // A count without any QUIC makes the library poll again, within its time limit.
        Poll::Ready(Ok(count))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_receive_segments(&self) -> NonZeroUsize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

/// Passes the datagrams that are not QUIC's to `other`, moves the others together, and returns
/// their length in bytes. The datagrams are `stride` bytes long each; the last one may be shorter.
/// They come from one sender (UDP receive offload), but each may be of another kind.
pub fn keep_quic(
    received: &mut [u8],
    stride: usize,
    mut other: impl FnMut(DatagramKind, &[u8]),
) -> usize {
    let length = received.len();
    let stride = if stride == 0 { length } else { stride };
    let (mut kept, mut start) = (0, 0);
    while start < length {
        let end = start.saturating_add(stride).min(length);
        match DatagramKind::of(received[start]) {
            DatagramKind::Quic => {
                // Nothing moves before the first datagram of another kind.
                if kept != start {
                    received.copy_within(start..end, kept);
                }
                kept += end - start;
            }
            kind => other(kind, &received[start..end]),
        }
        start = end;
    }
    kept
}
