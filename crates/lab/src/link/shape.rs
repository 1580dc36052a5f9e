//! Models one direction of an emulated link on a virtual clock: computes for each frame when it
//! arrives at the other end, or why it is lost.
//!
//! ```text
//! offer ── cut? ── lost? ── queue full? ── serialised at the rate ── delay ± jitter ── arrives
//!            │       │          │
//!            └───────┴──────────┴─────────── dropped
//! ```

use std::time::Duration;

use super::spec::LinkSpec;

/// The fate of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It arrives at this time.
    Arrives(Duration),
    /// It never arrives.
    Dropped(Drop),
}

/// Why a frame is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drop {
    /// The link is cut.
    Cut,
    /// A random loss.
    Loss,
    /// The queue before it is full.
    Queue,
}

/// One direction of a link.
#[derive(Debug)]
pub struct Direction {
    spec: LinkSpec,
    random: Random,
    /// When the last accepted frame will have left the sender.
    idle_at: Duration,
    /// When the last accepted frame arrives; frames are never reordered.
    last_arrival: Duration,
    cut_until: Duration,
}

impl Direction {
    /// Creates an idle direction of a link; the seed decides which frames are lost.
    pub fn new(spec: LinkSpec, seed: u64) -> Self {
        Self {
            spec,
            random: Random(seed),
            idle_at: Duration::ZERO,
            last_arrival: Duration::ZERO,
            cut_until: Duration::ZERO,
        }
    }

    /// Accepts a frame that arrived at the link between `since` and `now`, in order of time. If the
    /// link was busy until some time in between, the frame follows without a gap: a late caller
    /// does not slow a busy link down. On an idle link its arrival is `now`.
    pub fn offer(&mut self, since: Duration, now: Duration, frame_bytes: usize) -> Fate {
        if self.is_cut(now) {
            return Fate::Dropped(Drop::Cut);
        }
        // One draw a frame in every case, so that a seed loses the same frames at any rate.
        let (lost, jitter) = (self.random.share(), self.random.share());
        if lost < self.spec.loss {
            return Fate::Dropped(Drop::Loss);
        }
        let starts = if self.idle_at >= since {
            self.idle_at
        } else {
            now
        };
        if self.bytes_in(starts.saturating_sub(now)) + frame_bytes as u64 > self.spec.queue_bytes {
            return Fate::Dropped(Drop::Queue);
        }
        self.idle_at = starts + self.time_of(frame_bytes);
        let delay = self.spec.rtt / 2 + self.spec.jitter.mul_f64(2.0 * jitter);
        let arrival = (self.idle_at + delay).saturating_sub(self.spec.jitter);
        self.last_arrival = self.last_arrival.max(arrival);
        Fate::Arrives(self.last_arrival)
    }

    /// Drops every frame until then, those on their way included.
    pub fn cut(&mut self, until: Duration) {
        self.cut_until = until;
    }

    /// Returns whether a frame at the link's end now is lost to a cut.
    pub fn is_cut(&self, now: Duration) -> bool {
        now < self.cut_until
    }

    /// Changes the link; accepted frames keep their time of arrival.
    pub fn change(&mut self, spec: LinkSpec) {
        self.spec = spec;
    }

    fn time_of(&self, bytes: usize) -> Duration {
        Duration::from_nanos((bytes as u64 * 8).saturating_mul(1_000_000_000) / self.spec.rate_bps)
    }

    fn bytes_in(&self, time: Duration) -> u64 {
        (time.as_secs_f64() * self.spec.rate_bps as f64 / 8.0) as u64
    }
}

/// SplitMix64: a small generator whose sequence depends on nothing but its seed.
#[derive(Debug)]
struct Random(u64);

impl Random {
    /// Returns a number from 0 up to, not including, 1.
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(text: &str) -> Direction {
        Direction::new(text.parse().unwrap(), 1)
    }

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn a_lone_frame_takes_its_length_and_half_the_round_trip() {
        // 1250 bytes at 10 Mbit/s are 1 ms.
        let mut link = link("10mbit,20ms");
        assert_eq!(link.offer(ms(5), ms(5), 1250), Fate::Arrives(ms(16)));
        assert_eq!(link.offer(ms(100), ms(100), 1250), Fate::Arrives(ms(111)));
    }

    #[test]
    fn frames_offered_at_once_leave_at_the_rate() {
        let mut link = link("10mbit,20ms");
        for n in 1..=20 {
            assert_eq!(link.offer(ms(0), ms(0), 1250), Fate::Arrives(ms(10 + n)));
        }
    }

    #[test]
    fn an_overloaded_link_carries_its_rate_and_drops_the_rest() {
        let mut link = link("100mbit,20ms,queue=100KiB");
        let (mut carried, mut dropped) = (0_u64, 0_u64);
        // Twice the rate for ten seconds: 1250 bytes every 50 us.
        for n in 0..200_000 {
            match link.offer(
                Duration::from_micros(50 * n),
                Duration::from_micros(50 * n),
                1250,
            ) {
                Fate::Arrives(_) => carried += 1250,
                Fate::Dropped(why) => {
                    assert_eq!(why, Drop::Queue);
                    dropped += 1;
                }
            }
        }
        let rate_bps = (carried * 8) as f64 / 10.0;
        assert!((rate_bps / 1e8 - 1.0).abs() < 0.005, "{rate_bps}");
        assert!((99_000..=100_000).contains(&dropped), "{dropped}");
    }

