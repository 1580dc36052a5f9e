//! The source's side of replication: which blocks are still here, which travel next, and when to
//! stop the guest.
//!
//! ```text
//! written(region, blocks) --> pending --take--> in flight --acknowledged--> at the destination
//!                               ^                   |                              |
//!                               +--- lost, rejected-+----------- written ----------+
//! ```
//!
//! A block is taken out of the index *before* its content is read: a write that comes later is
//! reported later and makes it pending again. So what is sent is never older than what the index
//! says, and content need not be kept: it is read at the moment of sending.

use crate::block_map::{BlockMap, ZERO};
use crate::content_index::ContentIndex;
use crate::gang::Gang;
use crate::predict::{self, Cost, travel_time};
use crate::stop::{AfterPass, Rule, StopReason, StopRule, Wish};
use crate::strategy::{Before, Strategy};
use longhaul_codec::{BlockId, Decision, Digest, Staged};
use longhaul_protocol::limits::REGIONS_MAX;
use longhaul_protocol::message::Acknowledgement;
use longhaul_protocol::{BLOCK_SIZE, BlockRange, MigrationId, RegionId, RegionSpec};
use std::collections::BTreeMap;
use std::time::Duration;

pub use crate::block_map::Class;
pub use crate::predict::{Downtime, Left, Link, Outpaced, Unseen};

/// What cannot be replicated, or what a peer said that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// More regions, or more blocks in them, than this engine counts.
    #[error("{blocks} blocks in {regions} regions are more than one migration can carry")]
    TooLarge {
        /// Number of regions.
        regions: usize,
        /// Blocks in all of them.
        blocks: u64,
    },
    /// A region or block that is not part of this migration.
    #[error("blocks {range:?} of region {region:?} are not part of this migration")]
    Unknown {
        /// The region that was named.
        region: RegionId,
        /// The blocks that were named.
        range: BlockRange,
    },
    /// An acknowledgement for a frame that is not on its way.
    #[error("frame {seq} was acknowledged and is not on its way")]
    NotInFlight {
        /// Its sequence number.
        seq: u64,
    },
    /// More frames than sequence numbers.
    #[error("this migration has sent more frames than can be numbered")]
    Exhausted,
}

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

/// Blocks to be read, encoded and sent as one frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The frame's sequence number.
    pub seq: u64,
    /// The blocks: ascending within each region.
    pub blocks: Vec<BlockId>,
}

/// What has been sent, by kind. Counts are blocks unless they say bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// All zero.
    pub zero_blocks: u64,
    /// Unchanged since it was last sent: not sent again.
    pub same_blocks: u64,
    /// Found in another block.
    pub reference_blocks: u64,
    /// Found in another guest.
    pub shared_blocks: u64,
    /// Sent as they are, or as what has changed of them.
    pub literal_blocks: u64,
    /// Frames as sent, in bytes.
    pub frame_bytes: u64,
    /// Number of frames.
    pub frames: u64,
    /// Blocks that had to be sent again because a reference did not hold.
    pub rejected_blocks: u64,
}

impl Sent {
    /// Blocks of every kind.
    pub fn blocks(&self) -> u64 {
        self.zero_blocks
            + self.same_blocks
            + self.reference_blocks
            + self.shared_blocks
            + self.literal_blocks
    }
}

/// Passes do not follow each other faster than this: each costs the source's QEMU a search for
/// written pages.
const PASS_MIN: Duration = Duration::from_millis(20);

/// Waiting for the link is worth it up to this share of its rate that the guest writes meanwhile.
const WAIT_WRITE_SHARE: f64 = 0.8;

#[derive(Debug)]
struct Region {
    spec: RegionSpec,
    first: u32,
    map: BlockMap,
}

#[derive(Debug)]
struct Flight {
    blocks: Vec<BlockId>,
    /// How many of them are not zero and not known at the destination.
    content_blocks: usize,
    bytes: u64,
    /// Blocks that its references mean.
    pinned: Vec<BlockId>,
}

