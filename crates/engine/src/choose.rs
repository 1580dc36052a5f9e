//! The choice of a disk's strategy where the request names none, with its reason.

use crate::strategy::Strategy;
use std::time::Duration;

/// Share of the link up to which the guest's writes leave so little for the stop that everything
/// can be there before it.
const QUIET_SHARE: f64 = 0.1;
/// Share of the link up to which a copy catches up with the writes while the guest runs
/// undisturbed.
const CAUGHT_UP_SHARE: f64 = 0.5;
/// Limit on the latency that waiting for the destination may add to a write.
const MIRROR_RTT_MAX: Duration = Duration::from_millis(2);
/// Share of writes that fall on the same chunks again, from which on a disk counts as rewritten.
const AGAIN_SHARE: f64 = 0.5;

/// Measurements of a disk before it moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// Whether both hosts see the same disk.
    pub shared: bool,
    /// The guest's writes to it, in bytes per second.
    pub written_bytes_per_s: f64,
    /// The share of writes that fall on recently written chunks.
    pub again_share: f64,
    /// The throughput of the link, in bytes per second, if it is known.
    pub link_bytes_per_s: Option<f64>,
    /// Round-trip time.
    pub rtt: Duration,
}

/// The reason for the choice of a strategy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// Both hosts see the disk.
    Shared,
    /// The guest writes little: everything can be there before the stop, and nothing is fetched
    /// after it.
    Quiet {
        /// The share of the link that its writes take.
        share: f64,
    },
    /// The destination is so near that the guest can wait for its writes, and nothing is fetched
    /// after the stop.
    Near {
        /// Round-trip time.
        rtt: Duration,
    },
    /// The guest rewrites the same chunks: hot ones travel once, after the stop.
    Rewrites {
        /// The share of its writes that fall on recently written chunks.
        share: f64,
    },
    /// The guest's writes take much of the link: not everything can be there before the stop.
    Busy {
        /// The share of the link that its writes take.
        share: f64,
    },
    /// The link has enough spare throughput to catch up with the guest's writes.
    CaughtUp {
        /// The share of the link that its writes take.
        share: f64,
    },
    /// Only waiting for the link keeps the guest from writing faster than the link carries.
    HeldBack {
        /// The share of the link that its writes take.
        share: f64,
    },
    /// The throughput of the link is unknown, so the guest is not made to wait for it.
    UnknownLink,
}

/// A strategy, with the reason for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// The strategy.
    pub strategy: Strategy,
    /// Why.
    pub why: Why,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |share: f64| (share * 100.0).round();
        match self {
            Self::Shared => write!(f, "both hosts see the disk"),
            Self::Quiet { share } => write!(
                f,
                "the guest's writes take {} % of the link, so all of the disk can be there before \
                 the guest is stopped",
                percent(*share)
            ),
            Self::Near { rtt } => write!(
                f,
                "the other host is {:.1} ms away, which the guest's writes can wait for",
                rtt.as_secs_f64() * 1e3
            ),
            Self::Rewrites { share } => write!(
                f,
                "{} % of the guest's writes fall on what it has just written, \
                 which then travels once",
                percent(*share)
            ),
            Self::Busy { share } => write!(
                f,
                "the guest's writes take {} % of the link, so the rest is fetched after the stop",
                percent(*share)
            ),
            Self::CaughtUp { share } => write!(
                f,
                "the guest's writes take {} % of the link, \
                 which leaves enough to catch up with them",
                percent(*share)
            ),
            Self::HeldBack { share } => write!(
                f,
                "the guest's writes take {} % of the link, and have to wait for it",
                percent(*share)
            ),
            Self::UnknownLink => write!(f, "it is not known yet what the link carries"),
        }
    }
}

