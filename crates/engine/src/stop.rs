//! Stop rules: when to stop the guest and why, by the predicted downtime of the pending data *after
//! encoding* or, for comparison, by the rules of other systems.
//!
//! ```text
//!                       predicted <= requested, at any time -------------> stop: WithinLimit
//! Predicted:  falling --- no progress for WINDOW passes ---> too fast --- a local minimum, and
//!                                              nothing more to wait for ---> stop: LocalMinimum
//! CloudNet:   less pending than after each of the last WINDOW passes (paper 000, section 4.2)
//! Xen:        less than 50 pages pending, 30 passes, or three times the memory sent
//! QEMU:       the pending data, uncompressed, fits the requested downtime; never otherwise
//! ```
//!
//! Every rule terminates: the wait for a guest that writes too fast is limited.

use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Duration;

/// Number of recent passes that a rule considers.
const WINDOW: usize = 5;
/// Number of passes without progress after which memory that may follow does.
const SETTLED: usize = 2;
/// A pass counts as progress when it leaves at most this share of the best one before it.
const PROGRESS: f64 = 0.9;
/// Xen stops when fewer blocks than this are pending,
const XEN_LEFT_BLOCKS: u64 = 50;
/// after this many passes,
const XEN_PASSES: u32 = 30;
/// or when it has sent this multiple of the guest's memory.
const XEN_SENT_TIMES: u64 = 3;

/// The rule that decides when to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Rule {
    /// The predicted downtime, over encoded bytes; hot blocks wait for the stop.
    #[default]
    Predicted,
    /// CloudNet's smart stop, over blocks.
    CloudNet,
    /// Xen's rule, over blocks and passes.
    Xen,
    /// QEMU's rule, over uncompressed bytes.
    Qemu,
}

impl Rule {
    /// Returns whether blocks that are written in pass after pass are deferred to the stop.
    pub(crate) fn defers_hot(self) -> bool {
        self == Self::Predicted
    }
}

/// The reason for the stop of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// The predicted downtime is within the requested one.
    WithinLimit,
    /// The prediction will not improve: the guest writes too fast for the link.
    LocalMinimum,
    /// The pending data grows: the guest writes faster and faster.
    RisingTrend,
    /// The limit on the wait has passed, and the guest is still too fast.
    WaitedEnough,
    /// The rule's limit on passes was reached.
    Passes,
    /// The rule's limit on bytes was reached.
    Bytes,
}

/// The requested stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// The rule.
    pub rule: Rule,
    /// The requested downtime.
    pub downtime: Duration,
    /// How long a guest that writes too fast is waited for before it is stopped regardless.
    pub wait: Duration,
}

impl Wish {
    /// Returns a wish for the usual rule, which stops a guest that writes too fast at the best
    /// moment.
    pub fn downtime(downtime: Duration) -> Self {
        Self {
            rule: Rule::Predicted,
            downtime,
            wait: Duration::ZERO,
        }
    }
}

/// The state of a migration when everything that a pass reported has been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AfterPass {
    /// The time.
    pub now: Duration,
    /// Blocks that would have to travel after a stop.
    pub left_blocks: u64,
    /// The same after encoding, in bytes.
    pub left_bytes: u64,
    /// The upper bound of the predicted downtime.
    pub downtime: Duration,
    /// The travel time of the pending blocks without encoding.
    pub uncompressed: Duration,
    /// Blocks that were sent so far.
    pub sent_blocks: u64,
    /// Blocks of the guest.
    pub all_blocks: u64,
}

/// Decides after each pass.
#[derive(Debug)]
pub struct StopRule {
    wish: Wish,
    passes: u32,
    best: Option<u64>,
    without_progress: usize,
    window: VecDeque<u64>,
    /// Since when it has been known that the requested downtime cannot be met.
    too_fast_since: Option<Duration>,
}

impl StopRule {
    /// Creates a rule that has seen no pass.
    pub fn new(wish: Wish) -> Self {
        Self {
            wish,
            passes: 0,
            best: None,
            without_progress: 0,
            window: VecDeque::new(),
            too_fast_since: None,
        }
    }

    /// Returns the requested stop.
    pub fn wish(&self) -> Wish {
        self.wish
    }

    /// Returns since when the guest has been known to write too fast for the requested downtime.
    pub fn too_fast_since(&self) -> Option<Duration> {
        self.too_fast_since
    }

