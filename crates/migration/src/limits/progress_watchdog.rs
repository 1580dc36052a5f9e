//! A watchdog of an arrival's progress: a peer that sends almost nothing is given up.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;
use tokio::time::Instant;

/// The minimum rate of a guest's memory in each period of `stall`, in bytes per second. A link of
/// 64 kbit/s carries eight times as much, before deduplication and compression.
const BYTES_PER_S_MIN: u64 = 1024;
const BLOCK_BYTES: u64 = 4096;
/// How long a guest that runs here waits for its source to confirm.
const GOODBYE: Duration = Duration::from_secs(60);

/// The watchdog of one arrival.
#[derive(Debug)]
pub(crate) struct Pace {
    stall: Duration,
    blocks_min: u64,
    ends: Instant,
    period: Mutex<Period>,
}

#[derive(Debug)]
struct Period {
    began: Instant,
    blocks: u64,
}

impl Pace {
    pub(crate) fn new(stall: Duration, longest: Duration, now: Instant) -> Self {
        Self {
            stall,
            blocks_min: (stall.as_secs() * BYTES_PER_S_MIN / BLOCK_BYTES).max(1),
            ends: now + longest,
            period: Mutex::new(Period {
                began: now,
                blocks: 0,
            }),
        }
    }

    /// Counts blocks that arrived or were compared.
    pub(crate) fn came(&self, blocks: u64, now: Instant) {
        let mut period = self.period.lock().unwrap_or_else(PoisonError::into_inner);
        period.blocks = period.blocks.saturating_add(blocks);
        if period.blocks >= self.blocks_min {
            *period = Period {
                began: now,
                blocks: 0,
            };
        }
    }

    /// Counts a completed step of the handover as progress.
    pub(crate) fn stepped(&self, now: Instant) {
        self.came(self.blocks_min, now);
    }

    /// Excludes the time of an interrupted connection. That time has its own limit.
    pub(crate) fn was_away(&self, time: Duration) {
        let mut period = self.period.lock().unwrap_or_else(PoisonError::into_inner);
        period.began += time;
    }

    /// Returns when the arrival is given up if no more progress is made.
    pub(crate) fn deadline(&self) -> Instant {
        let period = self.period.lock().unwrap_or_else(PoisonError::into_inner);
        (period.began + self.stall).min(self.ends)
    }

    /// Returns when a guest that runs here stops waiting for its source.
    pub(crate) fn goodbye(&self) -> Instant {
        let period = self.period.lock().unwrap_or_else(PoisonError::into_inner);
        period.began + GOODBYE.min(self.stall)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_link_is_waited_for_and_a_trickle_is_not() {
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let pace = Pace::new(900 * second, 3600 * second, begin);
        // 64 kbit/s: two blocks a second.
        for n in 1..=1000 {
            pace.came(2, begin + n * second);
        }
        assert!(pace.deadline() > begin + 1800 * second);
        let pace = Pace::new(900 * second, 36_000 * second, begin);
        // One block a minute.
        for n in 1..=14 {
            pace.came(1, begin + n * 60 * second);
        }
        assert_eq!(pace.deadline(), begin + 900 * second);
        pace.was_away(100 * second);
        assert_eq!(pace.deadline(), begin + 1000 * second);
        pace.stepped(begin + 950 * second);
        assert_eq!(pace.deadline(), begin + 1850 * second);
        assert_eq!(pace.goodbye(), begin + 1010 * second);
    }

    #[test]
    fn no_move_is_waited_for_for_ever() {
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let pace = Pace::new(900 * second, 3600 * second, begin);
        pace.stepped(begin + 3500 * second);
        assert_eq!(pace.deadline(), begin + 3600 * second);
    }
}
