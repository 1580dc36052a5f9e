//! The pages that a guest waits for while its memory follows, and how long it waited for others.

use hdrhistogram::Histogram;
use longhaul_protocol::message::Faults;
use longhaul_protocol::{BlockRange, RegionId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The longest wait that is counted as it is, in microseconds: an hour.
const WAIT_US_MAX: u64 = 3_600_000_000;
/// Significant decimal digits of the waits that are counted.
const WAIT_DIGITS: u8 = 2;
/// The waits that are counted apart are longer than these.
const LONG_WAITS: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_millis(1000),
];

/// A guest's waits for pages.
pub(crate) struct Waits {
    /// Blocks that the guest waits for, and since when.
    asked: BTreeMap<(RegionId, u64), Instant>,
    /// How long it has waited for others, in microseconds.
    times: Option<Histogram<u64>>,
    /// How many of them were longer than each of [`LONG_WAITS`].
    longer: [u64; 3],
}

impl Waits {
    pub(crate) fn new() -> Self {
        Self {
            asked: BTreeMap::new(),
            times: Histogram::new_with_max(WAIT_US_MAX, WAIT_DIGITS).ok(),
            longer: [0; 3],
        }
    }

    /// Records that the guest waits for blocks.
    pub(crate) fn asked(&mut self, region: RegionId, blocks: BlockRange) {
        let now = Instant::now();
        for block in blocks.blocks() {
            self.asked.entry((region, block)).or_insert(now);
        }
    }

    /// Records that blocks have come.
    pub(crate) fn came(&mut self, region: RegionId, blocks: BlockRange) {
        for block in blocks.blocks() {
            if let Some(since) = self.asked.remove(&(region, block)) {
                self.waited(since.elapsed());
            }
        }
    }

    fn waited(&mut self, time: Duration) {
        if let Some(times) = &mut self.times {
            let time_us = u64::try_from(time.as_micros());
            times.saturating_record(time_us.unwrap_or(u64::MAX));
        }
        for (count, long) in self.longer.iter_mut().zip(LONG_WAITS) {
            *count += u64::from(time > long);
        }
    }

    /// Returns the blocks that the guest waits for.
    pub(crate) fn pending(&self) -> impl ExactSizeIterator<Item = (RegionId, u64)> {
        self.asked.keys().copied()
    }

    /// Returns what the guest has waited for.
    pub(crate) fn faults(&self) -> Option<Faults> {
        let times = self.times.as_ref()?;
        Some(Faults {
            pages: times.len(),
            median_us: times.value_at_quantile(0.5),
            p99_us: times.value_at_quantile(0.99),
            longest_us: times.max(),
            longer: self.longer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: RegionId = RegionId(0);

    #[test]
    fn a_page_is_waited_for_once_from_its_first_request_until_it_comes() {
        let mut waits = Waits::new();
        assert_eq!(waits.faults().map(|faults| faults.pages), Some(0));
        waits.asked(MEMORY, BlockRange::new(5, 2));
        waits.asked(MEMORY, BlockRange::new(5, 1));
        assert_eq!(waits.pending().len(), 2);
        for since in waits.asked.values_mut() {
            *since -= Duration::from_millis(3);
        }
        // One of these was not asked for.
        waits.came(MEMORY, BlockRange::new(6, 2));
        waits.came(MEMORY, BlockRange::new(5, 1));
        waits.came(MEMORY, BlockRange::new(5, 1));
        assert_eq!(waits.pending().len(), 0);
        let faults = waits.faults().unwrap();
        assert_eq!(faults.pages, 2);
        assert!(faults.median_us >= 3000, "{faults:?}");
        assert!(faults.median_us <= faults.p99_us && faults.p99_us <= faults.longest_us);
    }

    #[test]
    fn long_waits_are_counted_exactly() {
        let mut waits = Waits::new();
        for time_ms in [10, 11, 100, 101, 1000, 1001, 7_200_000] {
            waits.waited(Duration::from_millis(time_ms));
        }
        let faults = waits.faults().unwrap();
        assert_eq!((faults.pages, faults.longer), (7, [6, 4, 2]));
    }
}
