//! Further passes over memory by `hybrid`: each sends what the guest wrote during the one before,
//! so that less is missing when the guest runs at the destination. They go on as long as each
//! leaves clearly less, blocks that were written in pass after pass included. They end at once when
//! the guest is seen to write too fast, and together send at most as many blocks as memory has.

use super::stopping::PASS_MIN;
use super::{Advice, Source};
use crate::predict::travel_time;
use longhaul_protocol::BLOCK_SIZE;
use std::time::Duration;

/// A pass has helped if it leaves at most this share of the blocks that the one before left.
const PROGRESS: f64 = 0.85;
/// How many more blocks may be written than that while a pass is sent: their number is an estimate
/// by a sample.
const UNCERTAIN: f64 = 0.1;
const UNCERTAIN_BLOCKS: f64 = 512.0;
/// Limit on further passes.
const FURTHER_MAX: u32 = 12;
/// Limit on the time that a pass waits until written blocks are counted.
const COUNTED_WITHIN: Duration = Duration::from_secs(1);

/// The further passes of a move.
#[derive(Debug, Default)]
pub(super) struct Further {
    /// How many were begun.
    begun: u32,
    /// The number of the pass after which the last one was requested.
    after: u32,
    /// Blocks that were missing at that time.
    missing: f64,
    /// The sum of these numbers.
    all: f64,
    /// Since when the number of written blocks is not known.
    uncounted_since: Option<Duration>,
    /// Whether no more follow.
    over: bool,
}

impl Source {
    /// Returns what a further pass over memory needs next; nothing if none helps. All of memory
    /// was sent once.
    pub(super) fn further_pass(&mut self, now: Duration) -> Option<Advice> {
        if self.further.over || self.link.is_none() {
            return None;
        }
        let advice = self.next_of_further_pass(now);
        if advice.is_none() {
            self.end_further_passes();
        }
        advice
    }

    /// Begins no further pass any more: none helps.
    pub(super) fn end_further_passes(&mut self) {
        self.further.over = true;
        let regions = self.regions.iter_mut();
        regions.for_each(|region| region.in_further_pass = false);
    }

    fn next_of_further_pass(&mut self, now: Duration) -> Option<Advice> {
        let link = self.link?;
        let (mut pending, mut blocks) = (0, 0);
        for region in self.regions.iter().filter(|it| !it.is_written_late()) {
            if !region.sends_again() {
                return None;
            }
            pending += region.map.pending_total();
            blocks += region.map.len();
        }
        if self.further.begun > 0 && self.further.after == self.pass.number {
            return Some(Advice::ReadPass);
        }
        if self.pass.unseen.is_none() {
            let since = *self.further.uncounted_since.get_or_insert(now);
            let waits = now.saturating_sub(since) < COUNTED_WITHIN;
            return waits.then_some(Advice::Wait);
        }
        self.further.uncounted_since = None;
        let written = self.unseen_blocks(now);
        let Further {
            begun,
            missing,
            all,
            ..
        } = self.further;
        if pending > 0 && begun > 0 {
            let sent = (missing - pending as f64).max(0.0);
            let most = PROGRESS * sent + UNCERTAIN * missing + UNCERTAIN_BLOCKS;
            return (written <= most).then_some(Advice::Wait);
        }
        let left = written + pending as f64;
        // What follows the guest travels whole, and while the destination loads it.
        let few = travel_time(left * BLOCK_SIZE as f64, link) < link.rtt;
        let helped = begun == 0 || left <= PROGRESS * missing;
        let much = all + left > blocks as f64;
        if few || !helped || much || begun == FURTHER_MAX {
            return None;
        }
        if now.saturating_sub(self.pass.started_at) < PASS_MIN {
            return Some(Advice::Wait);
        }
        let memory = self.regions.iter_mut().filter(|it| !it.is_written_late());
        memory.for_each(|region| region.in_further_pass = true);
        self.further = Further {
            begun: begun + 1,
            after: self.pass.number,
            missing: left,
            all: all + left,
            ..Further::default()
        };
        Some(Advice::ReadPass)
    }
}