    /// Returns whether the last passes made no progress, although a few more are waited for before
    /// the guest counts as too fast.
    pub(crate) fn is_settled(&self) -> bool {
        self.wish.rule == Rule::Predicted && self.without_progress >= SETTLED
    }

    /// Takes a pass that has been sent. Returns the reason to stop, if there is one.
    pub fn pass(&mut self, after: &AfterPass) -> Option<StopReason> {
        self.passes += 1;
        let (reason, ready) = match self.wish.rule {
            Rule::Predicted => (self.predicted(after), after.downtime <= self.wish.downtime),
            Rule::CloudNet => (self.cloudnet(after), after.left_blocks == 0),
            Rule::Xen => (self.xen(after), after.left_blocks < XEN_LEFT_BLOCKS),
            Rule::Qemu => (None, after.uncompressed <= self.wish.downtime),
        };
        self.remember(after);
        if ready {
            return Some(StopReason::WithinLimit);
        }
        let waits = match self.wish.rule {
            // The guest counts as too fast when the rule would stop it at this point.
            Rule::Predicted => {
                let known = self.too_fast_since.or(reason.map(|_| after.now));
                self.too_fast_since = known;
                known.map(|since| after.now.saturating_sub(since))
            }
            // These rules have no such notion.
            Rule::CloudNet | Rule::Xen => return reason,
            Rule::Qemu => {
                let since = *self.too_fast_since.get_or_insert(after.now);
                Some(after.now.saturating_sub(since))
            }
        };
        let over = waits.is_some_and(|waited| waited >= self.wish.wait);
        match (over, self.wish.wait.is_zero()) {
            (false, _) => None,
            (true, true) => reason.or(Some(StopReason::LocalMinimum)),
            (true, false) => Some(StopReason::WaitedEnough),
        }
    }

    /// Returns the reason to stop if no improvement is to be expected.
    fn predicted(&mut self, after: &AfterPass) -> Option<StopReason> {
        let left = after.left_bytes;
        let progress = self
            .best
            .is_none_or(|best| (left as f64) < PROGRESS * best as f64);
        if progress {
            self.best = Some(left);
            self.without_progress = 0;
        } else {
            self.without_progress += 1;
        }
        let waiting = self.without_progress >= WINDOW;
        let patience_over = self.without_progress >= 2 * WINDOW;
        let least = self.window.iter().min();
        let minimum = least.is_some_and(|least| left <= *least);
        (waiting && minimum || patience_over).then_some(StopReason::LocalMinimum)
    }

    fn cloudnet(&self, after: &AfterPass) -> Option<StopReason> {
        let full = self.window.len() == WINDOW;
        let left = after.left_blocks;
        if full && self.window.iter().all(|earlier| left < *earlier) {
            return Some(StopReason::LocalMinimum);
        }
        let with_now = self.window.iter().copied().chain([left]);
        let rising = full && with_now.is_sorted_by(|one, next| one < next);
        rising.then_some(StopReason::RisingTrend)
    }

    fn xen(&self, after: &AfterPass) -> Option<StopReason> {
        if self.passes >= XEN_PASSES {
            return Some(StopReason::Passes);
        }
        let sent_too_much = after.sent_blocks > XEN_SENT_TIMES * after.all_blocks;
        sent_too_much.then_some(StopReason::Bytes)
    }