/// One guest's state on its way out.
pub struct Source {
    strategy: Strategy,
    stop: StopRule,
    regions: Vec<Region>,
    index: ContentIndex,
    references: bool,
    gang: Option<Box<dyn Gang>>,
    flights: BTreeMap<u32, Flight>,
    /// Batches that were taken and are not encoded yet.
    encoding: usize,
    next_seq: u32,
    pass: Pass,
    frozen: bool,
    sent: Sent,
    cost: Cost,
    link: Option<Link>,
    switch_overhead: Duration,
    hot_allowed: bool,
}

#[derive(Debug, Default)]
struct Pass {
    number: u32,
    /// Whether it reports every block, written or not.
    whole: bool,
    /// Blocks that the pass has reported so far.
    reported_blocks: u64,
    /// The time in which they were written; unknown for the first pass, which reports everything.
    interval: Option<Duration>,
    /// Blocks that it has not reported.
    unseen: Option<Unseen>,
    /// Whether it has been read as far as it will be before the next one.
    read: bool,
    /// Whether the stop rule has judged it.
    judged: bool,
    started_at: Duration,
    /// Blocks that the guest writes per second, as the last pass showed.
    dirty_blocks_per_s: Option<f64>,
}

impl Source {
    /// Everything in these regions is to be moved by this strategy, and the guest to be stopped as
    /// is wished. `switch_overhead` is what a switchover takes besides the last blocks and the round
    /// trips: device state, loading, journals.
    pub fn new(
        strategy: Strategy,
        regions: &[RegionSpec],
        wish: Wish,
        switch_overhead: Duration,
    ) -> Result<Self, SourceError> {
        let blocks: u64 = regions.iter().map(|spec| spec.blocks).sum();
        let fits = regions.len() <= REGIONS_MAX && blocks < u64::from(u32::MAX);
        let too_large = SourceError::TooLarge {
            regions: regions.len(),
            blocks,
        };
        let total = usize::try_from(blocks)
            .ok()
            .filter(|_| fits)
            .ok_or(too_large)?;
        let mut first = 0;
        let mut maps = Vec::with_capacity(regions.len());
        for spec in regions {
            let map = BlockMap::new(spec.blocks as usize, spec.starts_zero);
            maps.push(Region {
                spec: spec.clone(),
                first,
                map,
            });
            first += spec.blocks as u32;
        }
        Ok(Self {
            strategy,
            stop: StopRule::new(wish),
            regions: maps,
            index: ContentIndex::new(total),
            references: true,
            gang: None,
            flights: BTreeMap::new(),
            encoding: 0,
            next_seq: 1,
            pass: Pass {
                judged: true,
                // What is sent before the first pass is known to have begun is part of it.
                whole: true,
                ..Pass::default()
            },
            frozen: false,
            sent: Sent::default(),
            cost: Cost::default(),
            link: None,
            switch_overhead,
            hot_allowed: false,
        })
    }

    /// Whether blocks may travel as references to others; they may where nothing is said.
    pub fn use_references(&mut self, references: bool) {
        self.references = references;
    }

    /// Others move to the same destination. This guest begins at this share of its memory.
    pub fn join(&mut self, gang: Box<dyn Gang>, start: f64) {
        self.gang = Some(gang);
        for region in &mut self.regions {
            let index = (region.map.len() as f64 * start) as usize;
            region.map.start_at(index);
        }
    }

    // Inputs.

    /// A pass begins: over what was written since the last one, or over everything (`whole`), as
    /// the first one is.
    pub fn pass_started(&mut self, now: Duration, whole: bool) {
        let interval = now.saturating_sub(self.pass.started_at);
        self.pass = Pass {
            number: self.pass.number + 1,
            whole,
            started_at: now,
            interval: (!whole).then_some(interval),
            dirty_blocks_per_s: self.pass.dirty_blocks_per_s,
            ..Pass::default()
        };
    }

    /// About how many blocks the pass has not reported, where somebody can tell.
    pub fn unseen(&mut self, unseen: Option<Unseen>) {
        self.pass.unseen = unseen;
    }

    /// The pass reports that these blocks were written.
    pub fn written(&mut self, region: RegionId, range: BlockRange) -> Result<(), SourceError> {
        self.pass.reported_blocks += range.count;
        let pass = (!self.pass.whole).then_some(self.pass.number);
        self.region(region, range)?.map.written(range, pass);
        Ok(())
    }

