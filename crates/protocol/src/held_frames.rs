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

    /// Adds frames, as many as fit into the limits of one message.
    pub fn append(&mut self, more: &Self) {
        let mut left_bytes = TOTAL_BYTES_MAX.saturating_sub(self.bytes());
        for frame in &more.frames {
            if self.frames.len() >= FRAMES_MAX || frame.bytes.len() > left_bytes {
                return;
            }
            left_bytes -= frame.bytes.len();
            self.frames.push(frame.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_that_wait_keep_to_the_limits_of_one_message() {
        let frames = |count, bytes| HeldFrames {
            frames: vec![
                HeldFrame {
                    card: 0,
                    header: [0; HEADER_BYTES],
                    bytes: vec![0; bytes],
                };
                count
            ],
        };
        // Frames without bytes count too.
        let mut waiting = HeldFrames::default();
        for _ in 0..3 {
            waiting.append(&frames(FRAMES_MAX - 1, 0));
        }
        assert_eq!(waiting.frames.len(), FRAMES_MAX);
        let mut waiting = HeldFrames::default();
        waiting.append(&frames(FRAMES_MAX, FRAME_BYTES_MAX));
        assert_eq!(waiting.frames.len(), TOTAL_BYTES_MAX / FRAME_BYTES_MAX);
    }
}
