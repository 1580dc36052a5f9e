//! Controls the rate of a connection: the library's BBR with corrections from observations of the
//! path, under a limit that can be changed at any time.

use crate::quic::{Bbr3Config, Controller, ControllerFactory, ControllerMetrics, RttEstimator};
use crate::road::Road;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The congestion window before the first answer, in bytes: 32 packets of the smallest size
/// allowed.
const INITIAL_WINDOW_BYTES: u64 = 32 * 1200;

/// The share of the limit from which BBR's estimate is that of the limit, and not of the path.
const LIMIT_REACHED: f64 = 0.9;

/// A limit in bits per second on the wire, IP headers included. Shared and changeable. The network
/// paths of one connection divide it by their rates.
#[derive(Debug, Clone, Default)]
pub(crate) struct RateLimit(Arc<Limit>);

#[derive(Debug, Default)]
struct Limit {
    bps: AtomicU64,
    /// The sum of the rates of all paths that carry data.
    rates: AtomicU64,
}

/// The share of one path in a limit. It is given back when this is dropped.
#[derive(Debug)]
struct Share {
    limit: RateLimit,
    /// The rate that the path could carry, in any unit that all paths use; 0 while it is unknown.
    rate: AtomicU64,
}

impl Share {
    fn new(limit: RateLimit) -> Self {
        Self {
            limit,
            rate: AtomicU64::new(0),
        }
    }

