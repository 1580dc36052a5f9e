//! Limits how often requests are answered: for each source, and in total.

use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Sources share counters beyond this number of them.
const SOURCES: usize = 1024;
const EACH: Rate = Rate {
    interval: Duration::from_millis(100),
    burst: 20,
};
const TOTAL: Rate = Rate {
    interval: Duration::from_millis(5),
    burst: 200,
};

/// One answer for each interval, and a number of them at once.
struct Rate {
    interval: Duration,
    burst: u32,
}

/// When the answers given so far are made up for.
#[derive(Debug, Clone, Copy, Default)]
struct Bucket(Option<Instant>);

#[derive(Debug)]
pub(super) struct Limits {
    sources: Box<[Bucket]>,
    total: Bucket,
    /// With a key of its own, so that nobody can choose whose counter to share.
    hasher: RandomState,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            sources: vec![Bucket::default(); SOURCES].into(),
            total: Bucket::default(),
            hasher: RandomState::new(),
        }
    }
}

impl Limits {
    /// Counts an answer to a source; returns false if it must not be given.
    pub(super) fn allow(&mut self, source: IpAddr, now: Instant) -> bool {
        let network = match source.to_canonical() {
            IpAddr::V4(ip) => (4, u64::from(ip.to_bits())),
            // A host has a whole /64.
            IpAddr::V6(ip) => (6, (ip.to_bits() >> 64) as u64),
        };
        let slot = self.hasher.hash_one(network) as usize % SOURCES;
        let source = &mut self.sources[slot];
        // Only what both allow counts.
        if !source.has_room(&EACH, now) || !self.total.has_room(&TOTAL, now) {
            return false;
        }
        source.count(&EACH, now);
        self.total.count(&TOTAL, now);
        true
    }
}

impl Bucket {
    fn has_room(&self, rate: &Rate, now: Instant) -> bool {
        let owed = self
            .0
            .map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        owed <= rate.interval * (rate.burst - 1)
    }

    fn count(&mut self, rate: &Rate, now: Instant) {
        let from = self.0.map_or(now, |at| at.max(now));
        self.0 = Some(from + rate.interval);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answered(limits: &mut Limits, source: &str, now: Instant, asked: usize) -> usize {
        let source = source.parse().unwrap();
        (0..asked).filter(|_| limits.allow(source, now)).count()
    }

    #[test]
    fn a_source_has_a_burst_and_a_rate_and_a_whole_network_is_one_source() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        assert_eq!(answered(&mut limits, "192.0.2.1", now, 100), 20);
        assert_eq!(answered(&mut limits, "::ffff:192.0.2.1", now, 100), 0);
        let later = now + Duration::from_secs(1);
        assert_eq!(answered(&mut limits, "192.0.2.1", later, 100), 10);
        let mut limits = Limits::default();
        assert_eq!(answered(&mut limits, "2001:db8::1", now, 15), 15);
        assert_eq!(answered(&mut limits, "2001:db8::2", now, 100), 5);
    }

    #[test]
    fn all_sources_together_have_a_limit() {
        let (mut limits, now) = (Limits::default(), Instant::now());
        let sources = (0..60_000u32).map(|i| format!("10.{}.{}.1", i / 250, i % 250));
        let total: usize = sources.map(|ip| answered(&mut limits, &ip, now, 1)).sum();
        assert_eq!(total, 200);
        let later = now + Duration::from_secs(1);
        let sources = (0..60_000u32).map(|i| format!("11.{}.{}.1", i / 250, i % 250));
        let total: usize = sources.map(|ip| answered(&mut limits, &ip, later, 1)).sum();
        assert_eq!(total, 200);
    }
}
