//! The prediction of a move, from what is known of its guest, its link and its destination.

use crate::source::convergence;
use crate::source::sample::Sampled;
use crate::status::predictions::{Figures, Kind, Predictions};
use longhaul_api::{Convergence, PredictedRange, Prediction, Strategy};
use longhaul_codec::RUN_BLOCKS;
use longhaul_engine::forecast::{
    Follows, Forecast, Guess, Inputs, LIKELIHOOD_PERCENT, Range, Sent, forecast,
};
use longhaul_hypervisor::memory::COMPARERS_MAX;
use longhaul_protocol::BLOCK_SIZE;
use longhaul_protocol::units::show_duration;
use longhaul_transport::LinkRate;
use std::time::Duration;

/// Time from the start of a move until blocks are sent, in seconds, without round trips. Here and
/// below: of moves between idle hosts.
const BEFORE_S: Guess = Guess::new(0.17, 0.4);
/// The same for local disks: both hosts prepare and close them.
const DISKS_S: f64 = 0.62;
/// Round trips in it: two connections, a question, the offer and its answer.
const BEFORE_ROUND_TRIPS: f64 = 7.0;
/// Time from then until QEMU at the destination waits for the guest, in seconds.
const LAUNCH_S: Guess = Guess::new(0.25, 0.5);
/// Time from the handover until the move has ended, in seconds, without round trips.
const AFTER_S: Guess = Guess::new(0.05, 0.8);
/// Round trips in it.
const AFTER_ROUND_TRIPS: f64 = 2.0;
/// Duration of a stop without the last blocks and round trips, in seconds.
const SWITCHOVER_S: Guess = Guess::new(0.03, 0.5);
/// Round trips in it, with late and with early release.
const SWITCHOVER_ROUND_TRIPS: [f64; 2] = [2.0, 1.0];
/// Bytes on the wire for each byte of frames: headers of QUIC, UDP and IP, and acknowledgements.
const WIRE: f64 = 1.05;
/// The spread of the bytes of content, besides that of its sample: frames of a move are compressed
/// by what the link and the encoder are at that moment.
const CONTENT_SPREAD: f64 = 0.12;
/// The smallest spread of a link's measured rate: links change from minute to minute.
const RATE_SPREAD_MIN: f64 = 0.06;
/// What a second of round-trip time adds to it: over a far link much of a move is over before the
/// sender knows the rate, and a lost packet costs more.
const RATE_SPREAD_PER_S: f64 = 1.0;
/// The part of a returning guest's content that its destination lacks, if it has not said.
const MISSING_UNKNOWN: Guess = Guess::new(0.5, 0.7);
/// The spread of that part, once the destination has answered about all blocks, and twice that if
/// it has answered about none.
const MISSING_SPREAD: f64 = 0.6;
/// How often it lacks the others, relative to those that a move begins with, which change seldom.
const MISSING_LATER: f64 = 3.0;
/// How long a guest writes until it writes the same pages again, in seconds: these pages are the
/// last ones that a move asks about, and the destination lacks them.
const REWRITES_S: f64 = 2.0;
/// Bytes of a block that travels as a digest, with its part of an entry.
const DIGEST_BYTES: f64 = 18.0;
/// The bytes that a rewritten page takes on the link, relative to a page sent for the first time:
/// most pages change in a small part.
const AGAIN: Guess = Guess::new(0.45, 0.6);
/// Rate at which a guest writes in whom no page was seen to change, in bytes per second.
const WRITTEN_UNSEEN: Guess = Guess::new(0.2e6, 1.0);
/// The spread of a measured rate of writes: it is that of one second.
const WRITTEN_SPREAD: f64 = 0.5;
/// Bytes that a new connection has in flight before its first acknowledgement.
const FIRST_WINDOW_BYTES: f64 = 38_400.0;
/// Assumed rate at which a memory file is written, in bytes per second: a disk that takes twice as
/// much, since the copy rests as long as it works.
const COPY_BYTES_PER_S: f64 = 100e6;

