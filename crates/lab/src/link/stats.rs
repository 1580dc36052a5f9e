//! Defines the counters of a link: frames and bytes carried and dropped, and the emulator's
//! lateness.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Both directions' counters since the link was created.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct LinkStats {
    /// From the first host to the second.
    pub forth: DirectionStats,
    /// From the second host to the first.
    pub back: DirectionStats,
}

/// One direction's counters since the link was created; bytes are those of Ethernet frames.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DirectionStats {
    /// Frames that entered the link.
    pub offered_frames: u64,
    /// Bytes that entered the link.
    pub offered_bytes: u64,
    /// Frames that arrived at the other end.
    pub carried_frames: u64,
    /// Bytes that arrived at the other end.
    pub carried_bytes: u64,
    /// Frames lost to a cut.
    pub dropped_cut: u64,
    /// Frames lost at random, as configured.
    pub dropped_loss: u64,
    /// Frames that found the queue full.
    pub dropped_queue: u64,
    /// Frames that the other end's interface did not take.
    pub refused: u64,
    /// The lateness of frames' arrivals against the computed times.
    pub lateness: Lateness,
}

/// The emulator's lateness: a histogram with a bucket per power of two of microseconds.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Lateness {
    buckets: [u64; 24],
    max_us: u64,
}

impl Lateness {
    /// Counts one frame.
    pub fn add(&mut self, late: Duration) {
        let us = u64::try_from(late.as_micros()).unwrap_or(u64::MAX);
        let bucket = (64 - us.leading_zeros() as usize).min(self.buckets.len() - 1);
        self.buckets[bucket] += 1;
        self.max_us = self.max_us.max(us);
    }

    /// Returns an upper bound of the given percentile, in microseconds; `None` when nothing was
    /// counted.
    pub fn percentile_us(&self, percent: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().sum();
        let wanted = (total as f64 * percent / 100.0).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted && seen > 0 {
                return Some(((1_u64 << bucket) - 1).min(self.max_us));
            }
        }
        None
    }

    /// Returns the maximum lateness, in microseconds.
    pub fn max_us(&self) -> u64 {
        self.max_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_bound_what_was_counted() {
        let mut lateness = Lateness::default();
        assert_eq!(lateness.percentile_us(50.0), None);
        for us in 0..1000 {
            lateness.add(Duration::from_micros(us));
        }
        assert_eq!(lateness.percentile_us(50.0), Some(511));
        assert_eq!(lateness.percentile_us(99.0), Some(999));
        assert_eq!(lateness.max_us(), 999);
        lateness.add(Duration::from_secs(3600));
        assert_eq!(lateness.max_us(), 3_600_000_000);
        assert_eq!(lateness.percentile_us(100.0), Some((1 << 23) - 1));
    }
}