/// Chooses among the strategies that both agents support; pre-copy is always among them.
pub fn choose(seen: &Seen, among: &[Strategy]) -> Choice {
    let can = |strategy: Strategy| among.iter().any(|one| one.name == strategy.name);
    let choice = |strategy, why| Choice { strategy, why };
    if seen.shared {
        return choice(Strategy::SHARED, Why::Shared);
    }
    let Some(link) = seen.link_bytes_per_s.filter(|rate| *rate > 0.0) else {
        return choice(Strategy::PRECOPY, Why::UnknownLink);
    };
    let share = seen.written_bytes_per_s / link;
    if share <= QUIET_SHARE {
        return choice(Strategy::PRECOPY, Why::Quiet { share });
    }
    let rewrites = seen.again_share >= AGAIN_SHARE;
    let far = seen.rtt > MIRROR_RTT_MAX;
    if can(Strategy::HYBRID) && (share > CAUGHT_UP_SHARE || rewrites || far) {
        let again_share = seen.again_share;
        return match rewrites && share <= CAUGHT_UP_SHARE {
            true => choice(Strategy::HYBRID, Why::Rewrites { share: again_share }),
            false => choice(Strategy::HYBRID, Why::Busy { share }),
        };
    }
    let mirrors = can(Strategy::MIRROR);
    if mirrors && share > CAUGHT_UP_SHARE {
        return choice(Strategy::MIRROR, Why::HeldBack { share });
    }
    if mirrors && !far {
        return choice(Strategy::MIRROR, Why::Near { rtt: seen.rtt });
    }
    choice(Strategy::PRECOPY, Why::CaughtUp { share })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        Seen {
            shared: false,
            written_bytes_per_s: 1e6,
            again_share: 0.1,
            link_bytes_per_s: Some(25e6),
            rtt: Duration::from_millis(1),
        }
    }

    fn writes(megabytes_per_s: f64) -> Seen {
        Seen {
            written_bytes_per_s: megabytes_per_s * 1e6,
            ..seen()
        }
    }

    fn far(seen: Seen) -> Seen {
        Seen {
            rtt: Duration::from_millis(20),
            ..seen
        }
    }

    #[test]
    fn the_choice_follows_what_is_seen_and_says_why() {
        let name = |seen: Seen| choose(&seen, &Strategy::ALL).strategy.name;
        assert_eq!(name(seen()), "precopy");
        let shared = Seen {
            shared: true,
            ..seen()
        };
        assert_eq!(name(shared), "shared");
        assert_eq!(name(writes(5.0)), "mirror");
        assert_eq!(name(far(writes(5.0))), "hybrid");
        let again = Seen {
            again_share: 0.9,
            ..writes(5.0)
        };
        assert_eq!(name(again), "hybrid");
        let choice = choose(&writes(50.0), &Strategy::ALL);
        assert_eq!(choice.strategy, Strategy::HYBRID);
        let text = choice.why.to_string();
        assert!(text.contains("200 %") && text.contains("fetched"), "{text}");
        for rate in [None, Some(0.0)] {
            let unknown = Seen {
                link_bytes_per_s: rate,
                ..writes(50.0)
            };
            let choice = choose(&unknown, &Strategy::ALL);
            assert_eq!(choice.strategy, Strategy::PRECOPY);
            assert_eq!(choice.why, Why::UnknownLink);
        }
    }

    #[test]
    fn only_what_can_be_done_is_chosen() {
        let can = [Strategy::PRECOPY, Strategy::MIRROR];
        let choice = choose(&writes(50.0), &can);
        assert_eq!(choice.strategy, Strategy::MIRROR);
        assert!(matches!(choice.why, Why::HeldBack { .. }), "{choice:?}");
        assert!(choice.why.to_string().contains("200 %"));
        let choice = choose(&far(writes(5.0)), &can);
        assert_eq!(choice.strategy, Strategy::PRECOPY);
        assert_eq!(choice.why, Why::CaughtUp { share: 0.2 });
        for seen in [writes(50.0), writes(5.0), far(writes(50.0))] {
            let only = choose(&seen, &[Strategy::PRECOPY]);
            assert_eq!(only.strategy, Strategy::PRECOPY);
        }
    }
}
