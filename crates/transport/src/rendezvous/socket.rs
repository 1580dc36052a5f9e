//! Owns the UDP socket of a rendezvous server below QUIC: takes out relayed datagrams and STUN.

use crate::endpoint::canonical;
use crate::mux::DatagramKind;
use crate::quic::{AsyncUdpSocket, RecvMeta, Transmit, UdpSender};
use crate::stun;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroUsize;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};

/// The first byte of relayed datagrams (`docs/rendezvous.md`, 4.4).
const RELAYED: u8 = 60;

/// Sources whose addresses here are remembered. Beyond that all are learned again.
const SOURCES_MAX: usize = 1 << 16;

/// By which of this server's addresses others reach it. What is relayed to them must come from
/// there: their NATs and firewalls know no other. All clones are one.
#[derive(Debug, Clone, Default)]
pub(super) struct ReachedAt(Arc<Mutex<HashMap<SocketAddr, IpAddr>>>);

impl ReachedAt {
    fn note(&self, from: SocketAddr, to: Option<IpAddr>) {
        let Some(to) = to else {
            return;
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= SOURCES_MAX && !known.contains_key(&from) {
            known.clear();
        }
        known.insert(from, to);
    }

    fn of(&self, to: SocketAddr) -> Option<IpAddr> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&to).copied()
    }
}

/// Judges relayed datagrams.
pub trait Relay: fmt::Debug + Send + Sync + 'static {
    /// Judges datagrams that one address sent, which arrived together: for each, in order, where
    /// it goes unchanged, or `None` to drop it.
    fn judge(
        &self,
        from: SocketAddr,
        datagrams: &mut dyn Iterator<Item = &[u8]>,
        towards: &mut Vec<Option<SocketAddr>>,
    );
}

/// Sends relayed datagrams that did not arrive on the socket.
#[derive(Debug)]
pub struct RelaySender {
    sender: Mutex<Pin<Box<dyn UdpSender>>>,
    reached_at: ReachedAt,
    ipv6: bool,
    lost: AtomicU64,
}

impl RelaySender {
    pub(super) fn new(sender: Pin<Box<dyn UdpSender>>, reached_at: ReachedAt, ipv6: bool) -> Self {
        Self {
            sender: Mutex::new(sender),
            reached_at,
            ipv6,
            lost: AtomicU64::new(0),
        }
    }

    /// Sends a datagram, or drops it if the socket is busy.
    pub fn send(&self, to: SocketAddr, datagram: &[u8]) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        let source = self.reached_at.of(to);
        if !send(&mut sender, (mapped(to, self.ipv6), source), datagram, None) {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how many datagrams the socket did not take.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }
}

/// The socket below QUIC.
#[derive(Debug)]
pub(super) struct RelaySocket {
    socket: Box<dyn AsyncUdpSocket>,
    sender: Pin<Box<dyn UdpSender>>,
    relay: Arc<dyn Relay>,
    stun: stun::Server,
    reached_at: ReachedAt,
    ipv6: bool,
    towards: Vec<Option<SocketAddr>>,
}

impl RelaySocket {
    pub(super) fn over(
        socket: Box<dyn AsyncUdpSocket>,
        relay: Arc<dyn Relay>,
        reached_at: ReachedAt,
        ipv6: bool,
    ) -> Self {
        Self {
            sender: socket.create_sender(),
            stun: stun::Server::new(socket.create_sender()),
            socket,
            relay,
            reached_at,
            ipv6,
            towards: Vec::new(),
        }
    }

