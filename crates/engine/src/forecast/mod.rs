//! Predicts the cost of a move before it happens: data, time and downtime, each as a range.
//!
//! What is known of a guest, a link and a destination is uncertain. Each [`Guess`] has a median and
//! a spread, and [`forecast`] computes the move for combinations of them that are drawn at random:
//! the 5th, 50th and 95th percentile of the results are the ends of the range and its middle. This
//! is the propagation of distributions of JCGM 101:2008, section 5.
//!
//! A drawn move has a first pass over memory and disks, and further passes over what the guest
//! writes meanwhile. The guest writes to a working set: in a time `t` it changes `set · (1 -
//! exp(-x))` bytes of it, with `x = t · rate / set`. A block travels as it is when it is sent, so
//! of a pass that takes `t` those changes count that come after: `set · (1 - (1 - exp(-x)) / x)`
//! bytes. The guest stops when the remaining bytes fit the requested downtime. One that writes does
//! not stop before a second pass. Of a guest whose memory follows, further passes send what it has
//! written as long as each leaves clearly less.
//!
//! [`Learned`] corrects the ranges with the errors of earlier moves.

mod learned;

pub use learned::{Error, Learned};

use std::time::Duration;

/// Number of moves that are drawn.
const DRAWS: usize = 400;
/// How many of 100 figures lie in their range.
pub const LIKELIHOOD_PERCENT: u8 = 90;
/// Percentiles of the range's ends and of its middle.
const PERCENTILES: [f64; 3] = [0.05, 0.5, 0.95];
/// Number of passes in a drawn move. Later ones change little.
const PASSES_MAX: usize = 12;
/// Number of passes by which the stop rule finds that the guest cannot fit the requested downtime.
const PASSES_SETTLING: Guess = Guess::new(4.0, 0.4);
/// What a further pass over memory that follows leaves at most of what was left before.
const FURTHER_LEAVES: f64 = 0.85;
/// Time of a short pass without its round trip, in seconds.
const PASS_S: Guess = Guess::new(0.09, 0.7);
/// The pace of everything that is waited for, relative to the measured one: what else the hosts do.
const PACE: Guess = Guess::new(1.05, 0.15);
/// Bytes of a stop besides what the guest has written: the state of devices, and messages.
const LAST_BYTES: Guess = Guess::new(0.15e6, 0.9);
/// The part of stops in which a packet is lost, and what that costs, in round trips: it is noticed
/// after one, and sent again.
const LOSSES: f64 = 0.1;
const LOSS_ROUND_TRIPS: f64 = 2.0;
/// What no input accounts for: the rest of a move's time, relative to the sum of its parts.
const REST: Guess = Guess::new(1.0, 0.12);

/// An uncertain value that is not negative: its logarithm has a normal distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Guess {
    /// The median.
    pub likely: f64,
    /// The standard deviation of the logarithm.
    pub spread: f64,
}

impl Guess {
    /// Creates a guess.
    pub const fn new(likely: f64, spread: f64) -> Self {
        Self { likely, spread }
    }

    /// Creates a value that is known.
    pub const fn exactly(value: f64) -> Self {
        Self::new(value, 0.0)
    }

    /// Creates a guess from a range in which nine of ten values lie.
    pub fn between(low: f64, likely: f64, high: f64) -> Self {
        let spread = match low > 0.0 && high > low {
            true => (high / low).ln() / (2.0 * 1.645),
            false => 0.0,
        };
        Self::new(likely, spread)
    }

    fn draw(self, dice: &mut Dice) -> f64 {
        self.likely.max(0.0) * (self.spread * dice.normal()).exp()
    }
}

/// The memory that follows the guest to the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follows {
    /// None.
    Nothing,
    /// What the guest writes after its memory was sent, in as many passes as help.
    Written,
    /// All that was not sent before the stop.
    Everything,
}

/// What is known before a move. Bytes are those on the link, unless stated otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Inputs {
    /// Memory sent once, in bytes.
    pub memory_bytes: Guess,
    /// Disks sent once, in bytes.
    pub disk_bytes: Guess,
    /// The part of memory and disks that the destination lacks. At most 1.
    pub missing_share: Guess,
    /// Time that encoding all of it takes, in seconds.
    pub work_s: Guess,
    /// Rate of the link, in bytes per second.
    pub rate: Guess,
    /// Round-trip time of the link, in seconds.
    pub round_trip_s: f64,
    /// Time from the start of the move until blocks are sent, in seconds.
    pub before_s: Guess,
    /// Time that the link loses until it is full, in seconds.
    pub ramp_s: f64,
    /// Time from the first sent block until the destination can take the guest, in seconds.
    pub launch_s: Guess,
    /// Time from the handover to the end of the move, in seconds.
    pub after_s: Guess,
    /// Duration of a stop without the last blocks, in seconds.
    pub switchover_s: Guess,
    /// Rate at which the guest writes its memory, in bytes of the guest per second.
    pub written: Guess,
    /// Most bytes of the guest that it writes.
    pub written_most: f64,
    /// Bytes on the link for each written byte of the guest.
    pub written_share: Guess,
    /// The requested downtime.
    pub downtime: Duration,
    /// The memory that follows the guest.
    pub follows: Follows,
    /// What has been sent so far.
    pub sent: Option<Sent>,
}

