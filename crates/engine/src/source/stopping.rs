//! When the guest is to stop, and what that would cost now.

use super::{Class, Downtime, Outpaced, Region, Source, Unseen};
use crate::predict::{self, Blocks, Link, travel_time};
use crate::stop::{AfterPass, Rule, StopReason, Wish};
use longhaul_protocol::BLOCK_SIZE;
use std::time::Duration;

/// What the source would like to happen next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Send: there are blocks that should travel.
    Send,
    /// Nothing to send until acknowledgements come.
    Wait,
    /// Find out what the guest has written since the last pass.
    ReadPass,
    /// Stop the guest.
    Stop(StopReason),
    /// The guest is stopped and every block has been sent.
    Complete,
}

/// Passes do not follow each other faster than this: each costs the source's QEMU a search for
/// written pages.
const PASS_MIN: Duration = Duration::from_millis(20);
/// Nor while something else is waited for than what they report.
const PASS_WAITING: Duration = Duration::from_millis(100);
/// Nor while the guest is to write its disks first, which may take a while: what each pass finds is sent. It is found sooner
/// when the stop would take too long without.
const PASS_BEFORE_BURST: Duration = Duration::from_secs(1);

/// So long the stop waits for a destination whose disks are slow to take what has come.
const SYNC_PATIENCE: Duration = Duration::from_secs(60);

/// So long nothing is sent meanwhile of what need not be there at the stop.
const HELD_FOR_SYNC: Duration = Duration::from_secs(5);

/// Waiting for the link is worth it up to this share of its rate that the guest writes meanwhile.
const WAIT_WRITE_SHARE: f64 = 0.8;

