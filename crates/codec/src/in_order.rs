//! Reorders the frames of a connection that continue each other.

use crate::FrameError;
use crate::decode::order_of;
use longhaul_protocol::limits::FRAMES_EARLY_BYTES_MAX;
use std::collections::{BTreeMap, VecDeque};

/// A reordering queue of received frames: frames that depend on earlier ones are held until those
/// have arrived, all others pass at once.
#[derive(Debug)]
pub struct InOrder<F> {
    next: u32,
    kept: BTreeMap<u32, F>,
    kept_bytes: usize,
    ready: VecDeque<F>,
}

impl<F> Default for InOrder<F> {
    fn default() -> Self {
        Self {
            next: 0,
            kept: BTreeMap::new(),
            kept_bytes: 0,
            ready: VecDeque::new(),
        }
    }
}

impl<F: AsRef<[u8]>> InOrder<F> {
    /// Takes a frame that has arrived.
    pub fn arrived(&mut self, frame: F) -> Result<(), FrameError> {
        let bytes = frame.as_ref().len();
        match order_of(frame.as_ref()) {
            // A frame whose turn is over is refused by the decoder.
            None => self.ready.push_back(frame),
            Some(order) if order <= self.next => {
                self.ready.push_back(frame);
                if order == self.next {
                    self.turn();
                }
            }
            Some(order) => {
                self.kept_bytes += bytes;
                let limit = FRAMES_EARLY_BYTES_MAX;
                if self.kept_bytes > limit {
                    let bytes = self.kept_bytes;
                    return Err(FrameError::TooEarly { bytes, limit });
                }
                if let Some(again) = self.kept.insert(order, frame) {
                    self.kept_bytes -= again.as_ref().len();
                    let expected = self.next;
                    return Err(FrameError::Order { order, expected });
                }
            }
        }
        Ok(())
    }

    /// Returns the next frame that can be decoded.
    pub fn next_ready(&mut self) -> Option<F> {
        self.ready.pop_front()
    }

    /// Releases the next frame in order, and those that waited for it.
    fn turn(&mut self) {
        self.next = self.next.wrapping_add(1);
        while let Some(frame) = self.kept.remove(&self.next) {
            self.kept_bytes -= frame.as_ref().len();
            self.ready.push_back(frame);
            self.next = self.next.wrapping_add(1);
        }
    }
}