    fn set(&self, rate: u64) {
        let before = self.rate.swap(rate, Ordering::Relaxed);
        let rates = &self.limit.0.rates;
        // Wraps, and so does the sum: the result is right in any order.
        rates.fetch_add(rate.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Returns the part of the limit for this path, in bits per second. `rate`: what it could
    /// carry.
    fn of_limit(&self, rate: u64) -> Option<u64> {
        let limit = self.limit.get()?;
        let own = self.rate.load(Ordering::Relaxed);
        let others = self
            .limit
            .0
            .rates
            .load(Ordering::Relaxed)
            .saturating_sub(own);
        if others == 0 {
            return Some(limit);
        }
        let own = own.max(rate).max(1);
        let part = u128::from(limit) * u128::from(own) / (u128::from(own) + u128::from(others));
        Some(u64::try_from(part).unwrap_or(limit).max(1))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl RateLimit {
    pub(crate) fn new(limit_bps: Option<u64>) -> Self {
        let limit = Self::default();
        limit.set(limit_bps);
        limit
    }

    pub(crate) fn set(&self, limit_bps: Option<u64>) {
        let value = limit_bps.map_or(0, |limit| limit.max(1));
        self.0.bps.store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Option<u64> {
        Some(self.0.bps.load(Ordering::Relaxed)).filter(|limit| *limit > 0)
    }
}

/// Creates limited controllers for new connections.
pub(crate) struct LimitedFactory {
    pub(crate) limit: RateLimit,
    pub(crate) header_bytes: u64,
}

impl ControllerFactory for LimitedFactory {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let mut config = Bbr3Config::default();
        config.initial_window(INITIAL_WINDOW_BYTES);
        Box::new(Limited {
            inner: Arc::new(config).build(now, mtu),
            road: Road::new(now),
            share: Arc::new(Share::new(self.limit.clone())),
            header_bytes: self.header_bytes,
            mtu,
            rtt_min: Duration::MAX,
        })
    }
}

/// Returns the rate that a path could carry, in bits per second, as its controller estimates it.
fn could_carry(metrics: &ControllerMetrics) -> u64 {
    let pacing = metrics.pacing_rate.map(|rate| rate.saturating_mul(8));
    metrics
        .bandwidth_estimate
        .filter(|rate| *rate > 0)
        .or(pacing)
        .unwrap_or(1)
}

/// A controller whose pacing rate never exceeds the limit.
#[derive(Debug)]
struct Limited {
    inner: Box<dyn Controller>,
    road: Road,
    share: Arc<Share>,
    header_bytes: u64,
    mtu: u16,
    rtt_min: Duration,
}

impl Limited {
    /// Returns the time of an acknowledgement. The library reads the clock, then drains the socket:
    /// packets that arrived in between are reported too early, possibly even before the packets
    /// that they acknowledge were sent. BBR would then assume a path without latency, and keep four
    /// packets in flight for ten seconds.
    fn acked_at(&mut self, said: Instant, sent: Instant) -> Instant {
        let at = said.max(Instant::now());
        self.rtt_min = self.rtt_min.min(at.saturating_duration_since(sent));
        at
    }

    /// Returns the limit in bytes of UDP payload per second, which is what the pacer counts.
    fn payload_rate(&self, limit_bps: u64) -> u64 {
        let mtu = u64::from(self.mtu);
        let payload = u128::from(limit_bps / 8) * u128::from(mtu);
        let rate = payload / u128::from(mtu + self.header_bytes);
        u64::try_from(rate).unwrap_or(u64::MAX).max(1)
    }

    /// Returns the limit in bytes of UDP payload per second, if the limit and not the path sets the
    /// rate.
    fn in_force(&self, metrics: &ControllerMetrics) -> Option<u64> {
        let limit = self.payload_rate(self.share_bps(metrics)?);
        let road = metrics.bandwidth_estimate? / 8;
        (road as f64 >= limit as f64 * LIMIT_REACHED).then_some(limit)
    }

    /// Returns this path's part of the limit, in bits per second.
    fn share_bps(&self, metrics: &ControllerMetrics) -> Option<u64> {
        self.share.of_limit(could_carry(metrics))
    }

    /// Records an acknowledgement, and returns whether the limit held the rate down: such a rate
    /// says as little about the path as one held down by the application.
    fn note_ack(&mut self, now: Instant, bytes: u64, rtt: Duration) -> bool {
        self.road.on_ack(now, bytes, rtt, self.rtt_min);
        let metrics = self.inner.metrics();
        self.share.set(could_carry(&metrics));
        self.in_force(&metrics).is_some()
    }

    /// Returns the target rate, in bytes of UDP payload per second.
    fn target(&self, metrics: &ControllerMetrics) -> Option<u64> {
        let rate = metrics
            .pacing_rate
            .map(|rate| (rate as f64 * self.road.yielding()) as u64);
        match self.share_bps(metrics) {
            Some(limit) => {
                let limit = self.payload_rate(limit);
                Some(rate.map_or(limit, |rate| rate.min(limit)))
            }
            None => rate,
        }
    }
}

impl Controller for Limited {
    fn on_sent(&mut self, now: Instant, bytes: u64, largest_pn: u64) {
        self.inner.on_sent(now, bytes, largest_pn);
    }

    fn on_packet_sent(&mut self, now: Instant, bytes: u16, pn: u64) {
        let metrics = self.inner.metrics();
        // Data that BBR's probes leave unsent under a limit is owed too.
        if let Some(rate) = self.in_force(&metrics).or(self.target(&metrics)) {
            self.road.on_sent(now, bytes.into(), rate);
        }
        self.inner.on_packet_sent(now, bytes, pn);
    }

    fn on_cwnd_limited(&mut self) {
        self.inner.on_cwnd_limited();
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        pn: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        let now = self.acked_at(now, sent);
        let app_limited = self.note_ack(now, bytes, rtt.get()) || app_limited;
        self.inner.on_ack(now, sent, bytes, pn, app_limited, rtt);
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest_packet_num_acked: Option<u64>,
    ) {
        self.inner
            .on_end_acks(now, in_flight, app_limited, largest_packet_num_acked);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        is_persistent_congestion: bool,
        is_ecn: bool,
        lost_bytes: u64,
        largest_lost_pn: u64,
    ) {
        if is_persistent_congestion || is_ecn || self.road.is_congested() {
            self.inner.on_congestion_event(
                now,
                sent,
                is_persistent_congestion,
                is_ecn,
                lost_bytes,
                largest_lost_pn,
            );
        }
    }

    fn on_packet_lost(&mut self, lost_bytes: u16, pn: u64, now: Instant) {
        if self.road.on_lost(now, lost_bytes.into()) {
            self.inner.on_packet_lost(lost_bytes, pn, now);
        }
    }

    fn on_spurious_congestion_event(&mut self) {
        self.inner.on_spurious_congestion_event();
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = new_mtu;
        self.inner.on_mtu_update(new_mtu);
    }

    fn on_ack_frequency_update(&mut self, threshold: u64, max_ack_delay: Duration) {
        self.inner.on_ack_frequency_update(threshold, max_ack_delay);
    }

    fn window(&self) -> u64 {
        (self.inner.window() as f64 * self.road.yielding()) as u64
    }

    fn metrics(&self) -> ControllerMetrics {
        let mut metrics = self.inner.metrics();
        metrics.pacing_rate = self
            .target(&metrics)
            .map(|rate| (rate as f64 * self.road.make_up()) as u64);
        metrics
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self {
            inner: self.inner.clone_box(),
            road: self.road.clone(),
            share: self.share.clone(),
            header_bytes: self.header_bytes,
            mtu: self.mtu,
            rtt_min: self.rtt_min,
        })
    }

    fn initial_window(&self) -> u64 {
        self.inner.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pacing_rate_follows_the_limit() {
        let limit = RateLimit::new(Some(80_000_000));
        let factory = Arc::new(LimitedFactory {
            limit: limit.clone(),
            header_bytes: 28,
        });
        let mut controller = factory.build(Instant::now(), 1200);
        controller.on_mtu_update(1452);
        let rate = controller.metrics().pacing_rate.unwrap();
        assert_eq!(rate, 10_000_000 * 1452 / 1480);
        limit.set(Some(8_000_000));
        let rate = controller.clone_box().metrics().pacing_rate.unwrap();
        assert_eq!(rate, 1_000_000 * 1452 / 1480);
        limit.set(None);
        assert!(controller.metrics().pacing_rate.unwrap() > 1_000_000);
    }

    #[test]
    fn paths_divide_a_limit_by_their_rates_and_a_path_that_is_gone_gives_its_part_back() {
        let limit = RateLimit::new(Some(30_000_000));
        let [fast, slow] = [40_000_000, 20_000_000].map(|rate| {
            let share = Share::new(limit.clone());
            assert_eq!(
                share.of_limit(rate),
                Some(30_000_000),
                "no other path is known"
            );
            (share, rate)
        });
        for (share, rate) in [&fast, &slow] {
            share.set(*rate);
        }
        assert_eq!(fast.0.of_limit(fast.1), Some(20_000_000));
        assert_eq!(slow.0.of_limit(slow.1), Some(10_000_000));
        // A path may have more than it could carry, so that its estimate can grow.
        limit.set(Some(120_000_000));
        assert_eq!(slow.0.of_limit(slow.1), Some(40_000_000));
        drop(fast);
        assert_eq!(slow.0.of_limit(slow.1), Some(120_000_000));
        limit.set(None);
        assert_eq!(slow.0.of_limit(slow.1), None);
    }

    /// A controller with a known path that records its calls.
    #[derive(Debug, Clone)]
    struct Known {
        bandwidth_bps: u64,
        losses: Arc<AtomicU64>,
    }

    impl Controller for Known {
        fn on_congestion_event(
            &mut self,
            _now: Instant,
            _sent: Instant,
            _is_persistent_congestion: bool,
            _is_ecn: bool,
            _lost_bytes: u64,
            _largest_lost_pn: u64,
        ) {
            self.losses.fetch_add(1, Ordering::Relaxed);
        }

        fn on_mtu_update(&mut self, _new_mtu: u16) {}

        fn window(&self) -> u64 {
            1 << 20
        }

        fn metrics(&self) -> ControllerMetrics {
            let mut metrics = ControllerMetrics::default();
            metrics.pacing_rate = Some(self.bandwidth_bps / 8);
            metrics.bandwidth_estimate = Some(self.bandwidth_bps);
            metrics
        }

        fn clone_box(&self) -> Box<dyn Controller> {
            Box::new(self.clone())
        }

        fn initial_window(&self) -> u64 {
            1 << 20
        }

        fn into_any(self: Box<Self>) -> Box<dyn Any> {
            self
        }
    }

    fn known(bandwidth_bps: u64, limit_bps: u64) -> (Limited, Known) {
        let known = Known {
            bandwidth_bps,
            losses: Arc::default(),
        };
        let limited = Limited {
            inner: Box::new(known.clone()),
            road: Road::new(Instant::now()),
            share: Arc::new(Share::new(RateLimit::new(Some(limit_bps)))),
            header_bytes: 28,
            mtu: 1452,
            rtt_min: Duration::from_millis(80),
        };
        (limited, known)
    }

    #[test]
    fn the_limit_is_not_taken_for_the_road() {
        let rtt = Duration::from_millis(80);
        for (bandwidth_bps, held_down) in [(19_500_000, true), (10_000_000, false)] {
            let (mut limited, _) = known(bandwidth_bps, 20_000_000);
            let noted = limited.note_ack(Instant::now(), 1400, rtt);
            assert_eq!(noted, held_down);
        }
    }

    #[test]
    fn what_the_clock_said_too_early_makes_no_road_shorter() {
        let (mut limited, _) = known(10_000_000, 20_000_000);
        let rtt = Duration::from_millis(20);
        let sent = Instant::now().checked_sub(rtt).unwrap();
        let said = sent.checked_sub(Duration::from_millis(1)).unwrap();
        assert!(limited.acked_at(said, sent) >= sent + rtt);
        assert!(limited.rtt_min >= rtt);
        // A correct time is accepted.
        let said = sent + Duration::from_secs(60);
        assert_eq!(limited.acked_at(said, sent), said);
    }

    #[test]
    fn chance_losses_are_kept_from_the_controller_and_others_are_not() {
        let rtt = Duration::from_millis(80);
        let (mut limited, known) = known(10_000_000, 20_000_000);
        let now = Instant::now();
        for _ in 0..99 {
            limited.note_ack(now, 1400, rtt);
        }
        let losses = || known.losses.load(Ordering::Relaxed);
        limited.on_packet_lost(1400, 99, now);
        limited.on_congestion_event(now, now, false, false, 1400, 99);
        assert_eq!(losses(), 0);
        limited.on_congestion_event(now, now, true, false, 1400, 99);
        limited.on_congestion_event(now, now, false, true, 0, 99);
        assert_eq!(losses(), 2);
        for pn in 100..110 {
            limited.on_packet_lost(1400, pn, now);
        }
        limited.on_congestion_event(now, now, false, false, 14_000, 109);
        assert_eq!(losses(), 3);
    }
}