    /// Forwards the relayed datagrams of a buffer. Those that follow each other to one place leave
    /// together, as they came (UDP GSO).
    fn forward(&mut self, received: &[u8], stride: usize, from: SocketAddr) {
        let relayed = |datagram: &&[u8]| datagram.first() == Some(&RELAYED);
        let mut towards = std::mem::take(&mut self.towards);
        towards.clear();
        let mut datagrams = received.chunks(stride).filter(relayed);
        let from = canonical(from);
        self.relay.judge(from, &mut datagrams, &mut towards);
        let most = self.sender.max_transmit_segments().get();
        let mut judged = towards.iter();
        // Where the current run goes, and its first byte and number of datagrams.
        let mut run: Option<(SocketAddr, usize, usize)> = None;
        for (index, datagram) in received.chunks(stride).enumerate() {
            let start = index * stride;
            let next = match relayed(&datagram) {
                true => judged.next().copied().flatten(),
                false => None,
            };
            run = match (run, next) {
                (Some((place, first, count)), Some(next)) if place == next && count < most => {
                    Some((place, first, count + 1))
                }
                (before, next) => {
                    if let Some((place, first, _)) = before {
                        self.transmit(place, &received[first..start], stride);
                    }
                    next.map(|next| (next, start, 1))
                }
            };
        }
        if let Some((place, first, _)) = run {
            self.transmit(place, &received[first..], stride);
        }
        self.towards = towards;
    }

    /// Answers STUN, drops everything else that is not QUIC's, and moves QUIC's datagrams together.
    /// Returns their length in bytes.
    fn keep_quic(
        &mut self,
        received: &mut [u8],
        stride: usize,
        (from, to): (SocketAddr, Option<IpAddr>),
    ) -> usize {
        let (mut kept, mut start) = (0, 0);
        while start < received.len() {
            let end = start.saturating_add(stride).min(received.len());
            match DatagramKind::of(received[start]) {
                DatagramKind::Quic => {
                    received.copy_within(start..end, kept);
                    kept += end - start;
                }
                // What is no request, or over the limits, is dropped.
                DatagramKind::Stun => {
                    self.stun.answer(&received[start..end], from, to);
                }
                _ => {}
            }
            start = end;
        }
        kept
    }

    fn transmit(&mut self, to: SocketAddr, bytes: &[u8], stride: usize) {
        let source = self.reached_at.of(to);
        let segment = (bytes.len() > stride).then_some(stride);
        // With a full socket buffer they are lost, as in a router.
        send(
            &mut self.sender,
            (mapped(to, self.ipv6), source),
            bytes,
            segment,
        );
    }
}

fn mapped(to: SocketAddr, ipv6: bool) -> SocketAddr {
    match to {
        SocketAddr::V4(v4) if ipv6 => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        to => to,
    }
}

/// Sends at once or not at all.
fn send(
    sender: &mut Pin<Box<dyn UdpSender>>,
    (destination, src_ip): (SocketAddr, Option<IpAddr>),
    contents: &[u8],
    segment_size: Option<usize>,
) -> bool {
    // An address of the other family is none to send from.
    let src_ip =
        src_ip.filter(|ip| ip.to_canonical().is_ipv4() == canonical(destination).is_ipv4());
    let transmit = Transmit {
        destination,
        ecn: None,
        contents,
        segment_size,
        src_ip,
    };
    let mut context = Context::from_waker(Waker::noop());
    let sent = sender.as_mut().poll_send(&transmit, &mut context);
    matches!(sent, Poll::Ready(Ok(())))
}

impl AsyncUdpSocket for RelaySocket {
    fn create_sender(&self) -> Pin<Box<dyn UdpSender>> {
        self.socket.create_sender()
    }

    fn poll_recv(
        &mut self,
        context: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        metas: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let count = ready!(self.socket.poll_recv(context, buffers, metas))?;
        for (buffer, meta) in buffers.iter_mut().zip(metas).take(count) {
            let received = &mut buffer[..meta.len];
            let stride = match meta.stride {
                0 => meta.len.max(1),
                stride => stride,
            };
            let (from, to) = (meta.addr, meta.dst_ip);
            self.reached_at.note(canonical(from), to);
            if received
                .chunks(stride)
                .any(|datagram| datagram[0] == RELAYED)
            {
                self.forward(received, stride, from);
            }
            meta.len = self.keep_quic(received, stride, (from, to));
        }
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
