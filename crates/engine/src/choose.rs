//! Which strategy a disk moves by where nobody says so, and why.

use crate::strategy::Strategy;
use std::time::Duration;

/// Writes that take at most this share of the link leave so little for the stop that everything can
/// be there.
const QUIET_SHARE: f64 = 0.1;
/// Up to this share a mirror catches up while the guest goes on as before.
const MIRROR_SHARE: f64 = 0.5;
/// A write that waits for the destination may take so much longer.
const MIRROR_RTT_MAX: Duration = Duration::from_millis(2);
/// Writes that fall again and again on the same chunks: this share of them, or more.
const AGAIN_SHARE: f64 = 0.5;

/// What is known of a disk before it moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// Whether both hosts see the same disk.
    pub shared: bool,
    /// What the guest writes to it, in bytes per second.
    pub written_bytes_per_s: f64,
    /// The share of what it writes that falls on chunks that it has written a short time before.
    pub again_share: f64,
    /// What the link carries of ours, in bytes per second.
    pub link_bytes_per_s: f64,
    /// Round trip.
    pub rtt: Duration,
}

/// Why a strategy was chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// Both hosts see the disk.
    Shared,
    /// The guest writes little: everything can be there before the stop, and nothing is fetched
    /// afterwards.
    Quiet {
        /// What its writes take of the link.
        share: f64,
    },
    /// The destination is near enough for the guest to wait for its writes, and nothing is fetched
    /// afterwards.
    Near {
        /// Round trip.
        rtt: Duration,
    },
    /// The guest writes the same again and again: what is hot travels once, after the stop.
    Rewrites {
        /// The share of its writes that falls on what it has just written.
        share: f64,
    },
    /// The guest writes much for the link: not everything can be there before the stop.
    Busy {
        /// What its writes take of the link.
        share: f64,
    },
}

/// A strategy, and why.
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
                "{} % of the guest's writes fall on what it has just written, which then travels once",
                percent(*share)
            ),
            Self::Busy { share } => write!(
                f,
                "the guest's writes take {} % of the link, so the rest is fetched after the stop",
                percent(*share)
            ),
        }
    }
}

/// Chooses.
pub fn choose(seen: &Seen) -> Choice {
    let choice = |strategy, why| Choice { strategy, why };
    if seen.shared {
        return choice(Strategy::SHARED, Why::Shared);
    }
    let share = seen.written_bytes_per_s / seen.link_bytes_per_s.max(1.0);
    if share <= QUIET_SHARE {
        return choice(Strategy::PRECOPY, Why::Quiet { share });
    }
    if share > MIRROR_SHARE {
        return choice(Strategy::HYBRID, Why::Busy { share });
    }
    if seen.again_share >= AGAIN_SHARE {
        let share = seen.again_share;
        return choice(Strategy::HYBRID, Why::Rewrites { share });
    }
    if seen.rtt <= MIRROR_RTT_MAX {
        return choice(Strategy::MIRROR, Why::Near { rtt: seen.rtt });
    }
    choice(Strategy::HYBRID, Why::Busy { share })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_follows_what_is_seen_and_says_why() {
        let seen = Seen {
            shared: false,
            written_bytes_per_s: 1e6,
            again_share: 0.1,
            link_bytes_per_s: 25e6,
            rtt: Duration::from_millis(1),
        };
        let name = |seen: Seen| choose(&seen).strategy.name;
        assert_eq!(name(seen), "precopy");
        let shared = Seen {
            shared: true,
            ..seen
        };
        assert_eq!(name(shared), "shared");
        let some = Seen {
            written_bytes_per_s: 5e6,
            ..seen
        };
        assert_eq!(name(some), "mirror");
        let far = Seen {
            rtt: Duration::from_millis(20),
            ..some
        };
        assert_eq!(name(far), "hybrid");
        let again = Seen {
            again_share: 0.9,
            ..some
        };
        assert_eq!(name(again), "hybrid");
        let busy = Seen {
            written_bytes_per_s: 50e6,
            ..seen
        };
        let text = choose(&busy).why.to_string();
        assert!(text.contains("200 %"), "{text}");
        let unknown = Seen {
            link_bytes_per_s: 0.0,
            ..seen
        };
        assert_eq!(name(unknown), "hybrid");
    }
}
