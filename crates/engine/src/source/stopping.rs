//! Decides when the guest stops, and predicts what the stop would cost now.

use super::{Class, Downtime, Outpaced, Region, Source, Unseen};
use crate::predict::{self, Blocks, Link, travel_time};
use crate::stop::{AfterPass, Rule, StopReason, Wish};
use longhaul_protocol::BLOCK_SIZE;
use std::time::Duration;

/// The source's request for the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Send: there are pending blocks.
    Send,
    /// Wait for acknowledgements: there is nothing to send until then.
    Wait,
    /// Read a pass: find out what the guest has written since the last one.
    ReadPass,
    /// Stop the guest.
    Stop(StopReason),
    /// The guest is stopped and every block has been sent.
    Complete,
}

/// The shortest time between passes: each costs the source's QEMU a search for written pages.
pub(super) const PASS_MIN: Duration = Duration::from_millis(20);
/// The same while the stop waits for something other than their report.
const PASS_WAITING: Duration = Duration::from_millis(100);
/// The same while the stop waits for a burst of writes to the disks, which may take long: the
/// blocks that each pass finds are sent. The time is shorter when the stop would otherwise take too
/// long.
const PASS_BEFORE_BURST: Duration = Duration::from_secs(1);

/// Limit on the time that the stop waits for a destination whose disks are slow to make received
/// data durable, over the whole migration.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);

/// Limit on the time for which optional blocks are held back meanwhile, and after which the likely
/// downtime decides.
const HELD_FOR_SYNC: Duration = Duration::from_secs(5);

/// The stop waits for the link's queue while the guest writes at most this share of the link's
/// rate.
const WAIT_WRITE_SHARE: f64 = 0.8;

/// Limit on the time that the stop waits for the queue of memory that follows.
const QUEUE_PATIENCE: Duration = Duration::from_secs(1);

/// The time for which something was waited for, with interruptions.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waited {
    before: Duration,
    since: Option<Duration>,
}

impl Waited {
    fn so_far(&self, now: Duration) -> Duration {
        let lately = self.since.map(|since| now.saturating_sub(since));
        self.before + lately.unwrap_or_default()
    }

    fn goes_on(&mut self, now: Duration) {
        self.since.get_or_insert(now);
    }

    fn pauses(&mut self, now: Duration) {
        self.before = self.so_far(now);
        self.since = None;
    }
}

/// Rate at which QEMU's stream is read through a local socket, and its content dropped, in bytes
/// per second: what a stop costs of memory that follows.
const READ_HERE_BYTES_PER_S: f64 = 500e6;

impl Source {
    /// Returns what should happen next.
    pub fn advise(&mut self, now: Duration) -> Advice {
        if self.frozen {
            self.look_at_drain(now);
            return self.advise_frozen();
        }
        let listed = self.regions.iter().filter(|region| region.is_listed());
        let written = listed.map(|region| region.written_blocks).sum();
        self.rhythm.look(now, written);
        self.leaves_disks = self.leaves_disks(now);
        let in_step = self.follow_mirrors();
        if self.sendable() {
            self.background_held = false;
            return Advice::Send;
        }
        let ready = in_step && self.pass.number > 0 && self.pass.read;
        let advice = match ready {
            true => self.judge(now),
            false => Advice::Wait,
        };
        if advice == Advice::Wait && self.background_is_sendable() {
            return Advice::Send;
        }
        advice
    }

    fn advise_frozen(&self) -> Advice {
        let late = |region: &Region| region.is_written_late();
        let open = !self.closed && self.regions.iter().any(late);
        if self.draining {
            let wanted = self.pending(Class::Wanted) > 0;
            let left = self.pending_blocks() > 0 && self.may_send_left();
            return match wanted || left {
                true => Advice::Send,
                false => Advice::Wait,
            };
        }
        match (self.sendable(), self.encoding) {
            (true, _) => Advice::Send,
            (false, 0) if !open => Advice::Complete,
            (false, _) => Advice::Wait,
        }
    }