/// The findings about a guest.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Look {
    /// Its memory, by a sample.
    pub(crate) memory: Option<Sampled>,
    /// The rate at which it writes memory, in bytes per second.
    pub(crate) dirty_bytes_per_s: Option<u64>,
    /// Whether its memory is compared while it is stopped, since QEMU does not see all writes.
    pub(crate) compared: bool,
}

impl Look {
    /// Returns how fast the guest writes, in bytes per second as they are sent, if that is known.
    pub(crate) fn written_bytes_per_s(&self) -> Option<f64> {
        let share = self.memory.and_then(|memory| memory.share());
        Some(self.dirty_bytes_per_s? as f64 * share.unwrap_or(1.0))
    }

    /// Returns how long the comparison of its memory takes while it is stopped.
    pub(crate) fn comparison(&self) -> Duration {
        let read_s = self
            .memory
            .filter(|_| self.compared)
            .map_or(0.0, |it| it.read_s);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        seconds(read_s / processors.min(COMPARERS_MAX) as f64)
    }

    /// Returns the number of blocks of its memory and of these disks that are not zero.
    pub(crate) fn used_blocks(&self, disks: Option<Sampled>) -> f64 {
        let bytes = [self.memory, disks].map(|it| it.map_or(0, |it| it.used_bytes));
        bytes.iter().sum::<u64>() as f64 / BLOCK_SIZE as f64
    }
}

/// What the destination is known to have of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Nothing.
    Nothing,
    /// Perhaps some of it: it has not said.
    Unknown,
    /// Of blocks that are spread over all it has found this number, and not found that of others.
    Sampled(u64, u64),
    /// The same of those that a move begins with.
    Counted(u64, u64),
}

impl Holds {
    /// Returns the part of this number of blocks about which it has said enough.
    pub(crate) fn answered(self, blocks: f64) -> f64 {
        match self {
            Self::Nothing | Self::Sampled(..) => 1.0,
            Self::Unknown => 0.0,
            Self::Counted(found, missing) => ((found + missing) as f64 / blocks.max(1.0)).min(1.0),
        }
    }
}

/// The input of a prediction.
#[derive(Debug, Clone)]
pub(crate) struct Asking {
    pub(crate) guest: String,
    pub(crate) source: String,
    pub(crate) host: String,
    pub(crate) strategy: Strategy,
    /// Whether memory may follow the guest if it writes too fast.
    pub(crate) may_follow: bool,
    pub(crate) downtime: Duration,
    /// The rate of the link, in bytes per second.
    pub(crate) rate: Option<LinkRate>,
    pub(crate) rtt: Option<Duration>,
    pub(crate) early_release: bool,
    /// Whether memory that follows is copied to a file.
    pub(crate) keep_memory: bool,
    pub(crate) convergence: Convergence,
    pub(crate) look: Look,
    /// The disks that move along, by a sample.
    pub(crate) disks: Option<Sampled>,
    pub(crate) holds: Holds,
    /// Whether the guest had left the destination before.
    pub(crate) returns: bool,
    pub(crate) sent: Option<Sent>,
}

/// A prediction, and what it will be judged by.
#[derive(Debug, Clone)]
pub(crate) struct Predicted {
    pub(crate) shown: Prediction,
    /// The kind of the move, and the figures before they were corrected; `None` if nothing could
    /// be predicted.
    pub(crate) learn: Option<(Kind, Figures)>,
}

/// Predicts a move.
pub(crate) fn predict(asking: &Asking, past: &Predictions) -> Predicted {
    let Some((inputs, share)) = inputs(asking) else {
        return Predicted {
            shown: prediction(asking, None, 0, None),
            learn: None,
        };
    };
    let made = forecast(&inputs);
    let written = inputs.written.likely * share;
    let misses = made.misses > 0.5;
    if asking.strategy == Strategy::Auto && asking.may_follow && misses {
        let asking = Asking {
            strategy: Strategy::Hybrid,
            ..asking.clone()
        };
        return predict(&asking, past);
    }
    let kind = Kind {
        guest: asking.guest.clone(),
        host: asking.host.clone(),
        returns: asking.returns,
        strategy: shown_strategy(asking.strategy),
    };
    let (learned, moves) = past.learned(&kind);
    let [bytes, total, downtime] = learned;
    let corrected = Forecast {
        bytes: bytes.correct(made.bytes),
        total_s: total.correct(made.total_s),
        downtime_s: downtime.correct(made.downtime_s),
        ..made
    };
    let figures = Figures {
        link_bytes: made.bytes.likely,
        total_ms: made.total_s.likely * 1e3,
        downtime_ms: made.downtime_s.likely * 1e3,
    };
    let note = misses.then(|| {
        let (guest, asked) = (&asking.guest, &asking.convergence);
        let downtime = seconds(corrected.downtime_s.likely);
        let rate = inputs.rate.likely;
        convergence::note(guest, asked, asking.downtime, downtime, written, rate)
    });
    Predicted {
        shown: prediction(asking, Some(&corrected), moves, note),
        learn: Some((kind, figures)),
    }
}

