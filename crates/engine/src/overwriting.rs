//! Detects guests that overwrite missing blocks at the destination faster than the link could fetch
//! them; while they do, only wanted blocks are fetched.
//!
//! Blocks that arrive during such a time are mostly overwritten a moment later, and cost the guest
//! processor time and disk throughput. Blocks that the guest has just written itself are the
//! exception: it does not overwrite them soon, so they are fetched. A guest whose switchover was
//! placed at the beginning of a burst ([`crate::rhythm`]) is expected to overwrite; other guests
//! are measured.
//!
//! The drain is held back for no longer than fetching everything would have taken: at worst the
//! drain takes twice as long as without this rule.

use std::time::Duration;

/// The time over which the guest's rate is measured.
const WINDOW: Duration = Duration::from_millis(500);
/// The first such time of a guest that is expected to overwrite but has yet to begin.
const FIRST: Duration = Duration::from_millis(1500);
/// Limit on the time for which the drain is held back.
const HELD_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy)]
struct Window {
    began: Duration,
    length: Duration,
    overwritten_blocks: u64,
}

/// How fast a guest overwrites missing blocks.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Overwriting {
    overwritten_blocks: u64,
    window: Option<Window>,
    /// Blocks that the guest has just written and will not overwrite soon; blocks that were missing
    /// at first.
    just_written_blocks: u64,
    left_blocks: u64,
    /// Whether the guest is fast enough; whether the drain is held back, for how long it has been,
    /// and for how long it may be.
    fast: bool,
    held: bool,
    held_for: Duration,
    limit: Duration,
    looked_at: Duration,
}

impl Overwriting {
    /// Begins at the switchover, perhaps at the start of a burst that has written
    /// `just_written_blocks` so far.
    pub(crate) fn begin(&mut self, expected: bool, just_written_blocks: u64) {
        if self.window.is_none() {
            self.fast = expected;
            self.just_written_blocks = just_written_blocks;
        }
    }

    /// Counts missing blocks that the guest has overwritten.
    pub(crate) fn overwritten(&mut self, blocks: u64) {
        self.overwritten_blocks += blocks;
    }

    /// Returns whether the drain is held back now. `left_blocks` are missing; `fetch` returns how
    /// long fetching a number of blocks takes.
    pub(crate) fn holds(
        &mut self,
        now: Duration,
        left_blocks: u64,
        fetch: impl Fn(u64) -> Duration,
    ) -> bool {
        let next = |length| Window {
            began: now,
            length,
            overwritten_blocks: self.overwritten_blocks,
        };
        match self.window {
            None => {
                self.limit = fetch(left_blocks).min(HELD_MAX);
                self.left_blocks = left_blocks;
                self.window = Some(next(if self.fast { FIRST } else { WINDOW }));
            }
            Some(window) => {
                if self.held {
                    self.held_for += now.saturating_sub(self.looked_at);
                }
                let took = now.saturating_sub(window.began);
                if took >= window.length {
                    let overwritten = self.overwritten_blocks - window.overwritten_blocks;
                    // A guest that had yet to begin has not used all of the time.
                    let share = if window.length == FIRST { 2 } else { 1 };
                    self.fast = fetch(overwritten).saturating_mul(share) >= took;
                    self.window = Some(next(WINDOW));
                }
            }
        }
        self.looked_at = now;
        self.fast &= self.held_for < self.limit;
        // The blocks written last are fetched first.
        let gone = self.left_blocks.saturating_sub(left_blocks);
        let fetched = gone.saturating_sub(self.overwritten_blocks);
        self.held = self.fast && fetched >= self.just_written_blocks;
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEFT: u64 = 10_000;

    /// A thousand blocks per second.
    fn fetch(blocks: u64) -> Duration {
        Duration::from_millis(blocks)
    }

    /// Returns the times, in tenths of a second, at which the drain is held back for a guest that
    /// overwrites this many blocks in each tenth.
    fn held(expected: bool, per_tenth: impl Fn(u64) -> u64) -> Vec<u64> {
        let mut overwriting = Overwriting::default();
        overwriting.begin(expected, 0);
        let mut held = Vec::new();
        for tenth in 0..400 {
            if overwriting.holds(Duration::from_millis(tenth * 100), LEFT, fetch) {
                held.push(tenth);
            }
            overwriting.overwritten(per_tenth(tenth));
        }
        held
    }

    #[test]
    fn who_overwrites_faster_than_the_link_carries_is_left_to_it() {
        // An expected burst begins after half a second and ends after four.
        let burst = held(true, |tenth| 200 * u64::from((5..40).contains(&tenth)));
        assert_eq!(burst, (0..45).collect::<Vec<_>>());
        // An unexpected one is detected.
        let seen = held(false, |tenth| 200 * u64::from((20..40).contains(&tenth)));
        assert_eq!(seen, (25..45).collect::<Vec<_>>());
    }

    #[test]
    fn what_it_has_just_written_is_fetched_first() {
        let mut overwriting = Overwriting::default();
        overwriting.begin(true, 300);
        let holds = |overwriting: &mut Overwriting, at: u64, left: u64| {
            overwriting.holds(Duration::from_millis(at), left, fetch)
        };
        assert!(!holds(&mut overwriting, 0, LEFT));
        overwriting.overwritten(500);
        assert!(!holds(&mut overwriting, 200, LEFT - 500 - 200));
        overwriting.overwritten(500);
        assert!(holds(&mut overwriting, 400, LEFT - 1000 - 300));
        overwriting.overwritten(1000);
        assert!(holds(&mut overwriting, 1600, LEFT - 2000 - 300));
    }

    #[test]
    fn who_does_not_is_not() {
        assert_eq!(held(false, |_| 50), []);
        assert_eq!(held(true, |_| 10), (0..15).collect::<Vec<_>>());
    }

    #[test]
    fn nobody_is_left_to_it_for_longer_than_fetching_takes() {
        let all = held(true, |_| 200);
        assert_eq!(all, (0..100).collect::<Vec<_>>());
    }
}