    fn judge(&mut self, now: Duration) -> Advice {
        if self.pushes_memory() || self.waits_for_ahead(now) {
            // The stop that they waited for did not come: QEMU began its migration again.
            self.background_held = false;
            return Advice::Wait;
        }
        if let Some(advice) = self.further_pass(now) {
            self.background_held = false;
            return advice;
        }
        if self.memory_may_follow && self.outpaced().is_some() {
            self.let_memory_follow();
        }
        let downtime = self.predicted_downtime(now);
        let predicted = downtime.at_most;
        let Wish {
            rule,
            downtime: limit,
            ..
        } = self.stop.wish();
        let hot = self.promised(|region| region.map.pending(Class::Hot));
        // A guest for which waiting has not helped is not kept moving for the sake of the bound.
        let synced_for = self.sync_waited.so_far(now);
        let decides = match self.stop.too_fast_since().is_some() || synced_for >= HELD_FOR_SYNC {
            true => downtime.likely,
            false => predicted,
        };
        let fits = rule == Rule::Predicted && decides <= limit;
        let known = self.pass.unseen.is_some() || self.written.lately().is_some();
        let mut before_burst = false;
        if self.regions.iter().any(Region::is_listed) {
            // Optional blocks in the link's queue count, and can be waited for; for a limited time,
            // so can the destination's sync of them.
            let left = self.left_blocks(now);
            let alone = self.switchover_time(left, 0).at_most;
            let durable = alone.saturating_sub(self.sync_at_most());
            let short = alone <= limit || (durable <= limit && synced_for < HELD_FOR_SYNC);
            before_burst = rule == Rule::Predicted && short && known && self.waits_for_burst(now);
            // Blocks sent during the wait for a burst can be waited for when it begins.
            let pushes = before_burst && !self.leaves_disks;
            self.background_held = rule == Rule::Predicted && short && !pushes;
            if self.background_held && !fits && !self.flights.is_empty() {
                return Advice::Wait;
            }
        }
        if !fits && hot.all() > 0.0 && !self.hot_allowed && !self.pass.judged {
            let too_much = self.switchover_time(hot, self.queued_bytes()).at_most > limit;
            self.hot_allowed = too_much || !rule.defers_hot();
            if self.hot_allowed {
                return Advice::Send;
            }
        }
        self.hot_allowed = false;
        if known && fits && !before_burst {
            return match self.waiting_helps(now) {
                true => Advice::Wait,
                false => Advice::Stop(StopReason::WithinLimit),
            };
        }
        let waits = known && !before_burst && self.waits_for_disks(now, predicted, limit);
        if known && !before_burst && !waits && !self.pass.judged {
            self.pass.judged = true;
            let after = self.after_pass(now, predicted);
            let reason = self.stop.pass(&after);
            if self.memory_may_follow && self.stop.is_settled() {
                self.let_memory_follow();
                return Advice::Wait;
            }
            if let Some(reason) = reason {
                self.pass.put_off = rule == Rule::Predicted && self.waits_for_burst(now);
                if !self.pass.put_off {
                    return Advice::Stop(reason);
                }
            }
        }
        let pause = match before_burst {
            true => PASS_BEFORE_BURST,
            false if waits || self.pass.put_off => PASS_WAITING,
            false => PASS_MIN,
        };
        let young = now.saturating_sub(self.pass.started_at) < pause;
        if young {
            Advice::Wait
        } else {
            Advice::ReadPass
        }
    }

    /// Returns whether memory that may follow has yet to be sent once: all that the guest has not
    /// written since. QEMU begins passes by itself, so their number says nothing about it.
    fn pushes_memory(&self) -> bool {
        let pushes = |region: &Region| {
            let pushed = region.pushes() && !region.fills() && !region.is_written_late();
            pushed && region.map.pending(Class::Cold) > 0
        };
        self.regions.iter().any(pushes)
    }

    /// Returns whether passes report blocks of memory that has to be there at the switchover.
    fn promises_memory(&self) -> bool {
        let mut memory = self.regions.iter().filter(|it| !it.is_written_late());
        memory.any(Region::is_promised)
    }

    /// Returns how long the stopped guest waits for QEMU to name the written blocks of memory that
    /// follows, whose content does not travel then.
    fn read_here(&self) -> Duration {
        if self.promises_memory() {
            return Duration::ZERO;
        }
        let unseen = self.unseen_now();
        let blocks = unseen.written_blocks.saturating_add(unseen.unread_blocks);
        let bytes = blocks as f64 * BLOCK_SIZE as f64;
        Duration::try_from_secs_f64(bytes / READ_HERE_BYTES_PER_S).unwrap_or(Duration::MAX)
    }