    #[test]
    fn the_queue_holds_its_bytes_and_not_one_more() {
        let mut link = link("10mbit,20ms,queue=5000B");
        for _ in 0..4 {
            assert!(matches!(link.offer(ms(0), ms(0), 1250), Fate::Arrives(_)));
        }
        assert_eq!(link.offer(ms(0), ms(0), 1250), Fate::Dropped(Drop::Queue));
        assert_eq!(link.offer(ms(0), ms(0), 60), Fate::Dropped(Drop::Queue));
        // After 1 ms one frame has left.
        assert_eq!(link.offer(ms(1), ms(1), 1250), Fate::Arrives(ms(15)));
    }

    #[test]
    fn loss_is_the_share_asked_for_and_repeats_with_the_seed() {
        let lost = |seed: u64, rate: &str| -> Vec<usize> {
            let mut link = Direction::new(format!("{rate},20ms,loss=1%").parse().unwrap(), seed);
            (0..200_000)
                .filter(|n| {
                    link.offer(ms(*n as u64), ms(*n as u64), 60) == Fate::Dropped(Drop::Loss)
                })
                .collect()
        };
        let first = lost(7, "10mbit");
        assert!((1_850..2_150).contains(&first.len()), "{}", first.len());
        assert_eq!(first, lost(7, "10mbit"));
        assert_eq!(
            first,
            lost(7, "1gbit"),
            "the rate does not change which are lost"
        );
        assert_ne!(first, lost(8, "10mbit"));
        // Independent: consecutive losses are about 1 % of the losses.
        let pairs = first
            .windows(2)
            .filter(|pair| pair[1] == pair[0] + 1)
            .count();
        assert!(pairs < 60, "{pairs}");
    }

    #[test]
    fn jitter_spreads_the_delay_and_keeps_the_order() {
        let mut link = link("1gbit,20ms,jitter=2ms");
        let mut last = Duration::ZERO;
        let (mut least, mut most) = (Duration::MAX, Duration::ZERO);
        for n in 0..10_000 {
            let sent = ms(10 * n);
            let Fate::Arrives(at) = link.offer(sent, sent, 125) else {
                panic!("dropped");
            };
            assert!(at >= last);
            last = at;
            least = least.min(at - sent);
            most = most.max(at - sent);
        }
        assert!(
            least >= ms(8) && least < Duration::from_micros(8_100),
            "{least:?}"
        );
        assert!(most <= ms(12) + Duration::from_micros(1), "{most:?}");
        assert!(most > Duration::from_micros(11_900), "{most:?}");
        let at_once: Vec<Fate> = (0..100).map(|_| link.offer(last, last, 125)).collect();
        assert!(at_once.is_sorted_by_key(|fate| match fate {
            Fate::Arrives(at) => *at,
            Fate::Dropped(_) => panic!("dropped"),
        }));
    }

    #[test]
    fn a_cut_loses_what_comes_and_what_is_under_way() {
        let mut link = link("10mbit,20ms");
        assert_eq!(link.offer(ms(0), ms(0), 1250), Fate::Arrives(ms(11)));
        link.cut(ms(5_000));
        assert!(
            link.is_cut(ms(11)),
            "the frame under way is lost when it would arrive"
        );
        assert_eq!(
            link.offer(ms(4_999), ms(4_999), 1250),
            Fate::Dropped(Drop::Cut)
        );
        assert!(!link.is_cut(ms(5_000)));
        assert_eq!(
            link.offer(ms(5_000), ms(5_000), 1250),
            Fate::Arrives(ms(5_011))
        );
    }

    #[test]
    fn a_change_takes_hold_for_the_frames_after_it() {
        let mut link = link("10mbit,20ms");
        assert_eq!(link.offer(ms(0), ms(0), 1250), Fate::Arrives(ms(11)));
        link.change("100mbit,40ms".parse().unwrap());
        assert_eq!(
            link.offer(ms(50), ms(50), 1250),
            Fate::Arrives(Duration::from_micros(70_100))
        );
    }

    #[test]
    fn a_late_look_keeps_a_busy_link_busy_and_makes_no_idle_one_faster() {
        let mut link = link("10mbit,20ms");
        assert_eq!(link.offer(ms(0), ms(0), 1250), Fate::Arrives(ms(11)));
        // Busy until 1 ms; a frame from between 0.5 and 3 ms is assumed to have waited.
        let since = Duration::from_micros(500);
        assert_eq!(link.offer(since, ms(3), 1250), Fate::Arrives(ms(12)));
        assert_eq!(link.offer(since, ms(3), 1250), Fate::Arrives(ms(13)));
        // Idle since 3 ms.
        assert_eq!(link.offer(ms(8), ms(10), 1250), Fate::Arrives(ms(21)));
    }
}
