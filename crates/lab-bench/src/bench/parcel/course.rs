//! Records how a guest's work goes on, operation by operation.

use longhaul_lab::arena::Beat;
use std::time::{Duration, Instant};

/// The number of completed operations over time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Course {
    /// The moments at which the number grew, in the order of time.
    steps: Vec<(Instant, u64)>,
}

impl Course {
    /// Returns the course from heartbeats.
    pub(super) fn of(beats: &[Beat]) -> Self {
        let mut steps: Vec<(Instant, u64)> = Vec::new();
        for beat in beats {
            let done = beat.work.unwrap_or(0);
            if steps.last().is_none_or(|(_, before)| done > *before) {
                steps.push((beat.at, done));
            }
        }
        Self { steps }
    }

    /// Returns the number of operations completed at a time.
    fn done_at(&self, at: Instant) -> u64 {
        let next = self.steps.partition_point(|(when, _)| *when <= at);
        let last = next.checked_sub(1).and_then(|last| self.steps.get(last));
        last.map_or(0, |(_, done)| *done)
    }

    /// Returns the operations per second over all these periods together; `None` without any.
    pub(super) fn per_s(&self, periods: &[[Instant; 2]]) -> Option<f64> {
        let done = periods
            .iter()
            .map(|[began, ended]| self.done_at(*ended) - self.done_at(*began));
        let time = periods.iter().map(|[began, ended]| *ended - *began);
        let time: Duration = time.sum();
        (time > Duration::ZERO).then(|| done.sum::<u64>() as f64 / time.as_secs_f64())
    }

    /// Returns the operations of each second of a period; a part of a second at its end is left
    /// out.
    pub(super) fn per_second(&self, [began, ended]: [Instant; 2]) -> Vec<u64> {
        let seconds = (ended - began).as_secs();
        let at = |second| self.done_at(began + Duration::from_secs(second));
        (0..seconds)
            .map(|second| at(second + 1) - at(second))
            .collect()
    }

    /// Returns the longest time within a period in which no operation was completed, in ms.
    pub(super) fn longest_silence_ms(&self, [began, ended]: [Instant; 2]) -> f64 {
        let steps = self.steps.iter().map(|(at, _)| *at);
        let within = steps.filter(|at| (began..ended).contains(at));
        let mut before = began;
        let mut longest = Duration::ZERO;
        for at in within.chain([ended]) {
            longest = longest.max(at - before);
            before = at;
        }
        longest.as_secs_f64() * 1e3
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_silences_are_those_of_the_period() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let beat = |(ms, done): (u64, u64)| Beat {
            at: at(ms),
            number: ms,
            clock_us: 0,
            writes: 0,
            verified: 0,
            errors: 0,
            work: Some(done),
        };
        // 10 operations each 100 ms; nothing from 1 s to 1.7 s.
        let times = (0..=10).chain(17..=40).map(|tenth| tenth * 100);
        let beats: Vec<Beat> = times.zip(0..).map(|(ms, n)| beat((ms, n * 10))).collect();
        let course = Course::of(&beats);
        assert_eq!(course.per_s(&[[at(0), at(1000)]]), Some(100.0));
        assert_eq!(course.per_s(&[[at(1000), at(2000)]]), Some(40.0));
        let both = course.per_s(&[[at(0), at(1000)], [at(1000), at(2000)]]);
        assert_eq!(both, Some(70.0));
        assert_eq!(course.per_s(&[]), None);
        assert_eq!(course.per_second([at(0), at(2500)]), [100, 40]);
        assert!((course.longest_silence_ms([at(500), at(3000)]) - 700.0).abs() < 1.0);
        // A silence counts from the beginning of the period, and to its end.
        assert!((course.longest_silence_ms([at(1200), at(1600)]) - 400.0).abs() < 1.0);
        assert!((course.longest_silence_ms([at(2000), at(3000)]) - 100.0).abs() < 1.0);
    }
}
