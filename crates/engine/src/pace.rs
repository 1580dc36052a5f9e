//! Limits how fast a move reads the source's disk, so that the guest's own requests do not starve:
//! the rate is halved when their latency is too high, and rises slowly while it is not.
//!
//! CloudNet has a fixed limit that an operator sets; here the limit follows the guest's latency.

use std::time::Duration;

/// The factor up to which the latency of the guest's requests may exceed the undisturbed one,
const SLOWER_MAX: f64 = 2.0;
/// and the increase that is always allowed: at such latencies a slower move gains nothing.
const SLOWER_FREE: Duration = Duration::from_millis(1);
/// Rates in bytes per second: the least, at which a move always proceeds, and the first, which any
/// disk can deliver.
const RATE_MIN: f64 = 4e6;
const RATE_FIRST: f64 = 64e6;
const RATE_MAX: f64 = 16e9;
/// The factors of a step up and of a step down.
const UP: f64 = 1.15;
const DOWN: f64 = 0.5;
/// The shortest time between two steps.
const STEP_EVERY: Duration = Duration::from_millis(100);
/// How quickly the undisturbed latency follows the measured one: downwards always, upwards while
/// the move hardly reads, since the latency then has other causes.
const USUAL_DOWN: f64 = 0.2;
const USUAL_UP: f64 = 0.1;
/// The time whose bytes may be read at once after a pause.
const BURST: Duration = Duration::from_millis(100);

/// The pace of one disk.
#[derive(Debug, Clone)]
pub struct Pace {
    rate_bytes_per_s: f64,
    /// Latency of the guest's requests when the move does not disturb them.
    usual: Option<f64>,
    /// Requests in this step, and the sum of their latencies.
    requests: u64,
    seconds: f64,
    stepped_at: Duration,
    /// Bytes that may be read now.
    allowance: f64,
    counted_at: Duration,
}

impl Pace {
    /// Creates a pace without measurements.
    pub fn new(now: Duration) -> Self {
        Self {
            rate_bytes_per_s: RATE_FIRST,
            usual: None,
            requests: 0,
            seconds: 0.0,
            stepped_at: now,
            allowance: RATE_FIRST * BURST.as_secs_f64(),
            counted_at: now,
        }
    }

    /// Counts requests of the guest and the sum of their latencies. Requests that were answered
    /// from memory say nothing about the disk and must not be counted.
    pub fn guest_waited(&mut self, now: Duration, requests: u64, together: Duration) {
        self.requests += requests;
        self.seconds += together.as_secs_f64();
        self.step(now);
    }

    /// Returns whether the move may read now.
    pub fn may_read(&mut self, now: Duration) -> bool {
        self.step(now);
        let since = now.saturating_sub(self.counted_at).as_secs_f64();
        self.counted_at = now;
        let most = self.rate_bytes_per_s * BURST.as_secs_f64();
        self.allowance = (self.allowance + since * self.rate_bytes_per_s).min(most);
        self.allowance > 0.0
    }

    /// Counts bytes that the move reads; an excess delays the next read.
    pub fn read(&mut self, bytes: u64) {
        self.allowance -= bytes as f64;
    }

    /// Returns the current limit, in bytes per second.
    pub fn rate_bytes_per_s(&self) -> f64 {
        self.rate_bytes_per_s
    }

    fn step(&mut self, now: Duration) {
        if now.saturating_sub(self.stepped_at) < STEP_EVERY {
            return;
        }
        self.stepped_at = now;
        let change = if self.requests == 0 {
            UP
        } else {
            let now = self.seconds / self.requests as f64;
            let usual = self.usual.get_or_insert(now);
            if now < *usual {
                *usual += USUAL_DOWN * (now - *usual);
            } else if self.rate_bytes_per_s <= RATE_MIN {
                *usual += USUAL_UP * (now - *usual);
            }
            let limit = (*usual * SLOWER_MAX).max(*usual + SLOWER_FREE.as_secs_f64());
            if now > limit { DOWN } else { UP }
        };
        (self.requests, self.seconds) = (0, 0.0);
        let rate = self.rate_bytes_per_s * change;
        self.rate_bytes_per_s = rate.clamp(RATE_MIN, RATE_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Simulates a disk of this throughput under a move that reads as fast as it may, and a guest
    /// with a request every 10 ms that takes 5 ms, and longer in proportion to the move's share of
    /// the disk.
    fn rate_on(disk_bytes_per_s: f64) -> (f64, f64) {
        let mut pace = Pace::new(Duration::ZERO);
        // Before the move reads anything, the guest's requests have their undisturbed latency.
        (0..30).for_each(|n| pace.guest_waited(MS * 10 * n, 1, MS * 5));
        let (mut read, mut latency, mut now) = (0u64, 0.0, MS * 300);
        for _ in 0..2000 {
            now += MS * 10;
            let mut bytes = 0;
            while bytes < (disk_bytes_per_s / 50.0) as u64 && pace.may_read(now) {
                pace.read(256 << 10);
                bytes += 256 << 10;
            }
            read += bytes;
            let busy = (bytes as f64 / disk_bytes_per_s / 0.01).min(0.99);
            let took = 0.005 / (1.0 - busy);
            latency += took;
            pace.guest_waited(now, 1, Duration::from_secs_f64(took));
        }
        (read as f64 / 20.0, latency / 2000.0)
    }

    #[test]
    fn a_slow_disk_is_shared_with_the_guest() {
        let (rate, latency) = rate_on(200e6);
        assert!(rate > 40e6, "{rate}");
        assert!(latency < 0.015, "{latency}");
    }

    #[test]
    fn a_fast_disk_is_used() {
        let (rate, _) = rate_on(4e9);
        assert!(rate > 1e9, "{rate}");
    }

    #[test]
    fn a_quiet_guest_is_no_limit_and_a_starved_one_leaves_a_little() {
        let mut pace = Pace::new(Duration::ZERO);
        for second in 0..100 {
            assert!(pace.may_read(MS * 1000 * second));
            pace.read(1 << 20);
        }
        assert!(pace.rate_bytes_per_s() > 1e9);
        pace.guest_waited(MS * 100_000, 10, MS * 10);
        for n in 1..=13 {
            pace.guest_waited(MS * (100_000 + 100 * n), 2, MS * 40);
        }
        assert_eq!(pace.rate_bytes_per_s(), RATE_MIN);
        // A latency that does not improve without the move is not caused by the move.
        for n in 14..100 {
            pace.guest_waited(MS * (100_000 + 100 * n), 1, MS * 20);
        }
        assert!(pace.rate_bytes_per_s() > 1e9);
    }

    #[test]
    fn one_quick_request_does_not_make_all_others_slow() {
        let mut pace = Pace::new(Duration::ZERO);
        for n in 1..100 {
            let latency = if n % 25 == 0 { MS } else { MS * 5 };
            pace.guest_waited(MS * 100 * n, 1, latency);
        }
        assert!(pace.rate_bytes_per_s() > 1e9);
    }

    #[test]
    fn what_was_read_too_much_is_waited_for() {
        let mut pace = Pace::new(Duration::ZERO);
        assert!(pace.may_read(Duration::ZERO));
        // 64 MB per second at first: a sixteenth of a second.
        pace.read(10_400_000);
        assert!(!pace.may_read(MS * 50));
        assert!(pace.may_read(MS * 70));
    }
}