    /// Returns whether the guest is about to overwrite blocks that it would have to fetch if it
    /// moved now.
    fn waits_for_burst(&mut self, now: Duration) -> bool {
        let Some((left, link)) = self.left_of_disks() else {
            return false;
        };
        let costs = &self.costs;
        let fetch = |written: u64| costs.fetch_time(written.min(left), link);
        self.rhythm.waits(now, fetch)
    }

    /// Returns whether optional blocks are not sent ahead, as long as others have to be sent or the
    /// next burst is near, because the guest usually writes so much that it would overwrite most of
    /// them, and sending them would postpone the stop.
    fn leaves_disks(&self, now: Duration) -> bool {
        let of_disks = self.left_of_disks();
        of_disks.is_some_and(|(left, link)| {
            let fetch = |written: u64| self.costs.fetch_time(written.min(left), link);
            self.rhythm.spoils(now, fetch)
        })
    }

    /// Returns the number of optional blocks that are not there, and the link, if it was measured.
    fn left_of_disks(&self) -> Option<(u64, Link)> {
        let listed = self.regions.iter().filter(|region| region.is_listed());
        let left = listed.map(|region| region.map.pending_total()).sum();
        self.link.map(|link| (left, link))
    }

    /// Returns whether only the destination's disks keep the guest from being stopped. That
    /// condition passes: they mostly process data that arrived earlier.
    fn waits_for_disks(&mut self, now: Duration, predicted: Duration, limit: Duration) -> bool {
        let by_rule = self.stop.wish().rule == Rule::Predicted;
        let without = predicted.saturating_sub(self.sync_at_most());
        if !by_rule || self.sync.is_zero() || without > limit {
            self.sync_waited.pauses(now);
            return false;
        }
        self.sync_waited.goes_on(now);
        self.sync_waited.so_far(now) < SYNC_PATIENCE
    }

    /// A sync may have just begun when the last one is requested.
    fn sync_at_most(&self) -> Duration {
        self.sync * 2
    }

    /// Returns the input of the stop rule.
    fn after_pass(&self, now: Duration, downtime: Duration) -> AfterPass {
        let left = self.left_blocks(now);
        let sent = &self.sent;
        let uncompressed = left.all() * BLOCK_SIZE as f64;
        AfterPass {
            now,
            left_blocks: left.all() as u64,
            left_bytes: self.costs.likely(left) as u64,
            downtime,
            uncompressed: self
                .link
                .map_or(Duration::MAX, |link| travel_time(uncompressed, link)),
            sent_blocks: sent.blocks(),
            all_blocks: self.all_blocks(),
        }
    }

    /// Returns whether a slightly later stop would have a shorter downtime: the link's queue
    /// shrinks faster than the guest writes.
    fn waiting_helps(&mut self, now: Duration) -> bool {
        let Some(link) = self.link else { return false };
        let mut mirrors = self.regions.iter().filter_map(|it| it.mirror.as_ref());
        if mirrors.any(|mirror| mirror.is_holding()) {
            // As soon as one write has arrived, the guest issues the next one.
            return false;
        }
        let in_the_pipe = link.rate_bytes_per_s * link.rtt.as_secs_f64();
        let mut written = self.write_rate();
        let queued_bytes = match self.promises_memory() {
            true => link.queued_bytes,
            // What was sent of memory that follows stands before the device state. No more is sent
            // meanwhile, and what the guest writes of it need not travel before.
            false => {
                let since = *self.queue_since.get_or_insert(now);
                if !self.background_held || now.saturating_sub(since) > QUEUE_PATIENCE {
                    return false;
                }
                written.by_passes = 0.0;
                self.in_flight_bytes()
            }
        };
        queued_bytes as f64 > in_the_pipe
            && self.costs.likely(written) < WAIT_WRITE_SHARE * link.rate_bytes_per_s
    }

    /// Returns the predicted downtime if the guest were stopped now.
    pub fn predicted_downtime(&self, now: Duration) -> Downtime {
        self.switchover_time(self.left_blocks(now), self.queued_bytes())
    }