/// The part of a move that is over.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    /// Time since the start of the move, in seconds.
    pub elapsed_s: f64,
    /// Time since the first block was sent, in seconds.
    pub sending_s: f64,
    /// Bytes sent.
    pub bytes: f64,
    /// Whether the guest is about to be stopped: it will have nothing but its last blocks to send.
    pub stops: bool,
}

/// A range and its middle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// Lower end.
    pub low: f64,
    /// Middle: the median.
    pub likely: f64,
    /// Upper end.
    pub high: f64,
}

/// The predicted cost of a move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// Bytes over the link.
    pub bytes: Range,
    /// Time from the start to the end, in seconds.
    pub total_s: Range,
    /// Time for which the guest is stopped, in seconds.
    pub downtime_s: Range,
    /// Time from the switchover until all memory has followed, in seconds.
    pub follows_s: Range,
    /// The share of drawn moves that miss the requested downtime.
    pub misses: f64,
}

/// Predicts a move.
pub fn forecast(inputs: &Inputs) -> Forecast {
    let mut dice = Dice::new();
    let moves: Vec<Drawn> = (0..DRAWS).map(|_| Drawn::of(inputs, &mut dice)).collect();
    let range = |of: fn(&Drawn) -> f64| {
        let mut values: Vec<f64> = moves.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let at = |percentile: f64| {
            let index = ((values.len() - 1) as f64 * percentile).round();
            values.get(index as usize).copied().unwrap_or(0.0)
        };
        let [low, likely, high] = PERCENTILES.map(at);
        Range { low, likely, high }
    };
    let misses = moves.iter().filter(|drawn| drawn.misses).count();
    Forecast {
        bytes: range(|drawn| drawn.bytes),
        total_s: range(|drawn| drawn.total_s),
        downtime_s: range(|drawn| drawn.downtime_s),
        follows_s: range(|drawn| drawn.follows_s),
        misses: misses as f64 / DRAWS as f64,
    }
}

/// The cost of one drawn move.
struct Drawn {
    bytes: f64,
    total_s: f64,
    downtime_s: f64,
    follows_s: f64,
    misses: bool,
}

