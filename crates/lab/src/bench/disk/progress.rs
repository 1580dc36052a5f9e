//! What a guest got done, operation by operation, and how that compares with a guest that nobody moved.

use crate::arena::Beat;
use std::time::Instant;

/// How many operations had been done when.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Progress {
    /// In the order of time; those moments at which it became more.
    steps: Vec<(Instant, u64)>,
    /// What is looked at.
    began: Instant,
    ended: Instant,
}

/// How a guest fared beside one that did the same undisturbed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Relative {
    /// How fast it was.
    pub(super) throughput: f64,
    /// How much longer it took, in seconds.
    pub(super) lost_s: f64,
}

impl Progress {
    /// What heartbeats tell, and which time is looked at.
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

    /// How fast this guest did what it did in the time that is looked at, relative to one that did the same
    /// undisturbed. Both do the same operations in the same order, some faster than others: so it is not
    /// rates that are compared, but the times that the same operations took. `None` where it did too little.
    pub(super) fn relative_to(&self, undisturbed: &Self) -> Option<Relative> {
        let (first, last) = (self.done_at(self.began)?, self.done_at(self.ended)?);
        if last <= first {
            return None;
        }
        // A guest that has done all that there was does nothing for the rest of the time.
        let took = (self.reached(last)? - self.began).as_secs_f64();
        let undisturbed_s = undisturbed.took(first, last)?;
        (took > 0.0).then(|| Relative {
            throughput: undisturbed_s / took,
            lost_s: took - undisturbed_s,
        })
    }

    /// How long it took from one operation to a later one. What comes after its end it would have done as
    /// fast as what came before.
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

    /// What was done at a time.
    fn done_at(&self, at: Instant) -> Option<u64> {
        let next = self.steps.partition_point(|(when, _)| *when <= at);
        Some(self.steps.get(next.checked_sub(1)?)?.1)
    }

    /// When so much was done.
    fn reached(&self, operations: u64) -> Option<Instant> {
        let step = self.steps.partition_point(|(_, done)| *done < operations);
        self.steps.get(step).map(|(when, _)| *when)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// A guest that does the next operation at each of these times, in ms; looked at between two.
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
        // 100 slow ones, then 100 quick ones.
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
        // The rate of the quick ones alone says nothing.
        let quick = progress(start, usual(10, 2), [1000, 1200]);
        let relative = quick.relative_to(&undisturbed).unwrap().throughput;
        assert!((relative - 1.0).abs() < 0.02, "{relative}");
        // All was done long before the end.
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
