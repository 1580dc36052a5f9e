//! What carries the frames of a guest one way, and their acknowledgements the other way.
//!
//! The sender and the receiver know a carrier only by its two halves, [`FrameSink`] and
//! [`FrameSource`]. A carrier belongs to one epoch of an attempt. It holds these promises:
//!
//! - A frame arrives whole and once, or not at all. Frames may overtake each other.
//! - Acknowledgements arrive in their order.
//! - It holds only a few frames that have not left yet, so that their content is fresh when they
//!   leave: the sender waits for room before it reads the content ([`FrameSink::reserve`]).
//! - From the first lost frame or acknowledgement on, it is lost: both halves return
//!   [`CarrierError::Lost`]. The blocks of frames without an acknowledgement are sent again over
//!   the next carrier.
//!
//! | carrier | halves |
//! |---|---|
//! | a bulk connection of QUIC (`carrier::quic`) | `BulkSender`, `BulkReceiver` |
//! | a channel within the process, in tests (`carrier::memory`) | `MemorySink`, `MemorySource` |

#[cfg(test)]
pub(crate) mod memory;
mod quic;

use bytes::Bytes;
use longhaul_transport::PathTraffic;
use std::error::Error;
use std::pin::Pin;
use std::time::Duration;

/// Why a carrier does not carry something.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CarrierError {
    /// It is lost, and carries nothing more.
    #[error(transparent)]
    Lost(Box<dyn Error + Send + Sync>),
    /// The frame or acknowledgement is longer than it can be.
    #[error("{bytes} bytes are over the limit of {limit} bytes")]
    TooLarge {
        /// The length, in bytes.
        bytes: u64,
        /// The limit, in bytes.
        limit: u64,
    },
}

/// Something that a carrier does in its own time.
pub(crate) type Carrying<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The half of a carrier that takes frames, and returns their acknowledgements. Its methods may be
/// called from several tasks. If it is dropped, the other half gets what was sent, and then the end
/// of the frames.
pub(crate) trait FrameSink: Send + Sync + 'static {
    /// Waits for room for one frame. The future may be dropped at any time.
    fn reserve(&self) -> Carrying<'_, Result<Box<dyn Room>, CarrierError>>;

    /// Returns the number of frames that have room reserved, or have not left yet.
    fn frames_in_hand(&self) -> usize;

    /// Returns the next acknowledgement. The future may be dropped at any time.
    fn acknowledgement(&self) -> Carrying<'_, Result<Bytes, CarrierError>>;

    /// Limits the rate, in bits per second, from now on; `None` for no limit.
    fn set_bandwidth(&self, limit_bps: Option<u64>);

    /// Returns what is known of its rate and of its traffic.
    fn stats(&self) -> CarrierStats;

    /// Returns what each network path has carried, if it uses any.
    fn traffic(&self) -> Vec<PathTraffic> {
        Vec::new()
    }
}

/// Room for one frame, which is free again if this is dropped.
pub(crate) trait Room: Send {
    /// Gives the frame to the carrier, which sends an urgent one ahead of those that have not left
    /// yet. Does not wait.
    fn send(self: Box<Self>, frame: Bytes, urgent: bool) -> Result<(), CarrierError>;
}

/// The half of a carrier that returns frames, and takes their acknowledgements. If it is dropped,
/// the carrier is lost.
pub(crate) trait FrameSource: Send + Sync {
    /// Returns the next frame; `None` if the sender has sent its last one, and all were returned.
    /// The future may be dropped at any time.
    fn recv(&self) -> impl Future<Output = Result<Option<Bytes>, CarrierError>> + Send;

    /// Sends an acknowledgement back.
    fn acknowledge(&self, message: &[u8]) -> impl Future<Output = Result<(), CarrierError>> + Send;

    /// Waits until it is lost, and returns why.
    fn lost(&self) -> impl Future<Output = CarrierError> + Send;
}

/// The rate of a carrier, and its traffic so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct CarrierStats {
    /// The time from a frame to its acknowledgement, without any queue.
    pub(crate) rtt: Duration,
    /// The rate that it could carry, in bits per second. None if this is unknown.
    pub(crate) path_rate_bps: Option<f64>,
    /// The bytes that may be under way at that rate.
    pub(crate) window_bytes: u64,
    /// The rate at which it has carried data lately, in bits per second.
    pub(crate) delivery_rate_bps: u64,
    /// The bytes sent, with all overhead.
    pub(crate) sent_bytes: u64,
    /// The bytes received, with all overhead.
    pub(crate) received_bytes: u64,
}
