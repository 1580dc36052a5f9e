//! Shares one UDP socket between QUIC and other protocols, by the first byte of each datagram, and
//! between peers, by the ways that their datagrams take.

mod receive;
mod send;
mod socket;
mod sort;
#[cfg(test)]
mod tests;

pub(crate) use receive::{Arrived, Mux};
pub(crate) use send::{BATCH_BYTES_MAX, Sender, add_headers, into_queue};
pub use socket::SOCKETS_MAX;
pub(crate) use socket::{Socket, Sockets};
pub use sort::{Kept, Outlet, Source, sort};

use crate::routes::Way;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a datagram belongs to (RFC 7983, section 7, and RFC 9443, section 3). Frames use a part of
/// the ranges of ZRTP and DTLS, which the agent does not speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DatagramKind {
    /// STUN (RFC 8489).
    Stun,
    /// The frame plane (`docs/frame-plane.md`).
    Frame,
    /// A datagram from a relay (`docs/rendezvous.md`, section 4.4).
    Relayed,
    /// QUIC (RFC 9000). The QUIC bit is never greased, so that the ranges of other protocols stay
    /// free of it. TURN channels (64 to 79) count as QUIC, since the agent is no TURN client.
    Quic,
    /// Anything else: RTP and what has no meaning.
    Other,
}

impl DatagramKind {
    /// Returns the kind of a datagram that starts with this byte.
    pub fn of(first: u8) -> Self {
        match first {
            0..=3 => Self::Stun,
            4..=59 => Self::Frame,
            longhaul_realm::relay::KIND => Self::Relayed,
            64..=127 | 192..=255 => Self::Quic,
            _ => Self::Other,
        }
    }
}

/// Receives the datagrams of the frame plane, within the task that receives for QUIC: what takes
/// long here delays all connections.
pub trait Datagrams: Send {
    /// Takes datagrams that came on one way: `stride` bytes each, the last one may be shorter. They
    /// are not authenticated. The bytes may be changed.
    fn take(&mut self, way: &Way, datagrams: &mut [u8], stride: usize);
    /// Follows the datagrams of one receive.
    fn flush(&mut self);
}

/// The numbers of datagrams that were dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DroppedDatagrams {
    /// STUN messages that are malformed, not waited for, or too many.
    pub stun: u64,
    /// Datagrams of protocols that this host does not speak, from addresses that cannot be, and
    /// empty ones.
    pub other: u64,
    /// Datagrams of the frame plane while there is none.
    pub frames: u64,
    /// Relayed datagrams that are malformed, or of no known session.
    pub relayed: u64,
    /// Datagrams for QUIC that had to wait, and were too many.
    pub waiting: u64,
    /// Batches of datagrams to a peer without a way.
    pub unroutable: u64,
    /// Batches of datagrams that the system or a relay's connection did not take.
    pub unsent: u64,
    /// How often the kernel refused to segment a batch, which was then sent one by one.
    pub segmentation_refused: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Dropped {
    stun: AtomicU64,
    other: AtomicU64,
    frames: AtomicU64,
    relayed: AtomicU64,
    waiting: AtomicU64,
    unroutable: AtomicU64,
    unsent: AtomicU64,
    segmentation_refused: AtomicU64,
}

impl Dropped {
    pub(crate) fn get(&self) -> DroppedDatagrams {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DroppedDatagrams {
            stun: get(&self.stun),
            other: get(&self.other),
            frames: get(&self.frames),
            relayed: get(&self.relayed),
            waiting: get(&self.waiting),
            unroutable: get(&self.unroutable),
            unsent: get(&self.unsent),
            segmentation_refused: get(&self.segmentation_refused),
        }
    }

    /// Counts what was received and nobody takes.
    fn count(&self, kind: DatagramKind, datagrams: usize) {
        let counter = match kind {
            DatagramKind::Stun => &self.stun,
            DatagramKind::Frame => &self.frames,
            DatagramKind::Relayed => &self.relayed,
            DatagramKind::Quic => &self.waiting,
            DatagramKind::Other => &self.other,
        };
        counter.fetch_add(datagrams as u64, Ordering::Relaxed);
    }

    pub(crate) fn count_unroutable(&self, count: u64) {
        self.unroutable.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn count_unsent(&self, count: u64) {
        self.unsent.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn count_segmentation_refused(&self) {
        self.segmentation_refused.fetch_add(1, Ordering::Relaxed);
    }
}
