//! Models the path of a bulk sender beyond BBR: random losses, late timers, competing flows.
//!
//! BBR slows down after every loss outside its probes, and so reaches 0.7 of the rate of a path
//! with 1 % of random losses. Data that the pacer could not send because the timers of a busy
//! machine were late is not sent at all, and BBR takes the result for the path's rate, repeatedly.
//! And it leaves little to a TCP flow that starts beside it. The figures are in
//! `docs/decisions/0003-quic-library.md`.

use std::time::{Duration, Instant};

/// The share of lost packets that counts as random: what BBR itself tolerates while it probes.
const CHANCE_LOSS: f64 = 0.02;
/// The number of round trips over which the share is averaged, about.
const LOSS_OVER_ROUNDS: f64 = 4.0;
/// A queue exists when the round trip exceeds its minimum by this share and time.
const QUEUE_SHARE: f64 = 0.1;
const QUEUE_MIN: Duration = Duration::from_millis(4);
/// The time over which the share of time with a queue is averaged, about.
const QUEUE_OVER: Duration = Duration::from_secs(1);
/// The share from which the queue is not (only) our own: probing makes one for a moment.
const COMPANY_FROM: f64 = 0.4;
const COMPANY_SURE: f64 = 0.7;
/// The share left to others then, and for how long: until they have started. Yielding for good
/// would leave them everything, because a measurement at a lower rate yields a lower rate.
const YIELD: f64 = 0.2;
const YIELD_FOR_S: f64 = 8.0;
/// The maximum debt of the pacer that is made up for, in time at the current rate, and how fast.
const OWED_MAX_S: f64 = 0.05;
const MAKE_UP: f64 = 0.5;

/// The observations of the path so far.
#[derive(Debug, Clone)]
pub(crate) struct Road {
    acked: f64,
    lost: f64,
    queued: f64,
    yielded_s: f64,
    owed_s: f64,
    sent_at: Instant,
    rtt: Duration,
    at: Instant,
}

