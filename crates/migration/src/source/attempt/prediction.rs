//! The prediction of a departure that is under way, what becomes of it, and the time that remains.

use crate::source::attempt::SourceAttempt;
use crate::source::prediction::{Asking, Holds, Predicted, predict};
use crate::status::predictions::Figures;
use longhaul_api::{PredictedRange, RegionProgress};
use longhaul_engine::forecast::Sent;
use longhaul_protocol::BLOCK_SIZE;
use longhaul_transport::LinkRate;
use std::time::Duration;

/// Time after which a prediction is made even if the link's rate is not known, without round trips.
const PREDICTED_WITHIN: Duration = Duration::from_secs(2);
/// Round trips in it: a new connection needs about ten until its rate no longer grows.
const PREDICTED_ROUND_TRIPS: u32 = 10;
/// The part of the blocks with content about which the destination answers before a prediction is
/// made: the first ones are of blocks that change seldom.
const ANSWERED_MIN: f64 = 0.5;
/// Round trips for which a link must have been full until its rate counts.
const FILLS_ROUND_TRIPS: f64 = 8.0;
/// Time for which a rate must have been used before it counts, in seconds.
const KNOWN_AFTER_S: f64 = 0.5;
/// A rate below this part of the one known from before counts when as much has been sent as the
/// latter carries in [`SLOWER_AFTER_S`].
const SLOWER: f64 = 0.7;
const SLOWER_AFTER_S: f64 = 2.0;
/// Factors to the likely rate of a link whose rate still grows.
const GROWING: [f64; 3] = [0.9, 1.5, 3.0];
/// The ends of the remaining time relative to its middle, if no prediction was made.
const REMAINING_UNSURE: [f64; 2] = [0.6, 1.7];
/// The same, at least.
const REMAINING_MIN: [f64; 2] = [0.85, 1.2];

impl SourceAttempt {
    /// Returns the rate of the link, in bytes per second: that of this move, or that known from
    /// before.
    fn rate_known(&self) -> Option<LinkRate> {
        let sent = self.wire_bytes_now().0 as f64;
        let before = self.task.known_rate;
        let rtt = self.session.as_ref().map(|session| session.control.rtt());
        let fills_s = rtt.unwrap_or_default().as_secs_f64() * FILLS_ROUND_TRIPS;
        // A move that begins with digests fills no link. So a rate counts when it has carried
        // something, and one far below that known from before when it has carried more.
        let counts = |now: &LinkRate| match before {
            Some(before) if now.likely < SLOWER * before.likely => {
                sent > before.likely * fills_s.max(SLOWER_AFTER_S)
            }
            _ => sent > now.likely * fills_s.max(KNOWN_AFTER_S),
        };
        let rate = self.gauge.known().filter(counts).or(before)?;
        let limit = self
            .limit_bps()
            .map_or(f64::INFINITY, |limit| limit as f64 / 8.0);
        let LinkRate { low, likely, high } = rate;
        let [low, likely, high] = [low, likely, high].map(|rate| rate.min(limit));
        Some(LinkRate { low, likely, high })
    }

    /// Returns what is known of the link, if its rate is not.
    fn rate_so_far(&self) -> Option<LinkRate> {
        let seen = self.gauge.so_far().map(|rate| rate.likely);
        let seen = seen.or_else(|| self.task.source.link_rate(&self.task.host))?;
        let [low, likely, high] = GROWING.map(|factor| factor * seen);
        Some(LinkRate { low, likely, high })
    }

    /// Returns what the destination has of the guest, as far as it has answered.
    fn holds(&self) -> Holds {
        let (found, missing) = self.task.sending.engine().known_content();
        match (self.task.keeps, found + missing) {
            (false, _) => Holds::Nothing,
            (true, 0) => Holds::Unknown,
            (true, _) => Holds::Counted(found, missing),
        }
    }

