//! Seals and opens datagrams: their header, their keys, and what protects them from being sent
//! twice.
//!
//! ```text
//! byte  0      1      2     3     4..8    8..16    16..24   24..         last 16
//!       kind   epoch  seen  0     key id  counter  network  payload      tag
//!       |------------- authenticated ------------------|    encrypted
//! ```
//! Numbers are little-endian. `docs/frame-plane.md`, section 2, is the normative description.

mod keys;
mod opener;
mod sealer;
mod window;

pub use keys::{EXPORTED_BYTES, EXPORTER_LABEL, Side, Suite, TAG_BYTES};
pub use opener::{OpenCounters, OpenError, Opened, Opener};
pub use sealer::{SealError, Sealer};
pub use window::WINDOW_COUNTERS;

use crate::address::NetworkId;
use std::time::Duration;

/// Bytes of a datagram's header.
pub const HEADER_BYTES: usize = 24;
/// Bytes of a datagram without its payload.
pub const OVERHEAD_BYTES: usize = HEADER_BYTES + TAG_BYTES;

/// What a datagram carries. The first byte of a datagram, between those of STUN (0 to 3) and QUIC
/// (64 and above, with 128 to 191 unused), says which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A frame, or a segment of one, behind its virtio header.
    Frame = 4,
    /// A part of a frame that is longer than a datagram.
    Fragment = 5,
    /// Messages between the hosts; none is a keepalive.
    Control = 6,
    /// A probe of a path. What it carries is not looked at here.
    PathProbe = 7,
    /// A probe of the path's MTU.
    MtuProbe = 8,
    /// A segment of TCP, without the bytes of its headers that the receiver can compute.
    ShortSegment = 9,
}

impl Kind {
    /// Returns the kind that a first byte says.
    #[inline]
    pub fn of(first: u8) -> Option<Self> {
        Some(match first {
            4 => Self::Frame,
            5 => Self::Fragment,
            6 => Self::Control,
            7 => Self::PathProbe,
            8 => Self::MtuProbe,
            9 => Self::ShortSegment,
            _ => return None,
        })
    }
}

/// Returns the id of the keys of a datagram, by which its receiver finds the peer. `None` if it is
/// no datagram of the frame plane.
pub fn key_id(datagram: &[u8]) -> Option<u32> {
    if datagram.len() < OVERHEAD_BYTES {
        return None;
    }
    Header::parse(datagram.first_chunk()?).map(|header| header.key_id)
}

/// The header of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    kind: Kind,
    epoch: u8,
    seen: u8,
    key_id: u32,
    counter: u64,
    network: NetworkId,
}

impl Header {
    #[inline]
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..3].copy_from_slice(&[self.kind as u8, self.epoch, self.seen]);
        bytes[4..8].copy_from_slice(&self.key_id.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.counter.to_le_bytes());
        bytes[16..].copy_from_slice(&self.network.0.to_le_bytes());
        bytes
    }

    #[inline]
    fn parse(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let [kind, epoch, seen, reserved, i0, i1, i2, i3, numbers @ ..] = *bytes;
        let ([counter, network], []) = numbers.as_chunks::<8>() else {
            return None;
        };
        let kind = Kind::of(kind).filter(|_| reserved == 0)?;
        Some(Self {
            kind,
            epoch,
            seen,
            key_id: u32::from_le_bytes([i0, i1, i2, i3]),
            counter: u64::from_le_bytes(*counter),
            network: NetworkId(u64::from_le_bytes(*network)),
        })
    }
}

/// When keys change. Both hosts may use other values; only `packets_max` is a limit of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyLimits {
    /// Datagrams after which the sender goes on to the next epoch.
    pub epoch_packets: u64,
    /// The time after which it does.
    pub epoch_time: Duration,
    /// Most datagrams of one epoch. A sender whose peer does not confirm the epoch stops there.
    pub packets_max: u64,
    /// How long a receiver accepts datagrams of the last epoch after the first of the next one.
    pub grace: Duration,
    /// Most datagrams under one receiving key that are not authentic (RFC 9001, section 6.6).
    pub forged_max: u64,
}

impl Default for KeyLimits {
    fn default() -> Self {
        Self {
            epoch_packets: 1 << 23,
            epoch_time: Duration::from_secs(120),
            packets_max: 1 << 27,
            grace: Duration::from_secs(10),
            forged_max: 1 << 36,
        }
    }
}

/// Returns the two halves of an end of a connection: what seals, and what opens. `exported` is the
/// secret under [`EXPORTER_LABEL`], `side` this end. Every connection has another secret; two
/// halves of the same secret and side must not exist at once, or after each other.
pub fn halves(
    now: Duration,
    exported: &[u8; EXPORTED_BYTES],
    side: Side,
    suite: Suite,
    limits: KeyLimits,
) -> Result<(Sealer, Opener), SealError> {
    let sealer = Sealer::new(now, exported, side, suite, limits)?;
    let opener = Opener::new(exported, side.other(), suite, limits)?;
    Ok((sealer, opener))
}

#[cfg(test)]
mod tests;