impl Road {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            acked: 0.0,
            lost: 0.0,
            queued: 0.0,
            yielded_s: 0.0,
            owed_s: 0.0,
            sent_at: now,
            rtt: Duration::ZERO,
            at: now,
        }
    }

    /// Records that bytes arrived, at this smoothed round-trip time.
    pub(crate) fn on_ack(&mut self, now: Instant, bytes: u64, rtt: Duration, rtt_min: Duration) {
        let queue = rtt.saturating_sub(rtt_min);
        let passed = self.pass(now);
        let kept = (-passed / QUEUE_OVER.as_secs_f64()).exp();
        let queued = queue > rtt_min.mul_f64(QUEUE_SHARE).max(QUEUE_MIN);
        self.queued = self.queued * kept + if queued { 1.0 - kept } else { 0.0 };
        if queued {
            // The path lost nothing: the window held the data back.
            self.owed_s = self.owed_s.min(0.0);
        }
        let change = if self.company() > 0.0 {
            passed
        } else {
            -passed
        };
        self.yielded_s = (self.yielded_s + change).clamp(0.0, YIELD_FOR_S);
        self.rtt = rtt;
        self.acked += bytes as f64;
    }

    /// Records lost bytes, and returns whether the losses exceed random ones.
    pub(crate) fn on_lost(&mut self, now: Instant, bytes: u64) -> bool {
        self.pass(now);
        self.lost += bytes as f64;
        self.is_congested()
    }

    /// Returns whether losses exceed random ones.
    pub(crate) fn is_congested(&self) -> bool {
        self.lost > CHANCE_LOSS * (self.lost + self.acked)
    }

    /// Records that bytes were sent at a time when `rate` was the target.
    pub(crate) fn on_sent(&mut self, now: Instant, bytes: u64, rate: u64) {
        let passed = now.saturating_duration_since(self.sent_at).as_secs_f64();
        self.sent_at = now;
        let sent_s = bytes as f64 / rate.max(1) as f64;
        self.owed_s = (self.owed_s + passed - sent_s).clamp(-OWED_MAX_S, OWED_MAX_S);
    }

    /// Returns the factor for the target rate that makes up for the pacer's debt.
    pub(crate) fn make_up(&self) -> f64 {
        1.0 + MAKE_UP * (self.owed_s / OWED_MAX_S).max(0.0)
    }

    /// Returns the factor for rate and window that lets others start.
    pub(crate) fn yielding(&self) -> f64 {
        let patience = 1.0 - self.yielded_s / YIELD_FOR_S;
        1.0 - YIELD * patience * self.company()
    }

    /// Returns how certain it is, from 0 to 1, that others use the path.
    fn company(&self) -> f64 {
        ((self.queued - COMPANY_FROM) / (COMPANY_SURE - COMPANY_FROM)).clamp(0.0, 1.0)
    }

    fn pass(&mut self, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        let over = LOSS_OVER_ROUNDS * self.rtt.as_secs_f64().max(0.01);
        let kept = (-passed / over).exp();
        self.acked *= kept;
        self.lost *= kept;
        passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(80);
    const PACKET: Duration = Duration::from_micros(120);

    /// Sends packets, of which every `lose_every`-th is lost, and returns how many losses were
    /// passed on.
    fn losses_passed_on(lose_every: u32) -> u32 {
        let start = Instant::now();
        let mut road = Road::new(start);
        let mut passed_on = 0;
        for number in 1..=20_000 {
            let now = start + PACKET * number;
            if number % lose_every == 0 {
                passed_on += u32::from(road.on_lost(now, 1400));
            } else {
                road.on_ack(now, 1400, RTT, RTT);
            }
        }
        passed_on
    }

    #[test]
    fn chance_losses_are_borne_and_heavy_ones_are_not() {
        assert_eq!(losses_passed_on(100), 0);
        assert!(losses_passed_on(20) > 900);
    }

    #[test]
    fn an_old_loss_is_forgotten() {
        let start = Instant::now();
        let mut road = Road::new(start);
        assert!(road.on_lost(start, 1_000_000));
        for number in 1..=20_000 {
            road.on_ack(start + PACKET * number, 1400, RTT, RTT);
        }
        assert!(!road.is_congested());
    }

    #[test]
    fn a_new_queue_is_yielded_to_for_a_while_and_a_passing_one_is_not() {
        let start = Instant::now();
        let mut road = Road::new(start);
        let mut now = start;
        let mut run = |road: &mut Road, rtt: Duration, packets: u32| {
            let mut least = 1.0f64;
            for _ in 0..packets {
                now += PACKET;
                road.on_ack(now, 1400, rtt, RTT);
                least = least.min(road.yielding());
            }
            (least, road.yielding())
        };
        let nothing = (1.0, 1.0);
        assert_eq!(run(&mut road, RTT, 10_000), nothing);
        assert_eq!(run(&mut road, RTT * 5 / 4, 2_000), nothing);
        let (least, last) = run(&mut road, RTT * 3 / 2, 100_000);
        assert!((0.8..0.86).contains(&least), "{least}");
        assert!((last - 1.0).abs() < 1e-9, "{last}");
        // After the path was free for the same time, the next flow is let start too.
        assert_eq!(run(&mut road, RTT, 100_000).1, 1.0);
        let (least, _) = run(&mut road, RTT * 3 / 2, 20_000);
        assert!((0.8..0.86).contains(&least), "{least}");
    }

    #[test]
    fn what_late_timers_cost_is_made_up_for_and_no_more() {
        const RATE: u64 = 10_000_000;
        let start = Instant::now();
        let mut road = Road::new(start);
        let mut sent = 0;
        // The timer fires every 3 ms, and the pacer has forgotten all but 2 ms of it.
        for tick in 1..=1000 {
            let now = start + Duration::from_millis(3) * tick;
            let bytes = (RATE as f64 * 0.002 * road.make_up()) as u64;
            road.on_sent(now, bytes, RATE);
            sent += bytes;
        }
        let share = sent as f64 / (RATE as f64 * 3.0);
        assert!((0.95..1.001).contains(&share), "{share}");
        // Nothing is made up for while there is a queue.
        assert!(road.make_up() > 1.2);
        let end = start + Duration::from_secs(3);
        road.on_ack(end, 1400, RTT * 3 / 2, RTT);
        assert_eq!(road.make_up(), 1.0);
        // Time without data to send is made up for only briefly.
        let later = start + Duration::from_secs(60);
        road.on_sent(later, 0, RATE);
        for tick in 1..=200 {
            let bytes = (RATE as f64 * 0.001 * road.make_up()) as u64;
            road.on_sent(later + Duration::from_millis(tick), bytes, RATE);
        }
        assert!(road.make_up() < 1.1, "{}", road.make_up());
    }
}
