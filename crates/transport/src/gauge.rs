//! Tells when the rate of a link is known: once it no longer grows from round to round.

use std::collections::VecDeque;
use std::time::Duration;

/// Growth in a round from which on the sender is still accelerating.
const GROWTH: f64 = 1.25;
/// Number of rounds without such growth after which the link counts as full. Both are those of BBR
/// (draft-ietf-ccwg-bbr, section 5.3.1.2).
const ROUNDS_FULL: u32 = 3;
/// The shortest round.
const ROUND_MIN: Duration = Duration::from_millis(150);
/// Number of rounds whose rates are kept.
const ROUNDS_KEPT: usize = 12;

/// The rate of a link, in the unit of its samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkRate {
    /// The lowest of the latest rounds.
    pub low: f64,
    /// Their median.
    pub likely: f64,
    /// The highest of them.
    pub high: f64,
}

/// Collects samples of a link's rate, taken while there is always something to send.
#[derive(Debug, Clone, Default)]
pub struct LinkGauge {
    round: Option<Round>,
    best: f64,
    full_rounds: u32,
    rates: VecDeque<f64>,
}

#[derive(Debug, Clone, Copy)]
struct Round {
    ends_at: Duration,
    sum: f64,
    samples: u32,
}

impl LinkGauge {
    /// Adds a sample. A round lasts for a round trip.
    pub fn add(&mut self, now: Duration, rtt: Duration, rate: f64) {
        if !rate.is_finite() || rate <= 0.0 {
            return;
        }
        let new = Round {
            ends_at: now + rtt.max(ROUND_MIN),
            sum: 0.0,
            samples: 0,
        };
        let mut round = *self.round.get_or_insert(new);
        if now >= round.ends_at {
            if round.samples > 0 {
                self.end_round(round.sum / f64::from(round.samples));
            }
            round = new;
        }
        round.sum += rate;
        round.samples += 1;
        self.round = Some(round);
    }

    fn end_round(&mut self, rate: f64) {
        if rate > self.best * GROWTH {
            (self.best, self.full_rounds) = (rate, 0);
            self.rates.clear();
        } else {
            self.full_rounds += 1;
        }
        self.rates.push_back(rate);
        if self.rates.len() > ROUNDS_KEPT {
            self.rates.pop_front();
        }
    }

    /// Returns the rate, once it is known.
    pub fn known(&self) -> Option<LinkRate> {
        (self.full_rounds >= ROUNDS_FULL).then(|| self.so_far())?
    }

    /// Returns the rate so far, which may still grow; `None` before the first round has ended.
    pub fn so_far(&self) -> Option<LinkRate> {
        let mut rates: Vec<f64> = self.rates.iter().copied().collect();
        rates.sort_by(f64::total_cmp);
        Some(LinkRate {
            low: *rates.first()?,
            likely: *rates.get(rates.len() / 2)?,
            high: *rates.last()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(300);

    /// Adds 100 samples a second of a rate that doubles in each round trip, up to a limit.
    fn starting(limit: f64, seconds: u32) -> LinkGauge {
        let mut gauge = LinkGauge::default();
        for sample in 0..seconds * 100 {
            let now = Duration::from_millis(10) * sample;
            let doublings = now.as_secs_f64() / RTT.as_secs_f64();
            gauge.add(now, RTT, (1e5 * doublings.exp2()).min(limit));
        }
        gauge
    }

    #[test]
    fn a_rate_that_still_grows_is_not_known() {
        let gauge = starting(1e12, 3);
        assert_eq!(gauge.known(), None);
        assert!(gauge.so_far().is_some());
    }

    #[test]
    fn a_rate_is_known_three_rounds_after_it_stops_growing() {
        // It is full after 6 rounds, 1.8 s.
        assert_eq!(starting(6.4e6, 2).known(), None);
        let known = starting(6.4e6, 4).known().unwrap();
        assert!((known.likely / 6.4e6 - 1.0).abs() < 0.01, "{known:?}");
        assert!(known.low > 5e6, "no round of the start counts: {known:?}");
    }

    #[test]
    fn a_rate_that_varies_has_a_range() {
        let mut gauge = LinkGauge::default();
        for round in 0..20_u32 {
            let rate = if round % 2 == 0 { 8e6 } else { 1e7 };
            for sample in 0..30 {
                let now = RTT * round + Duration::from_millis(10) * sample;
                gauge.add(now, RTT, rate);
            }
        }
        let known = gauge.known().unwrap();
        assert!(known.low < 8.5e6 && known.high > 9.5e6, "{known:?}");
    }

    #[test]
    fn samples_that_say_nothing_are_left_out() {
        let mut gauge = LinkGauge::default();
        for sample in 0..100_u32 {
            gauge.add(Duration::from_millis(100) * sample, RTT, 0.0);
            gauge.add(Duration::from_millis(100) * sample, RTT, f64::NAN);
        }
        assert_eq!(gauge.so_far(), None);
    }
}
