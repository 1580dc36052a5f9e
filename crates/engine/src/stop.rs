//! When to stop the guest: CloudNet's smart stop (paper 000, section 4.2), over bytes that are
//! still to be sent after encoding, and with the predicted downtime as the first criterion.
//!
//! ```text
//! Falling --- no new minimum for WINDOW passes ---> Waiting --- local minimum ---> stop
//!    \----------------- predicted <= limit, in either ----------------------------> stop
//! ```

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Duration;

/// Passes that are looked back on.
const WINDOW: usize = 5;
/// A pass counts as progress when it leaves at most this share of the best one before it.
const PROGRESS: f64 = 0.9;

/// Why the guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// The predicted downtime is within what was asked for.
    WithinLimit,
    /// It will not get better: the guest writes too fast for the link.
    LocalMinimum,
}

/// Decides after each pass.
#[derive(Debug)]
pub struct StopRule {
    limit: Duration,
    best: Option<u64>,
    without_progress: usize,
    window: VecDeque<u64>,
}

impl StopRule {
    /// A rule for a downtime of at most `limit`, where the guest lets it.
    pub fn new(limit: Duration) -> Self {
        Self {
            limit,
            best: None,
            without_progress: 0,
            window: VecDeque::new(),
        }
    }

    /// The downtime asked for.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// A pass has been sent: `remaining_bytes` are left, which means a downtime of `predicted`.
    pub fn pass(&mut self, remaining_bytes: u64, predicted: Duration) -> Option<StopReason> {
        if predicted <= self.limit {
            return Some(StopReason::WithinLimit);
        }
        let progress = self
            .best
            .is_none_or(|best| (remaining_bytes as f64) < PROGRESS * best as f64);
        if progress {
            self.best = Some(remaining_bytes);
            self.without_progress = 0;
        } else {
            self.without_progress += 1;
        }
        let least = self.window.iter().copied().min();
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(remaining_bytes);
        let waiting = self.without_progress >= WINDOW;
        let minimum = least.is_some_and(|least| remaining_bytes <= least);
        let patience_over = self.without_progress >= 2 * WINDOW;
        (waiting && minimum || patience_over).then_some(StopReason::LocalMinimum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);
    const OVER: Duration = Duration::from_secs(1);

    #[test]
    fn it_stops_as_soon_as_the_downtime_fits() {
        let mut rule = StopRule::new(LIMIT);
        assert_eq!(rule.pass(1 << 30, OVER), None);
        assert_eq!(rule.pass(100, LIMIT), Some(StopReason::WithinLimit));
    }

    #[test]
    fn it_goes_on_while_less_and_less_is_left() {
        let mut rule = StopRule::new(LIMIT);
        for pass in 0..40 {
            let left = (1e12 * 0.8f64.powi(pass)) as u64;
            assert_eq!(rule.pass(left, OVER), None, "pass {pass}");
        }
    }

    #[test]
    fn it_takes_a_local_minimum_when_nothing_helps() {
        let mut rule = StopRule::new(LIMIT);
        let lefts = [100, 95, 99, 97, 98, 96, 99, 101, 94];
        let stops: Vec<_> = lefts.iter().map(|left| rule.pass(*left, OVER)).collect();
        assert_eq!(stops.iter().position(Option::is_some), Some(8));
    }

    #[test]
    fn it_does_not_wait_for_ever_for_a_minimum() {
        let mut rule = StopRule::new(LIMIT);
        let passes = (0u64..)
            .take_while(|pass| rule.pass(100 + pass, OVER).is_none())
            .count();
        assert_eq!(passes, 2 * WINDOW);
    }
}