    /// The pass has been read as far as it can be while the guest runs.
    pub fn pass_read(&mut self) {
        if !self.pass.read {
            self.pass.read = true;
            if let Some(interval) = self.pass.interval {
                let seconds = interval.as_secs_f64().max(1e-3);
                self.pass.dirty_blocks_per_s = Some(self.pass.reported_blocks as f64 / seconds);
            }
            let number = self.pass.number;
            self.regions
                .iter_mut()
                .for_each(|region| region.map.pass_ended(number));
        }
    }

    /// The guest is stopped and everything it wrote has been reported.
    pub fn frozen(&mut self) {
        self.frozen = true;
        // It will run at the destination, and others must not build on it; nor it on others, since what
        // does not hold any more would cost a round trip now.
        self.gang = None;
    }

    /// Somebody waits for this block.
    pub fn wanted(&mut self, region: RegionId, block: u64) -> Result<(), SourceError> {
        self.region(region, BlockRange::new(block, 1))?
            .map
            .want(block as usize);
        Ok(())
    }

    /// What the link does at present.
    pub fn link(&mut self, link: Link) {
        self.link = Some(link);
    }

    /// What the link did when it was last looked at.
    pub fn link_now(&self) -> Option<Link> {
        self.link
    }

    /// The destination has applied frames, and could not use some of their blocks.
    pub fn acknowledged(&mut self, message: &Acknowledgement) -> Result<(), SourceError> {
        for (region, range) in &message.rejected {
            self.region(*region, *range)?;
        }
        for (first, count) in &message.applied {
            for seq in *first..first.saturating_add(u64::from(*count)) {
                let unknown = SourceError::NotInFlight { seq };
                let seq = u32::try_from(seq).map_err(|_| unknown.clone())?;
                let flight = self.flights.remove(&seq).ok_or(unknown)?;
                self.unpin(&flight.pinned);
                self.arrived(seq, &flight);
            }
        }
        for (region, range) in &message.rejected {
            self.sent.rejected_blocks += range.count;
            let region = self.region(*region, *range)?;
            range
                .blocks()
                .for_each(|block| region.map.rejected(block as usize));
        }
        Ok(())
    }

    /// The connection is gone: what was not acknowledged is pending again.
    pub fn connection_lost(&mut self) {
        for (seq, flight) in std::mem::take(&mut self.flights) {
            self.unpin(&flight.pinned);
            for id in flight.blocks {
                self.regions[usize::from(id.region.0)]
                    .map
                    .lost(id.block as usize, seq);
            }
        }
    }

    // Sending: take, then decide, then encoded.

    /// Takes the next blocks out of the index. Their content must be read after this call.
    pub fn take(&mut self, max_blocks: usize) -> Result<Option<Batch>, SourceError> {
        if self.sendable().is_none() {
            return Ok(None);
        }
        let seq = self.next_seq;
        let mut blocks = Vec::with_capacity(max_blocks.min(256));
        for class in Class::ALL {
            if class == Class::Hot && !self.may_send_hot() {
                continue;
            }
            for region in &mut self.regions {
                let id = region.spec.id;
                let room = max_blocks - blocks.len();
                region.map.take(class, room, seq, self.frozen, |block| {
                    blocks.push(BlockId { region: id, block });
                });
            }
        }
        if blocks.is_empty() {
            return Ok(None);
        }
        self.next_seq = seq.checked_add(1).ok_or(SourceError::Exhausted)?;
        blocks.sort_unstable();
        self.encoding += 1;
        self.flights.insert(
            seq,
            Flight {
                blocks: blocks.clone(),
                content_blocks: 0,
                bytes: 0,
                pinned: Vec::new(),
            },
        );
        Ok(Some(Batch {
            seq: u64::from(seq),
            blocks,
        }))
    }