impl Drawn {
    fn of(inputs: &Inputs, dice: &mut Dice) -> Self {
        let rate = inputs.rate.draw(dice).max(1.0);
        let missing = inputs.missing_share.draw(dice).min(1.0);
        let content = inputs.memory_bytes.draw(dice) + inputs.disk_bytes.draw(dice);
        let work_s = inputs.work_s.draw(dice);
        let [before_s, launch_s, after_s, switchover_s] = [
            inputs.before_s,
            inputs.launch_s,
            inputs.after_s,
            inputs.switchover_s,
        ]
        .map(|guess| guess.draw(dice));
        let [pace, rest] = [PACE, REST].map(|guess| guess.draw(dice));
        let lost_s = match dice.uniform() < LOSSES {
            true => LOSS_ROUND_TRIPS * inputs.round_trip_s,
            false => 0.0,
        };
        let switchover_s = switchover_s + lost_s;
        let elapsed_s = inputs.sent.map_or(0.0, |sent| sent.elapsed_s);
        let whole = |time_s: f64| elapsed_s + (time_s - elapsed_s).max(0.0) * rest;
        let short_pass_s = inputs.round_trip_s + PASS_S.draw(dice);
        let settling = PASSES_SETTLING.draw(dice);
        let written = inputs.written.draw(dice);
        let again = inputs.written_share.draw(dice).min(1.0);
        // What is not known: how long the guest stays within the pages that it writes now.
        let stays_s = Guess::new(5.0, 1.0).draw(dice);
        let set = (written * stays_s).min(inputs.written_most).max(1.0);
        let changed = |time_s: f64| {
            let part = time_s * written / set;
            let after_sending = match part > 1e-6 {
                true => 1.0 + (-part).exp_m1() / part,
                false => 0.5 * part,
            };
            set * after_sending * again
        };

        let first = content * missing;
        let (began_s, mut pass_s, mut bytes) = match inputs.sent {
            None => {
                let sending_s = (first / rate + inputs.ramp_s).max(work_s) * pace;
                let pass_s = sending_s.max(launch_s);
                (before_s, pass_s, first)
            }
            Some(sent) => {
                // What was sent is a part of the whole, of which as much is left as not yet sent.
                let whole = first.max(sent.bytes);
                let left = whole - sent.bytes;
                let work_s = match whole > 0.0 {
                    true => work_s * left / whole,
                    false => 0.0,
                };
                let left_s = (left / rate).max(work_s) * pace;
                let pass_s = (sent.sending_s + left_s).max(launch_s);
                (sent.elapsed_s - sent.sending_s, pass_s, whole)
            }
        };
        let stopping = inputs.sent.filter(|sent| sent.stops);
        if let (Follows::Nothing, Some(sent)) = (inputs.follows, stopping) {
            return Self {
                bytes: sent.bytes + changed(short_pass_s) + LAST_BYTES.draw(dice),
                total_s: whole(elapsed_s + switchover_s + after_s),
                downtime_s: switchover_s,
                follows_s: 0.0,
                misses: switchover_s > inputs.downtime.as_secs_f64(),
            };
        }
        if inputs.follows != Follows::Nothing {
            let mut sending_s = pass_s;
            let (mut stopped_at_s, mut follows) = (launch_s, 0.0);
            if inputs.follows == Follows::Written {
                follows = changed(pass_s);
                for _ in 1..PASSES_MAX {
                    let pass_s = (follows / rate).max(short_pass_s);
                    let left = changed(pass_s);
                    if follows / rate < inputs.round_trip_s || left > FURTHER_LEAVES * follows {
                        break;
                    }
                    bytes += follows;
                    sending_s += pass_s;
                    follows = left;
                }
                stopped_at_s = sending_s;
            }
            let sent_s = (sending_s + follows / rate).max(stopped_at_s + switchover_s);
            return Self {
                bytes: bytes + follows,
                total_s: whole(began_s + sent_s + after_s),
                downtime_s: switchover_s,
                follows_s: sent_s - stopped_at_s - switchover_s,
                misses: false,
            };
        }
        let budget_s = inputs.downtime.as_secs_f64() - switchover_s;
        let mut sending_s = pass_s;
        let mut left = changed(pass_s);
        if left > 0.0 {
            // QEMU names what was written in the first pass while that is still being sent.
            pass_s = (left / rate).max(short_pass_s);
            sending_s += pass_s;
            bytes += left;
            left = changed(pass_s);
        }
        for _ in 1..PASSES_MAX {
            if left / rate <= budget_s {
                break;
            }
            if budget_s <= 0.0 && left / rate < short_pass_s {
                // It will not get better.
                sending_s += settling * short_pass_s;
                bytes += settling * changed(short_pass_s);
                break;
            }
            pass_s = (left / rate).max(short_pass_s);
            sending_s += pass_s;
            bytes += left;
            left = changed(pass_s);
        }
        let downtime_s = switchover_s + left / rate;
        Self {
            bytes: bytes + left,
            total_s: whole(began_s + sending_s + downtime_s + after_s),
            downtime_s,
            follows_s: 0.0,
            misses: left / rate > budget_s,
        }
    }
}

/// Random numbers that are the same in each forecast: equal inputs give equal ranges.
struct Dice(u64);

impl Dice {
    fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    /// Returns a number from 0 to 1 (xorshift64*, Vigna, "An experimental exploration of
    /// Marsaglia's xorshift generators, scrambled", 2016).
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number of the standard normal distribution: the sum of twelve uniform ones has
    /// nearly that shape.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: f64 = 1e6;

    fn inputs() -> Inputs {
        Inputs {
            memory_bytes: Guess::new(100.0 * MB, 0.1),
            disk_bytes: Guess::exactly(0.0),
            missing_share: Guess::exactly(1.0),
            work_s: Guess::exactly(1.0),
            rate: Guess::exactly(10.0 * MB),
            round_trip_s: 0.02,
            before_s: Guess::exactly(0.5),
            ramp_s: 0.5,
            launch_s: Guess::exactly(2.0),
            after_s: Guess::exactly(0.5),
            switchover_s: Guess::exactly(0.1),
            written: Guess::exactly(0.0),
            written_most: 50.0 * MB,
            written_share: Guess::exactly(0.5),
            downtime: Duration::from_millis(300),
            follows: Follows::Nothing,
            sent: None,
        }
    }

    fn is_about(value: f64, expected: f64) -> bool {
        (value / expected - 1.0).abs() < 0.05
    }

