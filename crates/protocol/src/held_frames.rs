//! Frames that come for a guest while it is stopped.

use serde::{Deserialize, Serialize};

/// Length of a frame's virtio header, in bytes.
pub const HEADER_BYTES: usize = 10;
/// Longest frame, in bytes: a super-frame with its link header.
pub const FRAME_BYTES_MAX: usize = 65_557;
/// Most frames in one message.
pub const FRAMES_MAX: usize = 1024;
/// Most bytes of the frames that are kept for one stopped guest, and of those in one message.
pub const TOTAL_BYTES_MAX: usize = 2 << 20;

/// Ethernet frames for a guest's cards, in the order of their arrival at each card.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldFrames {
    /// The frames.
    pub frames: Vec<HeldFrame>,
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldFrame {
    /// The number of the card in the guest's description.
    pub card: u16,
    /// `struct virtio_net_hdr` (Virtual I/O Device 1.2, section 5.1.6) without the number of
    /// buffers, little-endian.
    pub header: [u8; HEADER_BYTES],
    /// The frame, from its destination address on, without a check sequence.
    pub bytes: Vec<u8>,
}

impl HeldFrames {
    /// Returns the length of all frames, in bytes.
    pub fn bytes(&self) -> usize {
        self.frames.iter().map(|frame| frame.bytes.len()).sum()
    }
}