    fn remember(&mut self, after: &AfterPass) {
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(match self.wish.rule {
            Rule::Predicted => after.left_bytes,
            Rule::CloudNet | Rule::Xen | Rule::Qemu => after.left_blocks,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);
    const OVER: Duration = Duration::from_secs(1);

    /// Returns the state after a pass, one per second, with this many pending blocks, which would
    /// take too long.
    fn after(pass: u64, left: u64) -> AfterPass {
        AfterPass {
            now: Duration::from_secs(pass),
            left_blocks: left,
            left_bytes: left,
            downtime: OVER,
            uncompressed: OVER,
            sent_blocks: 0,
            all_blocks: 1 << 20,
        }
    }

    fn by(rule: Rule, wait_s: u64) -> StopRule {
        StopRule::new(Wish {
            rule,
            downtime: LIMIT,
            wait: Duration::from_secs(wait_s),
        })
    }

    /// Returns after which of these passes the rule stops, from 0, and why.
    fn stops(rule: &mut StopRule, lefts: impl Iterator<Item = u64>) -> Option<(u64, StopReason)> {
        (0..)
            .zip(lefts)
            .find_map(|(pass, left)| Some((pass, rule.pass(&after(pass, left))?)))
    }

    #[test]
    fn it_stops_as_soon_as_the_downtime_fits() {
        let mut rule = by(Rule::Predicted, 0);
        assert_eq!(rule.pass(&after(0, 1 << 30)), None);
        let fits = AfterPass {
            downtime: LIMIT,
            ..after(1, 100)
        };
        assert_eq!(rule.pass(&fits), Some(StopReason::WithinLimit));
        assert_eq!(rule.too_fast_since(), None);
    }

    #[test]
    fn it_goes_on_while_less_and_less_is_left() {
        let mut rule = by(Rule::Predicted, 0);
        let lefts = (0..40).map(|pass| (1e12 * 0.8f64.powi(pass)) as u64);
        assert_eq!(stops(&mut rule, lefts), None);
    }

    #[test]
    fn it_takes_a_local_minimum_when_nothing_helps() {
        let mut rule = by(Rule::Predicted, 0);
        let lefts = [100, 95, 99, 97, 98, 96, 99, 101, 94];
        let stopped = stops(&mut rule, lefts.into_iter());
        assert_eq!(stopped, Some((8, StopReason::LocalMinimum)));
    }

    #[test]
    fn it_does_not_wait_for_ever_for_a_minimum() {
        let mut rule = by(Rule::Predicted, 0);
        let stopped = stops(&mut rule, (0..).map(|pass| 100 + pass));
        assert_eq!(stopped, Some((10, StopReason::LocalMinimum)));
    }

    #[test]
    fn it_waits_for_a_quieter_moment_as_long_as_it_is_told() {
        let mut rule = by(Rule::Predicted, 60);
        let stopped = stops(&mut rule, std::iter::repeat(100));
        assert_eq!(stopped, Some((65, StopReason::WaitedEnough)));
        assert_eq!(rule.too_fast_since(), Some(Duration::from_secs(5)));
        let mut rule = by(Rule::Predicted, 60);
        assert_eq!(stops(&mut rule, std::iter::repeat_n(100, 30)), None);
        let quiet = AfterPass {
            downtime: LIMIT,
            ..after(30, 1)
        };
        assert_eq!(rule.pass(&quiet), Some(StopReason::WithinLimit));
    }

    #[test]
    fn cloudnet_takes_what_is_below_its_window_and_sees_a_trend() {
        let lefts = [50, 20, 30, 25, 40, 21, 20, 19];
        let stopped = stops(&mut by(Rule::CloudNet, 0), lefts.into_iter());
        assert_eq!(stopped, Some((7, StopReason::LocalMinimum)));
        let stopped = stops(&mut by(Rule::CloudNet, 0), 10..);
        assert_eq!(stopped, Some((5, StopReason::RisingTrend)));
    }

    #[test]
    fn xen_counts() {
        let stopped = stops(&mut by(Rule::Xen, 0), std::iter::repeat(1000));
        assert_eq!(stopped, Some((29, StopReason::Passes)));
        let stopped = stops(&mut by(Rule::Xen, 0), [1000, 49].into_iter());
        assert_eq!(stopped, Some((1, StopReason::WithinLimit)));
        let much = AfterPass {
            sent_blocks: (3 << 20) + 1,
            ..after(0, 1000)
        };
        assert_eq!(by(Rule::Xen, 0).pass(&much), Some(StopReason::Bytes));
    }

    #[test]
    fn qemu_waits_for_uncompressed_bytes_to_fit() {
        let mut rule = by(Rule::Qemu, 600);
        let compresses_well = AfterPass {
            downtime: Duration::ZERO,
            ..after(0, 1000)
        };
        assert_eq!(rule.pass(&compresses_well), None);
        let fits = AfterPass {
            uncompressed: LIMIT,
            ..after(1, 1000)
        };
        assert_eq!(rule.pass(&fits), Some(StopReason::WithinLimit));
        let stopped = stops(&mut by(Rule::Qemu, 600), std::iter::repeat(1000));
        assert_eq!(stopped, Some((600, StopReason::WaitedEnough)));
    }
}
