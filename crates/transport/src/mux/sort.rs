//! Sorts the datagrams of one receive by their first byte, and takes relay headers off.

use super::DatagramKind;
use crate::routes::Way;
use longhaul_paths::SocketId;
use longhaul_protocol::HostId;
use longhaul_realm::protocol::SessionId;
use longhaul_realm::relay;
use std::net::SocketAddr;

/// Where a buffer came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The socket and the address, or the relay if it came over TCP.
    pub way: Way,
    /// The address as QUIC gets it.
    pub address: SocketAddr,
    /// The relay that is at this address.
    pub server: Option<HostId>,
}

impl Source {
    /// A datagram from an address that is nobody's.
    pub fn plain(address: SocketAddr) -> Self {
        let way = Way::Direct {
            socket: SocketId::MAIN,
            address,
        };
        Self {
            way,
            address,
            server: None,
        }
    }
}

/// Takes what is not kept for QUIC.
pub trait Outlet {
    /// Returns the address by which QUIC knows the peer of a relay's session.
    fn relayed_from(&mut self, server: HostId, session: SessionId) -> Option<SocketAddr>;
    /// Datagrams of the frame plane, `stride` bytes each but the last one.
    fn frames(&mut self, way: Way, datagrams: &mut [u8], stride: usize);
    /// A STUN message.
    fn stun(&mut self, datagram: &[u8]);
    /// A datagram that nobody takes.
    fn dropped(&mut self, kind: DatagramKind, datagram: &[u8]);
    /// A datagram for QUIC of another source than the one of the buffer.
    fn left(&mut self, from: SocketAddr, datagram: &[u8], stride: usize);
}

/// What QUIC gets of a buffer: its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// The length, in bytes.
    pub length: usize,
    /// The length of each datagram but the last, in bytes.
    pub stride: usize,
    /// The source.
    pub from: SocketAddr,
    /// Whether they were relayed.
    pub relayed: bool,
}

/// Sorts a buffer. The datagrams are `stride` bytes long each; the last one may be shorter. They
/// come from one sender (UDP receive offload), but each may be of another kind, and relayed ones
/// of another peer. Datagrams for QUIC of the first source are moved to the beginning.
pub fn sort(received: &mut [u8], stride: usize, source: &Source, outlet: &mut impl Outlet) -> Kept {
    let stride = if stride == 0 { received.len() } else { stride };
    let kept = Kept {
        length: 0,
        stride,
        from: source.address,
        relayed: false,
    };
    let mut sorter = Sorter {
        received,
        stride,
        source,
        outlet,
        kept,
    };
    let mut start = 0;
    while start < sorter.received.len() {
        start = sorter.step(start);
    }
    sorter.kept
}

struct Sorter<'a, O> {
    received: &'a mut [u8],
    stride: usize,
    source: &'a Source,
    outlet: &'a mut O,
    kept: Kept,
}

/// The payload of a relayed datagram.
struct Payload {
    server: HostId,
    kind: DatagramKind,
    from: SocketAddr,
}

impl<O: Outlet> Sorter<'_, O> {
    fn end(&self, start: usize) -> usize {
        start.saturating_add(self.stride).min(self.received.len())
    }

    /// Sorts the datagram, or the run of datagrams, at `start`. Returns where the next one begins.
    fn step(&mut self, start: usize) -> usize {
        let end = self.end(start);
        let kind = DatagramKind::of(self.received[start]);
        let is_direct = self.source.way.is_direct();
        match kind {
            DatagramKind::Quic if is_direct => {
                self.keep(self.source.address, start, end, self.stride, false);
            }
            DatagramKind::Frame if is_direct => return self.frames(start),
            DatagramKind::Stun if is_direct => self.outlet.stun(&self.received[start..end]),
            DatagramKind::Relayed => match self.payload(start) {
                Some(payload) => return self.relayed(start, &payload),
                None => self.outlet.dropped(kind, &self.received[start..end]),
            },
            kind => self.outlet.dropped(kind, &self.received[start..end]),
        }
        end
    }

    /// Passes a run of frames on.
    fn frames(&mut self, start: usize) -> usize {
        let mut end = self.end(start);
        while end < self.received.len()
            && DatagramKind::of(self.received[end]) == DatagramKind::Frame
        {
            end = self.end(end);
        }
        let run = &mut self.received[start..end];
        self.outlet.frames(self.source.way, run, self.stride);
        end
    }

    /// Returns what a relayed datagram carries, if a session of its relay is known.
    fn payload(&mut self, start: usize) -> Option<Payload> {
        let server = self.source.server?;
        let datagram = &self.received[start..self.end(start)];
        let (session, payload) = relay::parse(datagram).ok()?;
        let kind = DatagramKind::of(*payload.first()?);
        let from = self.outlet.relayed_from(server, session)?;
        matches!(kind, DatagramKind::Quic | DatagramKind::Frame).then_some(Payload {
            server,
            kind,
            from,
        })
    }

    /// Takes the header off a relayed datagram, or off a run of relayed frames.
    fn relayed(&mut self, start: usize, payload: &Payload) -> usize {
        let mut end = self.end(start);
        let stride = self.stride.saturating_sub(relay::HEADER_BYTES);
        if payload.kind == DatagramKind::Quic {
            self.keep(payload.from, start + relay::HEADER_BYTES, end, stride, true);
            return end;
        }
        self.received
            .copy_within(start + relay::HEADER_BYTES..end, start);
        let mut moved = end - relay::HEADER_BYTES;
        while end < self.received.len()
            && DatagramKind::of(self.received[end]) == DatagramKind::Relayed
            && self
                .payload(end)
                .is_some_and(|next| next.kind == DatagramKind::Frame)
        {
            let next = self.end(end);
            let bytes = end + relay::HEADER_BYTES..next;
            let length = bytes.len();
            self.received.copy_within(bytes, moved);
            moved += length;
            end = next;
        }
        let server = payload.server;
        let run = &mut self.received[start..moved];
        self.outlet.frames(Way::Relayed { server }, run, stride);
        end
    }

    /// Keeps a datagram for QUIC if it continues what is kept, else passes it on.
    fn keep(&mut self, from: SocketAddr, start: usize, end: usize, stride: usize, relayed: bool) {
        let kept = &mut self.kept;
        if kept.length == 0 {
            (kept.from, kept.stride, kept.relayed) = (from, stride, relayed);
        } else if (kept.from, kept.stride, kept.relayed) != (from, stride, relayed) {
            return self.outlet.left(from, &self.received[start..end], stride);
        }
        // Nothing moves before the first datagram that is not kept.
        if kept.length != start {
            self.received.copy_within(start..end, kept.length);
        }
        kept.length += end - start;
    }
}
