//! Further passes over memory by `hybrid`: each sends what the guest wrote during the one before,
//! so that less is missing when the guest runs at the destination. They go on as long as each
//! leaves clearly less, whatever was written in pass after pass included, and end at once when the guest is seen to write too fast for that.

use super::{Advice, Source};
use crate::predict::{Blocks, travel_time};
use std::time::Duration;

/// A pass has helped if it leaves at most this share of the blocks that the one before left.
const PROGRESS: f64 = 0.7;
/// The share of the link's rate at which a guest may write for a further pass to be tried.
const WRITE_SHARE: f64 = 0.8;
/// Limit on further passes.
const FURTHER_MAX: u32 = 8;
/// The shortest time between passes: each costs the source's QEMU a search for written pages.
const PASS_MIN: Duration = Duration::from_millis(20);

/// The further passes of a move.
#[derive(Debug, Default)]
pub(super) enum Further {
    /// None was begun.
    #[default]
    Before,
    /// This many were begun.
    Begun {
        passes: u32,
        /// The number of the pass after which the last one was requested.
        after: u32,
        /// Blocks that were missing at that time.
        missing: f64,
    },
    /// No more follow.
    Over,
}

impl Source {
    /// Returns what a further pass over memory needs next; nothing if none helps. All of memory
    /// was sent once.
    pub(super) fn further_pass(&mut self, now: Duration) -> Option<Advice> {
        let (begun, before) = match self.further {
            Further::Before => (0, f64::INFINITY),
            Further::Begun { after, .. } if after == self.pass.number => {
                return Some(Advice::ReadPass);
            }
            Further::Begun {
                passes, missing, ..
            } => (passes, missing),
            Further::Over => return None,
        };
        let advice = self.next_of_further_pass(now, begun, before);
        if advice.is_none() {
            self.end_further_passes();
        }
        advice
    }

    /// Begins no further pass any more: none helps.
    pub(super) fn end_further_passes(&mut self) {
        self.further = Further::Over;
        let regions = self.regions.iter_mut();
        regions.for_each(|region| region.in_further_pass = false);
    }

    fn next_of_further_pass(&mut self, now: Duration, begun: u32, before: f64) -> Option<Advice> {
        let link = self.link?;
        self.pass.unseen?;
        let mut pending = 0;
        for region in self.regions.iter().filter(|it| !it.is_written_late()) {
            if !region.sends_again() {
                return None;
            }
            pending += region.map.pending_total();
        }
        let written = self.unseen_blocks(now);
        let enough = PROGRESS * before;
        let fast = self.written_bytes_per_s() > WRITE_SHARE * link.rate_bytes_per_s;
        if written > enough || fast && begun == 0 {
            return None;
        }
        if pending > 0 && begun > 0 {
            return Some(Advice::Wait);
        }
        let missing = written + pending as f64;
        let bytes = self.costs.likely(Blocks {
            by_passes: missing,
            by_writes: 0.0,
        });
        if missing > enough || begun == FURTHER_MAX || travel_time(bytes, link) < link.rtt {
            return None;
        }
        if now.saturating_sub(self.pass.started_at) < PASS_MIN {
            return Some(Advice::Wait);
        }
        let memory = self.regions.iter_mut().filter(|it| !it.is_written_late());
        memory.for_each(|region| region.in_further_pass = true);
        self.further = Further::Begun {
            passes: begun + 1,
            after: self.pass.number,
            missing,
        };
        Some(Advice::ReadPass)
    }
}