    /// Reports a prediction once: as soon as the link and the guest are known, or with what is
    /// known when that takes too long, or when the guest is about to be stopped (`last`).
    pub(crate) fn predict(&mut self, last: bool) {
        let look = *self.task.look.borrow_and_update();
        self.task.sending.engine().compares_for(look.comparison());
        let looking = self.task.look.has_changed().is_ok();
        if self.predicted.is_some() || (!last && looking) {
            return;
        }
        let rtt = self.session.as_ref().map(|session| session.control.rtt());
        let patience = PREDICTED_WITHIN + rtt.unwrap_or_default() * PREDICTED_ROUND_TRIPS;
        let holds = self.holds();
        let known = self.rate_known();
        let answered = holds.answered(look.used_blocks(self.task.sampled_disks));
        let enough = known.is_some() && answered >= ANSWERED_MIN;
        if !last && !enough && self.now() < patience {
            return;
        }
        let task = &self.task;
        let migration = self.entry().migration();
        let asking = Asking {
            guest: task.offer.guest.name.clone(),
            source: task.source.parts.config.name.clone(),
            host: task.host.clone(),
            strategy: migration.strategy,
            may_follow: task.may_follow,
            downtime: task.downtime,
            rate: known.or_else(|| self.rate_so_far()),
            rtt,
            early_release: migration.asked.early_release,
            keep_memory: migration.asked.keep_memory,
            convergence: migration.asked.convergence,
            look,
            disks: task.sampled_disks,
            holds,
            returns: task.source.came_from(&task.offer.guest.name, &task.host),
            sent: Some(Sent {
                elapsed_s: self.entry().elapsed().as_secs_f64(),
                sending_s: self.now().as_secs_f64(),
                bytes: self.wire_bytes_now().0 as f64,
                stops: last,
            }),
        };
        tracing::debug!(migration = %task.offer.migration, ?asking, "what a move is predicted by");
        let predicted = predict(&asking, &task.source.predictions);
        if let Some(note) = &predicted.shown.note {
            tracing::warn!(migration = %task.offer.migration, "{note}");
        }
        let shown = predicted.shown.clone();
        self.predicted = Some(predicted);
        self.entry()
            .report_with(|report| report.predicted = Some(shown));
    }

    /// Compares the figures of a completed move with their prediction, and learns from them. A move
    /// whose link was interrupted says nothing about the next one.
    pub(super) fn judge_prediction(&self) {
        self.entry()
            .report_with(|report| report.judged = report.judge());
        let report = self.entry().report();
        if let Some(rate) = self.rate_known().filter(|_| self.limit_bps().is_none()) {
            self.task.source.note_link(&self.task.host, rate);
        }
        let learn = self.predicted.as_ref().and_then(|it| it.learn.clone());
        let Some((kind, predicted)) = learn else {
            return;
        };
        let figures = (report.link_bytes, report.total_ms, report.downtime_ms);
        let (Some(bytes), Some(total_ms), Some(downtime_ms)) = figures else {
            return;
        };
        if self.interruptions > 0 || report.strategy != kind.strategy {
            return;
        }
        let was = Figures {
            link_bytes: bytes as f64,
            total_ms: total_ms as f64,
            downtime_ms,
        };
        self.task.source.predictions.add(kind, predicted, was);
    }

    /// Estimates the time until everything is sent, in milliseconds. Memory and disks count by
    /// their pending blocks and their own samples. `None` while the link's rate is not known.
    pub(super) fn remaining(&self, regions: &[RegionProgress]) -> Option<PredictedRange> {
        let rate = self.rate_known().filter(|rate| rate.likely > 0.0)?;
        let memory = self.task.look.borrow().memory;
        let engine = self.task.sending.engine();
        let (in_flight, written) = (engine.in_flight_bytes(), engine.remaining_bytes(self.now()));
        let first = engine.pass_number() <= 1 || self.draining.is_some();
        drop(engine);
        let missing = match self.holds() {
            Holds::Nothing => 1.0,
            Holds::Unknown => 0.5,
            Holds::Sampled(found, missing) | Holds::Counted(found, missing) => {
                missing as f64 / (found + missing).max(1) as f64
            }
        };
        let (mut bytes, mut work_s) = (written as f64, 0.0);
        if let Some(memory) = memory.filter(|_| first) {
            let of = |disk: bool| regions.iter().filter(move |region| region.disk == disk);
            let pending = |disk| of(disk).map(|region| region.blocks_pending).sum::<u64>() as f64;
            let blocks = of(false).map(|region| region.blocks_total).sum::<u64>() as f64;
            let disks = self.task.outbound.disks().iter();
            let allocated = disks.map(|disk| disk.offered.allocated_bytes).sum::<u64>();
            let allocated = allocated as f64 / BLOCK_SIZE as f64;
            let parts = [
                (Some(memory), pending(false) / blocks.max(1.0)),
                (self.task.sampled_disks, pending(true) / allocated.max(1.0)),
            ];
            bytes = in_flight as f64;
            for (sampled, part) in parts {
                let Some(sampled) = sampled else { continue };
                bytes += sampled.sent_bytes.likely * missing * part.min(1.0);
                work_s += sampled.work_s * part.min(1.0);
            }
        }
        let likely_s = (bytes / rate.likely).max(work_s);
        let [low, high] = self.predicted.as_ref().map_or(REMAINING_UNSURE, ends);
        let ms = |factor: f64| (likely_s * factor * 1e3) as u64;
        Some(PredictedRange {
            low: ms(low),
            likely: ms(1.0),
            high: ms(high),
        })
    }
}

/// Returns the ends of the remaining time relative to its middle: as uncertain as the predicted
/// time.
fn ends(predicted: &Predicted) -> [f64; 2] {
    let Some(total) = predicted.shown.total_ms.filter(|total| total.likely > 0) else {
        return REMAINING_UNSURE;
    };
    let part = |end: u64| end as f64 / total.likely as f64;
    let [low, high] = REMAINING_MIN;
    [part(total.low).min(low), part(total.high).max(high)]
}
