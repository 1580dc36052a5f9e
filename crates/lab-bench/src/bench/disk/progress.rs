//! Records a guest's progress, operation by operation, and compares it with a guest that was not
//! moved.

use longhaul_lab::arena::Beat;
use std::time::Instant;

/// The number of completed operations over time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Progress {
    /// The moments at which the number grew, in the order of time.
    steps: Vec<(Instant, u64)>,
    /// The period under comparison.
    began: Instant,
    ended: Instant,
}

/// A guest's performance relative to one with the same work and no move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Relative {
    /// The relative throughput.
    pub(super) throughput: f64,
    /// The additional time, in seconds.
    pub(super) lost_s: f64,
}

impl Progress {
    /// Returns the progress from heartbeats, for a period.
    pub(super) fn of(beats: &[Beat], [began, ended]: [Instant; 2]) -> Self {
        let mut steps: Vec<(Instant, u64)> = Vec::new();
        for beat in beats {
            let done = beat.work.unwrap_or(0);
            if steps.last().is_none_or(|(_, before)| done > *before) {
                steps.push((beat.at, done));
            }
        }
        Self {
            steps,
            began,
            ended,
        }
    }

    /// Returns how fast this guest did its operations of the period, relative to an undisturbed
    /// one. Both do the same operations in the same order, some faster than others: so the times
    /// for the same operations are compared, and not rates. `None` where it did too few.
    pub(super) fn relative_to(&self, undisturbed: &Self) -> Option<Relative> {
        let (first, last) = (self.done_at(self.began)?, self.done_at(self.ended)?);
        if last <= first {
            return None;
        }
        // A guest that has finished does nothing for the rest of the period.
        let took = (self.reached(last)? - self.began).as_secs_f64();
        let undisturbed_s = undisturbed.took(first, last)?;
        (took > 0.0).then(|| Relative {
            throughput: undisturbed_s / took,
            lost_s: took - undisturbed_s,
        })
    }

    /// Returns the time from one operation to a later one. Operations after the end of the data are
    /// assumed to be as fast as those before.
    fn took(&self, first: u64, last: u64) -> Option<f64> {
        let from = self.reached(first)?;
        if let Some(to) = self.reached(last) {
            return Some((to - from).as_secs_f64());
        }
        let (begin, end) = (self.done_at(self.began)?, self.done_at(self.ended)?);
        let seconds = (self.reached(end)? - self.began).as_secs_f64();
        let per_operation = seconds / end.checked_sub(begin)? as f64;
        let known = (self.reached(end)? - from).as_secs_f64();
        Some(known + (last - end) as f64 * per_operation)
    }

    /// Returns the number of operations completed at a time.
    fn done_at(&self, at: Instant) -> Option<u64> {
        let next = self.steps.partition_point(|(when, _)| *when <= at);
        Some(self.steps.get(next.checked_sub(1)?)?.1)
    }

    /// Returns when this number was reached.
    fn reached(&self, operations: u64) -> Option<Instant> {
        let step = self.steps.partition_point(|(_, done)| *done < operations);
        self.steps.get(step).map(|(when, _)| *when)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns a guest that completes the next operation at each of these times, in ms; the period
    /// is between two of them.
    fn progress(start: Instant, times: impl Iterator<Item = u64>, between: [u64; 2]) -> Progress {
        let at = |ms| start + Duration::from_millis(ms);
        let beat = |(number, ms): (u64, u64)| Beat {
            at: at(ms),
            number,
            clock_us: 0,
            writes: 0,
            verified: 0,
            errors: 0,
            work: Some(number),
        };
        let beats: Vec<Beat> = (0..).zip(times).map(beat).collect();
        Progress::of(&beats, between.map(at))
    }

    #[test]
    fn the_same_operations_are_compared() {
        let start = Instant::now();
        // 100 slow operations, then 100 fast ones.
        let usual = |slow: u64, quick: u64| {
            let first = (0..100).map(move |number| number * slow);
            let last = (0..100).map(move |number| 100 * slow + number * quick);
            first.chain(last)
        };
        let undisturbed = progress(start, usual(10, 2), [0, 1200]);
        let halved = progress(start, usual(20, 4), [400, 2400]);
        let relative = halved.relative_to(&undisturbed).unwrap();
        assert!((relative.throughput - 0.5).abs() < 0.01, "{relative:?}");
        assert!((relative.lost_s - 1.0).abs() < 0.02, "{relative:?}");
        // The rate of the fast ones alone would mislead.
        let quick = progress(start, usual(10, 2), [1000, 1200]);
        let relative = quick.relative_to(&undisturbed).unwrap().throughput;
        assert!((relative - 1.0).abs() < 0.02, "{relative}");
        // Everything was done long before the end.
        let idle = progress(start, usual(10, 2), [0, 90_000]);
        let relative = idle.relative_to(&undisturbed).unwrap().throughput;
        assert!((relative - 1.0).abs() < 0.01);
    }

    #[test]
    fn beyond_what_the_undisturbed_one_did_it_would_have_gone_on() {
        let start = Instant::now();
        let steady = |every: u64, count: u64| (0..count).map(move |number| number * every);
        let undisturbed = progress(start, steady(10, 100), [0, 990]);
        let longer = progress(start, steady(20, 400), [200, 7_980]);
        let relative = longer.relative_to(&undisturbed).unwrap().throughput;
        assert!((relative - 0.5).abs() < 0.01, "{relative}");
        let stuck = progress(start, steady(10, 100), [985, 5_000]);
        let none = progress(start, steady(10, 3), [100, 200]);
        assert!(stuck.relative_to(&undisturbed).is_some());
        assert_eq!(none.relative_to(&undisturbed), None);
    }
}