    /// Says how each block of a batch is to travel, given what was found in the content that was
    /// read.
    pub fn decide(&mut self, batch: &Batch, staged: &[Staged]) -> Vec<Decision> {
        let seq = batch.seq as u32;
        let mut decisions = Vec::with_capacity(staged.len());
        let mut content_blocks = 0;
        let mut pinned = Vec::new();
        for (id, staged) in batch.blocks.iter().zip(staged) {
            let digest = match staged {
                Staged::Zero => ZERO,
                Staged::Content(digest) => *digest,
            };
            let index = id.block as usize;
            let map = &mut self.regions[usize::from(id.region.0)].map;
            if map.holds(index, &digest) {
                map.skip(index, seq);
                self.sent.same_blocks += 1;
                decisions.push(Decision::Skip);
                continue;
            }
            let (base, whole) = (map.known(index), map.is_whole(index));
            if let (Some(gang), Some(base)) = (&mut self.gang, &base) {
                gang.changed(base, *id);
            }
            map.sent(index, seq, digest);
            content_blocks += usize::from(digest != ZERO);
            decisions.push(if digest == ZERO {
                self.sent.zero_blocks += 1;
                Decision::Zero
            } else if let Some(source) = self.find(&digest).filter(|_| !whole) {
                self.sent.reference_blocks += 1;
                self.regions[usize::from(source.region.0)]
                    .map
                    .pin(source.block as usize);
                pinned.push(source);
                Decision::Reference { source, digest }
            } else if let Some((migration, source)) = self.find_shared(&digest).filter(|_| !whole) {
                self.sent.shared_blocks += 1;
                Decision::Shared {
                    migration,
                    source,
                    digest,
                }
            } else {
                self.sent.literal_blocks += 1;
                match base.filter(|base| *base != ZERO) {
                    Some(base) => Decision::Changed { digest, base },
                    None => Decision::Literal { digest },
                }
            });
        }
        match self.flights.get_mut(&seq) {
            Some(flight) => {
                flight.content_blocks = content_blocks;
                flight.pinned = pinned;
            }
            None => self.unpin(&pinned),
        }
        decisions
    }

    /// The batch has become a frame of so many bytes, or nothing at all if every block was
    /// skipped.
    pub fn encoded(&mut self, batch: &Batch, frame_bytes: Option<usize>) {
        let seq = batch.seq as u32;
        let bytes = frame_bytes.unwrap_or(0) as u64;
        self.encoding -= 1;
        // Of a whole pass only what has content tells what a written block will cost.
        match (self.pass.whole, self.flights.get(&seq)) {
            (true, Some(flight)) => {
                self.cost.add_first(flight.content_blocks as u64, bytes);
            }
            (true, None) => {}
            (false, _) => self.cost.add(batch.blocks.len(), bytes),
        }
        match frame_bytes {
            Some(_) => {
                self.sent.frames += 1;
                self.sent.frame_bytes += bytes;
                if let Some(flight) = self.flights.get_mut(&seq) {
                    flight.bytes = bytes;
                }
            }
            None => {
                if let Some(flight) = self.flights.remove(&seq) {
                    self.unpin(&flight.pinned);
                }
            }
        }
    }

    // Outputs.

    /// What should happen next.
    pub fn advise(&mut self, now: Duration) -> Advice {
        if self.frozen {
            return match (self.sendable(), self.encoding) {
                (Some(_), _) => Advice::Send,
                (None, 0) => Advice::Complete,
                (None, _) => Advice::Wait,
            };
        }
        if self.sendable().is_some() {
            return Advice::Send;
        }
        if self.pass.number == 0 || !self.pass.read {
            return Advice::Wait;
        }
        match self.strategy.before {
            Before::UntilStopRule => self.judge(now),
        }
    }