    fn queued_bytes(&self) -> u64 {
        self.link.map_or(0, |link| link.queued_bytes)
    }

    fn switchover_time(&self, blocks: Blocks, queued_bytes: u64) -> Downtime {
        let Some(link) = self.link else {
            return Downtime {
                likely: Duration::MAX,
                at_most: Duration::MAX,
            };
        };
        let overhead = self.switch_overhead + self.comparison + self.read_here();
        let overhead = overhead + link.rtt.mul_f64(1.5);
        // Encoding and sending overlap: the slower of both counts.
        let work = self.costs.work(blocks);
        let time = |bytes: f64, sync: Duration| {
            let travels = travel_time(bytes + queued_bytes as f64, link);
            travels.max(work).saturating_add(overhead + sync)
        };
        Downtime {
            likely: time(self.costs.likely(blocks), self.sync),
            at_most: time(self.costs.at_most(blocks), self.sync_at_most()),
        }
    }

    /// Returns the rates of a guest that is known to write faster than the link carries: then
    /// sending more does not shorten the downtime. Before everything was sent once neither rate is
    /// known well.
    pub fn outpaced(&self) -> Option<Outpaced> {
        let link_bytes_per_s = self.link?.rate_bytes_per_s;
        let written_bytes_per_s = self.written_bytes_per_s();
        let known = self.pass.number > 1 && self.sent.blocks() >= self.all_blocks();
        (known && written_bytes_per_s > link_bytes_per_s).then_some(Outpaced {
            written_bytes_per_s,
            link_bytes_per_s,
        })
    }

    /// Returns for how long it has been known that the requested downtime cannot be met.
    pub fn too_fast_for(&self, now: Duration) -> Option<Duration> {
        let since = self.stop.too_fast_since()?;
        Some(now.saturating_sub(since))
    }

    /// Returns the blocks that would have to travel after a stop: pending ones, and an estimate of
    /// those written since the pass was made.
    pub(super) fn left_blocks(&self, now: Duration) -> Blocks {
        let mut left = self.promised(|region| region.map.pending_total() + region.kept_blocks());
        if self.promises_memory() {
            left.by_passes =
                (left.by_passes + self.unseen_blocks(now)).min(self.all_blocks() as f64);
        }
        left
    }

    /// Returns how many written blocks no pass has reported yet.
    pub(super) fn unseen_blocks(&self, now: Duration) -> f64 {
        // The count is some time old, and the guest has kept writing.
        let counted = self.unseen_now();
        let since = now.saturating_sub(counted.at).as_secs_f64();
        let written = counted.written_blocks as f64 + self.write_rate().by_passes * since;
        written + counted.unread_blocks as f64
    }

    /// Sums a count over the regions that must be there.
    fn promised(&self, count: impl Fn(&Region) -> u64) -> Blocks {
        let mut blocks = Blocks::default();
        for region in self.regions.iter().filter(|region| region.is_promised()) {
            let of_its_kind = match region.is_written_late() {
                true => &mut blocks.by_writes,
                false => &mut blocks.by_passes,
            };
            *of_its_kind += count(region) as f64;
        }
        blocks
    }

    /// Returns the rate of the guest's writes after encoding, in bytes per second.
    pub fn written_bytes_per_s(&self) -> f64 {
        self.costs.likely(self.write_rate())
    }

    fn unseen_now(&self) -> Unseen {
        self.pass.unseen.unwrap_or(Unseen {
            at: self.pass.started_at,
            ..Unseen::default()
        })
    }

    /// Returns the guest's write rate in blocks per second.
    fn write_rate(&self) -> Blocks {
        let counted = self.unseen_now();
        predict::write_rate(self.written.lately(), counted, self.pass.started_at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_adds_up_over_its_interruptions() {
        let mut waited = Waited::default();
        let at = Duration::from_secs;
        for second in (0..40).step_by(4) {
            waited.goes_on(at(second));
            assert_eq!(waited.so_far(at(second + 1)), at(second / 4 + 1));
            waited.pauses(at(second + 1));
            waited.pauses(at(second + 2));
        }
        assert_eq!(waited.so_far(at(100)), at(10));
    }
}