    #[test]
    fn an_idle_guest_is_sent_once() {
        let Forecast {
            bytes,
            total_s,
            downtime_s,
            follows_s,
            misses,
        } = forecast(&inputs());
        assert!(is_about(bytes.likely, 100.0 * MB), "{bytes:?}");
        assert!(is_about(bytes.high / bytes.likely, 1.18), "{bytes:?}");
        assert!(is_about(bytes.likely / bytes.low, 1.18), "{bytes:?}");
        assert!(is_about(total_s.likely, 12.1), "{total_s:?}");
        assert!(is_about(downtime_s.likely, 0.1) && misses == 0.0);
        assert_eq!(follows_s.high, 0.0);
    }

    #[test]
    fn equal_inputs_give_equal_ranges() {
        assert_eq!(forecast(&inputs()), forecast(&inputs()));
    }

    #[test]
    fn the_slowest_part_decides() {
        let encoder = Inputs {
            work_s: Guess::exactly(30.0),
            ..inputs()
        };
        assert!(is_about(forecast(&encoder).total_s.likely, 32.6));
        let small = Inputs {
            memory_bytes: Guess::exactly(MB),
            ..inputs()
        };
        assert!(is_about(forecast(&small).total_s.likely, 3.1), "the launch");
    }

    #[test]
    fn what_the_destination_has_is_not_sent() {
        let known = Inputs {
            missing_share: Guess::exactly(0.1),
            ..inputs()
        };
        assert!(is_about(forecast(&known).bytes.likely, 10.0 * MB));
    }

    #[test]
    fn a_guest_that_writes_a_little_is_sent_in_more_passes() {
        let writes = |rate: f64, follows| {
            forecast(&Inputs {
                written: Guess::exactly(rate),
                follows,
                ..inputs()
            })
        };
        let slow = writes(4.0 * MB, Follows::Nothing);
        assert!(slow.bytes.likely > 105.0 * MB && slow.bytes.likely < 140.0 * MB);
        assert!(
            slow.downtime_s.high <= 0.301 && slow.misses < 0.05,
            "{slow:?}"
        );
        let fast = writes(60.0 * MB, Follows::Nothing);
        assert!(
            fast.downtime_s.likely > 1.0 && fast.misses > 0.9,
            "{fast:?}"
        );
        let hybrid = writes(60.0 * MB, Follows::Written);
        assert!(is_about(hybrid.downtime_s.likely, 0.1) && hybrid.misses == 0.0);
        assert!(hybrid.bytes.likely > 110.0 * MB);
        let postcopy = writes(60.0 * MB, Follows::Everything);
        assert!(is_about(postcopy.bytes.likely, 100.0 * MB));
        assert!(postcopy.follows_s.likely > 5.0, "{postcopy:?}");
    }

    #[test]
    fn a_downtime_that_cannot_be_had_costs_passes() {
        let far = |downtime: u64| {
            forecast(&Inputs {
                switchover_s: Guess::exactly(0.5),
                round_trip_s: 0.3,
                downtime: Duration::from_millis(downtime),
                ..inputs()
            })
        };
        let (can, cannot) = (far(1000), far(300));
        assert!(can.misses < 0.2 && cannot.misses == 1.0);
        let more = cannot.total_s.likely - can.total_s.likely;
        // The duration of a short pass varies, and long ones vary more: the median of a sum is
        // above the sum of the medians.
        let pass_s = 0.3 + PASS_S.likely;
        assert!(
            more > PASSES_SETTLING.likely * pass_s && more < 5.0 * pass_s,
            "{more}"
        );
        assert!(is_about(cannot.downtime_s.likely, 0.5));
    }

    #[test]
    fn what_has_been_sent_is_certain() {
        let sent = |bytes: f64, stops| {
            forecast(&Inputs {
                sent: Some(Sent {
                    elapsed_s: 6.0,
                    sending_s: 5.0,
                    bytes,
                    stops,
                }),
                ..inputs()
            })
        };
        let half = sent(50.0 * MB, false);
        assert!(
            is_about(half.total_s.likely, 1.0 + 5.0 + 5.25 + 0.6),
            "{half:?}"
        );
        let more = sent(200.0 * MB, false);
        assert!(is_about(more.bytes.low, 200.0 * MB), "{more:?}");
        assert!(is_about(more.total_s.likely, 6.6), "{more:?}");
        let stops = sent(20.0 * MB, true);
        assert!(is_about(stops.bytes.likely, 20.2 * MB), "{stops:?}");
        assert!(is_about(stops.total_s.likely, 6.6), "{stops:?}");
    }

    #[test]
    fn a_guess_between_two_values_has_nine_of_ten_there() {
        let guess = Guess::between(50.0, 100.0, 200.0);
        let mut dice = Dice::new();
        let drawn = (0..10_000).map(|_| guess.draw(&mut dice));
        let inside = drawn.filter(|value| (50.0..200.0).contains(value)).count();
        assert!((8900..9100).contains(&inside), "{inside}");
        assert_eq!(Guess::between(0.0, 1.0, 2.0).spread, 0.0);
    }
}