    fn judge(&mut self, now: Duration) -> Advice {
        let predicted = self.predicted_downtime(now).at_most;
        let Wish {
            rule,
            downtime: limit,
            ..
        } = self.stop.wish();
        let hot = self.pending(Class::Hot);
        let fits = rule == Rule::Predicted && predicted <= limit;
        if !fits && hot > 0 && !self.hot_allowed && !self.pass.judged {
            let too_much = self.switchover_time(hot as f64).at_most > limit;
            self.hot_allowed = too_much || !rule.defers_hot();
            if self.hot_allowed {
                return Advice::Send;
            }
        }
        self.hot_allowed = false;
        let known = self.pass.unseen.is_some() || self.pass.dirty_blocks_per_s.is_some();
        if known && fits {
            return match self.waiting_helps() {
                true => Advice::Wait,
                false => Advice::Stop(StopReason::WithinLimit),
            };
        }
        if known && !self.pass.judged {
            self.pass.judged = true;
            let after = self.after_pass(now, predicted);
            if let Some(reason) = self.stop.pass(&after) {
                return Advice::Stop(reason);
            }
        }
        let young = now.saturating_sub(self.pass.started_at) < PASS_MIN;
        if young {
            Advice::Wait
        } else {
            Advice::ReadPass
        }
    }

