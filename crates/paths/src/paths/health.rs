//! Whether one way to the other host works: acknowledgements, silence, and when to probe next.

use crate::tuning::Tuning;
use std::time::Duration;

/// What is known of one way. Data keeps it quiet; only acknowledgements keep it alive.
#[derive(Debug, Clone, Default)]
pub(super) struct Health {
    /// Acknowledgements since it was found or died.
    pub(super) acks: u32,
    /// Probes in sequence without an acknowledgement.
    pub(super) unanswered: u32,
    /// The smoothed round trip (RFC 6298, alpha 1/8).
    pub(super) round_trip: Option<Duration>,
    pub(super) last_probe: Option<Duration>,
    pub(super) last_ack: Option<Duration>,
    /// When anything was sent or received on it.
    last_sent: Duration,
    pub(super) last_received: Duration,
    /// Since when data is sent and nothing is received.
    unheard_since: Option<Duration>,
    /// It is to be probed at once.
    pub(super) asked_for: Option<Duration>,
}

impl Health {
    pub(super) fn is_proved(&self, tuning: &Tuning) -> bool {
        self.acks >= tuning.promote_acks
    }

    pub(super) fn is_dead(&self, tuning: &Tuning) -> bool {
        self.unanswered >= tuning.dead_after
    }

    /// It is probably dead: three probes were lost. Another way that is not silent is better.
    pub(super) fn is_silent(&self) -> bool {
        self.unanswered > 3
    }

    /// Data was sent.
    pub(super) fn sent(&mut self, now: Duration) {
        self.last_sent = now;
        self.unheard_since.get_or_insert(now);
    }

    /// Anything authentic was received.
    pub(super) fn received(&mut self, now: Duration) {
        self.last_received = now;
        self.unheard_since = None;
    }

    pub(super) fn probed(&mut self, now: Duration) {
        self.last_probe = Some(now);
        self.last_sent = now;
        self.unanswered += 1;
        self.asked_for = None;
    }

    /// An acknowledgement was sent: it keeps a NAT's mapping as data does.
    pub(super) fn acknowledged(&mut self, now: Duration) {
        self.last_sent = now;
    }

    /// A probe that was sent at `sent_at` was acknowledged.
    pub(super) fn acked(&mut self, sent_at: Duration, now: Duration) {
        let sample = now.saturating_sub(sent_at);
        self.round_trip = Some(match self.round_trip {
            Some(smoothed) => (smoothed * 7 + sample) / 8,
            None => sample,
        });
        self.acks = self.acks.saturating_add(1);
        self.unanswered = 0;
        self.last_ack = Some(now);
        self.received(now);
    }

    /// It does not work any more.
    pub(super) fn died(&mut self) {
        *self = Self {
            round_trip: self.round_trip,
            last_received: self.last_received,
            ..Self::default()
        };
    }

    fn timeout(&self, tuning: &Tuning) -> Duration {
        let round_trips = self.round_trip.unwrap_or_default() * 2;
        round_trips.max(tuning.probe_timeout)
    }

    /// Returns when a way that works has to be probed next.
    pub(super) fn due(&self, is_used: bool, tuning: &Tuning) -> Duration {
        let since = |at: Option<Duration>| at.unwrap_or_default();
        let regular = if self.unanswered > 0 {
            since(self.last_probe) + self.timeout(tuning)
        } else if is_used {
            let idle = self.last_sent.min(self.last_received) + tuning.pulse;
            let checked = since(self.last_ack) + tuning.check;
            let suspect = self.unheard_since.map(|at| at + tuning.suspect_after);
            suspect.unwrap_or(checked).min(checked).min(idle)
        } else {
            since(self.last_ack) + tuning.standby_pulse
        };
        self.asked_for.map_or(regular, |at| at.min(regular))
    }
}
