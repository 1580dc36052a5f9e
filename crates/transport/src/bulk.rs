//! Implements bulk connections: whole frames, striped over many streams of a separate QUIC
//! connection.

mod offer;
mod receiver;
mod sender;
mod wire;

pub(crate) use offer::BulkOffers;
pub use offer::{BulkOffer, BulkToken};
pub use receiver::BulkReceiver;
pub(crate) use receiver::read_opening;
pub use sender::{BulkPermit, BulkSender, BulkStats};
pub(crate) use sender::{connect, open, streams_over};
pub(crate) use wire::OPENING_ANSWER;
pub use wire::{BulkOpening, BulkPurpose, BulkWireError, StreamHeader, StreamKind};

use longhaul_protocol::{AttemptId, Epoch};

/// The maximum number of streams of frames on one bulk connection.
pub const BULK_STREAMS_MAX: u8 = 64;
/// The maximum size of an acknowledgement message, in bytes.
pub const ACKNOWLEDGEMENT_BYTES_MAX: usize = 64 << 10;
/// How far a stream may be ahead of its reader, in bytes.
pub(crate) const STREAM_WINDOW_BYTES: u32 = 2_000_000;
/// How far all streams of a bulk connection together may be ahead of their readers, in bytes.
pub(crate) const BULK_WINDOW_BYTES: u32 = 32_000_000;

/// The attempt and epoch of a bulk connection. The header of every stream repeats them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BulkBinding {
    /// The attempt.
    pub attempt: AttemptId,
    /// The connection of that attempt.
    pub epoch: Epoch,
}

/// The sender's configuration of a bulk connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BulkConfig {
    /// The number of streams over which frames are striped (1 to [`BULK_STREAMS_MAX`]).
    pub streams: u8,
    /// Limit in bits per second on the wire, headers included; `None` for no limit.
    pub bandwidth_bps: Option<u64>,
}

impl Default for BulkConfig {
    fn default() -> Self {
        Self {
            streams: 16,
            bandwidth_bps: None,
        }
    }
}
