//! Determines when the next operation is due.

use longhaul_history::plan::{Kind, Operation};
use std::time::{Duration, Instant};

/// The maximum backlog of late operations: no burst follows a pause.
const LONGEST_DEBT: Duration = Duration::from_millis(50);

/// The rate of operations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Paced {
    /// The maximum number per second; 0: no limit.
    pub(crate) operations_per_s: u64,
    /// The same for reads; 0: as for all others.
    pub(crate) reads_per_s: u64,
    /// Operations before this number follow each other without delay.
    pub(crate) from: u64,
    /// The size of a burst, after which the next ones wait; 0: no bursts.
    pub(crate) burst: u64,
    /// The interval between the beginnings of bursts.
    pub(crate) burst_every: Duration,
}

/// The pacing of a running history.
#[derive(Debug, Clone)]
pub(crate) struct Pace {
    paced: Paced,
    in_burst: u64,
    burst_began: Instant,
    next: Instant,
}

impl Pace {
    pub(crate) fn new(paced: &Paced) -> Self {
        let now = Instant::now();
        Self {
            paced: paced.clone(),
            in_burst: 0,
            burst_began: now,
            next: now,
        }
    }

    pub(crate) fn until_next(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Records the beginning of an operation.
    pub(crate) fn took(&mut self, operation: &Operation) {
        let now = Instant::now();
        if operation.number < self.paced.from {
            (self.next, self.burst_began) = (now, now);
            return;
        }
        let per_s = match (operation.kind, self.paced.reads_per_s) {
            (Kind::Read, reads @ 1..) => reads,
            _ => self.paced.operations_per_s,
        };
        let second = Duration::from_secs(1).as_nanos() as u64;
        let every = Duration::from_nanos(second.checked_div(per_s).unwrap_or(0));
        let earliest = now.checked_sub(LONGEST_DEBT).unwrap_or(self.next);
        self.next = self.next.max(earliest) + every;
        self.in_burst += 1;
        if self.in_burst == self.paced.burst {
            self.next = (self.burst_began + self.paced.burst_every).max(now);
            self.burst_began = self.next;
            self.in_burst = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(number: u64, kind: Kind) -> Operation {
        Operation {
            number,
            kind,
            disk: 0,
            first: 0,
            sectors: 1,
        }
    }

    /// Returns how long the next one waits after these.
    fn wait_after(paced: &Paced, kinds: &[Kind]) -> Duration {
        let mut pace = Pace::new(paced);
        for (number, kind) in (0..).zip(kinds) {
            pace.took(&operation(number, *kind));
        }
        pace.until_next()
    }

    #[test]
    fn a_pace_is_kept() {
        let mut paced = Paced {
            operations_per_s: 10,
            ..Paced::default()
        };
        assert!(wait_after(&paced, &[]).is_zero());
        let wait = wait_after(&paced, &[Kind::Write]);
        assert!(wait > Duration::from_millis(1) && wait <= Duration::from_millis(100));
        // Reads have a pace of their own.
        paced.reads_per_s = 1;
        let wait = wait_after(&paced, &[Kind::Read]);
        assert!(wait > Duration::from_millis(500) && wait <= Duration::from_secs(1));
        paced.from = 1;
        assert!(wait_after(&paced, &[Kind::Read]).is_zero());
        assert!(wait_after(&paced, &[Kind::Write; 2]) > Duration::from_millis(1));
    }

    #[test]
    fn bursts_follow_each_other_in_time() {
        let paced = Paced {
            from: 2,
            burst: 3,
            burst_every: Duration::from_secs(100),
            ..Paced::default()
        };
        assert!(wait_after(&paced, &[Kind::Write; 4]).is_zero());
        let wait = wait_after(&paced, &[Kind::Write; 5]);
        assert!(wait > Duration::from_secs(50) && wait <= Duration::from_secs(100));
    }
}
