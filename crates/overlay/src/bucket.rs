//! Limits rates with token buckets.

use std::time::Duration;

/// A rate limit: `per_second` on average, and `burst` at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Events per second. Zero: only the burst, once.
    pub per_second: u32,
    /// Events at once.
    pub burst: u32,
}

/// Nanoseconds in a second: the tokens of one event, so that a bucket counts in whole numbers.
const EVENT_TOKENS: u64 = 1_000_000_000;

/// A token bucket.
#[derive(Debug, Clone)]
pub(crate) struct Bucket {
    rate: Rate,
    /// At most `burst * EVENT_TOKENS`, which fits: both are below 2^32.
    tokens: u64,
    filled: Duration,
}

impl Bucket {
    /// Returns a full bucket.
    pub(crate) fn new(rate: Rate) -> Self {
        Self {
            rate,
            tokens: u64::from(rate.burst) * EVENT_TOKENS,
            filled: Duration::ZERO,
        }
    }

    /// Takes one event out of the bucket. Returns `false` if there is none.
    #[inline]
    pub(crate) fn take(&mut self, now: Duration) -> bool {
        let passed = now.saturating_sub(self.filled);
        let full = u64::from(self.rate.burst) * EVENT_TOKENS;
        if self.tokens < full && passed > Duration::ZERO {
            let passed = u64::try_from(passed.as_nanos()).unwrap_or(u64::MAX);
            let more = passed.saturating_mul(u64::from(self.rate.per_second));
            self.tokens = self.tokens.saturating_add(more).min(full);
        }
        self.filled = self.filled.max(now);
        let takes = self.tokens >= EVENT_TOKENS;
        if takes {
            self.tokens -= EVENT_TOKENS;
        }
        takes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let rate = Rate {
            per_second: 10,
            burst: 3,
        };
        let mut bucket = Bucket::new(rate);
        let now = Duration::from_secs(1000);
        assert_eq!((0..9).filter(|_| bucket.take(now)).count(), 3);
        assert!(!bucket.take(now + Duration::from_millis(99)));
        assert!(bucket.take(now + Duration::from_millis(100)));
        let taken = (0..100u64).filter(|tenth| {
            let passed = Duration::from_millis(101 + tenth * 50);
            bucket.take(now + passed)
        });
        assert_eq!(taken.count(), 49);
        assert!(!bucket.take(now), "a time of the past adds nothing");
    }

    #[test]
    fn without_a_rate_only_the_burst() {
        let rate = Rate {
            per_second: 0,
            burst: 1,
        };
        let mut bucket = Bucket::new(rate);
        assert!(bucket.take(Duration::ZERO));
        assert!(!bucket.take(Duration::MAX));
    }
}