    /// What the stop rule is told.
    fn after_pass(&self, now: Duration, downtime: Duration) -> AfterPass {
        let left = self.left_blocks(now);
        let sent = &self.sent;
        let uncompressed = left * BLOCK_SIZE as f64;
        AfterPass {
            now,
            left_blocks: left as u64,
            left_bytes: (left * self.cost.likely()) as u64,
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
        let in_the_pipe = link.rate_bytes_per_s * link.rtt.as_secs_f64();
        let written_bytes_per_s = self.write_rate() * self.cost.likely();
        link.queued_bytes as f64 > in_the_pipe
            && written_bytes_per_s < WAIT_WRITE_SHARE * link.rate_bytes_per_s
    }

    /// How long the guest would stand still if it were stopped now.
    pub fn predicted_downtime(&self, now: Duration) -> Downtime {
        self.switchover_time(self.left_blocks(now))
    }

    fn switchover_time(&self, blocks: f64) -> Downtime {
        let Some(link) = self.link else {
            return Downtime {
                likely: Duration::MAX,
                at_most: Duration::MAX,
            };
        };
        let overhead = self.switch_overhead + link.rtt.mul_f64(1.5);
        let time = |block_cost: f64| {
            let bytes = blocks * block_cost + link.queued_bytes as f64;
            travel_time(bytes, link).saturating_add(overhead)
        };
        Downtime {
            likely: time(self.cost.likely()),
            at_most: time(self.cost.at_most(blocks)),
        }
    }

    /// Whether the guest writes faster than the link carries, as far as is known: then the downtime
    /// gets no shorter by sending on.
    pub fn outpaced(&self) -> Option<Outpaced> {
        let link_bytes_per_s = self.link?.rate_bytes_per_s;
        let written_bytes_per_s = self.write_rate() * self.cost.likely();
        (self.pass.number > 1 && written_bytes_per_s > link_bytes_per_s).then_some(Outpaced {
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
    fn left_blocks(&self, now: Duration) -> f64 {
        // The count is some time old, and the guest has gone on writing.
        let counted = self.unseen_now();
        let since = now.saturating_sub(counted.at).as_secs_f64();
        let written = counted.written_blocks as f64 + self.write_rate() * since;
        let unseen = written + counted.unread_blocks as f64;
        (self.pending_blocks() as f64 + unseen).min(self.all_blocks() as f64)
    }

    /// How many blocks the guest has.
    pub fn all_blocks(&self) -> u64 {
        let lengths = self.regions.iter().map(|region| region.map.len() as u64);
        lengths.sum()
    }

    fn unseen_now(&self) -> Unseen {
        self.pass.unseen.unwrap_or(Unseen {
            at: self.pass.started_at,
            ..Unseen::default()
        })
    }

    /// Blocks that the guest writes per second.
    fn write_rate(&self) -> f64 {
        let (pass, counted) = (&self.pass, self.unseen_now());
        predict::write_rate(pass.dirty_blocks_per_s, counted, pass.started_at)
    }

    /// What a prediction is made of.
    pub fn left(&self) -> Left {
        Left {
            pending_blocks: self.pending_blocks(),
            unseen: self.pass.unseen,
            dirty_blocks_per_s: self.pass.dirty_blocks_per_s,
            block_cost_bytes: self.cost.likely(),
            link: self.link,
        }
    }

    /// How many blocks are pending.
    pub fn pending_blocks(&self) -> u64 {
        self.regions
            .iter()
            .map(|region| region.map.pending_total())
            .sum()
    }

    /// How many bytes are probably still to be sent.
    pub fn remaining_bytes(&self, now: Duration) -> u64 {
        (self.left_blocks(now) * self.cost.likely()) as u64 + self.in_flight_bytes()
    }

    /// How many blocks of each region are pending.
    pub fn pending_by_region(&self) -> Vec<(RegionSpec, u64)> {
        self.regions
            .iter()
            .map(|r| (r.spec.clone(), r.map.pending_total()))
            .collect()
    }

    /// Blocks that the guest wrote per second between the last two passes.
    pub fn dirty_blocks_per_s(&self) -> Option<f64> {
        self.pass.dirty_blocks_per_s
    }

    /// Whether the pass has been read as far as it can be while the guest runs.
    pub fn pass_is_read(&self) -> bool {
        self.pass.read
    }

    /// The number of the pass that is being read, from 1.
    pub fn pass_number(&self) -> u32 {
        self.pass.number
    }

    /// What has been sent so far.
    pub fn sent(&self) -> Sent {
        self.sent
    }

    /// Bytes of frames that are not acknowledged.
    pub fn in_flight_bytes(&self) -> u64 {
        self.flights.values().map(|flight| flight.bytes).sum()
    }

    // Inside.

    fn region(&mut self, id: RegionId, range: BlockRange) -> Result<&mut Region, SourceError> {
        let region = self.regions.get_mut(usize::from(id.0));
        let region = region.filter(|region| range.end() <= region.map.len() as u64);
        region.ok_or(SourceError::Unknown { region: id, range })
    }

    fn pending(&self, class: Class) -> u64 {
        self.regions
            .iter()
            .map(|region| region.map.pending(class))
            .sum()
    }

    fn may_send_hot(&self) -> bool {
        self.frozen || self.hot_allowed
    }

    /// The first class that has blocks which may be sent now.
    fn sendable(&self) -> Option<Class> {
        let classes = Class::ALL.into_iter();
        classes
            .filter(|c| *c != Class::Hot || self.may_send_hot())
            .find(|c| self.pending(*c) > 0)
    }

    fn find(&self, digest: &Digest) -> Option<BlockId> {
        if !self.references {
            return None;
        }
        let found = self.index.find(digest, |global| {
            locate(&self.regions, global).is_some_and(|(region, block)| {
                let index = block as usize;
                region.map.holds(index, digest) && region.map.can_be_meant(index, self.frozen)
            })
        })?;
        let (region, block) = locate(&self.regions, found)?;
        Some(BlockId {
            region: region.spec.id,
            block,
        })
    }

    /// Where another guest has brought this content.
    fn find_shared(&self, digest: &Digest) -> Option<(MigrationId, BlockId)> {
        self.gang.as_ref()?.find(digest)
    }

    fn unpin(&mut self, pinned: &[BlockId]) {
        for id in pinned {
            self.regions[usize::from(id.region.0)]
                .map
                .unpin(id.block as usize);
        }
    }

    fn arrived(&mut self, seq: u32, flight: &Flight) {
        for id in &flight.blocks {
            let region = &mut self.regions[usize::from(id.region.0)];
            let global = region.first + id.block as u32;
            let Some(digest) = region.map.acknowledged(id.block as usize, seq) else {
                continue;
            };
            if digest != ZERO {
                let (regions, index) = (&self.regions, &mut self.index);
                index.insert(&digest, global, |other| holds(regions, other, &digest));
                if let Some(gang) = &mut self.gang {
                    gang.arrived(&digest, *id);
                }
            }
        }
    }
}

/// The region and block that a number over all regions means.
fn locate(regions: &[Region], global: u32) -> Option<(&Region, u64)> {
    let after = regions.partition_point(|region| region.first <= global);
    let region = regions.get(after.checked_sub(1)?)?;
    Some((region, u64::from(global - region.first)))
}

fn holds(regions: &[Region], global: u32, digest: &Digest) -> bool {
    let block = locate(regions, global);
    block.is_some_and(|(region, block)| region.map.holds(block as usize, digest))
}
