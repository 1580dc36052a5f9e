//! Guests that overwrite what is left at the source faster than it could be fetched: nothing is fetched meanwhile but
//! what somebody waits for. What comes then is mostly written over a moment later, and takes processors and disk from
//! the guest that writes. What it has just written itself it does not overwrite soon: that comes all the same. A guest that
//! went when a burst began ([`crate::rhythm`]) is expected to do so; of others it is seen.
//!
//! Nobody leaves it to the guest for longer than fetching everything would have taken: at worst the drain takes twice
//! as long as without.

use std::time::Duration;

/// Whether the guest is fast enough is judged by what it does in this time.
const WINDOW: Duration = Duration::from_millis(500);
/// The same of one that is expected to be, and has yet to begin.
const FIRST: Duration = Duration::from_millis(1500);
/// It is not left to the guest for longer.
const HELD_MAX: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy)]
struct Window {
    began: Duration,
    length: Duration,
    overwritten_blocks: u64,
}

/// How fast a guest overwrites what is left.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Overwriting {
    overwritten_blocks: u64,
    window: Option<Window>,
    /// So many blocks the guest has just written, and will not overwrite soon; what was left at first.
    just_written_blocks: u64,
    left_blocks: u64,
    /// Whether the guest is fast enough; whether it is left to it, for how long it has been, and for how long it may be.
    fast: bool,
    held: bool,
    held_for: Duration,
    limit: Duration,
    looked_at: Duration,
}

impl Overwriting {
    /// The guest runs at the destination, perhaps at the beginning of a burst, which has written so much already.
    pub(crate) fn begin(&mut self, expected: bool, just_written_blocks: u64) {
        if self.window.is_none() {
            self.fast = expected;
            self.just_written_blocks = just_written_blocks;
        }
    }

    /// It has overwritten so many blocks more of what is left.
    pub(crate) fn overwritten(&mut self, blocks: u64) {
        self.overwritten_blocks += blocks;
    }

    /// Whether what is left, so many blocks, is now left to the guest. `fetch` says how long it takes to fetch so many.
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
                    // One that had yet to begin has not had all of the time.
                    let share = if window.length == FIRST { 2 } else { 1 };
                    self.fast = fetch(overwritten).saturating_mul(share) >= took;
                    self.window = Some(next(WINDOW));
                }
            }
        }
        self.looked_at = now;
        self.fast &= self.held_for < self.limit;
        // What was written last is fetched first.
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

    /// A thousand blocks in a second.
    fn fetch(blocks: u64) -> Duration {
        Duration::from_millis(blocks)
    }

    /// The times, in tenths of a second, in which it is left to a guest that overwrites so many blocks in each.
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
        // Expected, it begins after half a second, and ends after four.
        let burst = held(true, |tenth| 200 * u64::from((5..40).contains(&tenth)));
        assert_eq!(burst, (0..45).collect::<Vec<_>>());
        // It is seen of one that was not expected to.
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