impl Source {
    /// What should happen next.
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
        let predicted = self.predicted_downtime(now).at_most;
        let Wish {
            rule,
            downtime: limit,
            ..
        } = self.stop.wish();
        let hot = self.promised(|region| region.map.pending(Class::Hot));
        let fits = rule == Rule::Predicted && predicted <= limit;
        let known = self.pass.unseen.is_some() || self.written.lately().is_some();
        let mut before_burst = false;
        if self.regions.iter().any(Region::is_listed) {
            // What they have on the link counts, and can be waited for; for a while also what the destination has
            // to make durable of it.
            let left = self.left_blocks(now);
            let alone = self.switchover_time(left, 0).at_most;
            let durable = alone.saturating_sub(self.sync_at_most());
            let waited = self
                .sync_waited_since
                .map_or(Duration::ZERO, |since| now.saturating_sub(since));
            let short = alone <= limit || (durable <= limit && waited < HELD_FOR_SYNC);
            before_burst = rule == Rule::Predicted && short && known && self.waits_for_burst(now);
            // What is sent while a burst is waited for can be waited for when it comes.
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
            return match self.waiting_helps() {
                true => Advice::Wait,
                false => Advice::Stop(StopReason::WithinLimit),
            };
        }
        let waits = known && !before_burst && self.waits_for_disks(now, predicted, limit);
        if known && !before_burst && !waits && !self.pass.judged {
            self.pass.judged = true;
            let after = self.after_pass(now, predicted);
            if let Some(reason) = self.stop.pass(&after) {
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

    /// Whether the guest is about to write anew what it would have to fetch if it went now.
    fn waits_for_burst(&mut self, now: Duration) -> bool {
        let Some((left, link)) = self.left_of_disks() else {
            return false;
        };
        let costs = &self.costs;
        let fetch = |written: u64| costs.fetch_time(written.min(left), link);
        self.rhythm.waits(now, fetch)
    }

    /// Whether the guest usually writes so much that nothing is sent beforehand that need not be there, as long as there
    /// is something that must be, or its next burst is about to come: it would mostly go for nothing, and put the stop off.
    fn leaves_disks(&self, now: Duration) -> bool {
        let of_disks = self.left_of_disks();
        of_disks.is_some_and(|(left, link)| {
            let fetch = |written: u64| self.costs.fetch_time(written.min(left), link);
            self.rhythm.spoils(now, fetch)
        })
    }

    /// The blocks that need not be there at the stop and are not, and the link, where that is known.
    fn left_of_disks(&self) -> Option<(u64, Link)> {
        let listed = self.regions.iter().filter(|region| region.is_listed());
        let left = listed.map(|region| region.map.pending_total()).sum();
        self.link.map(|link| (left, link))
    }

    /// Whether nothing keeps the guest from being stopped but the destination's disks. That passes: what
    /// it takes is mostly what came before.
    fn waits_for_disks(&mut self, now: Duration, predicted: Duration, limit: Duration) -> bool {
        let by_rule = self.stop.wish().rule == Rule::Predicted;
        let without = predicted.saturating_sub(self.sync_at_most());
        if !by_rule || self.sync.is_zero() || without > limit {
            self.sync_waited_since = None;
            return false;
        }
        let since = *self.sync_waited_since.get_or_insert(now);
        now.saturating_sub(since) < SYNC_PATIENCE
    }

    /// One sync may have just begun when the last one is asked for.
    fn sync_at_most(&self) -> Duration {
        self.sync * 2
    }

    /// What the stop rule is told.
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

    /// Whether the guest would stand still for less if it were stopped a little later: what waits
    /// for the link gets less faster than the guest writes.
    fn waiting_helps(&self) -> bool {
        let Some(link) = self.link else { return false };
        let mut mirrors = self.regions.iter().filter_map(|it| it.mirror.as_ref());
        if mirrors.any(|mirror| mirror.is_holding()) {
            // As soon as one write is there, the guest makes the next one.
            return false;
        }
        let in_the_pipe = link.rate_bytes_per_s * link.rtt.as_secs_f64();
        let written_bytes_per_s = self.written_bytes_per_s();
        link.queued_bytes as f64 > in_the_pipe
            && written_bytes_per_s < WAIT_WRITE_SHARE * link.rate_bytes_per_s
    }

    /// How long the guest would stand still if it were stopped now.
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
        let overhead = self.switch_overhead + link.rtt.mul_f64(1.5);
        // Frames are made while others travel: the slower of both counts.
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

    /// Whether the guest writes faster than the link carries, as far as is known: then the downtime
    /// gets no shorter by sending on. Before everything was sent once neither rate is known well.
    pub fn outpaced(&self) -> Option<Outpaced> {
        let link_bytes_per_s = self.link?.rate_bytes_per_s;
        let written_bytes_per_s = self.written_bytes_per_s();
        let known = self.pass.number > 1 && self.sent.blocks() >= self.all_blocks();
        (known && written_bytes_per_s > link_bytes_per_s).then_some(Outpaced {
            written_bytes_per_s,
            link_bytes_per_s,
        })
    }

    /// For how long it has been known that the downtime asked for cannot be kept.
    pub fn too_fast_for(&self, now: Duration) -> Option<Duration> {
        let since = self.stop.too_fast_since()?;
        Some(now.saturating_sub(since))
    }

    /// Blocks that would have to travel after a stop: pending ones, and what the guest has
    /// probably written since the pass was made.
    pub(super) fn left_blocks(&self, now: Duration) -> Blocks {
        // The count is some time old, and the guest has gone on writing.
        let counted = self.unseen_now();
        let since = now.saturating_sub(counted.at).as_secs_f64();
        let written = counted.written_blocks as f64 + self.write_rate().by_passes * since;
        let unseen = written + counted.unread_blocks as f64;
        let mut left = self.promised(|region| region.map.pending_total() + region.kept_blocks());
        left.by_passes = (left.by_passes + unseen).min(self.all_blocks() as f64);
        left
    }

    /// So many blocks of each region that must be there.
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

    /// What the guest writes, as it would be sent, in bytes per second.
    pub fn written_bytes_per_s(&self) -> f64 {
        self.costs.likely(self.write_rate())
    }

    fn unseen_now(&self) -> Unseen {
        self.pass.unseen.unwrap_or(Unseen {
            at: self.pass.started_at,
            ..Unseen::default()
        })
    }

    /// Blocks that the guest writes per second.
    fn write_rate(&self) -> Blocks {
        let counted = self.unseen_now();
        predict::write_rate(self.written.lately(), counted, self.pass.started_at)
    }
}