/// Returns the inputs of the model, and the bytes on the link for each byte of the guest; `None` if
/// the link's rate or the guest's memory is not known.
fn inputs(asking: &Asking) -> Option<(Inputs, f64)> {
    let rate = asking.rate.filter(|rate| rate.likely > 0.0)?;
    let memory = asking.look.memory?;
    let share = memory.share().unwrap_or(1.0);
    let content = asking.disks.map_or(memory, |disks| memory.and(disks));
    let rtt_s = asking.rtt.unwrap_or_default().as_secs_f64();
    let guess = Guess::between(rate.low, rate.likely, rate.high);
    let spread = RATE_SPREAD_MIN + RATE_SPREAD_PER_S * rtt_s;
    let rate = Guess::new(guess.likely * WIRE, guess.spread.max(spread));
    let on_wire = |bytes: Guess| {
        let spread = bytes.spread.hypot(CONTENT_SPREAD);
        Guess::new(bytes.likely * WIRE, spread)
    };
    let in_flight = rate.likely * rtt_s;
    let doublings = (in_flight / FIRST_WINDOW_BYTES).max(1.0).log2();
    let later = |guess: Guess, round_trips: f64| Guess {
        likely: guess.likely + round_trips * rtt_s,
        ..guess
    };
    let missing = match asking.holds {
        Holds::Nothing => Guess::exactly(1.0),
        Holds::Unknown => MISSING_UNKNOWN,
        Holds::Sampled(found, missing) | Holds::Counted(found, missing) => {
            let answered = (found + missing) as f64;
            let part = (missing as f64 + 1.0) / (answered + 2.0);
            // How many of these were met is chance.
            let chance = (missing as f64 + 1.0).sqrt().recip();
            let used_blocks = asking.look.used_blocks(asking.disks);
            let unknown = 1.0 - asking.holds.answered(used_blocks);
            let written = asking.look.dirty_bytes_per_s.unwrap_or(0) as f64 * REWRITES_S;
            let rewritten = written / BLOCK_SIZE as f64 / (used_blocks * unknown).max(1.0);
            let later = (part * MISSING_LATER).max(rewritten).min(1.0);
            let likely = part + (later - part) * unknown;
            let spread = MISSING_SPREAD + MISSING_SPREAD * unknown;
            Guess::new(likely, spread.hypot(chance))
        }
    };
    let digest = match asking.holds {
        Holds::Nothing => 0.0,
        // A run of blocks that are there has one digest; others are compared block by block.
        _ => {
            let there = (1.0 - missing.likely).clamp(0.0, 1.0);
            let runs = there.powi(RUN_BLOCKS as i32);
            let digests = (1.0 - runs) + 1.0 / RUN_BLOCKS as f64;
            digests * DIGEST_BYTES / (content.share().unwrap_or(1.0) * BLOCK_SIZE as f64)
        }
    };
    let missing_share = Guess {
        likely: missing.likely + (1.0 - missing.likely).max(0.0) * digest,
        ..missing
    };
    // Blocks that are there are read, and not encoded.
    let encoding_s = (content.work_s - content.read_s).max(0.0);
    let work_s = content.read_s + encoding_s * missing_share.likely.min(1.0);
    let written = match asking.look.dirty_bytes_per_s {
        None | Some(0) => WRITTEN_UNSEEN,
        Some(rate) => Guess::new(rate as f64, WRITTEN_SPREAD),
    };
    let switchover = later(
        SWITCHOVER_S,
        SWITCHOVER_ROUND_TRIPS[usize::from(asking.early_release)],
    );
    let before = Guess {
        likely: BEFORE_S.likely + asking.disks.map_or(0.0, |_| DISKS_S),
        ..BEFORE_S
    };
    let inputs = Inputs {
        memory_bytes: on_wire(memory.sent_bytes),
        disk_bytes: asking
            .disks
            .map_or(Guess::exactly(0.0), |disks| on_wire(disks.sent_bytes)),
        missing_share,
        work_s: Guess::new(work_s, 0.3),
        rate,
        before_s: later(before, BEFORE_ROUND_TRIPS),
        round_trip_s: rtt_s,
        // What is sent while the link fills is worth one round trip.
        ramp_s: (doublings - 1.0).max(0.0) * rtt_s,
        launch_s: later(LAUNCH_S, 1.0),
        after_s: later(AFTER_S, AFTER_ROUND_TRIPS),
        switchover_s: Guess {
            likely: switchover.likely + asking.look.comparison().as_secs_f64(),
            ..switchover
        },
        written,
        written_most: memory.used_bytes as f64,
        written_share: Guess::new(AGAIN.likely * share, AGAIN.spread),
        downtime: asking.downtime,
        follows: match asking.strategy {
            Strategy::Precopy | Strategy::Auto => Follows::Nothing,
            Strategy::Hybrid => Follows::Written,
            Strategy::Postcopy => Follows::Everything,
        },
        sent: asking.sent,
    };
    Some((inputs, share))
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

/// Returns the strategy that a move has until it chooses another.
fn shown_strategy(strategy: Strategy) -> Strategy {
    match strategy {
        Strategy::Auto => Strategy::Precopy,
        strategy => strategy,
    }
}

fn follows(strategy: Strategy) -> bool {
    matches!(strategy, Strategy::Hybrid | Strategy::Postcopy)
}

/// Returns what a guest may wait for after the switchover.
fn stalls(asking: &Asking) -> Option<String> {
    let Asking { guest, .. } = asking;
    let when = match asking.strategy {
        strategy if follows(strategy) => "",
        Strategy::Auto if asking.may_follow => "if its memory follows: ",
        _ => return None,
    };
    let each = match asking.rtt {
        Some(rtt) => format!("at least {} (one round trip)", show_duration(rtt)),
        None => "at least one round trip".to_owned(),
    };
    let downtime = match when {
        "" => "this",
        _ => "the",
    };
    Some(format!(
        "{when}{downtime} downtime is the time for which QEMU is stopped; after it {guest} waits \
         {each} for each page that it needs and that is not there yet; how long it waits in \
         all is not predicted, and may be longer than the requested downtime"
    ))
}

/// Returns what the death of the source means for a guest whose memory follows, and for how long.
fn if_source_dies(asking: &Asking, made: Option<&Forecast>) -> String {
    let follows_s = made.map(|made| made.follows_s.likely);
    let about = |time_s: Option<f64>| {
        let time = time_s.map(|time_s| show_duration(seconds(time_s)));
        time.map_or_else(String::new, |time| format!(" (about {time})"))
    };
    let all = about(follows_s);
    if !asking.keep_memory {
        return format!(
            "before the switch: as without a move; after it, until all memory has followed{all}: \
             lost"
        );
    }
    let copied = about(follows_s.and_then(|time_s| copy_s(asking, time_s)));
    format!(
        "before the switch: as without a move; after it, until the memory file is \
         complete{copied}: lost; then, until all memory has followed{all}: waits until {} is back",
        asking.source
    )
}

/// Returns how long the copy of the memory that follows in this time takes.
fn copy_s(asking: &Asking, follows_s: f64) -> Option<f64> {
    let (inputs, share) = inputs(asking)?;
    let bytes = follows_s * inputs.rate.likely / (share * WIRE).max(f64::MIN_POSITIVE);
    Some(bytes.min(inputs.written_most) / COPY_BYTES_PER_S)
}

fn prediction(
    asking: &Asking,
    made: Option<&Forecast>,
    learned_from: usize,
    note: Option<String>,
) -> Prediction {
    let range = |range: Range, unit: f64| PredictedRange {
        low: (range.low * unit) as u64,
        likely: (range.likely * unit) as u64,
        high: (range.high * unit).ceil() as u64,
    };
    let follows = follows(asking.strategy);
    Prediction {
        strategy: shown_strategy(asking.strategy),
        likelihood_percent: LIKELIHOOD_PERCENT,
        link_bytes: made.map(|made| range(made.bytes, 1.0)),
        total_ms: made.map(|made| range(made.total_s, 1e3)),
        downtime_ms: made.map(|made| range(made.downtime_s, 1e3)),
        stalls: stalls(asking),
        learned_from: u32::try_from(learned_from).unwrap_or(u32::MAX),
        if_link_breaks: match asking.early_release {
            _ if follows => format!(
                "before the switch: stays on {}; after it: waits for pages until the hosts connect",
                asking.source
            ),
            false => format!("stays on {}", asking.source),
            true => format!(
                "before the stop: stays on {}; after it: is stopped until the hosts connect",
                asking.source
            ),
        },
        if_source_dies: match follows {
            false => "before the switch: as without a move".to_owned(),
            true => if_source_dies(asking, made),
        },
        note,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn asking() -> Asking {
        let rate = |likely: f64| LinkRate {
            low: likely * 0.9,
            likely,
            high: likely * 1.1,
        };
        Asking {
            guest: "web-7".into(),
            source: "lyon-1".into(),
            host: "paris-2".into(),
            strategy: Strategy::Precopy,
            may_follow: true,
            downtime: Duration::from_millis(300),
            rate: Some(rate(12e6)),
            rtt: Some(Duration::from_millis(20)),
            early_release: false,
            keep_memory: false,
            convergence: Convergence::default(),
            look: Look {
                memory: Some(Sampled {
                    used_bytes: 400 * MIB,
                    sent_bytes: Guess::new(120e6, 0.1),
                    work_s: 1.0,
                    read_s: 0.5,
                }),
                dirty_bytes_per_s: Some(MIB),
                compared: false,
            },
            disks: None,
            holds: Holds::Nothing,
            returns: false,
            sent: None,
        }
    }

    fn predicted(asking: &Asking) -> Prediction {
        let state = tempfile::tempdir().unwrap();
        predict(asking, &Predictions::open(state.path())).shown
    }

    #[test]
    fn each_figure_is_a_range_around_its_middle() {
        let made = predicted(&asking());
        let data = made.link_bytes.unwrap();
        assert!(
            (110_000_000..140_000_000).contains(&data.likely),
            "{data:?}"
        );
        for range in [made.link_bytes, made.total_ms, made.downtime_ms] {
            let range = range.unwrap();
            assert!(
                range.low < range.likely && range.likely < range.high,
                "{range:?}"
            );
        }
        assert_eq!((made.likelihood_percent, made.learned_from), (90, 0));
        assert_eq!((made.stalls, made.note), (None, None));
    }

    #[test]
    fn nothing_is_predicted_for_an_unknown_link_or_guest() {
        let no_link = Asking {
            rate: None,
            ..asking()
        };
        let no_memory = Asking {
            look: Look::default(),
            ..asking()
        };
        for asking in [no_link, no_memory] {
            let made = predicted(&asking);
            assert_eq!(
                (made.link_bytes, made.total_ms, made.downtime_ms),
                (None, None, None)
            );
        }
    }

    #[test]
    fn a_link_of_which_little_is_known_has_a_wide_range() {
        let width = |range: Option<PredictedRange>| {
            let range = range.unwrap();
            range.high as f64 / range.low as f64
        };
        let unsure = Asking {
            rate: Some(LinkRate {
                low: 3e6,
                likely: 12e6,
                high: 24e6,
            }),
            ..asking()
        };
        let [sure, unsure] = [asking(), unsure].map(|asking| predicted(&asking));
        assert!(width(unsure.total_ms) > 2.0 * width(sure.total_ms));
        let low = |prediction: &Prediction| prediction.link_bytes.unwrap().low as f64;
        assert!((0.95..1.05).contains(&(low(&unsure) / low(&sure))));
    }

    #[test]
    fn what_the_destination_has_travels_as_digests() {
        let of = |holds| {
            let asking = Asking { holds, ..asking() };
            predicted(&asking).link_bytes.unwrap()
        };
        let first = of(Holds::Nothing);
        let back = of(Holds::Unknown);
        assert!(
            back.likely < first.likely / 2 + first.likely / 10,
            "{back:?}"
        );
        assert!(back.high / back.low > 4, "nothing is known yet: {back:?}");
        let counted = of(Holds::Sampled(990, 10));
        assert!(counted.likely < first.likely / 20, "{counted:?}");
        let first_ones = of(Holds::Counted(990, 10));
        assert!(
            first_ones.high > counted.high,
            "they are not like all: {first_ones:?}"
        );
        let none = of(Holds::Sampled(0, 4000));
        assert!(none.likely > first.likely * 8 / 10, "{none:?}");
    }

    #[test]
    fn memory_that_follows_may_make_the_guest_wait() {
        for strategy in [Strategy::Hybrid, Strategy::Postcopy] {
            let made = predicted(&Asking {
                strategy,
                ..asking()
            });
            let stalls = made.stalls.unwrap();
            assert!(
                stalls.contains("not predicted") && stalls.contains("20 ms"),
                "{stalls}"
            );
        }
        let auto = |may_follow, rate| {
            let mut asking = Asking {
                strategy: Strategy::Auto,
                may_follow,
                ..asking()
            };
            asking.look.dirty_bytes_per_s = Some(rate);
            predicted(&asking)
        };
        let calm = auto(true, MIB);
        assert_eq!(calm.strategy, Strategy::Precopy);
        assert!(calm.stalls.unwrap().starts_with("if its memory follows"));
        assert_eq!(auto(true, 400 * MIB).strategy, Strategy::Hybrid);
        let cannot = auto(false, 400 * MIB);
        assert_eq!((cannot.strategy, cannot.stalls), (Strategy::Precopy, None));
        assert!(cannot.note.is_some());
    }

    #[test]
    fn the_death_of_the_source_is_a_loss_until_the_memory_file_is_complete() {
        let of = |strategy, keep_memory| {
            let asking = Asking {
                strategy,
                keep_memory,
                ..asking()
            };
            predicted(&asking).if_source_dies
        };
        let precopy = "before the switch: as without a move";
        assert_eq!(of(Strategy::Precopy, false), precopy);
        let lost = of(Strategy::Postcopy, false);
        let expected = format!("{precopy}; after it, until all memory has followed (about ");
        assert!(
            lost.starts_with(&expected) && lost.ends_with("s): lost"),
            "{lost}"
        );
        let kept = of(Strategy::Postcopy, true);
        let expected = format!("{precopy}; after it, until the memory file is complete (about ");
        assert!(kept.starts_with(&expected), "{kept}");
        assert!(kept.contains("s): lost; then, until"), "{kept}");
        assert!(kept.ends_with("waits until lyon-1 is back"), "{kept}");
        let unknown = Asking {
            strategy: Strategy::Hybrid,
            rate: None,
            ..asking()
        };
        let unknown = predicted(&unknown).if_source_dies;
        assert!(unknown.ends_with("has followed: lost"), "{unknown}");
    }

    #[test]
    fn earlier_moves_correct_the_middle() {
        let state = tempfile::tempdir().unwrap();
        let past = Predictions::open(state.path());
        let before = predict(&asking(), &past);
        let (kind, figures) = before.learn.unwrap();
        let was = Figures {
            link_bytes: figures.link_bytes / 2.0,
            ..figures
        };
        for _ in 0..3 {
            past.add(kind.clone(), figures, was);
        }
        let after = predict(&asking(), &past);
        assert_eq!(after.shown.learned_from, 3);
        let [before, after] = [before.shown, after.shown].map(|it| it.link_bytes.unwrap().likely);
        assert!(after.abs_diff(before / 2) < MIB, "{after} of {before}");
        // The correction is not learned from.
        assert_eq!(predict(&asking(), &past).learn.unwrap().1, figures);
    }
}
