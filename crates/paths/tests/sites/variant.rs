//! Broken variants: each changes a timer, or one thing of what surrounds the core, which is the
//! same as a core that forgets it. A run that misses one of them proves nothing.

use longhaul_paths::Tuning;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing is changed.
    Genuine,
    /// Idle paths are not probed.
    NoPulse,
    /// A path is used without an acknowledgement.
    PromotedUnproved,
    /// An acknowledgement counts whatever address it came from.
    AnyAcknowledgement,
    /// Silence does not end a path.
    NeverDead,
    /// One lost datagram ends a path.
    DeadAtOnce,
    /// One host begins its round when the other one has not heard of it.
    NoSharedStart,
    /// No sockets are opened for a search.
    NoSearch,
    /// Sockets of a search stay open.
    SocketsStayOpen,
    /// Probes from unknown addresses are dropped.
    NoPeerReflexive,
    /// Rounds of a relayed pair follow each other without a pause.
    NoBackoff,
    /// A search probes as fast as it can.
    SearchUnpaced,
    /// Relays are not reached over TCP.
    NoTcp,
    /// Servers that are down are not noticed.
    ServersNotWatched,
    /// Peers are not told of new addresses.
    NewsIgnored,
    /// No round is tried again.
    NoRetry,
}

impl Variant {
    pub(crate) const BROKEN: [Variant; 15] = [
        Variant::NoPulse,
        Variant::PromotedUnproved,
        Variant::AnyAcknowledgement,
        Variant::NeverDead,
        Variant::DeadAtOnce,
        Variant::NoSharedStart,
        Variant::NoSearch,
        Variant::SocketsStayOpen,
        Variant::NoPeerReflexive,
        Variant::NoBackoff,
        Variant::SearchUnpaced,
        Variant::NoTcp,
        Variant::ServersNotWatched,
        Variant::NewsIgnored,
        Variant::NoRetry,
    ];

    pub(crate) fn tuning(self) -> Tuning {
        let mut tuning = Tuning::default();
        let never = Duration::from_secs(100_000);
        match self {
            Self::NoPulse => {
                tuning.pulse = never;
                tuning.check = never;
                tuning.standby_pulse = never;
            }
            Self::PromotedUnproved => tuning.promote_acks = 0,
            Self::NeverDead => tuning.dead_after = u32::MAX,
            Self::DeadAtOnce => tuning.dead_after = 1,
            Self::NoBackoff => {
                tuning.retry = Duration::from_millis(10);
                tuning.retry_max = tuning.retry;
                tuning.hopeless_retry_max = tuning.retry;
            }
            Self::SearchUnpaced => {
                tuning.search_pace = Duration::from_millis(1);
                tuning.host_pace = Duration::from_millis(1);
            }
            Self::ServersNotWatched => tuning.stun_tries = u32::MAX,
            Self::NoRetry => {
                tuning.retry = never;
                tuning.retry_max = never;
                tuning.hopeless_retry_max = never;
            }
            _ => {}
        }
        tuning
    }
}
